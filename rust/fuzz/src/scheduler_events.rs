//! Events of the scheduler in any order: submits, plans, results, aborts, stops, flushes.

use crate::bytes::Bytes;
use dsserve_scheduler::{
    FinishCode, RequestSpec, Scheduler, SchedulerConfig, StepOutputs, STATUS_NAN, STATUS_OK,
};
use std::collections::{BTreeMap, VecDeque};

const VOCAB_SIZE: u32 = 16;
const EOS: u32 = 1;

/// Runs events; the invariants must hold after each, and every request must end exactly once.
pub fn run(data: &[u8]) {
    let mut bytes = Bytes::new(data);
    let config = config(&mut bytes);
    let Ok(scheduler) = Scheduler::new(config) else {
        return;
    };
    let mut machine = Machine {
        scheduler,
        in_flight: VecDeque::new(),
        is_open: BTreeMap::new(),
        next_id: 1,
        now_us: 0,
    };
    while !bytes.is_empty() {
        machine.now_us += u64::from(bytes.byte());
        match bytes.below(8) {
            0 | 1 => machine.submit(&mut bytes),
            2 | 3 => machine.plan(),
            4 | 5 => machine.apply(&mut bytes),
            6 => machine.end(&mut bytes),
            _ => {
                if machine.scheduler.flush().is_ok() {
                    machine.take();
                }
            }
        }
        machine.scheduler.check_invariants().expect("invariants");
    }
    machine.drain();
}

fn config(bytes: &mut Bytes<'_>) -> SchedulerConfig {
    SchedulerConfig {
        page_size: 4 << bytes.below(2),
        num_pages: 12 + u32::from(bytes.byte() % 24),
        max_running_requests: 1 + u32::from(bytes.byte() % 4),
        max_queued_requests: (bytes.below(2) == 0).then_some(4),
        chunked_prefill_size: [-1, 8, 16][bytes.below(3)],
        context_length: 64,
        window: 4,
        vocab_size: VOCAB_SIZE,
        encoder_replay: bytes.below(2) == 0,
        decoder_replay: bytes.below(2) == 0,
        radix_cache: bytes.below(4) > 0,
        mixed_chunk: bytes.below(2) == 0,
        eos_token_ids: vec![EOS],
        ..SchedulerConfig::default()
    }
}

struct Machine {
    scheduler: Scheduler,
    /// Launched and not applied: step, and for each row whether it samples.
    in_flight: VecDeque<(u64, Vec<bool>)>,
    /// Accepted requests; whether each has not ended.
    is_open: BTreeMap<u64, bool>,
    next_id: u64,
    now_us: u64,
}

impl Machine {
    fn submit(&mut self, bytes: &mut Bytes<'_>) {
        let prompt_len = 1 + bytes.below(40);
        let seed = bytes.byte();
        let spec = RequestSpec {
            request_id: self.next_id,
            // Few different prompts, so that prefixes are shared.
            token_ids: (0..prompt_len)
                .map(|at| 2 + (u32::from(seed % 3) + at as u32 / 7) % (VOCAB_SIZE - 2))
                .collect(),
            max_new_tokens: u32::from(bytes.byte() % 24),
            ignore_eos: bytes.below(4) == 0,
            arrival_us: self.now_us,
            deadline_us: (bytes.below(8) == 0).then_some(self.now_us + u64::from(bytes.byte())),
            ..RequestSpec::default()
        };
        self.next_id += 1;
        let request_id = spec.request_id;
        if self.scheduler.submit(vec![spec]).is_empty() {
            self.is_open.insert(request_id, true);
        }
        self.take();
    }

    fn plan(&mut self) {
        if self.scheduler.steps_in_flight() >= 2 {
            return;
        }
        let plan = self
            .scheduler
            .next_plan(self.now_us)
            .expect("room for a step");
        if let Some(plan) = plan {
            let rows = plan.samples.iter().map(|&samples| samples != 0).collect();
            self.in_flight.push_back((plan.step_id, rows));
        }
        self.take();
    }

    fn apply(&mut self, bytes: &mut Bytes<'_>) {
        let Some((step_id, rows)) = self.in_flight.pop_front() else {
            return;
        };
        let mut ids = Vec::new();
        let mut status = Vec::new();
        for samples in rows {
            let is_nan = samples && bytes.byte() == 255;
            status.push(if is_nan { STATUS_NAN } else { STATUS_OK });
            ids.push(if samples {
                i32::from(bytes.byte() % 16)
            } else {
                -1
            });
        }
        let outputs = self.scheduler.apply(step_id, &ids, &status, self.now_us);
        self.note(&outputs.expect("results of the oldest step"));
        self.take();
    }

    /// Aborts or finishes some request, known or not, ended or not.
    fn end(&mut self, bytes: &mut Bytes<'_>) {
        let request_id = u64::from(bytes.byte()) % (self.next_id + 1);
        if bytes.below(2) == 0 {
            self.scheduler.abort(&[request_id]).expect("any id");
        } else {
            let kept = u32::from(bytes.byte() % 8);
            self.scheduler.finish(request_id, kept).expect("any id");
        }
        self.take();
    }

    fn take(&mut self) {
        let outputs = self.scheduler.take_outputs();
        self.note(&outputs);
    }

    fn note(&mut self, outputs: &StepOutputs) {
        for (request_id, code) in outputs.request_ids.iter().zip(&outputs.finish_codes) {
            let open = self.is_open.get_mut(request_id);
            let open = open.expect("an output of a request that was never accepted");
            assert!(*open, "an output after the end of request {request_id}");
            *open = *code == FinishCode::None;
        }
    }

    /// Lets everything run to its end.
    fn drain(&mut self) {
        let zeros = [0u8; 0];
        for _ in 0..20_000 {
            if !self.scheduler.has_work() && self.in_flight.is_empty() {
                break;
            }
            self.now_us += 1_000;
            self.plan();
            self.apply(&mut Bytes::new(&zeros));
        }
        assert!(!self.scheduler.has_work(), "requests are stuck");
        assert!(
            self.is_open.values().all(|open| !open),
            "a request never ended"
        );
        self.scheduler
            .check_invariants()
            .expect("invariants at the end");
        self.scheduler.flush().expect("nothing holds pages");
    }
}
