//! Text from tokens as they come: whole characters only, and together exactly what decoding all at once gives.
//!
//! A token may end inside a character (byte-level and byte-fallback vocabularies), and a decoder may treat the first
//! token of a text differently (Metaspace). So a short window of earlier tokens is decoded together with each new one,
//! and text that ends in U+FFFD, the mark of an unfinished character, is held back.

use super::{TextTokenizer, TokenizerError};

/// Unfinished characters are at most three bytes long, so after this many tokens without a whole character the bytes
/// are simply not UTF-8.
const MOST_TOKENS_IN_A_CHARACTER: usize = 4;

/// Tokens decoded together before the window moves on.
const WINDOW: usize = 24;

/// An incremental decoder for one text.
pub struct Pieces<'t> {
    tokenizer: &'t TextTokenizer,
    /// Tokens of the window; special tokens never enter it.
    window: Vec<u32>,
    /// Bytes of the window's text already handed out.
    done: usize,
    /// Length of `window` when its text was last handed out completely.
    whole: usize,
}

impl<'t> Pieces<'t> {
    /// A decoder at the beginning of a text.
    pub fn new(tokenizer: &'t TextTokenizer) -> Self {
        Self { tokenizer, window: vec![], done: 0, whole: 0 }
    }

    /// Takes one more token and returns the text that is certain now, often empty.
    pub fn push(&mut self, token: u32) -> Result<String, TokenizerError> {
        if !self.tokenizer.has_text(token) {
            return Ok(String::new());
        }
        self.window.push(token);
        let text = self.tokenizer.decode(&self.window)?;
        let certain = self.certain(&text);
        let piece = self.take(&text, certain);
        if certain == text.len() {
            self.advance()?;
        }
        Ok(piece)
    }

    /// Ends the text and returns what was held back.
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.window)?;
        let rest = self.take(&text, text.len());
        self.window.clear();
        (self.done, self.whole) = (0, 0);
        Ok(rest)
    }

    /// How many bytes of `text` no later token can change.
    fn certain(&self, text: &str) -> usize {
        let settled = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        let waiting = self.window.len() - self.whole;
        if settled == text.len() || waiting < MOST_TOKENS_IN_A_CHARACTER {
            settled
        } else {
            // Not UTF-8: everything but the last mark, which may still be the start of a character.
            text.len() - char::REPLACEMENT_CHARACTER.len_utf8()
        }
    }

    fn take(&mut self, text: &str, end: usize) -> String {
        // A byte-fallback run that turns out not to be UTF-8 changes text already handed out; go on behind it.
        let start = text.ceil_char_boundary(self.done.min(text.len()));
        if end <= start {
            return String::new();
        }
        self.done = end;
        text[start..end].to_owned()
    }

    /// Drops tokens from the front once the window is long, at a place where the text was complete.
    fn advance(&mut self) -> Result<(), TokenizerError> {
        if self.window.len() >= WINDOW && self.whole > 0 {
            self.window.drain(..self.whole);
            self.done = self.tokenizer.decode(&self.window)?.len();
        }
        self.whole = self.window.len();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_tokenizers::{byte_fallback, byte_level, metaspace};
    use super::*;
    use proptest::prelude::*;

    fn stream(tokenizer: &TextTokenizer, tokens: &[u32]) -> Vec<String> {
        let mut pieces = Pieces::new(tokenizer);
        let mut out: Vec<String> = tokens.iter().map(|t| pieces.push(*t).unwrap()).collect();
        out.push(pieces.finish().unwrap());
        out
    }

    #[test]
    fn a_character_in_three_tokens_comes_whole() {
        let tokenizer = byte_level();
        let tokens: Vec<u32> = "é你".bytes().map(u32::from).collect();
        assert_eq!(stream(&tokenizer, &tokens), ["", "é", "", "", "你", ""]);
    }

    #[test]
    fn an_unfinished_character_is_marked_at_the_end_only() {
        let tokenizer = byte_level();
        assert_eq!(stream(&tokenizer, &[u32::from(b'a'), 0xe4, 0xbd]), ["a", "", "", "\u{fffd}"]);
    }

    #[test]
    fn byte_fallback_holds_the_run_until_it_is_a_character() {
        let tokenizer = byte_fallback();
        let tokens: Vec<u32> = "你好😀".bytes().map(u32::from).collect();
        assert_eq!(stream(&tokenizer, &tokens).concat(), "你好😀");
    }

    #[test]
    fn metaspace_keeps_the_spaces_between_words_and_drops_the_first() {
        let tokenizer = metaspace();
        let ids = tokenizer.encode("one two three", super::super::Around::Nothing).unwrap();
        assert_eq!(stream(&tokenizer, &ids).concat(), "one two three");
    }

    #[test]
    fn special_and_unknown_tokens_have_no_text() {
        let tokenizer = byte_level();
        assert_eq!(stream(&tokenizer, &[256, u32::from(b'a'), 999_999]), ["", "a", "", ""]);
    }

    proptest! {
        #[test]
        fn pieces_join_to_what_decoding_at_once_gives(tokens in prop::collection::vec(0u32..260, 0..200)) {
            let tokenizer = byte_level();
            prop_assert_eq!(stream(&tokenizer, &tokens).concat(), tokenizer.decode(&tokens).unwrap());
        }

        #[test]
        fn byte_fallback_joins_for_all_real_text(text in "[a-zà-ü你好😀 ]{0,60}") {
            let tokenizer = byte_fallback();
            let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
            prop_assert_eq!(stream(&tokenizer, &tokens).concat(), tokenizer.decode(&tokens).unwrap());
        }

        #[test]
        fn byte_fallback_never_panics(tokens in prop::collection::vec(0u32..260, 0..100)) {
            stream(&byte_fallback(), &tokens);
        }

        #[test]
        fn metaspace_joins(words in prop::collection::vec(0u32..6, 0..100)) {
            let tokenizer = metaspace();
            prop_assert_eq!(stream(&tokenizer, &words).concat(), tokenizer.decode(&words).unwrap());
        }
    }
}
