//! A submitted request: from a dict to the scheduler's `RequestSpec`.
use std::collections::HashSet;

use dsserve_scheduler as core;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::SchedulerError;

/// Keys of a submitted request.
const SPEC_KEYS: [&str; 17] = [
    "request_id",
    "token_ids",
    "prompt_len",
    "max_new_tokens",
    "min_new_tokens",
    "ignore_eos",
    "stop_token_ids",
    "priority",
    "tenant",
    "deadline_us",
    "needs_mask",
    "draft_len",
    "extra_key",
    "cache_salt",
    "arrival_us",
    "whole_extend",
    "max_cached_len",
];

/// Ids that fit behind a prompt before it has to be copied.
const SPARE_IDS: usize = 256;
/// Prompts from this length on get room for their whole output: to copy them takes long, and room
/// that is not used takes address space only.
const LONG_PROMPT: usize = 65_536;
/// Most ids for which room is made, whatever a request says.
const MOST_ROOM: usize = 1 << 22;

/// Reads a request.
///
/// # Errors
/// `SchedulerError` naming a key that is missing, unknown or of a wrong type.
pub fn parse_spec(
    dict: &Bound<'_, PyDict>,
    with_room: impl FnOnce(usize) -> Vec<u32>,
) -> PyResult<core::RequestSpec> {
    let known: HashSet<&str> = SPEC_KEYS.into();
    for key in dict.keys() {
        let key: String = key.extract()?;
        if !known.contains(key.as_str()) {
            return Err(SchedulerError::new_err(format!(
                "unknown request key {key}"
            )));
        }
    }
    let prompt_len: Option<u32> = optional(dict, "prompt_len")?;
    let max_new_tokens: u32 = required(dict, "max_new_tokens")?;
    let room = |given: usize| {
        let prompt_len = prompt_len.map_or(given, |len| len as usize);
        let output = if prompt_len < LONG_PROMPT {
            SPARE_IDS
        } else {
            max_new_tokens as usize
        };
        (prompt_len + output).clamp(given, given.max(MOST_ROOM))
    };
    Ok(core::RequestSpec {
        request_id: required(dict, "request_id")?,
        token_ids: ids(dict, "token_ids", |given| with_room(room(given)))?
            .ok_or_else(|| SchedulerError::new_err("request key token_ids is missing"))?,
        prompt_len,
        max_new_tokens,
        min_new_tokens: optional(dict, "min_new_tokens")?.unwrap_or(0),
        ignore_eos: optional(dict, "ignore_eos")?.unwrap_or(false),
        stop_token_ids: ids(dict, "stop_token_ids", Vec::with_capacity)?.unwrap_or_default(),
        priority: optional(dict, "priority")?,
        tenant: optional(dict, "tenant")?.unwrap_or(0),
        deadline_us: optional(dict, "deadline_us")?,
        needs_mask: optional(dict, "needs_mask")?.unwrap_or(false),
        draft_len: optional(dict, "draft_len")?,
        namespace: core::Namespace {
            extra_key: optional(dict, "extra_key")?,
            cache_salt: optional(dict, "cache_salt")?,
            ..core::Namespace::default()
        },
        arrival_us: optional(dict, "arrival_us")?.unwrap_or(0),
        whole_extend: optional(dict, "whole_extend")?.unwrap_or(false),
        max_cached_len: optional(dict, "max_cached_len")?,
    })
}

/// The value of a key; `None` stands for absent.
fn optional<'py, T>(dict: &Bound<'py, PyDict>, key: &str) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    let Some(value) = dict.get_item(key)?.filter(|value| !value.is_none()) else {
        return Ok(None);
    };
    let extracted: PyResult<T> = T::extract(value.as_borrowed()).map_err(Into::into);
    extracted
        .map(Some)
        .map_err(|error| SchedulerError::new_err(format!("request key {key}: {error}")))
}

fn required<'py, T>(dict: &Bound<'py, PyDict>, key: &str) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    optional(dict, key)?
        .ok_or_else(|| SchedulerError::new_err(format!("request key {key} is missing")))
}

/// The ids under a key, in the list that `list` gives when told how many there are.
fn ids(
    dict: &Bound<'_, PyDict>,
    key: &str,
    list: impl FnOnce(usize) -> Vec<u32>,
) -> PyResult<Option<Vec<u32>>> {
    let Some(value) = dict.get_item(key)?.filter(|value| !value.is_none()) else {
        return Ok(None);
    };
    let bytes = value.cast::<PyBytes>().map_err(|_| {
        SchedulerError::new_err(format!(
            "request key {key} must be bytes (u32 little-endian)"
        ))
    })?;
    let words = bytes.as_bytes().chunks_exact(4);
    if !words.remainder().is_empty() {
        let len = bytes.as_bytes().len();
        let message = format!("request key {key} has {len} bytes, not whole u32");
        return Err(SchedulerError::new_err(message));
    }
    let to_id = |word: &[u8]| u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
    let mut ids = list(words.len());
    ids.extend(words.map(to_id));
    Ok(Some(ids))
}
