//! Streaming detokenizer: text from tokens as they arrive.
//!
//! Invariants: every piece consists of whole characters, and all pieces together equal the decoding of all tokens at once.
//!
//! A token may end inside a character (byte-level and byte-fallback vocabularies), and a decoder may treat the first
//! token of a text differently (Metaspace). The detokenizer therefore decodes each new token together with a short
//! window of earlier ones, and holds back text that ends in U+FFFD, which marks an incomplete character.

use super::{TextTokenizer, TokenizerError};

/// An incomplete character has at most three bytes, so bytes that do not complete one within this many tokens are not
/// UTF-8.
const MAX_TOKENS_PER_CHARACTER: usize = 4;

/// Window length in tokens at which the front of the window is dropped.
const WINDOW: usize = 24;

/// Window length in tokens at which its front is dropped although its text is not complete, because that many bytes are not UTF-8. If all
/// of them stayed in the window, each token would take longer than the one before.
const LONGEST_WINDOW: usize = 256;

/// Decodes the tokens of one text one by one.
pub struct Detokenizer {
    tokenizer: TextTokenizer,
    /// Tokens decoded together. Special tokens are never added.
    window: Vec<u32>,
    /// Bytes of the window's text that were returned already.
    returned: usize,
    /// Length of `window` when all of its text had been returned.
    complete_len: usize,
    /// Characters of the window's text that were not returned yet.
    held: usize,
}

impl Detokenizer {
    /// A detokenizer at the start of a text.
    pub fn new(tokenizer: TextTokenizer) -> Self {
        Self { tokenizer, window: vec![], returned: 0, complete_len: 0, held: 0 }
    }

    /// Adds a token and returns the text that no later token can change; often empty.
    pub fn push(&mut self, token: u32) -> Result<String, TokenizerError> {
        if !self.tokenizer.has_text(token) {
            return Ok(String::new());
        }
        self.window.push(token);
        let text = self.tokenizer.decode(&self.window)?;
        let stable = self.stable_bytes(&text);
        let piece = self.take(&text, stable);
        self.held = text[stable..].chars().count();
        if stable == text.len() {
            self.move_window()?;
        } else if self.window.len() >= LONGEST_WINDOW {
            self.shorten_window(text.len())?;
        }
        Ok(piece)
    }

    /// Characters of the tokens so far that were not returned yet, each U+FFFD: bytes that are no character or may begin one.
    pub fn held_characters(&self) -> usize {
        self.held
    }

    /// Ends the text and returns what was held back.
    pub fn finish(&mut self) -> Result<String, TokenizerError> {
        let text = self.tokenizer.decode(&self.window)?;
        let rest = self.take(&text, text.len());
        self.window.clear();
        (self.returned, self.complete_len, self.held) = (0, 0, 0);
        Ok(rest)
    }

    /// How many bytes of `text` no later token can change.
    fn stable_bytes(&self, text: &str) -> usize {
        let whole_characters = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        let held_tokens = self.window.len() - self.complete_len;
        if whole_characters == text.len() || held_tokens < MAX_TOKENS_PER_CHARACTER {
            whole_characters
        } else {
            // Not UTF-8: everything but the last U+FFFD, which may still be the start of a character.
            text.len() - char::REPLACEMENT_CHARACTER.len_utf8()
        }
    }

    /// The text from what was returned before up to byte `end`.
    fn take(&mut self, text: &str, end: usize) -> String {
        // A byte-fallback run that turns out not to be UTF-8 changes text already returned: continue after it.
        let start = text.ceil_char_boundary(self.returned.min(text.len()));
        if end <= start {
            return String::new();
        }
        self.returned = end;
        text[start..end].to_owned()
    }

    /// Drops tokens from the front of a long window, at a position where the text was complete.
    fn move_window(&mut self) -> Result<(), TokenizerError> {
        if self.window.len() >= WINDOW && self.complete_len > 0 {
            self.window.drain(..self.complete_len);
            self.returned = self.tokenizer.decode(&self.window)?.len();
        }
        self.complete_len = self.window.len();
        Ok(())
    }

    /// Drops all tokens from a window but those that may be part of its last character. `length`: bytes of the window's text.
    fn shorten_window(&mut self, length: usize) -> Result<(), TokenizerError> {
        let held_back = length.saturating_sub(self.returned);
        self.window.drain(..self.window.len() + 1 - MAX_TOKENS_PER_CHARACTER);
        self.returned = self.tokenizer.decode(&self.window)?.len().saturating_sub(held_back);
        self.complete_len = 0;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::test_tokenizers::{byte_fallback, byte_level, metaspace};
    use super::*;
    use proptest::prelude::*;

    fn stream(tokenizer: &TextTokenizer, tokens: &[u32]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(tokenizer.clone());
        let mut out: Vec<String> = tokens.iter().map(|t| detokenizer.push(*t).unwrap()).collect();
        out.push(detokenizer.finish().unwrap());
        out
    }

    #[test]
    fn a_character_in_three_tokens_is_returned_whole() {
        let tokenizer = byte_level();
        let tokens: Vec<u32> = "é你".bytes().map(u32::from).collect();
        assert_eq!(stream(&tokenizer, &tokens), ["", "é", "", "", "你", ""]);
    }

    #[test]
    fn an_incomplete_character_is_replaced_at_the_end_only() {
        let tokenizer = byte_level();
        assert_eq!(stream(&tokenizer, &[u32::from(b'a'), 0xe4, 0xbd]), ["a", "", "", "\u{fffd}"]);
    }

    #[test]
    fn byte_fallback_holds_bytes_back_until_they_are_a_character() {
        let tokenizer = byte_fallback();
        let tokens: Vec<u32> = "你好😀".bytes().map(u32::from).collect();
        assert_eq!(stream(&tokenizer, &tokens).concat(), "你好😀");
    }

    #[test]
    fn metaspace_keeps_the_spaces_between_words_and_drops_the_first() {
        let tokenizer = metaspace();
        let ids = tokenizer.encode("one two three", super::super::SpecialTokens::Omit).unwrap();
        assert_eq!(stream(&tokenizer, &ids).concat(), "one two three");
    }

    #[test]
    fn special_and_unknown_tokens_have_no_text() {
        let tokenizer = byte_level();
        assert_eq!(stream(&tokenizer, &[256, u32::from(b'a'), 999_999]), ["", "a", "", ""]);
    }

    #[test]
    fn bytes_that_are_no_characters_keep_the_window_short() {
        let tokenizer = byte_level();
        let tokens: Vec<u32> = (0..2000).map(|at| if at % 700 == 699 { u32::from(b'a') } else { 0x80 }).collect();
        assert_eq!(stream(&tokenizer, &tokens).concat(), tokenizer.decode(&tokens).unwrap());
        let mut detokenizer = Detokenizer::new(tokenizer);
        for token in tokens {
            detokenizer.push(token).unwrap();
            assert!(detokenizer.window.len() <= LONGEST_WINDOW);
        }
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_decoding_of_all_tokens(tokens in prop::collection::vec(0u32..260, 0..200)) {
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
        fn byte_fallback_never_panics(tokens in prop::collection::vec(0u32..260, 0..600)) {
            stream(&byte_fallback(), &tokens);
        }

        #[test]
        fn metaspace_joins(words in prop::collection::vec(0u32..6, 0..100)) {
            let tokenizer = metaspace();
            prop_assert_eq!(stream(&tokenizer, &words).concat(), tokenizer.decode(&words).unwrap());
        }
    }
}
