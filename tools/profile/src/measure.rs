//! Measures, in order: the machine, the cost of a pass outside its partitions, the blocks, statistics of a corpus, the sensitivity to
//! rounding. Saves the profile after each answer, so that a crash at any moment loses one measurement.

mod blocks;
mod corpus;
mod machine;
mod pass;
mod sensitivity;

use crate::child::{Prober, RequestError};
use crate::derive::derive;
use crate::effort::Effort;
use crate::error::ProfileError;
use crate::estimate::RooflineEstimator;
use crate::hotness::hotness;
use crate::progress::Progress;
use crate::rates::rates;
use crate::store::Store;
use hpp_io::CpuMonitor;
use hpp_model::Analysis;
use hpp_schema::probe::{Reply, Request};
use hpp_schema::{Profile, TimingStats};
use std::path::Path;
use tempfile::TempDir;

pub use corpus::CorpusRun;

/// The state of a profiling run.
pub struct ProfilingRun<'a> {
    pub analysis: &'a Analysis,
    pub profile: Profile,
    pub store: &'a Store,
    pub prober: Prober,
    pub progress: Progress,
    /// Measures the CPU share of other programs.
    pub cpu_share: CpuMonitor,
    /// The CPU share of other programs in the profile that is resumed.
    pub share_before: Option<f64>,
    pub effort: Effort,
    pub estimate: RooflineEstimator<'a>,
    pub cache: u64,
    /// A directory for files the child reads.
    pub work_dir: &'a Path,
}

impl ProfilingRun<'_> {
    /// Saves a new measurement, the values derived from all measurements, and the CPU share of other programs.
    pub fn save(&mut self) -> Result<(), ProfileError> {
        let others = self.cpu_share.others_share(self.prober.child_id());
        self.profile.others_cpu_share = others.into_iter().chain(self.share_before).reduce(f64::max);
        self.save_derived()
    }

    /// Saves the values derived from the measurements.
    pub fn save_derived(&mut self) -> Result<(), ProfileError> {
        derive(&mut self.profile);
        self.profile.hotness = hotness(&self.profile, &self.estimate);
        self.profile.machine.rates = rates(&self.profile, &self.estimate);
        Ok(self.store.save(&self.profile)?)
    }

    /// Sends a request and handles each reply. Returns why the request failed, if it did.
    fn request(
        &mut self,
        request: &Request,
        mut handle: impl FnMut(&mut Self, Reply) -> Result<(), ProfileError>,
    ) -> Result<Option<String>, ProfileError> {
        let mut answer = self.prober.ask(request).and_then(|()| self.prober.answer());
        loop {
            match answer {
                Ok(Some(reply)) => handle(self, reply)?,
                Ok(None) => return Ok(None),
                Err(RequestError::Refused(why) | RequestError::Lost(why)) => return Ok(Some(why)),
                Err(RequestError::Interrupted) => return Err(ProfileError::Interrupted),
                Err(RequestError::Start(error)) => return Err(error.into()),
            }
            answer = self.prober.answer();
        }
    }

    /// Makes a directory for the files of one stage; dropping it removes them.
    fn stage_dir(&self) -> Result<TempDir, ProfileError> {
        let made = tempfile::Builder::new().prefix("stage-").tempdir_in(self.work_dir);
        made.map_err(|source| ProfileError::Io {
            action: "make a directory in",
            path: self.work_dir.to_owned(),
            source,
        })
    }

    /// Adds a note to the profile and warns, once.
    fn note(&mut self, note: String) {
        if !self.profile.notes.contains(&note) {
            self.progress.warn(&note);
            self.profile.notes.push(note);
        }
    }
}

/// Checks that a timing is finite, not negative and ordered.
fn plausible(timing: TimingStats) -> Result<TimingStats, String> {
    let TimingStats { runs, median_ms, p10_ms, p90_ms } = timing;
    let times = [p10_ms, median_ms, p90_ms];
    let ordered = p10_ms <= median_ms && median_ms <= p90_ms;
    match runs > 0 && ordered && times.iter().all(|ms| ms.is_finite() && *ms >= 0.0) {
        true => Ok(timing),
        false => Err(format!("{runs} runs of {p10_ms}, {median_ms} and {p90_ms} ms cannot have been measured")),
    }
}

#[cfg(test)]
mod tests;
