//! Measures the cost of a token outside its partitions, with the model's skeleton.

use super::{ProfilingRun, plausible};
use crate::effort::{Effort, evict_bytes};
use crate::error::ProfileError;
use crate::skeleton;
use hpp_schema::probe::{PassProbe, Reply, Request};
use hpp_schema::{ModelKind, PassCosts, TimingStats};

/// Expected seconds of the measurement.
const SECONDS: f64 = 1.0;
/// Tokens to time.
const TOKENS: [u64; 2] = [48, 192];

impl ProfilingRun<'_> {
    /// Expected seconds; 0 if it is already measured.
    pub fn pass_seconds(&self) -> f64 {
        if self.pass_is_missing() { SECONDS } else { 0.0 }
    }

    /// Models that generate nothing have no tokens.
    fn pass_is_missing(&self) -> bool {
        self.profile.pass.is_none() && self.analysis.kind != ModelKind::SingleRun
    }

    pub fn pass(&mut self) -> Result<(), ProfileError> {
        if !self.pass_is_missing() {
            return Ok(());
        }
        self.progress.begin("overhead of a pass outside its partitions");
        self.profile.pass = Some(match self.between()? {
            Ok(timing) => PassCosts { timing: Some(timing), failure: None },
            Err(why) => {
                self.progress.warn(&format!("overhead of a pass outside its partitions: {why}"));
                PassCosts { timing: None, failure: Some(why) }
            }
        });
        self.save()?;
        self.progress.end(SECONDS);
        Ok(())
    }

    fn between(&mut self) -> Result<Result<TimingStats, String>, ProfileError> {
        let dir = self.stage_dir()?;
        let plan = match skeleton::write(self.analysis, dir.path()) {
            Ok(plan) => plan,
            Err(error) => return Ok(Err(error.to_string())),
        };
        let tokens = TOKENS[usize::from(self.effort == Effort::Thorough)].min(self.analysis.context);
        // A pass of the model evicts the caches.
        let weights = self.profile.model.weight_bytes.0;
        let evict_bytes = evict_bytes(weights, weights, 0, self.cache);
        let request = Request::Pass(PassProbe { plan, tokens, evict_bytes });
        let mut measured = Err("hpp-exec did not answer".to_owned());
        let failure = self.request(&request, |_, reply| {
            if let Reply::Pass { timing } = reply {
                measured = plausible(timing);
            }
            Ok(())
        })?;
        Ok(failure.map_or(measured, Err))
    }
}
