//! From runs of partitions to costs of blocks: what starting a partition takes is told from what a block takes.
//!
//! A partition of `m` blocks takes `T_m = launch + block_1 + ... + block_m`, a partition of one `T_1 = launch + block`. So
//! `launch = (sum of the T_1 - T_m) / (m - 1)`, and `block = T_1 - launch`; for equal blocks that is `(T_m - T_1) / (m - 1)`.
//! Pure: the same timings give the same costs, however and when they were measured.

use crate::fit::{Sample, Shape, fit};
use hpp_schema::{ClassCosts, CostPoint, PhaseCosts, Profile, Provider, ProviderCosts};

/// One phase of a block's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// One more token.
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

/// Works out launches, times and fits from the timings that are there.
pub fn derive(profile: &mut Profile) {
    for provider in profile.settings.providers.clone() {
        let singles = Singles { profile, provider };
        let found: Vec<Launched> = profile.classes.iter().map(|class| singles.launches(class)).collect();
        let typical = median(found.iter().filter_map(Launched::median).collect());
        for (class, launched) in profile.classes.iter_mut().zip(&found) {
            if let Some(costs) = class.providers.iter_mut().find(|costs| costs.provider == provider) {
                costs.launch_ms = launched.median();
                finish(costs, launched, typical);
            }
        }
    }
}

/// Medians of single blocks under one provider, found by label.
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

    /// What starting a partition took at each point where a run of blocks was measured.
    fn launches(&self, class: &ClassCosts) -> Launched {
        let mut launched = Launched::default();
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

/// What starting a partition took at one point. A block by itself is found a little warmer than in a run, so that this may come
/// out below zero; what a block takes is told from the run all the same.
struct Launch {
    phase: Phase,
    tokens: u64,
    ms: f64,
    single_ms: f64,
}

/// What starting a partition took, by point.
#[derive(Default)]
struct Launched {
    points: Vec<Launch>,
}

impl Launched {
    /// The median over decoded tokens; where there are none, what the smallest pass says. No launch takes less than no time or
    /// more than a partition.
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

/// Times of the block and the fits. A block that was measured only alone pays the launch its neighbours show.
fn finish(costs: &mut ProviderCosts, launched: &Launched, typical: Option<f64>) {
    let usual = launched.median().or(typical).unwrap_or(0.0);
    for phase in Phase::ALL {
        let phase_costs = phase.of_mut(costs);
        for point in &mut phase_costs.points {
            let Some(single) = point.single else { continue };
            // Noise may say that a run takes less time than one of its blocks.
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

/// The middle of some numbers.
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
