//! Costs from a profile: each block has the measured times of its class. A profile has whole layers: where the experts of a layer are a
//! block of their own, both halves share its times in proportion to their work.

use super::roofline::Roofline;
use super::{DeviceCosts, gpu_costs};
use crate::Scenario;
use hpp_partition::{BlockRole, BlockSpec, Cost, SHORT_PASS_TOKENS, Work, Workload};
use hpp_schema::{ClassCosts, Finding, Fit, PhaseCosts, Profile, Provider, ProviderCosts};
use std::collections::{BTreeMap, BTreeSet};

/// Measured costs with `gpus` GPUs; reports everything that the profile lacks at once. If it lacks only measurements that
/// `hpp-profile --resume` makes, these are one finding.
pub fn costs(
    profile: &Profile,
    blocks: &[BlockSpec],
    scenario: Scenario,
    workload: &Workload,
    gpus: usize,
) -> Result<DeviceCosts, Vec<Finding>> {
    let has_states = blocks.iter().any(|block| block.kv_bytes > 0);
    let mut reader =
        ProfileReader { profile, blocks, scenario, workload, has_states, findings: BTreeMap::new(), unmeasured: 0 };
    reader.check_blocks();
    if scenario.batch != 1 {
        reader.report("--batch", format!("the profile measured one sequence in a pass, not {}", scenario.batch));
    }
    let cpu = reader.costs(Provider::CPU);
    let cpu_launch_ms = reader.launch_ms(Provider::CPU, profile.machine.rates.as_ref().map(|m| m.cpu.launch_us));
    let rates = profile.machine.rates.as_ref().map_or(&[][..], |machine| &machine.gpus);
    let mut on_gpus = Vec::new();
    for gpu in rates.iter().take(gpus) {
        let costs = reader.costs(gpu.provider);
        let launch_ms = reader.launch_ms(gpu.provider, Some(gpu.launch_us));
        on_gpus.push(gpu_costs(gpu, costs, launch_ms));
    }
    match reader.findings.is_empty() {
        true => Ok(DeviceCosts { cpu, gpus: on_gpus, cpu_launch_ms }),
        false => Err(reader.into_findings()),
    }
}

/// The times of all blocks under one provider.
#[derive(Clone, Debug)]
pub struct ProviderTimes {
    /// The provider.
    pub provider: Provider,
    /// The launch of a partition, milliseconds.
    pub launch_ms: f64,
    /// In the order of blocks; infinite where the provider failed or was not measured.
    pub blocks: Vec<Cost>,
}

impl ProviderTimes {
    /// The times that a profile has of a provider; `None` if it was not measured.
    pub fn of(
        profile: &Profile,
        provider: Provider,
        blocks: &[BlockSpec],
        scenario: Scenario,
        workload: &Workload,
    ) -> Option<ProviderTimes> {
        if !profile.settings.providers.contains(&provider) {
            return None;
        }
        let has_states = blocks.iter().any(|block| block.kv_bytes > 0);
        let mut reader =
            ProfileReader { profile, blocks, scenario, workload, has_states, findings: BTreeMap::new(), unmeasured: 0 };
        let rate = profile.machine.rates.as_ref().map(|machine| machine.cpu.launch_us);
        let launch_ms = reader.launch_ms(provider, rate);
        let costs =
            blocks.iter().map(|block| reader.cost(block, provider).unwrap_or_else(|| reader.infinite())).collect();
        Some(ProviderTimes { provider, launch_ms, blocks: costs })
    }
}

/// The block of the profile that has the times of this one.
fn measured_label(block: &BlockSpec) -> &str {
    // Only blocks of experts that were divided from their layer are kept on the host.
    block.label.strip_suffix(".experts").filter(|_| block.kept_on_host).unwrap_or(&block.label)
}

struct ProfileReader<'a> {
    profile: &'a Profile,
    blocks: &'a [BlockSpec],
    scenario: Scenario,
    workload: &'a Workload,
    /// Whether the model carries states from pass to pass.
    has_states: bool,
    /// One message for each place in the profile.
    findings: BTreeMap<String, String>,
    /// The number of findings about measurements that were not made yet, as when a profile was interrupted.
    unmeasured: usize,
}

impl<'a> ProfileReader<'a> {
    fn report(&mut self, place: impl Into<String>, message: String) {
        self.findings.entry(place.into()).or_insert(message);
    }

