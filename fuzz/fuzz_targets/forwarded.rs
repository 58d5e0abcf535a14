//! Peers, trusted proxies and `X-Forwarded-For` lines: see the property of this name in `ratevault::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ratevault::fuzzing::forwarded(bytes));
