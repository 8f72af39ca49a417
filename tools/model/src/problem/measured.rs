//! Costs from a profile: each block takes what its class was measured to take.

use super::{Costs, finding, gpu_costs};
use crate::Load;
use hpp_partition::{Block, BlockKind, Cost, Workload};
use hpp_schema::{ClassCosts, Finding, Fit, PhaseCosts, Profile, Provider, ProviderCosts};
use std::collections::{BTreeMap, BTreeSet};

/// Costs as measured, for `gpus` accelerators; everything the profile lacks at once.
pub fn costs(
    profile: &Profile,
    blocks: &[Block],
    load: Load,
    workload: &Workload,
    gpus: usize,
) -> Result<Costs, Vec<Finding>> {
    let carries = blocks.iter().any(|block| block.kv_bytes > 0);
    let mut reader = Reader { profile, blocks, load, workload, carries, findings: BTreeMap::new() };
    reader.same_blocks();
    if load.batch != 1 {
        reader.miss("--batch", format!("the profile measured one sequence in a pass, not {}", load.batch));
    }
    let cpu = reader.costs(Provider::Cpu);
    let cpu_launch_ms = reader.launch_ms(Provider::Cpu, profile.machine.rates.as_ref().map(|m| m.cpu.launch_us));
    let rates = profile.machine.rates.as_ref().map_or(&[][..], |machine| &machine.gpus);
    let mut on_gpus = Vec::new();
    for gpu in rates.iter().take(gpus) {
        let costs = reader.costs(gpu.provider);
        let launch_ms = reader.launch_ms(gpu.provider, Some(gpu.launch_us));
        on_gpus.push(gpu_costs(gpu, costs, launch_ms));
    }
    match reader.findings.is_empty() {
        true => Ok(Costs { cpu, gpus: on_gpus, cpu_launch_ms }),
        false => Err(reader.findings.into_iter().map(|(place, message)| finding(&place, message)).collect()),
    }
}

struct Reader<'a> {
    profile: &'a Profile,
    blocks: &'a [Block],
    load: Load,
    workload: &'a Workload,
    /// Whether states are carried from pass to pass.
    carries: bool,
    /// One for each place, in order.
    findings: BTreeMap<String, String>,
}

impl<'a> Reader<'a> {
    fn miss(&mut self, place: impl Into<String>, message: String) {
        self.findings.entry(place.into()).or_insert(message);
    }

    /// The profile speaks of these blocks and no others.
    fn same_blocks(&mut self) {
        let here: BTreeSet<&str> = self.blocks.iter().map(|block| block.label.as_str()).collect();
        let there: BTreeSet<&str> = self.profile.model.blocks.iter().map(|block| block.label.as_str()).collect();
        for label in here.difference(&there) {
            self.miss(format!("model.blocks.{label}"), "the model has this block, the profile does not".to_owned());
        }
        for label in there.difference(&here) {
            self.miss(format!("model.blocks.{label}"), "the profile has this block, the model does not".to_owned());
        }
    }

    fn costs(&mut self, provider: Provider) -> Vec<Cost> {
        self.blocks.iter().map(|block| self.cost(block, provider).unwrap_or_default()).collect()
    }

    fn cost(&mut self, block: &Block, provider: Provider) -> Option<Cost> {
        let measured = self.measured(block, provider)?;
        if measured.failure.is_some() && provider != Provider::Cpu {
            return Some(self.nowhere());
        }
        let class = self.class(block)?.class;
        let prefill = self.fit(class, provider, "prefill", measured, &measured.prefill);
        // Where nothing is carried from pass to pass, a token costs a pass over all there is so far.
        let decode = match self.carries {
            true => self.fit(class, provider, "decode", measured, &measured.decode),
            false => prefill,
        };
        let (decode, prefill) = (decode?, prefill?);
        let mut past = 0;
        let pass = |tokens: &u64| {
            let ms = pass_ms(prefill, *tokens, past, provider);
            past += tokens;
            ms
        };
        Some(Cost {
            decode_ms: decode.ms(self.load.decode_context()),
            prefill_ms: self.workload.passes.iter().map(pass).collect(),
        })
    }

