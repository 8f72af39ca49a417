//! The bytes that each token of a vocabulary adds to a text.
//!
//! They follow from the decoder that `tokenizer.json` names. Three kinds are known: byte-level vocabularies (GPT-2's characters for
//! bytes), byte-fallback ones (`<0x0A>` and a character for the space) and those with a character for the space alone.

use serde_json::Value;
use tokenizers::Tokenizer;

/// The highest id may be about this many times the number of tokens. Without a limit, a file could name ids as high as it wants.
const MAX_IDS_PER_TOKEN: usize = 16;

/// What a token adds to a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenBytes {
    /// Bytes, whole characters or not.
    Text(Vec<u8>),
    /// Nothing: it is a special token with this name.
    Special(String),
    /// There is no token with this id.
    None,
}

/// A vocabulary as bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VocabularyBytes {
    /// What each token adds to a text, by id.
    pub tokens: Vec<TokenBytes>,
    /// Whether the decoder drops a space at the start of a text.
    pub drops_first_space: bool,
}

/// How names of tokens stand for bytes.
#[derive(Default)]
pub struct Naming {
    /// Each character stands for a byte.
    is_byte_level: bool,
    /// `<0xNN>` is a byte.
    has_byte_tokens: bool,
    /// The text that stands for a space.
    space: Option<String>,
    drops_first_space: bool,
}

/// The bytes of each token.
///
/// # Errors
/// The decoder is of an unknown kind, or the gaps between ids are too large.
pub fn vocabulary_bytes(tokenizer: &Tokenizer) -> Result<VocabularyBytes, String> {
    let naming = Naming::of(tokenizer)?;
    let names = tokenizer.get_vocab(true);
    let highest = names.values().max().map_or(0, |id| *id as usize);
    if highest / MAX_IDS_PER_TOKEN > names.len() {
        return Err(format!("it has {} tokens, and ids up to {highest}", names.len()));
    }
    let mut tokens = vec![TokenBytes::None; highest + 1];
    for (name, id) in names {
        tokens[id as usize] = naming.token(tokenizer, id, name);
    }
    Ok(VocabularyBytes { tokens, drops_first_space: naming.drops_first_space })
}

impl Naming {
    /// The naming of a tokenizer.
    ///
    /// # Errors
    /// Its decoder is of an unknown kind.
    pub fn of(tokenizer: &Tokenizer) -> Result<Naming, String> {
        let decoder = tokenizer.get_decoder().map(serde_json::to_value).transpose();
        let mut naming = Naming::default();
        naming.read(&decoder.map_err(|error| error.to_string())?.unwrap_or_default());
        if !naming.is_byte_level && naming.space.is_none() {
            return Err("its decoder does not say which bytes a token stands for".to_owned());
        }
        Ok(naming)
    }

    /// What a token of this id and name adds to a text.
    pub fn token(&self, tokenizer: &Tokenizer, id: u32, name: String) -> TokenBytes {
        match tokenizer.get_added_vocabulary().get_added_tokens_decoder().get(&id) {
            Some(token) if token.special => TokenBytes::Special(name),
            Some(_) => TokenBytes::Text(name.into_bytes()),
            None => self.bytes(name),
        }
    }

    /// Reads a decoder, and those within it.
    fn read(&mut self, decoder: &Value) {
        match decoder["type"].as_str() {
            Some("ByteLevel") => self.is_byte_level = true,
            Some("ByteFallback") => self.has_byte_tokens = true,
            Some("Metaspace") => {
                self.space = decoder["replacement"].as_str().map(str::to_owned);
                self.drops_first_space |= decoder["prepend_scheme"] != "never";
            }
            Some("Replace") if decoder["content"] == " " => {
                self.space = decoder["pattern"]["String"].as_str().map(str::to_owned).or(self.space.take());
            }
            Some("Strip") if decoder["content"] == " " => {
                self.drops_first_space |= decoder["start"].as_u64().is_some_and(|start| start > 0);
            }
            _ => {}
        }
        decoder["decoders"].as_array().into_iter().flatten().for_each(|inner| self.read(inner));
    }

