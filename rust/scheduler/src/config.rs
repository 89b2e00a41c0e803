//! `SchedulerConfig`: limits and switches (`validate.rs` checks them, once).
use serde::Deserialize;

/// Order of the waiting queue (`serving.md` a.5); priority classes, where enabled, come before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Arrival.
    #[default]
    Fcfs,
    /// Longest matched prefix first.
    Lpm,
    /// Depth-first order of the prefix tree, the subtree that more requests wait for first.
    DfsWeight,
    /// Most prefill tokens processed since arrival per uncached token first.
    Hrrn,
    /// Fewest uncached tokens first.
    ShortestPrefillFirst,
    /// Longest requested output first.
    Lof,
    /// A shuffle that `policy_seed` decides.
    Random,
}

impl Policy {
    /// Whether the order depends on what the prefix cache holds.
    #[must_use]
    pub fn is_cache_aware(self) -> bool {
        matches!(
            self,
            Self::Lpm | Self::DfsWeight | Self::Hrrn | Self::ShortestPrefillFirst
        )
    }

    /// Whether `max_overtake` bounds how often a request is overtaken.
    #[must_use]
    pub fn bounds_overtaking(self) -> bool {
        !matches!(self, Self::Fcfs | Self::Lof)
    }
}

/// Which request gives its pages back first when decode rows lack some.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RetractionPolicy {
    /// The one with the fewest output tokens, then the longest prompt, then the last arrival.
    #[default]
    Length,
    /// The least urgent one first; among equals as `Length`.
    Priority,
    /// The one that costs the fewest recomputed tokens for each page it gives back.
    Cost,
}

/// What leaves the prefix cache first when pages are short; among equals the least recently used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EvictionPolicy {
    /// Least recently used.
    #[default]
    Lru,
    /// Fewest hits.
    Lfu,
    /// What was hit less than twice before the rest.
    Slru,
    /// Oldest insert.
    Fifo,
    /// What the least urgent requests put there.
    Priority,
    /// What costs the least to compute again and was hit the least.
    Cost,
}

impl EvictionPolicy {
    pub(crate) fn of_cache(self) -> dsserve_radix_cache::EvictionPolicy {
        use dsserve_radix_cache::EvictionPolicy as Cache;
        match self {
            Self::Lru => Cache::Lru,
            Self::Lfu => Cache::Lfu,
            Self::Slru => Cache::Slru,
            Self::Fifo => Cache::Fifo,
            Self::Priority => Cache::Priority,
            Self::Cost => Cache::Cost,
        }
    }
}

/// Priorities of requests (`serving.md` a.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent switches of the command line"
)]
pub struct PriorityConfig {
    /// Order by priority first.
    pub enabled: bool,
    /// Small values are the urgent ones.
    pub low_values_first: bool,
    /// Retract running requests for a waiting one that is more urgent.
    pub preemption: bool,
    /// A request is preempted only if it is less urgent by more than this.
    pub preemption_threshold: u32,
    /// Refuse requests that carry a priority while `enabled` is off, instead of ignoring it.
    pub refuse_when_disabled: bool,
}

impl Default for PriorityConfig {
    fn default() -> Self {
        Self {
            enabled: false,
            low_values_first: false,
            preemption: true,
            preemption_threshold: 10,
            refuse_when_disabled: false,
        }
    }
}

