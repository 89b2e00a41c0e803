//! What the eviction policies other than LRU know about a node, and the order they make of it.

use crate::config::EvictionPolicy;
use crate::order::Class;

/// Uses after which a hit counts half in the hit rate of [`EvictionPolicy::Cost`].
const HALF_LIFE: f64 = 4096.0;

/// Prefix length at which a token costs twice what the first one does: beyond it attention, which
/// grows with the depth, outweighs the rest.
const DOUBLE_COST_PAGES: f64 = 512.0;

/// Hits that protect a node under [`EvictionPolicy::Slru`].
const PROTECTED_HITS: u32 = 2;

/// The uses of one node.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Use {
    pub(crate) created_at: u64,
    pub(crate) used_at: u64,
    pub(crate) num_hits: u32,
    pub(crate) priority: i32,
    /// Hits, each of which halves every [`HALF_LIFE`] uses, as of `used_at`.
    rate: f64,
}

impl Use {
    fn hit(&mut self, now: u64) {
        self.num_hits = self.num_hits.saturating_add(1);
        self.rate = self.rate * decay(self.used_at, now) + 1.0;
        self.used_at = now;
    }
}

/// Place in the eviction order; the smallest goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    class: Class,
    value: u64,
    used_at: u64,
    /// Deeper first: a child before its parent.
    depth: std::cmp::Reverse<u32>,
}

/// The uses of all nodes; empty, and not kept up, if every policy is LRU.
#[derive(Debug)]
pub(crate) struct Uses {
    is_kept: bool,
    clock: u64,
    of_node: Vec<Use>,
}

impl Uses {
    pub(crate) fn new(is_kept: bool, capacity: usize) -> Self {
        Self {
            is_kept,
            clock: 0,
            of_node: Vec::with_capacity(if is_kept { capacity } else { 0 }),
        }
    }

    pub(crate) fn is_kept(&self) -> bool {
        self.is_kept
    }

    pub(crate) fn of(&self, node: u32) -> Use {
        self.of_node.get(node as usize).copied().unwrap_or_default()
    }

    /// Begins an operation: what it touches is used at one time.
    pub(crate) fn tick(&mut self) {
        self.clock += 1;
    }

    /// A node was made by the current operation.
    pub(crate) fn create(&mut self, node: u32) {
        let now = self.clock;
        self.put(
            node,
            Use {
                created_at: now,
                used_at: now,
                priority: i32::MIN,
                ..Use::default()
            },
        );
    }

    /// A part of `whole` became a node of its own.
    pub(crate) fn split(&mut self, whole: u32, part: u32) {
        if self.is_kept {
            self.put(part, self.of(whole));
        }
    }

    /// A node lies on the path that the current operation uses.
    pub(crate) fn touch(&mut self, node: u32, is_hit: bool, priority: i32) {
        let now = self.clock;
        let mut uses = self.of(node);
        if is_hit {
            uses.hit(now);
        } else {
            uses.rate *= decay(uses.used_at, now);
            uses.used_at = now;
        }
        uses.priority = uses.priority.max(priority);
        self.put(node, uses);
    }

    fn put(&mut self, node: u32, uses: Use) {
        if !self.is_kept {
            return;
        }
        if self.of_node.len() <= node as usize {
            self.of_node.resize(node as usize + 1, Use::default());
        }
        self.of_node[node as usize] = uses;
    }
}

/// Where a policy puts a node that ends at `end_page`.
pub(crate) fn rank(policy: EvictionPolicy, class: Class, uses: Use, end_page: u32) -> Rank {
    let value = match policy {
        EvictionPolicy::Lru => 0,
        EvictionPolicy::Lfu => uses.num_hits.into(),
        EvictionPolicy::Slru => u64::from(uses.num_hits >= PROTECTED_HITS),
        EvictionPolicy::Fifo => uses.created_at,
        EvictionPolicy::Priority => ordered_i32(uses.priority),
        EvictionPolicy::Cost => ordered_f64(log_worth(uses, end_page)),
    };
    Rank {
        class,
        value,
        used_at: uses.used_at,
        depth: std::cmp::Reverse(end_page),
    }
}

/// log2 of cost x hit rate. All rates fall by one factor with time, so the rate at the last use and
/// the time of that use order two nodes for ever: no rank has to be computed again.
fn log_worth(uses: Use, end_page: u32) -> f64 {
    let cost = 1.0 + f64::from(end_page) / DOUBLE_COST_PAGES;
    // What was never hit counts as a quarter of a hit, at its last use.
    let rate = uses.rate.max(0.25);
    cost.log2() + rate.log2() + as_f64(uses.used_at) / HALF_LIFE
}

fn decay(from: u64, to: u64) -> f64 {
    (-as_f64(to - from) / HALF_LIFE).exp2()
}

#[expect(
    clippy::cast_precision_loss,
    reason = "a count of operations stays below 2^52"
)]
fn as_f64(clock: u64) -> f64 {
    clock as f64
}

/// Keeps the order of the numbers.
fn ordered_i32(value: i32) -> u64 {
    (i64::from(value) - i64::from(i32::MIN)).unsigned_abs()
}

/// Keeps the order of finite numbers: sign and magnitude to two's complement.
fn ordered_f64(value: f64) -> u64 {
    let bits = value.to_bits();
    if bits >> 63 == 0 {
        bits | 1 << 63
    } else {
        !bits
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_order() {
        let floats = [-1e9, -2.0, -0.5, 0.0, 1e-9, 3.0, 1e18];
        assert!(floats.map(ordered_f64).is_sorted());
        assert!([i32::MIN, -1, 0, 1, i32::MAX].map(ordered_i32).is_sorted());
    }

    fn used(hits: &[u64]) -> Use {
        let mut uses = Use::default();
        for &now in hits {
            uses.hit(now);
        }
        uses
    }

    fn goes_before(policy: EvictionPolicy, first: (Use, u32), second: (Use, u32)) -> bool {
        let place = |(uses, end_page)| rank(policy, Class::Current, uses, end_page);
        place(first) < place(second)
    }

    #[test]
    fn cost_weighs_depth_against_recent_hits() {
        let cost = EvictionPolicy::Cost;
        let once = used(&[10]);
        assert!(goes_before(cost, (once, 1), (once, 2000)), "shallow first");
        assert!(
            goes_before(cost, (once, 100), (used(&[8, 9, 10]), 100)),
            "few hits first"
        );
        let long_ago = used(&[1, 2, 3, 4]);
        let now = used(&[60_000]);
        assert!(
            goes_before(cost, (long_ago, 100), (now, 100)),
            "old hits fade"
        );
        let before: u64 = 1000;
        assert!(
            goes_before(cost, (used(&[before + 1]), 1), (used(&[before]), 4000)),
            "a deep node outlives a shallow one that was used just after it"
        );
    }

    #[test]
    fn a_retired_node_goes_before_all_others() {
        let worthless = rank(EvictionPolicy::Lfu, Class::Current, Use::default(), 1);
        let retired = rank(EvictionPolicy::Lfu, Class::Retired, used(&[1, 2, 3]), 9);
        assert!(retired < worthless);
    }
}
