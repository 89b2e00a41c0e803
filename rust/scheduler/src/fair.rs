//! Sharing the machine over tenants: deficit round robin within a priority class (`serving.md` a.14).
//!
//! Each tenant has a budget of tokens. Admission charges the uncached prompt, results charge the
//! output while another tenant waits: what nobody else waits for is free. When nothing waits, all
//! is forgotten. The turn stays with a tenant while its budget covers its next request, then moves on;
//! when nobody's does, all who wait get the same number of grants.
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, HashMap, VecDeque};
use std::ops::Range;

use crate::scheduler::Scheduler;
use crate::table::Key;

/// Tokens of one grant.
const GRANT: i64 = 512;
/// Tenants whose debt is kept while they have nothing waiting.
const MAX_IDLE_TENANTS: usize = 65_536;

/// What each tenant may still use, negative for what it used in advance.
#[derive(Debug, Default)]
pub(crate) struct Fairness {
    budgets: HashMap<u64, i64>,
    /// Whose turn it is.
    turn: u64,
    /// Requests of each tenant in the queue, those with any.
    waiting: HashMap<u64, usize>,
}

/// The waiting requests of one tenant and class, in the order of the policy.
#[derive(Debug)]
struct Lane {
    class: i64,
    tenant: u64,
    keys: VecDeque<Key>,
}

/// Waiting requests in the order in which a step considers them.
#[derive(Debug, Default)]
pub(crate) struct Line {
    /// Those that come in this order, whatever tenants used.
    plain: VecDeque<Key>,
    /// Sorted by class, then tenant.
    lanes: Vec<Lane>,
    /// The lanes of the class whose turn it is.
    class: Range<usize>,
    /// Grants that each lane of the class got while it had requests; not in the budgets yet.
    grants: i64,
    /// Lanes whose budget covers their next request.
    ready: BTreeSet<usize>,
    /// The others, with the grants after which it does.
    short: BinaryHeap<Reverse<(i64, usize)>>,
    /// Whose request was taken last: it is in neither until the next one is asked for.
    picked: Option<usize>,
    /// Requests that may still be taken.
    left: usize,
}

impl Fairness {
    /// A request of a tenant joined the queue.
    pub fn note_waiting(&mut self, tenant: u64) {
        *self.waiting.entry(tenant).or_default() += 1;
    }

    /// A request of a tenant left the queue.
    pub fn note_left(&mut self, tenant: u64) {
        if let Some(count) = self.waiting.get_mut(&tenant) {
            *count -= 1;
            if *count == 0 {
                self.waiting.remove(&tenant);
            }
        }
        self.lapse();
    }

    /// Requests that wait, over all tenants.
    pub fn num_waiting(&self) -> usize {
        self.waiting.values().sum()
    }

    /// Books the tokens of an admission.
    fn charge_admission(&mut self, tenant: u64, tokens: u32) {
        *self.budgets.entry(tenant).or_default() -= i64::from(tokens);
        self.lapse();
    }

    /// Books output of a tenant, if another one waits.
    pub fn charge_output(&mut self, tenant: u64, tokens: u32) {
        let others = self.waiting.len() - usize::from(self.waiting.contains_key(&tenant));
        if others > 0 {
            *self.budgets.entry(tenant).or_default() -= i64::from(tokens);
        }
    }

    /// With nothing waiting there is nothing to share: credit and debts lapse.
    fn lapse(&mut self) {
        if self.waiting.is_empty() {
            self.budgets.clear();
        }
    }

    fn grant(&mut self, tenant: u64, grants: i64) {
        *self.budgets.entry(tenant).or_default() += grants * GRANT;
    }

    fn budget(&self, tenant: u64) -> i64 {
        self.budgets.get(&tenant).copied().unwrap_or(0)
    }

    /// The credit of tenants that have nothing waiting lapses; their debts are kept.
    fn forget(&mut self) {
        let keeps_debts = self.budgets.len() < MAX_IDLE_TENANTS;
        let waiting = &self.waiting;
        self.budgets
            .retain(|tenant, budget| waiting.contains_key(tenant) || (keeps_debts && *budget < 0));
    }
}

impl Line {
    fn place(&mut self, index: usize, grants_needed: i64) {
        if grants_needed <= self.grants {
            self.ready.insert(index);
        } else {
            self.short.push(Reverse((grants_needed, index)));
        }
    }
}

impl Scheduler {
    /// Lines the waiting requests up for this step.
    pub(crate) fn line_up(&mut self) -> Line {
        let mut order = std::mem::take(&mut self.scratch);
        let most = if self.config.fair {
            usize::MAX
        } else {
            self.most_candidates()
        };
        self.order_waiting(&mut order, most);
        let mut line = Line::default();
        if self.config.fair {
            self.divide(&order, &mut line);
            line.left = self.most_candidates();
        } else {
            line.plain.extend(&order);
        }
        self.scratch = order;
        line
    }

