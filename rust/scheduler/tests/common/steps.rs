//! Steps of a bare scheduler, for tests of single rules.
use dsserve_scheduler::{Policy, Scheduler, SchedulerConfig, StepOutputs, StepPlan, STATUS_OK};

/// A scheduler with nothing to do.
pub fn scheduler(config: SchedulerConfig) -> Scheduler {
    Scheduler::new(config).unwrap()
}

/// Plans a step and gives every sampling request id 5.
pub fn run_step(scheduler: &mut Scheduler) -> (StepPlan, StepOutputs) {
    let plan = scheduler.next_plan(0).unwrap().expect("a step").clone();
    let outputs = apply(scheduler, &plan);
    (plan, outputs)
}

/// Gives every sampling request of a step id 5.
pub fn apply(scheduler: &mut Scheduler, plan: &StepPlan) -> StepOutputs {
    let ids: Vec<i32> = plan
        .samples
        .iter()
        .map(|s| if *s == 1 { 5 } else { -1 })
        .collect();
    let status = vec![STATUS_OK; ids.len()];
    scheduler.apply(plan.step_id, &ids, &status, 0).unwrap()
}

/// One prompt a step, so that the order shows.
pub fn one_by_one(policy: Policy) -> SchedulerConfig {
    SchedulerConfig {
        policy,
        prefill_max_requests: Some(1),
        max_running_requests: 64,
        num_pages: 2_000,
        inbatch_prefix_hold: 0,
        ..super::config()
    }
}

/// Ids in the order of their first admission.
pub fn admissions(s: &mut Scheduler, count: usize) -> Vec<u64> {
    let mut order = Vec::new();
    while order.len() < count {
        let (plan, _) = run_step(s);
        order.extend(plan.admitted);
    }
    order
}
