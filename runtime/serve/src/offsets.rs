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
    /// Characters before the next token.
    next: usize,
}

impl TextOffsets {
    /// Starts at the beginning of an answer that begins with the text `echo`.
    pub fn new(tokenizer: &TextTokenizer, echo: &str) -> Self {
        let detokenizer = Detokenizer::new(tokenizer.clone());
        Self { tokenizer: tokenizer.clone(), detokenizer, echo: echo.chars().count(), is_in_answer: false, next: 0 }
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
            self.next = self.echo;
        }
        self.push(token)
    }

    fn push(&mut self, token: u32) -> usize {
        let continues = self.detokenizer.holds_text();
        // A token that cannot be decoded ends the request with an error elsewhere.
        let text = self.detokenizer.push(token).unwrap_or_default();
        // Bytes of earlier tokens that begin no character become replacement characters once this token does not continue them.
        let replaced = text.chars().take_while(|c| continues && *c == char::REPLACEMENT_CHARACTER).count();
        let start = self.next + replaced;
        self.next += text.chars().count();
        start
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_generate::text::SpecialTokens;
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
}
