//! Where the tokens of a completion begin in its text.

use hpp_generate::text::{Detokenizer, TextTokenizer};

/// Tracks where tokens begin, first those of the prompt, if the answer begins with it, then those of the answer. Counts characters (Unicode scalar
/// values).
pub struct TextOffsets {
    tokenizer: TextTokenizer,
    detokenizer: Detokenizer,
    /// Characters of the prompt that the answer begins with.
    echo: usize,
    is_in_answer: bool,
    /// Characters that the detokenizer returned.
    returned: usize,
    /// The last bytes of the tokens so far, if they begin a character.
    incomplete: Vec<u8>,
    /// Where that character begins.
    incomplete_at: usize,
}

impl TextOffsets {
    /// Starts at the beginning of an answer that begins with the text `echo`.
    pub fn new(tokenizer: &TextTokenizer, echo: &str) -> Self {
        let detokenizer = Detokenizer::new(tokenizer.clone());
        let (echo, incomplete) = (echo.chars().count(), Vec::new());
        Self {
            tokenizer: tokenizer.clone(),
            detokenizer,
            echo,
            is_in_answer: false,
            returned: 0,
            incomplete,
            incomplete_at: 0,
        }
    }

    /// Where a token of the prompt begins, at most at the end of the prompt's text: that text may differ from the text of its tokens, but the answer
    /// begins at its end.
    pub fn prompt_token(&mut self, token: u32) -> usize {
        self.push(token).min(self.echo)
    }

    /// Where a token of the answer begins. A token that continues a character begins where the character does.
    pub fn answer_token(&mut self, token: u32) -> usize {
        if !self.is_in_answer {
            self.is_in_answer = true;
            self.detokenizer = Detokenizer::new(self.tokenizer.clone());
            self.returned = self.echo;
            self.incomplete.clear();
        }
        self.push(token)
    }

    fn push(&mut self, token: u32) -> usize {
        let before = self.returned + self.detokenizer.held_characters();
        let bytes = if self.tokenizer.has_text(token) { self.tokenizer.token_bytes(token) } else { vec![] };
        let continues = self.continues(&bytes);
        let start = if continues { self.incomplete_at } else { before };
        let joined = self.incomplete.len() + bytes.len();
        // A token that cannot be decoded ends the request with an error elsewhere.
        self.returned += self.detokenizer.push(token).unwrap_or_default().chars().count();
        self.incomplete.extend(bytes);
        self.incomplete = incomplete_end(&self.incomplete).to_vec();
        let is_still_incomplete = continues && self.incomplete.len() == joined;
        if !is_still_incomplete {
            // The character began in this token, which holds it back as one replacement character.
            self.incomplete_at = (self.returned + self.detokenizer.held_characters()).saturating_sub(1);
        }
        start
    }

    /// Whether a token of these bytes begins inside the last character.
    fn continues(&self, bytes: &[u8]) -> bool {
        let joined = [&self.incomplete, bytes.get(..1).unwrap_or_default()].concat();
        let is_part_of_character =
            || str::from_utf8(&joined).map_or_else(|error| error.error_len().is_none(), |_| true);
        !self.incomplete.is_empty() && is_part_of_character()
    }
}

