//! What the cache must do, without a tree: a dictionary from (namespace, prefix) to its last page.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use dsserve_radix_cache::{EvictionPolicy, Medium, PageId};

use super::model_tails::{ModelComponent, TailEntry};

/// (namespace number, tokens from the start to the end of the page).
pub type Prefix = (usize, Vec<u32>);

/// The last page of a prefix.
#[derive(Clone, Debug)]
pub struct Entry {
    pub page: PageId,
    /// Tells an entry from an earlier one of the same prefix.
    pub birth: u64,
    pub num_locks: u32,
    /// Whether something ended here once: nodes lie between two of these.
    pub is_boundary: bool,
    /// Media besides the device.
    pub copies: BTreeSet<Medium>,
    /// By component.
    pub tails: Vec<TailEntry>,
    touched: u64,
    uses: Uses,
}

/// What the policies other than LRU go by.
#[derive(Clone, Copy, Debug)]
struct Uses {
    created: u64,
    used: u64,
    hits: u32,
    priority: i32,
    rate: f64,
}

/// Where a handle points: the birth of its last page, or of the root for an empty prefix.
#[derive(Clone, Debug)]
pub struct Place {
    pub prefix: Prefix,
    pub birth: u64,
}

/// Birth of the place that stands for "nothing cached" in an unknown namespace.
const VOID_BIRTH: u64 = 0;

/// Uses after which a hit counts half, and pages after which a token costs double (`cost`).
const HALF_LIFE: f64 = 4096.0;
const DOUBLE_COST_PAGES: f64 = 512.0;

#[derive(Debug)]
pub struct Model {
    pub page_size: usize,
    pub num_pages: usize,
    pub policy: EvictionPolicy,
    pub components: Vec<ModelComponent>,
    pub entries: BTreeMap<Prefix, Entry>,
    pub held: BTreeSet<PageId>,
    pub num_receipts: u32,
    /// Namespaces that go before others.
    pub retired: BTreeSet<usize>,
    /// Namespaces that hold something or are locked: birth and locks.
    roots: BTreeMap<usize, (u64, u32)>,
    pub clock: u64,
    use_clock: u64,
}

/// Who is at work, for the policies.
#[derive(Clone, Copy)]
pub enum Cause {
    Hit,
    LookUp,
    Insert(i32),
}

impl Model {
    pub fn new(page_size: usize, num_pages: usize, policy: EvictionPolicy) -> Self {
        Self {
            page_size,
            num_pages,
            policy,
            components: Vec::new(),
            entries: BTreeMap::new(),
            held: BTreeSet::new(),
            num_receipts: 0,
            retired: BTreeSet::new(),
            roots: BTreeMap::new(),
            clock: 0,
            use_clock: 0,
        }
    }

    /// FULL pages of the longest cached prefix.
    pub fn pages(&self, namespace: usize, tokens: &[u32]) -> Vec<PageId> {
        self.prefixes(namespace, tokens)
            .map_while(|prefix| self.entries.get(&prefix))
            .map(|entry| entry.page)
            .collect()
    }

    /// Pages of the longest prefix at which a hit may end.
    pub fn usable_pages(&self, namespace: usize, tokens: &[u32]) -> Vec<PageId> {
        let mut pages = self.pages(namespace, tokens);
        while !self.allows_end(namespace, &tokens[..pages.len() * self.page_size]) {
            pages.pop();
        }
        pages
    }

    /// Marks `num_pages` pages of `tokens` as used, and their end as a place where something ended.
    pub fn touch(
        &mut self,
        namespace: usize,
        tokens: &[u32],
        num_pages: usize,
        cause: Cause,
    ) -> Place {
        let tokens = &tokens[..num_pages * self.page_size];
        self.mark_boundary(namespace, tokens);
        self.clock += 1;
        self.use_clock += 1;
        let now = self.use_clock;
        for prefix in self.prefixes(namespace, tokens).collect::<Vec<_>>() {
            let entry = self.entries.get_mut(&prefix).unwrap();
            entry.touched = self.clock;
            let uses = &mut entry.uses;
            uses.rate *= decay(uses.used, now);
            uses.used = now;
            match cause {
                Cause::Hit => {
                    uses.hits += 1;
                    uses.rate += 1.0;
                }
                Cause::LookUp => {}
                Cause::Insert(priority) => uses.priority = uses.priority.max(priority),
            }
        }
        self.touch_tails(namespace, tokens);
        self.place(namespace, tokens)
    }

