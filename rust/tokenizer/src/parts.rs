//! Parts of texts to ids: known messages from the cache, long ones cut and encoded in parallel.

use crate::fast::{FastEncoder, Part};
use crate::message_cache::MessageCache;
use crate::threads::{Threads, MIN_PARALLEL_BATCH_BYTES, PARALLEL_TEXT_BYTES, PART_BYTES};
use std::ops::Range;
use std::sync::Arc;

/// Encodes with the fast encoder and everything around it.
pub(crate) struct PartEncoder<'a> {
    pub fast: &'a FastEncoder,
    pub cache: &'a MessageCache,
    pub threads: &'a Threads,
}

/// Where the ids of a part come from.
enum Source<'a> {
    Id(u32),
    Known(Arc<[u32]>),
    /// The jobs that encode its pieces.
    New(&'a str, Range<usize>),
}

impl PartEncoder<'_> {
    /// The ids of each list of parts, one after the other.
    pub(crate) fn encode(&self, lists: &[Vec<Part<'_>>]) -> Vec<Vec<u32>> {
        let num_bytes: usize = lists.iter().flatten().map(Part::num_bytes).sum();
        let cuts = self.threads.are_many() && num_bytes > PARALLEL_TEXT_BYTES;
        let mut jobs = Vec::new();
        let sources: Vec<Vec<Source<'_>>> = lists
            .iter()
            .map(|parts| {
                let source = |part| self.source(part, cuts, &mut jobs);
                parts.iter().map(source).collect()
            })
            .collect();
        let new_bytes: usize = jobs.iter().map(|job| job.len()).sum();
        let is_much = new_bytes >= MIN_PARALLEL_BATCH_BYTES;
        let mut encoded = self.threads.map(&jobs, is_much, |text| {
            let mut ids = Vec::with_capacity(text.len() / 3);
            self.fast.encode_plain(text, &mut ids);
            ids
        });
        sources
            .into_iter()
            .map(|sources| self.join(sources, &mut encoded))
            .collect()
    }

    fn source<'a>(&self, part: &Part<'a>, cuts: bool, jobs: &mut Vec<&'a str>) -> Source<'a> {
        let text = match *part {
            Part::Added(id) => return Source::Id(id),
            Part::Plain(text) => text,
        };
        if self.cache.wants(text) {
            if let Some(ids) = self.cache.get(text) {
                return Source::Known(ids);
            }
        }
        let first = jobs.len();
        if cuts && text.len() > PART_BYTES {
            jobs.extend(self.fast.cut(text, PART_BYTES));
        } else if !text.is_empty() {
            jobs.push(text);
        }
        Source::New(text, first..jobs.len())
    }

    fn join(&self, sources: Vec<Source<'_>>, encoded: &mut [Vec<u32>]) -> Vec<u32> {
        let mut ids = Vec::new();
        for source in sources {
            match source {
                Source::Id(id) => ids.push(id),
                Source::Known(known) => ids.extend_from_slice(&known),
                Source::New(text, jobs) => {
                    let first = ids.len();
                    for job in &mut encoded[jobs] {
                        let fresh = std::mem::take(job);
                        if ids.is_empty() {
                            ids = fresh;
                        } else {
                            ids.extend_from_slice(&fresh);
                        }
                    }
                    if self.cache.wants(text) {
                        self.cache.put(text, ids[first..].into());
                    }
                }
            }
        }
        ids
    }
}
