//! The text of a quota: see the property of this name in `ratevault::fuzzing`.
#![no_main]

libfuzzer_sys::fuzz_target!(|text: &str| ratevault::fuzzing::quota(text));
