//! What a request is given (`RequestSpec`), what it owns and how far it is (`Request`).
use dsserve_radix_cache::{Match, Namespace, PageId, Receipt};

use crate::queue::Place;
use crate::state::{Lifecycle, Role, State};

/// A request as the engine submits it.
///
/// Fill in what matters and take the rest from [`RequestSpec::default`]: versions of this crate may
/// add fields.
#[derive(Debug, Clone, Default)]
pub struct RequestSpec {
    /// Identity, unique among the requests that have not ended.
    pub request_id: u64,
    /// The prompt.
    pub token_ids: Vec<u32>,
    /// Length of the prompt, if `token_ids` is only the beginning of it: the rest comes through
    /// [`extend_prompt`](crate::Scheduler::extend_prompt). None = it is whole.
    pub prompt_len: Option<u32>,
    /// Output limit; 0 ends the request with `length` at once.
    pub max_new_tokens: u32,
    /// Stop tokens end the request from this output length on.
    pub min_new_tokens: u32,
    /// Whether the model's end-of-sequence ids do not end the request.
    pub ignore_eos: bool,
    /// Further ids that end the request.
    pub stop_token_ids: Vec<u32>,
    /// Urgency where priorities are enabled; none is the least urgent.
    pub priority: Option<i32>,
    /// Whom the request is for, where the machine is shared fairly.
    pub tenant: u64,
    /// When the request is of no use any more, on the clock of `now_us`.
    pub deadline_us: Option<u64>,
    /// Whether its sampling waits for a mask (a grammar): marked in the plan's `samples`.
    pub needs_mask: bool,
    /// Draft tokens of its VERIFY rows, at most the configuration's; none = as many as that, 0 = its
    /// anchor alone.
    pub draft_len: Option<u32>,
    /// What the prefix cache keeps apart.
    pub namespace: Namespace,
    /// When the request arrived, on the clock of `now_us`.
    pub arrival_us: u64,
    /// Run every row of the prompt through the decoder half.
    pub whole_extend: bool,
    /// Take no more tokens than that from the prefix cache, because the rows from there on are wanted
    /// (log-probabilities of the prompt); none = as many as it holds.
    pub max_cached_len: Option<u32>,
}

/// A request in the table: its tokens, its progress and everything it owns.
#[derive(Debug)]
pub(crate) struct Request {
    pub spec: RequestSpec,
    /// Prompt and committed output. Starts as the prompt, moved out of `spec.token_ids`.
    pub tokens: Vec<u32>,
    pub prompt_len: u32,
    pub life: Lifecycle,
    /// Arrival order; ties of every policy end here.
    pub sequence: u64,
    pub waiting: WaitingInfo,
    /// 0 = none.
    pub slot: u32,
    /// Full pages by column; `[0, tree_len)` tokens belong to the tree, the rest to the request.
    pub pages: Vec<PageId>,
    pub tree_len: u32,
    /// Pages set aside for the rest of its prompt: each chunk takes its own of them.
    pub owed_pages: u32,
    /// Pins the tree's part of `pages`.
    pub receipt: Option<Receipt>,
    /// Counts admissions, so that results of an earlier one are told apart.
    pub admission: u32,
    pub hit: u32,
    /// Hit of the first admission, which usage reports.
    pub reported_hit: Option<u32>,
    /// Tokens that this admission prefills: prompt and output so far.
    pub prefill_len: u32,
    /// Tokens whose KV is valid after every planned step; with drafts in flight, at most so many.
    pub planned_len: u32,
    /// Tokens whose KV is valid after every applied step.
    pub applied_len: u32,
    /// Planned steps that will bring tokens.
    pub pending_steps: u32,
    /// Tokens they will bring at most.
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
    /// Where it stands in the queue.
    pub place: Place,
    /// The last match; good while its node is in the tree and `is_stale` is not set.
    pub matched: Option<Match>,
    /// The tree grew where the match ends, or there was no match yet.
    pub is_stale: bool,
    /// Name of the page that would make the match longer, under which the tree's growth is told.
    pub watch: Option<u64>,
    /// Hit length that cache-aware policies order by; may be behind.
    pub hit: u32,
    /// Tokens it adds to the scheduler's count of queued tokens.
    pub counted: u32,
    /// Prefill tokens that all requests had processed when this one arrived.
    pub prefilled_before: u64,
    /// Steps it was held back for a request with the same prefix.
    pub holds: u32,
    /// The last of them: asking for the same step again is not another one.
    pub held_step: u64,
    /// Times a later request was admitted before it.
    pub overtaken: u32,
}

impl Request {
    /// A request on its way into the queue.
    pub fn new(mut spec: RequestSpec, sequence: u64) -> Self {
        let tokens = std::mem::take(&mut spec.token_ids);
        Self {
            prompt_len: spec.prompt_len.unwrap_or(len_u32(tokens.len())),
            spec,
            tokens,
            life: Lifecycle::received(Role::Unified),
            sequence,
            waiting: WaitingInfo::default(),
            slot: 0,
            pages: Vec::new(),
            tree_len: 0,
            owed_pages: 0,
            receipt: None,
            admission: 0,
            hit: 0,
            reported_hit: None,
            prefill_len: 0,
            planned_len: 0,
            applied_len: 0,
            pending_steps: 0,
            pending_tokens: 0,
            last_step: 0,
            sent_columns: 0,
            window_floor: 0,
            tail_floor: 0,
        }
    }

    pub fn state(&self) -> State {
        self.life.state()
    }

    pub fn len(&self) -> u32 {
        len_u32(self.tokens.len())
    }

    pub fn output_len(&self) -> u32 {
        self.len().saturating_sub(self.prompt_len)
    }

    /// Output tokens it may still get beyond those that planned steps will bring at most.
    pub fn remaining(&self) -> u32 {
        (self.spec.max_new_tokens).saturating_sub(self.output_len() + self.pending_tokens)
    }

    /// Output tokens it may still get beyond those that planned steps will bring at least.
    pub fn remaining_at_most(&self) -> u32 {
        (self.spec.max_new_tokens).saturating_sub(self.output_len() + self.pending_steps)
    }

    /// Whether the planned steps bring its last token for certain.
    pub fn ends_by_length(&self) -> bool {
        self.remaining_at_most() == 0
    }

    /// Tokens with KV when its output has its full length: the last token needs none.
    pub fn most_computed(&self) -> u32 {
        self.prompt_len + self.spec.max_new_tokens.saturating_sub(1)
    }

    /// Tokens to prefill that the cache does not hold, as far as is known while it waits.
    pub fn uncached_len(&self) -> u32 {
        (self.len() - self.waiting.hit).max(1)
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
