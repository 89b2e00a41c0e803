//! What every plan must keep: rows and chunks (S7), bounded overtaking (S12).
use std::collections::HashSet;

use dsserve_scheduler::{Phase, SchedulerConfig, StepPlan};

use super::Harness;

impl Harness {
    /// S12: nobody is passed more often than allowed by later requests that count.
    pub(super) fn count_passed(&mut self, admitted: &[u64]) {
        let config = self.scheduler.config();
        for id in admitted {
            let Some(index) = self.passed.iter().position(|(other, _)| other == id) else {
                continue; // admitted before, and retracted
            };
            self.passed.remove(index);
            let spec = &self.requests[id].spec;
            for (earlier, count) in &mut self.passed[..index] {
                let other = &self.requests[earlier].spec;
                let is_same_class = !config.priority.enabled || spec.priority == other.priority;
                let is_same_tenant = !config.fair || spec.tenant == other.tenant;
                *count += u32::from(is_same_class && is_same_tenant);
            }
        }
        let requests = &self.requests;
        self.passed.retain(|(id, _)| requests[id].ended.is_none());
        if config.policy.bounds_overtaking() {
            let limit = config.max_overtake + config.max_running_requests;
            let most = self.passed.iter().map(|(_, count)| *count).max();
            assert!(most.unwrap_or(0) <= limit, "S12: passed {most:?} times");
        }
    }

    /// S7: rows, chunk ends, replay and tail rows.
    pub(super) fn check_plan(&mut self, plan: &StepPlan) {
        let config = self.scheduler.config().clone();
        let capacity = self.scheduler.plan_capacity();
        assert!(plan.positions.len() <= capacity.rows as usize);
        assert!(plan.request_id.len() <= capacity.requests as usize);
        assert!(plan.page_deltas.len() <= capacity.deltas as usize);
        assert!(plan.released_slots.len() < capacity.slots as usize);
        let slots: HashSet<i32> = plan.request_slot.iter().copied().collect();
        assert_eq!(
            slots.len(),
            plan.request_slot.len(),
            "a slot is in a step once"
        );
        if plan.phase == Phase::Prefill && config.chunked_prefill_size > 0 {
            assert!(
                i64::try_from(plan.positions.len()).unwrap() <= config.chunked_prefill_size,
                "S7"
            );
        }
        if config.chunked_prefill_size > 0 {
            let most = (config.max_prefill_tokens).max(config.window + config.page_size);
            assert!(plan.totals.prefill_tokens <= most, "S7: new tokens");
        }
        for request in 0..plan.request_id.len() {
            let is_decode = plan.history_ids[request] == [-2; 3];
            if is_decode {
                let rows = plan.cu_seqlens[request + 1] - plan.cu_seqlens[request];
                let drafts = plan.draft_len[request];
                assert_eq!(rows, drafts + 1);
                let spec = &self.requests[&plan.request_id[request]].spec;
                let most = spec.draft_len.unwrap_or(config.draft_len);
                assert!(drafts <= i32::try_from(most).unwrap());
                assert_eq!((plan.tail_len[request], plan.samples[request]), (rows, 1));
                assert_eq!(plan.replay_len[request], 0);
                match plan.phase {
                    Phase::Verify => assert!(config.draft_len > 0),
                    Phase::Decode => assert_eq!((config.draft_len, drafts), (0, 0)),
                    _ => assert!(config.mixed_chunk && drafts == 0),
                }
            } else {
                assert_eq!(plan.phase, Phase::Prefill);
                self.check_chunk(plan, request, &config);
            }
        }
        assert!(
            self.open_prompts.len() <= 1,
            "one partly planned prompt at most"
        );
    }

    fn check_chunk(&mut self, plan: &StepPlan, request: usize, config: &SchedulerConfig) {
        let id = plan.request_id[request];
        let rows = plan.cu_seqlens[request + 1] - plan.cu_seqlens[request];
        let start = plan.start_position[request];
        let end = start + rows;
        let (hit, replay) = (plan.cached_len[request], plan.replay_len[request]);
        let window = i32::try_from(config.window).unwrap();
        let page = i32::try_from(config.page_size).unwrap();
        let is_last = plan.samples[request] == 1;
        assert_eq!(hit % page, 0);
        let limit = self.requests[&id].spec.max_cached_len;
        assert!(
            limit.is_none_or(|limit| hit.unsigned_abs() <= limit),
            "beyond its limit"
        );
        assert!(
            hit == 0 || hit > window,
            "a hit of a window or less is refused"
        );
        let floor = plan.window_floor[request];
        assert_eq!(floor, if hit > 0 { hit - window } else { 0 });
        assert_eq!(plan.write_floor[request], hit);
        let is_first = !self.open_prompts.contains(&id);
        assert_eq!(replay, if is_first && hit > 0 { window } else { 0 });
        if is_first {
            assert_eq!(start, hit - replay);
            self.open_prompts.insert(id);
        }
        self.chunks
            .entry(id)
            .or_default()
            .push((start, end, replay));
        let cuts_tail = config.decoder_replay && !self.requests[&id].spec.whole_extend;
        if is_last {
            self.open_prompts.remove(&id);
            let prompt_len = i32::try_from(self.requests[&id].spec.token_ids.len()).unwrap();
            assert!(end >= prompt_len, "the prompt is complete");
            assert!(
                rows - replay >= window.min(end - hit),
                "S7: last chunk of a window at least"
            );
            let tail = if cuts_tail { window.min(rows) } else { rows };
            assert_eq!(plan.tail_len[request], tail);
        } else {
            assert_eq!(end % page, 0, "S7: open chunks end at a page");
            assert_eq!(plan.tail_len[request], if cuts_tail { 0 } else { rows });
        }
        if !cuts_tail {
            assert_eq!(plan.tail_floor[request], floor);
        } else if is_last {
            assert_eq!(plan.tail_floor[request], floor.max(end - window));
        }
    }
}
