//! Locks other bytes of the streamed weights in host memory, between two passes. Needs no new session and changes no token.

use super::Runtime;
use crate::error::EngineError;
use crate::ids::Id;
use crate::port::Backend;
use crate::program::Program;

impl<B: Backend> Runtime<B> {
    /// Locks `bytes` of the streamed weights, or as many as were locked when they were loaded, if that is less: each partition the same share
    /// of what it had. Returns how many that are.
    pub fn set_locked(&mut self, program: &Program, bytes: u64) -> Result<u64, EngineError> {
        let at_load: u64 = self.locked.at_load.iter().sum();
        let wanted = bytes.min(at_load);
        if wanted == self.locked.now {
            return Ok(wanted);
        }
        self.weights.disk.drop_fetched();
        for (id, stage) in program.stages.entries() {
            let own = u128::from(self.locked.at_load[stage.partition.index()]);
            let own = (own * u128::from(wanted) / u128::from(at_load.max(1))) as u64;
            let locked = self.weights.disk.lock_and_stream(id, own);
            locked.map_err(|source| stage.failed("locking other bytes of its weights", source))?;
        }
        self.locked.now = wanted;
        self.weights.set_order(&program.run_order(&self.route));
        self.weights.prefetch(&self.pool)?;
        Ok(wanted)
    }
}
