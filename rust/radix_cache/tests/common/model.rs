//! What the cache must do, without a tree: a dictionary from (namespace, prefix) to its last page.

use std::collections::{BTreeMap, BTreeSet};

use dsserve_radix_cache::PageId;

/// (namespace number, tokens from the start to the end of the page).
pub type Prefix = (usize, Vec<u32>);

/// The last page of a prefix.
#[derive(Clone, Debug)]
pub struct Entry {
    pub page: PageId,
    /// Tells an entry from an earlier one of the same prefix.
    pub birth: u64,
    touched: u64,
    num_locks: u32,
    /// Whether something ended here once: what is evicted together lies between two of these.
    is_boundary: bool,
}

/// Where a handle points: the birth of its last page, or of the root for an empty prefix.
#[derive(Clone, Debug)]
pub struct Place {
    pub prefix: Prefix,
    pub birth: u64,
}

/// Birth of the place that stands for "nothing cached" in an unknown namespace.
const VOID_BIRTH: u64 = 0;

#[derive(Debug)]
pub struct Model {
    pub page_size: usize,
    pub num_pages: usize,
    pub entries: BTreeMap<Prefix, Entry>,
    pub held: BTreeSet<PageId>,
    pub num_receipts: u32,
    /// Namespaces that hold something or are locked: birth and locks.
    roots: BTreeMap<usize, (u64, u32)>,
    clock: u64,
}

impl Model {
    pub fn new(page_size: usize, num_pages: usize) -> Self {
        Self {
            page_size,
            num_pages,
            entries: BTreeMap::new(),
            held: BTreeSet::new(),
            num_receipts: 0,
            roots: BTreeMap::new(),
            clock: 0,
        }
    }

    /// Pages of the longest cached prefix.
    pub fn pages(&self, namespace: usize, tokens: &[u32]) -> Vec<PageId> {
        self.prefixes(namespace, tokens)
            .map_while(|prefix| self.entries.get(&prefix))
            .map(|entry| entry.page)
            .collect()
    }

    /// Marks `num_pages` pages of `tokens` as used, and their end as a place where something ended.
    pub fn touch(&mut self, namespace: usize, tokens: &[u32], num_pages: usize) -> Place {
        self.clock += 1;
        let tokens = &tokens[..num_pages * self.page_size];
        for prefix in self.prefixes(namespace, tokens).collect::<Vec<_>>() {
            self.entries.get_mut(&prefix).unwrap().touched = self.clock;
        }
        self.mark_boundary(namespace, tokens);
        self.place(namespace, tokens)
    }

    /// Adds the pages from `first` on; those before are there.
    pub fn insert(&mut self, namespace: usize, tokens: &[u32], pages: &[PageId], first: usize) {
        if first < pages.len() {
            self.clock += 1;
            self.roots.entry(namespace).or_insert((self.clock, 0));
        }
        self.mark_boundary(namespace, &tokens[..first * self.page_size]);
        for (column, prefix) in self
            .prefixes(namespace, tokens)
            .enumerate()
            .skip(first)
            .collect::<Vec<_>>()
        {
            assert!(self.held.remove(&pages[column]));
            self.clock += 1;
            let entry = Entry {
                page: pages[column],
                birth: self.clock,
                touched: self.clock,
                num_locks: 0,
                is_boundary: false,
            };
            assert!(self.entries.insert(prefix, entry).is_none());
        }
    }

    pub fn is_live(&self, place: &Place) -> bool {
        place.birth == VOID_BIRTH || self.birth(&place.prefix) == place.birth
    }

    pub fn lock(&mut self, place: &Place) {
        self.num_receipts += 1;
        self.change_locks(place, |locks| *locks += 1);
    }

    pub fn unlock(&mut self, place: &Place) {
        self.num_receipts -= 1;
        self.clock += 1;
        self.change_locks(place, |locks| *locks -= 1);
        let clock = self.clock;
        for prefix in self
            .prefixes(place.prefix.0, &place.prefix.1)
            .collect::<Vec<_>>()
        {
            let entry = self.entries.get_mut(&prefix).unwrap();
            if entry.num_locks == 0 {
                entry.touched = clock;
            }
        }
        self.drop_unused_roots();
    }

    /// Evicts page by page from the ends of leaves, by their last use; returns the freed pages.
    pub fn evict(&mut self, count: usize) -> Vec<PageId> {
        let mut freed = Vec::new();
        while freed.len() < count {
            let Some(prefix) = self.oldest_leaf() else {
                break;
            };
            freed.push(self.entries.remove(&prefix).unwrap().page);
        }
        self.drop_unused_roots();
        freed
    }

    pub fn num_locked(&self) -> usize {
        self.entries
            .values()
            .filter(|entry| entry.num_locks > 0)
            .count()
    }

    pub fn num_free(&self) -> usize {
        self.num_pages - self.held.len() - self.entries.len()
    }

    pub fn owners(&self) -> impl Iterator<Item = PageId> + '_ {
        let tree = self.entries.values().map(|entry| entry.page);
        self.held.iter().copied().chain(tree)
    }

    fn prefixes<'a>(
        &self,
        namespace: usize,
        tokens: &'a [u32],
    ) -> impl Iterator<Item = Prefix> + use<'a> {
        let page_size = self.page_size;
        (1..=tokens.len() / page_size)
            .map(move |pages| (namespace, tokens[..pages * page_size].to_vec()))
    }

    fn place(&self, namespace: usize, tokens: &[u32]) -> Place {
        let prefix = (namespace, tokens.to_vec());
        let birth = self.birth(&prefix);
        Place { prefix, birth }
    }

    fn birth(&self, prefix: &Prefix) -> u64 {
        if prefix.1.is_empty() {
            return self.roots.get(&prefix.0).map_or(VOID_BIRTH, |root| root.0);
        }
        self.entries
            .get(prefix)
            .map_or(VOID_BIRTH, |entry| entry.birth)
    }

    fn mark_boundary(&mut self, namespace: usize, tokens: &[u32]) {
        if let Some(entry) = self.entries.get_mut(&(namespace, tokens.to_vec())) {
            entry.is_boundary = true;
        }
    }

    fn change_locks(&mut self, place: &Place, change: impl Fn(&mut u32)) {
        if place.birth == VOID_BIRTH {
            return;
        }
        change(&mut self.roots.get_mut(&place.prefix.0).unwrap().1);
        for prefix in self
            .prefixes(place.prefix.0, &place.prefix.1)
            .collect::<Vec<_>>()
        {
            change(&mut self.entries.get_mut(&prefix).unwrap().num_locks);
        }
    }

    fn drop_unused_roots(&mut self) {
        let entries = &self.entries;
        self.roots.retain(|&namespace, root| {
            let mut own = entries.range((namespace, Vec::new())..(namespace + 1, Vec::new()));
            root.1 > 0 || own.next().is_some()
        });
    }

    /// In key order the extensions of a prefix follow it directly.
    fn oldest_leaf(&self) -> Option<Prefix> {
        let after = self.entries.keys().skip(1).map(Some).chain([None]);
        let is_leaf = |prefix: &Prefix, next: Option<&Prefix>| {
            !next.is_some_and(|next| next.0 == prefix.0 && next.1.starts_with(&prefix.1))
        };
        self.entries
            .iter()
            .zip(after)
            .filter(|((prefix, entry), next)| entry.num_locks == 0 && is_leaf(prefix, *next))
            .min_by_key(|((_, entry), _)| entry.touched)
            .map(|((prefix, _), _)| prefix.clone())
    }
}
