//! How pages get into the tree, and what the caller gets back instead.

use crate::arena::{NodeHandle, VOID};
use crate::cache::RadixCache;
use crate::config::Component;
use crate::error::CacheError;
use crate::key::Namespace;
use crate::page::{page_count, PageId};
use crate::pool::PageState;
use crate::trailing::TailPlans;
use crate::tree::Place;

/// What an insert did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Inserted {
    /// Node that ends at the end of the key.
    pub node: NodeHandle,
    /// Leading tokens whose FULL pages the tree had already.
    pub reused_len: u32,
    /// Columns where the tree keeps another FULL page than the caller's, ascending.
    pub replaced: Vec<Replaced>,
    /// Of which [`InsertOptions::tails`] some pages stay the caller's, in that order.
    pub tails: Vec<InsertedTail>,
}

/// A page that the tree had already under another number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replaced {
    /// Column of the caller's page table row.
    pub page_index: u32,
    /// The duplicate: still the caller's, to free once no step reads it.
    pub own: PageId,
    /// The tree's page, which takes its place.
    pub tree: PageId,
}

/// Which pages that an insert brought for a component besides FULL stay the caller's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InsertedTail {
    /// The component.
    pub component: Component,
    /// That many of the first pages lie before what the component retains: still the caller's.
    pub num_kept: u32,
    /// Pages that the tree had already (`page_index` counts pages of this component from the start
    /// of the key). All others now are the tree's.
    pub replaced: Vec<Replaced>,
}

/// Pages of a component that cover the end of an inserted key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TailPages<'a> {
    /// A component besides FULL.
    pub component: Component,
    /// The last of them ends where the key does.
    pub pages: &'a [PageId],
}

/// What an insert may be told besides key and FULL pages.
///
/// ```
/// use dsserve_radix_cache::InsertOptions;
/// let options = InsertOptions::default().with_priority(3);
/// assert_eq!(options.priority, Some(3));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct InsertOptions<'a> {
    /// A node known to be a prefix of the key: what comes before its end is not looked at (except
    /// its last page, as a check), so the cost is that of the new tokens.
    pub from: Option<NodeHandle>,
    /// Data of other components for the end of the key.
    pub tails: &'a [TailPages<'a>],
    /// Priority of the request, larger is more urgent; none is the lowest.
    pub priority: Option<i32>,
}

impl<'a> InsertOptions<'a> {
    /// The same, starting at a known prefix.
    #[must_use]
    pub fn with_from(mut self, from: NodeHandle) -> Self {
        self.from = Some(from);
        self
    }

    /// The same with data of other components.
    #[must_use]
    pub fn with_tails(mut self, tails: &'a [TailPages<'a>]) -> Self {
        self.tails = tails;
        self
    }

    /// The same for a request of this priority.
    #[must_use]
    pub fn with_priority(mut self, priority: i32) -> Self {
        self.priority = Some(priority);
        self
    }
}

impl RadixCache {
    /// Adds a prefix whose KV is on `pages`, which `tokens` fill exactly.
    ///
    /// The tree takes over the pages that follow what it had. Where it had a page already it keeps
    /// its own: a different page of the caller comes back in [`Inserted::replaced`] and stays the
    /// caller's. The path counts as just used. With the cache disabled all pages are freed.
    ///
    /// # Errors
    /// [`CacheError::PageMismatch`] if the lengths do not fit, [`CacheError::PageNotHeld`] if a
    /// page neither is the tree's at its column nor held by the caller. No page changed its owner.
    pub fn insert(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        pages: &[PageId],
    ) -> Result<Inserted, CacheError> {
        self.insert_with(namespace, tokens, pages, InsertOptions::default())
    }

    /// [`insert`](Self::insert) for a key that is known to start with the prefix `from`.
    ///
    /// Takes the same whole key and page row; see [`InsertOptions::from`]. The returned
    /// `reused_len` counts `from`, and page indices count from the start of the row.
    ///
    /// # Errors
    /// Those of [`insert_with`](Self::insert_with).
    pub fn insert_at(
        &mut self,
        namespace: &Namespace,
        from: NodeHandle,
        tokens: &[u32],
        pages: &[PageId],
    ) -> Result<Inserted, CacheError> {
        let options = InsertOptions::default().with_from(from);
        self.insert_with(namespace, tokens, pages, options)
    }

