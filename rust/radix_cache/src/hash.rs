//! Page hashes for storage keys and events: SHA-256, chained from page to page.

use sha2::block_api::compress256;
use sha2::{Digest, Sha256};

use crate::arena::NodeHandle;
use crate::cache::RadixCache;
use crate::error::CacheError;
use crate::event::BlockHash;
use crate::key::Namespace;
use crate::page::PageId;

/// Hash of a page and of everything before it.
pub type PageHash = [u8; 32];

/// Separates these hashes from any other use of SHA-256, and their versions from each other.
const TAG: &[u8] = b"dsserve-page-hash-v1";

/// State of SHA-256 before the first block (FIPS 180-4, 5.3.3).
const INITIAL: [u32; 8] = [
    0x6a09_e667,
    0xbb67_ae85,
    0x3c6e_f372,
    0xa54f_f53a,
    0x510e_527f,
    0x9b05_688c,
    0x1f83_d9ab,
    0x5be0_cd19,
];

/// Bytes of a SHA-256 block.
const BLOCK: usize = 64;

/// Blocks compressed by one call.
const BATCH: usize = 8;

/// A page that was not hashed yet.
const UNKNOWN: PageHash = [0; 32];

/// Hash of each whole page of `tokens`: `h_i = SHA-256(h_{i-1} || ids as u32 little-endian)`.
///
/// `h_{-1} = SHA-256(tag || parts)`, where the parts of the namespace (generation, `extra_key`,
/// `cache_salt`, adapter) each are a presence byte, the length as u64 little-endian, and the bytes.
/// The result depends on namespace, tokens and page size only, never on the shape of a tree.
///
/// # Panics
/// If `page_size` is 0.
#[must_use]
pub fn page_hashes(namespace: &Namespace, tokens: &[u32], page_size: u32) -> Vec<PageHash> {
    let mut previous = namespace_hash(namespace);
    tokens
        .chunks_exact(page_size as usize)
        .map(|page| {
            previous = chain(&previous, page);
            previous
        })
        .collect()
}

/// `SHA-256(previous || page)`. The message is padded by hand, block by block: the general
/// interface buffers what it is given, which costs as much as a block of the hash itself.
fn chain(previous: &PageHash, page: &[u32]) -> PageHash {
    let mut state = INITIAL;
    let mut blocks = [[0_u8; BLOCK]; BATCH];
    blocks[0][..32].copy_from_slice(previous);
    let mut filled = 32;
    let mut rest = page;
    loop {
        let room = (BATCH * BLOCK - filled) / 4;
        let (now, later) = rest.split_at(rest.len().min(room));
        let bytes = blocks.as_flattened_mut();
        for (to, token) in bytes[filled..].chunks_exact_mut(4).zip(now) {
            to.copy_from_slice(&token.to_le_bytes());
        }
        filled += 4 * now.len();
        rest = later;
        if filled < BATCH * BLOCK {
            break;
        }
        compress256(&mut state, &blocks);
        filled = 0;
    }
    let num_bits = 8 * (32 + 4 * page.len() as u64);
    // The rest, a one bit, zeros, and the length at the end of a block.
    let end = (filled + 9).next_multiple_of(BLOCK);
    let bytes = blocks.as_flattened_mut();
    if end <= bytes.len() {
        bytes[filled..end].fill(0);
        bytes[filled] = 0x80;
        bytes[end - 8..end].copy_from_slice(&num_bits.to_be_bytes());
        compress256(&mut state, &blocks[..end / BLOCK]);
    } else {
        bytes[filled..].fill(0);
        bytes[filled] = 0x80;
        compress256(&mut state, &blocks);
        let mut last = [0_u8; BLOCK];
        last[BLOCK - 8..].copy_from_slice(&num_bits.to_be_bytes());
        compress256(&mut state, &[last]);
    }
    let mut hash = UNKNOWN;
    for (to, word) in hash.chunks_exact_mut(4).zip(state) {
        to.copy_from_slice(&word.to_be_bytes());
    }
    hash
}

/// The name of a page in events: the first 16 hex digits of its hash as a signed number; in a
/// namespace (one with `extra_key`, `cache_salt` or adapter) those of
/// `SHA-256(hash || namespace hash)`, so that nobody can tell a salted block from its tokens.
#[must_use]
pub fn block_hash(namespace: &Namespace, hash: &PageHash) -> BlockHash {
    name_of(hash, event_salt(namespace).as_ref())
}

/// What block names are hashed with, if anything.
fn event_salt(namespace: &Namespace) -> Option<PageHash> {
    let is_named = namespace.extra_key.is_some()
        || namespace.cache_salt.is_some()
        || namespace.adapter.is_some();
    is_named.then(|| namespace_hash(namespace))
}

fn name_of(hash: &PageHash, salt: Option<&PageHash>) -> BlockHash {
    let named = salt.map(|salt| Sha256::new_with_prefix(hash).chain_update(salt).finalize());
    let bytes = named.as_ref().map_or(&hash[..], |named| &named[..]);
    let mut first = [0_u8; 8];
    first.copy_from_slice(&bytes[..8]);
    BlockHash::from_be_bytes(first)
}

