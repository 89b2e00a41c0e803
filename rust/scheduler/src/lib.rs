#![doc = include_str!("../README.md")]

mod admit;
mod budget;
mod check;
mod config;
mod counters;
mod decode;
mod error;
mod event;
mod overlap;
mod plan;
mod policy;
mod pool;
mod prefill;
mod queue;
mod request;
mod results;
mod retract;
mod scheduler;
mod state;
mod stats;
mod step;
mod submit;
mod table;

pub use config::{Policy, RetractionPolicy, SchedulerConfig};
pub use counters::Counters;
pub use dsserve_radix_cache::Namespace;
pub use error::{Result, SchedulerError};
pub use event::{FinishCode, Rejection, StepOutputs, STATUS_NAN, STATUS_OK};
pub use plan::{Phase, PlanCapacity, PlanTotals, StepPlan};
pub use pool::{Ownership, PoolUse};
pub use request::RequestSpec;
pub use scheduler::Scheduler;
pub use state::State;
pub use stats::Stats;
