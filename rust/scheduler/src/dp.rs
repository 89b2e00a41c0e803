//! Attention data parallelism: the record that groups exchange each step, and what all know after that
//! (`serving.md` a.12). Pure functions, no exchange.
use thiserror::Error;

use crate::plan::{Phase, StepPlan};

/// What one group tells the others about its next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent votes of the record"
)]
pub struct DpRecord {
    /// Number of the exchange, the same for all groups.
    pub step: u64,
    /// What the group has to run.
    pub kind: Phase,
    /// Rows.
    pub rows: u32,
    /// Rows whose logits are needed.
    pub logits_rows: u32,
    /// Encoder replay rows.
    pub replay_rows: u32,
    /// Rows that run the decoder half.
    pub tail_rows: u32,
    /// Whether the group could replay a decode graph.
    pub decode_graph: bool,
    /// Whether it could replay a prefill graph.
    pub prefill_graph: bool,
    /// Whether it could replay a draft graph.
    pub draft_graph: bool,
    /// Whether its step can be cut into two batches.
    pub two_batches: bool,
    /// Rows of the first of them.
    pub split: u32,
    /// Longest prefix of its requests.
    pub longest_prefix: u32,
    /// Whether all it runs is a health probe.
    pub is_probe: bool,
}

/// Bytes of a record on the wire: its step and eight words, little-endian.
pub const DP_RECORD_BYTES: usize = 40;

/// Records that cannot belong to one step.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DpError {
    /// There is no group.
    #[error("no records to combine")]
    Empty,
    /// A group is at another step.
    #[error("group {group} is at step {found}, group 0 at step {expected}")]
    Step {
        /// The group.
        group: usize,
        /// Step of group 0.
        expected: u64,
        /// Its step.
        found: u64,
    },
    /// A record contradicts itself.
    #[error("the record of group {group} is wrong: {what}")]
    Record {
        /// The group.
        group: usize,
        /// What is wrong.
        what: &'static str,
    },
    /// Bytes that are no record.
    #[error("no record: {what}")]
    Bytes {
        /// What is wrong.
        what: &'static str,
    },
}

/// What all groups know after an exchange.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(
    clippy::struct_excessive_bools,
    reason = "independent outcomes of the votes"
)]
pub struct DpStep {
    /// Number of the exchange.
    pub step: u64,
    /// Kind of the step for every group: PREFILL if any has prompts, VERIFY if any has drafts.
    pub kind: Phase,
    /// Rows of each group.
    pub rows: Vec<u32>,
    /// Rows of each group whose logits are needed.
    pub logits_rows: Vec<u32>,
    /// Decoder rows of each group.
    pub tail_rows: Vec<u32>,
    /// Encoder replay rows of each group.
    pub replay_rows: Vec<u32>,
    /// Everybody replays a decode graph.
    pub decode_graph: bool,
    /// Everybody replays a prefill graph.
    pub prefill_graph: bool,
    /// Everybody replays a draft graph.
    pub draft_graph: bool,
    /// Everybody runs two batches.
    pub two_batches: bool,
    /// Rows of the first batch of each group.
    pub splits: Vec<u32>,
    /// Longest prefix of any request.
    pub longest_prefix: u32,
    /// Nothing but health probes runs.
    pub is_probe: bool,
}

impl DpRecord {
    /// The record of a group with nothing to run; it agrees to everything.
    #[must_use]
    pub fn idle(step: u64) -> Self {
        Self {
            step,
            kind: Phase::Idle,
            rows: 0,
            logits_rows: 0,
            replay_rows: 0,
            tail_rows: 0,
            decode_graph: true,
            prefill_graph: true,
            draft_graph: true,
            two_batches: true,
            split: 0,
            longest_prefix: 0,
            is_probe: true,
        }
    }

    /// The record of a group that runs `plan` at exchange `step`, without graphs or two batches.
    #[must_use]
    pub fn of_plan(step: u64, plan: &StepPlan) -> Self {
        Self {
            kind: plan.phase,
            rows: plan.num_rows(),
            logits_rows: plan.totals.sampling_rows + plan.totals.draft_tokens,
            replay_rows: plan.totals.replay_rows,
            tail_rows: plan.totals.tail_rows,
            decode_graph: false,
            prefill_graph: false,
            draft_graph: false,
            two_batches: false,
            longest_prefix: plan.totals.max_computed_len,
            is_probe: false,
            ..Self::idle(step)
        }
    }

