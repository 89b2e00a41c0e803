//! Which nodes lead to a prefix, for callers that group prefixes by what they share.

use crate::arena::NodeHandle;
use crate::cache::RadixCache;
use crate::error::CacheError;

impl RadixCache {
    /// The nodes on the way to `node`, from below the root to `node` itself.
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`].
    pub fn path(&self, node: NodeHandle) -> Result<Vec<NodeHandle>, CacheError> {
        let path = self.path_to(self.arena.resolve(node)?);
        let handles = path.into_iter().map(|node| self.arena.handle(node));
        Ok(handles.collect())
    }

    /// The same without handles.
    pub(crate) fn path_to(&self, node: u32) -> Vec<u32> {
        let mut path = Vec::new();
        let mut at = node;
        while !self.arena[at].is_root() {
            path.push(at);
            at = self.arena[at].parent;
        }
        path.reverse();
        path
    }
}

#[cfg(test)]
mod tests {
    use crate::{CacheConfig, Namespace, RadixCache};

    #[test]
    fn prefixes_share_the_nodes_up_to_where_they_part() {
        let mut cache = RadixCache::new(CacheConfig::new(2, 16)).unwrap();
        let namespace = Namespace::default();
        for key in [[1, 1, 2, 2, 3, 3], [1, 1, 2, 2, 4, 4]] {
            let mut pages = Vec::new();
            assert!(cache.allocate(3, &mut pages));
            let inserted = cache.insert(&namespace, &key, &pages).unwrap();
            for replaced in inserted.replaced {
                cache.free(&[replaced.own]);
            }
        }
        let found = cache.match_prefix(&namespace, &[1, 1, 2, 2, 3, 3]);
        let other = cache.match_prefix(&namespace, &[1, 1, 2, 2, 4, 4]);
        let (path, other) = (
            cache.path(found.node).unwrap(),
            cache.path(other.node).unwrap(),
        );
        assert_eq!((path.len(), other.len()), (2, 2));
        assert_eq!(path[0], other[0]);
        assert_ne!(path[1], other[1]);
        assert_eq!(path[1], found.node);
        let missed = cache.match_prefix(&namespace, &[9, 9]);
        assert_eq!(cache.path(missed.node).unwrap(), []);
    }
}
