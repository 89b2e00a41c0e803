//! What a request must produce, computed alone and in order.
use dsserve_scheduler::{FinishCode, RequestSpec};

use super::VOCAB;

/// Scrambles a word.
pub fn mix(mut word: u64) -> u32 {
    word = (word ^ (word >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
    word = (word ^ (word >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
    ((word ^ (word >> 33)) & 0x7fff_ffff) as u32
}

/// The fake model: the id that follows `last` (at most 16 ids), whose newest is at `position`.
pub fn next_token(last: &[u32], position: u32) -> u32 {
    let start = last.len().saturating_sub(16);
    let seed = u64::from(position).wrapping_mul(0x9e37_79b9);
    let hash = last[start..].iter().fold(seed, |hash, id| {
        u64::from(mix(hash ^ u64::from(*id))).wrapping_mul(0x1_0001) ^ (hash << 7)
    });
    1 + mix(hash) % (VOCAB - 1)
}

/// Output ids and finish code of a request that runs alone.
pub fn run_alone(spec: &RequestSpec, eos_token_ids: &[u32]) -> (Vec<u32>, FinishCode) {
    let mut tokens = spec.token_ids.clone();
    let prompt_len = tokens.len();
    if spec.max_new_tokens == 0 {
        return (Vec::new(), FinishCode::Length);
    }
    loop {
        let position = u32::try_from(tokens.len() - 1).unwrap();
        let id = next_token(&tokens, position);
        tokens.push(id);
        let output = &tokens[prompt_len..];
        let is_stop =
            spec.stop_token_ids.contains(&id) || (!spec.ignore_eos && eos_token_ids.contains(&id));
        if is_stop && output.len() >= spec.min_new_tokens as usize {
            return (output.to_vec(), FinishCode::StopToken);
        }
        if output.len() == spec.max_new_tokens as usize {
            return (output.to_vec(), FinishCode::Length);
        }
    }
}
