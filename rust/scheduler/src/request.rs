//! What a request is given (`RequestSpec`), what it owns and how far it is (`Request`).
use dsserve_radix_cache::{Match, Namespace, PageId, Receipt};

use crate::state::State;

/// A request as the engine submits it.
#[derive(Debug, Clone)]
pub struct RequestSpec {
    /// Identity, unique among the requests that have not ended.
    pub request_id: u64,
    /// The prompt.
    pub token_ids: Vec<u32>,
    /// Output limit; 0 ends the request with `length` at once.
    pub max_new_tokens: u32,
    /// Stop tokens end the request from this output length on.
    pub min_new_tokens: u32,
    /// Whether the model's end-of-sequence ids do not end the request.
    pub ignore_eos: bool,
    /// Further ids that end the request.
    pub stop_token_ids: Vec<u32>,
    /// Urgency; kept for priority scheduling, which orders nothing yet.
    pub priority: i32,
    /// What the prefix cache keeps apart.
    pub namespace: Namespace,
    /// When the request arrived, on the clock of `now_us`.
    pub arrival_us: u64,
    /// Run every row of the prompt through the decoder half.
    pub whole_extend: bool,
}

/// A request in the table: its tokens, its progress and everything it owns.
#[derive(Debug)]
pub(crate) struct Request {
    pub spec: RequestSpec,
    /// Prompt and committed output. Starts as the prompt, moved out of `spec.token_ids`.
    pub tokens: Vec<u32>,
    pub prompt_len: u32,
    pub state: State,
    /// Arrival order; ties of every policy end here.
    pub sequence: u64,
    pub waiting: WaitingInfo,
    /// 0 = none.
    pub slot: u32,
    /// Full pages by column; `[0, tree_len)` tokens belong to the tree, the rest to the request.
    pub pages: Vec<PageId>,
    pub tree_len: u32,
    /// Pins the tree's part of `pages`.
    pub receipt: Option<Receipt>,
    /// Counts admissions, so that results of an earlier one are told apart.
    pub admission: u32,
    pub hit: u32,
    /// Hit of the first admission, which usage reports.
    pub reported_hit: Option<u32>,
    /// Tokens that this admission prefills: prompt and output so far.
    pub prefill_len: u32,
    /// Tokens whose KV is valid after every planned step.
    pub planned_len: u32,
    /// Tokens whose KV is valid after every applied step.
    pub applied_len: u32,
    /// Sampled tokens that planned steps will bring.
    pub pending_tokens: u32,
    /// Last planned step that holds the request; 0 = none.
    pub last_step: u64,
    /// Columns of the device page table that are up to date.
    pub sent_columns: u32,
    pub window_floor: u32,
    pub tail_floor: u32,
}

/// What the queue remembers of a waiting request.
#[derive(Debug, Default)]
pub(crate) struct WaitingInfo {
    /// The last match, valid while the tree is at this version.
    pub matched: Option<(u64, Match)>,
    /// Hit length that cache-aware policies order by; may be stale.
    pub hit: u32,
    /// Tree version of `hit`.
    pub hit_version: Option<u64>,
    /// Steps it was held back for a request with the same prefix.
    pub holds: u8,
    /// The last of them: asking for the same step again is not another one.
    pub held_step: u64,
    /// Times a later request was admitted before it.
    pub overtaken: u32,
}

impl Request {
    pub fn new(mut spec: RequestSpec, sequence: u64) -> Self {
        let tokens = std::mem::take(&mut spec.token_ids);
        Self {
            prompt_len: len_u32(tokens.len()),
            spec,
            tokens,
            state: State::Waiting,
            sequence,
            waiting: WaitingInfo::default(),
            slot: 0,
            pages: Vec::new(),
            tree_len: 0,
            receipt: None,
            admission: 0,
            hit: 0,
            reported_hit: None,
            prefill_len: 0,
            planned_len: 0,
            applied_len: 0,
            pending_tokens: 0,
            last_step: 0,
            sent_columns: 0,
            window_floor: 0,
            tail_floor: 0,
        }
    }

    pub fn len(&self) -> u32 {
        len_u32(self.tokens.len())
    }

    pub fn output_len(&self) -> u32 {
        self.len() - self.prompt_len
    }

    /// Output tokens it may still get beyond those that planned steps will bring.
    pub fn remaining(&self) -> u32 {
        (self.spec.max_new_tokens).saturating_sub(self.output_len() + self.pending_tokens)
    }

    /// Whether the planned steps already bring its last token.
    pub fn ends_by_length(&self) -> bool {
        self.remaining() == 0
    }

    /// Pages of its own: those past the tree's part.
    pub fn private_pages(&self, page_size: u32) -> &[PageId] {
        &self.pages[(self.tree_len / page_size) as usize..]
    }
}

/// Lengths are bounded by the context length, which fits 29 bits.
pub(crate) fn len_u32(len: usize) -> u32 {
    u32::try_from(len).expect("lengths are bounded by the validated context length")
}
