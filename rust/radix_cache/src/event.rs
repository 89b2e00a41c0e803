//! What routers and other caches are told about the tree: numbered batches of events.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::cache::RadixCache;
use crate::key::Namespace;
use crate::page::PageId;

/// Name of a page in events: 64 bits of its chained hash (see [`block_hash`](crate::block_hash)).
pub type BlockHash = i64;

/// Where a block is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Medium {
    /// Device memory.
    Gpu,
    /// Host memory.
    Cpu,
    /// External store.
    Storage,
}

impl Medium {
    /// All of them, nearest first.
    pub const ALL: [Self; 3] = [Self::Gpu, Self::Cpu, Self::Storage];

    /// The name on the wire.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Gpu => "GPU",
            Self::Cpu => "CPU",
            Self::Storage => "STORAGE",
        }
    }
}

/// One change of the set of cached blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum KvEvent {
    /// Blocks that follow each other were cached.
    BlockStored {
        /// Names of the blocks, in order.
        block_hashes: Vec<BlockHash>,
        /// The block before the first; `None` at the beginning of a prompt.
        parent_block_hash: Option<BlockHash>,
        /// Tokens of all blocks.
        token_ids: Vec<u32>,
        /// Tokens a block holds.
        block_size: u32,
        /// Where.
        medium: Medium,
        /// For whom. Its adapter is the `lora_id` of other engines.
        namespace: Arc<Namespace>,
        /// Whether a hit may end at each block; `None` if it may at all of them.
        trailing_ok: Option<Vec<bool>>,
    },
    /// Blocks are cached no more.
    BlockRemoved {
        /// Names of the blocks.
        block_hashes: Vec<BlockHash>,
        /// Where.
        medium: Medium,
    },
    /// Nothing is cached any more, on any medium.
    AllBlocksCleared,
}

/// Events under one number; numbers count up from 0 without a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct EventBatch {
    /// Number of the batch.
    pub sequence: u64,
    /// When it was taken, by the caller's clock.
    pub timestamp_us: u64,
    /// In the order in which they happened.
    pub events: Vec<KvEvent>,
}

/// Events since the last batch, and the last batches for those who missed one.
#[derive(Debug)]
pub(crate) struct EventLog {
    pending: Vec<KvEvent>,
    next_sequence: u64,
    kept: VecDeque<Arc<EventBatch>>,
    max_kept: usize,
}

impl EventLog {
    pub(crate) fn new(max_kept: u32) -> Self {
        Self {
            pending: Vec::new(),
            next_sequence: 0,
            kept: VecDeque::new(),
            max_kept: max_kept as usize,
        }
    }

    fn take(&mut self, timestamp_us: u64) -> Option<Arc<EventBatch>> {
        if self.pending.is_empty() {
            return None;
        }
        let batch = Arc::new(EventBatch {
            sequence: self.next_sequence,
            timestamp_us,
            events: std::mem::take(&mut self.pending),
        });
        self.next_sequence += 1;
        self.kept.push_back(Arc::clone(&batch));
        if self.kept.len() > self.max_kept {
            self.kept.pop_front();
        }
        Some(batch)
    }
}

impl RadixCache {
    /// Closes the batch of events since the last call, if there were any, and keeps it for replay.
    ///
    /// `timestamp_us` is the caller's clock. Returns `None` always if the configuration has no
    /// events.
    pub fn take_events(&mut self, timestamp_us: u64) -> Option<Arc<EventBatch>> {
        self.events.as_mut()?.take(timestamp_us)
    }

    /// The kept batches from number `sequence` on, oldest first.
    ///
    /// `None` if one of them is not kept any more (or was never made): then the reader must forget
    /// what it knows and start from [`snapshot_events`](Self::snapshot_events).
    #[must_use]
    pub fn replay_events(&self, sequence: u64) -> Option<Vec<Arc<EventBatch>>> {
        let log = self.events.as_ref()?;
        let first_kept = log.next_sequence - log.kept.len() as u64;
        let skipped = usize::try_from(sequence.checked_sub(first_kept)?).ok()?;
        if skipped > log.kept.len() {
            return None;
        }
        Some(log.kept.iter().skip(skipped).cloned().collect())
    }

