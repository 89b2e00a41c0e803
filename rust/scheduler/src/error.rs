//! The error type of the crate: wrong calls and broken accounting, never a bad request.
use dsserve_radix_cache::CacheError;
use thiserror::Error;

/// What can go wrong in a call of the scheduler.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum SchedulerError {
    /// The configuration holds wrong values; every one is listed.
    #[error("wrong scheduler configuration: {}", .problems.join("; "))]
    Config {
        /// One line for each wrong value: name, value, limit.
        problems: Vec<String>,
    },
    /// `next_plan` was called with as many steps in flight as allowed.
    #[error("{in_flight} steps are in flight, at most {limit} may be: apply one first")]
    TooManySteps {
        /// Steps planned and not applied.
        in_flight: usize,
        /// `max_steps_in_flight`.
        limit: usize,
    },
    /// `apply` was called for a step that is not the oldest in flight.
    #[error("step {step_id} cannot be applied: the oldest step in flight is {expected:?}")]
    WrongStep {
        /// The step given.
        step_id: u64,
        /// The step whose results are due.
        expected: Option<u64>,
    },
    /// The result arrays do not match the requests of the step.
    #[error("step {step_id} has {expected} requests, the results have {given}")]
    WrongResultLen {
        /// The step given.
        step_id: u64,
        /// Requests in the step.
        expected: usize,
        /// Results given.
        given: usize,
    },
    /// A row brings fewer or more ids than its drafts allow.
    #[error("request {request_id} of step {step_id} can bring 1 to {most} ids, not {given}")]
    WrongRunLen {
        /// The step given.
        step_id: u64,
        /// The request.
        request_id: u64,
        /// Drafts of its row, and one.
        most: u32,
        /// Ids given.
        given: u32,
    },
    /// The prefix cache refused an operation: a bug of the scheduler.
    #[error("prefix cache: {0}")]
    Cache(#[from] CacheError),
    /// The accounting is broken: a bug of the scheduler.
    #[error("invariant {name} broken: {detail}")]
    Invariant {
        /// Name of the invariant (`S1`, `S2`, ..).
        name: &'static str,
        /// What was found.
        detail: String,
    },
}

/// Result of the calls of this crate.
pub type Result<T> = std::result::Result<T, SchedulerError>;
