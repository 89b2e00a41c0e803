//! Chunk rules at their edges: page 4, window 8 unless said otherwise.
use super::{chunk_end, usable_len, Progress};
use crate::budget::Budget;
use crate::config::SchedulerConfig;

fn config(chunked_prefill_size: i64) -> SchedulerConfig {
    SchedulerConfig {
        page_size: 4,
        num_pages: 64,
        max_running_requests: 4,
        chunked_prefill_size,
        max_prefill_tokens: 64,
        context_length: 200,
        window: 8,
        vocab_size: 10,
        ..SchedulerConfig::default()
    }
}

fn end(prefill_len: u32, hit: u32, computed: u32, replay: u32, rows: i64) -> Option<u32> {
    let progress = Progress {
        prefill_len,
        hit,
        computed,
        replay,
    };
    chunk_end(progress, 4, 8, &Budget::new(&config(rows), 0))
}

/// As `end`, in a step that holds another prompt already.
fn end_behind_another(prefill_len: u32, hit: u32, replay: u32, rows: u32) -> Option<u32> {
    let mut budget = Budget::new(&config(100), 0);
    budget.take_rows(100 - rows, 0);
    let progress = Progress {
        prefill_len,
        hit,
        computed: hit,
        replay,
    };
    chunk_end(progress, 4, 8, &budget)
}

#[test]
fn a_prompt_that_fits_is_one_chunk_of_any_length() {
    assert_eq!(end(13, 0, 0, 0, 13), Some(13));
    assert_eq!(end(1, 0, 0, 0, 12), Some(1));
}

#[test]
fn open_chunks_end_at_a_page() {
    assert_eq!(end(100, 0, 0, 0, 15), Some(12));
    assert_eq!(end(100, 0, 12, 0, 15), Some(24));
}

#[test]
fn the_chunk_before_the_last_is_shortened_to_leave_a_window() {
    // 12 rows would leave 6, fewer than the window.
    assert_eq!(end(18, 0, 0, 0, 12), Some(8));
    assert_eq!(end(18, 0, 8, 0, 12), Some(18));
    assert_eq!(end(20, 0, 0, 0, 12), Some(12), "exactly a window is left");
}

#[test]
fn replay_rows_count_against_the_budget() {
    assert_eq!(end(60, 20, 20, 8, 20), Some(32));
    assert_eq!(end(28, 20, 20, 8, 16), Some(28));
    assert_eq!(end(100, 20, 20, 8, 12), Some(24));
}

#[test]
fn replay_goes_alone_when_neither_it_nor_a_window_fits_beside_the_rest() {
    // 10 uncached tokens, room for 4 beside the replay: an open chunk would leave 6.
    assert_eq!(end(30, 20, 20, 8, 12), Some(20));
    assert_eq!(end(30, 20, 20, 0, 12), Some(30));
}

#[test]
fn a_prompt_waits_rather_than_being_cut_badly() {
    assert_eq!(
        end_behind_another(30, 20, 8, 12),
        None,
        "replay alone only in an empty step"
    );
    assert_eq!(
        end_behind_another(25, 20, 8, 12),
        None,
        "less than a window is one chunk"
    );
    assert_eq!(
        end_behind_another(100, 20, 8, 7),
        None,
        "no room for the replay rows"
    );
    assert_eq!(
        end_behind_another(7, 0, 0, 6),
        None,
        "shorter than the window, cannot be cut"
    );
    assert_eq!(end_behind_another(100, 0, 0, 3), None, "no room for a page");
    assert_eq!(end_behind_another(100, 0, 0, 5), Some(4));
}

#[test]
fn every_prompt_ends_within_the_least_chunk_size() {
    for prefill_len in 1..80 {
        for cached in (0..prefill_len).step_by(4) {
            let config = config(12);
            let hit = usable_len(cached, prefill_len, &config);
            let mut computed = hit;
            let mut replay = hit.min(8);
            for _ in 0..40 {
                let next = end(prefill_len, hit, computed, replay, 12);
                computed = next.expect("an empty step always has room");
                replay = 0;
                if computed == prefill_len {
                    break;
                }
            }
            assert_eq!(computed, prefill_len, "hit {hit} of {prefill_len}");
        }
    }
}

#[test]
fn a_hit_is_whole_pages_of_all_but_the_last_token() {
    let config = config(64);
    assert_eq!(usable_len(40, 40, &config), 36);
    assert_eq!(usable_len(40, 41, &config), 40);
}

#[test]
fn a_hit_of_a_window_or_less_is_refused() {
    let config = config(64);
    assert_eq!(usable_len(8, 60, &config), 0);
    assert_eq!(usable_len(12, 60, &config), 12);
}

#[test]
fn a_hit_is_shortened_when_the_rest_is_less_than_a_window_and_no_step_holds_it_with_the_replay() {
    // 7 uncached rows and 8 of replay are 15: one step of 16 rows holds them, one of 12 does not.
    assert_eq!(usable_len(40, 47, &config(16)), 40);
    assert_eq!(usable_len(40, 47, &config(12)), 36);
}

#[test]
fn the_least_chunk_size_is_a_window_and_a_page() {
    assert!(config(12).validate().is_ok());
    let error = config(11).validate().unwrap_err().to_string();
    assert!(error.contains("chunked_prefill_size is 11"), "{error}");
    let mixed = SchedulerConfig {
        mixed_chunk: true,
        ..config(15)
    };
    assert!(
        mixed.validate().is_err(),
        "decode rows of mixed steps come on top"
    );
    assert!(config(-1).validate().is_ok());
    assert!(config(0).validate().is_err());
}
