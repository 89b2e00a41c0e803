//! Words as a few numbers, which are compared and hashed faster than bytes.

use std::ops::Range;

/// Longer words have no key.
pub(crate) const MAX_BYTES: usize = 31;

/// The bytes of a word of at most 8 * `WORDS` - 1 bytes, zeros, and its length in the last byte.
#[inline]
pub(crate) fn key<const WORDS: usize>(text: &[u8], word: &Range<usize>) -> [u64; WORDS] {
    let len = word.len();
    let window = text.get(word.start..word.start + WORDS * 8);
    let mut padded = [0u8; MAX_BYTES + 1];
    let bytes = window.unwrap_or_else(|| {
        padded[..len].copy_from_slice(&text[word.clone()]);
        &padded
    });
    let mut key = [0u64; WORDS];
    for (index, (value, chunk)) in key.iter_mut().zip(bytes.chunks_exact(8)).enumerate() {
        let whole = u64::from_le_bytes([
            chunk[0], chunk[1], chunk[2], chunk[3], chunk[4], chunk[5], chunk[6], chunk[7],
        ]);
        // What follows the word is masked away.
        *value = whole & MASKS[len.saturating_sub(index * 8).min(8)];
    }
    key[WORDS - 1] |= (len as u64) << 56;
    key
}

/// The lowest n bytes.
const MASKS: [u64; 9] = [
    0,
    0xFF,
    0xFFFF,
    0x00FF_FFFF,
    0xFFFF_FFFF,
    0x00FF_FFFF_FFFF,
    0xFFFF_FFFF_FFFF,
    0x00FF_FFFF_FFFF_FFFF,
    u64::MAX,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_different_words_differ_wherever_they_stand() {
        let words = [
            "",
            "a",
            "a\0",
            "\0",
            "\0\0",
            "abcdefgh",
            "abcdefghi",
            "abcdefghijklmno",
        ];
        let mut keys = Vec::new();
        for word in words {
            let alone = key::<2>(word.as_bytes(), &(0..word.len()));
            let inside = format!("<{word}>{}", "x".repeat(40));
            assert_eq!(alone, key(inside.as_bytes(), &(1..1 + word.len())));
            assert!(!keys.contains(&alone), "{word:?}");
            keys.push(alone);
        }
    }
}