/// Limits and switches of a [`Scheduler`](crate::Scheduler).
///
/// Fill in what matters and take the rest from [`SchedulerConfig::default`], which is a small
/// machine: versions of this crate may add fields.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent switches of the command line"
)]
pub struct SchedulerConfig {
    /// Tokens per page; a power of two and a multiple of `stateful_ratio`.
    pub page_size: u32,
    /// Usable pages of the FULL pool (page 0, the dummy, not counted).
    pub num_pages: u32,
    /// Requests that may hold a slot at once. Slots are `1..=max_running_requests`; 0 is padding.
    pub max_running_requests: u32,
    /// Waiting requests past which `submit` rejects; none = unbounded.
    #[serde(default)]
    pub max_queued_requests: Option<u32>,
    /// Rows of one PREFILL step, replay rows included; -1 = no chunking.
    pub chunked_prefill_size: i64,
    /// New prompt tokens of one PREFILL step (a window and a page at least). Without chunking, those
    /// past which no further request joins it.
    #[serde(default = "default_max_prefill_tokens")]
    pub max_prefill_tokens: u32,
    /// Prompts in one PREFILL step; none = as many as fit.
    #[serde(default)]
    pub prefill_max_requests: Option<u32>,
    /// Steps in a row that a partly planned prompt may be passed over for decode rows or, under
    /// `ShortestPrefillFirst`, for shorter prompts.
    #[serde(default = "default_max_defer")]
    pub prefill_max_defer: u32,
    /// Longest prompt plus output.
    pub context_length: u32,
    /// Cut prompts that leave no room for their output, instead of refusing them.
    #[serde(default)]
    pub auto_truncate: bool,
    /// The model's sliding window.
    pub window: u32,
    /// Ids at or above are refused.
    pub vocab_size: u32,
    /// Rebuild encoder windows after a hit. Off: no prefix hits, since windows are not in the tree.
    #[serde(default = "default_true")]
    pub encoder_replay: bool,
    /// Run the decoder half on the last rows of a prompt only.
    #[serde(default = "default_true")]
    pub decoder_replay: bool,
    /// Keep finished pages for later requests.
    #[serde(default = "default_true")]
    pub radix_cache: bool,
    /// What leaves the prefix cache first.
    #[serde(default)]
    pub eviction_policy: EvictionPolicy,
    /// Order of the waiting queue.
    #[serde(default)]
    pub policy: Policy,
    /// Seed of [`Policy::Random`].
    #[serde(default)]
    pub policy_seed: u64,
    /// Times a request may be overtaken before it becomes the head of its class.
    #[serde(default = "default_max_overtake")]
    pub max_overtake: u32,
    /// Steps a request waits at most for another one that computes a prefix of it.
    #[serde(default = "default_hold")]
    pub inbatch_prefix_hold: u32,
    /// Priorities.
    #[serde(default)]
    pub priority: PriorityConfig,
    /// Share the machine over tenants: deficit round robin within a priority class.
    #[serde(default)]
    pub fair: bool,
    /// How long a request may wait for its first admission.
    #[serde(default)]
    pub waiting_timeout_us: Option<u64>,
    /// How long a request may take from its first admission to its end.
    #[serde(default)]
    pub running_timeout_us: Option<u64>,
    /// Who gives pages back first.
    #[serde(default)]
    pub retraction_policy: RetractionPolicy,
    /// Let decode rows ride along in PREFILL steps.
    #[serde(default)]
    pub mixed_chunk: bool,
    /// DECODE steps that follow a PREFILL step at least, while anything runs.
    #[serde(default)]
    pub prefill_decode_interval: u32,
    /// Whether a PREFILL step may be planned while another one is in flight.
    #[serde(default = "default_true")]
    pub overlap_prefills: bool,
    /// Scales the share of the output limits that admission reserves.
    #[serde(default = "default_conservativeness")]
    pub conservativeness: f64,
    /// Steps that may be planned and not applied.
    #[serde(default = "default_steps")]
    pub max_steps_in_flight: u32,
    /// Draft tokens of a VERIFY row (the anchor not counted); 0 = no speculation.
    #[serde(default)]
    pub draft_len: u32,
    /// Largest compression ratio that keeps state between rows (2 for V4.1).
    #[serde(default = "default_ratio")]
    pub stateful_ratio: u32,
    /// Ids that end an output unless `ignore_eos`.
    #[serde(default)]
    pub eos_token_ids: Vec<u32>,
    /// Attention-DP group that the plans are for.
    #[serde(default)]
    pub group_id: u32,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            page_size: 16,
            num_pages: 1024,
            max_running_requests: 16,
            max_queued_requests: None,
            chunked_prefill_size: 1024,
            max_prefill_tokens: default_max_prefill_tokens(),
            prefill_max_requests: None,
            prefill_max_defer: default_max_defer(),
            context_length: 4096,
            auto_truncate: false,
            window: 128,
            vocab_size: 129_280,
            encoder_replay: true,
            decoder_replay: true,
            radix_cache: true,
            eviction_policy: EvictionPolicy::Lru,
            policy: Policy::Fcfs,
            policy_seed: 0,
            max_overtake: default_max_overtake(),
            inbatch_prefix_hold: default_hold(),
            priority: PriorityConfig::default(),
            fair: false,
            waiting_timeout_us: None,
            running_timeout_us: None,
            retraction_policy: RetractionPolicy::Length,
            mixed_chunk: false,
            prefill_decode_interval: 0,
            overlap_prefills: true,
            conservativeness: default_conservativeness(),
            max_steps_in_flight: default_steps(),
            draft_len: 0,
            stateful_ratio: default_ratio(),
            eos_token_ids: Vec::new(),
            group_id: 0,
        }
    }
}

