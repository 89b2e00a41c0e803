//! What a reader of KV events knows: an index that is fed with events only (R9).

use std::collections::BTreeSet;

use dsserve_radix_cache::{
    block_hash, page_hashes, BlockHash, EventBatch, KvEvent, Medium, PageHash, RadixCache,
};

#[derive(Debug, Default)]
pub struct EventIndex {
    next_sequence: u64,
    blocks: BTreeSet<(BlockHash, Medium)>,
}

impl EventIndex {
    /// Takes the next batch of the cache, and sees that it can be replayed.
    pub fn follow(&mut self, cache: &mut RadixCache) {
        let Some(batch) = cache.take_events(self.next_sequence * 1000) else {
            return;
        };
        self.apply(&batch);
        let kept = cache.replay_events(batch.sequence).unwrap();
        assert_eq!(kept, [batch]);
        assert_eq!(cache.next_event_sequence(), self.next_sequence);
        assert_eq!(cache.replay_events(self.next_sequence), Some(Vec::new()));
        assert_eq!(cache.replay_events(self.next_sequence + 1), None);
        let first_kept = self.next_sequence.saturating_sub(4);
        let all = cache.replay_events(first_kept).unwrap();
        let numbers: Vec<u64> = all.iter().map(|batch| batch.sequence).collect();
        assert_eq!(
            numbers,
            (first_kept..self.next_sequence).collect::<Vec<_>>()
        );
        if first_kept > 0 {
            assert_eq!(cache.replay_events(first_kept - 1), None);
        }
    }

    fn apply(&mut self, batch: &EventBatch) {
        assert_eq!(batch.sequence, self.next_sequence, "numbers have no gap");
        assert_eq!(batch.timestamp_us, self.next_sequence * 1000);
        assert!(!batch.events.is_empty());
        self.next_sequence += 1;
        for event in &batch.events {
            self.apply_event(event);
        }
    }

    fn apply_event(&mut self, event: &KvEvent) {
        match event {
            KvEvent::BlockStored {
                block_hashes,
                parent_block_hash,
                token_ids,
                block_size,
                medium,
                namespace,
                trailing_ok,
            } => {
                assert_eq!(token_ids.len(), block_hashes.len() * *block_size as usize);
                if let Some(allowed) = trailing_ok {
                    assert_eq!(allowed.len(), block_hashes.len());
                }
                if let Some(parent) = parent_block_hash {
                    // A copy may have a parent that was not copied.
                    assert!(self.blocks.contains(&(*parent, Medium::Gpu)));
                } else {
                    let hashes = page_hashes(namespace, token_ids, *block_size);
                    let name = |hash: &PageHash| block_hash(namespace, hash);
                    let names: Vec<BlockHash> = hashes.iter().map(name).collect();
                    assert_eq!(*block_hashes, names, "hashes of the tokens given");
                }
                for &hash in block_hashes {
                    let is_new = self.blocks.insert((hash, *medium));
                    assert!(is_new, "a block was stored twice");
                }
            }
            KvEvent::BlockRemoved {
                block_hashes,
                medium,
            } => {
                for &hash in block_hashes {
                    let was_there = self.blocks.remove(&(hash, *medium));
                    assert!(was_there, "a block was removed that was not stored");
                }
            }
            KvEvent::AllBlocksCleared => self.blocks.clear(),
            other => panic!("an event of a new kind: {other:?}"),
        }
    }

    /// Holds exactly these blocks; a snapshot leads a new reader to the same.
    pub fn compare(
        &self,
        cached: impl Iterator<Item = (BlockHash, Medium)>,
        cache: &mut RadixCache,
    ) {
        let mut cached: Vec<_> = cached.collect();
        cached.sort_unstable();
        let known: Vec<_> = self.blocks.iter().copied().collect();
        assert_eq!(known, cached);
        let mut late = Self::default();
        for event in cache.snapshot_events() {
            late.apply_event(&event);
        }
        assert_eq!(late.blocks, self.blocks);
    }
}
