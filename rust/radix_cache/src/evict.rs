//! What goes when pages are needed: the ends of unlocked leaves, in the order of the policy.
//!
//! Under LRU one list (`order.rs`) holds every unlocked node, oldest use first. A use marks a path
//! from its end up to the root, so a parent always comes after its children; and the ancestors of a
//! locked node are locked. Hence the oldest node of the list is always a leaf, the next victim is
//! found without a search, and a parent that becomes a leaf already stands where its last use puts
//! it. The other policies list unlocked leaves only, by rank.

use std::collections::HashSet;

use crate::arena::VOID;
use crate::cache::RadixCache;
use crate::config::Component;
use crate::error::CacheError;
use crate::order::Class;
use crate::page::page_count;
use crate::tree::Place;

/// Roots of namespaces whose model generation was replaced.
#[derive(Debug, Default)]
pub(crate) struct Retired {
    /// The first generation that was not.
    generation: u64,
    roots: HashSet<u32>,
}

impl Retired {
    pub(crate) fn class(&self, root: u32) -> Class {
        if self.roots.is_empty() || !self.roots.contains(&root) {
            Class::Current
        } else {
            Class::Retired
        }
    }

    /// A root was made for a namespace of `generation`.
    pub(crate) fn note_root(&mut self, root: u32, generation: u64) {
        if generation < self.generation {
            self.roots.insert(root);
        }
    }
}

impl RadixCache {
    /// Drops unlocked leaves from their ends, in the order of the policy, until `count` FULL pages
    /// went to the free list or nothing evictable is left; returns how many pages went.
    ///
    /// A leaf that holds more than is needed loses its last pages only, so that the prefix stays
    /// cached as far as possible; its handles become stale all the same. Where another component
    /// allows no hit to end at the cut, the leaf goes as far as to its last boundary, which may be
    /// more than `count`. The cost depends on what goes, not on what stays.
    pub fn evict(&mut self, count: u32) -> u32 {
        let before = self.num_free();
        let mut freed = 0;
        while freed < count {
            let Some(leaf) = self.order.first() else {
                break;
            };
            let num_left = self.arena[leaf].num_pages().saturating_sub(count - freed);
            self.shorten(leaf, num_left);
            freed = self.num_free() - before;
        }
        freed
    }

    /// Drops data of one component until `count` of its pages are free; returns how many went.
    ///
    /// An inner node becomes a tombstone: its FULL pages stay, but no hit can end there. An
    /// unlocked leaf goes as a whole, with the ancestors that are of no use without it.
    ///
    /// # Errors
    /// [`CacheError::NoComponent`] if the tree does not hold the component.
    pub fn evict_component(&mut self, component: Component, count: u32) -> Result<u32, CacheError> {
        if component == Component::Full {
            return Ok(self.evict(count));
        }
        let at = self.trailing_at(component)?;
        let before = self.trailing[at].pool.num_free();
        let mut freed = 0;
        while freed < count {
            let Some(node) = self.trailing[at].order.first() else {
                break;
            };
            if self.arena[node].num_children == 0 && self.arena[node].lock_count == 0 {
                self.shorten(node, 0);
            } else {
                self.drop_tail(at, node);
            }
            freed = self.trailing[at].pool.num_free() - before;
        }
        Ok(freed)
    }

    /// Empties the tree; returns the FULL pages that went to the free list.
    ///
    /// Held pages stay with their holders.
    ///
    /// # Errors
    /// [`CacheError::Locked`] while any receipt is live, one on an empty match too; nothing has
    /// changed then.
    pub fn flush(&mut self) -> Result<u32, CacheError> {
        if self.num_receipts > 0 {
            return Err(CacheError::Locked {
                num_receipts: self.num_receipts,
                num_pages: self.num_locked(),
            });
        }
        let events = self.events.take();
        let freed = self.evict(u32::MAX);
        self.events = events;
        self.record_cleared();
        Ok(freed)
    }

    /// Makes what is cached for model generations before `generation` go before all else.
    ///
    /// New requests cannot reach it any more: their namespaces name the new generation.
    /// Linear in the nodes of the tree.
    pub fn retire_generations(&mut self, generation: u64) {
        self.retired.generation = self.retired.generation.max(generation);
        let mut roots: HashSet<u32> = self.namespaces.older_than(generation).collect();
        roots.retain(|root| !self.retired.roots.contains(root));
        if roots.is_empty() {
            return;
        }
        let arena = &self.arena;
        let is_retired = |node: u32| roots.contains(&arena[node].root);
        let end_page = |node: u32| arena[node].end_page;
        self.order.retire(is_retired, &self.uses, end_page);
        for trailing in &mut self.trailing {
            trailing.order.retire(is_retired, &self.uses, end_page);
        }
        self.retired.roots.extend(roots);
    }