    /// Reports a measurement that was not made yet.
    fn report_unmeasured(&mut self, place: impl Into<String>, message: String) {
        let before = self.findings.len();
        self.report(place, message);
        self.unmeasured += self.findings.len() - before;
    }

    fn into_findings(self) -> Vec<Finding> {
        if self.unmeasured == self.findings.len() {
            let first = self.findings.keys().next().cloned().unwrap_or_default();
            let what = format!(
                "the profile is not complete, measurements that are missing: {}, the first at {first}: complete it with hpp-profile --resume, \
                 with the same model and --out",
                self.unmeasured
            );
            return vec![Finding::error("classes", what)];
        }
        self.findings.into_iter().map(|(place, message)| Finding::error(place, message)).collect()
    }

    /// Reports blocks that only the model or only the profile has.
    fn check_blocks(&mut self) {
        let in_model: BTreeSet<&str> = self.blocks.iter().map(measured_label).collect();
        let in_profile: BTreeSet<&str> = self.profile.model.blocks.iter().map(|block| block.label.as_str()).collect();
        for label in in_model.difference(&in_profile) {
            self.report(format!("model.blocks.{label}"), "the model has this block, the profile does not".to_owned());
        }
        for label in in_profile.difference(&in_model) {
            self.report(format!("model.blocks.{label}"), "the profile has this block, the model does not".to_owned());
        }
    }

    fn costs(&mut self, provider: Provider) -> Vec<Cost> {
        self.blocks.iter().map(|block| self.cost(block, provider).unwrap_or_default()).collect()
    }

    fn cost(&mut self, block: &BlockSpec, provider: Provider) -> Option<Cost> {
        let measured = self.measured(block, provider)?;
        if measured.failure.is_some() && provider != Provider::CPU {
            return Some(self.infinite());
        }
        let class = self.class(block)?.class;
        let prefill = self.fit(class, provider, "prefill", measured, &measured.prefill);
        // Without states each token recomputes the whole sequence.
        let decode = match self.has_states {
            true => self.fit(class, provider, "decode", measured, &measured.decode),
            false => prefill,
        };
        let (decode, prefill) = (decode?, prefill?);
        let [of_decode, of_prefill] = [|block: &BlockSpec| block.decode, |block: &BlockSpec| block.prefill]
            .map(|work| self.share(block, provider, work));
        let mut past = 0;
        let pass = |tokens: &u64| {
            let ms = of_prefill * pass_ms(prefill, *tokens, past, provider);
            past += tokens;
            ms
        };
        let context = self.scenario.decode_context();
        let short_pass = |tokens: &u64| of_decode * short_pass_ms(&measured.prefill, prefill, decode, *tokens, context);
        Some(Cost {
            decode_ms: of_decode * decode.ms(context),
            // Without states there is no pass over new tokens only.
            short_pass_ms: if self.has_states { SHORT_PASS_TOKENS.iter().map(short_pass).collect() } else { vec![] },
            prefill_ms: self.workload.passes.iter().map(pass).collect(),
        })
    }

    /// The share of a measured block's time that this block takes: 1, or for a half of a layer its share of the layer's work, at the rates
    /// of the machine.
    fn share(&self, block: &BlockSpec, provider: Provider, work: fn(&BlockSpec) -> Work) -> f64 {
        let label = measured_label(block);
        let parts: Vec<&BlockSpec> = self.blocks.iter().filter(|other| measured_label(other) == label).collect();
        let roofline = Roofline::of(self.profile.machine.rates.as_ref(), provider);
        let all: f64 = parts.iter().map(|part| roofline.ms(work(part))).sum();
        match all > 0.0 && parts.len() > 1 {
            true => roofline.ms(work(block)) / all,
            false => 1.0 / parts.len() as f64,
        }
    }

    /// The cost of a block at a place where it failed to run: no plan uses it.
    fn infinite(&self) -> Cost {
        let passes = |number: usize| vec![f64::INFINITY; number];
        Cost {
            decode_ms: f64::INFINITY,
            short_pass_ms: passes(SHORT_PASS_TOKENS.len()),
            prefill_ms: passes(self.workload.passes.len()),
        }
    }

