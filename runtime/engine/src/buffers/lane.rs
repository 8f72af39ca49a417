//! Lanes: the tensors that one item of a pass uses apart from its states: model inputs and boundaries.

use super::{Boundaries, BufferPool, InputBuffers};
use crate::error::EngineError;
use crate::ids::{BoundaryId, IndexVec, InputId};
use crate::port::{Backend, MemoryId};
use crate::program::{BoundaryCopy, PassSizes, Program};
use crate::telemetry::Recorder;

/// Model inputs and boundaries of one item at a time. A runtime has as many as its largest pass had items.
pub(crate) struct Lane<B: Backend> {
    pub inputs: IndexVec<InputId, InputBuffers<B>>,
    pub boundaries: Boundaries<B>,
}

impl<B: Backend> Lane<B> {
    /// A lane for the same tensors, with buffers of its own. `context`: most tokens of a sequence.
    pub fn another(&self, pool: &BufferPool<B>, context: u64) -> Result<Self, EngineError> {
        let inputs =
            self.inputs.iter().map(|input| input.another(pool, context)).collect::<Result<IndexVec<_, _>, _>>()?;
        Ok(Lane { inputs, boundaries: self.boundaries.another() })
    }

    /// Most bytes of host memory that a lane takes, from the shapes of its inputs and boundaries in the last chunk of a prompt as long as
    /// the context. Boundaries whose shapes are known only after a run are not counted.
    pub fn host_bytes(&self, program: &Program) -> u64 {
        let sizes = program.largest_pass();
        let inputs = self.inputs.iter().map(|input| input.bytes(&sizes)).fold(0, u64::saturating_add);
        self.boundaries.host_bytes(&sizes, |boundary| program.is_on_host(boundary)).saturating_add(inputs)
    }

    /// Forgets the boundaries of the last pass.
    pub fn start_pass(&mut self, sizes: &PassSizes) {
        self.boundaries.start_pass(sizes);
    }

    /// Copies boundaries to the memories of the stages that will read them.
    pub fn copy_boundaries(
        &mut self,
        pool: &BufferPool<B>,
        copies: &[BoundaryCopy],
        recorder: &mut Recorder,
    ) -> Result<(), EngineError> {
        let each = copies.iter().flat_map(|copy| copy.memories.iter().map(|memory| (copy.boundary, *memory)));
        each.into_iter().try_for_each(|(boundary, memory): (BoundaryId, MemoryId)| {
            self.boundaries.copy_to(boundary, pool, memory, recorder)
        })
    }
}
