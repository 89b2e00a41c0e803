//! Bytes to characters as they come: whole ones only.

/// Bytes to characters; holds back at most 3 bytes of an incomplete one.
#[derive(Debug, Default)]
pub(crate) struct Utf8Stream {
    /// A valid beginning of a character that needs more bytes.
    pending: Vec<u8>,
}

impl Utf8Stream {
    pub(crate) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// Appends what `bytes` complete to `text`; every maximal broken part becomes one U+FFFD, as in
    /// `String::from_utf8_lossy`.
    pub(crate) fn push(&mut self, bytes: &[u8], text: &mut String) {
        if self.pending.is_empty() {
            let rest = decode_prefix(bytes, text);
            self.pending.extend_from_slice(rest);
        } else {
            self.pending.extend_from_slice(bytes);
            let rest_len = decode_prefix(&self.pending, text).len();
            self.pending.drain(..self.pending.len() - rest_len);
        }
    }

    pub(crate) fn finish(&mut self, text: &mut String) {
        if !self.pending.is_empty() {
            self.pending.clear();
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
