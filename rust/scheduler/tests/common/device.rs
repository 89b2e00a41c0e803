//! A device that stores (token, position) in every KV slot and checks each view before it is used.
//!
//! A FULL page table, FULL pages, an encoder and a decoder window ring of exactly W entries for each
//! slot (drafts need some more, since rejected ones are written too), the token ring and the committed
//! lengths. Steps run in launch order, row by row, from the plan alone. Drafts are right up to a length
//! that the request and the position decide.
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
    /// Tokens of each slot whose ids are known; the last one has no KV yet.
    committed: Vec<usize>,
    /// Accept every draft.
    pub accepts_all: bool,
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
        let ring = window + config.overshoot() as usize;
        Self {
            page_size,
            window,
            page_table: vec![vec![0; columns as usize]; slots],
            full: vec![vec![None; page_size]; config.num_pages as usize + 1],
            encoder_rings: vec![vec![None; ring]; slots],
            decoder_rings: vec![vec![None; ring]; slots],
            token_rings: vec![[None; RING]; slots],
            committed: vec![0; slots],
            accepts_all: false,
        }
    }

    /// Runs a step. `truth` gives the ids of a request, known in full from the start.
    ///
    /// Returns a run of ids for each request, empty where nothing is sampled.
    pub fn run(
        &mut self,
        plan: &StepPlan,
        truth: &HashMap<u64, Vec<u32>>,
    ) -> (Vec<Vec<i32>>, Touched) {
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
    ) -> Vec<i32> {
        if plan.history_ids[request] == [-2; 3] {
            return self.run_decode(plan, request, truth, touched);
        }
        let slot = index(plan.request_slot[request]);
        let request_id = plan.request_id[request];
        let (first, end) = (plan.cu_seqlens[request], plan.cu_seqlens[request + 1]);
        let start = index(plan.start_position[request]);
        let window_floor = index(plan.window_floor[request]);
        let tail_floor = index(plan.tail_floor[request]);
        let write_floor = index(plan.write_floor[request]);
        let tail_first = end - plan.tail_len[request];
        assert!(slot > 0 && end > first, "no padding slot, no empty request");
        check_history(plan, request, truth);
        if start == window_floor {
            // First rows of an admission: whatever the slot held is not this request's.
            self.encoder_rings[slot].fill(None);
            self.decoder_rings[slot].fill(None);
        }
        let written = touched.written.entry(request_id).or_default();
        for row in first..end {
            let position = index(plan.positions[index(row)]);
            assert_eq!(position, start + index(row - first));
            let id = u32::try_from(plan.token_ids[index(row)]).expect("a prompt's ids are known");
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
            put(&mut self.encoder_rings[slot], position, cell);
            self.check_full(slot, position, truth);
            self.check_encoder(slot, position, window_floor, truth);
            if row >= tail_first {
                put(&mut self.decoder_rings[slot], position, cell);
                self.check_decoder(slot, position, tail_floor, truth);
            }
        }
        let last = start + index(end - first) - 1;
        let columns = last / self.page_size + 1;
        let view = self.page_table[slot][..columns].iter().copied();
        touched.readable.entry(request_id).or_default().extend(view);
        if plan.samples[request] == 0 {
            assert_eq!(plan.phase, Phase::Prefill);
            return Vec::new();
        }
        assert!(
            plan.tail_len[request] >= 1,
            "logits exist for tail rows only"
        );
        self.commit(slot, last, &[])
    }

    /// The anchor and its drafts, or the anchor alone.
    fn run_decode(
        &mut self,
        plan: &StepPlan,
        request: usize,
        truth: &[u32],
        touched: &mut Touched,
    ) -> Vec<i32> {
        let slot = index(plan.request_slot[request]);
        let request_id = plan.request_id[request];
        let first_row = index(plan.cu_seqlens[request]);
        let drafts = index(plan.draft_len[request]);
        let most = index(plan.start_position[request]);
        let start = self.committed[slot];
        assert_eq!(index(plan.tail_len[request]), drafts + 1);
        assert!(start <= most, "the plan has the largest start there can be");
        assert!(start >= plan.cached_len[request].try_into().unwrap());
        if plan.token_ids[first_row] != -1 {
            assert_eq!(start, most, "known ids stand at known positions");
            assert_eq!(
                plan.token_ids[first_row],
                i32::try_from(truth[start]).unwrap()
            );
        }
        self.check_history_ring(slot, start, truth);
        let accepted = if self.accepts_all {
            drafts
        } else {
            super::oracle::mix(request_id << 32 | start as u64) as usize % (drafts + 1)
        };
        let written = touched.written.entry(request_id).or_default();
        for draft in 0..=drafts {
            let position = start + draft;
            // What is not accepted is any other id.
            let id = truth[position] + u32::from(draft > accepted);
            let cell = Some((id, u32::try_from(position).unwrap()));
            let page = self.page_table[slot][position / self.page_size];
            assert_ne!(page, 0, "S14: a draft is written within the reserved pages");
            self.full[page][position % self.page_size] = cell;
            written.insert(page);
            put(&mut self.encoder_rings[slot], position, cell);
            put(&mut self.decoder_rings[slot], position, cell);
            if draft == 0 {
                let ring = self.token_rings[slot][position % RING];
                assert_eq!(ring, cell, "the token ring holds the anchor");
            }
            if draft <= accepted {
                self.check_full(slot, position, truth);
                let floor = index(plan.window_floor[request]);
                self.check_encoder(slot, position, floor, truth);
                let floor = index(plan.tail_floor[request]);
                self.check_decoder(slot, position, floor, truth);
            }
        }
        // It may read up to the largest position it could have.
        let columns = (most + drafts) / self.page_size + 1;
        let view = self.page_table[slot][..columns].iter().copied();
        touched.readable.entry(request_id).or_default().extend(view);
        self.commit(slot, start + accepted, &truth[start + 1..=start + accepted])
    }

    /// Commits the accepted ids and samples the one after position `last`.
    fn commit(&mut self, slot: usize, last: usize, accepted: &[u32]) -> Vec<i32> {
        let mut ids = accepted.to_vec();
        ids.push(self.sample(slot, last));
        for (back, id) in ids.iter().rev().enumerate() {
            let position = last + 1 - back;
            let cell = Some((*id, u32::try_from(position).unwrap()));
            self.token_rings[slot][position % RING] = cell;
        }
        self.committed[slot] = last + 1;
        ids.into_iter().map(|id| id.try_into().unwrap()).collect()
    }

    fn check_encoder(&self, slot: usize, position: usize, floor: usize, truth: &[u32]) {
        let ring = &self.encoder_rings[slot];
        check_ring(ring, self.window, position, floor, truth, "encoder");
    }

    fn check_decoder(&self, slot: usize, position: usize, floor: usize, truth: &[u32]) {
        let ring = &self.decoder_rings[slot];
        check_ring(ring, self.window, position, floor, truth, "decoder");
    }

    fn check_history_ring(&self, slot: usize, start: usize, truth: &[u32]) {
        let history = truth.iter().enumerate().take(start);
        for (position, id) in history.skip(start.saturating_sub(3)) {
            let cell = self.token_rings[slot][position % RING];
            let expected = Some((*id, u32::try_from(position).unwrap()));
            assert_eq!(cell, expected, "history of {start} at {position}");
        }
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
}

fn check_history(plan: &StepPlan, request: usize, truth: &[u32]) {
    let start = index(plan.start_position[request]);
    let history = plan.history_ids[request];
    for back in 1..=3_usize {
        let given = history[3 - back];
        let Some(position) = start.checked_sub(back) else {
            assert_eq!(given, -1);
            continue;
        };
        let expected = i32::try_from(truth[position]).unwrap();
        assert_eq!(given, expected, "history {back} before {start}");
    }
}

fn put(ring: &mut [Cell], position: usize, cell: Cell) {
    let len = ring.len();
    ring[position % len] = cell;
}

/// The windows of `position` must be exactly the last W positions from `floor` on.
fn check_ring(
    ring: &[Cell],
    window: usize,
    position: usize,
    floor: usize,
    truth: &[u32],
    name: &str,
) {
    let first = floor.max((position + 1).saturating_sub(window));
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