    /// What a block costs where it failed to run: more than any plan can bear.
    fn nowhere(&self) -> Cost {
        Cost { decode_ms: f64::INFINITY, prefill_ms: vec![f64::INFINITY; self.workload.passes.len()] }
    }

    /// The entry for this very block, else for its class.
    fn class(&self, block: &Block) -> Option<&'a ClassCosts> {
        let own =
            self.profile.classes.iter().find(|entry| self.profile.settings.all_blocks && entry.block == block.label);
        own.or_else(|| {
            let class = self.profile.model.blocks.iter().find(|other| other.label == block.label)?.class;
            self.profile.classes.iter().find(|entry| entry.class == class)
        })
    }

    fn measured(&mut self, block: &Block, provider: Provider) -> Option<&'a ProviderCosts> {
        let Some(entry) = self.class(block) else {
            // A block the profile does not know at all is said once already.
            if let Some(known) = self.profile.model.blocks.iter().find(|other| other.label == block.label) {
                let what = format!("nothing was measured of this class ({} and its like)", known.label);
                self.miss(format!("classes.{}", known.class), what);
            }
            return None;
        };
        let found = entry.providers.iter().find(|costs| costs.provider == provider);
        if found.is_none() {
            let what = format!("{} was not measured under this provider", entry.block);
            self.miss(format!("classes.{}.{}", entry.class, name(provider)), what);
        }
        found
    }

    fn fit(
        &mut self,
        class: u32,
        provider: Provider,
        phase: &str,
        measured: &ProviderCosts,
        costs: &PhaseCosts,
    ) -> Option<Fit> {
        if costs.fit.is_none() {
            let failed =
                measured.failure.as_ref().or_else(|| costs.points.iter().find_map(|point| point.failure.as_ref()));
            let why = failed.map_or("too few measurements".to_owned(), String::clone);
            self.miss(format!("classes.{class}.{}.{phase}", name(provider)), format!("there are no times: {why}"));
        }
        costs.fit
    }

    /// The median over classes of layers, else over all; what the machine's rates say where no class could tell.
    fn launch_ms(&mut self, provider: Provider, rate_us: Option<f64>) -> f64 {
        let layers: BTreeSet<u32> = self
            .blocks
            .iter()
            .filter(|b| matches!(b.kind, BlockKind::Layer(_)))
            .filter_map(|b| self.class(b))
            .map(|c| c.class)
            .collect();
        let of = |layers_only: bool| {
            let entries = self.profile.classes.iter().filter(|entry| !layers_only || layers.contains(&entry.class));
            let costs = entries.flat_map(|entry| &entry.providers).filter(|costs| costs.provider == provider);
            median(costs.filter_map(|costs| costs.launch_ms).collect())
        };
        let launch = of(true).or_else(|| of(false)).or(rate_us.map(|us| us / 1e3));
        if launch.is_none() {
            let what = "the cost of starting a partition could not be told from any class".to_owned();
            self.miss(format!("classes.launch_ms.{}", name(provider)), what);
        }
        launch.unwrap_or(0.0)
    }
}

/// A pass of `tokens` after `past` others. The fit speaks of an empty context, where attention's quadratic term covers
/// `tokens` x `tokens` scores. The CPU and WebGPU kernels compute the whole rectangle of `tokens` x `(past + tokens)`
/// scores and mask it afterwards, so the past adds `tokens * past` of the same; CUDA's flash attention leaves out what is
/// masked, half of the square and nothing of the past, so the past weighs twice as much.
fn pass_ms(fit: Fit, tokens: u64, past: u64, provider: Provider) -> f64 {
    let weight = if provider == Provider::Cuda { 2.0 } else { 1.0 };
    fit.ms(tokens) + fit.quadratic_ms * weight * tokens as f64 * past as f64
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 0 => Some(f64::midpoint(values[middle - 1], values[middle])),
        _ => Some(values[middle]),
    }
}

fn name(provider: Provider) -> &'static str {
    match provider {
        Provider::Cuda => "cuda",
        Provider::Webgpu => "webgpu",
        Provider::Cpu => "cpu",
    }
}
