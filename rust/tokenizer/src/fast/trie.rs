//! The longest token that a text begins with, as a double-array trie.
//!
//! Look-ups miss the processor's caches, so what matters is how few places one touches: a state is
//! eight bytes, and a subtree with a single token is that token's remaining bytes in one piece.

use super::merges::Merges;

const NONE: u32 = u32::MAX;
const BLOCK: usize = 256;
/// How many of the newest blocks are searched for room; older ones are nearly full.
const OPEN_BLOCKS: usize = 8;
const ROOT: usize = 0;
/// Limit on states and on bytes of tails: what fits a state's 24 bits.
const MAX_OFFSET: usize = 1 << 24;

/// A state: the byte that leads to it, where its children are, and the token that ends here.
///
/// The child of a state for a byte is at `offset ^ byte`. No two states have the same offset, so the
/// byte stored there tells whether it is that state's child.
#[derive(Clone, Copy)]
struct Node(u64);

impl Node {
    const FREE: Self = Self(0);
    const IS_USED: u64 = 1 << 8;
    const IS_LEAF: u64 = 1 << 9;
    /// The root is nobody's child, whatever offset others have.
    const IS_ROOT: u64 = 1 << 10;
    const CHILD_BITS: u64 = 0xFF | Self::IS_USED | Self::IS_ROOT;
    const NO_TOKEN: u64 = (1 << 24) - 1;

    fn new(byte: u8) -> Self {
        Self(u64::from(byte) | Self::IS_USED | Self::NO_TOKEN << 40)
    }

    fn is_child_for(self, byte: u8) -> bool {
        self.0 & Self::CHILD_BITS == u64::from(byte) | Self::IS_USED
    }

    fn is_used(self) -> bool {
        self.0 & Self::IS_USED != 0
    }

    /// Whether one token is left; its other bytes are a tail, at the offset.
    fn is_leaf(self) -> bool {
        self.0 & Self::IS_LEAF != 0
    }

    fn offset(self) -> usize {
        usize::try_from(self.0 >> 16 & (MAX_OFFSET as u64 - 1)).expect("24 bits")
    }

    fn token(self) -> u32 {
        let token = self.0 >> 40;
        if token == Self::NO_TOKEN {
            NONE
        } else {
            u32::try_from(token).expect("24 bits")
        }
    }

    fn set_offset(&mut self, offset: usize) {
        self.0 |= (offset as u64) << 16;
    }

    fn set_token(&mut self, token: u32) {
        self.0 = self.0 & ((1 << 40) - 1) | u64::from(token) << 40;
    }
}

/// All tokens that can come out of a text.
pub(crate) struct Trie {
    nodes: Vec<Node>,
    /// Each tail: its length, then its bytes.
    tails: Vec<u8>,
    /// The longest token that a token begins with, itself excepted; [`NONE`] for single bytes.
    shorter: Vec<u32>,
}

impl Trie {
    /// # Errors
    /// That the vocabulary is too large for it.
    pub(crate) fn build(merges: &Merges, mut tokens: Vec<u32>) -> Result<Self, String> {
        tokens.sort_unstable_by_key(|&token| merges.bytes(token));
        let mut builder = Builder {
            merges,
            trie: Self {
                nodes: vec![Node::FREE; BLOCK],
                tails: Vec::new(),
                shorter: vec![NONE; merges.len() as usize],
            },
            room: vec![BLOCK - 1],
            is_offset_used: vec![false; BLOCK],
        };
        builder.trie.nodes[ROOT] = Node(Node::new(0).0 | Node::IS_ROOT);
        builder.build(&tokens);
        let Builder { trie, .. } = builder;
        if trie.nodes.len().max(trie.tails.len()) >= MAX_OFFSET || tokens.len() >= MAX_OFFSET {
            return Err("its vocabulary is too large".to_owned());
        }
        Ok(trie)
    }

    /// The longest token at the beginning of `bytes`, which are not empty, and its length.
    pub(crate) fn longest(&self, bytes: &[u8]) -> (u32, usize) {
        let mut longest = (NONE, 0);
        let mut node = self.nodes[ROOT];
        for (depth, &byte) in bytes.iter().enumerate() {
            node = match self.nodes.get(node.offset() ^ usize::from(byte)) {
                Some(next) if next.is_child_for(byte) => *next,
                _ => break,
            };
            if node.is_leaf() {
                let at = node.offset();
                let len = usize::from(self.tails[at]);
                let tail = &self.tails[at + 1..at + 1 + len];
                if bytes[depth + 1..].starts_with(tail) {
                    longest = (node.token(), depth + 1 + len);
                }
                break;
            }
            if node.token() != NONE {
                longest = (node.token(), depth + 1);
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
    trie: Trie,
    /// Free states of each block.
    room: Vec<usize>,
    is_offset_used: Vec<bool>,
}

/// Sorted tokens that share their first `depth` bytes, and the state for those.
struct Range {
    first: usize,
    last: usize,
    depth: usize,
    state: usize,
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
            if range.last - range.first == 1 && range.state != ROOT {
                self.add_leaf(head, &range);
                continue;
            }
            if self.merges.bytes(head).len() == range.depth {
                self.trie.nodes[range.state].set_token(head);
                self.trie.shorter[head as usize] = range.longest;
                range.longest = head;
                range.first += 1;
            }
            self.add_children(tokens, &range, &mut open);
        }
    }

    fn add_leaf(&mut self, token: u32, range: &Range) {
        let tail = &self.merges.bytes(token)[range.depth..];
        let node = &mut self.trie.nodes[range.state];
        self.trie.shorter[token as usize] = range.longest;
        node.set_token(token);
        node.0 |= Node::IS_LEAF;
        node.set_offset(self.trie.tails.len());
        let len = u8::try_from(tail.len()).expect("checked when the merges were read");
        self.trie.tails.push(len);
        self.trie.tails.extend_from_slice(tail);
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
        let offset = self.find_offset(&children);
        self.is_offset_used[offset] = true;
        self.trie.nodes[range.state].set_offset(offset);
        for (position, &(byte, first)) in children.iter().enumerate() {
            let state = offset ^ usize::from(byte);
            self.trie.nodes[state] = Node::new(byte);
            self.room[state / BLOCK] -= 1;
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

    /// An offset with room for all children that no other state has.
    fn find_offset(&mut self, children: &[(u8, usize)]) -> usize {
        let num_blocks = self.room.len();
        for block in num_blocks.saturating_sub(OPEN_BLOCKS)..num_blocks {
            if self.room[block] < children.len() {
                continue;
            }
            let has_room = |offset: usize| {
                !self.is_offset_used[offset]
                    && children
                        .iter()
                        .all(|&(byte, _)| !self.trie.nodes[offset ^ usize::from(byte)].is_used())
            };
            if let Some(offset) =
                (block * BLOCK..(block + 1) * BLOCK).find(|&offset| has_room(offset))
            {
                return offset;
            }
        }
        let len = self.trie.nodes.len();
        self.trie.nodes.resize(len + BLOCK, Node::FREE);
        self.is_offset_used.resize(len + BLOCK, false);
        self.room.push(BLOCK);
        len
    }
}
