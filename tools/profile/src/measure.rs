//! Measuring, in order: the machine, the blocks (cheapest news first), what a corpus shows, what rounding does. The profile is
//! saved after each answer, so that an end at any moment costs one measurement.

mod blocks;
mod corpus;
mod machine;
mod pass;
mod sensitivity;

use crate::child::{Prober, Trouble};
use crate::derive::derive;
use crate::effort::Effort;
use crate::error::ProfileError;
use crate::estimate::Roofline;
use crate::hotness::hotness;
use crate::progress::Progress;
use crate::rates::rates;
use crate::store::Store;
use hpp_io::CpuShare;
use hpp_model::Analysis;
use hpp_schema::{Profile, Timing};
use std::path::Path;
use tempfile::TempDir;

pub use corpus::CorpusRun;

/// Everything measuring needs.
pub struct Measure<'a> {
    /// The model.
    pub analysis: &'a Analysis,
    /// What is known so far.
    pub profile: Profile,
    /// Where it is kept.
    pub store: &'a Store,
    /// Who measures.
    pub prober: Prober,
    /// Who is told.
    pub progress: Progress,
    /// What other programs take of the processor meanwhile.
    pub cpu_share: CpuShare,
    /// The share they took before this start, where a profile is continued.
    pub share_before: Option<f64>,
    /// How hard to measure.
    pub effort: Effort,
    /// How long things take.
    pub estimate: Roofline<'a>,
    /// Bytes of the host's last-level cache.
    pub cache: u64,
    /// A directory for files the child reads.
    pub work_dir: &'a Path,
}

impl Measure<'_> {
    /// Saves a new measurement with what all of them say together, and the share of the processor that other programs took meanwhile.
    pub fn save(&mut self) -> Result<(), ProfileError> {
        let others = self.cpu_share.others(self.prober.child_id());
        self.profile.others_cpu_share = others.into_iter().chain(self.share_before).reduce(f64::max);
        self.save_derived()
    }

    /// Saves what the measurements there are say together.
    pub fn save_derived(&mut self) -> Result<(), ProfileError> {
        derive(&mut self.profile);
        self.profile.hotness = hotness(&self.profile, &self.estimate);
        self.profile.machine.rates = rates(&self.profile, &self.estimate);
        Ok(self.store.save(&self.profile)?)
    }

    /// A directory for the files of one stage, which go with it.
    fn stage_dir(&self) -> Result<TempDir, ProfileError> {
        let made = tempfile::Builder::new().prefix("stage-").tempdir_in(self.work_dir);
        made.map_err(|source| ProfileError::Io {
            action: "make a directory in",
            path: self.work_dir.to_owned(),
            source,
        })
    }

    /// Something a person should know, said once.
    fn note(&mut self, note: String) {
        if !self.profile.notes.contains(&note) {
            self.progress.warn(&note);
            self.profile.notes.push(note);
        }
    }
}

/// Why a request came to nothing, where that is no reason to stop.
fn reason(trouble: Trouble) -> Result<String, ProfileError> {
    match trouble {
        Trouble::Refused(why) | Trouble::Lost(why) => Ok(why),
        Trouble::Interrupted => Err(ProfileError::Interrupted),
        Trouble::Start(error) => Err(error.into()),
    }
}

/// A timing that can have been measured.
fn plausible(timing: Timing) -> Result<Timing, String> {
    let Timing { runs, median_ms, p10_ms, p90_ms } = timing;
    let times = [p10_ms, median_ms, p90_ms];
    let ordered = p10_ms <= median_ms && median_ms <= p90_ms;
    match runs > 0 && ordered && times.iter().all(|ms| ms.is_finite() && *ms >= 0.0) {
        true => Ok(timing),
        false => Err(format!("{runs} runs of {p10_ms}, {median_ms} and {p90_ms} ms cannot have been measured")),
    }
}

#[cfg(test)]
mod tests;
