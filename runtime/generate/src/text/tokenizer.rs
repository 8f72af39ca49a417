//! A model's tokenizer as its `tokenizer.json` describes it: text to tokens, and all tokens of a text to text.
//!
//! The file comes with a model and may be hostile, so loading and encoding run under the limits of `untrusted`.

use super::token_bytes::{Naming, TokenBytes, VocabularyBytes, vocabulary_bytes};
use super::untrusted::{TextLimits, catch_panic, run_limited};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokenizers::Tokenizer;

/// Largest `tokenizer.json` read; the largest real ones have some 35 MB.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Largest text that one decoding may produce.
const MAX_DECODED_BYTES: u64 = 64 << 20;

/// Turns text into token ids and back, as the file says. Clones share the vocabulary.
#[derive(Clone)]
pub struct TextTokenizer {
    inner: Arc<Tokenizer>,
    /// Upper bound of decoded bytes per byte of the tokens' names.
    growth: u64,
    /// Bytes of the longest name of a token.
    longest_token: usize,
    /// How names of tokens stand for bytes, if that follows from the file.
    naming: Option<Arc<Naming>>,
    path: Arc<Path>,
}

/// Why text could not be turned into tokens or back. The cause is the source.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is missing or is not a tokenizer.
    #[error("cannot read the tokenizer {}", path.display())]
    Load {
        /// The file.
        path: PathBuf,
        /// What the reader reported.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The tokenizer refused the text.
    #[error("cannot turn the text into tokens with {}", path.display())]
    Encode {
        /// The file.
        path: PathBuf,
        /// What the tokenizer reported.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The tokenizer refused the tokens.
    #[error("cannot turn tokens into text with {}", path.display())]
    Decode {
        /// The file.
        path: PathBuf,
        /// What the tokenizer reported.
        source: Box<dyn Error + Send + Sync>,
    },
    /// A token that the tokenizer does not have.
    #[error("the vocabulary has no token {0}")]
    UnknownToken(u32),
}

/// Whether to add the special tokens that `tokenizer.json` puts around a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// As the post-processor says: usually a beginning-of-text token.
    Add,
    /// None: the text, such as a rendered chat template, contains its own.
    Omit,
}

impl TextTokenizer {
    /// Reads a `tokenizer.json`. Its settings for truncation and padding are for training and are switched off.
    pub fn open(path: &Path) -> Result<Self, TokenizerError> {
        let failed = |source| TokenizerError::Load { path: path.to_owned(), source };
        let bytes = hpp_io::read_text(path, MAX_FILE_BYTES).map_err(|error| failed(error.into()))?.into_bytes();
        let parsed = run_limited(limits(bytes.len()), move || parse(bytes)).map_err(|error| failed(error.into()))?;
        let Parsed { tokenizer, growth, longest_token } = parsed.map_err(failed)?;
        let naming = Naming::of(&tokenizer).ok().map(Arc::new);
        Ok(Self { inner: Arc::new(tokenizer), growth, longest_token, naming, path: path.into() })
    }

    /// Bytes of the longest name of a token: no token stands for more bytes of a text.
    pub fn longest_token(&self) -> usize {
        self.longest_token
    }

    /// The token ids of a text.
    pub fn encode(&self, text: &str, special: SpecialTokens) -> Result<Vec<u32>, TokenizerError> {
        let failed = |source| TokenizerError::Encode { path: self.path.to_path_buf(), source };
        let (inner, limits, text) = (Arc::clone(&self.inner), limits(text.len()), text.to_owned());
        let encode = move || {
            let encoding = inner.encode_fast(text, special == SpecialTokens::Add)?;
            Ok(encoding.get_ids().to_vec())
        };
        run_limited(limits, encode).map_err(|error| failed(error.into()))?.map_err(failed)
    }

