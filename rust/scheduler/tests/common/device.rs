//! A device that stores (token, position) in every KV slot and checks each view before it is used.
//!
//! A FULL page table, FULL pages, an encoder and a decoder window ring of exactly W entries for each
//! slot, and the token ring. Steps run in launch order, row by row, from the plan alone.
use std::collections::{HashMap, HashSet};

use dsserve_scheduler::{Phase, SchedulerConfig, StepPlan};

use super::oracle::next_token;

type Cell = Option<(u32, u32)>;

/// Entries of the token ring of a slot.
const RING: usize = 16;

pub struct Device {
    page_size: usize,
    window: usize,
    page_table: Vec<Vec<usize>>,
    full: Vec<Vec<Cell>>,
    encoder_rings: Vec<Vec<Cell>>,
    decoder_rings: Vec<Vec<Cell>>,
    token_rings: Vec<[Cell; RING]>,
}

/// Pages that each request of a step could read, and those it wrote.
#[derive(Default, Clone)]
pub struct Touched {
    pub readable: HashMap<u64, HashSet<usize>>,
    pub written: HashMap<u64, HashSet<usize>>,
}

fn index(value: i32) -> usize {
    usize::try_from(value).unwrap()
}

impl Device {
    pub fn new(config: &SchedulerConfig, columns: u32) -> Self {
        let slots = config.max_running_requests as usize + 1;
        let (page_size, window) = (config.page_size as usize, config.window as usize);
        Self {
            page_size,
            window,
            page_table: vec![vec![0; columns as usize]; slots],
            full: vec![vec![None; page_size]; config.num_pages as usize + 1],
            encoder_rings: vec![vec![None; window]; slots],
            decoder_rings: vec![vec![None; window]; slots],
            token_rings: vec![[None; RING]; slots],
        }
    }

    /// Runs a step. `truth` gives the ids of a request, known in full from the start.
    ///
    /// Returns an id for each request, -1 where nothing is sampled.
    pub fn run(&mut self, plan: &StepPlan, truth: &HashMap<u64, Vec<u32>>) -> (Vec<i32>, Touched) {
        for [slot, column, page] in &plan.page_deltas {
            self.page_table[index(*slot)][index(*column)] = index(*page);
        }
        let mut touched = Touched::default();
        let mut results = Vec::new();
        for request in 0..plan.request_id.len() {
            let truth = &truth[&plan.request_id[request]];
            results.push(self.run_request(plan, request, truth, &mut touched));
        }
        (results, touched)
    }

    fn run_request(
        &mut self,
        plan: &StepPlan,
        request: usize,
        truth: &[u32],
        touched: &mut Touched,
    ) -> i32 {
        let slot = index(plan.request_slot[request]);
        let request_id = plan.request_id[request];
        let (first, end) = (plan.cu_seqlens[request], plan.cu_seqlens[request + 1]);
        let start = index(plan.start_position[request]);
        let window_floor = index(plan.window_floor[request]);
        let tail_floor = index(plan.tail_floor[request]);
        let write_floor = index(plan.write_floor[request]);
        let tail_first = end - plan.tail_len[request];
        assert!(slot > 0 && end > first, "no padding slot, no empty request");
        self.check_history(plan, request, truth);
        if start == window_floor {
            // First rows of an admission: whatever the slot held is not this request's.
            self.encoder_rings[slot].fill(None);
            self.decoder_rings[slot].fill(None);
        }
        let written = touched.written.entry(request_id).or_default();
        for row in first..end {
            let position = index(plan.positions[index(row)]);
            assert_eq!(position, start + index(row - first));
            let id = match plan.token_ids[index(row)] {
                -1 => self.token_rings[slot][position % RING]
                    .filter(|(_, at)| *at as usize == position)
                    .map(|(id, _)| id)
                    .expect("a placeholder finds its id in the token ring"),
                id => u32::try_from(id).unwrap(),
            };
            assert_eq!(
                id, truth[position],
                "request {request_id}, position {position}"
            );
            let cell = Some((id, u32::try_from(position).unwrap()));
            self.token_rings[slot][position % RING] = cell;
            if position >= write_floor {
                let page = self.page_table[slot][position / self.page_size];
                assert_ne!(page, 0, "the dummy page is never written");
                self.full[page][position % self.page_size] = cell;
                written.insert(page);
            }
            self.encoder_rings[slot][position % self.window] = cell;
            self.check_full(slot, position, truth);
            check_ring(
                &self.encoder_rings[slot],
                position,
                window_floor,
                truth,
                "encoder",
            );
            if row >= tail_first {
                self.decoder_rings[slot][position % self.window] = cell;
                check_ring(
                    &self.decoder_rings[slot],
                    position,
                    tail_floor,
                    truth,
                    "decoder",
                );
            }
        }
        let last = start + index(end - first) - 1;
        let columns = last / self.page_size + 1;
        let view = self.page_table[slot][..columns].iter().copied();
        touched.readable.entry(request_id).or_default().extend(view);
        if plan.samples[request] == 0 {
            assert_eq!(plan.phase, Phase::Prefill);
            return -1;
        }
        assert!(
            plan.tail_len[request] >= 1,
            "logits exist for tail rows only"
        );
        let id = self.sample(slot, last);
        let next = u32::try_from(last + 1).unwrap();
        self.token_rings[slot][(last + 1) % RING] = Some((id, next));
        i32::try_from(id).unwrap()
    }

    /// The id after `last`, from what the KV holds.
    fn sample(&self, slot: usize, last: usize) -> u32 {
        let view: Vec<u32> = (last.saturating_sub(15)..=last)
            .map(|position| self.full_cell(slot, position).unwrap().0)
            .collect();
        next_token(&view, u32::try_from(last).unwrap())
    }

    fn full_cell(&self, slot: usize, position: usize) -> Cell {
        let page = self.page_table[slot][position / self.page_size];
        self.full[page][position % self.page_size]
    }

    fn check_full(&self, slot: usize, last: usize, truth: &[u32]) {
        for (position, id) in truth.iter().enumerate().take(last + 1) {
            let expected = Some((*id, u32::try_from(position).unwrap()));
            assert_eq!(
                self.full_cell(slot, position),
                expected,
                "FULL row of {position}"
            );
        }
    }

    fn check_history(&self, plan: &StepPlan, request: usize, truth: &[u32]) {
        let start = index(plan.start_position[request]);
        let slot = index(plan.request_slot[request]);
        let history = plan.history_ids[request];
        for back in 1..=3_usize {
            let given = history[3 - back];
            let Some(position) = start.checked_sub(back) else {
                assert!(given == -1 || given == -2);
                continue;
            };
            let id = if given == -2 {
                let cell = self.token_rings[slot][position % RING];
                let (id, at) = cell.expect("the token ring holds the history");
                assert_eq!(at as usize, position);
                id
            } else {
                u32::try_from(given).unwrap()
            };
            assert_eq!(id, truth[position], "history {back} before {start}");
        }
    }
}

/// The windows of `position` must be exactly the last W positions from `floor` on.
fn check_ring(ring: &[Cell], position: usize, floor: usize, truth: &[u32], name: &str) {
    let first = floor.max((position + 1).saturating_sub(ring.len()));
    assert!(
        first <= position,
        "{name} floor {floor} is above {position}"
    );
    for seen in first..=position {
        let expected = Some((truth[seen], u32::try_from(seen).unwrap()));
        let cell = ring[seen % ring.len()];
        assert_eq!(cell, expected, "{name} window of {position} at {seen}");
    }
}
