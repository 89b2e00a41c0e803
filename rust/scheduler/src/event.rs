//! What comes back from a step and what goes out to the clients.

/// Why a request ended. The numbers are those of the wire protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[repr(u8)]
pub enum FinishCode {
    /// It goes on.
    #[default]
    None = 0,
    /// A stop token.
    StopToken = 1,
    /// A stop string, found by the text bridge.
    StopString = 2,
    /// The output limit.
    Length = 3,
    /// Aborted by the client or an operator.
    Abort = 4,
    /// The sampler reported NaN or an id outside the vocabulary.
    ErrorNan = 5,
    /// It can never continue: the pool is too small.
    ErrorPool = 6,
    /// An illegal state move, a bug.
    ErrorInternal = 7,
    /// Its deadline passed.
    Deadline = 8,
    /// Dropped from a full queue for a more urgent request.
    Dropped = 9,
}

impl FinishCode {
    /// Whether the request ends before its output does.
    #[must_use]
    pub fn is_early(self) -> bool {
        !matches!(
            self,
            Self::None | Self::StopToken | Self::StopString | Self::Length
        )
    }
}

/// Status of a result row: the sampler's ids are good.
pub const STATUS_OK: u8 = 0;
/// Status of a result row: NaN in the logits.
pub const STATUS_NAN: u8 = 1;

/// New tokens and terminal states, an array per field.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct StepOutputs {
    /// \[n\] requests, each at most once.
    pub request_ids: Vec<u64>,
    /// \[n+1\] ranges in `token_ids`.
    pub token_offsets: Vec<u32>,
    /// New output tokens; a stop token is among them.
    pub token_ids: Vec<u32>,
    /// \[n\] [`FinishCode::None`] = goes on.
    pub finish_codes: Vec<FinishCode>,
    /// \[n\] prompt tokens.
    pub prompt_lens: Vec<u32>,
    /// \[n\] tokens of the prompt taken from the cache at first admission.
    pub cached_lens: Vec<u32>,
    /// \[n\] output tokens so far.
    pub output_lens: Vec<u32>,
}

/// One request's part of [`StepOutputs`].
#[derive(Debug, Clone, Copy)]
#[expect(clippy::struct_field_names, reason = "the names of the wire protocol")]
pub(crate) struct Output<'a> {
    pub request_id: u64,
    pub token_ids: &'a [u32],
    pub code: FinishCode,
    pub prompt_len: u32,
    pub cached_len: u32,
    pub output_len: u32,
}

impl StepOutputs {
    /// Number of requests.
    #[must_use]
    pub fn len(&self) -> usize {
        self.request_ids.len()
    }

    /// Whether nothing is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.request_ids.is_empty()
    }

    pub(crate) fn push(&mut self, output: &Output<'_>) {
        if self.token_offsets.is_empty() {
            self.token_offsets.push(0);
        }
        self.request_ids.push(output.request_id);
        self.token_ids.extend_from_slice(output.token_ids);
        self.token_offsets
            .push(crate::request::len_u32(self.token_ids.len()));
        self.finish_codes.push(output.code);
        self.prompt_lens.push(output.prompt_len);
        self.cached_lens.push(output.cached_len);
        self.output_lens.push(output.output_len);
    }
}

/// A request that `submit` refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejection {
    /// The request.
    pub request_id: u64,
    /// Stable code: `context_length_exceeded`, `pool_capacity_exceeded`, `queue_full`,
    /// `invalid_token_id`, `duplicate_request_id`, `empty_prompt`, `invalid_draft_len`,
    /// `priority_disabled`, `deadline_exceeded` (it is over already), `deadline_unreachable` (it would start too late).
    pub code: &'static str,
    /// Value, limit and remedy.
    pub message: String,
}