    /// The text of tokens. Special tokens have none.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        let failed = |source| TokenizerError::Decode { path: self.path.to_path_buf(), source };
        if self.growth > 1 {
            let name_bytes = |token: &u32| self.inner.id_to_token(*token).map_or(0, |name| name.len() as u64);
            let bound = tokens.iter().map(name_bytes).sum::<u64>().saturating_mul(self.growth);
            if bound > MAX_DECODED_BYTES {
                return Err(failed(format!("its decoder may make {bound} bytes of {} tokens", tokens.len()).into()));
            }
        }
        // Runs once for each token: too often for a thread of its own, and the check above bounds its memory.
        catch_panic(|| self.inner.decode(tokens, true)).map_err(|error| failed(error.into()))?.map_err(failed)
    }

    /// A token that another tokenizer does not have, or has with another id; `None` if both have the same tokens.
    pub fn first_difference(&self, other: &TextTokenizer) -> Option<String> {
        let (ours, theirs) = (self.inner.get_vocab(true), other.inner.get_vocab(true));
        let missing = |from: &HashMap<String, u32>, to: &HashMap<String, u32>| {
            let differs = from.iter().filter(|(token, id)| to.get(*token) != Some(id));
            differs.min_by_key(|(_, id)| **id).map(|(token, _)| token.clone())
        };
        missing(&ours, &theirs).or_else(|| missing(&theirs, &ours))
    }

    /// How many of these tokens the tokenizer does not know. They have no text although the model chose them.
    pub fn count_unknown(&self, tokens: &[u32]) -> usize {
        tokens.iter().filter(|token| self.inner.id_to_token(**token).is_none()).count()
    }

    /// Checks that the tokenizer has all these tokens: [`decode`](Self::decode) leaves out those that it does not have.
    pub fn check_known(&self, tokens: &[u32]) -> Result<(), TokenizerError> {
        let unknown = tokens.iter().find(|token| self.inner.id_to_token(**token).is_none());
        unknown.map_or(Ok(()), |token| Err(TokenizerError::UnknownToken(*token)))
    }

    /// The bytes that each token adds to a text.
    ///
    /// # Errors
    /// They do not follow from the file.
    pub fn vocabulary_bytes(&self) -> Result<VocabularyBytes, String> {
        vocabulary_bytes(&self.inner)
    }

    /// The bytes that a token adds to a text, whole characters or not, with the space at the start of a word; for a special token, its
    /// name. Empty for an unknown id. If the bytes do not follow from the file, they are those of the token decoded alone.
    pub fn token_bytes(&self, token: u32) -> Vec<u8> {
        let Some(name) = self.inner.id_to_token(token) else { return vec![] };
        match self.naming.as_ref().map(|naming| naming.token(&self.inner, token, name)) {
            Some(TokenBytes::Text(bytes)) => bytes,
            Some(TokenBytes::Special(name)) => name.into_bytes(),
            Some(TokenBytes::None) => vec![],
            None => {
                let text = self.special_name(token).or_else(|| self.decode(&[token]).ok());
                text.unwrap_or_default().into_bytes()
            }
        }
    }

    /// The id of the token with this name.
    pub fn token_id(&self, name: &str) -> Option<u32> {
        self.inner.token_to_id(name)
    }

    /// The name of a special token. `None` for all others.
    pub fn special_name(&self, token: u32) -> Option<String> {
        let name = self.inner.id_to_token(token)?;
        self.inner.get_added_vocabulary().is_special_token(&name).then_some(name)
    }

    /// Whether a token has text. Special tokens and unknown ids have none.
    pub fn has_text(&self, token: u32) -> bool {
        let Some(name) = self.inner.id_to_token(token) else { return false };
        !self.inner.get_added_vocabulary().is_special_token(&name)
    }
}

/// A tokenizer, with the other fields of [`TextTokenizer`].
struct Parsed {
    tokenizer: Tokenizer,
    growth: u64,
    longest_token: usize,
}

fn parse(bytes: Vec<u8>) -> tokenizers::Result<Parsed> {
    check_charsmaps(&bytes)?;
    let mut tokenizer = Tokenizer::from_bytes(bytes)?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None)?;
    let decoder = tokenizer.get_decoder().map(serde_json::to_value).transpose()?;
    let growth = growth(&decoder.unwrap_or_default());
    let longest_token = tokenizer.get_vocab(true).keys().map(String::len).max().unwrap_or(0);
    Ok(Parsed { tokenizer, growth, longest_token })
}

/// Limits for reading a file, or encoding a text, of this many bytes: many times what real ones take.
fn limits(bytes: usize) -> TextLimits {
    let bytes = bytes as u64;
    TextLimits { time: Duration::from_secs(20 + (bytes >> 20) * 5), memory: (1 << 30) + bytes.saturating_mul(128) }
}

