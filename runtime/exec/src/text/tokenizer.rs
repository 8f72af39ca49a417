//! A model's tokenizer as its `tokenizer.json` describes it. Knows nothing of streaming.
//!
//! The file comes with a model: reading it and tokenizing with it run within limits (see `untrusted`).

use super::untrusted::{Failure, Limits, contained, run};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokenizers::Tokenizer;

/// Longest `tokenizer.json` read; the largest real ones have some 35 MB.
const MOST_BYTES: u64 = 256 << 20;

/// Longest text a few tokens may become.
const MOST_DECODED: u64 = 64 << 20;

/// Turns text into token ids and back, exactly as the file says.
pub struct TextTokenizer {
    inner: Arc<Tokenizer>,
    /// How many times longer than its tokens a decoded text can be.
    growth: u64,
    path: PathBuf,
}

/// Why text could not be turned into tokens or back.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is missing or is not a tokenizer.
    #[error("cannot read the tokenizer {}: {why}", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// What the reader said.
        why: String,
    },
    /// The tokenizer refused the text.
    #[error("cannot turn the text into tokens with {}: {why}", path.display())]
    Encode {
        /// The file.
        path: PathBuf,
        /// What the tokenizer said.
        why: String,
    },
    /// The tokenizer refused the tokens.
    #[error("cannot turn tokens into text with {}: {why}", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
        /// What the tokenizer said.
        why: String,
    },
}

impl TokenizerError {
    /// The next step for a person.
    pub fn hint(&self) -> &'static str {
        "take tokenizer.json anew from where the model came from, or give tokens instead of text: --tokens 1,2,3"
    }
}

/// Whether the special tokens that `tokenizer.json` puts around a text are added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Around {
    /// As the post-processor says: usually a beginning-of-text token.
    SpecialTokens,
    /// Nothing: the text, such as a rendered chat template, holds its own.
    Nothing,
}

impl TextTokenizer {
    /// Reads a `tokenizer.json`. Truncation and padding set in the file are for training and are switched off.
    pub fn open(path: &Path) -> Result<Self, TokenizerError> {
        let load = |why: String| TokenizerError::Load { path: path.to_owned(), why };
        let bytes = hpp_io::read(path, MOST_BYTES).map_err(|e| load(e.to_string()))?;
        let limits = limits(bytes.len());
        let (inner, growth) =
            run(limits, move || parse(bytes)).map_err(|failure| load(said(&failure)))?.map_err(load)?;
        Ok(Self { inner: Arc::new(inner), growth, path: path.to_owned() })
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str, around: Around) -> Result<Vec<u32>, TokenizerError> {
        let error = |why| TokenizerError::Encode { path: self.path.clone(), why };
        let (inner, limits, text) = (Arc::clone(&self.inner), limits(text.len()), text.to_owned());
        let encode = move || {
            let encoding = inner.encode_fast(text, around == Around::SpecialTokens);
            encoding.map(|encoding| encoding.get_ids().to_vec()).map_err(|e| e.to_string())
        };
        run(limits, encode).map_err(|failure| error(said(&failure)))?.map_err(error)
    }

    /// The text of some tokens; special tokens have none.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        let error = |why| TokenizerError::Decode { path: self.path.clone(), why };
        if self.growth > 1 {
            let length = |token: &u32| self.inner.id_to_token(*token).map_or(0, |name| name.len() as u64);
            let longest = tokens.iter().map(length).sum::<u64>().saturating_mul(self.growth);
            if longest > MOST_DECODED {
                return Err(error(format!("its decoder may make {} bytes of {} tokens", longest, tokens.len())));
            }
        }
        // Once a token: too often for a thread of its own, and its memory is bounded above.
        contained(|| self.inner.decode(tokens, true))
            .map_err(|failure| error(said(&failure)))?
            .map_err(|e| error(e.to_string()))
    }

    /// How many of these tokens the tokenizer does not know: they have no text, though the model chose them.
    pub fn count_unknown(&self, tokens: &[u32]) -> usize {
        tokens.iter().filter(|token| self.inner.id_to_token(**token).is_none()).count()
    }

    /// Whether a token contributes text at all: special tokens and ids the tokenizer does not know do not.
    pub fn has_text(&self, token: u32) -> bool {
        let Some(name) = self.inner.id_to_token(token) else { return false };
        !self.inner.get_added_vocabulary().is_special_token(&name)
    }
}

