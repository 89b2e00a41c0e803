//! What the operations of the cache do with the components besides FULL.

use crate::arena::NodeHandle;
use crate::cache::RadixCache;
use crate::component::Trailing;
use crate::config::Component;
use crate::error::CacheError;
use crate::insert::{InsertedTail, Replaced, TailPages};
use crate::page::{page_count, PageId};
use crate::pool::PageState;
use crate::tree::Place;

/// One plan for each tail of an insert.
pub(crate) type TailPlans = [Option<TailPlan>; Component::OPTIONAL.len()];

/// What an insert is going to do with the pages of one tail. Those that become the tree's are in
/// the component's `scratch`, from the end of the key backwards, in runs.
#[derive(Debug)]
pub(crate) struct TailPlan {
    /// Index of the component.
    pub(crate) at: usize,
    /// Leading pages that lie before what the component retains.
    num_kept: u32,
    /// The others.
    num_taken: usize,
    replaced: Vec<Replaced>,
}

impl TailPlan {
    /// A plan that takes all of `pages`.
    fn all(at: usize, pages: &[PageId]) -> Self {
        Self {
            at,
            num_kept: 0,
            num_taken: pages.len(),
            replaced: Vec::new(),
        }
    }

    /// What stays the caller's, if anything does.
    fn outcome(self, component: Component) -> Option<InsertedTail> {
        let is_all_taken = self.num_kept == 0 && self.replaced.is_empty();
        (!is_all_taken).then_some(InsertedTail {
            component,
            num_kept: self.num_kept,
            replaced: self.replaced,
        })
    }
}

impl RadixCache {
    pub(crate) fn trailing_at(&self, component: Component) -> Result<usize, CacheError> {
        let is_kind = |trailing: &Trailing| trailing.kind == component;
        let at = self.trailing.iter().position(is_kind);
        at.ok_or(CacheError::NoComponent { component })
    }

