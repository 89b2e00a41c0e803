//! Texts to ids: loads `tokenizer.json` and encodes many texts, and long ones, in parallel.

use crate::error::TokenizerError;
use crate::split;
use crate::vocab::TokenTable;
use rayon::prelude::*;
use serde_json::Value;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

/// Longer texts are cut at safe places and encoded in parallel.
pub const PARALLEL_TEXT_BYTES: usize = 64 * 1024;

/// Less text than this in a batch is not worth waking threads for.
const MIN_PARALLEL_BATCH_BYTES: usize = 4 * 1024;

/// Parts of a long text; small enough to balance, large enough to cost nothing extra.
const PART_BYTES: usize = 16 * 1024;

/// A byte-level tokenizer with its own threads; shared by reference between threads.
pub struct Tokenizer {
    path: PathBuf,
    hf: tokenizers::Tokenizer,
    /// The same without added vocabulary, made when first needed.
    plain: OnceLock<tokenizers::Tokenizer>,
    table: Arc<TokenTable>,
    pool: Option<rayon::ThreadPool>,
    is_cuttable: bool,
    /// Put before every text encoded with special tokens (`add_bos_token`).
    bos: Option<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("path", &self.path)
            .field("tokens", &self.table.len())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads `tokenizer.json` (or the one in the directory `path`). Truncation and padding of the
    /// file are ignored. `add_bos_token` of a `tokenizer_config.json` beside it is honoured.
    /// With `num_threads` of 1 or less everything runs on the caller's thread.
    ///
    /// # Errors
    /// [`TokenizerError::Read`], [`TokenizerError::Parse`], [`TokenizerError::Threads`].
    pub fn from_path(path: &Path, num_threads: usize) -> Result<Self, TokenizerError> {
        let path = if path.is_dir() {
            path.join("tokenizer.json")
        } else {
            path.to_path_buf()
        };
        let json = read_json(&path)?;
        let hf = build(&json, &path)?;
        let table = Arc::new(TokenTable::build(&hf, &path)?);
        let bos = bos_token(&hf, &path.with_file_name("tokenizer_config.json"))?;
        let pool = if num_threads > 1 {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(num_threads)
                .thread_name(|index| format!("tokenizer-{index}"))
                .build()
                .map_err(|error| TokenizerError::Threads {
                    threads: num_threads,
                    reason: error.to_string(),
                })?;
            Some(pool)
        } else {
            None
        };
        Ok(Self {
            is_cuttable: split::is_cuttable(&json),
            path,
            hf,
            plain: OnceLock::new(),
            table,
            pool,
            bos,
        })
    }