fn parse(bytes: Vec<u8>) -> Result<(Tokenizer, u64), String> {
    check_charsmaps(&bytes)?;
    let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(|e| e.to_string())?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(|e| e.to_string())?;
    let decoder = tokenizer.get_decoder().map(serde_json::to_value).transpose().map_err(|e| e.to_string())?;
    let growth = growth(&decoder.unwrap_or_default());
    Ok((tokenizer, growth))
}

/// What reading a file of so many bytes, or tokenizing a text of so many, may take: many times what honest ones take.
fn limits(bytes: usize) -> Limits {
    let bytes = bytes as u64;
    Limits { time: Duration::from_secs(20 + (bytes >> 20) * 5), memory: (1 << 30) + bytes.saturating_mul(128) }
}

/// Refuses a SentencePiece character map that says it is larger than it is. The library allocates what the map says, eight
/// bytes for each four, before it reads any of it.
fn check_charsmaps(tokenizer: &[u8]) -> Result<(), String> {
    #[derive(Deserialize)]
    struct Normalizers {
        #[serde(default)]
        normalizer: Value,
    }
    // What is no JSON is for the library to refuse.
    let Ok(Normalizers { normalizer }) = serde_json::from_slice(tokenizer) else { return Ok(()) };
    charsmaps(&normalizer, &mut |map| {
        let Ok(map) = BASE64_STANDARD.decode(map) else { return Ok(()) };
        let Some((size, rest)) = map.split_first_chunk() else { return Ok(()) };
        let size = u32::from_le_bytes(*size) as usize;
        if size <= rest.len() {
            return Ok(());
        }
        Err(format!("its precompiled_charsmap says that {size} bytes of a trie follow, and {} do", rest.len()))
    })
}

/// Calls `check` with every character map of a normalizer, however deep.
fn charsmaps(normalizer: &Value, check: &mut impl FnMut(&str) -> Result<(), String>) -> Result<(), String> {
    match normalizer {
        Value::Array(items) => items.iter().try_for_each(|item| charsmaps(item, check)),
        Value::Object(fields) => {
            fields.get("precompiled_charsmap").and_then(Value::as_str).map_or(Ok(()), &mut *check)?;
            fields.values().try_for_each(|field| charsmaps(field, check))
        }
        _ => Ok(()),
    }
}

/// How many times longer a decoder can make a text: only replacements do, one after another.
fn growth(decoder: &Value) -> u64 {
    let inside = match decoder {
        Value::Array(items) => items.iter().map(growth).fold(1, u64::saturating_mul),
        Value::Object(fields) => fields.values().map(growth).fold(1, u64::saturating_mul),
        _ => return 1,
    };
    let Some(content) = decoder["content"].as_str().filter(|_| decoder["type"] == "Replace") else { return inside };
    let content = content.len() as u64;
    inside.saturating_mul(match decoder["pattern"]["String"].as_str() {
        Some(pattern) if !pattern.is_empty() => content.div_ceil(pattern.len() as u64).max(1),
        // A regular expression, or nothing, may match between any two characters.
        _ => content + 1,
    })
}

/// A failure with its cause, on one line.
fn said(failure: &Failure) -> String {
    hpp_schema::error_line(failure)
}

#[cfg(test)]
mod tests {
    use super::super::test_tokenizers::{byte_level, metaspace};
    use super::*;
    use serde_json::json;

    #[test]
    fn special_tokens_go_around_only_when_asked() {
        let tokenizer = metaspace();
        assert_eq!(tokenizer.encode("one two", Around::SpecialTokens).unwrap(), [0, 1, 2]);
        assert_eq!(tokenizer.encode("one two", Around::Nothing).unwrap(), [1, 2]);
        assert_eq!(tokenizer.decode(&[0, 1, 2]).unwrap(), "one two");
    }

