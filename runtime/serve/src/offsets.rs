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
        let start = self.next;
        // A token that cannot be decoded ends the request with an error elsewhere.
        self.next += self.detokenizer.push(token).map_or(0, |text| text.chars().count());
        start
    }
}
