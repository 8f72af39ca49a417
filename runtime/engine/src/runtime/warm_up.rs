//! Warm-up: two passes on synthetic tokens that show which weights each session reads.

use super::{LogitRows, Runtime, StepInput};
use crate::error::EngineError;
use crate::port::Backend;
use crate::program::Program;
use hpp_schema::{InputRole, ModelKind};

/// Tokens of the first pass: enough for kernels that treat many rows differently from one.
const PROMPT: usize = 40;

impl<B: Backend> Runtime<B> {
    /// Runs a pass of several tokens and one of one token, and resets the telemetry. Does nothing for a model that needs other
    /// inputs than tokens: then all of its weights count as read.
    pub fn warm_up(&mut self, program: &Program) -> Result<(), EngineError> {
        let model = &program.plan.model;
        let needs_data = |role: InputRole| role == InputRole::Free || role == InputRole::Embeddings;
        let room = usize::try_from(program.context).unwrap_or(usize::MAX).saturating_sub(1);
        if model.kind != ModelKind::Decoder || room == 0 || model.inputs.iter().any(|input| needs_data(input.role)) {
            return Ok(());
        }
        let mut sequence = self.new_sequence(program)?;
        for tokens in [PROMPT.min(room), 1] {
            self.step(program, &mut sequence, StepInput::Tokens(&vec![0; tokens]), LogitRows::Last)?;
        }
        let telemetry = &mut self.recorder.telemetry;
        telemetry.reset_passes();
        telemetry.state_bytes = telemetry.state_bytes.saturating_sub(sequence.state_bytes());
        Ok(())
    }
}
