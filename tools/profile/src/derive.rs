//! Derives times of blocks from times of partitions: separates the launch cost of a partition from the time of its blocks.
//!
//! A partition of `m` blocks takes `T_m = launch + block_1 + ... + block_m`, a partition of one `T_1 = launch + block`. So
//! `launch = (sum of the T_1 - T_m) / (m - 1)`, and `block = T_1 - launch`; for equal blocks that is `(T_m - T_1) / (m - 1)`.
//! Pure: the result depends on the timings only, not on their order.

use crate::fit::{CurveTerms, Sample, fit};
use hpp_partition::Phase;
use hpp_schema::{ClassCosts, CostPoint, PhaseCosts, Profile, ProfiledBlock, Provider, ProviderCosts};

/// Passes of fewer tokens are short and left out of a fit.
const SHORTEST_FITTED: u64 = 32;
/// Enough samples to determine a curve, and one more to show its error.
const ENOUGH_FITTED: usize = 4;

/// Both phases, in the order in which they are measured and shown.
pub const PHASES: [Phase; 2] = [Phase::Decode, Phase::Prefill];

/// The costs of one phase.
pub fn phase_costs(costs: &ProviderCosts, phase: Phase) -> &PhaseCosts {
    match phase {
        Phase::Decode => &costs.decode,
        Phase::Prefill => &costs.prefill,
    }
}

/// The costs of one phase, to be changed.
pub fn phase_costs_mut(costs: &mut ProviderCosts, phase: Phase) -> &mut PhaseCosts {
    match phase {
        Phase::Decode => &mut costs.decode,
        Phase::Prefill => &mut costs.prefill,
    }
}

/// The times of a block: its own, else those of its class.
pub fn costs_of<'p>(profile: &'p Profile, block: &ProfiledBlock, provider: Provider) -> Option<&'p ProviderCosts> {
    let own = profile.classes.iter().find(|entry| entry.block == block.label);
    let entry = own.or_else(|| profile.classes.iter().find(|entry| entry.class == block.class))?;
    entry.providers.iter().find(|costs| costs.provider == provider)
}

/// Computes launch costs, block times and fitted curves from the timings of a profile.
pub fn derive(profile: &mut Profile) {
    for provider in profile.settings.providers.clone() {
        let singles = Singles { profile, provider };
        let found: Vec<LaunchCosts> = profile.classes.iter().map(|class| singles.launches(class)).collect();
        let typical = median(found.iter().filter_map(LaunchCosts::median).collect());
        for (class, launched) in profile.classes.iter_mut().zip(&found) {
            if let Some(costs) = class.providers.iter_mut().find(|costs| costs.provider == provider) {
                costs.launch_ms = launched.median();
                finish(costs, launched, typical);
            }
        }
    }
}

/// Median times of partitions with one block, under one provider.
struct Singles<'a> {
    profile: &'a Profile,
    provider: Provider,
}

impl Singles<'_> {
    /// Milliseconds of a partition with this block alone.
    fn ms(&self, block: usize, phase: Phase, tokens: u64) -> Option<f64> {
        let costs = costs_of(self.profile, &self.profile.model.blocks[block], self.provider)?;
        let point = phase_costs(costs, phase).points.iter().find(|point| point.tokens == tokens)?;
        Some(point.single?.median_ms)
    }

    /// The launch cost at each point where a run of blocks was measured.
    fn launches(&self, class: &ClassCosts) -> LaunchCosts {
        let mut launched = LaunchCosts::default();
        let costs = class.providers.iter().find(|costs| costs.provider == self.provider);
        let first = self.profile.model.blocks.iter().position(|block| block.label == class.block);
        let Some((costs, first)) = costs.zip(first) else { return launched };
        let length = costs.run_length as usize;
        let blocks = first..(first + length).min(self.profile.model.blocks.len());
        for phase in PHASES {
            for point in phase_costs(costs, phase).points.iter().filter(|_| length > 1 && blocks.len() == length) {
                let singles: Option<f64> = blocks.clone().map(|block| self.ms(block, phase, point.tokens)).sum();
                let (Some(singles), Some(run), Some(single)) = (singles, point.run, point.single) else { continue };
                let ms = (singles - run.median_ms) / (length as f64 - 1.0);
                launched.points.push(Launch { phase, tokens: point.tokens, ms, single_ms: single.median_ms });
            }
        }
        launched
    }
}

/// The launch cost at one point. It may be negative, because caches are warmer for a single block than for a run. The time of a block that follows
/// from the run is still right.
struct Launch {
    phase: Phase,
    tokens: u64,
    ms: f64,
    single_ms: f64,
}

/// The launch costs of one class.
#[derive(Default)]
struct LaunchCosts {
    points: Vec<Launch>,
}

impl LaunchCosts {
    /// The median over decode points, else the launch cost of the shortest prefill. Clamped to the range from 0 to the time of the
    /// partition.
    fn median(&self) -> Option<f64> {
        let possible = |launch: &Launch| launch.ms.clamp(0.0, launch.single_ms);
        let launches_of = |phase| self.points.iter().filter(move |launch| launch.phase == phase);
        let smallest = launches_of(Phase::Prefill).min_by_key(|launch| launch.tokens);
        median(launches_of(Phase::Decode).map(possible).collect()).or(smallest.map(possible))
    }

    fn at(&self, phase: Phase, tokens: u64) -> Option<f64> {
        self.points.iter().find(|launch| launch.phase == phase && launch.tokens == tokens).map(|launch| launch.ms)
    }
}

/// Sets block times and fits. For a block that was measured only alone, `typical`, the median launch cost of the other classes, is subtracted.
fn finish(costs: &mut ProviderCosts, launched: &LaunchCosts, typical: Option<f64>) {
    let usual = launched.median().or(typical).unwrap_or(0.0);
    for phase in PHASES {
        let costs = phase_costs_mut(costs, phase);
        for point in &mut costs.points {
            let Some(single) = point.single else { continue };
            // Because of noise, a run may take less time than one of its blocks.
            let told = launched.at(phase, point.tokens).map(|launch| single.median_ms - launch).filter(|ms| *ms > 0.0);
            point.ms = Some(told.unwrap_or((single.median_ms - usual).max(0.0)));
        }
        let sample = |point: &CostPoint| Some(Sample { tokens: point.tokens, ms: point.ms? });
        let samples: Vec<Sample> = costs.points.iter().filter_map(sample).collect();
        let shape = if phase == Phase::Decode { CurveTerms::Decode } else { CurveTerms::Prefill };
        costs.fit = fit(shape, fitted(shape, &samples));
    }
}

/// The samples to which a curve is fitted. Kernels compute short passes differently, so no parabola fits short and long passes. Short passes are
/// left out if enough samples remain. Precondition: sorted by tokens.
fn fitted(shape: CurveTerms, samples: &[Sample]) -> &[Sample] {
    let long = &samples[samples.partition_point(|sample| sample.tokens < SHORTEST_FITTED)..];
    if shape == CurveTerms::Prefill && long.len() >= ENOUGH_FITTED { long } else { samples }
}

/// The median; `None` without numbers.
pub fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 0 => Some(f64::midpoint(values[middle - 1], values[middle])),
        _ => Some(values[middle]),
    }
}

#[cfg(test)]
mod tests;
