//! Embeddings of texts: the hidden state after the last token, of models that give hidden states as an output.
//!
//! Attention looks back only, so the last token alone has seen the whole text; embedding models made from decoders are trained that way.

use crate::batch::Batch;
use crate::error::GenerateError;
use crate::input::{Input, chunk_length};
use crate::sequence::TokenSequence;
use hpp_engine::{Backend, EngineError, LogitRows};
use hpp_schema::{ModelOutput, OutputRole, Plan};

/// Names that exporters give to the output with hidden states `[B, S, hidden]`: ONNX Runtime GenAI's model builder, Optimum.
const HIDDEN_STATES: [&str; 2] = ["hidden_states", "last_hidden_state"];

/// The output of a model that has hidden states `[B, S, hidden]`; `None` if it gives none.
pub fn hidden_states_output(plan: &Plan) -> Option<&ModelOutput> {
    let mut outputs = plan.model.outputs.iter().filter(|output| output.role == OutputRole::Free);
    outputs.find(|output| HIDDEN_STATES.contains(&output.name.as_str()))
}

/// An embedding that is being computed, some tokens a pass.
pub struct TextEmbedding<B: Backend> {
    tokens: Vec<u32>,
    fed: usize,
    chunk: usize,
    sequence: TokenSequence<B>,
}

impl<B: Backend> TextEmbedding<B> {
    /// The embedding of a text of at least one token, fed in chunks of at most `chunk` tokens.
    pub fn new(tokens: Vec<u32>, chunk: usize) -> Self {
        TextEmbedding { tokens, fed: 0, chunk: chunk.max(1), sequence: TokenSequence::default() }
    }

    /// Tokens of the text.
    pub fn tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Whether some of them are fed, so that it holds the states of a sequence.
    pub fn is_started(&self) -> bool {
        self.fed > 0
    }
}

impl<B: Backend> Batch<B> {
    /// Feeds the next tokens of a text in a pass of its own. Returns its L2-normalized embedding `[hidden]` after the last of them.
    ///
    /// # Errors
    /// The model gives no hidden states, or the pass failed.
    pub fn embed(&mut self, embedding: &mut TextEmbedding<B>) -> Result<Option<Vec<f32>>, GenerateError> {
        let name = hidden_states_output(self.engine().plan()).map(|output| output.name.clone());
        let name = name.ok_or(EngineError::Unsupported("this model gives no hidden states"))?;
        let TextEmbedding { tokens, fed, chunk, sequence } = embedding;
        let next = chunk_length(tokens.len() - *fed, *chunk);
        let is_last = *fed + next == tokens.len();
        let input = Input { tokens: &tokens[*fed..*fed + next], rows: LogitRows::Last };
        let (engine, inputs) = self.engine_and_inputs();
        if is_last {
            engine.set_taps([name.as_str()])?;
        }
        let outcome = sequence.feed(engine, inputs, input);
        let hidden = engine.taps().get(&name).and_then(|hidden| Some((hidden.to_f32()?, *hidden.shape.last()?)));
        engine.set_taps([])?;
        outcome?;
        *fed += next;
        if !is_last {
            return Ok(None);
        }
        let wrong = || EngineError::WrongOutput { name: name.clone(), why: "it has no floating-point rows".into() };
        let (values, width) = hidden.ok_or_else(wrong)?;
        let start = usize::try_from(width).ok().and_then(|width| values.len().checked_sub(width.max(1)));
        Ok(Some(of_length_one(&values[start.ok_or_else(wrong)?..])))
    }
}

/// A vector in the same direction; unchanged if it has no direction.
fn of_length_one(vector: &[f32]) -> Vec<f32> {
    let length = vector.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    let scale = if length > 0.0 { 1.0 / length } else { 1.0 };
    vector.iter().map(|value| (f64::from(*value) * scale) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_get_length_one() {
        assert_eq!(of_length_one(&[3.0, -4.0]), [0.6, -0.8]);
        assert_eq!(of_length_one(&[0.0, 0.0]), [0.0, 0.0]);
    }
}
