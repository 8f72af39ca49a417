//! The state machine of one request: which tokens to feed next, which tokens and text follow from the logits, when to finish.
//!
//! It calls no engine. The caller feeds [`Generation::next_input`] to a sequence, on any engine and together with any other requests, and
//! passes the logits after them to [`Generation::advance`].

use crate::error::GenerateError;
use crate::grammar::{Grammar, GrammarMatcher};
use crate::input::{Input, chunk_length};
use crate::sampling::{Sampler, SamplingParams};
use crate::speculate::{Speculation, SpeculationStats};
use crate::text::{Detokenizer, StopFilter, StopMatch, TextTokenizer, TokenizerError};
use hpp_engine::{LogitRows, Logits};
use serde::Serialize;
use std::time::{Duration, Instant};

/// A greedy choice from a pass of several tokens counts only if the largest logit leads by more than this fraction of the largest
/// magnitude; else its token is computed again alone. For other numbers of rows kernels sum in another order, which moves logits of fp32 by
/// about 2e-7 of that magnitude.
const TIE: f32 = 1e-4;

/// What to generate.
#[derive(Clone, Debug)]
pub struct GenerationRequest {
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
    /// What the answer must be, if not any text.
    pub grammar: Option<Grammar>,
    /// Special tokens whose names are part of the text. Other special tokens add nothing to the text.
    pub visible_tokens: Vec<u32>,
    /// Whether to report the logits of the prompt's tokens too. Then no prefix of it is reused.
    pub prompt_logits: bool,
}

/// Why a generation finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// The text contains a stop string.
    Stop,
    /// The model chose an end-of-text token.
    Eos,
    /// The answer is complete by its grammar.
    Grammar,
    /// The limit of new tokens or the context is reached.
    Length,
    /// The caller cancelled it.
    Cancelled,
}

/// Tokens of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TokenUsage {
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
    pub usage: TokenUsage,
    /// Times.
    pub timings: GenerationTimings,
    /// Counts of speculative decoding, if it was requested.
    pub speculation: Option<SpeculationStats>,
}

/// An event of a running generation. [`Generated`] holds the rest: finish reason, usage and timings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GenerationEvent<'a> {
    /// A chunk of the prompt is in the sequence, and more of it follows.
    Prompt {
        /// Prompt tokens in the sequence.
        done: usize,
        /// Prompt tokens in all.
        total: usize,
    },
    /// A token of the prompt, if requested.
    PromptToken {
        /// The token.
        id: u32,
        /// The logits `[vocab]` after the tokens before it; the first has none.
        logits: Option<&'a [f32]>,
    },
    /// A token was chosen.
    Token {
        /// The token.
        id: u32,
        /// The logits `[vocab]` it was chosen from.
        logits: &'a [f32],
    },
    /// More of the text; never empty, and never part of a stop string.
    Text(&'a str),
}

/// One request in progress.
pub struct Generation {
    request: GenerationRequest,
    prompt_chunk: usize,
    sampler: Sampler,
    grammar: Option<GrammarMatcher>,
    text: Option<StreamedText>,
    speculation: Option<Speculation>,
    /// Prompt tokens that the sequence held before.
    reused: usize,
    /// Tokens of prompt and answer that the sequence holds.
    fed: usize,
    tokens: Vec<u32>,
    /// The tokens of the current pass, and how many at their end are a draft.
    input: Vec<u32>,
    drafted: usize,
    /// Whether the next token must come from a pass of one token.
    alone: bool,
    finish_reason: Option<FinishReason>,
    started: Instant,
    pass_started: Instant,
    timings: GenerationTimings,
}

