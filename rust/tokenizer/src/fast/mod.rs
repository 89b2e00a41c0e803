//! An encoder for the tokenizers whose split pattern is known: no regular expressions, merges in
//! linear time, words looked up. Gives the ids of the reference, `tokenizers`.

mod bpe;
mod class_table;
mod classes;
mod gaps;
pub(crate) mod hash;
mod long;
mod merges;
mod pairs;
mod seams;
mod short;
mod trie;
mod whole;
mod word_cache;
mod word_key;
mod words;

use crate::split;
use aho_corasick::{AhoCorasick, MatchKind};
use bpe::Bpe;
pub(crate) use classes::{Class, Classes};
use gaps::Gaps;
use merges::Merges;
use serde_json::Value;
use std::sync::{Mutex, PoisonError};
use word_cache::WordCache;
pub(crate) use words::Pattern;
use words::Words;

/// Working memories kept for later calls; one more is made whenever all are in use.
const MAX_KEPT_WORKERS: usize = 64;

pub(crate) struct FastEncoder {
    bpe: Bpe,
    pattern: Pattern,
    added: Option<AddedTokens>,
    workers: Mutex<Vec<Worker>>,
}

/// A stretch of text as the added vocabulary cuts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part<'a> {
    /// The spelling of an added token.
    Added(u32),
    /// Text without added tokens; encoded on its own.
    Plain(&'a str),
}

impl Part<'_> {
    /// How much there is to encode.
    pub(crate) fn num_bytes(&self) -> usize {
        match self {
            Self::Added(_) => 0,
            Self::Plain(text) => text.len(),
        }
    }
}

/// What one thread needs while it encodes.
#[derive(Default)]
struct Worker {
    cache: WordCache,
    gaps: Gaps,
}

impl FastEncoder {
    /// Reads a parsed `tokenizer.json`; `added_id` gives the ids that the reference has for its added
    /// tokens.
    ///
    /// # Errors
    /// What about it this encoder does not know.
    pub(crate) fn read(
        tokenizer: &Value,
        added_id: &dyn Fn(&str) -> Option<u32>,
    ) -> Result<Self, String> {
        if split::is_normalized(tokenizer) {
            return Err("it normalizes the text".to_owned());
        }
        let pattern = split::pattern(tokenizer)?;
        let added = AddedTokens::read(tokenizer, added_id)?;
        let merges = Merges::read(&tokenizer["model"])?;
        Ok(Self {
            bpe: Bpe::new(merges)?,
            pattern,
            added,
            workers: Mutex::new(Vec::new()),
        })
    }

    /// Appends the ids of text that holds no added tokens, or whose spellings of them are text.
    pub(crate) fn encode_plain(&self, text: &str, out: &mut Vec<u32>) {
        let mut worker = self.take_worker();
        let Worker { cache, gaps } = &mut worker;
        let bytes = text.as_bytes();
        for word in Words::new(text, self.pattern) {
            self.bpe.for_each_part(bytes, word, |part| {
                gaps.add(bytes, part, cache, out);
                if gaps.are_many(out.len()) {
                    gaps.fill(bytes, &self.bpe, cache, out);
                }
            });
        }
        gaps.fill(bytes, &self.bpe, cache, out);
        gaps.shrink();
        let mut workers = self.lock();
        if workers.len() < MAX_KEPT_WORKERS {
            workers.push(worker);
        }
    }

    /// Cuts `text` at the spellings of added tokens.
    pub(crate) fn parts<'a>(&self, text: &'a str) -> Vec<Part<'a>> {
        match &self.added {
            Some(added) => added.cut(text),
            None if text.is_empty() => Vec::new(),
            None => vec![Part::Plain(text)],
        }
    }

    /// Cuts plain text into parts of about `part_bytes` that encode as the whole does.
    pub(crate) fn cut<'a>(&self, text: &'a str, part_bytes: usize) -> Vec<&'a str> {
        split::cut_known(text, self.pattern, part_bytes)
    }

    fn take_worker(&self) -> Worker {
        self.lock().pop().unwrap_or_default()
    }

    /// Workers hold nothing that a panic could leave half changed and that matters.
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Worker>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The added vocabulary: first the tokens that match before normalization, then the others.
struct AddedTokens {
    passes: Vec<Pass>,
}

struct Pass {
    finder: AhoCorasick,
    ids: Vec<u32>,
}

impl AddedTokens {
    fn read(
        tokenizer: &Value,
        added_id: &dyn Fn(&str) -> Option<u32>,
    ) -> Result<Option<Self>, String> {
        let mut spellings: [Vec<(&str, u32)>; 2] = [Vec::new(), Vec::new()];
        for token in tokenizer["added_tokens"].as_array().into_iter().flatten() {
            let content = token["content"].as_str();
            let content = content.ok_or("an added token has no content")?;
            for flag in ["lstrip", "rstrip", "single_word"] {
                if token[flag] == true {
                    return Err(format!("its added token {content:?} has {flag}"));
                }
            }
            if !content.is_empty() {
                let id = added_id(content)
                    .ok_or_else(|| format!("its added token {content:?} has no id"))?;
                spellings[usize::from(token["normalized"] != false)].push((content, id));
            }
        }
        let passes: Vec<Pass> = spellings
            .into_iter()
            .filter(|spellings| !spellings.is_empty())
            .map(Pass::build)
            .collect::<Result<_, _>>()?;
        Ok((!passes.is_empty()).then_some(Self { passes }))
    }

    fn cut<'a>(&self, text: &'a str) -> Vec<Part<'a>> {
        let mut parts = vec![Part::Plain(text)];
        for pass in &self.passes {
            let mut cut = Vec::with_capacity(parts.len());
            for part in parts {
                match part {
                    Part::Plain(text) => pass.cut(text, &mut cut),
                    Part::Added(_) => cut.push(part),
                }
            }
            parts = cut;
        }
        parts
    }
}

impl Pass {
    fn build(spellings: Vec<(&str, u32)>) -> Result<Self, String> {
        let (contents, ids): (Vec<&str>, Vec<u32>) = spellings.into_iter().unzip();
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(contents)
            .map_err(|error| format!("its added tokens cannot be compiled: {error}"))?;
        Ok(Self { finder, ids })
    }

    fn cut<'a>(&self, text: &'a str, parts: &mut Vec<Part<'a>>) {
        let mut from = 0;
        for found in self.finder.find_iter(text) {
            if from < found.start() {
                parts.push(Part::Plain(&text[from..found.start()]));
            }
            parts.push(Part::Added(self.ids[found.pattern().as_usize()]));
            from = found.end();
        }
        if from < text.len() {
            parts.push(Part::Plain(&text[from..]));
        }
    }
}
