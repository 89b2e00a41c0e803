//! The follower's side of a plan: it applies what the leader decided, and notices when it differs.
use thiserror::Error;

use crate::digest::TableDigest;
use crate::plan::{PlanCapacity, StepPlan};

/// A plan that does not follow from those before it. Fatal for the group: the follower's page table
/// is not the leader's any more.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum FollowerError {
    /// The plan is for another group.
    #[error("plan {step_id} is for group {found}, this follower is of group {expected}")]
    Group {
        /// The plan.
        step_id: u64,
        /// The follower's group.
        expected: u32,
        /// The plan's group.
        found: u32,
    },
    /// A plan is missing, or came twice.
    #[error("plan {found} came where plan {expected} was due")]
    Sequence {
        /// The plan that was due.
        expected: u64,
        /// The plan that came.
        found: u64,
    },
    /// A slot or column outside the page table, or a slot that another request holds.
    #[error("plan {step_id}: slot {slot}: {what}")]
    Table {
        /// The plan.
        step_id: u64,
        /// The slot as the plan has it.
        slot: i32,
        /// What is wrong.
        what: &'static str,
    },
    /// The page tables differ.
    #[error(
        "plan {step_id}: the page table's digest is {found:#018x}, the leader's {expected:#018x}"
    )]
    Digest {
        /// The plan.
        step_id: u64,
        /// The leader's digest.
        expected: u64,
        /// The follower's.
        found: u64,
    },
}

/// The page table of a follower, kept from plans alone.
///
/// ```
/// use dsserve_scheduler::{Follower, RequestSpec, Scheduler, SchedulerConfig};
///
/// let mut leader = Scheduler::new(SchedulerConfig::default())?;
/// let mut follower = Follower::new(0, leader.plan_capacity());
/// leader.submit(vec![RequestSpec {
///     request_id: 1,
///     token_ids: vec![5; 40],
///     max_new_tokens: 3,
///     ..RequestSpec::default()
/// }]);
/// let plan = leader.next_plan(0)?.expect("a prompt waits");
/// follower.follow(plan).expect("the first plan");
/// assert!(follower.follow(plan).is_err(), "a plan comes once");
/// # Ok::<(), dsserve_scheduler::SchedulerError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Follower {
    group_id: u32,
    last_step: u64,
    columns: usize,
    /// Request and pages (0 = none) of each slot.
    slots: Vec<(Option<u64>, Vec<u32>)>,
    digest: TableDigest,
}

impl Follower {
    /// A follower of a leader that has planned nothing yet.
    #[must_use]
    pub fn new(group_id: u32, capacity: PlanCapacity) -> Self {
        Self {
            group_id,
            last_step: 0,
            columns: capacity.columns as usize,
            slots: vec![(None, Vec::new()); capacity.slots as usize],
            digest: TableDigest::new(capacity.slots),
        }
    }

    /// Applies a plan's releases and deltas and compares the digests.
    ///
    /// # Errors
    /// [`FollowerError`]; nothing may be computed from this plan or later ones then.
    pub fn follow(&mut self, plan: &StepPlan) -> Result<(), FollowerError> {
        let step_id = plan.step_id;
        if plan.group_id != self.group_id {
            return Err(FollowerError::Group {
                step_id,
                expected: self.group_id,
                found: plan.group_id,
            });
        }
        if step_id != self.last_step + 1 {
            return Err(FollowerError::Sequence {
                expected: self.last_step + 1,
                found: step_id,
            });
        }
        self.last_step = step_id;
        for slot in &plan.released_slots {
            let index = self.index(step_id, *slot)?;
            self.slots[index] = (None, Vec::new());
            self.digest.clear(unsigned(*slot));
        }
        for (slot, request_id) in plan.request_slot.iter().zip(&plan.request_id) {
            let index = self.index(step_id, *slot)?;
            let holder = &mut self.slots[index].0;
            match holder {
                None => {
                    *holder = Some(*request_id);
                    self.digest.hold(unsigned(*slot), *request_id);
                }
                Some(holder) if holder == request_id => {}
                Some(_) => return Err(table_error(step_id, *slot, "another request holds it")),
            }
        }
        for [slot, column, page] in &plan.page_deltas {
            self.write(step_id, *slot, *column, unsigned(*page))?;
        }
        let found = self.digest.of_step(step_id);
        if found != plan.digest {
            return Err(FollowerError::Digest {
                step_id,
                expected: plan.digest,
                found,
            });
        }
        Ok(())
    }

    /// Page of a column in a slot's row of the page table.
    #[must_use]
    pub fn page(&self, slot: u32, column: u32) -> Option<u32> {
        let pages = &self.slots.get(slot as usize)?.1;
        pages
            .get(column as usize)
            .copied()
            .filter(|page| *page != 0)
    }

    fn write(
        &mut self,
        step_id: u64,
        slot: i32,
        column: i32,
        page: u32,
    ) -> Result<(), FollowerError> {
        let index = self.index(step_id, slot)?;
        let column = usize::try_from(column).unwrap_or(usize::MAX);
        if column >= self.columns {
            return Err(table_error(
                step_id,
                slot,
                "a column outside the page table",
            ));
        }
        let pages = &mut self.slots[index].1;
        if pages.len() <= column {
            pages.resize(column + 1, 0);
        }
        let (slot, place) = (unsigned(slot), crate::request::len_u32(column));
        let old = std::mem::replace(&mut pages[column], page);
        if old != 0 {
            self.digest.remove(slot, place, old);
        }
        self.digest.add(slot, place, page);
        Ok(())
    }

    fn index(&self, step_id: u64, slot: i32) -> Result<usize, FollowerError> {
        let index = usize::try_from(slot).unwrap_or(usize::MAX);
        if index == 0 || index >= self.slots.len() {
            return Err(table_error(step_id, slot, "no slot of the page table"));
        }
        Ok(index)
    }
}

fn table_error(step_id: u64, slot: i32, what: &'static str) -> FollowerError {
    FollowerError::Table {
        step_id,
        slot,
        what,
    }
}

/// Slots and pages are not negative; a negative one becomes one that no table has.
fn unsigned(value: i32) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