impl Generation {
    /// Starts a request. With a tokenizer it produces text. `prompt_chunk` is the most tokens of the prompt to feed in one step
    /// ([`prompt_chunk`](crate::prompt_chunk)).
    pub fn new(request: GenerationRequest, tokenizer: Option<TextTokenizer>, prompt_chunk: usize) -> Self {
        let nothing_to_do = request.prompt.is_empty() || (request.max_new_tokens == 0 && !request.prompt_logits);
        Self {
            prompt_chunk,
            sampler: Sampler::new(request.sampling, &request.prompt),
            grammar: request.grammar.as_ref().map(GrammarMatcher::new),
            text: tokenizer.map(|tokenizer| StreamedText::new(tokenizer, &request.stop, &request.visible_tokens)),
            speculation: None,
            reused: 0,
            fed: 0,
            tokens: Vec::new(),
            input: Vec::new(),
            drafted: 0,
            alone: false,
            finish_reason: nothing_to_do.then_some(FinishReason::Length),
            started: Instant::now(),
            pass_started: Instant::now(),
            timings: GenerationTimings::default(),
            request,
        }
    }

    /// Drafts tokens and verifies several in one pass. The chosen tokens are the same as without speculation: each is chosen from
    /// the logits after the tokens before it, and a greedy choice between near ties is computed again alone.
    pub fn speculate(mut self, mut speculation: Speculation) -> Self {
        speculation.extend(&self.request.prompt);
        self.speculation = Some(speculation);
        self
    }

    /// Skips the first `tokens` of the prompt, which the sequence holds already. If that is all of it, the sequence must have the logits after
    /// it: the first token is chosen from them, without a pass.
    pub fn set_reused(&mut self, tokens: usize) {
        (self.reused, self.fed) = (tokens, tokens);
    }

    /// Says how many tokens of prompt and answer the sequence holds, after [`advance`](Self::advance) has rejected tokens.
    pub fn set_fed(&mut self, tokens: usize) {
        self.fed = tokens;
    }

    /// The request.
    pub fn request(&self) -> &GenerationRequest {
        &self.request
    }

    /// The most tokens of the prompt in one step.
    pub(crate) fn prompt_chunk(&self) -> usize {
        self.prompt_chunk
    }

    /// The tokens chosen so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Whether there is nothing left to do.
    pub fn is_finished(&self) -> bool {
        self.finish_reason.is_some()
    }

    /// Tokens of the prompt that the next pass takes; `None` once it is computed or nothing is left to do.
    pub fn next_prompt_tokens(&self) -> Option<usize> {
        let left = self.request.prompt.len().saturating_sub(self.fed);
        (left > 0 && !self.is_finished()).then(|| chunk_length(left, self.prompt_chunk))
    }

    /// The tokens of the last [`next_input`](Self::next_input).
    pub fn input(&self) -> &[u32] {
        &self.input
    }