    #[test]
    fn a_special_token_written_out_is_that_token() {
        assert_eq!(byte_level().encode("a<|end|>", Around::Nothing).unwrap(), [97, 256]);
    }

    #[test]
    fn ids_beyond_the_vocabulary_are_counted_and_special_tokens_are_not() {
        assert_eq!(byte_level().count_unknown(&[97, 256, 257, 999_999]), 2);
    }

    #[test]
    fn a_broken_file_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{}").unwrap();
        let error = TextTokenizer::open(file.path()).err().unwrap().to_string();
        assert!(error.contains(&file.path().display().to_string()), "{error}");
    }

    fn open(value: &Value) -> Result<TextTokenizer, TokenizerError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), value.to_string()).unwrap();
        TextTokenizer::open(file.path())
    }

    /// A tokenizer of one word with these parts.
    fn with(part: &str, value: Value) -> Value {
        let mut whole = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": null, "model": { "type": "WordLevel", "unk_token": "a", "vocab": { "a": 0 } }
        });
        whole[part] = value;
        whole
    }

    fn replace(count: usize, pattern: Value) -> Value {
        json!(vec![json!({ "type": "Replace", "pattern": pattern, "content": "aa" }); count])
    }

    /// The libraries behind panic on each of these.
    #[test]
    fn files_that_break_the_library_are_errors_that_name_them() {
        let missing = json!({ "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "[NONE]", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": {} });
        let hostile = [
            with("normalizer", json!({ "type": "Precompiled", "precompiled_charsmap": "AAAA" })),
            with("normalizer", json!({ "type": "Precompiled", "precompiled_charsmap": "////////" })),
            with(
                "pre_tokenizer",
                json!({ "type": "Split", "pattern": { "Regex": "" }, "behavior": "Isolated", "invert": false }),
            ),
            with("normalizer", json!({ "type": "Replace", "pattern": { "Regex": "" }, "content": "x" })),
            with("post_processor", missing),
        ];
        for value in &hostile {
            // Not all of them are refused by each version of the library; none may panic.
            match open(value) {
                Err(error) => assert!(error.to_string().contains("cannot read the tokenizer"), "{error}"),
                Ok(tokenizer) => drop(tokenizer.encode("a text", Around::SpecialTokens)),
            }
        }
    }

    #[test]
    fn a_character_map_cannot_say_it_is_larger_than_it_is() {
        for (map, said) in
            [("/////wAAAAA=", "4294967295 bytes of a trie follow, and 4 do"), ("CAAAAAAAAAA=", "8 bytes")]
        {
            let map = json!({ "type": "Sequence",
                "normalizers": [{ "type": "Precompiled", "precompiled_charsmap": map }] });
            let error = open(&with("normalizer", map)).err().unwrap().to_string();
            assert!(error.contains(said), "{error}");
        }
        assert_eq!(check_charsmaps(br#"{"normalizer": {"precompiled_charsmap": "BAAAAAAAAAA="}}"#), Ok(()));
    }

    #[test]
    fn decoders_that_blow_text_up_are_refused_before_they_do() {
        let chain = |count, pattern| json!({ "type": "Sequence", "decoders": replace(count, pattern) });
        let tokenizer = open(&with("decoder", chain(40, json!({ "String": "a" })))).unwrap();
        assert_eq!(tokenizer.growth, 1 << 40);
        let error = tokenizer.decode(&[0]).unwrap_err().to_string();
        assert!(error.contains("1099511627776 bytes of 1 tokens"), "{error}");
        let tokenizer = open(&with("decoder", chain(2, json!({ "Regex": "a" })))).unwrap();
        assert_eq!((tokenizer.growth, tokenizer.decode(&[0]).unwrap().as_str()), (9, "aaaa"));
        assert_eq!(byte_level().growth, 1);
    }
}