    /// The record's bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; DP_RECORD_BYTES] {
        let flags = [
            self.decode_graph,
            self.prefill_graph,
            self.draft_graph,
            self.two_batches,
            self.is_probe,
        ];
        let bits =
            (flags.iter().enumerate()).fold(0, |bits, (bit, is)| bits | u32::from(*is) << bit);
        let words = [
            self.kind as u32 | bits << 8,
            self.rows,
            self.logits_rows,
            self.replay_rows,
            self.tail_rows,
            self.split,
            self.longest_prefix,
            0,
        ];
        let mut bytes = [0; DP_RECORD_BYTES];
        bytes[..8].copy_from_slice(&self.step.to_le_bytes());
        for (place, word) in bytes[8..].chunks_exact_mut(4).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads a record.
    ///
    /// # Errors
    /// [`DpError::Bytes`] if they are none.
    pub fn from_bytes(bytes: &[u8; DP_RECORD_BYTES]) -> Result<Self, DpError> {
        let word = |index: usize| {
            let at = 8 + 4 * index;
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let mut step = [0; 8];
        step.copy_from_slice(&bytes[..8]);
        let bits = word(0) >> 8;
        let kind = match word(0) & 0xff {
            0 => Phase::Idle,
            1 => Phase::Prefill,
            2 => Phase::Decode,
            3 => Phase::Verify,
            4 => Phase::Prebuilt,
            _ => return Err(DpError::Bytes { what: "the kind" }),
        };
        if bits >> 5 != 0 || word(7) != 0 {
            let what = "bits that have no meaning";
            return Err(DpError::Bytes { what });
        }
        Ok(Self {
            step: u64::from_le_bytes(step),
            kind,
            rows: word(1),
            logits_rows: word(2),
            replay_rows: word(3),
            tail_rows: word(4),
            decode_graph: bits & 1 != 0,
            prefill_graph: bits & 2 != 0,
            draft_graph: bits & 4 != 0,
            two_batches: bits & 8 != 0,
            split: word(5),
            longest_prefix: word(6),
            is_probe: bits & 16 != 0,
        })
    }

    fn problem(&self) -> Option<&'static str> {
        let runs = !matches!(self.kind, Phase::Idle | Phase::Prebuilt);
        let most = self.logits_rows.max(self.replay_rows).max(self.tail_rows);
        let splits = self.two_batches && runs;
        if runs != (self.rows > 0) {
            Some("rows and kind contradict each other")
        } else if most > self.rows {
            Some("more rows of a kind than rows")
        } else if splits && !(0 < self.split && self.split < self.rows) {
            Some("two batches, and one of them is empty")
        } else {
            None
        }
    }
}

impl DpStep {
    /// Combines the records of all groups, in the order of the groups; none where nobody runs.
    ///
    /// Rows become lists, votes are all or nothing, the kind is PREFILL if any group's is.
    ///
    /// # Errors
    /// [`DpError`], naming the group that does not fit.
    pub fn combine(records: &[DpRecord]) -> Result<Option<Self>, DpError> {
        let first = records.first().ok_or(DpError::Empty)?;
        for (group, record) in records.iter().enumerate() {
            if record.step != first.step {
                return Err(DpError::Step {
                    group,
                    expected: first.step,
                    found: record.step,
                });
            }
            if let Some(what) = record.problem() {
                return Err(DpError::Record { group, what });
            }
        }
        let any = |kind: Phase| records.iter().any(|record| record.kind == kind);
        let kind = [Phase::Prefill, Phase::Verify, Phase::Decode];
        let Some(kind) = kind.into_iter().find(|kind| any(*kind)) else {
            return Ok(None);
        };
        let all = |vote: fn(&DpRecord) -> bool| records.iter().all(vote);
        let list = |field: fn(&DpRecord) -> u32| records.iter().map(field).collect();
        let is_idle = |record: &DpRecord| record.rows == 0;
        Ok(Some(Self {
            step: first.step,
            kind,
            rows: list(|record| record.rows),
            logits_rows: list(|record| record.logits_rows),
            tail_rows: list(|record| record.tail_rows),
            replay_rows: list(|record| record.replay_rows),
            decode_graph: kind != Phase::Prefill && all(|record| record.decode_graph),
            prefill_graph: kind == Phase::Prefill && all(|record| record.prefill_graph),
            draft_graph: all(|record| record.draft_graph),
            // Both halves must have rows on every rank.
            two_batches: all(|record| record.two_batches) && !records.iter().any(is_idle),
            splits: list(|record| record.split),
            longest_prefix: records.iter().map(|r| r.longest_prefix).max().unwrap_or(0),
            is_probe: all(|record| record.is_probe),
        }))
    }
}
