//! A profile by block: finds the times of each block and adds up passes.

use super::number::{count, label};
use super::{BlockWork, ReportInput};
use hpp_partition::{Phase, Work};
use hpp_schema::{BandwidthPath, ClassCosts, PhaseCosts, Profile, ProfiledBlock, Provider, ProviderCosts};

/// Both phases, in display order.
pub const PHASES: [Phase; 2] = [Phase::Decode, Phase::Prefill];
/// Most characters of a name.
pub const NAME: usize = 28;

/// A profile with the times of each block.
pub struct View<'a> {
    /// The profile.
    pub profile: &'a Profile,
    /// Requested or measured providers, without duplicates.
    pub providers: Vec<Provider>,
    /// Times of each block.
    costs: Vec<Option<&'a ClassCosts>>,
    /// Work of each block.
    work: Vec<Option<&'a BlockWork>>,
}

/// Blocks with the same graph and different weights.
pub struct Group {
    /// `28 × layers.0 … layers.27`.
    pub name: String,
    /// Indices of its blocks.
    pub blocks: Vec<usize>,
}

/// Time of one pass through all blocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct PassTime {
    /// Sum over the blocks with a time, plus one launch, milliseconds.
    pub ms: f64,
    /// Number of blocks without a time.
    pub missing: usize,
}

/// Limits of a processor.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Memory bandwidth, 1e9 bytes per second.
    pub gb_per_s: f64,
    /// Arithmetic, 1e9 operations per second, if measured.
    pub gflops: Option<f64>,
}

/// The name of a provider.
pub fn provider_name(provider: Provider) -> &'static str {
    provider.name()
}

/// A phase at the start of a sentence.
pub fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Decode => "Decode",
        Phase::Prefill => "Prefill",
    }
}

/// The times of one phase.
pub fn phase_costs(costs: &ProviderCosts, phase: Phase) -> &PhaseCosts {
    match phase {
        Phase::Decode => &costs.decode,
        Phase::Prefill => &costs.prefill,
    }
}

/// A valid time: finite and not negative.
pub fn sound(ms: f64) -> Option<f64> {
    (ms.is_finite() && ms >= 0.0).then_some(ms)
}

impl<'a> View<'a> {
    /// Finds the times and work of each block.
    pub fn new(input: &ReportInput<'a>) -> View<'a> {
        let profile = input.profile;
        let mut providers = Vec::new();
        let measured = profile.classes.iter().flat_map(|class| class.providers.iter().map(|costs| costs.provider));
        for provider in profile.settings.providers.iter().copied().chain(measured) {
            if !providers.contains(&provider) {
                providers.push(provider);
            }
        }
        let costs = |block: &ProfiledBlock| {
            let own = profile.classes.iter().find(|costs| costs.block == block.label);
            own.or_else(|| profile.classes.iter().find(|costs| costs.class == block.class))
        };
        let work = |block: &ProfiledBlock| input.work.iter().find(|work| work.block == block.label);
        let blocks = &profile.model.blocks;
        View { profile, providers, costs: blocks.iter().map(costs).collect(), work: blocks.iter().map(work).collect() }
    }

    /// The blocks, in execution order.
    pub fn blocks(&self) -> &'a [ProfiledBlock] {
        &self.profile.model.blocks
    }

