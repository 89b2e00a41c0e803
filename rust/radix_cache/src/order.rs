//! The order in which unlocked nodes were used: an intrusive list, oldest use first.

use crate::arena::{Arena, NIL};

/// The two ends of the list; the links are in the nodes.
#[derive(Debug)]
pub(crate) struct EvictionOrder {
    oldest: u32,
    newest: u32,
}

impl Default for EvictionOrder {
    fn default() -> Self {
        Self {
            oldest: NIL,
            newest: NIL,
        }
    }
}

impl EvictionOrder {
    pub(crate) fn oldest(&self) -> Option<u32> {
        (self.oldest != NIL).then_some(self.oldest)
    }

    pub(crate) fn push_newest(&mut self, arena: &mut Arena, node: u32) {
        self.join(arena, self.newest, node);
        self.join(arena, node, NIL);
    }

    pub(crate) fn remove(&mut self, arena: &mut Arena, node: u32) {
        let (older, newer) = (arena[node].older, arena[node].newer);
        self.join(arena, older, newer);
        arena[node].older = NIL;
        arena[node].newer = NIL;
    }

    /// Nodes from the oldest use to the newest.
    pub(crate) fn iter<'a>(&self, arena: &'a Arena) -> impl Iterator<Item = u32> + 'a {
        let first = self.oldest();
        std::iter::successors(first, |&node| {
            let newer = arena[node].newer;
            (newer != NIL).then_some(newer)
        })
    }

    /// Makes two nodes (or an end of the list) neighbours.
    fn join(&mut self, arena: &mut Arena, older: u32, newer: u32) {
        if older == NIL {
            self.oldest = newer;
        } else {
            arena[older].newer = newer;
        }
        if newer == NIL {
            self.newest = older;
        } else {
            arena[newer].older = older;
        }
    }
}
