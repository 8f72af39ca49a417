//! Lists the block measurements that a profile still lacks, most informative per second first. Pure.

use crate::derive::{phase_costs, phase_costs_mut};
use hpp_partition::Phase;
use hpp_schema::{CostPoint, Profile, Provider, ProviderCosts};
use std::ops::Range;

/// How many blocks a measurement times: one block alone, or a run of blocks that begins with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockCount {
    One,
    Several,
}

/// One session of the child: blocks as a partition under one provider, and the cases to time.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbeJob {
    /// Index among the profile's classes.
    pub class: usize,
    pub provider: Provider,
    pub scope: BlockCount,
    pub blocks: Range<usize>,
    /// The cases, in the order of tokens.
    pub cases: Vec<(Phase, u64)>,
    /// Expected seconds, except for a constant factor that the progress display learns while measuring.
    pub seconds: f64,
    /// Number of blocks of the model whose time this job determines.
    represented_blocks: usize,
}

/// Expected durations and memory of measurements.
pub trait Estimate {
    /// Seconds to load these blocks.
    fn load(&self, blocks: &Range<usize>, provider: Provider) -> f64;
    /// Seconds of all runs of a case.
    fn case(&self, blocks: &Range<usize>, provider: Provider, phase: Phase, tokens: u64) -> f64;
    /// Whether a case of these blocks fits in the memory that measuring may use.
    fn fits(&self, blocks: &Range<usize>, phase: Phase, tokens: u64) -> bool;
}

/// Every job that remains. Order: the host before devices, single blocks before runs, then fewest seconds per represented block.
pub fn missing_measurements(profile: &Profile, estimate: &dyn Estimate) -> Vec<ProbeJob> {
    let mut jobs = Vec::new();
    for (class, entry) in profile.classes.iter().enumerate() {
        let Some(first) = profile.model.blocks.iter().position(|block| block.label == entry.block) else { continue };
        let of_class = profile.model.blocks.iter().filter(|block| block.class == entry.class).count();
        let represented_blocks = if profile.settings.all_blocks { 1 } else { of_class };
        for costs in entry.providers.iter().filter(|costs| costs.failure.is_none()) {
            for scope in [BlockCount::One, BlockCount::Several] {
                let length = if scope == BlockCount::Several { costs.run_length as usize } else { 1 };
                let blocks = first..(first + length).min(profile.model.blocks.len());
                let mut cases = missing_cases(profile, costs, scope);
                cases.retain(|(phase, tokens)| scope == BlockCount::One || estimate.fits(&blocks, *phase, *tokens));
                if cases.is_empty() || (scope == BlockCount::Several && length < 2) {
                    continue;
                }
                let runs = cases.iter().map(|(phase, t)| estimate.case(&blocks, costs.provider, *phase, *t));
                let seconds = estimate.load(&blocks, costs.provider) + runs.sum::<f64>();
                let provider = costs.provider;
                jobs.push(ProbeJob { class, provider, scope, blocks, cases, seconds, represented_blocks });
            }
        }
    }
    let seconds_per_block = |job: &ProbeJob| job.seconds / job.represented_blocks.max(1) as f64;
    jobs.sort_by(|a, b| {
        let device = |job: &ProbeJob| job.provider != Provider::CPU;
        let by_seconds = seconds_per_block(a).total_cmp(&seconds_per_block(b));
        device(a).cmp(&device(b)).then(a.scope.cmp(&b.scope)).then(by_seconds)
    });
    jobs
}

/// Cases that have neither a time nor a recorded failure.
fn missing_cases(profile: &Profile, costs: &ProviderCosts, scope: BlockCount) -> Vec<(Phase, u64)> {
    let settings = &profile.settings;
    let mut cases = Vec::new();
    for (phase, wanted) in [(Phase::Decode, &settings.contexts), (Phase::Prefill, &settings.prefill_tokens)] {
        let points = &phase_costs(costs, phase).points;
        let is_done = |tokens: &u64| points.iter().any(|point| point.tokens == *tokens && is_measured(point, scope));
        cases.extend(wanted.iter().filter(|tokens| !is_done(tokens)).map(|tokens| (phase, *tokens)));
    }
    cases
}

/// Whether a point has a time or a recorded failure.
fn is_measured(point: &CostPoint, scope: BlockCount) -> bool {
    let timing = match scope {
        BlockCount::One => point.single,
        BlockCount::Several => point.run,
    };
    timing.is_some() || point.failure.is_some()
}

