//! Encoding with the reference, the `tokenizers` crate: exact for every file, and slow.

use crate::error::TokenizerError;
use crate::split;
use crate::threads::{Threads, MIN_PARALLEL_BATCH_BYTES, PARALLEL_TEXT_BYTES, PART_BYTES};
use serde_json::Value;
use std::sync::OnceLock;
use tokenizers::PostProcessor;

pub(crate) struct Reference {
    hf: tokenizers::Tokenizer,
    /// The same without added vocabulary, made when first needed.
    plain: OnceLock<tokenizers::Tokenizer>,
    is_cuttable: bool,
    /// Whether the post-processor puts tokens around a text.
    pub(crate) adds_around: bool,
}

impl Reference {
    pub(crate) fn new(hf: tokenizers::Tokenizer, json: &Value) -> Self {
        let adds_around = hf
            .get_post_processor()
            .is_some_and(|processor| processor.added_tokens(false) > 0);
        Self {
            hf,
            plain: OnceLock::new(),
            is_cuttable: split::is_cuttable(json),
            adds_around,
        }
    }

    pub(crate) fn hf(&self) -> &tokenizers::Tokenizer {
        &self.hf
    }

    /// The ids of each text, long ones cut and encoded in parallel where that changes nothing.
    pub(crate) fn encode_batch(
        &self,
        texts: &[&str],
        add_special: bool,
        threads: &Threads,
    ) -> Result<Vec<Vec<u32>>, TokenizerError> {
        let adds_around = add_special && self.adds_around;
        let may_cut = threads.are_many() && self.is_cuttable && !adds_around;
        let parts: Vec<(usize, &str)> = texts
            .iter()
            .enumerate()
            .flat_map(|(index, text)| {
                let parts = if may_cut && text.len() > PARALLEL_TEXT_BYTES {
                    split::cut(text, PART_BYTES)
                } else {
                    vec![*text]
                };
                parts.into_iter().map(move |part| (index, part))
            })
            .collect();
        let num_bytes: usize = parts.iter().map(|(_, part)| part.len()).sum();
        let encoded = threads.map(
            &parts,
            num_bytes >= MIN_PARALLEL_BATCH_BYTES,
            |(_, part)| encode(&self.hf, part, adds_around),
        );
        let mut batch = vec![Vec::new(); texts.len()];
        for ((index, _), ids) in parts.iter().zip(encoded) {
            let ids = ids?;
            if batch[*index].is_empty() {
                batch[*index] = ids;
            } else {
                batch[*index].extend(ids);
            }
        }
        Ok(batch)
    }

    /// The ids of text in which spellings of added tokens mean nothing.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub(crate) fn encode_plain(&self, text: &str) -> Result<Vec<u32>, TokenizerError> {
        let plain = if let Some(plain) = self.plain.get() {
            plain
        } else {
            // Not read again: the file may have changed or gone.
            let built = without_added(&self.hf).map_err(|error| TokenizerError::Encode {
                bytes: text.len(),
                reason: error.to_string(),
            })?;
            self.plain.get_or_init(|| built)
        };
        encode(plain, text, false)
    }
}

/// The same tokenizer without added vocabulary and post-processor.
fn without_added(hf: &tokenizers::Tokenizer) -> tokenizers::Result<tokenizers::Tokenizer> {
    let mut plain = tokenizers::Tokenizer::new(hf.get_model().clone());
    plain.with_pre_tokenizer(hf.get_pre_tokenizer().cloned());
    plain.with_normalizer(hf.get_normalizer().cloned())?;
    Ok(plain)
}

fn encode(
    hf: &tokenizers::Tokenizer,
    text: &str,
    add_special: bool,
) -> Result<Vec<u32>, TokenizerError> {
    if text.is_empty() && !add_special {
        return Ok(Vec::new());
    }
    hf.encode_fast(text, add_special)
        .map(|encoding| encoding.get_ids().to_vec())
        .map_err(|error| TokenizerError::Encode {
            bytes: text.len(),
            reason: error.to_string(),
        })
}
