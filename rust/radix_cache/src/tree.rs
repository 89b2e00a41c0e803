//! The shape of the tree: match, insert and split. Nothing else adds nodes or moves edges.

use crate::arena::{Node, NodeHandle, NIL, VOID};
use crate::cache::RadixCache;
use crate::error::CacheError;
use crate::key::Namespace;
use crate::page::{page_count, PageId};
use crate::pool::PageState;

/// The longest cached prefix of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Match {
    /// Tokens of it, a multiple of the page size.
    pub cached_len: u32,
    /// Node that ends exactly there; lock it before anything can evict.
    pub node: NodeHandle,
    /// Its pages, in order.
    pub pages: Vec<PageId>,
}

/// What an insert did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inserted {
    /// Node that ends at the end of the key.
    pub node: NodeHandle,
    /// Leading tokens that the tree had already.
    pub reused_len: u32,
    /// Columns where the tree keeps another page than the caller's, ascending.
    pub replaced: Vec<Replaced>,
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

/// How far a key leads into the tree.
struct Walk {
    /// Deepest node that lies wholly on the key.
    node: u32,
    /// Child of `node` in which the key goes on, and how many of its pages (not all) it covers.
    partial: Option<(u32, usize)>,
}

impl RadixCache {
    /// Finds the longest cached prefix of `tokens` in whole pages and marks it as just used.
    ///
    /// Splits a node if the prefix ends inside it. Linear in the match. The caller cuts its prompt
    /// to the length that may be a hit (at most all but the last token).
    pub fn match_prefix(&mut self, namespace: &Namespace, tokens: &[u32]) -> Match {
        let mut pages = Vec::new();
        let root = self.namespaces.root(namespace);
        let walk = self.walk(root, tokens, |found| pages.extend_from_slice(found));
        let node = self.boundary(&walk);
        self.touch(node);
        Match {
            cached_len: page_count(pages.len()) * self.config.page_size,
            node: self.arena.handle(node),
            pages,
        }
    }

