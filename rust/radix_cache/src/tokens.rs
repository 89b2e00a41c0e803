//! Which tokens each page holds: one flat store, addressed by page id.
//!
//! A page in the tree belongs to one node and holds `page_size` tokens, so the page id is also the
//! address of its tokens. A split or an eviction therefore moves no tokens, and the store never
//! grows past four bytes a token of the pool (resident once a page has been in the tree).

use crate::page::PageId;

/// Tokens compared by one call: a run of consecutive pages up to this length is one slice.
const RUN_TOKENS: usize = 4096;

/// The tokens of all pages in the tree.
#[derive(Debug)]
pub(crate) struct TokenStore {
    page_size: usize,
    max_run: usize,
    tokens: Vec<u32>,
}

impl TokenStore {
    pub(crate) fn new(page_size: u32, num_pages: u32) -> Self {
        let page_size = page_size as usize;
        Self {
            page_size,
            max_run: (RUN_TOKENS / page_size).max(1),
            tokens: vec![0; (num_pages as usize + 1) * page_size],
        }
    }

    pub(crate) fn page(&self, page: PageId) -> &[u32] {
        self.run(page, 1)
    }

    /// Records what `pages` hold; `tokens` fills them exactly.
    pub(crate) fn write(&mut self, pages: &[PageId], tokens: &[u32]) {
        debug_assert_eq!(tokens.len(), pages.len() * self.page_size);
        for (&page, tokens) in pages.iter().zip(tokens.chunks_exact(self.page_size)) {
            let start = page as usize * self.page_size;
            self.tokens[start..start + self.page_size].copy_from_slice(tokens);
        }
    }

    /// Number of leading pages whose tokens are the beginning of `tokens`.
    pub(crate) fn shared_pages(&self, pages: &[PageId], tokens: &[u32]) -> usize {
        let limit = pages.len().min(tokens.len() / self.page_size);
        let mut done = 0;
        while done < limit {
            let rest = &pages[done..limit.min(done + self.max_run)];
            let run = 1 + rest
                .windows(2)
                .take_while(|two| two[0] + 1 == two[1])
                .count();
            let wanted = &tokens[done * self.page_size..(done + run) * self.page_size];
            let held = self.run(rest[0], run);
            if wanted != held {
                let equal = wanted
                    .chunks_exact(self.page_size)
                    .zip(held.chunks_exact(self.page_size))
                    .take_while(|(wanted, held)| wanted == held)
                    .count();
                return done + equal;
            }
            done += run;
        }
        limit
    }

    fn run(&self, first: PageId, num_pages: usize) -> &[u32] {
        let start = first as usize * self.page_size;
        &self.tokens[start..start + num_pages * self.page_size]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_pages_stop_at_the_first_page_that_differs() {
        for page_size in [1_u32, 2, 4096, 8192] {
            // Two runs: the second page order has a gap and a step back.
            for pages in [[1_u32, 2, 3, 4, 5], [4, 5, 2, 3, 1]] {
                let mut store = TokenStore::new(page_size, 5);
                let tokens: Vec<u32> = (0..5 * page_size).collect();
                store.write(&pages, &tokens);
                assert_eq!(store.shared_pages(&pages, &tokens), 5);
                assert_eq!(
                    store.page(pages[1])[0],
                    page_size,
                    "addressed by page, not by order"
                );
                assert_eq!(
                    store.shared_pages(&pages, &tokens[..tokens.len() - 1]),
                    4,
                    "whole pages"
                );
                assert_eq!(store.shared_pages(&pages[..2], &tokens), 2);
                for position in 0..5_usize {
                    let mut other = tokens.clone();
                    other[(position + 1) * page_size as usize - 1] ^= 1;
                    assert_eq!(store.shared_pages(&pages, &other), position);
                }
            }
        }
    }
}
