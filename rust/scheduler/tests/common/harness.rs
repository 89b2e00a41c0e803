//! Drives a scheduler against the fake device and checks the invariants on the way.
mod plan_checks;

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use dsserve_scheduler::{
    FinishCode, Follower, RequestSpec, Scheduler, SchedulerConfig, StepOutputs, StepPlan,
    STATUS_NAN, STATUS_OK,
};

use super::device::{Device, Touched};
use super::oracle::run_alone;

struct Launched {
    step_id: u64,
    request_ids: Vec<u64>,
    results: Vec<Vec<i32>>,
    touched: Touched,
}

/// What a request must do and has done so far.
pub struct Expected {
    pub spec: RequestSpec,
    pub outputs: Vec<u32>,
    pub code: FinishCode,
    pub seen: Vec<u32>,
    pub ended: Option<FinishCode>,
    pub cached_len: u32,
    /// Ended from outside (abort, stop string, NaN): only a prefix of the output is due.
    pub is_cut: bool,
}

pub struct Harness {
    pub scheduler: Scheduler,
    pub requests: HashMap<u64, Expected>,
    /// Prompt chunks of each request as (start, end, replay rows), over all admissions.
    pub chunks: HashMap<u64, Vec<(i32, i32, i32)>>,
    /// A digest of every plan, to compare runs.
    pub plans: Vec<StepPlan>,
    /// Time that the scheduler is told.
    pub now_us: u64,
    pub device: Device,
    follower: Follower,
    /// Requests that were never admitted, in order of arrival, and how often later ones passed them.
    passed: Vec<(u64, u32)>,
    truth: HashMap<u64, Vec<u32>>,
    launched: VecDeque<Launched>,
    nan_due: HashSet<u64>,
    /// Ids that were not handed over yet, of prompts that are submitted in parts.
    parts: BTreeMap<u64, Vec<u32>>,
    open_prompts: HashSet<u64>,
}

impl Harness {
    pub fn new(config: &SchedulerConfig) -> Self {
        let scheduler = Scheduler::new(config.clone()).unwrap();
        let capacity = scheduler.plan_capacity();
        Self {
            now_us: 0,
            device: Device::new(config, capacity.columns),
            follower: Follower::new(config.group_id, capacity),
            passed: Vec::new(),
            scheduler,
            requests: HashMap::new(),
            chunks: HashMap::new(),
            plans: Vec::new(),
            truth: HashMap::new(),
            launched: VecDeque::new(),
            nan_due: HashSet::new(),
            parts: BTreeMap::new(),
            open_prompts: HashSet::new(),
        }
    }

    /// Submits a request; true if it was accepted.
    pub fn submit(&mut self, spec: RequestSpec) -> bool {
        let whole = spec.token_ids.len();
        self.submit_part(spec, whole)
    }

    /// As `submit`, with the first ids of the prompt only; `feed` brings the rest.
    pub fn submit_part(&mut self, spec: RequestSpec, first: usize) -> bool {
        let mut given = spec.clone();
        let rest = given.token_ids.split_off(first);
        if !rest.is_empty() {
            given.prompt_len = Some(spec.token_ids.len().try_into().unwrap());
        }
        let rejections = self.scheduler.submit(vec![given]);
        if !rejections.is_empty() {
            return false;
        }
        let (outputs, code) = run_alone(&spec, &self.scheduler.config().eos_token_ids);
        let mut truth = spec.token_ids.clone();
        truth.extend(&outputs);
        // A request runs one row past a stop that the CPU has not seen yet.
        let mut longer = spec.clone();
        longer.max_new_tokens = u32::try_from(outputs.len()).unwrap() + 4 + 32;
        longer.ignore_eos = true;
        longer.stop_token_ids.clear();
        truth.truncate(spec.token_ids.len());
        truth.extend(run_alone(&longer, &[]).0);
        self.truth.insert(spec.request_id, truth);
        if rest.is_empty() {
            self.passed.push((spec.request_id, 0));
        } else {
            self.parts.insert(spec.request_id, rest);
        }
        let expected = Expected {
            outputs,
            code,
            seen: Vec::new(),
            ended: None,
            cached_len: 0,
            is_cut: false,
            spec,
        };
        self.requests.insert(expected.spec.request_id, expected);
        self.check();
        true
    }

