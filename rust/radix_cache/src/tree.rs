//! The shape of the tree: how far a key leads, where nodes are cut in two, where leaves are hung.

use crate::arena::{Node, NodeHandle, NIL, VOID};
use crate::cache::RadixCache;
use crate::error::CacheError;
use crate::key::Namespace;
use crate::page::{page_count, PageId};

/// The longest usable cached prefix of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Match {
    /// Tokens of it, a multiple of the page size.
    pub cached_len: u32,
    /// Tokens beyond `cached_len` that lie in host memory; 0, as there is no host tier yet.
    pub host_len: u32,
    /// Tokens whose FULL pages are cached; more than `cached_len` where another component lacks its
    /// data at every later boundary.
    pub full_len: u32,
    /// Node that ends exactly at `cached_len`; lock it before anything can evict.
    pub node: NodeHandle,
    /// FULL pages of `cached_len` tokens, in order.
    pub pages: Vec<PageId>,
    /// For [`RadixCache::unchanged_since`].
    pub version: u64,
}

/// A page boundary of the tree: inside `node` or at its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) node: u32,
    pub(crate) end_page: u32,
}

impl RadixCache {
    /// Finds the longest cached prefix of `tokens` that can be reused and marks it as just used.
    ///
    /// Whole pages count. Splits a node if the prefix ends inside it. Linear in the match. The
    /// caller cuts its prompt to the length that may be a hit (at most all but the last token).
    pub fn match_prefix(&mut self, namespace: &Namespace, tokens: &[u32]) -> Match {
        let root = self.namespaces.root(namespace);
        self.match_from(root, root, Vec::new(), tokens, true)
    }

    /// [`match_prefix`](Self::match_prefix) for a request that waits: what it finds counts as just
    /// used, but not as a hit, until [`count_hit`](Self::count_hit) says that it was one.
    ///
    /// With `known`, a match of the beginning of `tokens`, looks at what follows it only, as long as
    /// that is still in the tree.
    ///
    /// # Panics
    /// If `tokens` are fewer than those of `known`.
    pub fn look_up(
        &mut self,
        namespace: &Namespace,
        tokens: &[u32],
        known: Option<Match>,
    ) -> Match {
        let root = self.namespaces.root(namespace);
        let start = known.and_then(|known| {
            let node = self.arena.resolve(known.node).ok()?;
            (node != VOID && self.arena[node].root == root).then_some((node, known.pages))
        });
        let (start, pages) = start.unwrap_or((root, Vec::new()));
        let num_known = pages.len() * self.page_size();
        self.match_from(root, start, pages, &tokens[num_known..], false)
    }

