//! The longest token that a text begins with, as a double-array trie.

use super::merges::Merges;

const NONE: u32 = u32::MAX;
const BLOCK: usize = 256;
/// How many of the newest blocks are searched for room; older ones are nearly full.
const OPEN_BLOCKS: usize = 8;
const ROOT: u32 = 0;

/// A state of the trie: `base ^ byte` is where its child for `byte` would be.
#[derive(Clone, Copy)]
struct Node {
    base: u32,
    /// The state this one is a child of.
    parent: u32,
    /// The token that ends here.
    token: u32,
}

const FREE: Node = Node {
    base: NONE,
    parent: NONE,
    token: NONE,
};

/// All tokens that can come out of a text.
pub(crate) struct Trie {
    nodes: Vec<Node>,
    /// The longest token that a token begins with, itself excepted; [`NONE`] for single bytes.
    shorter: Vec<u32>,
}

impl Trie {
    pub(crate) fn build(merges: &Merges) -> Self {
        let mut is_reachable = Vec::with_capacity(merges.len() as usize);
        for token in 0..merges.len() {
            let reachable = merges.is_reachable(token, &is_reachable);
            is_reachable.push(reachable);
        }
        let mut tokens: Vec<u32> = (0..merges.len())
            .filter(|&token| is_reachable[token as usize])
            .collect();
        tokens.sort_unstable_by_key(|&token| merges.bytes(token));
        let mut builder = Builder {
            merges,
            nodes: vec![FREE; BLOCK],
            room: vec![BLOCK - 1],
            shorter: vec![NONE; merges.len() as usize],
        };
        builder.nodes[ROOT as usize].parent = ROOT;
        builder.build(&tokens);
        Self {
            nodes: builder.nodes,
            shorter: builder.shorter,
        }
    }

    /// The longest token at the beginning of `bytes`, which are not empty.
    pub(crate) fn longest(&self, bytes: &[u8]) -> u32 {
        let mut longest = NONE;
        let mut at = ROOT;
        for &byte in bytes {
            let next = self.nodes[at as usize].base ^ u32::from(byte);
            let Some(node) = self.nodes.get(next as usize) else {
                break;
            };
            if node.parent != at || next == ROOT {
                break;
            }
            at = next;
            if node.token != NONE {
                longest = node.token;
            }
        }
        longest
    }

    /// The next shorter token with the same beginning.
    pub(crate) fn shorter(&self, token: u32) -> Option<u32> {
        Some(self.shorter[token as usize]).filter(|&shorter| shorter != NONE)
    }
}

struct Builder<'a> {
    merges: &'a Merges,
    nodes: Vec<Node>,
    /// Free states of each block.
    room: Vec<usize>,
    shorter: Vec<u32>,
}

/// Sorted tokens that share their first `depth` bytes, and the state for those.
struct Range {
    first: usize,
    last: usize,
    depth: usize,
    state: u32,
    /// The longest token among the prefixes so far.
    longest: u32,
}

impl Builder<'_> {
    fn build(&mut self, tokens: &[u32]) {
        let mut open = vec![Range {
            first: 0,
            last: tokens.len(),
            depth: 0,
            state: ROOT,
            longest: NONE,
        }];
        while let Some(mut range) = open.pop() {
            let head = tokens[range.first];
            if self.merges.bytes(head).len() == range.depth {
                self.nodes[range.state as usize].token = head;
                self.shorter[head as usize] = range.longest;
                range.longest = head;
                range.first += 1;
            }
            if range.first < range.last {
                self.add_children(tokens, &range, &mut open);
            }
        }
    }

    fn add_children(&mut self, tokens: &[u32], range: &Range, open: &mut Vec<Range>) {
        let byte_at = |index: usize| self.merges.bytes(tokens[index])[range.depth];
        let mut children: Vec<(u8, usize)> = Vec::new();
        for index in range.first..range.last {
            let byte = byte_at(index);
            if children.last().is_none_or(|&(last, _)| last != byte) {
                children.push((byte, index));
            }
        }
        let base = self.find_base(&children);
        self.nodes[range.state as usize].base = base;
        for (position, &(byte, first)) in children.iter().enumerate() {
            let state = base ^ u32::from(byte);
            self.nodes[state as usize].parent = range.state;
            self.room[state as usize / BLOCK] -= 1;
            open.push(Range {
                first,
                last: children
                    .get(position + 1)
                    .map_or(range.last, |&(_, next)| next),
                depth: range.depth + 1,
                state,
                longest: range.longest,
            });
        }
    }

    /// A base with room for all children.
    fn find_base(&mut self, children: &[(u8, usize)]) -> u32 {
        let num_blocks = self.room.len();
        for block in num_blocks.saturating_sub(OPEN_BLOCKS)..num_blocks {
            let range = if self.room[block] < children.len() {
                0..0
            } else {
                0..BLOCK
            };
            for low in range {
                let base = block * BLOCK + low;
                let has_room = children
                    .iter()
                    .all(|&(byte, _)| self.nodes[base ^ usize::from(byte)].parent == NONE);
                if has_room {
                    return to_state(base);
                }
            }
        }
        self.nodes.resize(self.nodes.len() + BLOCK, FREE);
        self.room.push(BLOCK);
        to_state(num_blocks * BLOCK)
    }
}

fn to_state(index: usize) -> u32 {
    u32::try_from(index).expect("a vocabulary has fewer than 2^32 prefixes")
}
