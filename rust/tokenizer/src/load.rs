//! Files to a tokenizer: `tokenizer.json`, and what the configuration beside it adds.

use crate::error::TokenizerError;
use serde_json::Value;
use std::path::Path;

pub(crate) fn read_json(path: &Path) -> Result<Value, TokenizerError> {
    let bytes = std::fs::read(path).map_err(|source| TokenizerError::Read {
        path: path.to_path_buf(),
        source,
    })?;
    serde_json::from_slice(&bytes).map_err(|error| TokenizerError::Parse {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })
}

/// The reference tokenizer, without truncation and padding.
pub(crate) fn build(json: &Value, path: &Path) -> Result<tokenizers::Tokenizer, TokenizerError> {
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
pub(crate) fn bos_token(
    hf: &tokenizers::Tokenizer,
    path: &Path,
) -> Result<Option<u32>, TokenizerError> {
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
