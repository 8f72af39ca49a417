//! The state machine of one request: which tokens to feed next, which token and text follow from the logits, when to finish.
//!
//! It calls no engine. The caller feeds [`Generation::next_input`] to a sequence, on whatever engine and together with whatever other
//! requests, and passes the logits after them to [`Generation::advance`].

use crate::error::GenerateError;
use crate::sampling::{Sampler, SamplingParams};
use crate::sequence::chunk_length;
use crate::text::{Detokenizer, StopFilter, StopMatch, TextTokenizer, TokenizerError};
use serde::Serialize;
use std::time::{Duration, Instant};

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens to continue. Must not be empty and must fit the context ([`check_prompt`](crate::check_prompt)).
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_new_tokens: u64,
    /// Tokens that end the text.
    pub eos_token_ids: Vec<u32>,
    /// Strings that end the text. They need a tokenizer.
    pub stop: Vec<String>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
}

/// Why a generation finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The text contains a stop string.
    Stop,
    /// The model chose an end-of-text token.
    Eos,
    /// The limit of new tokens or the context is reached.
    Length,
    /// The caller cancelled it.
    Cancelled,
}

/// Tokens of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the prompt that the sequence held already.
    pub reused_tokens: usize,
    /// Tokens generated, the one that ended the text included.
    pub completion_tokens: usize,
}

/// Times of a generation. The clock starts when it is made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GenerationTimings {
    /// From the start to the end of the prompt.
    pub prefill: Duration,
    /// From the start to the first token, if there is one.
    pub first_token: Option<Duration>,
    /// From the first token to the end.
    pub decode: Duration,
}

/// The result of a generation.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// Every token chosen, the one that ended the text included.
    pub tokens: Vec<u32>,
    /// The text without the stop string. `None` without a tokenizer.
    pub text: Option<String>,
    /// Why it finished.
    pub finish_reason: FinishReason,
    /// Counts of tokens.
    pub usage: Usage,
    /// Times.
    pub timings: GenerationTimings,
}

/// What one step produced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepOutput<'a> {
    /// A chunk of the prompt was fed, and more of it follows.
    Prompt {
        /// Prompt tokens in the sequence.
        done: usize,
        /// Prompt tokens in all.
        total: usize,
    },
    /// A token was chosen.
    Token {
        /// The token.
        id: u32,
        /// The text released by this step; often empty.
        text: &'a str,
    },
}

/// One request in progress.
pub struct Generation {
    request: Request,
    prompt_chunk: usize,
    sampler: Sampler,
    text: Option<StreamedText>,
    /// Prompt tokens that the sequence held before.
    reused: usize,
    /// Prompt tokens in the sequence.
    prefilled: usize,
    tokens: Vec<u32>,
    finish_reason: Option<FinishReason>,
    started: Instant,
    timings: GenerationTimings,
}

impl Generation {
    /// Starts a request. With a tokenizer it produces text. `prompt_chunk` is the most tokens of the prompt to feed in one step
    /// ([`prompt_chunk`](crate::prompt_chunk)).
    pub fn new(request: Request, tokenizer: Option<TextTokenizer>, prompt_chunk: usize) -> Self {
        let nothing_to_do = request.max_new_tokens == 0 || request.prompt.is_empty();
        Self {
            prompt_chunk,
            sampler: Sampler::new(request.sampling, &request.prompt),
            text: tokenizer.map(|tokenizer| StreamedText::new(tokenizer, &request.stop)),
            reused: 0,
            prefilled: 0,
            tokens: Vec::new(),
            finish_reason: nothing_to_do.then_some(FinishReason::Length),
            started: Instant::now(),
            timings: GenerationTimings::default(),
            request,
        }
    }

    /// Skips the first `tokens` of the prompt, which the sequence holds already; at least one must remain.
    pub fn set_reused(&mut self, tokens: usize) {
        (self.reused, self.prefilled) = (tokens, tokens);
    }

    /// The request.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// The tokens chosen so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Whether there is nothing left to do.
    pub fn is_finished(&self) -> bool {
        self.finish_reason.is_some()
    }

    /// The tokens to feed next: a chunk of the prompt or the last token. `None` once finished.
    pub fn next_input(&self) -> Option<&[u32]> {
        if self.is_finished() {
            return None;
        }
        let prompt = &self.request.prompt[self.prefilled..];
        if prompt.is_empty() {
            return self.tokens.last().map(std::slice::from_ref);
        }
        Some(&prompt[..chunk_length(prompt.len(), self.prompt_chunk)])
    }