    /// Adds the pages from `first` on; those before are there.
    pub fn insert(&mut self, namespace: usize, tokens: &[u32], pages: &[PageId], first: usize) {
        if first < pages.len() {
            self.clock += 1;
            self.roots.entry(namespace).or_insert((self.clock, 0));
        }
        self.mark_boundary(namespace, &tokens[..first * self.page_size]);
        let now = self.use_clock + 1;
        let prefixes: Vec<Prefix> = self.prefixes(namespace, tokens).collect();
        for (column, prefix) in prefixes.into_iter().enumerate().skip(first) {
            assert!(self.held.remove(&pages[column]));
            self.clock += 1;
            let entry = Entry {
                page: pages[column],
                birth: self.clock,
                touched: self.clock,
                num_locks: 0,
                is_boundary: false,
                copies: BTreeSet::new(),
                tails: vec![TailEntry::default(); self.components.len()],
                uses: Uses {
                    created: now,
                    used: now,
                    hits: 0,
                    priority: i32::MIN,
                    rate: 0.0,
                },
            };
            assert!(self.entries.insert(prefix, entry).is_none());
        }
        self.mark_boundary(namespace, tokens);
    }

    pub fn is_live(&self, place: &Place) -> bool {
        place.birth == VOID_BIRTH || self.birth(&place.prefix) == place.birth
    }

    pub fn lock(&mut self, place: &Place) {
        self.num_receipts += 1;
        self.change_locks(place, |locks| *locks += 1);
        self.lock_tails(place);
    }

    pub fn unlock(&mut self, place: &Place, keeps_tails: bool) {
        self.num_receipts -= 1;
        self.clock += 1;
        self.use_clock += 1;
        if keeps_tails {
            self.unlock_tails(place);
        }
        self.change_locks(place, |locks| *locks -= 1);
        if place.birth != VOID_BIRTH {
            let (clock, now) = (self.clock, self.use_clock);
            for prefix in self.prefixes_of(&place.prefix) {
                let entry = self.entries.get_mut(&prefix).unwrap();
                if entry.num_locks == 0 {
                    entry.touched = clock;
                    entry.uses.rate *= decay(entry.uses.used, now);
                    entry.uses.used = now;
                }
            }
        }
        self.drop_unused_roots();
    }

    /// Evicts from the ends of leaves, in the order of the policy, as far as hits may end there.
    pub fn evict(&mut self, count: usize) -> usize {
        let before = self.entries.len();
        while before - self.entries.len() < count {
            let Some(leaf) = self.first_leaf() else {
                break;
            };
            let freed = before - self.entries.len();
            let num_pages = leaf.1.len() / self.page_size;
            let start = self.run_start(&leaf);
            self.shorten(&leaf, start.max(num_pages.saturating_sub(count - freed)));
        }
        self.drop_unused_roots();
        before - self.entries.len()
    }

    /// Cuts a leaf to `num_left` pages, or to where a hit may end; then its ancestors, as long as
    /// they are leaves at which no hit may end.
    pub fn shorten(&mut self, leaf: &Prefix, num_left: usize) {
        let (namespace, tokens) = leaf;
        let start = self.run_start(leaf);
        let mut left = num_left;
        while left > start && !self.allows_end(*namespace, &tokens[..left * self.page_size]) {
            left -= 1;
        }
        for pages in left + 1..=tokens.len() / self.page_size {
            self.remove(&(*namespace, tokens[..pages * self.page_size].to_vec()));
        }
        let up = (*namespace, tokens[..start * self.page_size].to_vec());
        let is_dead_end =
            left == start && start > 0 && self.entries[&up].num_locks == 0 && self.is_leaf(&up);
        if is_dead_end {
            self.shorten(&up, start);
        }
    }

    /// The node that ends with `prefix` is copied or not; returns whether that is news.
    pub fn note_copy(&mut self, prefix: &Prefix, medium: Medium, is_stored: bool) -> bool {
        if prefix.1.is_empty() || medium == Medium::Gpu {
            return false;
        }
        let is_news = self.has_copy(prefix, medium) != is_stored;
        for part in self.prefixes_of(prefix).split_off(self.run_start(prefix)) {
            let copies = &mut self.entries.get_mut(&part).unwrap().copies;
            if is_stored {
                copies.insert(medium);
            } else {
                copies.remove(&medium);
            }
        }
        is_news
    }

    pub fn has_copy(&self, prefix: &Prefix, medium: Medium) -> bool {
        let entry = self.entries.get(prefix);
        entry.is_some_and(|entry| entry.copies.contains(&medium))
    }

