//! Finds times of a profile that contradict each other or vary from run to run.

use hpp_schema::{CostPoint, PhaseCosts, Profile, Provider, ProviderCosts, TimingStats};

/// Largest relative error of a fitted curve at which the curve still predicts the times between its points.
const WORST_FIT: f64 = 0.25;
/// Largest ratio of the 90th percentile to the median of undisturbed runs.
const WORST_SPREAD: f64 = 3.0;
/// Shorter times, in milliseconds, are within the error of the clock.
const MEASURABLE: f64 = 0.05;

/// For each provider of a profile with unreliable times a sentence that names the blocks and does not end with a full stop.
pub fn unreliable_times(profile: &Profile) -> Vec<String> {
    let advice = match profile.settings.quick {
        true => "--quick makes few runs: profile without it, on an idle machine, before planning with them",
        false => "was the machine busy? Profile again on an idle machine before planning with them",
    };
    let sentence = |provider: &Provider| {
        let blocks = unreliable_blocks(profile, *provider);
        let of = format!("the times of {} on {}", blocks.join(", "), provider.id());
        (!blocks.is_empty()).then(|| format!("{of} vary from run to run or contradict each other; {advice}"))
    };
    profile.settings.providers.iter().filter_map(sentence).collect()
}

/// Labels of the measured blocks whose times on this provider are unreliable.
pub fn unreliable_blocks(profile: &Profile, provider: Provider) -> Vec<&str> {
    let is_unreliable =
        |costs: &ProviderCosts| [&costs.decode, &costs.prefill].iter().any(|phase| disagrees(phase) || varies(phase));
    let is_of_provider = |costs: &&ProviderCosts| costs.provider == provider;
    let unreliable =
        profile.classes.iter().filter(|class| class.providers.iter().filter(is_of_provider).any(is_unreliable));
    unreliable.map(|class| class.block.as_str()).collect()
}

/// The largest relative error of a phase's curve; `None` if all times are too short to measure a relative error.
pub fn fit_error(phase: &PhaseCosts) -> Option<f64> {
    let longest = phase.points.iter().filter_map(|point| point.ms).fold(0.0, f64::max);
    phase.fit.filter(|_| longest > MEASURABLE).map(|fit| fit.worst_relative_error)
}

fn disagrees(phase: &PhaseCosts) -> bool {
    fit_error(phase).is_some_and(|error| error > WORST_FIT)
}

fn varies(phase: &PhaseCosts) -> bool {
    let timings = |point: &CostPoint| [point.single, point.run];
    let varies = |timing: TimingStats| timing.median_ms > MEASURABLE && timing.p90_ms > WORST_SPREAD * timing.median_ms;
    phase.points.iter().flat_map(timings).flatten().any(varies)
}
