//! Changes how many bytes of the streamed weights are locked in host memory, between two passes. Needs no new session and changes no token.

use super::Runtime;
use crate::error::EngineError;
use crate::ids::Id;
use crate::port::Backend;
use crate::program::Program;
use tracing::debug;

impl<B: Backend> Runtime<B> {
    /// Locks `bytes` of the streamed weights, but at most as many as were locked at load. Returns how many are locked.
    pub fn set_locked(&mut self, program: &Program, bytes: u64) -> Result<u64, EngineError> {
        let wanted = bytes.min(self.locked.total());
        if wanted == self.locked_now {
            return Ok(wanted);
        }
        self.weights.disk.drop_fetched();
        self.lock_stages(program, &self.locked.divided(wanted))?;
        self.locked_now = wanted;
        self.weights.set_order(&program.run_order(&self.route));
        self.weights.prefetch(&self.pool)?;
        Ok(wanted)
    }

    /// Locks the given bytes of each partition's weights. Returns warnings.
    pub(crate) fn lock_stages(&mut self, program: &Program, locked: &[u64]) -> Result<Vec<String>, EngineError> {
        let mut warnings = Vec::new();
        for (id, stage) in program.stages.entries() {
            let locked = locked[stage.partition.index()];
            debug!(stage = %stage.name, locked, "weights locked in host memory");
            let warning = self.weights.disk.lock_and_stream(id, locked);
            warnings.extend(warning.map_err(|source| stage.failed("locking its weights", source))?);
        }
        Ok(warnings)
    }
}