    /// Number of the next batch.
    #[must_use]
    pub fn next_event_sequence(&self) -> u64 {
        self.events.as_ref().map_or(0, |log| log.next_sequence)
    }

    /// Events that lead from an empty index to what is cached now, parents before children.
    /// Includes what [`take_events`](Self::take_events) has still to give. Linear in the tree.
    #[must_use]
    pub fn snapshot_events(&mut self) -> Vec<KvEvent> {
        let mut nodes: Vec<u32> = self.nodes().map(|(index, _)| index).collect();
        nodes.sort_unstable_by_key(|&node| self.arena[node].end_page);
        let mut events = Vec::new();
        for node in nodes {
            for medium in Medium::ALL {
                if self.copies.has(self.arena[node].pages()[0], medium) {
                    events.push(self.stored_event(node, medium));
                }
            }
        }
        events
    }

    /// A leaf was added.
    pub(crate) fn record_stored(&mut self, leaf: u32) {
        self.record_copy(leaf, Medium::Gpu, true);
    }

    /// The pages of a node came to a medium, or left it.
    pub(crate) fn record_copy(&mut self, node: u32, medium: Medium, is_stored: bool) {
        if self.events.is_none() {
            return;
        }
        let event = if is_stored {
            self.stored_event(node, medium)
        } else {
            KvEvent::BlockRemoved {
                block_hashes: self.block_hashes(node, self.arena[node].pages()),
                medium,
            }
        };
        self.record(event);
    }

    /// `pages` of a node are about to leave the tree, and with them what is known of their copies.
    pub(crate) fn record_removed(&mut self, node: u32, pages: &[PageId]) {
        if self.events.is_none() {
            return;
        }
        for medium in Medium::ALL {
            if self.copies.has(pages[0], medium) {
                let block_hashes = self.block_hashes(node, pages);
                self.record(KvEvent::BlockRemoved {
                    block_hashes,
                    medium,
                });
            }
        }
    }

    pub(crate) fn record_cleared(&mut self) {
        self.record(KvEvent::AllBlocksCleared);
    }

    fn record(&mut self, event: KvEvent) {
        if let Some(log) = &mut self.events {
            log.pending.push(event);
        }
    }

    fn stored_event(&mut self, node: u32, medium: Medium) -> KvEvent {
        self.hash_path(node);
        let here = &self.arena[node];
        let parent = &self.arena[here.parent];
        let parent_block_hash = parent
            .pages()
            .last()
            .map(|&page| self.block_hashes(here.parent, &[page])[0]);
        let name = self.namespaces.name(here.root);
        let namespace = Arc::clone(name.expect("every root has a name"));
        let tokens = here.pages().iter().flat_map(|&page| self.tokens.page(page));
        KvEvent::BlockStored {
            block_hashes: self.block_hashes(node, here.pages()),
            parent_block_hash,
            token_ids: tokens.copied().collect(),
            block_size: self.config.page_size,
            medium,
            namespace,
            trailing_ok: self.allowed_ends(node),
        }
    }

    /// Whether a hit may end at each page of a node.
    fn allowed_ends(&self, node: u32) -> Option<Vec<bool>> {
        if self.trailing.is_empty() {
            return None;
        }
        let here = &self.arena[node];
        let mut allowed = vec![false; here.pages().len()];
        let mut end_page = here.end_page;
        while end_page > here.start_page() {
            let place = crate::tree::Place { node, end_page };
            let found = self.last_boundary(place);
            if found.node != node || found.end_page <= here.start_page() {
                break;
            }
            allowed[(found.end_page - here.start_page() - 1) as usize] = true;
            end_page = found.end_page - 1;
        }
        Some(allowed)
    }
}