    /// Appends the pages that a component has for the last tokens before the end of `node`, as far
    /// as the component retains them; returns how many. Lock the node first to keep them.
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`]; [`CacheError::NoComponent`] if the tree does not hold it.
    pub fn tail_pages(
        &self,
        node: NodeHandle,
        component: Component,
        out: &mut Vec<PageId>,
    ) -> Result<u32, CacheError> {
        let trailing = &self.trailing[self.trailing_at(component)?];
        let mut at = self.arena.resolve(node)?;
        let first = out.len();
        let mut wanted = trailing.window_pages() as usize;
        while wanted > 0 && !self.arena[at].is_root() {
            let pages = trailing.pages(at);
            let taken = pages.len().min(wanted);
            out.extend(pages[pages.len() - taken..].iter().rev());
            let is_whole = pages.len() == trailing.pages_for(self.arena[at].num_pages()) as usize;
            if !is_whole {
                break;
            }
            wanted -= taken;
            at = self.arena[at].parent;
        }
        out[first..].reverse();
        Ok(page_count(out.len() - first))
    }

    /// The last place at or before `place` where every component allows a hit to end.
    pub(crate) fn last_boundary(&self, place: Place) -> Place {
        let page_size = self.config.page_size;
        let (mut node, mut end) = (place.node, place.end_page * page_size);
        loop {
            let before = end;
            for trailing in &self.trailing {
                (node, end) = trailing.last_boundary(&self.arena, page_size, node, end);
            }
            if end == before || self.trailing.len() == 1 {
                let end_page = end / page_size;
                return Place { node, end_page };
            }
        }
    }

    /// Counts a receipt on the last tokens before the end of `node`.
    pub(crate) fn lock_tails(&mut self, node: u32) {
        let page_size = self.config.page_size;
        for trailing in &mut self.trailing {
            let start = trailing.lock_start(self.arena[node].end_page * page_size);
            let mut at = node;
            while !self.arena[at].is_root() {
                let class = self.retired.class(self.arena[at].root);
                if trailing.lock_count(at) == 0 && !trailing.pages(at).is_empty() {
                    trailing.order.remove(at, class);
                    trailing.num_evictable -= page_count(trailing.pages(at).len());
                }
                let tail = trailing.tail_mut(at);
                tail.lock_count += 1;
                if self.arena[at].start_page() * page_size <= start {
                    tail.add_mark(start);
                    break;
                }
                at = self.arena[at].parent;
            }
        }
    }

    /// Takes back what [`lock_tails`](Self::lock_tails) counted.
    pub(crate) fn unlock_tails(&mut self, node: u32) {
        let page_size = self.config.page_size;
        for trailing in &mut self.trailing {
            let start = trailing.lock_start(self.arena[node].end_page * page_size);
            let mut at = node;
            while !self.arena[at].is_root() {
                let here = &self.arena[at];
                let tail = trailing.tail_mut(at);
                tail.lock_count -= 1;
                let is_last = here.start_page() * page_size <= start;
                if is_last {
                    tail.remove_mark(start);
                }
                let (num_pages, is_free) = (page_count(tail.pages.len()), tail.lock_count == 0);
                if is_free && num_pages > 0 {
                    let class = self.retired.class(here.root);
                    trailing.num_evictable += num_pages;
                    trailing.order.push(at, class, here.end_page, &self.uses);
                }
                if is_last {
                    break;
                }
                at = here.parent;
            }
        }
    }

    /// Marks the data before the end of `node` as just used.
    pub(crate) fn touch_tails(&mut self, node: u32) {
        let page_size = self.config.page_size;
        for trailing in &mut self.trailing {
            let start = trailing.lock_start(self.arena[node].end_page * page_size);
            let mut at = node;
            while !self.arena[at].is_root() {
                let here = &self.arena[at];
                if trailing.order.is_listed(at) {
                    let class = self.retired.class(here.root);
                    trailing.order.renew(at, class, here.end_page, &self.uses);
                }
                if here.start_page() * page_size <= start {
                    break;
                }
                at = here.parent;
            }
        }
    }

    /// Divides the tails of a node that was split.
    pub(crate) fn split_tails(&mut self, second: u32, first: u32) {
        let page_size = self.config.page_size;
        let (split_at, end) = (
            self.arena[first].end_page,
            self.arena[second].end_page * page_size,
        );
        let class = self.retired.class(self.arena[first].root);
        for trailing in &mut self.trailing {
            let is_listed = trailing.order.is_listed(second);
            let num_moved = trailing.split(second, first, end, split_at * page_size);
            if num_moved == 0 {
                continue;
            }
            let is_locked = trailing.lock_count(first) > 0;
            let (order, uses) = (&mut trailing.order, &self.uses);
            if is_listed {
                order.push_after(second, first, class, split_at, uses);
            } else if !is_locked {
                trailing.num_evictable += num_moved;
                order.push(first, class, split_at, uses);
            }
        }
    }

    /// Refuses tails that cannot be those of a key of `num_pages` pages.
    pub(crate) fn check_tails(
        &self,
        num_pages: usize,
        tails: &[TailPages<'_>],
    ) -> Result<(), CacheError> {
        for (done, tail) in tails.iter().enumerate() {
            let component = tail.component;
            let trailing = &self.trailing[self.trailing_at(component)?];
            if tails[..done]
                .iter()
                .any(|other| other.component == component)
            {
                return Err(CacheError::NoComponent { component });
            }
            let most = trailing.pages_for(page_count(num_pages)) as usize;
            if tail.pages.len() > most {
                return Err(CacheError::TailMismatch {
                    component,
                    num_pages: tail.pages.len(),
                    most,
                });
            }
        }
        Ok(())
    }

    /// Compares each tail with what the tree has, for a key that ends `num_new` FULL pages after
    /// `reached`.
    pub(crate) fn plan_tails(
        &mut self,
        reached: Place,
        num_new: u32,
        tails: &[TailPages<'_>],
    ) -> Result<TailPlans, CacheError> {
        let mut plans = TailPlans::default();
        for (plan, tail) in plans.iter_mut().zip(tails) {
            *plan = Some(self.plan_tail(reached, num_new, *tail)?);
        }
        Ok(plans)
    }

    /// Plans to take each tail as a whole.
    pub(crate) fn plan_all(&mut self, tails: &[TailPages<'_>]) -> Result<TailPlans, CacheError> {
        let mut plans = TailPlans::default();
        for (plan, tail) in plans.iter_mut().zip(tails) {
            let at = self.trailing_at(tail.component)?;
            let scratch = &mut self.trailing[at].scratch;
            scratch.clear();
            scratch.extend_from_slice(tail.pages);
            *plan = Some(TailPlan::all(at, tail.pages));
        }
        Ok(plans)
    }

    fn plan_tail(
        &mut self,
        reached: Place,
        num_new: u32,
        tail: TailPages<'_>,
    ) -> Result<TailPlan, CacheError> {
        let at = self.trailing_at(tail.component)?;
        let mut scratch = std::mem::take(&mut self.trailing[at].scratch);
        scratch.clear();
        let plan = self.plan_runs(at, reached, num_new, tail.pages, &mut scratch);
        self.trailing[at].scratch = scratch;
        plan
    }

    /// The plan; pages that become the tree's are appended to `new`.
    fn plan_runs(
        &self,
        at: usize,
        reached: Place,
        num_new: u32,
        pages: &[PageId],
        new: &mut Vec<PageId>,
    ) -> Result<TailPlan, CacheError> {
        let trailing = &self.trailing[at];
        let num_taken = pages.len().min(trailing.window_pages() as usize);
        let (kept, mut rest) = pages.split_at(pages.len() - num_taken);
        let mut plan = TailPlan {
            at,
            num_kept: page_count(kept.len()),
            num_taken,
            replaced: Vec::new(),
        };
        // What the new leaf will hold, then node by node towards the root.
        let end_page = trailing.pages_for(reached.end_page + num_new) as usize;
        let beyond = rest.len().min(trailing.pages_for(num_new) as usize);
        let (before, in_leaf) = rest.split_at(rest.len() - beyond);
        new.extend_from_slice(in_leaf);
        rest = before;
        let mut node = reached.node;
        let mut node_end = reached.end_page;
        let mut column = end_page - beyond;
        while !rest.is_empty() {
            let here = &self.arena[node];
            let room = trailing.pages_for(node_end - here.start_page()) as usize;
            // A split at `node_end` leaves the pages after it behind.
            let cut = trailing.pages_for(here.end_page - node_end) as usize;
            let held = trailing.pages(node);
            let held = &held[..held.len().saturating_sub(cut)];
            let (before, own) = rest.split_at(rest.len() - room.min(rest.len()));
            let (fresh, doubles) = own.split_at(own.len() - held.len().min(own.len()));
            let first = column - doubles.len();
            let tree = &held[held.len() - doubles.len()..];
            for (offset, (&own, &tree)) in doubles.iter().zip(tree).enumerate() {
                if own == tree {
                    continue;
                }
                if trailing.pool.state(own) != Some(PageState::Held) {
                    return Err(CacheError::PageNotHeld { page: own });
                }
                plan.replaced.push(Replaced {
                    page_index: page_count(first + offset),
                    own,
                    tree,
                });
            }
            new.extend_from_slice(fresh);
            column -= own.len();
            rest = before;
            node_end = here.start_page();
            node = here.parent;
        }
        plan.replaced
            .sort_unstable_by_key(|replaced| replaced.page_index);
        Ok(plan)
    }

    /// Gives adopted tail pages to the nodes that they belong to, from `node` upwards.
    pub(crate) fn apply_tails(&mut self, node: u32, plans: TailPlans) -> Vec<InsertedTail> {
        let apply = |plan: TailPlan| {
            let component = self.apply_tail(node, &plan);
            plan.outcome(component)
        };
        plans.into_iter().flatten().filter_map(apply).collect()
    }

    fn apply_tail(&mut self, node: u32, plan: &TailPlan) -> Component {
        let trailing = &mut self.trailing[plan.at];
        let scratch = std::mem::take(&mut trailing.scratch);
        let mut at = node;
        let mut rest = &scratch[..];
        let mut left = plan.num_taken;
        while !rest.is_empty() {
            let here = &self.arena[at];
            let room = (trailing.pages_for(here.num_pages()) as usize).min(left);
            let num_held = trailing.pages(at).len();
            let num_new = room.saturating_sub(num_held);
            if num_new > 0 {
                let (new, more) = rest.split_at(num_new);
                let tail = trailing.tail_mut(at);
                tail.pages.prepend(new);
                rest = more;
                if trailing.lock_count(at) == 0 {
                    trailing.num_evictable += page_count(num_new);
                    if num_held == 0 {
                        let class = self.retired.class(here.root);
                        trailing.order.push(at, class, here.end_page, &self.uses);
                    }
                }
            }
            left -= room;
            at = here.parent;
        }
        trailing.scratch = scratch;
        trailing.kind
    }

    /// Takes all data of one component from a node.
    pub(crate) fn drop_tail(&mut self, at: usize, node: u32) {
        let trailing = &mut self.trailing[at];
        if trailing.pages(node).is_empty() {
            return;
        }
        let class = self.retired.class(self.arena[node].root);
        trailing.order.remove(node, class);
        let pages = std::mem::take(&mut trailing.tail_mut(node).pages);
        trailing.num_evictable -= page_count(pages.len());
        trailing.pool.release_tree(&pages);
    }

    /// Takes the data of the last `num_pages` FULL pages from an unlocked leaf.
    pub(crate) fn cut_tails(&mut self, leaf: u32, num_pages: u32) {
        for at in 0..self.trailing.len() {
            let trailing = &mut self.trailing[at];
            let num_cut = trailing.pages_for(num_pages) as usize;
            let num_held = trailing.pages(leaf).len();
            if num_held <= num_cut {
                self.drop_tail(at, leaf);
                continue;
            }
            let held = &mut trailing.tail_mut(leaf).pages;
            let left = held.take_head(num_held - num_cut);
            let cut = std::mem::replace(held, left);
            trailing.num_evictable -= page_count(cut.len());
            trailing.pool.release_tree(&cut);
        }
    }
}