    /// Takes the logits `[vocab]` after the tokens of [`next_input`](Self::next_input), which must have been fed. `room` is the number
    /// of tokens that still fit the sequence: with none, the generation finishes.
    pub fn advance(&mut self, logits: &[f32], room: u64) -> Result<StepOutput<'_>, GenerateError> {
        let total = self.request.prompt.len();
        if self.prefilled < total {
            self.prefilled += self.next_input().map_or(0, <[u32]>::len);
            self.timings.prefill = self.started.elapsed();
            if self.prefilled < total {
                return Ok(StepOutput::Prompt { done: self.prefilled, total });
            }
        }
        let id = self.sampler.next(logits)?;
        self.tokens.push(id);
        self.timings.first_token.get_or_insert_with(|| self.started.elapsed());

        let text_before = self.text_bytes();
        if self.request.eos_token_ids.contains(&id) {
            self.finish(FinishReason::Eos)?;
        } else if let Some(text) = &mut self.text
            && text.push(id)?
        {
            self.finish(FinishReason::Stop)?;
        } else if room == 0 || self.tokens.len() as u64 >= self.request.max_new_tokens {
            self.finish(FinishReason::Length)?;
        }
        Ok(StepOutput::Token { id, text: self.text_since(text_before) })
    }

    /// Finishes the generation as cancelled, unless it is finished, and returns the text held back until now.
    pub fn cancel(&mut self) -> Result<&str, GenerateError> {
        let text_before = self.text_bytes();
        if !self.is_finished() {
            self.finish(FinishReason::Cancelled)?;
        }
        Ok(self.text_since(text_before))
    }

    /// The result. A generation that is not finished counts as cancelled.
    pub fn into_result(self) -> Generated {
        let usage = Usage {
            prompt_tokens: self.request.prompt.len(),
            reused_tokens: self.reused,
            completion_tokens: self.tokens.len(),
        };
        Generated {
            tokens: self.tokens,
            text: self.text.map(|text| text.released),
            finish_reason: self.finish_reason.unwrap_or(FinishReason::Cancelled),
            usage,
            timings: self.timings,
        }
    }

    fn finish(&mut self, reason: FinishReason) -> Result<(), GenerateError> {
        self.finish_reason = Some(reason);
        if let Some(text) = &mut self.text
            && reason != FinishReason::Stop
        {
            text.flush()?;
        }
        if self.prefilled < self.request.prompt.len() {
            self.timings.prefill = self.started.elapsed();
        }
        let decode_start = self.timings.first_token.unwrap_or(self.timings.prefill);
        self.timings.decode = self.started.elapsed().saturating_sub(decode_start);
        Ok(())
    }

    fn text_bytes(&self) -> usize {
        self.text.as_ref().map_or(0, |text| text.released.len())
    }

    fn text_since(&self, bytes: usize) -> &str {
        self.text.as_ref().map_or("", |text| &text.released[bytes..])
    }
}

/// Text from tokens, without what may become a stop string.
struct StreamedText {
    detokenizer: Detokenizer,
    stop: StopFilter,
    /// All text released so far.
    released: String,
}

impl StreamedText {
    fn new(tokenizer: TextTokenizer, stop: &[String]) -> Self {
        let stop = StopFilter::new(stop.iter().cloned());
        Self { detokenizer: Detokenizer::new(tokenizer), stop, released: String::new() }
    }

    /// Adds a token. Returns whether its text completes a stop string.
    fn push(&mut self, token: u32) -> Result<bool, TokenizerError> {
        let piece = self.detokenizer.push(token)?;
        Ok(self.release(&piece))
    }

    /// Releases the text that was held back at the end.
    fn flush(&mut self) -> Result<(), TokenizerError> {
        let piece = self.detokenizer.finish()?;
        if !self.release(&piece) {
            self.released.push_str(&self.stop.finish());
        }
        Ok(())
    }

