//! Numbers of pages: their type and how lists of them are counted.

/// Number of a page in the FULL pool. 0 is the dummy page, which nobody ever owns.
pub type PageId = u32;

/// Page counts are bounded by the pool, whose size is a `u32`.
pub(crate) fn page_count(len: usize) -> u32 {
    u32::try_from(len).expect("a pool has less than 2^32 pages")
}