    /// The `cached_len` that [`match_prefix`](Self::match_prefix) would give; changes nothing.
    #[must_use]
    pub fn match_dry_run(&self, namespace: &Namespace, tokens: &[u32]) -> u32 {
        let mut num_pages = 0;
        let root = self.namespaces.root(namespace);
        self.walk(root, tokens, |found| num_pages += page_count(found.len()));
        num_pages * self.config.page_size
    }

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
        self.check_lengths(tokens, pages)?;
        self.insert_below(namespace, self.namespaces.root(namespace), tokens, pages)
    }

    /// [`insert`](Self::insert) for a key that is known to start with the prefix `from`.
    ///
    /// Takes the same whole key and page row, but looks at nothing before the end of `from` (except
    /// the last page of it, as a check): the cost is that of the new tokens. The returned
    /// `reused_len` counts `from`, and page indices count from the start of the row.
    ///
    /// # Errors
    /// Those of [`insert`](Self::insert); [`CacheError::StaleHandle`] if `from` is gone;
    /// [`CacheError::NotOnPath`] if it is of another namespace or no prefix of the key.
    pub fn insert_at(
        &mut self,
        namespace: &Namespace,
        from: NodeHandle,
        tokens: &[u32],
        pages: &[PageId],
    ) -> Result<Inserted, CacheError> {
        self.check_lengths(tokens, pages)?;
        let from = self.arena.resolve(from)?;
        let root = self.namespaces.root(namespace);
        if from == VOID {
            // Nothing was cached when the caller looked; by now something may be.
            return self.insert_below(namespace, root, tokens, pages);
        }
        let node = &self.arena[from];
        let end_page = node.end_page as usize;
        let is_prefix = end_page <= pages.len()
            && node.pages.last().is_none_or(|&last| {
                let end = end_page * self.page_size();
                *self.tokens.page(last) == tokens[end - self.page_size()..end]
            });
        if node.root != root || !is_prefix {
            return Err(CacheError::NotOnPath {
                node_pages: node.end_page,
            });
        }
        self.insert_below(namespace, from, tokens, pages)
    }

    fn check_lengths(&self, tokens: &[u32], pages: &[PageId]) -> Result<(), CacheError> {
        if pages.len().checked_mul(self.page_size()) == Some(tokens.len()) {
            return Ok(());
        }
        Err(CacheError::PageMismatch {
            num_tokens: tokens.len(),
            num_pages: pages.len(),
            page_size: self.config.page_size,
        })
    }

    /// Inserts what follows `start`; `tokens` and `pages` are whole.
    fn insert_below(
        &mut self,
        namespace: &Namespace,
        start: u32,
        tokens: &[u32],
        pages: &[PageId],
    ) -> Result<Inserted, CacheError> {
        if !self.config.enabled {
            self.pool.free_held(pages)?;
            return Ok(Inserted {
                node: self.arena.handle(VOID),
                reused_len: 0,
                replaced: Vec::new(),
            });
        }
        let mut replaced = Vec::new();
        let mut column = self.arena[start].end_page as usize;
        let walk = self.walk(start, &tokens[column * self.page_size()..], |found| {
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
        if let Some(&Replaced { own: page, .. }) = replaced.iter().find(not_held) {
            return Err(CacheError::PageNotHeld { page });
        }
        let new_pages = &pages[column..];
        self.pool.adopt(new_pages)?;
        let mut node = self.boundary(&walk);
        if !new_pages.is_empty() {
            self.tokens
                .write(new_pages, &tokens[column * self.page_size()..]);
            node = self.add_leaf(namespace, node, new_pages);
        }
        self.touch(node);
        Ok(Inserted {
            node: self.arena.handle(node),
            reused_len: page_count(column) * self.config.page_size,
            replaced,
        })
    }

    /// Follows `tokens` down from `start`, giving the pages on the way to `visit`.
    fn walk(&self, start: u32, tokens: &[u32], mut visit: impl FnMut(&[PageId])) -> Walk {
        let mut node = start;
        let mut rest = tokens;
        while rest.len() >= self.page_size() {
            let Some((child, shared)) = self.find_child(node, rest) else {
                break;
            };
            let pages = &self.arena[child].pages;
            visit(&pages[..shared]);
            if shared < pages.len() {
                return Walk {
                    node,
                    partial: Some((child, shared)),
                };
            }
            rest = &rest[shared * self.page_size()..];
            node = child;
        }
        Walk {
            node,
            partial: None,
        }
    }

    /// The child that goes on with `tokens`, and how many of its pages agree (at least one).
    fn find_child(&self, parent: u32, tokens: &[u32]) -> Option<(u32, usize)> {
        if self.arena[parent].num_children == 0 {
            return None;
        }
        let key = self.hasher.child_key(parent, &tokens[..self.page_size()]);
        let mut child = self.children.head(key);
        while child != NIL {
            let node = &self.arena[child];
            if node.parent == parent {
                let shared = self.tokens.shared_pages(&node.pages, tokens);
                if shared > 0 {
                    return Some((child, shared));
                }
            }
            child = node.next_same_key;
        }
        None
    }

    /// The node that ends exactly where the walk did.
    fn boundary(&mut self, walk: &Walk) -> u32 {
        match walk.partial {
            Some((child, num_pages)) => self.split(child, num_pages),
            None => walk.node,
        }
    }

    /// Cuts `node` after its first `num_pages` pages and returns the new node that holds those.
    ///
    /// The second part keeps the index, so handles, receipts and children stay valid; both parts
    /// keep the lock count.
    fn split(&mut self, node: u32, num_pages: usize) -> u32 {
        let second = &mut self.arena[node];
        let tail: Box<[PageId]> = second.pages[num_pages..].into();
        let head: Box<[PageId]> = second.pages[..num_pages].into();
        let head_end = second.end_page - page_count(tail.len());
        let tail_key_page = tail[0];
        let (parent, key, lock_count) = (second.parent, second.child_key, second.lock_count);
        let mut first = Node::new(head, parent, second.root, head_end);
        first.num_children = 1;
        first.lock_count = lock_count;
        second.pages = tail;

        let first = self.arena.insert(first);
        self.children.remove(&mut self.arena, node);
        self.children.insert(&mut self.arena, key, first);
        self.arena[node].parent = first;
        let key = self
            .hasher
            .child_key(first, self.tokens.page(tail_key_page));
        self.children.insert(&mut self.arena, key, node);
        if lock_count == 0 {
            // The caller touches it next, and its ancestors after it.
            self.order.push_newest(&mut self.arena, first);
        }
        first
    }

    /// Hangs adopted pages below `parent` ([`VOID`]: below a new root of the namespace).
    fn add_leaf(&mut self, namespace: &Namespace, parent: u32, pages: &[PageId]) -> u32 {
        let parent = if parent == VOID {
            self.add_root(namespace)
        } else {
            parent
        };
        let up = &mut self.arena[parent];
        up.num_children += 1;
        let num_pages = page_count(pages.len());
        let leaf = Node::new(pages.into(), parent, up.root, up.end_page + num_pages);
        let leaf = self.arena.insert(leaf);
        let key = self.hasher.child_key(parent, self.tokens.page(pages[0]));
        self.children.insert(&mut self.arena, key, leaf);
        self.order.push_newest(&mut self.arena, leaf);
        self.num_evictable += num_pages;
        leaf
    }

    fn add_root(&mut self, namespace: &Namespace) -> u32 {
        let root = self.arena.insert(Node::new(Box::default(), NIL, NIL, 0));
        self.arena[root].root = root;
        self.namespaces.insert(namespace, root);
        root
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::CacheConfig;

    /// With every key the same, only the compares tell children (and parents) apart.
    #[test]
    fn colliding_keys_cost_time_only() {
        let mut cache = RadixCache::new(CacheConfig {
            page_size: 2,
            num_pages: 64,
            enabled: true,
        })
        .unwrap();
        cache.hasher.mask = 0;
        let namespace = Namespace::default();
        let keys: Vec<Vec<u32>> = (0..27_u32)
            .map(|number| {
                let symbols = [number / 9, number / 3 % 3, number % 3];
                symbols.iter().flat_map(|&symbol| [5, symbol]).collect()
            })
            .collect();
        for key in &keys {
            let mut pages = Vec::new();
            assert!(cache.allocate(3, &mut pages));
            let inserted = cache.insert(&namespace, key, &pages).unwrap();
            for replaced in inserted.replaced {
                cache.free(&[replaced.own]);
            }
        }
        assert_eq!(cache.num_evictable(), 3 + 9 + 27);
        cache.check_invariants().unwrap();
        for key in &keys {
            assert_eq!(cache.match_prefix(&namespace, key).cached_len, 6);
            assert_eq!(cache.match_prefix(&namespace, &key[..4]).cached_len, 4);
        }
        // Chains are taken apart from anywhere, not from their heads only.
        for num_left in (0..39).rev() {
            assert_eq!(cache.evict(1), 1);
            assert_eq!(cache.num_evictable(), num_left);
            cache.check_invariants().unwrap();
        }
    }
}
