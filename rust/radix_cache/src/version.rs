//! Whether a match that somebody remembers is still the longest one, without looking it up again.

use crate::arena::NodeHandle;
use crate::cache::RadixCache;
use crate::tree::Match;

impl RadixCache {
    /// Whether a match that ended at `node`, and was made at `version`, would give the same now.
    ///
    /// False means that it may have changed: the node was evicted or cut, no hit may end there any
    /// more, or something was inserted that begins with this prefix. Takes constant time (with
    /// further components: that of the nodes in their windows). See also
    /// [`is_current`](Self::is_current).
    #[must_use]
    pub fn unchanged_since(&self, node: NodeHandle, version: u64) -> bool {
        let Ok(node) = self.arena.resolve(node) else {
            return false;
        };
        self.arena[node].changed_at <= version && self.may_end_at(node)
    }

    /// Whether [`match_prefix`](Self::match_prefix) of `tokens`, which gave `found`, would give the
    /// same hit now.
    ///
    /// Knows more than [`unchanged_since`](Self::unchanged_since): what was inserted after the same
    /// prefix counts only if it goes on with the page that follows in `tokens`. So the end of a
    /// system prompt that many requests share does not seem to change with each of them.
    ///
    /// # Panics
    /// May panic if `tokens` are not those that were matched, but fewer than the hit.
    #[must_use]
    pub fn is_current(&self, found: &Match, tokens: &[u32]) -> bool {
        let Ok(node) = self.arena.resolve(found.node) else {
            return false;
        };
        if !self.may_end_at(node) {
            return false;
        }
        // Where FULL pages went on, any change below may have made their end a boundary. Without a
        // root it is not known which namespace the match was made in.
        self.arena[node].changed_at <= found.version
            || (found.full_len == found.cached_len
                && node != crate::arena::VOID
                && !self.goes_on(node, &tokens[found.cached_len as usize..]))
    }

    fn may_end_at(&self, node: u32) -> bool {
        let page_size = self.config.page_size;
        let mut trailing = self.trailing.iter();
        trailing.all(|trailing| trailing.allows_end(&self.arena, page_size, node))
    }

    fn goes_on(&self, node: u32, tokens: &[u32]) -> bool {
        let root = self.arena[node].end_page;
        self.walk(node, tokens.get(..self.page_size()).unwrap_or(&[]), |_| {})
            .end_page
            != root
    }

    /// Something was added at the end of `node` or on the way there.
    ///
    /// Whoever matched a prefix of it may now match more; that match ended at the deepest boundary
    /// that was allowed before. So each node up to the first one that was allowed before, and whose
    /// window is not among what was added, has changed.
    pub(crate) fn note_change(&mut self, node: u32) {
        self.version += 1;
        let page_size = self.config.page_size;
        let windows = self.trailing.iter().map(|trailing| trailing.window);
        let window = windows.max().unwrap_or(0);
        let added_from = (self.arena[node].end_page * page_size).saturating_sub(window);
        let mut at = node;
        loop {
            self.arena[at].changed_at = self.version;
            if self.arena[at].is_root() {
                return;
            }
            let end = self.arena[at].end_page * page_size;
            let was_usable = end <= added_from && end > self.min_hit;
            if at != node && was_usable && self.may_end_at(at) {
                return;
            }
            at = self.arena[at].parent;
        }
    }
}