    pub fn num_locked(&self) -> usize {
        let locked = self.entries.values().filter(|entry| entry.num_locks > 0);
        locked.count()
    }

    pub fn num_free(&self) -> usize {
        self.num_pages - self.held.len() - self.entries.len()
    }

    pub fn owners(&self) -> impl Iterator<Item = PageId> + '_ {
        let tree = self.entries.values().map(|entry| entry.page);
        self.held.iter().copied().chain(tree)
    }

    pub fn prefixes<'a>(
        &self,
        namespace: usize,
        tokens: &'a [u32],
    ) -> impl Iterator<Item = Prefix> + use<'a> {
        let page_size = self.page_size;
        (1..=tokens.len() / page_size)
            .map(move |pages| (namespace, tokens[..pages * page_size].to_vec()))
    }

    pub fn prefixes_of(&self, prefix: &Prefix) -> Vec<Prefix> {
        self.prefixes(prefix.0, &prefix.1).collect()
    }

    pub fn is_leaf(&self, prefix: &Prefix) -> bool {
        let mut after = self.entries.range(prefix.clone()..);
        after.next();
        !after.next().is_some_and(|(next, _)| {
            next.0 == prefix.0 && next.1.len() > prefix.1.len() && next.1.starts_with(&prefix.1)
        })
    }

    /// Pages before the node that ends with (or reaches beyond) `prefix`.
    pub fn run_start(&self, prefix: &Prefix) -> usize {
        let (namespace, tokens) = prefix;
        let mut start = tokens.len() / self.page_size - 1;
        while start > 0 {
            let up = (*namespace, tokens[..start * self.page_size].to_vec());
            if self.entries[&up].is_boundary {
                break;
            }
            start -= 1;
        }
        start
    }

    fn remove(&mut self, prefix: &Prefix) {
        let entry = self.entries.remove(prefix).unwrap();
        assert_eq!(entry.num_locks, 0, "locked data was evicted");
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
        let prefix = (namespace, tokens.to_vec());
        let Some(entry) = self.entries.get_mut(&prefix) else {
            return;
        };
        if !std::mem::replace(&mut entry.is_boundary, true) {
            self.split_tails(&prefix);
        }
    }

    fn change_locks(&mut self, place: &Place, change: impl Fn(&mut u32)) {
        if place.birth == VOID_BIRTH {
            return;
        }
        change(&mut self.roots.get_mut(&place.prefix.0).unwrap().1);
        for prefix in self.prefixes_of(&place.prefix) {
            change(&mut self.entries.get_mut(&prefix).unwrap().num_locks);
        }
    }

    pub fn drop_unused_roots(&mut self) {
        let entries = &self.entries;
        self.roots.retain(|&namespace, root| {
            let mut own = entries.range((namespace, Vec::new())..(namespace + 1, Vec::new()));
            root.1 > 0 || own.next().is_some()
        });
    }

    fn first_leaf(&self) -> Option<Prefix> {
        let leaves = self
            .entries
            .iter()
            .filter(|(prefix, entry)| entry.num_locks == 0 && self.is_leaf(prefix));
        let first = leaves.min_by(|a, b| self.rank(a).partial_cmp(&self.rank(b)).unwrap());
        first.map(|(prefix, _)| prefix.clone())
    }

    fn rank(&self, (prefix, entry): &(&Prefix, &Entry)) -> (Reverse<bool>, f64, u64) {
        let uses = &entry.uses;
        let value = match self.policy {
            EvictionPolicy::Lfu => f64::from(uses.hits),
            EvictionPolicy::Slru => f64::from(u8::from(uses.hits >= 2)),
            EvictionPolicy::Fifo => as_f64(uses.created),
            EvictionPolicy::Priority => f64::from(uses.priority),
            EvictionPolicy::Cost => {
                let depth = u32::try_from(prefix.1.len() / self.page_size).unwrap();
                let cost = 1.0 + f64::from(depth) / DOUBLE_COST_PAGES;
                cost.log2() + uses.rate.max(0.25).log2() + as_f64(uses.used) / HALF_LIFE
            }
            _ => 0.0,
        };
        let is_retired = self.retired.contains(&prefix.0);
        (Reverse(is_retired), value, entry.touched)
    }
}

fn decay(from: u64, to: u64) -> f64 {
    (-as_f64(to - from) / HALF_LIFE).exp2()
}

#[expect(clippy::cast_precision_loss, reason = "a test counts to thousands")]
fn as_f64(clock: u64) -> f64 {
    clock as f64
}
