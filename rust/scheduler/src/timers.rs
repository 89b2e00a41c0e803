//! Deadlines and timeouts, judged by the clock that `next_plan` is given (`serving.md` a.14).
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::error::Result;
use crate::event::FinishCode;
use crate::request::Request;
use crate::scheduler::Scheduler;
use crate::table::Key;

/// Timers that may be left over from ended requests before they are swept out.
const SPARE_TIMERS: usize = 1024;

/// What a timer is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Limit {
    /// The request's own deadline.
    Deadline,
    /// Time until the first admission.
    Waiting,
    /// Time from the first admission to the end.
    Running,
}

impl Limit {
    fn applies(self, request: &Request) -> bool {
        match self {
            Self::Deadline => true,
            Self::Waiting => request.reported_hit.is_none(),
            Self::Running => request.reported_hit.is_some(),
        }
    }
}

/// Timers of requests that have not ended, and some of those that have.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    heap: BinaryHeap<Reverse<(u64, Key, Limit)>>,
}

impl Scheduler {
    /// Sets the timers of a request that joined the queue.
    pub(crate) fn start_waiting_timers(&mut self, key: Key) {
        let spec = &self.requests.live(key).spec;
        let (deadline, arrival) = (spec.deadline_us, spec.arrival_us);
        if let Some(at_us) = deadline {
            self.set_timer(at_us, key, Limit::Deadline);
        }
        if let Some(timeout_us) = self.config.waiting_timeout_us {
            self.set_timer(arrival.saturating_add(timeout_us), key, Limit::Waiting);
        }
    }

    /// Sets the timer of a request that was admitted for the first time.
    pub(crate) fn start_running_timer(&mut self, key: Key) {
        if let Some(timeout_us) = self.config.running_timeout_us {
            let at_us = self.now_us.saturating_add(timeout_us);
            self.set_timer(at_us, key, Limit::Running);
        }
    }

    /// Ends the requests whose time is over.
    pub(crate) fn end_overdue(&mut self) -> Result<()> {
        let mut has_ended = false;
        while let Some(Reverse((at_us, key, limit))) = self.timers.heap.peek().copied() {
            if at_us > self.now_us {
                break;
            }
            self.timers.heap.pop();
            let request = self.requests.get(key);
            if let Some(request) = request.filter(|request| limit.applies(request)) {
                let valid_len = request.applied_len;
                self.end_request(key, FinishCode::Deadline, Some(valid_len))?;
                has_ended = true;
            }
        }
        if has_ended {
            self.prune_running();
        }
        Ok(())
    }

    fn set_timer(&mut self, at_us: u64, key: Key, limit: Limit) {
        if self.timers.heap.len() > 4 * self.requests.len() + SPARE_TIMERS {
            let requests = &self.requests;
            self.timers
                .heap
                .retain(|Reverse((_, key, _))| requests.get(*key).is_some());
        }
        self.timers.heap.push(Reverse((at_us, key, limit)));
    }
}
