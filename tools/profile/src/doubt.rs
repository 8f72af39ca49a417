//! Which measured times are not to be trusted: those that contradict each other or vary from run to run.

use crate::derive::Phase;
use hpp_schema::{CostPoint, Profile, Provider, ProviderCosts, Timing};

/// A curve that misses a point by more than this part says nothing about the times between the points.
const WORST_FIT: f64 = 0.25;
/// Runs of which one in ten takes this many times the median were disturbed.
const WORST_SPREAD: f64 = 3.0;
/// Times below this, in milliseconds, are within the error of the clock.
const MEASURABLE: f64 = 0.05;

/// Labels of the measured blocks whose times on this provider are doubtful.
pub fn doubtful_blocks(profile: &Profile, provider: Provider) -> Vec<&str> {
    let is_doubtful =
        |costs: &ProviderCosts| Phase::ALL.iter().any(|phase| disagrees(costs, *phase) || varies(costs, *phase));
    let on = |costs: &&ProviderCosts| costs.provider == provider;
    let doubtful = profile.classes.iter().filter(|class| class.providers.iter().filter(on).any(is_doubtful));
    doubtful.map(|class| class.block.as_str()).collect()
}

fn disagrees(costs: &ProviderCosts, phase: Phase) -> bool {
    let phase = phase.of(costs);
    let longest = phase.points.iter().filter_map(|point| point.ms).fold(0.0, f64::max);
    longest > MEASURABLE && phase.fit.is_some_and(|fit| fit.worst_relative_error > WORST_FIT)
}

fn varies(costs: &ProviderCosts, phase: Phase) -> bool {
    let timings = |point: &CostPoint| [point.single, point.run];
    let varies = |timing: Timing| timing.median_ms > MEASURABLE && timing.p90_ms > WORST_SPREAD * timing.median_ms;
    phase.of(costs).points.iter().flat_map(timings).flatten().any(varies)
}
