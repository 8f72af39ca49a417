//! Finds unreliable measurements: times that contradict each other or vary from run to run.

use crate::derive::{PHASES, phase_costs};
use hpp_partition::Phase;
use hpp_schema::{CostPoint, PhaseCosts, Profile, Provider, ProviderCosts, TimingStats};

/// Largest relative error of a fitted curve at which the curve still predicts the times between its points.
const WORST_FIT: f64 = 0.25;
/// Largest ratio of the 90th percentile to the median of undisturbed runs.
const WORST_SPREAD: f64 = 3.0;
/// Shorter times, in milliseconds, are within the error of the clock.
const MEASURABLE: f64 = 0.05;

/// Why times should not be relied on, a sentence for each reason.
pub fn doubts(profile: &Profile) -> Vec<String> {
    let mut doubts: Vec<String> = profile.busy_machine().into_iter().collect();
    for provider in &profile.settings.providers {
        let blocks = unreliable_blocks(profile, *provider);
        if !blocks.is_empty() {
            doubts.push(format!(
                "the times of {} on {} vary from run to run or contradict each other; was the machine busy? Profile again on an idle \
                 machine before planning with them",
                blocks.join(", "),
                provider.id()
            ));
        }
    }
    doubts
}

/// Labels of the measured blocks whose times on this provider are unreliable.
pub fn unreliable_blocks(profile: &Profile, provider: Provider) -> Vec<&str> {
    let is_unreliable =
        |costs: &ProviderCosts| PHASES.iter().any(|phase| disagrees(costs, *phase) || varies(costs, *phase));
    let is_of_provider = |costs: &&ProviderCosts| costs.provider == provider;
    let unreliable =
        profile.classes.iter().filter(|class| class.providers.iter().filter(is_of_provider).any(is_unreliable));
    unreliable.map(|class| class.block.as_str()).collect()
}

fn disagrees(costs: &ProviderCosts, phase: Phase) -> bool {
    fit_error(phase_costs(costs, phase)).is_some_and(|error| error > WORST_FIT)
}

/// The largest relative error of a phase's curve; `None` if no time is long enough to be off by a known part of it.
pub fn fit_error(phase: &PhaseCosts) -> Option<f64> {
    let longest = phase.points.iter().filter_map(|point| point.ms).fold(0.0, f64::max);
    phase.fit.filter(|_| longest > MEASURABLE).map(|fit| fit.worst_relative_error)
}

fn varies(costs: &ProviderCosts, phase: Phase) -> bool {
    let timings = |point: &CostPoint| [point.single, point.run];
    let varies = |timing: TimingStats| timing.median_ms > MEASURABLE && timing.p90_ms > WORST_SPREAD * timing.median_ms;
    phase_costs(costs, phase).points.iter().flat_map(timings).flatten().any(varies)
}
