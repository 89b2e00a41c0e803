//! The merge rules: which token is made of which two, and which tokens may stand side by side.
//!
//! Inside, a token is numbered by its rank: 0 to 255 are the bytes, 256 + k is what merge k makes.
//! A smaller number was made earlier, which is all that byte-pair encoding decides by.

use super::pairs::{PairTable, MAX_TOKENS};
use super::seams::{Seam, REACH};
use crate::vocab::token_bytes;
use serde_json::Value;
use std::collections::HashMap;

pub(crate) const NUM_BYTES: u32 = 256;
/// Longer tokens do not occur; lengths up to here fit a byte.
const MAX_TOKEN_BYTES: u32 = 255;
/// Marks a half of a token: the token itself is the left, and the right half of some merge.
const IS_HALF: u32 = 1 << 31;
/// Marks the halves of a token of less than [`REACH`] bytes.
const IS_SHORT: u32 = 1 << 30;
const TOKEN: u32 = IS_SHORT - 1;

/// The merges of a vocabulary in which every token but the bytes comes from exactly one merge of
/// earlier tokens, as training leaves it.
pub(crate) struct Merges {
    /// The two tokens a token is made of; a byte is made of itself. With [`IS_HALF`].
    halves: Vec<(u32, u32)>,
    /// What the vocabulary calls a token.
    ids: Vec<u32>,
    /// What the ids of merges are ahead of their ranks, if that is the same for all.
    id_shift: Option<u32>,
    lens: Vec<u32>,
    bytes: Vec<u8>,
    /// `bytes[ends[t - 1]..ends[t]]` belongs to token `t`.
    ends: Vec<u32>,
    pairs: PairTable,
}