fn namespace_hash(namespace: &Namespace) -> PageHash {
    let mut hasher = Sha256::new_with_prefix(TAG);
    let mut part = |bytes: Option<&[u8]>| {
        hasher.update([u8::from(bytes.is_some())]);
        let bytes = bytes.unwrap_or_default();
        hasher.update((bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    };
    part(Some(&namespace.model_generation.to_le_bytes()));
    for text in [
        &namespace.extra_key,
        &namespace.cache_salt,
        &namespace.adapter,
    ] {
        part(text.as_deref().map(str::as_bytes));
    }
    hasher.finalize().into()
}

/// Hashes of pages in the tree, by page id like their tokens: a split moves nothing.
#[derive(Debug, Default)]
pub(crate) struct HashStore {
    /// Empty until somebody wants a hash.
    by_page: Vec<PageHash>,
}

impl HashStore {
    pub(crate) fn of(&self, page: PageId) -> PageHash {
        self.by_page.get(page as usize).copied().unwrap_or(UNKNOWN)
    }

    pub(crate) fn is_unused(&self) -> bool {
        self.by_page.is_empty()
    }

    /// The page holds other tokens now.
    pub(crate) fn forget(&mut self, pages: &[PageId]) {
        if self.is_unused() {
            return;
        }
        for &page in pages {
            self.by_page[page as usize] = UNKNOWN;
        }
    }
}

impl RadixCache {
    /// Chained hash of each whole page of `tokens`; see [`page_hashes`].
    #[must_use]
    pub fn page_hashes(&self, namespace: &Namespace, tokens: &[u32]) -> Vec<PageHash> {
        page_hashes(namespace, tokens, self.config.page_size)
    }

    /// Chained hash of each page of a cached prefix. Computed when first wanted, then kept.
    ///
    /// # Errors
    /// [`CacheError::StaleHandle`].
    pub fn prefix_hashes(&mut self, node: NodeHandle) -> Result<Vec<PageHash>, CacheError> {
        let node = self.arena.resolve(node)?;
        self.hash_path(node);
        let path = self.path_to(node);
        let pages = path.iter().flat_map(|&node| self.arena[node].pages());
        Ok(pages.map(|&page| self.hashes.of(page)).collect())
    }

    /// Hashes what was not hashed yet on the path to `node`.
    pub(crate) fn hash_path(&mut self, node: u32) {
        if self.hashes.is_unused() {
            self.hashes.by_page = vec![UNKNOWN; self.config.num_pages as usize + 1];
        }
        // A page has a hash only if all before it have one.
        let mut path = Vec::new();
        let mut at = node;
        let mut previous = loop {
            match self.arena[at].pages().last() {
                Some(&last) if self.hashes.of(last) == UNKNOWN => path.push(at),
                Some(&last) => break self.hashes.of(last),
                None => break self.root_hash(at),
            }
            at = self.arena[at].parent;
        };
        for &node in path.iter().rev() {
            for &page in self.arena[node].pages() {
                let hash = &mut self.hashes.by_page[page as usize];
                if *hash == UNKNOWN {
                    *hash = chain(&previous, self.tokens.page(page));
                }
                previous = *hash;
            }
        }
    }

    fn root_hash(&self, root: u32) -> PageHash {
        let name = self.namespaces.name(root);
        name.map_or(UNKNOWN, |name| namespace_hash(name))
    }

    /// Names of hashed pages of a node.
    pub(crate) fn block_hashes(&self, node: u32, pages: &[PageId]) -> Vec<BlockHash> {
        let name = self.namespaces.name(self.arena[node].root);
        let salt = name.and_then(|name| event_salt(name));
        let hashes = pages.iter().map(|&page| self.hashes.of(page));
        hashes.map(|hash| name_of(&hash, salt.as_ref())).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(hex: &str) -> PageHash {
        (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect::<Vec<u8>>()
            .try_into()
            .unwrap()
    }

    /// Expected values come from Python's `hashlib`.
    #[test]
    fn hashes_are_those_of_an_independent_implementation() {
        let hashes = page_hashes(&Namespace::default(), &[0, 1, 2, 3, 4], 2);
        let expected = [
            "826f91491db3945fb321d148eb02cc2a7a7e45794f45e137c0827da5f4b2060b",
            "5b8505b0229b8832ae2c5fada05842458ffc6ee0624a8e98ac4842ba360e4123",
        ];
        assert_eq!(hashes, expected.map(bytes));

        let namespace = Namespace {
            model_generation: 3,
            extra_key: Some("k".into()),
            cache_salt: Some(String::new()),
            adapter: None,
        };
        let tokens: Vec<u32> = (0..260).map(|position| position * 7919).collect();
        let hashes = page_hashes(&namespace, &tokens, 128);
        assert_eq!(hashes.len(), 2);
        assert_eq!(
            hashes[1],
            bytes("66243bb87232abea959a456cacfd11da3a2dd79af30ae4f79edd7b285d5ff964")
        );
    }

    #[test]
    fn hashes_of_a_prefix_begin_those_of_the_whole() {
        let tokens: Vec<u32> = (0..64).collect();
        let whole = page_hashes(&Namespace::default(), &tokens, 4);
        for pages in 0..16 {
            let part = page_hashes(&Namespace::default(), &tokens[..4 * pages + 3], 4);
            assert_eq!(part, whole[..pages]);
        }
    }

    #[test]
    fn every_part_of_the_namespace_counts() {
        let text = |text: &str| Some(text.to_owned());
        let plain = Namespace::default();
        let names = [
            plain.clone(),
            Namespace {
                model_generation: 1,
                ..plain.clone()
            },
            Namespace {
                extra_key: text(""),
                ..plain.clone()
            },
            Namespace {
                cache_salt: text(""),
                ..plain.clone()
            },
            Namespace {
                adapter: text(""),
                ..plain.clone()
            },
            Namespace {
                extra_key: text("ab"),
                cache_salt: text("c"),
                ..plain.clone()
            },
            Namespace {
                extra_key: text("a"),
                cache_salt: text("bc"),
                ..plain
            },
        ];
        let mut hashes: Vec<_> = names
            .iter()
            .map(|name| page_hashes(name, &[1], 1))
            .collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), names.len());
    }
}
