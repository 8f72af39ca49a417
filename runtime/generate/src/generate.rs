//! The convenience loop: runs one generation on one sequence and reports events to a callback.

use crate::error::GenerateError;
use crate::generation::{Generated, Generation, Request, StepOutput};
use crate::sequence::{SingleSequence, prompt_chunk};
use crate::text::TextTokenizer;
use hpp_engine::Backend;

/// What a generation reports while it runs. The result of [`generate`] holds the rest: finish reason, usage and timings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Event<'a> {
    /// A chunk of the prompt is in the sequence.
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
        /// The logits `[vocab]` it was chosen from.
        logits: &'a [f32],
    },
    /// More of the text; never empty, and never part of a stop string.
    Text(&'a str),
}

/// Generates text after a prompt. Reuses what the sequence has in common with the prompt.
///
/// Calls `cancelled` before the first pass of the engine and after each; once it returns true, the generation finishes as cancelled and
/// keeps its tokens. A cancel handle that ends a pass has the same effect. An error of `on_event` ends the generation.
pub fn generate<B: Backend, E: From<GenerateError>>(
    sequence: &mut SingleSequence<B>,
    request: Request,
    tokenizer: Option<&TextTokenizer>,
    cancelled: &dyn Fn() -> bool,
    on_event: &mut dyn FnMut(Event<'_>) -> Result<(), E>,
) -> Result<Generated, E> {
    let mut generation = Generation::new(request, tokenizer.cloned(), prompt_chunk(sequence.engine()));
    if !generation.is_finished() {
        let reused = sequence.keep_prefix(&generation.request().prompt)?;
        generation.set_reused(reused);
    }
    let mut stop = cancelled();
    while !stop && let Some(tokens) = generation.next_input() {
        match sequence.feed(tokens) {
            Err(error) if error.is_cancelled() => stop = true,
            fed => {
                fed?;
                stop = cancelled();
            }
        }
        if stop {
            break;
        }
        let room = sequence.room();
        match generation.advance(sequence.logits(), room)? {
            StepOutput::Prompt { done, total } => on_event(Event::Prompt { done, total })?,
            StepOutput::Token { id, text } => {
                on_event(Event::Token { id, logits: sequence.logits() })?;
                if !text.is_empty() {
                    on_event(Event::Text(text))?;
                }
            }
        }
    }
    if stop {
        let held_back = generation.cancel()?;
        if !held_back.is_empty() {
            on_event(Event::Text(held_back))?;
        }
    }
    Ok(generation.into_result())
}