impl Merges {
    /// Reads the `model` of a `tokenizer.json`.
    ///
    /// # Errors
    /// What about it is not as this encoder needs it.
    pub(crate) fn read(model: &Value) -> Result<Self, String> {
        check_options(model)?;
        let vocabulary = model["vocab"].as_object().ok_or("it has no vocabulary")?;
        let rules = model["merges"].as_array().ok_or("it has no merges")?;
        let mut merges = Self::of_bytes(vocabulary)?;
        merges.pairs = PairTable::with_capacity(rules.len());
        let mut rank_of: HashMap<String, u32> = HashMap::with_capacity(rules.len() + 256);
        for (spelling, &id) in byte_spellings().iter().zip(&merges.ids) {
            debug_assert!(vocabulary[spelling].as_u64() == Some(u64::from(id)));
            rank_of.insert(spelling.clone(), id_rank(rank_of.len()));
        }
        for (index, rule) in rules.iter().enumerate() {
            let (left, right) = pair_of(rule).ok_or_else(|| format!("merge {index} is no pair"))?;
            let part = |part: &str| {
                rank_of
                    .get(part)
                    .copied()
                    .ok_or_else(|| format!("merge {index} uses {part:?} before it is made"))
            };
            let (left_rank, right_rank) = (part(left)?, part(right)?);
            let made = format!("{left}{right}");
            let id = vocabulary
                .get(&made)
                .and_then(to_id)
                .ok_or_else(|| format!("merge {index} makes {made:?}, which has no id"))?;
            let rank = id_rank(merges.ids.len());
            if rank_of.insert(made, rank).is_some() {
                return Err(format!("merge {index} makes a token a second time"));
            }
            merges.add(left_rank, right_rank, id)?;
        }
        let mut ids = merges.ids.clone();
        ids.sort_unstable();
        if ids.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err("two of its tokens have one id".to_owned());
        }
        merges.id_shift = merges.shift();
        Ok(merges)
    }

    fn shift(&self) -> Option<u32> {
        let shift = self.ids.get(NUM_BYTES as usize)?.checked_sub(NUM_BYTES)?;
        let is_same = (NUM_BYTES..self.len())
            .all(|token| self.ids[token as usize].checked_sub(token) == Some(shift));
        is_same.then_some(shift)
    }

    fn of_bytes(vocabulary: &serde_json::Map<String, Value>) -> Result<Self, String> {
        let mut ids = Vec::new();
        for (byte, spelling) in byte_spellings().iter().enumerate() {
            let id = vocabulary.get(spelling).and_then(to_id);
            ids.push(id.ok_or_else(|| format!("byte {byte} has no token"))?);
        }
        Ok(Self {
            halves: (0..NUM_BYTES)
                .map(|byte| (byte | IS_SHORT, byte | IS_SHORT))
                .collect(),
            ids,
            id_shift: None,
            lens: vec![1; NUM_BYTES as usize],
            bytes: (0..=255).collect(),
            ends: (1..=NUM_BYTES).collect(),
            pairs: PairTable::with_capacity(0),
        })
    }

    fn add(&mut self, left: u32, right: u32, id: u32) -> Result<(), String> {
        let rank = id_rank(self.ids.len());
        if rank >= MAX_TOKENS {
            return Err("its vocabulary is too large".to_owned());
        }
        for half in [left, right] {
            let (start, end) = self.span(half);
            self.bytes.extend_from_within(start..end);
        }
        let end = u32::try_from(self.bytes.len()).map_err(|_| "its tokens are too long")?;
        self.ends.push(end);
        let len = self.lens[left as usize] + self.lens[right as usize];
        if len > MAX_TOKEN_BYTES {
            return Err(format!("it has a token of {len} bytes"));
        }
        self.lens.push(len);
        let mark = if (len as usize) < REACH { IS_SHORT } else { 0 };
        self.halves.push((left | mark, right | mark));
        self.ids.push(id);
        self.halves[left as usize].0 |= IS_HALF;
        self.halves[right as usize].1 |= IS_HALF;
        self.pairs.insert(left, right, rank);
        Ok(())
    }

    pub(crate) fn len(&self) -> u32 {
        id_rank(self.ids.len())
    }

    pub(crate) fn id(&self, token: u32) -> u32 {
        if token >= NUM_BYTES {
            if let Some(shift) = self.id_shift {
                return token + shift;
            }
        }
        self.ids[token as usize]
    }

    /// The two tokens that a token is made of.
    pub(crate) fn halves(&self, token: u32) -> (u32, u32) {
        let (left, right) = self.halves[token as usize];
        (left & TOKEN, right & TOKEN)
    }

    pub(crate) fn pairs(&self) -> &PairTable {
        &self.pairs
    }

    /// Bytes of a token.
    pub(crate) fn token_len(&self, token: u32) -> usize {
        self.lens[token as usize] as usize
    }

    pub(crate) fn bytes(&self, token: u32) -> &[u8] {
        let (start, end) = self.span(token);
        &self.bytes[start..end]
    }

    fn span(&self, token: u32) -> (usize, usize) {
        let start = match token {
            0 => 0,
            _ => self.ends[token as usize - 1],
        };
        (start as usize, self.ends[token as usize] as usize)
    }

    /// The tokens that can come out of a text, in order.
    pub(crate) fn reachable(&self) -> Vec<u32> {
        let mut is_reachable = Vec::with_capacity(self.ids.len());
        for token in 0..self.len() {
            let reachable = self.is_reachable(token, &is_reachable);
            is_reachable.push(reachable);
        }
        (0..self.len())
            .filter(|&token| is_reachable[token as usize])
            .collect()
    }

    /// Whether the encoding of a token's bytes is that token.
    fn is_reachable(&self, token: u32, is_reachable: &[bool]) -> bool {
        let (left, right) = self.halves(token);
        token < NUM_BYTES
            || (is_reachable[left as usize]
                && is_reachable[right as usize]
                && self.stays_apart(left, right, token, false))
    }

    /// Whether the encoding of the bytes of both tokens together is these two tokens; they may always
    /// be where the seam is clear.
    pub(crate) fn may_follow(&self, left: u32, right: u32, seam: Seam) -> bool {
        seam == Seam::Clear || self.stays_apart(left, right, u32::MAX, seam == Seam::NoShortHalves)
    }

    /// Whether no merge before `end` joins the end of `left` with the beginning of `right`.
    ///
    /// Takes both tokens apart in the reverse order of their making; between two such moments the
    /// tokens at the seam are fixed, and would be merged if a rule for them came due then. Rules with a
    /// short half need no look if there are `no_short` ones for this seam.
    fn stays_apart(&self, mut left: u32, mut right: u32, end: u32, no_short: bool) -> bool {
        // Rules from here on come too late: one of the two is part of something else by then.
        let mut limit = end;
        loop {
            let (left_halves, right_halves) =
                (self.halves[left as usize], self.halves[right as usize]);
            if no_short && (left_halves.0 | right_halves.0) & IS_SHORT != 0 {
                return true;
            }
            if left_halves.0 & right_halves.1 & IS_HALF != 0 && self.pairs.get(left, right) < limit
            {
                return false;
            }
            // The later one is undone first. Equal ones were made left to right.
            if left > right {
                if left < NUM_BYTES {
                    return true;
                }
                limit = left;
                left = left_halves.1 & TOKEN;
            } else {
                if right < NUM_BYTES {
                    return true;
                }
                // A rule that made both this token and one at the seam works at the seam first.
                limit = right + 1;
                right = right_halves.0 & TOKEN;
            }
        }
    }
}

fn check_options(model: &Value) -> Result<(), String> {
    let is_bpe = model["type"] == "BPE" || (model["type"].is_null() && model["merges"].is_array());
    if !is_bpe {
        return Err(format!("its model is {}, not BPE", model["type"]));
    }
    let is_unset = |value: &Value| value.is_null() || *value == false || *value == "";
    for option in [
        "dropout",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "byte_fallback",
        "ignore_merges",
    ] {
        if !is_unset(&model[option]) {
            return Err(format!("its model has {option} {}", model[option]));
        }
    }
    Ok(())
}

/// The spelling of every byte in GPT-2's alphabet.
fn byte_spellings() -> [String; 256] {
    let mut spellings = std::array::from_fn(|_| String::new());
    for c in (0..324).filter_map(char::from_u32) {
        let spelling = c.to_string();
        if let [byte] = token_bytes(&spelling)[..] {
            // A character below 128 that is not in the alphabet stands for itself; the alphabet
            // comes after those it replaces.
            spellings[usize::from(byte)] = spelling;
        }
    }
    spellings
}

fn pair_of(rule: &Value) -> Option<(&str, &str)> {
    match rule {
        Value::String(text) => text.split_once(' '),
        Value::Array(parts) => match &parts[..] {
            [left, right] => Some((left.as_str()?, right.as_str()?)),
            _ => None,
        },
        _ => None,
    }
}

fn to_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn id_rank(len: usize) -> u32 {
    u32::try_from(len).expect("vocabularies have fewer than 2^32 entries")
}
