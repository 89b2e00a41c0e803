#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| dsserve_fuzz::stream_decode::run(data));
