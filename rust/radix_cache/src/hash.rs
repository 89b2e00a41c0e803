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