/// The bytes at the end that begin a character and do not complete it.
fn incomplete_end(mut bytes: &[u8]) -> &[u8] {
    while let Err(error) = str::from_utf8(bytes) {
        let Some(invalid) = error.error_len() else { return &bytes[error.valid_up_to()..] };
        bytes = &bytes[error.valid_up_to() + invalid..];
    }
    &[]
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_generate::text::{SpecialTokens, TokenBytes};
    use serde_json::{Value, json};
    use std::path::Path;

    fn tokenizer() -> TextTokenizer {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
        TextTokenizer::open(&models.join("genai/learned-llama-int4-cpu/tokenizer.json")).unwrap()
    }

    #[test]
    fn a_token_after_bytes_that_are_no_character_begins_behind_their_replacement() {
        let tokenizer = tokenizer();
        let bytes = tokenizer.encode("\u{4f60}", SpecialTokens::Omit).unwrap();
        let x = tokenizer.encode("x", SpecialTokens::Omit).unwrap();
        assert!(bytes.len() == 3 && x.len() == 1, "{bytes:?} {x:?}");
        let offsets = |tokens: &[u32]| {
            let mut offsets = TextOffsets::new(&tokenizer, "");
            tokens.iter().map(|token| offsets.answer_token(*token)).collect::<Vec<_>>()
        };
        assert_eq!(offsets(&[x[0], bytes[0], bytes[1], bytes[2], x[0]]), [0, 1, 1, 1, 2]);
        assert_eq!(offsets(&[bytes[0], x[0], x[0]]), [0, 1, 2]);
    }

    /// The decoder of a byte-fallback vocabulary replaces each byte that is no character by itself, and two bytes of a character by two.
    #[test]
    fn bytes_of_a_byte_fallback_vocabulary_have_the_offset_of_their_character() {
        let vocabulary: serde_json::Map<String, Value> = (0..256u32)
            .map(|byte| (format!("<0x{byte:02X}>"), json!(byte)))
            .chain([("b".to_owned(), json!(256)), ("\u{2581}a".to_owned(), json!(257))])
            .collect();
        let file = json!({
            "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}
            ]},
            "model": {"type": "BPE", "byte_fallback": true, "unk_token": null, "vocab": vocabulary, "merges": []}
        });
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), file.to_string()).unwrap();
        let tokenizer = TextTokenizer::open(&dir.path().join("tokenizer.json")).unwrap();
        let offsets = |tokens: &[u32]| {
            let mut offsets = TextOffsets::new(&tokenizer, "");
            tokens.iter().map(|token| offsets.answer_token(*token)).collect::<Vec<_>>()
        };
        assert_eq!(offsets(&[256, 0xE2, 0x82, 0xAC, 256]), [0, 1, 1, 1, 2]);
        assert_eq!(offsets(&[256, 0xF0, 0x9F, 0x98, 0x80, 256]), [0, 1, 1, 1, 1, 2]);
        assert_eq!(offsets(&[256, 0xE2, 0x82, 256, 256]), [0, 1, 1, 3, 4]);
        assert_eq!(offsets(&[0xA8, 0xC8, 256]), [0, 1, 2]);
    }

    /// One token per byte. Bytes that are no character are one replacement character each; a character after them has one offset.
    #[test]
    fn each_byte_that_is_no_character_has_its_own_offset() {
        let tokenizer = tokenizer();
        let vocabulary = tokenizer.vocabulary_bytes().unwrap().tokens;
        let token =
            |byte: u8| vocabulary.iter().position(|bytes| *bytes == TokenBytes::Text(vec![byte])).unwrap() as u32;
        let offsets = |bytes: &[u8]| {
            let mut offsets = TextOffsets::new(&tokenizer, "");
            bytes.iter().map(|byte| offsets.answer_token(token(*byte))).collect::<Vec<_>>()
        };
        let cases: [(&[u8], &[usize]); 7] = [
            (b"W\xE2\x82\xACW", &[0, 1, 1, 1, 2]),
            (b"W\xE2\x82W", &[0, 1, 1, 2]),
            (b"W\xA8\xC8W", &[0, 1, 2, 3]),
            (b"W\xA8\xE2\x82\xACW", &[0, 1, 2, 2, 2, 3]),
            (b"W\xE2\xC3\xA9W", &[0, 1, 2, 2, 3]),
            (b"W\xA8\xA8\xA8\xA8\xA8W", &[0, 1, 2, 3, 4, 5, 6]),
            (b"\xFA\xA8\xC8W", &[0, 1, 2, 3]),
        ];
        for (bytes, expected) in cases {
            assert_eq!(offsets(bytes), expected, "{bytes:x?}");
            // The offset after all bytes is the length of the text.
            let text: String = String::from_utf8_lossy(bytes).into_owned();
            assert_eq!(text.chars().count(), expected.last().unwrap() + 1);
        }
    }
}