    /// Hands over the next `count` ids of the oldest prompt that lacks some.
    pub fn feed(&mut self, count: usize) {
        let Some((&id, rest)) = self.parts.iter_mut().next() else {
            return;
        };
        let part: Vec<u32> = rest.drain(..count.min(rest.len())).collect();
        assert_eq!(self.scheduler.extend_prompt(id, &part), None);
        if rest.is_empty() {
            self.parts.remove(&id);
            // It takes its place by the time of its arrival.
            let at = self.passed.partition_point(|(other, _)| *other < id);
            self.passed.insert(at, (id, 0));
        }
        self.check();
    }

    /// Plans and launches a step; false if there was none.
    pub fn launch(&mut self) -> bool {
        let is_idle = self.scheduler.steps_in_flight() == 0 && self.scheduler.has_work();
        let short_of_memory = |harness: &Self| {
            let counters = harness.scheduler.stats().counters;
            counters.retracted - counters.preempted
        };
        let retracted = short_of_memory(self);
        let Some(plan) = self.scheduler.next_plan(self.now_us).unwrap().cloned() else {
            self.check();
            let is_idle = is_idle && self.scheduler.has_work() && self.parts.is_empty();
            let again = self.scheduler.next_plan(self.now_us).unwrap();
            assert_eq!(again, None, "asking again changes nothing");
            // S8: with nothing in flight there is nothing to wait for.
            assert!(!is_idle, "S8: work is left and no step is planned");
            return false;
        };
        self.take_outputs(); // of requests whose time was over
        self.check_plan(&plan);
        self.follower.follow(&plan).expect("S6");
        self.count_passed(&plan.admitted);
        if short_of_memory(self) > retracted && !plan.admitted.is_empty() {
            // A step that retracts admits nobody: this one found nothing to run at first and was
            // planned again. Prompts are all it has.
            let others = plan.request_id.len() - plan.admitted.len();
            assert!(
                others <= 1,
                "only a carried prompt is beside those admitted"
            );
        }
        let (results, touched) = self.device.run(&plan, &self.truth);
        self.check_hazards(&touched);
        self.launched.push_back(Launched {
            step_id: plan.step_id,
            request_ids: plan.request_id.clone(),
            results,
            touched,
        });
        self.plans.push(plan);
        self.check();
        true
    }

    /// Applies the oldest step; false if none is in flight.
    pub fn apply(&mut self) -> bool {
        let Some(step) = self.launched.pop_front() else {
            return false;
        };
        let status: Vec<u8> = (step.request_ids.iter().zip(&step.results))
            .map(|(id, result)| {
                let is_nan = !result.is_empty() && self.nan_due.remove(id);
                if is_nan {
                    STATUS_NAN
                } else {
                    STATUS_OK
                }
            })
            .collect();
        let outputs = if self.scheduler.config().draft_len > 0 {
            let counts = step.results.iter().map(|run| run.len().try_into().unwrap());
            let (counts, ids) = (counts.collect::<Vec<u32>>(), step.results.concat());
            self.scheduler
                .apply_runs(step.step_id, &ids, &counts, &status, self.now_us)
        } else {
            let first = |run: &Vec<i32>| run.first().copied().unwrap_or(-1);
            let ids: Vec<i32> = step.results.iter().map(first).collect();
            self.scheduler
                .apply(step.step_id, &ids, &status, self.now_us)
        };
        self.take(&outputs.unwrap());
        self.check();
        true
    }

    /// Plans ahead by up to `depth` steps, then applies one. False when nothing is left to do.
    pub fn step(&mut self, depth: usize) -> bool {
        while self.launched.len() < depth && self.launch() {}
        self.apply()
    }

    pub fn drain(&mut self, depth: usize) {
        let mut steps = 0;
        while !self.parts.is_empty() {
            self.feed(7);
        }
        while self.scheduler.has_work() {
            self.step(depth);
            steps += 1;
            assert!(steps < 20_000, "S8: requests never end");
        }
    }

    pub fn abort(&mut self, request_id: u64) {
        self.cut(request_id);
        self.scheduler.abort(&[request_id]).unwrap();
        self.take_outputs();
        self.check();
    }

    pub fn finish(&mut self, request_id: u64, kept: u32) {
        self.cut(request_id);
        self.scheduler.finish(request_id, kept).unwrap();
        self.take_outputs();
        self.check();
    }

