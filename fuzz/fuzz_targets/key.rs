//! Keys, and pairs of endpoint and client: see the property of this name in `ratevault::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| ratevault::fuzzing::key(bytes));
