//! Texts to ids: loads `tokenizer.json` and encodes many texts, and long ones, in parallel.

use crate::error::TokenizerError;
use crate::fast::{FastEncoder, Part};
use crate::load;
use crate::message_cache::{CacheStats, MessageCache};
use crate::options::{Backend, TokenizerOptions};
use crate::parts::PartEncoder;
use crate::reference::Reference;
use crate::threads::Threads;
use crate::vocab::TokenTable;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A byte-level tokenizer with its own threads; shared by reference between threads.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let path = dsserve_tokenizer::testing::example_tokenizer()?;
/// use dsserve_tokenizer::{Backend, Tokenizer, TokenizerOptions};
///
/// let options = TokenizerOptions::default().with_threads(2).with_cache_bytes(64 << 20);
/// let tokenizer = Tokenizer::load(&path, &options)?;
/// assert_eq!(tokenizer.backend(), Backend::Fast);
///
/// // In a rendered prompt only the ranges named are tokens.
/// let prompt = "<|user|>what is <|user|>?";
/// let ids = tokenizer.encode_rendered(prompt, &[0..8])?;
/// let user = tokenizer.added_token_to_id("<|user|>").ok_or("it has one")?;
/// assert_eq!(ids.iter().filter(|&&id| id == user).count(), 1);
/// assert_eq!(tokenizer.decode(&ids, false), prompt);
/// # Ok(())
/// # }
/// ```
pub struct Tokenizer {
    path: PathBuf,
    reference: Reference,
    /// The fast encoder, or why it is not used.
    fast: Result<FastEncoder, String>,
    cache: MessageCache,
    table: Arc<TokenTable>,
    threads: Threads,
    /// Put before every text encoded with special tokens (`add_bos_token`).
    bos: Option<u32>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("path", &self.path)
            .field("tokens", &self.table.len())
            .field("backend", &self.backend())
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Loads `tokenizer.json` (or the one in the directory `path`). Truncation and padding of the
    /// file are ignored. `add_bos_token` of a `tokenizer_config.json` beside it is honoured.
    ///
    /// # Errors
    /// [`TokenizerError::Read`], [`TokenizerError::Parse`], [`TokenizerError::Threads`], and
    /// [`TokenizerError::NotFast`] if the options demand the fast encoder for a file it does not know.
    pub fn load(path: &Path, options: &TokenizerOptions) -> Result<Self, TokenizerError> {
        let path = if path.is_dir() {
            path.join("tokenizer.json")
        } else {
            path.to_path_buf()
        };
        let json = load::read_json(&path)?;
        let hf = load::build(&json, &path)?;
        let table = Arc::new(TokenTable::build(&hf, &path)?);
        let bos = load::bos_token(&hf, &path.with_file_name("tokenizer_config.json"))?;
        let fast = match options.backend {
            Backend::HuggingFace => Err("the reference was asked for".to_owned()),
            Backend::Auto | Backend::Fast => {
                let added = hf.get_added_vocabulary().get_vocab();
                FastEncoder::read(&json, &|content| added.get(content).copied())
            }
        };
        if let (Backend::Fast, Err(reason)) = (options.backend, &fast) {
            return Err(TokenizerError::NotFast {
                path,
                reason: reason.clone(),
            });
        }
        Ok(Self {
            reference: Reference::new(hf, &json),
            fast,
            cache: MessageCache::new(options.cache_bytes),
            table,
            threads: Threads::start(options.num_threads)?,
            bos,
            path,
        })
    }

    /// [`Tokenizer::load`] with this many threads and all else by default.
    ///
    /// # Errors
    /// As [`Tokenizer::load`].
    pub fn from_path(path: &Path, num_threads: usize) -> Result<Self, TokenizerError> {
        Self::load(path, &TokenizerOptions::default().with_threads(num_threads))
    }

    /// The encoder in use; never [`Backend::Auto`].
    #[must_use]
    pub fn backend(&self) -> Backend {
        match self.fast {
            Ok(_) => Backend::Fast,
            Err(_) => Backend::HuggingFace,
        }
    }

    /// Why the fast encoder is not in use.
    #[must_use]
    pub fn fallback_reason(&self) -> Option<&str> {
        self.fast.as_ref().err().map(String::as_str)
    }

    /// What the cache of encoded messages holds and did.
    #[must_use]
    pub fn cache_stats(&self) -> CacheStats {
        self.cache.stats()
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
        let texts: Vec<&str> = texts.iter().map(AsRef::as_ref).collect();
        let adds_around = add_special && self.reference.adds_around;
        let mut batch = match &self.fast {
            Ok(fast) if !adds_around => {
                let parts: Vec<Vec<Part<'_>>> = texts.iter().map(|text| fast.parts(text)).collect();
                self.part_encoder(fast).encode(&parts)
            }
            _ => self
                .reference
                .encode_batch(&texts, add_special, &self.threads)?,
        };
        if let Some(bos) = self.bos.filter(|_| add_special) {
            for ids in &mut batch {
                ids.insert(0, bos);
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
        let parts = self.rendered_parts(prompt, special)?;
        let Ok(fast) = &self.fast else {
            let mut ids = Vec::new();
            for part in parts {
                match part {
                    Part::Added(id) => ids.push(id),
                    Part::Plain(text) => {
                        ids.extend(self.reference.encode_plain(text)?);
                    }
                }
            }
            return Ok(ids);
        };
        let mut batch = self.part_encoder(fast).encode(&[parts]);
        Ok(batch.pop().unwrap_or_default())
    }

    fn rendered_parts<'a>(
        &self,
        prompt: &'a str,
        special: &[Range<usize>],
    ) -> Result<Vec<Part<'a>>, TokenizerError> {
        let mut parts = Vec::with_capacity(special.len() * 2 + 1);
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
                parts.push(Part::Plain(&prompt[plain_from..range.start]));
                parts.push(Part::Added(id));
                plain_from = range.end;
            }
        }
        parts.push(Part::Plain(&prompt[plain_from..]));
        Ok(parts)
    }

    fn part_encoder<'a>(&'a self, fast: &'a FastEncoder) -> PartEncoder<'a> {
        PartEncoder {
            fast,
            cache: &self.cache,
            threads: &self.threads,
        }
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
        self.reference.hf().token_to_id(token)
    }

    /// The id of an added token by its spelling.
    #[must_use]
    pub fn added_token_to_id(&self, token: &str) -> Option<u32> {
        self.reference
            .hf()
            .get_added_vocabulary()
            .get_vocab()
            .get(token)
            .copied()
    }
}
