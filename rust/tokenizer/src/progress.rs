//! Which ids of a stream with stops still have text to come?

use std::collections::VecDeque;

/// Which ids still have text to come.
#[derive(Debug, Default)]
pub(crate) struct Progress {
    /// Bytes of text decoded and given out so far.
    decoded_bytes: u64,
    given_bytes: u64,
    /// (end of their text, how many ids), ascending, for ids whose end is known but not given out.
    ends: VecDeque<(u64, u32)>,
    /// How many ids `ends` counts.
    num_ended: u32,
    /// Latest ids, whose text ends in the character that is still incomplete.
    open_ids: u32,
}

impl Progress {
    /// Notes that `num_ids` more ids brought `fresh`, leaving an incomplete character if `is_open`.
    pub(crate) fn decoded(&mut self, fresh: &str, is_open: bool, num_ids: u32) {
        if let Some(first) = fresh.chars().next() {
            // An incomplete character always becomes exactly the next one, good or U+FFFD.
            let open_ids = std::mem::take(&mut self.open_ids);
            self.note_end(self.decoded_bytes + first.len_utf8() as u64, open_ids);
        }
        self.decoded_bytes += fresh.len() as u64;
        if is_open {
            self.open_ids += num_ids;
        } else {
            self.note_end(self.decoded_bytes, num_ids);
        }
    }

    /// Notes an id without text, after a character that is still incomplete if `is_open`.
    pub(crate) fn hidden(&mut self, is_open: bool) {
        if is_open {
            self.open_ids += 1;
        } else if self.decoded_bytes > self.given_bytes {
            self.note_end(self.decoded_bytes, 1);
        }
    }

    fn note_end(&mut self, end: u64, num_ids: u32) {
        self.num_ended += num_ids;
        match self.ends.back_mut() {
            _ if num_ids == 0 => {}
            Some((last, count)) if *last == end => *count += num_ids,
            _ => self.ends.push_back((end, num_ids)),
        }
    }

    pub(crate) fn given(&mut self, bytes: usize) {
        self.given_bytes += bytes as u64;
        while let Some(&(end, num_ids)) = self.ends.front() {
            if end > self.given_bytes {
                break;
            }
            self.ends.pop_front();
            self.num_ended -= num_ids;
        }
    }

    pub(crate) fn waiting_ids(&self) -> u32 {
        self.open_ids + self.num_ended
    }
}
