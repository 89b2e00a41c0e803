//! The fast encoder against the reference, on any text.

use dsserve_tokenizer::{Backend, Tokenizer, TokenizerOptions};
use std::sync::OnceLock;

struct Pair {
    fast: Tokenizer,
    reference: Tokenizer,
}

fn pair() -> &'static Pair {
    static PAIR: OnceLock<Pair> = OnceLock::new();
    PAIR.get_or_init(|| {
        let path = dsserve_tokenizer::testing::example_tokenizer().expect("a writable folder");
        let load = |backend, cache_bytes| {
            let options = TokenizerOptions::default()
                .with_backend(backend)
                .with_cache_bytes(cache_bytes);
            Tokenizer::load(&path, &options).expect("a good file")
        };
        Pair {
            fast: load(Backend::Fast, 1 << 16),
            reference: load(Backend::HuggingFace, 0),
        }
    })
}

/// The tokenizer that the targets share.
pub(crate) fn tokenizer() -> &'static Tokenizer {
    &pair().fast
}

/// The ids of both encoders must be the same, and decode to the text.
pub fn run(data: &[u8]) {
    let text = String::from_utf8_lossy(data);
    let Pair { fast, reference } = pair();
    let ids = fast.encode(&text, true).expect("any text");
    assert_eq!(ids, reference.encode(&text, true).expect("any text"));
    assert_eq!(fast.decode(&ids, false), text);
    let plain = fast.encode_rendered(&text, &[]).expect("any text");
    let expected = reference.encode_rendered(&text, &[]);
    assert_eq!(plain, expected.expect("any text"));
}
