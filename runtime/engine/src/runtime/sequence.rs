//! Sequences: a text in progress with its states and bindings.

use crate::buffers::{ArenaRow, BindingKey, BufferPool, StateBuffers};
use crate::error::{BackendError, EngineError};
use crate::ids::{IndexVec, StageId, StateId};
use crate::port::{Backend, Session};
use crate::program::{Program, Stage};
use crate::tensor::HostTensor;

/// A text in progress. Made by [`Engine::new_sequence`](crate::Engine::new_sequence); an engine may have any number.
pub struct Sequence<B: Backend> {
    pub(super) length: u64,
    pub(super) limit: u64,
    /// Its row in the state arena, if its states are there.
    pub(super) row: Option<ArenaRow>,
    pub(super) states: IndexVec<StateId, StateBuffers<B>>,
    pub(super) bindings: IndexVec<StageId, StageBinding<B>>,
    /// The version of the taps that the bindings were made for.
    pub(super) taps_version: u64,
    /// All tokens, for a decoder that keeps no state and computes them again each step.
    pub(super) history: History,
    /// The lane of its last pass, for which its bindings were made.
    pub(super) lane: usize,
    /// Its length before its last pass, if double-buffered states still hold that.
    pub(super) pass_start: Option<u64>,
    /// Whether passes may be undone where that needs a copy of a state.
    pub(super) snapshots: bool,
    /// Whether such copies were taken before its last pass.
    pub(super) has_snapshots: bool,
    /// Whether a pass failed half way, so that the states are inconsistent.
    pub(super) interrupted: bool,
}

/// Everything that a sequence was given.
#[derive(Debug, Default)]
pub(super) struct History {
    pub tokens: Vec<u32>,
    pub embeddings: Vec<f32>,
}

/// What one sequence has bound at one stage.
pub(super) struct StageBinding<B: Backend> {
    pub binding: <B::Session as Session>::Binding,
    pub inputs: Vec<Option<BindingKey>>,
    pub outputs: Vec<Option<BindingKey>>,
}

impl<B: Backend> StageBinding<B> {
    pub fn new(stage: &Stage, session: &B::Session) -> Result<Self, BackendError> {
        Ok(StageBinding {
            binding: session.binding()?,
            inputs: vec![None; stage.inputs.len()],
            outputs: vec![None; stage.outputs.len()],
        })
    }
}

impl<B: Backend> Sequence<B> {
    /// Its number of tokens.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Whether it has no tokens yet.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// How many more tokens fit.
    pub fn room(&self) -> u64 {
        self.limit.saturating_sub(self.length)
    }

    /// Sets whether the next passes may be undone ([`Engine::truncate`](crate::Engine::truncate)) even if a sliding window drops tokens in them:
    /// then the window is copied before such a pass.
    pub fn keep_snapshots(&mut self, on: bool) {
        self.snapshots = on;
    }

    /// A pass starts that changes its states.
    pub(super) fn begin_pass(&mut self) {
        self.pass_start = None;
        self.has_snapshots = self.snapshots;
        self.interrupted = true;
    }

    /// The pass has succeeded; before it, the sequence had `past` tokens.
    pub(super) fn end_pass(&mut self, past: u64) {
        self.interrupted = false;
        self.pass_start = Some(past);
        self.states.iter_mut().for_each(StateBuffers::commit);
    }

    /// Sets a state that the model only reads.
    pub(crate) fn set_read_only_state(
        &mut self,
        program: &Program,
        pool: &BufferPool<B>,
        past: &str,
        tensor: &HostTensor,
    ) -> Result<(), EngineError> {
        let state = program.layouts.position(|layout| layout.past == past);
        let state = state.ok_or_else(|| EngineError::WrongInput {
            name: past.to_owned(),
            why: "the plan has no such state".into(),
        })?;
        self.states[state].set_read_only(&program.layouts[state], pool, tensor)
    }

    /// Bytes reserved for its states.
    pub fn state_bytes(&self) -> u64 {
        self.states.iter().map(StateBuffers::bytes).sum()
    }
}

impl<B: Backend> std::fmt::Debug for Sequence<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sequence").field("length", &self.length).field("limit", &self.limit).finish_non_exhaustive()
    }
}
