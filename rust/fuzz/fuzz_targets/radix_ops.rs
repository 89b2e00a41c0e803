#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| dsserve_fuzz::radix_ops::run(data));