    /// The next sampled row of the request brings NaN.
    pub fn poison(&mut self, request_id: u64) {
        self.cut(request_id);
        self.nan_due.insert(request_id);
    }

    /// Ids of requests that have not ended, ascending.
    pub fn live(&self) -> Vec<u64> {
        let live = self.requests.values().filter(|r| r.ended.is_none());
        let mut ids: Vec<u64> = live.map(|r| r.spec.request_id).collect();
        ids.sort_unstable();
        ids
    }

    /// After the drain: every request ended as expected, pools are back, flush empties all.
    pub fn check_end(&mut self) {
        for (id, request) in &self.requests {
            let code = request.ended.expect("S9: every request ends");
            let limit = request.seen.len();
            assert_eq!(request.seen, request.outputs[..limit], "S5: request {id}");
            if request.is_cut {
                continue;
            }
            assert_eq!(request.seen, request.outputs, "S5: request {id}");
            assert_eq!(code, request.code, "request {id}");
        }
        for pool in self.scheduler.pool_table() {
            assert_eq!(pool.available(), pool.capacity, "S15: {pool:?}");
        }
        self.scheduler.flush().unwrap();
        for pool in self.scheduler.pool_table() {
            assert_eq!(pool.free, pool.capacity, "S15: {pool:?}");
        }
        let counters = self.scheduler.stats().counters;
        assert_eq!(counters.illegal_moves, 0);
        // S12: nobody waits for another one's prefix more often than allowed, each time it queues.
        let hold = u64::from(self.scheduler.config().inbatch_prefix_hold);
        let queued = counters.submitted + counters.retracted;
        assert!(counters.held_back <= hold * queued, "S12: held back");
    }

    fn cut(&mut self, request_id: u64) {
        if let Some(request) = self.requests.get_mut(&request_id) {
            request.is_cut |= request.ended.is_none();
        }
    }

    fn take_outputs(&mut self) {
        let outputs = self.scheduler.take_outputs();
        self.take(&outputs);
    }

    fn take(&mut self, outputs: &StepOutputs) {
        for index in 0..outputs.len() {
            let request = self.requests.get_mut(&outputs.request_ids[index]).unwrap();
            assert_eq!(request.ended, None, "S9: nothing comes after the end");
            let (first, end) = (
                outputs.token_offsets[index],
                outputs.token_offsets[index + 1],
            );
            request
                .seen
                .extend(&outputs.token_ids[first as usize..end as usize]);
            let code = outputs.finish_codes[index];
            let output_len = outputs.output_lens[index] as usize;
            if code == FinishCode::Deadline {
                let config = self.scheduler.config();
                let has_limit = request.spec.deadline_us.is_some_and(|at| at <= self.now_us)
                    || config.waiting_timeout_us.is_some()
                    || config.running_timeout_us.is_some();
                assert!(has_limit, "nobody ends for want of time who has it");
            }
            request.is_cut |= matches!(code, FinishCode::Deadline | FinishCode::Dropped);
            if code == FinishCode::StopString {
                assert!(output_len <= request.seen.len());
                request.seen.truncate(output_len);
            }
            assert_eq!(output_len, request.seen.len(), "S10");
            assert!(output_len <= request.spec.max_new_tokens as usize, "S10");
            let prompt_len = request.spec.token_ids.len();
            assert_eq!(outputs.prompt_lens[index] as usize, prompt_len);
            request.cached_len = outputs.cached_lens[index];
            if code != FinishCode::None {
                request.ended = Some(code);
                self.nan_due.remove(&request.spec.request_id);
                self.open_prompts.remove(&request.spec.request_id);
            }
        }
    }

    fn check(&mut self) {
        self.take_outputs();
        self.scheduler.check_invariants().unwrap();
    }

    /// S3: what a step writes is read by no other request of a step in flight.
    fn check_hazards(&self, touched: &Touched) {
        let in_flight = self.launched.iter().map(|step| &step.touched);
        for step in in_flight.chain([touched]) {
            for (writer, pages) in &touched.written {
                let readers = step.readable.iter().filter(|(id, _)| *id != writer);
                for (reader, readable) in readers {
                    let shared: Vec<_> = readable.intersection(pages).collect();
                    assert!(
                        shared.is_empty(),
                        "S3: {writer} writes {shared:?} of {reader}"
                    );
                }
            }
        }
    }
}
