//! Where the tokens of a completion begin in its text.

use hpp_generate::text::{Detokenizer, TextTokenizer};

/// Follows the tokens of the prompt, if the answer begins with it, and of the answer. Counts characters (Unicode scalar values).
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
    /// At the start of an answer that begins with this text.
    pub fn new(tokenizer: &TextTokenizer, echo: &str) -> Self {
        let detokenizer = Detokenizer::new(tokenizer.clone());
        Self { tokenizer: tokenizer.clone(), detokenizer, echo: echo.chars().count(), is_in_answer: false, next: 0 }
    }

    /// Where a token of the prompt begins. The text of a prompt may differ from that of its tokens, but its end is the start of the
    /// answer.
    pub fn prompt_token(&mut self, token: u32) -> usize {
        self.push(token).min(self.echo)
    }

    /// Where a token of the answer begins. One that goes on with a character begins where the character does.
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
        // A token that cannot be decoded ends the request with an error of its own.
        self.next += self.detokenizer.push(token).map_or(0, |text| text.chars().count());
        start
    }
}
