//! Derives times of blocks from times of partitions: separates the launch cost of a partition from the time of its blocks.
//!
//! A partition of `m` blocks takes `T_m = launch + block_1 + ... + block_m`, a partition of one `T_1 = launch + block`. So
//! `launch = (sum of the T_1 - T_m) / (m - 1)`, and `block = T_1 - launch`; for equal blocks that is `(T_m - T_1) / (m - 1)`.
//! Pure: the result depends on the timings only, not on their order.

use crate::fit::{Sample, Shape, fit};
use hpp_schema::{ClassCosts, CostPoint, PhaseCosts, Profile, Provider, ProviderCosts};

/// A phase of inference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Decoding one token.
    Decode,
    /// A pass into an empty context.
    Prefill,
}

impl Phase {
    /// Both.
    pub const ALL: [Phase; 2] = [Phase::Decode, Phase::Prefill];

    /// Its costs.
    pub fn of(self, costs: &ProviderCosts) -> &PhaseCosts {
        match self {
            Phase::Decode => &costs.decode,
            Phase::Prefill => &costs.prefill,
        }
    }

    /// Its costs, to be changed.
    pub fn of_mut(self, costs: &mut ProviderCosts) -> &mut PhaseCosts {
        match self {
            Phase::Decode => &mut costs.decode,
            Phase::Prefill => &mut costs.prefill,
        }
    }

    /// `decode`, `prefill`.
    pub fn as_str(self) -> &'static str {
        match self {
            Phase::Decode => "decode",
            Phase::Prefill => "prefill",
        }
    }

    fn shape(self) -> Shape {
        match self {
            Phase::Decode => Shape::Decode,
            Phase::Prefill => Shape::Prefill,
        }
    }
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
        let block = &self.profile.model.blocks[block];
        let own = self.profile.classes.iter().find(|entry| entry.block == block.label);
        let entry = own.or_else(|| self.profile.classes.iter().find(|entry| entry.class == block.class))?;
        let costs = entry.providers.iter().find(|costs| costs.provider == self.provider)?;
        let point = phase.of(costs).points.iter().find(|point| point.tokens == tokens)?;
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
        for phase in Phase::ALL {
            for point in phase.of(costs).points.iter().filter(|_| length > 1 && blocks.len() == length) {
                let singles: Option<f64> = blocks.clone().map(|block| self.ms(block, phase, point.tokens)).sum();
                let (Some(singles), Some(run), Some(single)) = (singles, point.run, point.single) else { continue };
                let ms = (singles - run.median_ms) / (length as f64 - 1.0);
                launched.points.push(Launch { phase, tokens: point.tokens, ms, single_ms: single.median_ms });
            }
        }
        launched
    }
}

/// The launch cost at one point. It may be negative, because caches are warmer for a single block than for a run; the time of a
/// block still follows from the run.
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
        let of = |phase| self.points.iter().filter(move |launch| launch.phase == phase);
        let smallest = of(Phase::Prefill).min_by_key(|launch| launch.tokens);
        median(of(Phase::Decode).map(possible).collect()).or(smallest.map(possible))
    }

    fn at(&self, phase: Phase, tokens: u64) -> Option<f64> {
        self.points.iter().find(|launch| launch.phase == phase && launch.tokens == tokens).map(|launch| launch.ms)
    }
}

/// Sets block times and fits. A block that was measured only alone gets the launch cost of the other classes.
fn finish(costs: &mut ProviderCosts, launched: &LaunchCosts, typical: Option<f64>) {
    let usual = launched.median().or(typical).unwrap_or(0.0);
    for phase in Phase::ALL {
        let phase_costs = phase.of_mut(costs);
        for point in &mut phase_costs.points {
            let Some(single) = point.single else { continue };
            // With noise a run may take less time than one of its blocks.
            let told = launched.at(phase, point.tokens).map(|launch| single.median_ms - launch).filter(|ms| *ms > 0.0);
            point.ms = Some(told.unwrap_or((single.median_ms - usual).max(0.0)));
        }
        let samples: Vec<Sample> = phase_costs.points.iter().filter_map(sample).collect();
        phase_costs.fit = fit(phase.shape(), &samples);
    }
}

fn sample(point: &CostPoint) -> Option<Sample> {
    Some(Sample { tokens: point.tokens, ms: point.ms? })
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