    /// Releases what of the text cannot be part of a stop string. Returns whether a stop string is complete.
    fn release(&mut self, piece: &str) -> bool {
        if piece.is_empty() {
            return false;
        }
        let (text, found) = match self.stop.push(piece) {
            StopMatch::NotFound(text) => (text, false),
            StopMatch::Found(text) => (text, true),
        };
        self.released.push_str(&text);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::Choice;
    use crate::text::test_tokenizers::byte_level;

    fn request(prompt: &[u32], max_new_tokens: u64) -> Request {
        let sampling = SamplingParams { choice: Choice::Greedy, repetition_penalty: 1.0 };
        Request { prompt: prompt.into(), max_new_tokens, eos_token_ids: vec![256], stop: vec![], sampling }
    }

    /// Logits of the byte tokenizer whose largest is that of `token`.
    fn logits(token: u32) -> Vec<f32> {
        (0..257).map(|other| if other == token { 1.0 } else { 0.0 }).collect()
    }

    /// Feeds the tokens of `answer` as the model's choices and returns the text of each step.
    fn run(generation: &mut Generation, answer: &[u32], room: u64) -> Vec<String> {
        let mut pieces = vec![];
        for token in answer {
            assert!(generation.next_input().is_some());
            if let StepOutput::Token { text, .. } = generation.advance(&logits(*token), room).unwrap() {
                pieces.push(text.to_owned());
            }
        }
        pieces
    }

    #[test]
    fn a_prompt_is_fed_in_chunks_and_then_each_token() {
        let mut generation = Generation::new(request(&[1, 2, 3, 4, 5, 6, 7, 8], 2), None, 3);
        generation.set_reused(1);
        assert_eq!(generation.next_input(), Some(&[2, 3, 4][..]));
        assert_eq!(generation.advance(&[], 9).unwrap(), StepOutput::Prompt { done: 4, total: 8 });
        assert_eq!(generation.next_input(), Some(&[5, 6, 7, 8][..]), "a single last token would count as decoding");
        assert_eq!(generation.advance(&logits(9), 9).unwrap(), StepOutput::Token { id: 9, text: "" });
        assert_eq!(generation.next_input(), Some(&[9][..]));
        generation.advance(&logits(7), 9).unwrap();
        assert_eq!(generation.next_input(), None);
        let generated = generation.into_result();
        assert_eq!((&generated.tokens[..], generated.finish_reason), (&[9, 7][..], FinishReason::Length));
        assert_eq!(generated.usage, Usage { prompt_tokens: 8, reused_tokens: 1, completion_tokens: 2 });
        assert_eq!(generated.text, None);
    }

    #[test]
    fn an_end_token_ends_the_text_and_releases_what_was_held_back() {
        let mut generation = Generation::new(request(&[1], 9), Some(byte_level()), usize::MAX);
        let pieces = run(&mut generation, &[b'a'.into(), 0xe4, 256], 9);
        assert_eq!(pieces, ["a", "", "\u{fffd}"]);
        let generated = generation.into_result();
        assert_eq!((generated.finish_reason, generated.text.as_deref()), (FinishReason::Eos, Some("a\u{fffd}")));
    }

    #[test]
    fn a_stop_string_ends_the_text_before_it() {
        let stop = Request { stop: vec!["bc".into()], ..request(&[1], 9) };
        let mut generation = Generation::new(stop, Some(byte_level()), usize::MAX);
        assert_eq!(run(&mut generation, &b"abc".map(u32::from), 9), ["a", "", ""]);
        let generated = generation.into_result();
        assert_eq!((generated.finish_reason, generated.text.as_deref()), (FinishReason::Stop, Some("a")));
        assert_eq!(generated.tokens.len(), 3);
    }

    #[test]
    fn a_full_context_or_a_limit_of_zero_finishes_by_length() {
        let mut generation = Generation::new(request(&[1], 9), None, usize::MAX);
        run(&mut generation, &[5], 0);
        assert_eq!(generation.into_result().finish_reason, FinishReason::Length);
        assert_eq!(Generation::new(request(&[1], 0), None, usize::MAX).next_input(), None);
    }

    #[test]
    fn cancelling_keeps_the_tokens_and_the_text() {
        let stop = Request { stop: vec!["bc".into()], ..request(&[1], 9) };
        let mut generation = Generation::new(stop, Some(byte_level()), usize::MAX);
        assert_eq!(run(&mut generation, &b"ab".map(u32::from), 9), ["a", ""]);
        assert_eq!(generation.cancel().unwrap(), "b");
        assert_eq!(generation.cancel().unwrap(), "");
        let generated = generation.into_result();
        assert_eq!((generated.finish_reason, generated.text.as_deref()), (FinishReason::Cancelled, Some("ab")));
    }

    #[test]
    fn logits_without_a_choice_are_errors() {
        let mut generation = Generation::new(request(&[1], 9), None, usize::MAX);
        assert!(matches!(generation.advance(&[f32::NAN], 9), Err(GenerateError::Sampling(_))));
    }
}