/// The point of a case; inserts an empty one if it is missing. Invariant: points are sorted by tokens.
pub fn point_mut(costs: &mut ProviderCosts, phase: Phase, tokens: u64) -> &mut CostPoint {
    let points = &mut phase_costs_mut(costs, phase).points;
    let at = points.partition_point(|point| point.tokens < tokens);
    if points.get(at).is_none_or(|point| point.tokens != tokens) {
        points.insert(at, CostPoint { tokens, ms: None, single: None, run: None, failure: None });
    }
    &mut points[at]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;
    const CPU: Provider = Provider::CPU;
    const WEBGPU: Provider = Provider::WEBGPU;

    /// Estimates one second for each block and case.
    struct Plain {
        /// Most tokens for which a run of blocks fits in memory.
        longest_run: u64,
    }

    const PLAIN: Plain = Plain { longest_run: u64::MAX };

    impl Estimate for Plain {
        fn load(&self, _: &Range<usize>, _: Provider) -> f64 {
            0.0
        }
        fn case(&self, blocks: &Range<usize>, _: Provider, _: Phase, _: u64) -> f64 {
            blocks.len() as f64
        }
        fn fits(&self, blocks: &Range<usize>, _: Phase, tokens: u64) -> bool {
            blocks.len() < 2 || tokens <= self.longest_run
        }
    }

    fn profile() -> Profile {
        sample::profile(&sample::analysis("genai/llama3-fp32-cpu"), sample::settings(&[WEBGPU, CPU]))
    }

    fn order(profile: &Profile) -> Vec<String> {
        let name = |job: &ProbeJob| {
            let run = if job.scope == BlockCount::Several { "+" } else { "" };
            format!("{:?} {}{run}", job.provider, profile.classes[job.class].block)
        };
        missing_measurements(profile, &PLAIN).iter().map(name).collect()
    }

    #[test]
    fn the_most_informative_job_comes_first_and_devices_last() {
        let order = order(&profile());
        // layers.1 represents two blocks.
        assert_eq!(order[0], "cpu layers.1");
        assert_eq!(order[5], "cpu layers.1+");
        assert!(order[6..].iter().all(|job| job.starts_with("webgpu")) && order.len() == 12, "{order:?}");
    }

    #[test]
    fn nothing_is_measured_twice() {
        let mut profile = profile();
        sample::time(&mut profile, "head", CPU, (Phase::Decode, 100), (1.0, None));
        let head = |profile: &Profile| {
            let jobs = missing_measurements(profile, &PLAIN);
            jobs.into_iter().find(|job| job.provider == CPU && profile.classes[job.class].block == "head")
        };
        assert_eq!(head(&profile).unwrap().cases, [(Phase::Decode, 200), (Phase::Prefill, 10)]);
        sample::time_all(&mut profile, CPU, 1.0);
        assert_eq!(head(&profile), None);
        assert!(order(&profile).iter().all(|job| job.starts_with("webgpu")));
        sample::time_all(&mut profile, WEBGPU, 1.0);
        assert!(order(&profile).is_empty());
    }

    #[test]
    fn failures_are_not_tried_again() {
        let mut profile = profile();
        for costs in profile.classes.iter_mut().flat_map(|entry| &mut entry.providers) {
            if costs.provider == WEBGPU {
                costs.failure = Some("no device".into());
            } else {
                point_mut(costs, Phase::Decode, 100).failure = Some("it hung".into());
            }
        }
        let left = missing_measurements(&profile, &PLAIN);
        assert!(left.iter().all(|job| job.provider == CPU && !job.cases.contains(&(Phase::Decode, 100))));
        assert!(!left.is_empty());
        crate::begin::clear_failures(&mut profile);
        assert_eq!(missing_measurements(&profile, &PLAIN).len(), 12);
    }

    #[test]
    fn runs_that_take_too_much_memory_are_skipped() {
        let jobs = missing_measurements(&profile(), &Plain { longest_run: 100 });
        let run = jobs.iter().find(|job| job.scope == BlockCount::Several).unwrap();
        assert_eq!(run.cases, [(Phase::Decode, 100), (Phase::Prefill, 10)]);
        let single = jobs.iter().find(|job| job.scope == BlockCount::One).unwrap();
        assert_eq!(single.cases.len(), 3, "one block is always timed");
    }

    #[test]
    fn points_stay_in_order() {
        let mut profile = profile();
        let costs = &mut profile.classes[0].providers[0];
        for tokens in [200, 100, 300, 200] {
            point_mut(costs, Phase::Decode, tokens);
        }
        let tokens: Vec<u64> = costs.decode.points.iter().map(|point| point.tokens).collect();
        assert_eq!(tokens, [100, 200, 300]);
    }
}