    /// The next input. `None` once finished, and if the sequence has the logits that the next token is chosen from already. `max_draft`:
    /// how many tokens beside the last one the sequence can take and drop again.
    ///
    /// # Errors
    /// When a draft model fails.
    pub fn next_input(&mut self, max_draft: usize) -> Result<Option<Input<'_>>, GenerateError> {
        if self.is_finished() {
            return Ok(None);
        }
        self.drafted = 0;
        self.input.clear();
        let prompt = self.request.prompt.len();
        if self.fed == prompt && self.tokens.is_empty() {
            return Ok(None);
        }
        if self.fed < prompt {
            let left = &self.request.prompt[self.fed..];
            self.input.extend_from_slice(&left[..chunk_length(left.len(), self.prompt_chunk)]);
        } else {
            let left = &self.tokens[self.fed - prompt..];
            // The last token must be computed alone: those before it are fed now.
            let now = if self.alone && left.len() > 1 { left.len() - 1 } else { left.len() };
            self.input.extend_from_slice(&left[..now]);
            self.add_draft(max_draft)?;
        }
        self.pass_started = Instant::now();
        let rows = match self.request.prompt_logits && self.fed < prompt {
            true => LogitRows::All,
            false => LogitRows::LastN(1 + self.drafted as u64),
        };
        Ok(Some(Input { tokens: &self.input, rows }))
    }

    fn add_draft(&mut self, max_draft: usize) -> Result<(), GenerateError> {
        let Some(speculation) = self.speculation.as_mut().filter(|_| !self.alone) else { return Ok(()) };
        let beside = self.input.len() - 1;
        // The last token of the answer is chosen, not fed.
        let wanted = (self.request.max_new_tokens - 1).saturating_sub(self.tokens.len() as u64);
        let most = max_draft.saturating_sub(beside).min(usize::try_from(wanted).unwrap_or(usize::MAX));
        let mut draft = speculation.draft(most)?;
        if let Some(grammar) = self.grammar.as_mut().filter(|_| !draft.is_empty()) {
            draft = &draft[..grammar.count_valid(draft)];
        }
        self.drafted = draft.len();
        self.input.extend_from_slice(draft);
        speculation.shorten(self.drafted);
        Ok(())
    }

    /// Takes the logits of the rows that [`next_input`](Self::next_input) requested, after its tokens were fed. `room` is the number of
    /// tokens that still fit the sequence; the last token of the answer needs room too, although it is not fed. Reports each token and text
    /// to `on_event`.
    ///
    /// Returns how many of the tokens fed were rejected. The caller must drop them from the end of the sequence, and say with
    /// [`set_fed`](Self::set_fed) how many tokens it holds then, which may be fewer.
    pub fn advance<E: From<GenerateError>>(
        &mut self,
        logits: &Logits,
        room: u64,
        on_event: &mut dyn FnMut(GenerationEvent<'_>) -> Result<(), E>,
    ) -> Result<usize, E> {
        let total = self.request.prompt.len();
        let in_prompt = self.tokens.is_empty();
        if self.fed < total && self.request.prompt_logits {
            self.report_prompt(logits, on_event)?;
        }
        self.fed += self.input.len() - self.drafted;
        if in_prompt {
            self.timings.prefill = self.started.elapsed();
        }
        if self.fed < total {
            on_event(GenerationEvent::Prompt { done: self.fed, total })?;
            return Ok(0);
        }
        if self.fed < total + self.tokens.len() {
            return Ok(0);
        }
        if self.request.max_new_tokens == 0 {
            self.finish(FinishReason::Length)?;
            return Ok(0);
        }
        let before = self.tokens.len();
        // A pass of the prompt may have returned more rows than the last.
        let first = logits.rows.saturating_sub(1 + self.drafted);
        for row in 0..=self.drafted {
            let room = room + (self.drafted - row) as u64;
            if !self.choose(logits.row(first + row), room, in_prompt, on_event)? || self.is_finished() {
                break;
            }
            if self.input.get(self.input.len() - self.drafted + row) != self.tokens.last() {
                break;
            }
        }
        self.learn(before, in_prompt);
        // The sequence keeps all but the last token chosen, which is fed next.
        let kept = total + self.tokens.len() - 1;
        let rejected = self.fed + self.drafted - kept;
        self.fed = kept;
        Ok(rejected)
    }

    /// Reports the prompt token after each token that was fed, with the logits for it, and before all others the first token of the prompt.
    fn report_prompt<E: From<GenerateError>>(
        &self,
        logits: &Logits,
        on_event: &mut dyn FnMut(GenerationEvent<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let prompt = &self.request.prompt;
        if self.fed == 0 {
            on_event(GenerationEvent::PromptToken { id: prompt[0], logits: None })?;
        }
        for (row, id) in prompt[self.fed + 1..].iter().take(logits.rows.min(self.input.len())).enumerate() {
            on_event(GenerationEvent::PromptToken { id: *id, logits: Some(logits.row(row)) })?;
        }
        Ok(())
    }

    /// Chooses a token. False, and nothing chosen, if it must be computed again alone.
    fn choose<E: From<GenerateError>>(
        &mut self,
        logits: &[f32],
        room: u64,
        in_prompt: bool,
        on_event: &mut dyn FnMut(GenerationEvent<'_>) -> Result<(), E>,
    ) -> Result<bool, E> {
        let tie = if self.input.len() > 1 && !in_prompt { TIE } else { 0.0 };
        let allowed = self.grammar.as_mut().map(|grammar| grammar.allowed(logits.len())).transpose();
        let allowed = allowed.map_err(GenerateError::from)?;
        let chosen = self.sampler.next_unless_tied(logits, tie, allowed.as_ref()).map_err(GenerateError::from)?;
        self.alone = chosen.is_none();
        let Some(id) = chosen else { return Ok(false) };
        if let Some(grammar) = &mut self.grammar {
            grammar.accept(id).map_err(GenerateError::from)?;
        }
        self.tokens.push(id);
        self.timings.first_token.get_or_insert_with(|| self.started.elapsed());
        let text_before = self.text_bytes();
        self.add_text(id, room)?;
        on_event(GenerationEvent::Token { id, logits })?;
        match self.text_since(text_before) {
            "" => {}
            text => on_event(GenerationEvent::Text(text))?,
        }
        Ok(true)
    }

    /// Adds a token to the text, and finishes where it ends the text.
    fn add_text(&mut self, id: u32, room: u64) -> Result<(), GenerateError> {
        if self.request.eos_token_ids.contains(&id) {
            return self.finish(FinishReason::Eos);
        }
        if let Some(text) = &mut self.text
            && text.push(id)?
        {
            return self.finish(FinishReason::Stop);
        }
        if self.grammar.as_ref().is_some_and(GrammarMatcher::is_complete) {
            return self.finish(FinishReason::Grammar);
        }
        // The context holds the prompt and the answer with its last token, which is not fed.
        if room <= 1 || self.tokens.len() as u64 >= self.request.max_new_tokens {
            return self.finish(FinishReason::Length);
        }
        Ok(())
    }

    /// Lets the length of drafts adapt soon, because passes may take another time than before.
    pub(crate) fn discount_measured_times(&mut self) {
        self.speculation.iter_mut().for_each(Speculation::discount_measured_times);
    }

    /// Tells the speculation what was chosen since there were `before` tokens.
    fn learn(&mut self, before: usize, in_prompt: bool) {
        let Some(speculation) = &mut self.speculation else { return };
        let chosen = &self.tokens[before..];
        match in_prompt {
            true => speculation.extend(chosen),
            false => speculation.passed(self.input.len(), self.pass_started.elapsed(), chosen),
        }
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
        let usage = TokenUsage {
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
            speculation: self.speculation.map(|speculation| speculation.stats()),
        }
    }

    fn finish(&mut self, reason: FinishReason) -> Result<(), GenerateError> {
        self.finish_reason = Some(reason);
        if let Some(text) = &mut self.text
            && reason != FinishReason::Stop
        {
            text.flush()?;
        }
        if self.fed < self.request.prompt.len() {
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
    /// Special tokens with their names.
    visible: Vec<(u32, String)>,
    /// All text released so far.
    released: String,
}

impl StreamedText {
    fn new(tokenizer: TextTokenizer, stop: &[String], visible: &[u32]) -> Self {
        let visible = visible.iter().filter_map(|token| Some((*token, tokenizer.special_name(*token)?))).collect();
        let stop = StopFilter::new(stop.iter().cloned());
        Self { detokenizer: Detokenizer::new(tokenizer), stop, visible, released: String::new() }
    }

    /// Adds a token. Returns whether its text completes a stop string.
    fn push(&mut self, token: u32) -> Result<bool, TokenizerError> {
        let mut piece = self.detokenizer.push(token)?;
        if let Some((_, name)) = self.visible.iter().find(|(visible, _)| *visible == token) {
            piece.push_str(&self.detokenizer.finish()?);
            piece.push_str(name);
        }
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

    /// Releases the text that cannot be part of a stop string. Returns whether a stop string is complete.
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
    use crate::sampling::SamplingMethod;
    use crate::speculate::{DraftLength, Drafter};
    use crate::text::test_tokenizers::byte_level;

    fn request(prompt: &[u32], max_new_tokens: u64) -> GenerationRequest {
        let sampling = SamplingParams { choice: SamplingMethod::Greedy, repetition_penalty: 1.0 };
        GenerationRequest {
            prompt: prompt.into(),
            max_new_tokens,
            eos_token_ids: vec![256],
            stop: vec![],
            sampling,
            grammar: None,
            visible_tokens: vec![],
            prompt_logits: false,
        }
    }

    /// Logits of the byte tokenizer whose largest are those of `tokens`, a row for each.
    fn logits(tokens: &[u32]) -> Logits {
        let row = |token: &u32| (0..257u32).map(|other| if other == *token { 1.0 } else { 0.0 }).collect::<Vec<f32>>();
        Logits { rows: tokens.len(), vocab: 257, data: tokens.iter().flat_map(row).collect() }
    }

    /// Advances by one pass and returns the text and the number of rejected tokens.
    fn advance(generation: &mut Generation, rows: &[u32], room: u64) -> (String, usize) {
        let mut released = String::new();
        let rejected = generation.advance::<GenerateError>(&logits(rows), room, &mut |event| {
            if let GenerationEvent::Text(text) = event {
                released.push_str(text);
            }
            Ok(())
        });
        (released, rejected.unwrap())
    }

    /// Feeds the tokens of `answer` as the model's choices and returns the text of each step.
    fn run(generation: &mut Generation, answer: &[u32], room: u64) -> Vec<String> {
        let mut step = |token: &u32| {
            assert!(generation.next_input(0).unwrap().is_some());
            advance(generation, &[*token], room).0
        };
        answer.iter().map(&mut step).collect()
    }

    fn tokens_of(input: Result<Option<Input<'_>>, GenerateError>) -> Option<&[u32]> {
        input.unwrap().map(|input| input.tokens)
    }

    #[test]
    fn a_prompt_is_fed_in_chunks_and_then_each_token() {
        let mut generation = Generation::new(request(&[1, 2, 3, 4, 5, 6, 7, 8], 2), None, 3);
        generation.set_reused(1);
        assert_eq!(tokens_of(generation.next_input(0)), Some(&[2, 3, 4][..]));
        let mut events = 0;
        let advanced = generation.advance::<GenerateError>(&Logits::default(), 9, &mut |event| {
            events += 1;
            assert_eq!(event, GenerationEvent::Prompt { done: 4, total: 8 });
            Ok(())
        });
        assert_eq!((advanced.unwrap(), events), (0, 1));
        assert_eq!(
            tokens_of(generation.next_input(0)),
            Some(&[5, 6][..]),
            "a single last token would count as decoding"
        );
        advance(&mut generation, &[], 9);
        assert_eq!(tokens_of(generation.next_input(0)), Some(&[7, 8][..]));
        advance(&mut generation, &[9], 9);
        assert_eq!(tokens_of(generation.next_input(0)), Some(&[9][..]));
        advance(&mut generation, &[7], 9);
        assert_eq!(generation.next_input(0).unwrap(), None);
        let generated = generation.into_result();
        assert_eq!((&generated.tokens[..], generated.finish_reason), (&[9, 7][..], FinishReason::Length));
        assert_eq!(generated.usage, TokenUsage { prompt_tokens: 8, reused_tokens: 1, completion_tokens: 2 });
        assert_eq!((generated.text, generated.speculation), (None, None));
    }

    /// Drafts fixed tokens.
    struct Script(Vec<u32>);

    impl Drafter for Script {
        fn extend(&mut self, _: &[u32]) {}

        fn confidence(&self) -> Option<usize> {
            Some(5)
        }

        fn is_free(&self) -> bool {
            true
        }

        fn draft(&mut self, most: usize, draft: &mut Vec<u32>) -> Result<(), GenerateError> {
            draft.clear();
            draft.extend(self.0.iter().take(most));
            Ok(())
        }
    }

    fn drafting(draft: &[u32], max_new: u64) -> Generation {
        let mut generation = Generation::new(request(&[1, 2], max_new), None, usize::MAX)
            .speculate(Speculation::with_length(Box::new(Script(draft.to_vec())), DraftLength::fixed(9)));
        assert_eq!(tokens_of(generation.next_input(9)), Some(&[1, 2][..]), "a prompt is not drafted");
        assert_eq!(advance(&mut generation, &[10], 9), (String::new(), 0));
        generation
    }

    #[test]
    fn drafted_tokens_count_as_far_as_the_model_chooses_them() {
        let mut generation = drafting(&[11, 12, 13], 9);
        let input = generation.next_input(9).unwrap().unwrap();
        assert_eq!((input.tokens, input.rows), (&[10, 11, 12, 13][..], LogitRows::LastN(4)));
        assert_eq!(advance(&mut generation, &[11, 12, 99, 14], 9).1, 1, "13 is dropped from the sequence");
        assert_eq!(generation.tokens(), [10, 11, 12, 99]);
        assert_eq!(generation.next_input(9).unwrap().unwrap().tokens[0], 99);
        let stats = generation.into_result().speculation.unwrap();
        assert_eq!((stats.drafted, stats.accepted, stats.passes), (3, 2, 1));
    }

    #[test]
    fn a_sequence_that_drops_more_is_fed_again() {
        let mut generation = drafting(&[11, 12, 13], 9);
        generation.next_input(9).unwrap();
        assert_eq!(advance(&mut generation, &[11, 98, 0, 0], 9).1, 2);
        // It held [1, 2, 10, 11] and goes back to the state before the pass.
        generation.set_fed(2);
        let input = generation.next_input(3).unwrap().unwrap();
        assert_eq!((input.tokens, input.rows), (&[10, 11, 98, 11][..], LogitRows::LastN(2)));
        assert_eq!(advance(&mut generation, &[11, 12], 9).1, 0);
        assert_eq!(generation.tokens(), [10, 11, 98, 11, 12]);
    }

    #[test]
    fn a_near_tie_is_chosen_again_alone() {
        let mut generation = drafting(&[11, 12], 9);
        generation.next_input(9).unwrap();
        let mut rows = logits(&[11, 12, 13]);
        rows.data[257 + 40] = 1.0 - TIE / 2.0;
        let rejected = generation.advance::<GenerateError>(&rows, 9, &mut |_| Ok(()));
        assert_eq!((rejected.unwrap(), generation.tokens()), (2, &[10, 11][..]));
        assert_eq!(tokens_of(generation.next_input(9)), Some(&[11][..]));
        // A sequence that went back further takes the tokens before it first.
        generation.set_fed(2);
        assert_eq!(tokens_of(generation.next_input(9)), Some(&[10][..]));
        advance(&mut generation, &[0], 9);
        assert_eq!(tokens_of(generation.next_input(9)), Some(&[11][..]));
        let mut tie = logits(&[12]);
        tie.data[40] = 1.0 - TIE / 2.0;
        assert_eq!(generation.advance::<GenerateError>(&tie, 9, &mut |_| Ok(())).unwrap(), 0);
        assert_eq!(generation.tokens(), [10, 11, 12]);
        assert_eq!(generation.next_input(9).unwrap().unwrap().tokens.len(), 3, "and drafts go on");
    }

    #[test]
    fn an_answer_ends_within_a_draft() {
        let mut generation = drafting(&[11, 256, 13], 9);
        generation.next_input(9).unwrap();
        assert_eq!(advance(&mut generation, &[11, 256, 13, 14], 9).1, 2);
        let generated = generation.into_result();
        assert_eq!((&generated.tokens[..], generated.finish_reason), (&[10, 11, 256][..], FinishReason::Eos));
        let mut generation = drafting(&[11, 12, 13], 3);
        assert_eq!(generation.next_input(9).unwrap().unwrap().tokens, [10, 11], "no more than the answer needs");
        assert_eq!(advance(&mut generation, &[11, 12], 9).1, 0);
        assert_eq!(generation.into_result().finish_reason, FinishReason::Length);
        let mut generation = drafting(&[11, 12], 9);
        generation.next_input(2).unwrap();
        assert_eq!(advance(&mut generation, &[11, 12, 13], 0).1, 1);
        assert_eq!(generation.into_result().tokens, [10, 11, 12], "the context is full with the last");
    }

    #[test]
    fn an_answer_follows_its_grammar_and_ends_with_it_drafted_or_not() {
        use crate::grammar::{GrammarCompiler, GrammarSource};
        let schema = serde_json::json!({"enum": ["ab", "ax"]});
        let source = GrammarSource::JsonSchema { schema, lenient: false };
        let grammar = GrammarCompiler::new(byte_level(), &[256]).compile(&source).unwrap();
        let request = GenerationRequest { grammar: Some(grammar), ..request(&[1], 9) };
        // The model prefers z, then x, to everything.
        let row: Vec<f32> =
            (0..257u32).map(|id| [0.0, 2.0, 1.0][usize::from(id == 122) + 2 * usize::from(id == 120)]).collect();
        let rows = |count: usize| Logits { rows: count, vocab: 257, data: row.repeat(count) };
        let mut answers = Vec::new();
        for draft in ["", "\"axz", "ax\"", "zzz", "a"] {
            let draft = draft.bytes().map(u32::from).collect();
            let speculation = Speculation::with_length(Box::new(Script(draft)), DraftLength::fixed(9));
            let mut generation =
                Generation::new(request.clone(), Some(byte_level()), usize::MAX).speculate(speculation);
            let mut longest = 0;
            while let Some(input) = generation.next_input(9).unwrap() {
                let LogitRows::LastN(count) = input.rows else { panic!("{input:?}") };
                longest = longest.max(count);
                let rows = rows(count as usize);
                generation.advance::<GenerateError>(&rows, 9, &mut |_| Ok(())).unwrap();
            }
            let generated = generation.into_result();
            assert_eq!(generated.finish_reason, FinishReason::Grammar);
            answers.push((generated.tokens, generated.text.unwrap(), longest));
        }
        assert_eq!(answers[0].1, "\"ax\"");
        assert!(answers.iter().all(|answer| answer.0 == answers[0].0), "{answers:?}");
        let longest: Vec<u64> = answers.iter().map(|answer| answer.2).collect();
        assert_eq!(longest, [1, 2, 4, 1, 2], "drafts end where the grammar refuses them");
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
    fn the_logits_of_a_prompt_are_reported_once_for_each_token() {
        for max_new_tokens in [0, 1] {
            let scored = GenerationRequest { prompt_logits: true, ..request(&[1, 2, 3, 4, 5], max_new_tokens) };
            let mut generation = Generation::new(scored, None, 3);
            let (mut reported, mut passes) = (Vec::new(), 0);
            while let Some(input) = generation.next_input(9).unwrap() {
                assert_eq!(input.rows, LogitRows::All);
                // Row n is after token n, and prefers the one after it.
                let rows = logits(&input.tokens.iter().map(|token| token + 1).collect::<Vec<_>>());
                passes += 1;
                let advanced = generation.advance::<GenerateError>(&rows, 9, &mut |event| {
                    if let GenerationEvent::PromptToken { id, logits } = event {
                        reported.push((id, logits.map(|row| crate::sampling::greedy(row).unwrap())));
                    }
                    Ok(())
                });
                assert_eq!(advanced.unwrap(), 0);
            }
            assert_eq!(reported, [(1, None), (2, Some(2)), (3, Some(3)), (4, Some(4)), (5, Some(5))]);
            let generated = generation.into_result();
            assert_eq!((passes, generated.finish_reason), (2, FinishReason::Length));
            assert_eq!(generated.tokens, [6][..max_new_tokens as usize], "chosen from the last row");
        }
    }

    #[test]
    fn names_of_visible_special_tokens_are_text() {
        let visible = GenerationRequest { eos_token_ids: vec![], visible_tokens: vec![256, 97], ..request(&[1], 9) };
        let mut generation = Generation::new(visible, Some(byte_level()), usize::MAX);
        let pieces = run(&mut generation, &[b'a'.into(), 0xe4, 256, b'b'.into()], 9);
        assert_eq!(pieces, ["a", "", "\u{fffd}<|end|>", "b"]);
    }

    #[test]
    fn a_stop_string_ends_the_text_before_it() {
        let stop = GenerationRequest { stop: vec!["bc".into()], ..request(&[1], 9) };
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
        assert_eq!(Generation::new(request(&[1], 0), None, usize::MAX).next_input(0).unwrap(), None);
    }

    #[test]
    fn cancelling_keeps_the_tokens_and_the_text() {
        let stop = GenerationRequest { stop: vec!["bc".into()], ..request(&[1], 9) };
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
        generation.next_input(0).unwrap();
        let logits = Logits { rows: 1, vocab: 1, data: vec![f32::NAN] };
        let advanced = generation.advance::<GenerateError>(&logits, 9, &mut |_| Ok(()));
        assert!(matches!(advanced, Err(GenerateError::Sampling(_))));
    }
}
