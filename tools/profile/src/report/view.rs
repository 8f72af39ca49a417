//! A profile by block: finds the times of each block and adds up passes.

use super::number::{count, label};
use super::{BlockWork, ReportInput};
use crate::derive::{PHASES, costs_of, phase_costs};
use crate::settings::unique;
use hpp_partition::{Phase, Work};
use hpp_schema::{BandwidthPath, Profile, ProfiledBlock, Provider};
use std::fmt;

/// Most characters of a name.
pub const NAME: usize = 28;

/// A profile with the times of each block.
pub struct ReportView<'a> {
    pub profile: &'a Profile,
    /// Requested or measured providers, without duplicates.
    pub providers: Vec<Provider>,
    work: Vec<Option<&'a BlockWork>>,
}

/// Blocks with the same graph and different weights.
pub struct BlockGroup {
    /// `layers.0 … layers.27 (28 blocks)`.
    pub name: String,
    pub blocks: Vec<usize>,
}

/// A pass of the model: decoding one token at a context of `tokens`, or a prefill of `tokens` into an empty context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pass {
    pub phase: Phase,
    pub tokens: u64,
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.phase {
            Phase::Decode => write!(f, "one token at {} tokens of context", self.tokens),
            Phase::Prefill => write!(f, "a prompt of {}", count(self.tokens, "token", "tokens")),
        }
    }
}

/// Time of one pass through all blocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct BlockPassTime {
    /// Sum over the blocks with a time, plus one launch, milliseconds.
    pub ms: f64,
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

/// A phase at the start of a sentence.
pub fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Decode => "Decode",
        Phase::Prefill => "Prefill",
    }
}

/// A valid time: finite and not negative.
pub fn sound(ms: f64) -> Option<f64> {
    (ms.is_finite() && ms >= 0.0).then_some(ms)
}

impl<'a> ReportView<'a> {
    /// Finds the times and work of each block.
    pub fn new(input: &ReportInput<'a>) -> ReportView<'a> {
        let profile = input.profile;
        let measured = profile.classes.iter().flat_map(|class| class.providers.iter().map(|costs| costs.provider));
        let providers = unique(profile.settings.providers.iter().copied().chain(measured));
        let work = |block: &ProfiledBlock| input.work.iter().find(|work| work.block == block.label);
        ReportView { profile, providers, work: profile.model.blocks.iter().map(work).collect() }
    }

    /// The blocks, in execution order.
    pub fn blocks(&self) -> &'a [ProfiledBlock] {
        &self.profile.model.blocks
    }

    pub fn labels(&self) -> Vec<&'a str> {
        self.blocks().iter().map(|block| block.label.as_str()).collect()
    }

    /// The values of entries that name blocks, as (position of the block, value). Entries of unknown blocks are left
    /// out.
    pub fn along<'e, T: 'e>(
        &self,
        entries: impl IntoIterator<Item = &'e T>,
        read: impl Fn(&'e T) -> (&'e str, Option<f64>),
    ) -> Vec<(f64, f64)> {
        let place = |entry: &'e T| {
            let (label, value) = read(entry);
            Some((self.blocks().iter().position(|block| block.label == label)? as f64, value?))
        };
        entries.into_iter().filter_map(place).collect()
    }

    /// Milliseconds of a block: measured, or from the fitted curve.
    pub fn ms(&self, block: usize, provider: Provider, Pass { phase, tokens }: Pass) -> Option<f64> {
        let costs = phase_costs(costs_of(self.profile, self.blocks().get(block)?, provider)?, phase);
        let measured = costs.points.iter().find(|point| point.tokens == tokens).and_then(|point| point.ms);
        measured.or_else(|| costs.fit.map(|fit| fit.ms(tokens))).and_then(sound)
    }

    /// The longest measured pass of each phase.
    pub fn passes(&self) -> Vec<Pass> {
        PHASES.into_iter().filter_map(|phase| self.longest_pass(phase)).collect()
    }

    /// The longest measured pass of a phase.
    pub fn longest_pass(&self, phase: Phase) -> Option<Pass> {
        let costs = self.profile.classes.iter().flat_map(|class| &class.providers);
        let points = costs.flat_map(|costs| &phase_costs(costs, phase).points);
        let tokens = points.filter(|point| point.ms.is_some()).map(|point| point.tokens).max()?;
        Some(Pass { phase, tokens })
    }

    /// Work of a block in a pass.
    pub fn work(&self, block: usize, pass: Pass) -> Option<Work> {
        self.facts(block)?.of(pass.phase).iter().find(|(tokens, _)| *tokens == pass.tokens).map(|(_, work)| *work)
    }

    /// Work of a block at all token counts.
    pub fn facts(&self, block: usize) -> Option<&'a BlockWork> {
        self.work.get(block).copied()?
    }

    /// Time of all blocks in sequence, as one partition.
    pub fn pass_time(&self, provider: Provider, pass: Pass) -> BlockPassTime {
        let launches = self.blocks().iter().filter_map(|block| costs_of(self.profile, block, provider)?.launch_ms);
        let mut time = BlockPassTime { ms: launches.filter_map(sound).fold(0.0, f64::max), missing: 0 };
        for block in 0..self.blocks().len() {
            match self.ms(block, provider, pass) {
                Some(ms) => time.ms += ms,
                None => time.missing += 1,
            }
        }
        time
    }

    /// Blocks by class, in order of first occurrence.
    pub fn groups(&self) -> Vec<BlockGroup> {
        let mut classes: Vec<(u32, Vec<usize>)> = Vec::new();
        for (at, block) in self.blocks().iter().enumerate() {
            match classes.iter_mut().find(|(class, _)| *class == block.class) {
                Some((_, blocks)) => blocks.push(at),
                None => classes.push((block.class, vec![at])),
            }
        }
        let name = |blocks: &[usize]| {
            let text = |at: usize, most| label(&self.blocks()[at].label, most);
            match blocks {
                [first, .., last] => {
                    let many = count(blocks.len(), "block", "blocks");
                    format!("{} … {} ({many})", text(*first, NAME / 2), text(*last, NAME / 2))
                }
                [only] => text(*only, NAME),
                [] => String::new(),
            }
        };
        classes.into_iter().map(|(_, blocks)| BlockGroup { name: name(&blocks), blocks }).collect()
    }

    /// Measured limits of a provider's processor.
    pub fn bounds(&self, provider: Provider) -> Option<Bounds> {
        let machine = &self.profile.machine;
        let bounds = match (provider, &machine.rates) {
            (host, Some(rates)) if host.uses_host_memory() => {
                Bounds { gb_per_s: rates.cpu.memory_gb_per_s, gflops: Some(1e3 * rates.cpu.tflops) }
            }
            (host, None) if host.uses_host_memory() => {
                let curve = machine.curves.iter().find(|curve| curve.path == BandwidthPath::RamRead)?;
                let gb_per_s = curve.points.iter().map(|point| point.gb_per_s).reduce(f64::max)?;
                Bounds { gb_per_s, gflops: machine.tflops.map(|tflops| 1e3 * tflops) }
            }
            (_, rates) => {
                let gpu = rates.as_ref()?.gpus.iter().find(|gpu| gpu.provider == provider)?;
                Bounds { gb_per_s: gpu.memory_gb_per_s, gflops: Some(1e3 * gpu.tflops) }
            }
        };
        (bounds.gb_per_s.is_finite() && bounds.gb_per_s > 0.0).then_some(bounds)
    }
}