    fn divide(&mut self, order: &[Key], line: &mut Line) {
        let mut index_of: HashMap<(i64, u64), usize> = HashMap::new();
        for key in order {
            let request = self.requests.live(*key);
            let (class, tenant) = (request.waiting.place.class, request.spec.tenant);
            let index = *index_of.entry((class, tenant)).or_insert_with(|| {
                line.lanes.push(Lane {
                    class,
                    tenant,
                    keys: VecDeque::new(),
                });
                line.lanes.len() - 1
            });
            line.lanes[index].keys.push_back(*key);
        }
        line.lanes.sort_by_key(|lane| (lane.class, lane.tenant));
        self.fairness.forget();
    }

    /// Takes the next request from the line; none once a step looked at enough of them.
    pub(crate) fn next_in_line(&mut self, line: &mut Line) -> Option<Key> {
        if let Some(key) = line.plain.pop_front() {
            return Some(key);
        }
        line.left = line.left.checked_sub(1)?;
        if let Some(index) = line.picked.take() {
            self.enter_lane(line, index);
        }
        if line.ready.is_empty() && line.short.is_empty() {
            self.enter_class(line);
        }
        if line.ready.is_empty() {
            // Nobody's budget is enough: all get the grants that the first one needs.
            let Reverse((needed, _)) = line.short.peek()?;
            line.grants = *needed;
            while let Some(Reverse((needed, index))) = line.short.peek() {
                if *needed > line.grants {
                    break;
                }
                line.ready.insert(*index);
                line.short.pop();
            }
        }
        let lanes = &line.lanes[line.class.clone()];
        let before_turn = lanes.partition_point(|lane| lane.tenant < self.fairness.turn);
        let mut from_turn = line.ready.range(line.class.start + before_turn..);
        let picked = *from_turn.next().or_else(|| line.ready.first())?;
        line.ready.remove(&picked);
        line.picked = Some(picked);
        let of_tenant = &mut line.lanes[picked];
        self.fairness.turn = of_tenant.tenant;
        of_tenant.keys.pop_front()
    }

    /// Goes on to the next class, if there is one.
    fn enter_class(&self, line: &mut Line) {
        let start = line.class.end;
        let rest = &line.lanes[start..];
        let len = rest.partition_point(|lane| lane.class <= rest[0].class);
        line.class = start..start + len;
        line.grants = 0;
        for index in line.class.clone() {
            let needed = self.grants_needed(&line.lanes[index]);
            line.place(index, needed);
        }
    }

    /// Puts the lane whose request was taken last back, or books its grants if that was its last.
    fn enter_lane(&mut self, line: &mut Line, index: usize) {
        let of_tenant = &line.lanes[index];
        if of_tenant.keys.is_empty() {
            self.fairness.grant(of_tenant.tenant, line.grants);
        } else {
            let needed = self.grants_needed(of_tenant);
            line.place(index, needed);
        }
    }

    /// Grants after which a tenant's budget covers its next request.
    fn grants_needed(&self, lane: &Lane) -> i64 {
        let cost = lane
            .keys
            .front()
            .map_or(0, |key| i64::from(self.cost_of(*key)));
        let lacking = cost - self.fairness.budget(lane.tenant);
        (lacking + GRANT - 1).div_euclid(GRANT)
    }

    /// Books what the lanes of a line got. Call when no more is taken from it.
    pub(crate) fn close_line(&mut self, line: &Line) {
        if line.lanes.is_empty() {
            return;
        }
        for index in line.class.clone() {
            let of_tenant = &line.lanes[index];
            let had_requests = !of_tenant.keys.is_empty() || line.picked == Some(index);
            if line.grants > 0 && had_requests {
                self.fairness.grant(of_tenant.tenant, line.grants);
            }
        }
        self.fairness.lapse();
    }

    /// Charges a request that left the queue for its admission to its tenant.
    pub(crate) fn charge_admission(&mut self, key: Key) {
        if self.config.fair {
            let (charge, tenant) = (self.cost_of(key), self.requests.live(key).spec.tenant);
            self.fairness.charge_admission(tenant, charge);
        }
    }

    /// Tokens that an admission charges. What a retraction took was charged before.
    fn cost_of(&self, key: Key) -> u32 {
        let request = self.requests.live(key);
        if request.waiting.place.is_retracted() {
            0
        } else {
            request.uncached_len()
        }
    }
}
