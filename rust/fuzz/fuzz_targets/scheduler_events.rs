#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| dsserve_fuzz::scheduler_events::run(data));