    fn bytes(&self, name: String) -> TokenBytes {
        if self.is_byte_level {
            let bytes: Option<Vec<u8>> = name.chars().map(byte_of).collect();
            return bytes.map_or(TokenBytes::None, TokenBytes::Text);
        }
        let hex = name.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>')).filter(|hex| hex.len() == 2);
        if let Some(byte) = hex.filter(|_| self.has_byte_tokens).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            return TokenBytes::Text(vec![byte]);
        }
        let space = self.space.as_deref().unwrap_or(" ");
        TokenBytes::Text(if space.is_empty() { name } else { name.replace(space, " ") }.into_bytes())
    }
}

/// The byte for which GPT-2's vocabulary uses this character: itself if it is printable, else the next free one from U+0100 on.
fn byte_of(character: char) -> Option<u8> {
    let is_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    match u32::from(character) {
        code @ 0..=0xff => u8::try_from(code).ok().filter(|byte| is_itself(*byte)),
        code => (0..=255u8).filter(|byte| !is_itself(*byte)).nth(usize::try_from(code - 0x100).ok()?),
    }
}

#[cfg(test)]
mod tests {
    use super::super::TextTokenizer;
    use super::super::test_tokenizers::{byte_fallback, byte_level, metaspace};
    use super::*;

    fn bytes(tokenizer: &TextTokenizer) -> VocabularyBytes {
        tokenizer.vocabulary_bytes().unwrap()
    }

    fn text(bytes: &[u8]) -> TokenBytes {
        TokenBytes::Text(bytes.to_vec())
    }

    #[test]
    fn the_three_kinds_of_names_become_bytes() {
        let level = bytes(&byte_level());
        for byte in 0..=255u8 {
            assert_eq!(level.tokens[usize::from(byte)], text(&[byte]));
        }
        assert_eq!(level.tokens[256], TokenBytes::Special("<|end|>".into()));
        assert!(!level.drops_first_space);
        let fallback = bytes(&byte_fallback());
        assert_eq!(fallback.tokens[0xe4], text(&[0xe4]));
        assert_eq!((&fallback.tokens[257], &fallback.tokens[258]), (&text(b" a"), &text(b"b")));
        assert!(fallback.drops_first_space);
        let space = bytes(&metaspace());
        assert_eq!((&space.tokens[0], &space.tokens[2]), (&TokenBytes::Special("<|end|>".into()), &text(b" two")));
        assert!(space.drops_first_space);
    }

    #[test]
    fn the_bytes_of_one_token_are_those_of_the_vocabulary() {
        for tokenizer in [byte_level(), byte_fallback(), metaspace()] {
            for (id, token) in (0..).zip(bytes(&tokenizer).tokens) {
                let expected = match token {
                    TokenBytes::Text(bytes) => bytes,
                    TokenBytes::Special(name) => name.into_bytes(),
                    TokenBytes::None => vec![],
                };
                assert_eq!(tokenizer.token_bytes(id), expected, "{id}");
            }
            assert_eq!(tokenizer.token_bytes(999_999), [0; 0]);
        }
    }

    /// What the bytes say must be what decoding says.
    #[test]
    fn bytes_join_to_the_decoded_text() {
        let tokenizer = byte_fallback();
        let tokens = [257, 258, 0xe4, 0xbd, 0xa0, 259, 258];
        let known = bytes(&tokenizer);
        let joined: Vec<u8> = tokens
            .iter()
            .flat_map(|token| match &known.tokens[*token as usize] {
                TokenBytes::Text(bytes) => bytes.clone(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(String::from_utf8(joined).unwrap().strip_prefix(' ').unwrap(), tokenizer.decode(&tokens).unwrap());
    }
}
