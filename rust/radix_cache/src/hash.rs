//! Page hashes for storage keys and events: SHA-256, chained from page to page.

use sha2::{Digest, Sha256};

use crate::key::Namespace;

/// Hash of a page and of everything before it.
pub type PageHash = [u8; 32];

/// Separates these hashes from any other use of SHA-256, and their versions from each other.
const TAG: &[u8] = b"dsserve-page-hash-v1";

/// Tokens converted to bytes at a time.
const CHUNK: usize = 64;

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

fn chain(previous: &PageHash, page: &[u32]) -> PageHash {
    let mut hasher = Sha256::new_with_prefix(previous);
    let mut buffer = [0_u8; 4 * CHUNK];
    for tokens in page.chunks(CHUNK) {
        for (bytes, token) in buffer.chunks_exact_mut(4).zip(tokens) {
            bytes.copy_from_slice(&token.to_le_bytes());
        }
        hasher.update(&buffer[..4 * tokens.len()]);
    }
    hasher.finalize().into()
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
