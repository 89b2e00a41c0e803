//! What a cached prefix is called: its namespace, and the hash that finds a child by its first page.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use crate::arena::VOID;

/// What must agree, besides the tokens, for two requests to share pages.
///
/// An empty string differs from `None`. A new model generation makes everything cached under the
/// older one unreachable.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// Counts weight updates.
    pub model_generation: u64,
    /// The request's `extra_key`.
    pub extra_key: Option<String>,
    /// The request's `cache_salt`.
    pub cache_salt: Option<String>,
    /// Name of the adapter the request runs with.
    pub adapter: Option<String>,
}

/// The root node of each namespace that holds something or is locked.
#[derive(Debug, Default)]
pub(crate) struct Namespaces {
    by_name: HashMap<Arc<Namespace>, u32>,
    by_root: HashMap<u32, Arc<Namespace>>,
}

impl Namespaces {
    /// Root of `namespace`, or [`VOID`] (which never has children) if nothing is cached in it.
    pub(crate) fn root(&self, namespace: &Namespace) -> u32 {
        self.by_name.get(namespace).copied().unwrap_or(VOID)
    }

    pub(crate) fn insert(&mut self, namespace: &Namespace, root: u32) {
        let name = Arc::new(namespace.clone());
        self.by_name.insert(Arc::clone(&name), root);
        self.by_root.insert(root, name);
    }

    pub(crate) fn name(&self, root: u32) -> Option<&Arc<Namespace>> {
        self.by_root.get(&root)
    }

    pub(crate) fn remove(&mut self, root: u32) {
        if let Some(name) = self.by_root.remove(&root) {
            self.by_name.remove(&name);
        }
    }

    /// Roots of namespaces of earlier model generations.
    pub(crate) fn older_than(&self, generation: u64) -> impl Iterator<Item = u32> + '_ {
        let names = self.by_name.iter();
        let older = names.filter(move |(name, _)| name.model_generation < generation);
        older.map(|(_, &root)| root)
    }

    pub(crate) fn len(&self) -> usize {
        self.by_name.len()
    }

    pub(crate) fn roots(&self) -> impl Iterator<Item = u32> + '_ {
        self.by_name.values().copied()
    }
}

/// Hashes (parent, first page) to the 64-bit key under which a child is indexed.
///
/// Equal hashes are told apart by a full compare, so the seed changes speed only, never results.
/// It is drawn per cache so that clients cannot prepare prompts that collide.
#[derive(Debug)]
pub(crate) struct ChildHasher {
    seed: u64,
    /// Also of the second factor, which ids could cancel if it were known.
    second: u64,
    /// Lets tests force collisions.
    #[cfg(test)]
    pub(crate) mask: u64,
}

impl ChildHasher {
    pub(crate) fn new() -> Self {
        Self {
            seed: RandomState::new().hash_one(0_u64),
            second: RandomState::new().hash_one(1_u64),
            #[cfg(test)]
            mask: u64::MAX,
        }
    }

    /// A number that other caches do not have, in all likelihood.
    pub(crate) fn identity(&self) -> u64 {
        self.seed
    }

    /// Key of the child of `parent` whose first page holds `page_tokens`.
    pub(crate) fn child_key(&self, parent: u32, page_tokens: &[u32]) -> u64 {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        const FINAL: u64 = 0xd6e8_feb8_6659_fd93;
        let mut state = self.seed ^ u64::from(parent).wrapping_mul(STEP);
        let mut groups = page_tokens.chunks_exact(4);
        for group in &mut groups {
            state = fold(
                state ^ pair(group[0], group[1]),
                self.second ^ pair(group[2], group[3]),
            );
        }
        for &token in groups.remainder() {
            state = fold(state ^ u64::from(token), self.second);
        }
        let key = fold(state, FINAL);
        #[cfg(test)]
        let key = key & self.mask;
        key
    }
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Multiplies to 128 bits and folds the halves: one multiplication mixes sixteen bytes.
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the upper half is folded in"
    )]
    let low = product as u64;
    let high = (product >> 64) as u64;
    low ^ high
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn child_key_depends_on_parent_and_on_every_token() {
        let hasher = ChildHasher::new();
        for len in [1_usize, 2, 3, 4, 7, 64] {
            let page: Vec<u32> = (1..=u32::try_from(len).unwrap()).collect();
            let key = hasher.child_key(3, &page);
            assert_eq!(key, hasher.child_key(3, &page));
            assert_ne!(key, hasher.child_key(4, &page));
            for position in 0..len {
                let mut other = page.clone();
                other[position] ^= 0x8000;
                assert_ne!(
                    key,
                    hasher.child_key(3, &other),
                    "token {position} of {len}"
                );
            }
        }
    }

    /// A factor that a prompt can make zero would hide all that comes before it.
    #[test]
    fn no_ids_cancel_what_stands_before_them() {
        let hasher = ChildHasher::new();
        for id in [0, 0x7f4a_7c15, 0x9e37_79b9, u32::MAX] {
            for other in [0, 0x7f4a_7c15, 0x9e37_79b9, u32::MAX] {
                let page = |first| hasher.child_key(3, &[first, 5, id, other]);
                assert_ne!(page(1), page(2), "{id:x} {other:x}");
            }
        }
    }

    #[test]
    fn empty_strings_are_not_absent() {
        let mut namespaces = Namespaces::default();
        let empty = Namespace {
            cache_salt: Some(String::new()),
            ..Namespace::default()
        };
        namespaces.insert(&empty, 7);
        assert_eq!(namespaces.root(&empty), 7);
        assert_eq!(namespaces.root(&Namespace::default()), VOID);
        namespaces.remove(7);
        assert_eq!((namespaces.root(&empty), namespaces.len()), (VOID, 0));
    }
}