    /// Encodes one text. `add_special` puts before and after it what the tokenizer's post-processor
    /// and `add_bos_token` ask for; spellings of added tokens inside the text become those tokens
    /// either way.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`].
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let mut batch = self.encode_batch(&[text], add_special)?;
        Ok(batch.pop().unwrap_or_default())
    }

    /// Encodes texts in parallel; the result is that of encoding them one by one on one thread.
    ///
    /// # Errors
    /// [`TokenizerError::Encode`] of the first text that failed.
    pub fn encode_batch<S: AsRef<str> + Sync>(
        &self,
        texts: &[S],
        add_special: bool,
    ) -> Result<Vec<Vec<u32>>, TokenizerError> {
        let adds_around = add_special && self.adds_around();
        let parts: Vec<(usize, &str)> = texts
            .iter()
            .enumerate()
            .flat_map(|(index, text)| {
                let text = text.as_ref();
                let parts = if self.pool.is_some()
                    && self.is_cuttable
                    && !adds_around
                    && text.len() > PARALLEL_TEXT_BYTES
                {
                    split::cut(text, PART_BYTES)
                } else {
                    vec![text]
                };
                parts.into_iter().map(move |part| (index, part))
            })
            .collect();
        let total_bytes: usize = parts.iter().map(|(_, part)| part.len()).sum();
        let encoded: Vec<Vec<u32>> = match &self.pool {
            Some(pool) if parts.len() > 1 && total_bytes >= MIN_PARALLEL_BATCH_BYTES => pool
                .install(|| {
                    parts
                        .par_iter()
                        .with_max_len(1)
                        .map(|(_, part)| encode_with(&self.hf, part, adds_around))
                        .collect::<Result<_, _>>()
                })?,
            _ => parts
                .iter()
                .map(|(_, part)| encode_with(&self.hf, part, adds_around))
                .collect::<Result<_, _>>()?,
        };
        let mut batch: Vec<Vec<u32>> = texts
            .iter()
            .map(|_| self.bos.filter(|_| add_special).into_iter().collect())
            .collect();
        for ((index, _), ids) in parts.iter().zip(encoded) {
            if batch[*index].is_empty() {
                batch[*index] = ids;
            } else {
                batch[*index].extend(ids);
            }
        }
        Ok(batch)
    }

    /// Encodes a rendered prompt: the byte ranges `special` are tokens, all else is plain text in
    /// which spellings of added tokens mean nothing. A range whose text is no added
    /// token here is plain text, joined with its surroundings.
    ///
    /// # Errors
    /// [`TokenizerError::SpecialRange`], [`TokenizerError::Encode`]; [`TokenizerError::Parse`] and
    /// [`TokenizerError::Read`] if the file changed since it was loaded.
    pub fn encode_rendered(
        &self,
        prompt: &str,
        special: &[Range<usize>],
    ) -> Result<Vec<u32>, TokenizerError> {
        let plain = self.plain()?;
        let mut ids = Vec::new();
        let mut plain_from = 0;
        let mut last_end = 0;
        for range in special {
            let bad_range = || TokenizerError::SpecialRange {
                start: range.start,
                end: range.end,
            };
            if range.start < last_end {
                return Err(bad_range());
            }
            let token = prompt.get(range.clone()).ok_or_else(bad_range)?;
            last_end = range.end;
            if let Some(id) = self.added_token_to_id(token) {
                ids.extend(encode_with(plain, &prompt[plain_from..range.start], false)?);
                ids.push(id);
                plain_from = range.end;
            }
        }
        ids.extend(encode_with(plain, &prompt[plain_from..], false)?);
        Ok(ids)
    }

    /// Decodes all `ids` at once, see [`TokenTable::decode`].
    #[must_use]
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        self.table.decode(ids, skip_special)
    }

    /// The bytes of all ids.
    #[must_use]
    pub fn table(&self) -> &Arc<TokenTable> {
        &self.table
    }

    /// The id of a token by its spelling in the file (byte-level for vocabulary entries).
    #[must_use]
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.hf.token_to_id(token)
    }

    /// The id of an added token by its spelling.
    #[must_use]
    pub fn added_token_to_id(&self, token: &str) -> Option<u32> {
        self.hf
            .get_added_vocabulary()
            .get_vocab()
            .get(token)
            .copied()
    }

    fn adds_around(&self) -> bool {
        use tokenizers::PostProcessor;
        self.hf
            .get_post_processor()
            .is_some_and(|processor| processor.added_tokens(false) > 0)
    }

    fn plain(&self) -> Result<&tokenizers::Tokenizer, TokenizerError> {
        if let Some(plain) = self.plain.get() {
            return Ok(plain);
        }
        let mut json = read_json(&self.path)?;
        json["added_tokens"] = Value::Array(Vec::new());
        json["post_processor"] = Value::Null;
        let built = build(&json, &self.path)?;
        Ok(self.plain.get_or_init(|| built))
    }
}

fn encode_with(
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

fn read_json(path: &Path) -> Result<Value, TokenizerError> {
    let bytes = std::fs::read(path).map_err(|source| TokenizerError::Read {
        path: path.to_path_buf(),
        source,
    })?;
    serde_json::from_slice(&bytes).map_err(|error| TokenizerError::Parse {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })
}

fn build(json: &Value, path: &Path) -> Result<tokenizers::Tokenizer, TokenizerError> {
    let parse_error = |reason: String| TokenizerError::Parse {
        path: path.to_path_buf(),
        reason,
    };
    let bytes = serde_json::to_vec(json).map_err(|error| parse_error(error.to_string()))?;
    let mut hf =
        tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| parse_error(error.to_string()))?;
    hf.with_truncation(None)
        .map_err(|error| parse_error(error.to_string()))?;
    hf.with_padding(None);
    Ok(hf)
}

/// The beginning-of-sequence id, if the configuration beside the tokenizer asks to add it.
fn bos_token(hf: &tokenizers::Tokenizer, path: &Path) -> Result<Option<u32>, TokenizerError> {
    if !path.is_file() {
        return Ok(None);
    }
    let config = read_json(path)?;
    if config["add_bos_token"] != true {
        return Ok(None);
    }
    let token = &config["bos_token"];
    let spelling = token.as_str().or_else(|| token["content"].as_str());
    let id = spelling.and_then(|spelling| hf.token_to_id(spelling));
    id.map(Some).ok_or_else(|| TokenizerError::Parse {
        path: path.to_path_buf(),
        reason: "add_bos_token is true, but bos_token names no token".to_owned(),
    })
}