    /// Marks the path from `node` to the root as just used.
    pub(crate) fn touch(&mut self, mut node: u32, is_hit: bool, priority: i32) {
        while !self.arena[node].is_root() {
            let here = &self.arena[node];
            if self.uses.is_kept() {
                self.uses.touch(node, is_hit, priority);
            } else if here.lock_count > 0 {
                // Then all above are locked too, and there is nothing to keep about them.
                break;
            }
            if self.order.is_listed(node) {
                let class = self.retired.class(here.root);
                self.order.renew(node, class, here.end_page, &self.uses);
            }
            node = here.parent;
        }
    }

    /// Lists an unlocked node, if the policy lists such nodes.
    pub(crate) fn enlist(&mut self, node: u32) {
        let here = &self.arena[node];
        if self.order.is_list() || here.num_children == 0 {
            let class = self.retired.class(here.root);
            self.order.push(node, class, here.end_page, &self.uses);
        }
    }

    pub(crate) fn delist(&mut self, node: u32) {
        let class = self.retired.class(self.arena[node].root);
        self.order.remove(node, class);
    }

    /// Drops a root that neither holds nor is held; without this, salts would pile up.
    pub(crate) fn prune_root(&mut self, root: u32) {
        let node = &self.arena[root];
        if root != VOID && node.num_children == 0 && node.lock_count == 0 {
            self.namespaces.remove(root);
            self.retired.roots.remove(&root);
            self.arena.remove(root);
        }
    }

    /// Cuts an unlocked leaf to its first `num_left` pages, or further to where a hit may end; goes
    /// on with its ancestors as long as they become leaves at which no hit may end.
    fn shorten(&mut self, leaf: u32, num_left: u32) {
        let end_page = self.arena[leaf].start_page() + num_left;
        // The same for all nodes on the way there: what goes lies behind it.
        let place = self.last_boundary(Place {
            node: leaf,
            end_page,
        });
        let mut node = leaf;
        loop {
            let here = &self.arena[node];
            let parent = here.parent;
            if place.end_page > here.start_page() {
                if place.end_page < here.end_page {
                    self.cut_leaf(node, place.end_page);
                }
                return;
            }
            self.remove_leaf(node);
            let up = &self.arena[parent];
            if up.num_children > 0 || up.lock_count > 0 || up.is_root() {
                if up.is_root() {
                    self.prune_root(parent);
                }
                return;
            }
            node = parent;
        }
    }

    fn cut_leaf(&mut self, leaf: u32, end_page: u32) {
        let here = &self.arena[leaf];
        let num_left = end_page - here.start_page();
        let cut = here.pages()[num_left as usize..].to_vec();
        self.record_removed(leaf, &cut);
        self.cut_tails(leaf, page_count(cut.len()));
        self.arena[leaf].cut(num_left);
        self.arena.renew(leaf);
        if !self.order.is_list() {
            // Its rank may depend on where it ends.
            self.delist(leaf);
            self.enlist(leaf);
        }
        self.pool.release_tree(&cut);
        self.num_evictable -= page_count(cut.len());
    }

    fn remove_leaf(&mut self, leaf: u32) {
        debug_assert_eq!(
            self.arena[leaf].num_children, 0,
            "children go before parents"
        );
        debug_assert_eq!(
            self.arena[leaf].lock_count, 0,
            "locked nodes are not listed"
        );
        self.delist(leaf);
        for at in 0..self.trailing.len() {
            self.drop_tail(at, leaf);
        }
        self.children.remove(&mut self.arena, leaf);
        let pages = self.arena[leaf].take_pages();
        self.record_removed(leaf, &pages);
        let parent = self.arena[leaf].parent;
        self.num_evictable -= page_count(pages.len());
        self.pool.release_tree(&pages);
        self.arena.remove(leaf);
        let up = &mut self.arena[parent];
        up.num_children -= 1;
        let is_new_leaf = up.num_children == 0 && up.lock_count == 0 && !up.is_root();
        if is_new_leaf && !self.order.is_list() {
            self.enlist(parent);
        }
    }
}
