//! `dfs-weight`: waiting requests in the depth-first order of the prefix tree, the subtrees that more
//! of them wait for first.
use std::cmp::Reverse;
use std::collections::HashMap;

use dsserve_radix_cache::NodeHandle;

use crate::request::len_u32;
use crate::scheduler::Scheduler;

/// A node of the tree that some waiting request's match passes.
#[derive(Debug, Default)]
struct Node {
    /// Waiting requests whose match passes or ends here.
    weight: usize,
    /// The first of them in the queue.
    first: usize,
    children: Vec<usize>,
    /// Those whose match ends here, in the order of the queue.
    requests: Vec<usize>,
}

impl Scheduler {
    /// For each waiting request, in the order of the queue, its place in the depth-first order.
    ///
    /// Requests that match more of the tree come before those that match less of the same path, so
    /// those that match nothing come last.
    pub(crate) fn tree_ranks(&self) -> Vec<u32> {
        let mut nodes = vec![Node::default()];
        let mut index_of: HashMap<NodeHandle, usize> = HashMap::new();
        for (position, key) in self.waiting.iter().enumerate() {
            let matched = self.requests.live(key).waiting.matched.as_ref();
            let node = matched.filter(|m| m.cached_len > 0).map(|m| m.node);
            let path = node.and_then(|node| self.cache.path(node).ok());
            let mut at = 0;
            nodes[0].weight += 1;
            for handle in path.unwrap_or_default() {
                let next = *index_of.entry(handle).or_insert_with(|| {
                    nodes.push(Node {
                        first: position,
                        ..Node::default()
                    });
                    nodes.len() - 1
                });
                if nodes[next].weight == 0 {
                    nodes[at].children.push(next);
                }
                nodes[next].weight += 1;
                at = next;
            }
            nodes[at].requests.push(position);
        }
        ranks(&nodes, self.waiting.len())
    }
}

/// Visits the nodes depth first, heavy children first, a node's own requests after its subtrees.
fn ranks(nodes: &[Node], num_requests: usize) -> Vec<u32> {
    let mut ranks = vec![0; num_requests];
    let mut next_rank = 0;
    let sorted = |node: usize| {
        let mut children = nodes[node].children.clone();
        children.sort_unstable_by_key(|child| (Reverse(nodes[*child].weight), nodes[*child].first));
        children.into_iter()
    };
    let mut stack = vec![(0, sorted(0))];
    while let Some((node, children)) = stack.last_mut() {
        if let Some(child) = children.next() {
            stack.push((child, sorted(child)));
            continue;
        }
        for position in &nodes[*node].requests {
            ranks[*position] = next_rank;
            next_rank += 1;
        }
        stack.pop();
    }
    debug_assert_eq!(next_rank, len_u32(num_requests));
    ranks
}
