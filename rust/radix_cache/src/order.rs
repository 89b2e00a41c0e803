//! The order in which nodes go when pages of a component are needed.
//!
//! LRU is an intrusive list, oldest use first; the other policies are a sorted set of ranks. Both
//! know two classes: nodes of a retired model generation go before all others.

use std::collections::BTreeSet;

use crate::arena::{NIL, VOID};
use crate::config::EvictionPolicy;
use crate::policy::{rank, Rank, Uses};

/// Neighbours of a listed node.
#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// Of a node that is not listed: VOID never is, so nobody is its neighbour.
const UNLISTED: Link = Link {
    older: VOID,
    newer: VOID,
};

/// The two ends of a list.
#[derive(Clone, Copy, Debug)]
struct Ends {
    oldest: u32,
    newest: u32,
}

const EMPTY: Ends = Ends {
    oldest: NIL,
    newest: NIL,
};

#[derive(Debug)]
enum Kind {
    /// Links by node index, and the ends of both classes.
    List { links: Vec<Link>, ends: [Ends; 2] },
    /// Nodes by rank, and the rank under which each node is listed.
    Sorted {
        set: BTreeSet<(Rank, u32)>,
        ranks: Vec<Option<Rank>>,
    },
}

/// Which class of nodes goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Class {
    /// Of a retired model generation: nobody can ever hit it.
    Retired,
    Current,
}

/// The listed nodes of one component in the order in which they go.
#[derive(Debug)]
pub(crate) struct EvictionOrder {
    policy: EvictionPolicy,
    kind: Kind,
}

impl EvictionOrder {
    /// An empty order with room for `capacity` nodes.
    pub(crate) fn new(policy: EvictionPolicy, capacity: usize) -> Self {
        let kind = match policy {
            EvictionPolicy::Lru => Kind::List {
                links: Vec::with_capacity(capacity),
                ends: [EMPTY; 2],
            },
            _ => Kind::Sorted {
                set: BTreeSet::new(),
                ranks: Vec::with_capacity(capacity),
            },
        };
        Self { policy, kind }
    }

    /// Whether uses are told by the place in the list alone.
    pub(crate) fn is_list(&self) -> bool {
        matches!(self.kind, Kind::List { .. })
    }

    pub(crate) fn is_listed(&self, node: u32) -> bool {
        let at = node as usize;
        match &self.kind {
            Kind::List { links, .. } => links.get(at).is_some_and(|link| link.older != VOID),
            Kind::Sorted { ranks, .. } => ranks.get(at).is_some_and(Option::is_some),
        }
    }

    /// The node that goes next.
    pub(crate) fn first(&self) -> Option<u32> {
        match &self.kind {
            Kind::List { ends, .. } => ends
                .iter()
                .map(|ends| ends.oldest)
                .find(|&node| node != NIL),
            Kind::Sorted { set, .. } => set.first().map(|&(_, node)| node),
        }
    }

    /// Lists a node as just used. `end_page` is where it ends.
    pub(crate) fn push(&mut self, node: u32, class: Class, end_page: u32, uses: &Uses) {
        debug_assert!(!self.is_listed(node), "a node is listed once");
        match &mut self.kind {
            Kind::List { links, ends } => {
                if links.len() <= node as usize {
                    links.resize(node as usize + 1, UNLISTED);
                }
                let newest = ends[class as usize].newest;
                join(links, &mut ends[class as usize], newest, node);
                join(links, &mut ends[class as usize], node, NIL);
            }
            Kind::Sorted { set, ranks } => {
                if ranks.len() <= node as usize {
                    ranks.resize(node as usize + 1, None);
                }
                let rank = rank(self.policy, class, uses.of(node), end_page);
                ranks[node as usize] = Some(rank);
                set.insert((rank, node));
            }
        }
    }

    /// Lists `node` as used right after `anchor`, which is listed or not.
    pub(crate) fn push_after(
        &mut self,
        anchor: u32,
        node: u32,
        class: Class,
        end_page: u32,
        uses: &Uses,
    ) {
        if !self.is_listed(anchor) || !self.is_list() {
            return self.push(node, class, end_page, uses);
        }
        if let Kind::List { links, ends } = &mut self.kind {
            if links.len() <= node as usize {
                links.resize(node as usize + 1, UNLISTED);
            }
            let newer = links[anchor as usize].newer;
            join(links, &mut ends[class as usize], anchor, node);
            join(links, &mut ends[class as usize], node, newer);
        }
    }

    pub(crate) fn remove(&mut self, node: u32, class: Class) {
        debug_assert!(self.is_listed(node), "only a listed node can leave");
        match &mut self.kind {
            Kind::List { links, ends } => {
                let Link { older, newer } = links[node as usize];
                join(links, &mut ends[class as usize], older, newer);
                links[node as usize] = UNLISTED;
            }
            Kind::Sorted { set, ranks } => {
                if let Some(rank) = ranks[node as usize].take() {
                    set.remove(&(rank, node));
                }
            }
        }
    }

    /// Moves a listed node to where its last use puts it.
    pub(crate) fn renew(&mut self, node: u32, class: Class, end_page: u32, uses: &Uses) {
        if let Kind::List { ends, .. } = &self.kind {
            if ends[class as usize].newest == node {
                return;
            }
        }
        self.remove(node, class);
        self.push(node, class, end_page, uses);
    }

    /// Moves the nodes that `is_retired` names into the class that goes first.
    pub(crate) fn retire(
        &mut self,
        is_retired: impl Fn(u32) -> bool,
        uses: &Uses,
        end_page: impl Fn(u32) -> u32,
    ) {
        let nodes: Vec<u32> = self.iter().filter(|&node| is_retired(node)).collect();
        for node in nodes {
            self.remove(node, Class::Current);
            self.push(node, Class::Retired, end_page(node), uses);
        }
    }

    /// Whether the links of a list say the same in both directions.
    pub(crate) fn links_agree(&self) -> bool {
        let Kind::List { links, ends } = &self.kind else {
            return true;
        };
        ends.iter().all(|ends| {
            let mut older = NIL;
            let mut node = ends.oldest;
            while node != NIL {
                let link = links[node as usize];
                if link.older != older {
                    return false;
                }
                (older, node) = (node, link.newer);
            }
            older == ends.newest
        })
    }

    /// Nodes in the order in which they go.
    pub(crate) fn iter(&self) -> Box<dyn Iterator<Item = u32> + '_> {
        match &self.kind {
            Kind::List { links, ends } => Box::new(ends.iter().flat_map(|ends| {
                let first = (ends.oldest != NIL).then_some(ends.oldest);
                std::iter::successors(first, |&node| {
                    let newer = links[node as usize].newer;
                    (newer != NIL).then_some(newer)
                })
            })),
            Kind::Sorted { set, .. } => Box::new(set.iter().map(|&(_, node)| node)),
        }
    }
}

/// Makes two nodes (or an end of the list) neighbours.
fn join(links: &mut [Link], ends: &mut Ends, older: u32, newer: u32) {
    if older == NIL {
        ends.oldest = newer;
    } else {
        links[older as usize].newer = newer;
    }
    if newer == NIL {
        ends.newest = older;
    } else {
        links[newer as usize].older = older;
    }
}
