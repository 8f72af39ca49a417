//! Measures the times of blocks, one session after another. Stores each case as soon as the child answers it.

use super::{ProfilingRun, plausible};
use crate::derive::{PHASES, phase_costs};
use crate::effort::evict_bytes;
use crate::error::ProfileError;
use crate::missing::{BlockCount, ProbeJob, missing_measurements, point_mut};
use crate::pieces::{Piece, Pieces, absolute};
use crate::settings::unusable;
use hpp_partition::Phase;
use hpp_schema::probe::{Case, PartitionProbe, Reply, Request};
use hpp_schema::{ProviderCosts, TimingStats, error_line};
use std::collections::VecDeque;

/// A case without an answer yet.
struct PendingCase {
    phase: Phase,
    tokens: u64,
    name: String,
}

impl ProfilingRun<'_> {
    /// Measures every missing case of the blocks.
    pub fn blocks(&mut self) -> Result<(), ProfileError> {
        self.refuse_unusable()?;
        if missing_measurements(&self.profile, &self.estimate).is_empty() {
            return Ok(());
        }
        let settings = &self.profile.settings;
        let longest = settings.contexts.iter().chain(&settings.prefill_tokens).max().copied().unwrap_or(1);
        let dir = self.stage_dir()?;
        let pieces = Pieces::open(self.analysis, dir.path(), longest)?;
        let mut before = None;
        // List the jobs again each time: they include the cases that a lost child left undone.
        while let Some(job) = missing_measurements(&self.profile, &self.estimate).into_iter().next() {
            if before.is_some_and(|provider| provider != job.provider) {
                self.prober.restart();
            }
            before = Some(job.provider);
            self.job(&pieces, &job)?;
        }
        self.prober.restart();
        Ok(())
    }

    fn refuse_unusable(&mut self) -> Result<(), ProfileError> {
        let mut warnings = Vec::new();
        for provider in self.profile.settings.providers.clone() {
            let Some(why) = unusable(provider, &self.profile.host) else { continue };
            let entries = self.profile.classes.iter_mut().flat_map(|entry| &mut entry.providers);
            for costs in entries.filter(|costs| costs.provider == provider && costs.failure.is_none()) {
                costs.failure = Some(why.clone());
            }
            warnings.push(why);
        }
        if !warnings.is_empty() {
            warnings.iter().for_each(|why| self.progress.warn(why));
            // Nothing was measured.
            self.save_derived()?;
        }
        Ok(())
    }

    fn job(&mut self, pieces: &Pieces, job: &ProbeJob) -> Result<(), ProfileError> {
        self.progress.begin(&self.title(job));
        let piece = match pieces.piece(job.blocks.clone()) {
            Ok(piece) => piece,
            Err(error) => {
                self.job_failed(job, &error_line(&error));
                return self.done(job);
            }
        };
        let (cases, waiting) = self.cases(pieces, &piece, job);
        if !cases.is_empty() {
            let request = Request::Partition(PartitionProbe {
                file: absolute(&piece.file),
                weights_dir: absolute(pieces.weights_dir()),
                host_kernels: piece.host_kernels.clone(),
                weight_bytes: self.profile.model.weight_bytes.0,
                provider: job.provider,
                cases,
            });
            self.ask(job, &request, waiting)?;
        }
        self.done(job)
    }

    fn title(&self, job: &ProbeJob) -> String {
        let block = &self.profile.model.blocks[job.blocks.start].label;
        let more = if job.scope == BlockCount::Several {
            format!(" and {} more", job.blocks.len() - 1)
        } else {
            String::new()
        };
        format!("{block}{more}, {}", job.provider.id())
    }

    fn done(&mut self, job: &ProbeJob) -> Result<(), ProfileError> {
        self.save()?;
        self.progress.end(job.seconds);
        Ok(())
    }

    /// Makes the cases of a job; records a failure for those that cannot be made.
    fn cases(&mut self, pieces: &Pieces, piece: &Piece, job: &ProbeJob) -> (Vec<Case>, VecDeque<PendingCase>) {
        let all = self.profile.model.weight_bytes.0;
        // The caches of a device are not known.
        let cache = if job.provider.uses_host_memory() { self.cache } else { u64::MAX };
        let (mut cases, mut waiting) = (Vec::new(), VecDeque::new());
        for (phase, tokens) in job.cases.iter().copied() {
            let rest = (0..self.profile.model.blocks.len()).filter(|block| !job.blocks.contains(block));
            let read: u64 = rest.map(|block| self.estimate.work(phase, tokens, block).bytes).sum();
            let evict = evict_bytes(read, all, self.estimate.held(&job.blocks, phase, tokens), cache);
            match pieces.case(piece, phase, tokens, self.effort.repeats(phase), evict) {
                Ok(case) => {
                    waiting.push_back(PendingCase { phase, tokens, name: case.name.clone() });
                    cases.push(case);
                }
                Err(why) => self.case_failed(job, phase, tokens, &why),
            }
        }
        (cases, waiting)
    }

    fn ask(
        &mut self,
        job: &ProbeJob,
        request: &Request,
        mut waiting: VecDeque<PendingCase>,
    ) -> Result<(), ProfileError> {
        let mut loaded = false;
        let failure = self.request(request, |measure, reply| match reply {
            Reply::Loaded { .. } => {
                loaded = true;
                Ok(())
            }
            Reply::Measured { case, timing, .. } => measure.answered(job, &mut waiting, &case, plausible(timing)),
            Reply::CaseFailed { case, reason } => measure.answered(job, &mut waiting, &case, Err(reason)),
            _ => Ok(()),
        })?;
        match (failure, waiting.front()) {
            (None, _) => {
                for case in waiting {
                    self.case_failed(job, case.phase, case.tokens, "hpp-exec did not answer this case");
                }
            }
            // A lost child costs its current case; the next child measures the others.
            (Some(why), Some(case)) if loaded => self.case_failed(job, case.phase, case.tokens, &why),
            (Some(why), _) => self.job_failed(job, &why),
        }
        Ok(())
    }

    fn answered(
        &mut self,
        job: &ProbeJob,
        waiting: &mut VecDeque<PendingCase>,
        case: &str,
        timing: Result<TimingStats, String>,
    ) -> Result<(), ProfileError> {
        let Some(at) = waiting.iter().position(|waiting| waiting.name == case) else { return Ok(()) };
        let Some(PendingCase { phase, tokens, .. }) = waiting.remove(at) else { return Ok(()) };
        match timing {
            Ok(timing) => {
                if let Some(costs) = self.costs(job) {
                    let point = point_mut(costs, phase, tokens);
                    match job.scope {
                        BlockCount::One => point.single = Some(timing),
                        BlockCount::Several => point.run = Some(timing),
                    }
                }
            }
            Err(why) => self.case_failed(job, phase, tokens, &why),
        }
        self.save()
    }

    fn costs(&mut self, job: &ProbeJob) -> Option<&mut ProviderCosts> {
        let entry = self.profile.classes.get_mut(job.class)?;
        entry.providers.iter_mut().find(|costs| costs.provider == job.provider)
    }

    fn case_failed(&mut self, job: &ProbeJob, phase: Phase, tokens: u64, why: &str) {
        let what = match job.scope {
            BlockCount::One => why.to_owned(),
            BlockCount::Several => format!("{} blocks in one partition: {why}", job.blocks.len()),
        };
        self.progress.warn(&format!("{}: {} at {tokens} tokens: {what}", self.title(job), phase));
        if let Some(costs) = self.costs(job) {
            point_mut(costs, phase, tokens).failure = Some(what);
        }
    }

    fn job_failed(&mut self, job: &ProbeJob, why: &str) {
        let nothing_yet = self.costs(job).is_some_and(|costs| {
            PHASES.iter().all(|phase| phase_costs(costs, *phase).points.iter().all(|point| point.single.is_none()))
        });
        if job.scope == BlockCount::One && nothing_yet {
            self.progress.warn(&format!("{}: {why}", self.title(job)));
            if let Some(costs) = self.costs(job) {
                costs.failure = Some(why.to_owned());
            }
            return;
        }
        for (phase, tokens) in job.cases.clone() {
            let missing = self.costs(job).is_some_and(|costs| {
                let point = point_mut(costs, phase, tokens);
                point.failure.is_none()
                    && if job.scope == BlockCount::One { point.single.is_none() } else { point.run.is_none() }
            });
            if missing {
                self.case_failed(job, phase, tokens, why);
            }
        }
    }
}