    /// A match found by [`look_up`](Self::look_up) was used: it counts as a hit of all nodes on its
    /// path.
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`].
    pub fn count_hit(&mut self, node: NodeHandle) -> Result<(), CacheError> {
        let node = self.arena.resolve(node)?;
        self.uses.tick();
        self.touch(node, true, i32::MIN);
        self.touch_tails(node);
        Ok(())
    }

    /// The longest match whose first `pages`, down to `start`, are known; `tokens` follow them.
    fn match_from(
        &mut self,
        root: u32,
        start: u32,
        mut pages: Vec<PageId>,
        tokens: &[u32],
        is_hit: bool,
    ) -> Match {
        let reached = self.walk(start, tokens, |found| pages.extend_from_slice(found));
        let place = self.usable(root, reached);
        pages.truncate(place.end_page as usize);
        let node = self.node_at(place);
        self.uses.tick();
        self.touch(node, is_hit, i32::MIN);
        self.touch_tails(node);
        Match {
            cached_len: place.end_page * self.config.page_size,
            host_len: 0,
            full_len: reached.end_page * self.config.page_size,
            node: self.arena.handle(node),
            pages,
            version: self.version,
        }
    }

    /// The `cached_len` that [`match_prefix`](Self::match_prefix) would give; changes nothing.
    #[must_use]
    pub fn match_dry_run(&self, namespace: &Namespace, tokens: &[u32]) -> u32 {
        let root = self.namespaces.root(namespace);
        let reached = self.walk(root, tokens, |_| {});
        self.usable(root, reached).end_page * self.config.page_size
    }

    /// The last place at or before `reached` where a hit may end.
    fn usable(&self, root: u32, reached: Place) -> Place {
        let place = self.last_boundary(reached);
        if place.end_page * self.config.page_size > self.min_hit {
            return place;
        }
        Place {
            node: root,
            end_page: 0,
        }
    }

    /// Follows `tokens` down from `start`, giving the pages on the way to `visit`.
    pub(crate) fn walk(
        &self,
        start: u32,
        tokens: &[u32],
        mut visit: impl FnMut(&[PageId]),
    ) -> Place {
        let mut node = start;
        let mut rest = tokens;
        while rest.len() >= self.page_size() {
            let Some((child, shared)) = self.find_child(node, rest) else {
                break;
            };
            let pages = self.arena[child].pages();
            visit(&pages[..shared]);
            if shared < pages.len() {
                return Place {
                    node: child,
                    end_page: self.arena[child].start_page() + page_count(shared),
                };
            }
            rest = &rest[shared * self.page_size()..];
            node = child;
        }
        Place {
            node,
            end_page: self.arena[node].end_page,
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
                let shared = self.tokens.shared_pages(node.pages(), tokens);
                if shared > 0 {
                    return Some((child, shared));
                }
            }
            child = node.next_same_key;
        }
        None
    }

    /// The node that ends exactly at `place`.
    pub(crate) fn node_at(&mut self, place: Place) -> u32 {
        if place.end_page == self.arena[place.node].end_page {
            return place.node;
        }
        self.split(place.node, place.end_page)
    }

    /// Cuts `node` at `end_page` and returns the new node that holds what comes before.
    ///
    /// The second part keeps the index, so handles, receipts and children stay valid; both parts
    /// keep the lock count.
    fn split(&mut self, node: u32, end_page: u32) -> u32 {
        let second = &mut self.arena[node];
        let head = second.split_off_head(end_page - second.start_page());
        let tail_key_page = second.pages()[0];
        let (parent, key, lock_count) = (second.parent, second.child_key, second.lock_count);
        let mut first = Node::new(head, parent, second.root, end_page);
        first.num_children = 1;
        first.lock_count = lock_count;
        first.changed_at = self.version;

        let first = self.arena.insert(first);
        self.children.remove(&mut self.arena, node);
        self.children.insert(&mut self.arena, key, first);
        self.arena[node].parent = first;
        let key = self
            .hasher
            .child_key(first, self.tokens.page(tail_key_page));
        self.children.insert(&mut self.arena, key, node);
        self.uses.split(node, first);
        if lock_count == 0 {
            // The caller touches it next, and its ancestors after it.
            self.enlist(first);
        }
        self.split_tails(node, first);
        first
    }

    /// Hangs adopted pages below `parent` ([`VOID`]: below a new root of the namespace).
    pub(crate) fn add_leaf(&mut self, namespace: &Namespace, parent: u32, pages: &[PageId]) -> u32 {
        let parent = if parent == VOID {
            self.add_root(namespace)
        } else {
            parent
        };
        if !self.order.is_list() && self.order.is_listed(parent) {
            self.delist(parent);
        }
        let up = &mut self.arena[parent];
        up.num_children += 1;
        let num_pages = page_count(pages.len());
        let leaf = Node::new(pages.into(), parent, up.root, up.end_page + num_pages);
        let leaf = self.arena.insert(leaf);
        let key = self.hasher.child_key(parent, self.tokens.page(pages[0]));
        self.children.insert(&mut self.arena, key, leaf);
        self.uses.create(leaf);
        self.enlist(leaf);
        self.num_evictable += num_pages;
        leaf
    }

    fn add_root(&mut self, namespace: &Namespace) -> u32 {
        let root = self.arena.insert(Node::new(Box::default(), NIL, NIL, 0));
        self.arena[root].root = root;
        self.namespaces.insert(namespace, root);
        self.retired.note_root(root, namespace.model_generation);
        self.version += 1;
        self.arena[root].changed_at = self.version;
        self.arena[VOID].changed_at = self.version;
        root
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::CacheConfig;

    /// With every key the same, only the compares tell children (and parents) apart.
    #[test]
    fn colliding_keys_cost_time_only() {
        let mut cache = RadixCache::new(CacheConfig::new(2, 64)).unwrap();
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