    /// The entry of this block, else of its class.
    fn class(&self, block: &BlockSpec) -> Option<&'a ClassCosts> {
        let own = self
            .profile
            .classes
            .iter()
            .find(|entry| self.profile.settings.all_blocks && entry.block == measured_label(block));
        own.or_else(|| {
            let label = measured_label(block);
            let class = self.profile.model.blocks.iter().find(|other| other.label == label)?.class;
            self.profile.classes.iter().find(|entry| entry.class == class)
        })
    }

    fn measured(&mut self, block: &BlockSpec, provider: Provider) -> Option<&'a ProviderCosts> {
        let Some(entry) = self.class(block) else {
            // `check_blocks` reports blocks that the profile lacks entirely.
            let label = measured_label(block);
            if let Some(known) = self.profile.model.blocks.iter().find(|other| other.label == label) {
                let what = format!("this class was not measured ({} and identical blocks)", known.label);
                self.report_unmeasured(format!("classes.{}", known.class), what);
            }
            return None;
        };
        let found = entry.providers.iter().find(|costs| costs.provider == provider);
        if found.is_none() {
            let (place, what) = (
                format!("classes.{}.{}", entry.class, provider.id()),
                format!("{} was not measured under this provider", entry.block),
            );
            match self.profile.settings.providers.contains(&provider) {
                true => self.report_unmeasured(place, what),
                false => self.report(place, what),
            }
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
            let place = format!("classes.{class}.{}.{phase}", provider.id());
            match failed {
                Some(why) => self.report(place, format!("times are missing: {why}")),
                None => self.report_unmeasured(place, "times are missing: too few measurements".to_owned()),
            }
        }
        costs.fit
    }

    /// Launch time: the median over classes of layers, else over all classes, else the machine's rate.
    fn launch_ms(&mut self, provider: Provider, rate_us: Option<f64>) -> f64 {
        let layers: BTreeSet<u32> = self
            .blocks
            .iter()
            .filter(|b| matches!(b.kind, BlockRole::Layer(_)))
            .filter_map(|b| self.class(b))
            .map(|c| c.class)
            .collect();
        let median_launch = |layers_only: bool| {
            let entries = self.profile.classes.iter().filter(|entry| !layers_only || layers.contains(&entry.class));
            let costs = entries.flat_map(|entry| &entry.providers).filter(|costs| costs.provider == provider);
            median(costs.filter_map(|costs| costs.launch_ms).collect())
        };
        let launch = median_launch(true).or_else(|| median_launch(false)).or(rate_us.map(|us| us / 1e3));
        if launch.is_none() {
            let what = "no class has the launch time of a partition".to_owned();
            self.report_unmeasured(format!("classes.launch_ms.{}", provider.id()), what);
        }
        launch.unwrap_or(0.0)
    }
}

/// Time of a pass of `tokens` after `past` tokens, milliseconds. The fit was measured with empty states, where the
/// quadratic term covers `tokens` x `tokens` attention scores. CPU and WebGPU kernels compute all `tokens` x `(past +
/// tokens)` scores and then mask, so the past adds `tokens * past` scores of the same cost. CUDA's flash attention
/// skips masked scores, which are half of the square and none of the past, so each score of the past costs twice as
/// much relative to the fit.
fn pass_ms(fit: Fit, tokens: u64, past: u64, provider: Provider) -> f64 {
    let weight = if provider == Provider::CUDA { 2.0 } else { 1.0 };
    fit.ms(tokens) + fit.quadratic_ms * weight * tokens as f64 * past as f64
}

/// Time of a pass of a few `tokens` after `context` tokens, milliseconds: interpolated between the measured passes of the next fewer and
/// the next more tokens, because the curve is fitted to longer passes; beyond the longest measured pass, of the curve. Each token reads
/// the state as a decoded one does.
fn short_pass_ms(prefill: &PhaseCosts, fit: Fit, decode: Fit, tokens: u64, context: u64) -> f64 {
    let measured = prefill.points.iter().filter_map(|point| Some((point.tokens, point.ms?)));
    let points: Vec<(u64, f64)> =
        std::iter::once((1, decode.constant_ms)).chain(measured.filter(|(t, _)| *t > 1)).collect();
    let after = points.partition_point(|(measured, _)| *measured < tokens);
    let without_state = match (after.checked_sub(1).map(|before| points[before]), points.get(after)) {
        (_, Some((measured, ms))) if *measured == tokens => *ms,
        (Some((fewer, fewer_ms)), Some((more, more_ms))) => {
            fewer_ms + (more_ms - fewer_ms) * (tokens - fewer) as f64 / (more - fewer) as f64
        }
        _ => fit.ms(tokens),
    };
    without_state + decode.linear_ms * context as f64 * tokens as f64
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
