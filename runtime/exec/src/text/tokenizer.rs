//! A model's tokenizer as its `tokenizer.json` describes it. Knows nothing of streaming.

use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// Turns text into token ids and back, exactly as the file says.
pub struct TextTokenizer {
    inner: Tokenizer,
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
        let bytes = std::fs::read(path).map_err(|e| load(e.to_string()))?;
        let mut inner = Tokenizer::from_bytes(bytes).map_err(|e| load(e.to_string()))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| load(e.to_string()))?;
        Ok(Self { inner, path: path.to_owned() })
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str, around: Around) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self
            .inner
            .encode_fast(text, around == Around::SpecialTokens)
            .map_err(|e| TokenizerError::Encode { path: self.path.clone(), why: e.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of some tokens; special tokens have none.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, TokenizerError> {
        self.inner
            .decode(tokens, true)
            .map_err(|e| TokenizerError::Decode { path: self.path.clone(), why: e.to_string() })
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

#[cfg(test)]
mod tests {
    use super::super::test_tokenizers::{byte_level, metaspace};
    use super::*;

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
}