    /// Labels of the blocks.
    pub fn labels(&self) -> Vec<&'a str> {
        self.blocks().iter().map(|block| block.label.as_str()).collect()
    }

    /// Times of a block under a provider.
    pub fn costs(&self, block: usize, provider: Provider) -> Option<&'a ProviderCosts> {
        self.costs.get(block).copied()??.providers.iter().find(|costs| costs.provider == provider)
    }

    /// Milliseconds of a block: measured, or from the fitted curve.
    pub fn ms(&self, block: usize, provider: Provider, phase: Phase, tokens: u64) -> Option<f64> {
        let costs = phase_costs(self.costs(block, provider)?, phase);
        let measured = costs.points.iter().find(|point| point.tokens == tokens).and_then(|point| point.ms);
        measured.or_else(|| costs.fit.map(|fit| fit.ms(tokens))).and_then(sound)
    }

    /// The most tokens with a measured time in a phase.
    pub fn most_tokens(&self, phase: Phase) -> Option<u64> {
        let costs = self.profile.classes.iter().flat_map(|class| &class.providers);
        let points = costs.flat_map(|costs| &phase_costs(costs, phase).points);
        points.filter(|point| point.ms.is_some()).map(|point| point.tokens).max()
    }

    /// Work of a block in a phase at a number of tokens.
    pub fn work(&self, block: usize, phase: Phase, tokens: u64) -> Option<Work> {
        let work = self.work.get(block).copied()??;
        let list = if phase == Phase::Decode { &work.decode } else { &work.prefill };
        list.iter().find(|(at, _)| *at == tokens).map(|(_, work)| *work)
    }

    /// Work of a block at all token counts.
    pub fn facts(&self, block: usize) -> Option<&'a BlockWork> {
        self.work.get(block).copied()?
    }

    /// Time of all blocks in sequence, as one partition.
    pub fn pass(&self, provider: Provider, phase: Phase, tokens: u64) -> PassTime {
        let launch = |block| self.costs(block, provider)?.launch_ms.and_then(sound);
        let launches = (0..self.blocks().len()).filter_map(launch);
        let mut time = PassTime { ms: launches.fold(0.0, f64::max), missing: 0 };
        for block in 0..self.blocks().len() {
            match self.ms(block, provider, phase, tokens) {
                Some(ms) => time.ms += ms,
                None => time.missing += 1,
            }
        }
        time
    }

    /// Blocks by class, in order of first occurrence.
    pub fn groups(&self) -> Vec<Group> {
        let mut classes: Vec<(u32, Vec<usize>)> = Vec::new();
        for (at, block) in self.blocks().iter().enumerate() {
            match classes.iter_mut().find(|(class, _)| *class == block.class) {
                Some((_, blocks)) => blocks.push(at),
                None => classes.push((block.class, vec![at])),
            }
        }
        let name = |blocks: &[usize]| {
            let text = |at: usize| label(&self.blocks()[at].label, NAME / 2);
            match blocks {
                [only] => label(&self.blocks()[*only].label, NAME),
                [first, .., last] => format!("{} … {} ({})", text(*first), text(*last), count_of(blocks)),
                [] => String::new(),
            }
        };
        classes.into_iter().map(|(_, blocks)| Group { name: name(&blocks), blocks }).collect()
    }

    /// Measured limits of a provider's processor.
    pub fn bounds(&self, provider: Provider) -> Option<Bounds> {
        let rates = self.profile.machine.rates.as_ref();
        match (provider, rates) {
            (Provider::Cpu, Some(rates)) => {
                Some(Bounds { gb_per_s: rates.cpu.memory_gb_per_s, gflops: Some(1e3 * rates.cpu.tflops) })
            }
            (Provider::Cpu, None) => {
                let gflops = self.profile.machine.tflops.map(|tflops| 1e3 * tflops);
                Some(Bounds { gb_per_s: self.best_ram_read()?, gflops })
            }
            (_, rates) => {
                let gpu = rates?.gpus.iter().find(|gpu| gpu.provider == provider)?;
                Some(Bounds { gb_per_s: gpu.memory_gb_per_s, gflops: Some(1e3 * gpu.tflops) })
            }
        }
        .filter(|bounds| bounds.gb_per_s.is_finite() && bounds.gb_per_s > 0.0)
    }

    fn best_ram_read(&self) -> Option<f64> {
        let curve = self.profile.machine.curves.iter().find(|curve| curve.path == BandwidthPath::RamRead)?;
        curve.points.iter().map(|point| point.gb_per_s).reduce(f64::max)
    }
}

fn count_of(blocks: &[usize]) -> String {
    count(blocks.len() as u64, "block", "blocks")
}