/// Refuses a SentencePiece character map that claims to be larger than it is. The library allocates what the map claims, eight bytes
/// for each four, before it reads any of it.
fn check_charsmaps(tokenizer: &[u8]) -> Result<(), String> {
    #[derive(Deserialize)]
    struct Normalizers {
        #[serde(default)]
        normalizer: Value,
    }
    // The library reports invalid JSON.
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

/// Upper bound of how many times longer a decoder can make a text. Only replacements do, one after another.
fn growth(decoder: &Value) -> u64 {
    let children = match decoder {
        Value::Array(items) => items.iter().map(growth).fold(1, u64::saturating_mul),
        Value::Object(fields) => fields.values().map(growth).fold(1, u64::saturating_mul),
        _ => return 1,
    };
    let Some(content) = decoder["content"].as_str().filter(|_| decoder["type"] == "Replace") else { return children };
    let content = content.len() as u64;
    children.saturating_mul(match decoder["pattern"]["String"].as_str() {
        Some(pattern) if !pattern.is_empty() => content.div_ceil(pattern.len() as u64).max(1),
        // A regular expression, or an empty pattern, may match between any two characters.
        _ => content + 1,
    })
}

#[cfg(test)]
mod tests {
    use super::super::test_tokenizers::{byte_level, metaspace};
    use super::*;
    use serde_json::json;

    #[test]
    fn special_tokens_are_added_only_on_request() {
        let tokenizer = metaspace();
        assert_eq!(tokenizer.encode("one two", SpecialTokens::Add).unwrap(), [0, 1, 2]);
        assert_eq!(tokenizer.encode("one two", SpecialTokens::Omit).unwrap(), [1, 2]);
        assert_eq!(tokenizer.decode(&[0, 1, 2]).unwrap(), "one two");
    }

    #[test]
    fn text_that_spells_a_special_token_becomes_that_token() {
        assert_eq!(byte_level().encode("a<|end|>", SpecialTokens::Omit).unwrap(), [97, 256]);
    }

    #[test]
    fn ids_beyond_the_vocabulary_are_counted_and_special_tokens_are_not() {
        assert_eq!(byte_level().count_unknown(&[97, 256, 257, 999_999]), 2);
    }

    #[test]
    fn the_first_id_beyond_the_vocabulary_is_named() {
        assert!(byte_level().check_known(&[97, 256]).is_ok());
        let error = byte_level().check_known(&[97, 257, 999_999]).unwrap_err();
        assert_eq!(error.to_string(), "the vocabulary has no token 257");
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

    /// A tokenizer with a vocabulary of one word and this part.
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

    /// The tokenizer libraries panic on each of these.
    #[test]
    fn files_that_make_the_library_panic_are_errors_that_name_the_file() {
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
            // Each version of the library refuses some of them; none may panic here.
            match open(value) {
                Err(error) => assert!(error.to_string().contains("cannot read the tokenizer"), "{error}"),
                Ok(tokenizer) => drop(tokenizer.encode("a text", SpecialTokens::Add)),
            }
        }
    }

    #[test]
    fn a_character_map_cannot_claim_to_be_larger_than_it_is() {
        for (map, said) in
            [("/////wAAAAA=", "4294967295 bytes of a trie follow, and 4 do"), ("CAAAAAAAAAA=", "8 bytes")]
        {
            let map = json!({ "type": "Sequence",
                "normalizers": [{ "type": "Precompiled", "precompiled_charsmap": map }] });
            let error = hpp_schema::error_line(&open(&with("normalizer", map)).err().unwrap());
            assert!(error.contains(said), "{error}");
        }
        assert_eq!(check_charsmaps(br#"{"normalizer": {"precompiled_charsmap": "BAAAAAAAAAA="}}"#), Ok(()));
    }

    #[test]
    fn decoders_that_multiply_text_are_refused_before_they_run() {
        let chain = |count, pattern| json!({ "type": "Sequence", "decoders": replace(count, pattern) });
        let tokenizer = open(&with("decoder", chain(40, json!({ "String": "a" })))).unwrap();
        assert_eq!(tokenizer.growth, 1 << 40);
        let error = hpp_schema::error_line(&tokenizer.decode(&[0]).unwrap_err());
        assert!(error.contains("1099511627776 bytes of 1 tokens"), "{error}");
        let tokenizer = open(&with("decoder", chain(2, json!({ "Regex": "a" })))).unwrap();
        assert_eq!((tokenizer.growth, tokenizer.decode(&[0]).unwrap().as_str()), (9, "aaaa"));
        assert_eq!((byte_level().growth, byte_level().longest_token()), (1, "<|end|>".len()));
    }
}
