//! The pool table: what a request needs of each pool, and how much is there.
//!
//! Every check of admission loops over [`POOLS`]; no pool has logic elsewhere.
use crate::request::Request;
use crate::scheduler::Scheduler;

/// Who owns units of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ownership {
    /// The prefix tree and requests.
    Both,
    /// Requests only.
    Request,
}

impl Ownership {
    /// The word for it in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Request => "request",
        }
    }
}

/// The pools of this engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pool {
    /// Pages of compressed rows and index keys.
    Full,
    /// One window ring for each slot.
    Window,
    /// Rows of the device page table.
    ReqSlots,
}

/// All pools, in the order in which shortages are reported.
pub(crate) const POOLS: [Pool; 3] = [Pool::Full, Pool::Window, Pool::ReqSlots];

/// Units of a pool by state; they add up to the capacity (invariant S1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolUse {
    /// Name, as in metrics.
    pub name: &'static str,
    /// What is counted.
    pub unit: &'static str,
    /// Who owns units.
    pub ownership: Ownership,
    /// All units.
    pub capacity: u32,
    /// Unused.
    pub free: u32,
    /// In the tree, unlocked.
    pub evictable: u32,
    /// In the tree, locked.
    pub locked: u32,
    /// Owned by requests.
    pub private: u32,
    /// Given back, readable by steps in flight.
    pub quarantined: u32,
    /// Of the free and evictable ones, those set aside for a prompt that is partly planned.
    pub promised: u32,
}

impl PoolUse {
    /// What can be handed out now.
    #[must_use]
    pub fn available(&self) -> u32 {
        // While admission holds on to a hit, it may be among what was promised.
        (self.free + self.evictable).saturating_sub(self.promised)
    }

    /// What is available now or once the steps in flight are applied.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.free + self.evictable + self.locked + self.private + self.quarantined
    }
}

/// What a request takes of each pool: `computed` tokens with KV, of which `shared` are in the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Need {
    pub computed: u32,
    pub shared: u32,
}

impl Pool {
    /// Units for a request.
    pub fn need(self, need: Need, page_size: u32) -> u32 {
        match self {
            Self::Full => need.computed.div_ceil(page_size) - need.shared / page_size,
            Self::Window | Self::ReqSlots => 1,
        }
    }

    /// Name, as in metrics and rejections.
    pub fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Window => "window",
            Self::ReqSlots => "req_slots",
        }
    }
}

impl Scheduler {
    /// Units of `pool` by state.
    pub(crate) fn pool_use(&self, pool: Pool) -> PoolUse {
        match pool {
            Pool::Full => {
                let quarantined = self.quarantine.num_pages();
                PoolUse {
                    name: pool.name(),
                    unit: "pages",
                    ownership: Ownership::Both,
                    capacity: self.config.num_pages,
                    free: self.cache.num_free(),
                    evictable: self.cache.num_evictable(),
                    locked: self.cache.num_locked(),
                    private: self.cache.num_held() - quarantined,
                    quarantined,
                    promised: self.promised_pages(),
                }
            }
            Pool::Window | Pool::ReqSlots => {
                let free = crate::request::len_u32(self.free_slots.len());
                let quarantined = self.quarantine.num_slots();
                PoolUse {
                    name: pool.name(),
                    unit: if pool == Pool::Window {
                        "rings"
                    } else {
                        "slots"
                    },
                    ownership: Ownership::Request,
                    capacity: self.config.max_running_requests,
                    free,
                    evictable: 0,
                    locked: 0,
                    private: self.num_holding_slots(),
                    quarantined,
                    promised: 0,
                }
            }
        }
    }

    /// The pool table.
    #[must_use]
    pub fn pool_table(&self) -> Vec<PoolUse> {
        POOLS.iter().map(|pool| self.pool_use(*pool)).collect()
    }

    /// The pool in which the request does not even fit alone, with need and capacity.
    pub(crate) fn never_fits(&self, request: &Request) -> Option<(Pool, u32, u32)> {
        let need = Need {
            computed: request.most_computed() + self.config.overshoot(),
            shared: 0,
        };
        POOLS.iter().find_map(|pool| {
            let units = pool.need(need, self.config.page_size);
            let capacity = self.pool_use(*pool).capacity;
            (units > capacity).then_some((*pool, units, capacity))
        })
    }

    fn num_holding_slots(&self) -> u32 {
        crate::request::len_u32(self.running.len() + usize::from(self.carried.is_some()))
    }
}
