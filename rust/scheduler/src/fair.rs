//! Sharing the machine over tenants: deficit round robin within a priority class (`serving.md` a.14).
//!
//! Each tenant has a budget of tokens. Admission charges the uncached prompt, results charge the
//! output. The turn stays with a tenant while its budget covers its next request, then moves on;
//! when nobody's does, all who wait get the same number of grants.
use std::collections::{HashMap, HashSet, VecDeque};

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
    /// Sorted by class, then tenant; none is empty.
    lanes: Vec<Lane>,
}

impl Fairness {
    /// Books tokens that a tenant used.
    pub fn charge(&mut self, tenant: u64, tokens: u32) {
        *self.budgets.entry(tenant).or_default() -= i64::from(tokens);
    }

    fn budget(&self, tenant: u64) -> i64 {
        self.budgets.get(&tenant).copied().unwrap_or(0)
    }

    /// Credit lapses when nothing waits; debts are kept while anybody else waits.
    fn forget(&mut self, waiting: &HashSet<u64>) {
        let keeps_debts = !waiting.is_empty() && self.budgets.len() < MAX_IDLE_TENANTS;
        self.budgets
            .retain(|tenant, budget| waiting.contains(tenant) || (keeps_debts && *budget < 0));
    }

    /// Whose request comes next, of tenants in ascending order with the cost of their next one.
    fn pick(&mut self, heads: &[(u64, i64)]) -> Option<usize> {
        let needs = heads
            .iter()
            .map(|(tenant, cost)| (cost - self.budget(*tenant) + GRANT - 1).div_euclid(GRANT));
        let grants = needs.min()?.max(0);
        if grants > 0 {
            for (tenant, _) in heads {
                *self.budgets.entry(*tenant).or_default() += grants * GRANT;
            }
        }
        let first = heads.partition_point(|(tenant, _)| *tenant < self.turn);
        let turns = (first..heads.len()).chain(0..first);
        let affords = |index: &usize| self.budget(heads[*index].0) >= heads[*index].1;
        let picked = turns.into_iter().find(affords)?;
        self.turn = heads[picked].0;
        Some(picked)
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
        } else {
            line.plain.extend(&order);
        }
        self.scratch = order;
        line
    }

    fn divide(&mut self, order: &[Key], line: &mut Line) {
        let mut index_of: HashMap<(i64, u64), usize> = HashMap::new();
        let mut waiting = HashSet::new();
        for key in order {
            let request = self.requests.live(*key);
            let (class, tenant) = (request.waiting.place.class, request.spec.tenant);
            waiting.insert(tenant);
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
        self.fairness.forget(&waiting);
    }

    /// Takes the next request from the line.
    pub(crate) fn next_in_line(&mut self, line: &mut Line) -> Option<Key> {
        if let Some(key) = line.plain.pop_front() {
            return Some(key);
        }
        let class = line.lanes.first()?.class;
        let heads: Vec<(u64, i64)> = line
            .lanes
            .iter()
            .take_while(|lane| lane.class == class)
            .map(|lane| (lane.tenant, self.cost_of(lane.keys[0])))
            .collect();
        let picked = self.fairness.pick(&heads)?;
        let keys = &mut line.lanes[picked].keys;
        let key = keys.pop_front();
        if keys.is_empty() {
            line.lanes.remove(picked);
        }
        key
    }

    /// Tokens that admitting a request charges to its tenant. What a retraction took was charged
    /// before.
    pub(crate) fn admission_charge(&self, key: Key) -> u32 {
        let request = self.requests.live(key);
        if request.waiting.place.is_retracted() {
            0
        } else {
            request.uncached_len()
        }
    }

    fn cost_of(&self, key: Key) -> i64 {
        i64::from(self.admission_charge(key))
    }
}
