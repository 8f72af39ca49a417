//! The convenience loop: runs one generation on one sequence and reports events to a callback.

use crate::error::GenerateError;
use crate::generation::{Generated, Generation, GenerationEvent};
use crate::single_sequence::SingleSequence;
use hpp_engine::Backend;

/// Runs a new generation. Reuses the prefix that the sequence has in common with the prompt.
///
/// Calls `cancelled` before the first pass of the engine and after each; once it returns true, the generation finishes as cancelled and
/// keeps its tokens. A cancel handle that ends a pass has the same effect. An error of `on_event` ends the generation.
pub fn generate<B: Backend, E: From<GenerateError>>(
    sequence: &mut SingleSequence<B>,
    mut generation: Generation,
    cancelled: &dyn Fn() -> bool,
    on_event: &mut dyn FnMut(GenerationEvent<'_>) -> Result<(), E>,
) -> Result<Generated, E> {
    if generation.request().prompt_logits {
        sequence.clear();
    }
    if !generation.is_finished() {
        let reused = sequence.keep_prefix(&generation.request().prompt)?;
        generation.set_reused(reused);
    }
    let mut stop = cancelled();
    while !stop && let Some(input) = generation.next_input(sequence.max_draft())? {
        match sequence.feed_input(input) {
            Err(error) if error.is_cancelled() => stop = true,
            fed => {
                fed?;
                stop = cancelled();
            }
        }
        if stop {
            break;
        }
        if sequence.take_change() {
            generation.discount_measured_times();
        }
        let room = sequence.room();
        let rejected = generation.advance(sequence.logit_rows(), room, on_event)?;
        if rejected > 0 {
            generation.set_fed(sequence.drop_last(rejected)?);
        }
        sequence.save(false);
    }
    sequence.save(true);
    if stop {
        let held_back = generation.cancel()?;
        if !held_back.is_empty() {
            on_event(GenerationEvent::Text(held_back))?;
        }
    }
    Ok(generation.into_result())
}