fn default_true() -> bool {
    true
}
fn default_max_prefill_tokens() -> u32 {
    16_384
}
fn default_max_defer() -> u32 {
    4
}
fn default_max_overtake() -> u32 {
    512
}
fn default_hold() -> u32 {
    2
}
fn default_conservativeness() -> f64 {
    1.0
}
fn default_steps() -> u32 {
    2
}
fn default_ratio() -> u32 {
    2
}

impl SchedulerConfig {
    /// Rows a PREFILL step may have; without chunking, enough for the longest prompt in one step.
    #[must_use]
    pub fn prefill_rows(&self) -> u32 {
        u32::try_from(self.chunked_prefill_size).unwrap_or_else(|_| {
            self.context_length.max(self.max_prefill_tokens)
                + self.replay_window()
                + self.mixed_rows()
        })
    }

    /// Columns of the page table: pages of the longest request, overshoot of drafts included.
    #[must_use]
    pub fn columns(&self) -> u32 {
        (self.context_length + self.overshoot()).div_ceil(self.page_size)
    }

    /// Positions past its last token that steps in flight may write for a request.
    ///
    /// Without drafts there are none: the step after the last token is not planned.
    #[must_use]
    pub fn overshoot(&self) -> u32 {
        if self.draft_len == 0 {
            0
        } else {
            self.max_steps_in_flight * (self.draft_len + 1)
        }
    }

    /// Whether prompts are matched against and kept in the tree.
    #[must_use]
    pub fn uses_tree(&self) -> bool {
        self.radix_cache && self.encoder_replay
    }

    /// Rows that every PREFILL step has for prompts, however many decode rows ride along.
    pub(crate) fn least_prefill_rows(&self) -> u32 {
        self.prefill_rows() - self.mixed_rows()
    }

    /// New tokens of one prompt that a step may have: `max_prefill_tokens`, but never so few that a
    /// last chunk, which has a window of rows, could not go on. Without chunking there is no bound.
    pub(crate) fn chunk_tokens(&self) -> u32 {
        if self.chunked_prefill_size == -1 {
            return u32::MAX;
        }
        self.max_prefill_tokens.max(self.window + self.page_size)
    }

    /// Decode rows that may ride along in a PREFILL step.
    pub(crate) fn mixed_rows(&self) -> u32 {
        if self.mixed_chunk {
            self.max_running_requests
        } else {
            0
        }
    }

    /// Replay rows of a request that hit the cache.
    pub(crate) fn replay_window(&self) -> u32 {
        if self.encoder_replay {
            self.window
        } else {
            0
        }
    }
}
