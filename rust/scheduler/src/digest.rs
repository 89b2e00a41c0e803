//! A 64-bit digest of the page table: equal for all who applied the same plans (`serving.md` 0.2).
//!
//! The digest of a table is the sum of a hash of each entry, so that it follows changes at the cost of
//! the change alone.

/// Column under which the request that holds a slot is entered.
const HOLDER: u32 = u32::MAX;

/// Digest of the entries of each slot, and of them all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TableDigest {
    slots: Vec<u64>,
    sum: u64,
}

fn mix(word: u64) -> u64 {
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

fn entry(slot: u32, column: u32, value: u64) -> u64 {
    mix(mix(value) ^ (u64::from(slot) << 32 | u64::from(column)))
}

impl TableDigest {
    /// An empty table with slots `0..num_slots`.
    pub fn new(num_slots: u32) -> Self {
        Self {
            slots: vec![0; num_slots as usize],
            sum: 0,
        }
    }

    pub fn add(&mut self, slot: u32, column: u32, page: u32) {
        self.change(slot, entry(slot, column, page.into()));
    }

    pub fn remove(&mut self, slot: u32, column: u32, page: u32) {
        self.change(slot, entry(slot, column, page.into()).wrapping_neg());
    }

    /// Enters the request that holds a slot.
    pub fn hold(&mut self, slot: u32, request_id: u64) {
        self.change(slot, entry(slot, HOLDER, request_id));
    }

    /// Forgets all entries of a slot.
    pub fn clear(&mut self, slot: u32) {
        self.change(slot, self.slots[slot as usize].wrapping_neg());
    }

    /// Digest of one slot's entries.
    pub fn of_slot(&self, slot: u32) -> u64 {
        self.slots[slot as usize]
    }

    /// Digest of the table after step `step_id`.
    pub fn of_step(&self, step_id: u64) -> u64 {
        mix(self.sum ^ mix(step_id))
    }

    fn change(&mut self, slot: u32, by: u64) {
        let of_slot = &mut self.slots[slot as usize];
        *of_slot = of_slot.wrapping_add(by);
        self.sum = self.sum.wrapping_add(by);
    }
}
