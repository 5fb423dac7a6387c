#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| tensorcall_fuzz::bodies::store(data));
