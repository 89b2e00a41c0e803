#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| dsserve_fuzz::encode::run(data));
