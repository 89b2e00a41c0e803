//! Bytes to characters as they come: whole ones only.

/// Of no incomplete character there are more bytes.
const MAX_HELD_BYTES: usize = 3;

/// Bytes to characters; holds back at most 3 bytes of an incomplete one.
#[derive(Debug, Default)]
pub(crate) struct Utf8Stream {
    /// A valid beginning of a character that needs more bytes.
    held: [u8; MAX_HELD_BYTES],
    len: u8,
}

impl Utf8Stream {
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Appends what `bytes` complete to `text`; every maximal broken part becomes one U+FFFD, as in
    /// `String::from_utf8_lossy`.
    pub(crate) fn push(&mut self, mut bytes: &[u8], text: &mut String) {
        if self.len > 0 {
            let held = usize::from(self.len);
            let taken = bytes.len().min(MAX_HELD_BYTES + 1 - held);
            let mut joined = [0; MAX_HELD_BYTES + 1];
            joined[..held].copy_from_slice(&self.held[..held]);
            joined[held..held + taken].copy_from_slice(&bytes[..taken]);
            let rest = decode_prefix(&joined[..held + taken], text);
            if rest.len() > taken {
                // Still incomplete, all of it; there were no more bytes.
                self.hold(rest);
                return;
            }
            // What was held became characters, whole; the rest is an end of `bytes[..taken]`.
            bytes = &bytes[taken - rest.len()..];
        }
        let rest = decode_prefix(bytes, text);
        self.hold(rest);
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "an incomplete character has at most 3 bytes"
    )]
    fn hold(&mut self, rest: &[u8]) {
        self.held[..rest.len()].copy_from_slice(rest);
        self.len = rest.len() as u8;
    }

    pub(crate) fn finish(&mut self, text: &mut String) {
        if self.len > 0 {
            self.len = 0;
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
}

/// Decodes as much of `bytes` as can be told now; returns the incomplete end.
fn decode_prefix<'a>(mut bytes: &'a [u8], text: &mut String) -> &'a [u8] {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(valid) => {
                text.push_str(valid);
                return &[];
            }
            Err(error) => {
                let (valid, rest) = bytes.split_at(error.valid_up_to());
                text.push_str(&String::from_utf8_lossy(valid));
                let Some(broken_len) = error.error_len() else {
                    return rest;
                };
                text.push(char::REPLACEMENT_CHARACTER);
                bytes = &rest[broken_len..];
            }
        }
    }
}