    /// [`insert`](Self::insert) with options.
    ///
    /// Of the tails the tree takes what lies within the last tokens that the component retains,
    /// and where it has no data there yet; a tombstone on the way comes back to life.
    ///
    /// # Errors
    /// Those of [`insert`](Self::insert); [`CacheError::StaleHandle`] if `from` is gone;
    /// [`CacheError::NotOnPath`] if it is of another namespace or no prefix of the key;
    /// [`CacheError::NoComponent`] for a tail of a component that the tree does not hold, or that
    /// is given twice; [`CacheError::TailMismatch`] for a tail longer than the key.
    pub fn insert_with(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        pages: &[PageId],
        options: InsertOptions<'_>,
    ) -> Result<Inserted, CacheError> {
        if pages.len().checked_mul(self.page_size()) != Some(tokens.len()) {
            return Err(CacheError::PageMismatch {
                num_tokens: tokens.len(),
                num_pages: pages.len(),
                page_size: self.config.page_size,
            });
        }
        self.check_tails(pages.len(), options.tails)?;
        let start = self.start_of(namespace, tokens, options.from)?;
        if !self.config.enabled {
            return self.take_nothing(pages, options.tails);
        }
        let (reached, replaced) = self.find_duplicates(start, tokens, pages)?;
        let num_reused = reached.end_page as usize;
        let new_pages = &pages[num_reused..];
        let plans = self.plan_tails(reached, page_count(new_pages.len()), options.tails)?;
        self.adopt(new_pages, &plans)?;
        let is_taken =
            |duplicate: &&Replaced| self.pool.state(duplicate.own) != Some(PageState::Held);
        if let Some(&Replaced { own: page, .. }) = replaced.iter().find(is_taken) {
            // Given twice: where the tree has a page, and as a new one.
            self.disown(new_pages, &plans, usize::MAX);
            return Err(CacheError::PageNotHeld { page });
        }

        self.uses.tick();
        let mut node = self.node_at(reached);
        if !new_pages.is_empty() {
            let new_tokens = &tokens[num_reused * self.page_size()..];
            self.tokens.write(new_pages, new_tokens);
            self.hashes.forget(new_pages);
            self.copies.forget(new_pages);
            node = self.add_leaf(namespace, node, new_pages);
        }
        let tails = self.apply_tails(node, plans);
        if !new_pages.is_empty() {
            self.record_stored(node);
        }
        self.touch(node, false, options.priority.unwrap_or(i32::MIN));
        self.touch_tails(node);
        if !new_pages.is_empty() || !options.tails.is_empty() {
            self.note_change(node);
        }
        Ok(Inserted {
            node: self.arena.handle(node),
            reused_len: reached.end_page * self.config.page_size,
            replaced,
            tails,
        })
    }

    /// The node from which to look at the key.
    fn start_of(
        &self,
        namespace: &Namespace,
        tokens: &[u32],
        from: Option<NodeHandle>,
    ) -> Result<u32, CacheError> {
        let root = self.namespaces.root(namespace);
        let from = from.map_or(Ok(VOID), |from| self.arena.resolve(from))?;
        if from == VOID {
            // Nothing was cached when the caller looked; by now something may be.
            return Ok(root);
        }
        let node = &self.arena[from];
        let end = node.end_page as usize * self.page_size();
        let is_prefix = end <= tokens.len()
            && node
                .pages()
                .last()
                .is_none_or(|&last| *self.tokens.page(last) == tokens[end - self.page_size()..end]);
        if node.root == root && is_prefix {
            return Ok(from);
        }
        Err(CacheError::NotOnPath {
            node_pages: node.end_page,
        })
    }

    /// How far the tree has the key already, and where it has it on other pages.
    fn find_duplicates(
        &self,
        start: u32,
        tokens: &[u32],
        pages: &[PageId],
    ) -> Result<(Place, Vec<Replaced>), CacheError> {
        let mut replaced = Vec::new();
        let mut column = self.arena[start].end_page as usize;
        let reached = self.walk(start, &tokens[column * self.page_size()..], |found| {
            for (&tree, &own) in found.iter().zip(&pages[column..]) {
                if own != tree {
                    replaced.push(Replaced {
                        page_index: page_count(column),
                        own,
                        tree,
                    });
                }
                column += 1;
            }
        });
        let not_held =
            |duplicate: &&Replaced| self.pool.state(duplicate.own) != Some(PageState::Held);
        match replaced.iter().find(not_held) {
            Some(&Replaced { own: page, .. }) => Err(CacheError::PageNotHeld { page }),
            None => Ok((reached, replaced)),
        }
    }

    /// Makes all new pages the tree's, or none.
    fn adopt(&mut self, pages: &[PageId], plans: &TailPlans) -> Result<(), CacheError> {
        self.pool.adopt(pages)?;
        for (done, plan) in plans.iter().flatten().enumerate() {
            let trailing = &mut self.trailing[plan.at];
            if let Err(error) = trailing.pool.adopt(&trailing.scratch) {
                self.disown(pages, plans, done);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Undoes [`adopt`](Self::adopt) of the pages and of the first `count` tails.
    fn disown(&mut self, pages: &[PageId], plans: &TailPlans, count: usize) {
        self.pool.disown(pages);
        for plan in plans.iter().flatten().take(count) {
            let trailing = &mut self.trailing[plan.at];
            trailing.pool.disown(&trailing.scratch);
        }
    }

    /// With the cache disabled: everything goes to the free lists.
    fn take_nothing(
        &mut self,
        pages: &[PageId],
        tails: &[TailPages<'_>],
    ) -> Result<Inserted, CacheError> {
        let plans = self.plan_all(tails)?;
        self.adopt(pages, &plans)?;
        self.pool.release_tree(pages);
        for plan in plans.iter().flatten() {
            let trailing = &mut self.trailing[plan.at];
            trailing.pool.release_tree(&trailing.scratch);
        }
        Ok(Inserted {
            node: self.arena.handle(VOID),
            reused_len: 0,
            replaced: Vec::new(),
            tails: Vec::new(),
        })
    }
}
