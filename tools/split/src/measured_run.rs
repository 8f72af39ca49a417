//! `--from-telemetry`: corrects the costs of the planning problem by the times that a run of an earlier plan took.

use crate::input_errors::{InputError, InputErrors};
use hpp_model::{Analysis, CostSource, Scenario, problem};
use hpp_partition::{Budget, Contention, Cost, DeviceId, MOST_SEQUENCES, Phase, Problem};
use hpp_schema::{Finding, Provider, RunTelemetry, StageTelemetry};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The times of a prompt more than this many times as long as the measured one are doubtful: kernels that are bound by reading weights take
/// about the same time for a few tokens, and for more tokens a time that grows with their number.
const SHORTER: u64 = 8;

/// Upper limit of the contention that a run can show. If computing took even longer while the disk was read, the processor is
/// slower too.
const MOST_CONTENTION: f64 = 3.0;

/// Intervals of the curve of hit rates of an expert cache.
const HIT_RATE_STEPS: usize = 32;
/// The hit rates that one run can show, 0 to 1.
const HIT_RATES: [f64; 2] = [0.01, 0.99];
/// Limits of the exponent of that curve: a cache of half of the experts hits 99.7 and 6 %.
const HIT_RATE_EXPONENTS: [f64; 2] = [0.005, 4.0];

/// Size limit of the file, bytes.
const MAX_BYTES: u64 = 64 << 20;
/// The end of the label of a layer's experts where they are a block of their own.
const OF_EXPERTS: &str = ".experts";
const HINT: &str = "give the output of `hpp-exec bench PLAN --json > run.json` for a plan of this model";

/// A run of an earlier plan of the model.
#[derive(Clone, Debug)]
pub struct MeasuredRun {
    /// The name of its file.
    pub file: String,
    run: RunTelemetry,
}

/// What the run says about each device and phase that it used, about the disk and about the rest of a token.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Corrections {
    devices: BTreeMap<(DeviceId, Phase), DeviceCorrection>,
    /// The disk's measured rate, bytes per millisecond.
    disk: Option<f64>,
    /// How many times as long the host computes while the disk is read; 1 if the run does not tell.
    contention: f64,
    /// The measured time of a token outside of partitions, milliseconds.
    overhead_ms: Option<f64>,
    /// How often experts were in memory; `None` if the run used none by demand, or a profile's corpus says it already.
    experts: Option<ExpertHits>,
}

/// How often a token found an expert in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
struct ExpertHits {
    /// The share of the experts that a token used that were in memory, 0 to 1.
    hit_rate: f64,
    /// The share of all experts that memory holds, 0 to 1.
    cached_share: f64,
    /// The share of all experts that a token uses, 0 to 1.
    used_share: f64,
}

impl ExpertHits {
    /// Hit rates of caches for 0 to all experts in equal steps, for 1, 2, 4, .. sequences. The curve of one sequence is `share^x`, through the measured
    /// point. Several sequences share the cache, so each counts its part of it, but at least what equally likely experts would hit. The planner
    /// multiplies the rates by `1 - used_share` (`ExpertMemory::read_bytes`), so measured ones are divided by it here.
    fn curves(&self) -> Vec<Vec<f64>> {
        let [least, most] = HIT_RATES;
        let exponent = self.hit_rate.clamp(least, most).ln() / self.cached_share.ln();
        let [least, most] = HIT_RATE_EXPONENTS;
        let exponent = exponent.clamp(least, most);
        let of_one = |share: f64| share.powf(exponent) / (1.0 - self.used_share);
        let rate = |sequences: u64, step: usize| {
            let share = step as f64 / HIT_RATE_STEPS as f64;
            of_one(share / sequences as f64).max(share).min(of_one(share))
        };
        let curve = |doublings: u32| (0..=HIT_RATE_STEPS).map(|step| rate(1 << doublings, step)).collect();
        (0..=MOST_SEQUENCES.ilog2()).map(curve).collect()
    }
}

/// Measured over predicted times of one device in one phase.
#[derive(Clone, Copy, Debug, PartialEq)]
struct DeviceCorrection {
    /// For its partitions, launches included.
    partitions: f64,
    /// For its blocks: with this factor, blocks and predicted launches together take the measured time.
    blocks: f64,
}

/// What the blocks on one device took in one phase, milliseconds.
#[derive(Default)]
struct DeviceTimes {
    measured: f64,
    blocks: BTreeSet<usize>,
    launches: f64,
    /// Passes in which they were measured.
    passes: f64,
}

impl DeviceTimes {
    /// Predicted times of the blocks.
    fn predicted(&self, problem: &Problem, device: DeviceId, phase: Phase) -> f64 {
        let costs = costs(problem, device);
        let block = |at: &usize| match phase {
            Phase::Decode => costs[*at].decode_ms,
            Phase::Prefill => costs[*at].prefill_ms.iter().sum(),
        };
        self.blocks.iter().map(block).sum()
    }

    /// Measured over predicted times. `slowed` is the part of the measured time that reads from disk at the same time
    /// added.
    fn correction(&self, predicted: f64, slowed: f64) -> Option<DeviceCorrection> {
        let partitions = self.measured / (predicted + self.launches);
        let of_blocks = (self.measured - slowed - self.launches) / predicted;
        let blocks = if of_blocks > 0.0 { of_blocks } else { partitions };
        let is_known = [partitions, blocks].iter().all(|factor| factor.is_finite() && *factor > 0.0);
        is_known.then_some(DeviceCorrection { partitions, blocks })
    }
}

impl MeasuredRun {
    /// Reads the output of a benchmark.
    pub fn read(path: &Path) -> Result<Self, InputError> {
        let text = hpp_io::read_text(path, MAX_BYTES)
            .map_err(|why| InputError { message: format!("cannot read {}: {why}", path.display()), hint: None })?;
        let file = path.display();
        let run = RunTelemetry::from_json(&text)
            .map_err(|error| InputError::new(format!("{file} is not the output of a benchmark: {error}"), HINT))?;
        if run.unsplit {
            return Err(InputError::new(format!("{file} is a run of the unsplit model (--unsplit)"), HINT));
        }
        let times = run.stages.iter().flat_map(|stage| [stage.prefill_ms, decode_ms(stage)]);
        let reads = run.token.and_then(|token| token.disk).map(|disk| disk.busy_ms);
        let others = run.disk.map(|disk| disk.gb_per_second).into_iter().chain(run.token.map(|token| token.rest_ms));
        let others = others.chain(reads);
        if !times.chain(others).all(|value| value.is_finite() && value >= 0.0) {
            return Err(InputError::new(format!("{file} has a negative or infinite time"), HINT));
        }
        let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        Ok(MeasuredRun { file, run })
    }

    /// Measured over predicted times. The predictions are for the blocks and lengths of the run, with the costs from
    /// `source`.
    pub fn corrections(
        &self,
        analysis: &Analysis,
        scenario: Scenario,
        source: CostSource<'_>,
        budget: &Budget,
    ) -> Result<Corrections, InputErrors> {
        let RunTelemetry { model, prompt_tokens, new_tokens, .. } = &self.run;
        let mut errors = InputErrors::default();
        errors.require(
            *model == analysis.name,
            format!("{} is a run of {model}, and this is {}", self.file, analysis.name),
            HINT,
        );
        errors.into_result()?;
        let context = scenario.context.max(prompt_tokens.saturating_add(*new_tokens));
        let of_run = Scenario { prompt: *prompt_tokens, new_tokens: *new_tokens, context, ..scenario };
        let in_file = |finding: &Finding| InputError::in_file(&self.file, finding);
        let predicted = problem(analysis, of_run, source, budget.clone())
            .map_err(|findings| InputErrors(findings.iter().map(in_file).collect()))?;
        let blocks = &analysis.segmentation.blocks;
        self.refuse_divided_among_devices(analysis)?;
        // A plan may divide layers before their experts where another does not.
        let is_in_run =
            |wanted: &str| self.run.stages.iter().flat_map(|stage| &stage.blocks).any(|label| label == wanted);
        let blocks_of = |label: &str| -> Vec<usize> {
            let find = |wanted: &str| blocks.iter().position(|block| block.label == wanted);
            let layer = label.strip_suffix(OF_EXPERTS).unwrap_or(label);
            let experts = format!("{layer}{OF_EXPERTS}");
            let experts = find(&experts).filter(|_| !is_in_run(&experts));
            find(label).or_else(|| find(layer)).into_iter().chain(experts).collect()
        };
        let mut times: BTreeMap<(DeviceId, Phase), DeviceTimes> = BTreeMap::new();
        for stage in &self.run.stages {
            let Some(device) = used_device(stage).filter(|device| has(&predicted, *device)) else { continue };
            for (phase, measured) in [(Phase::Decode, decode_ms(stage)), (Phase::Prefill, stage.prefill_ms)] {
                if measured == 0.0 {
                    continue;
                }
                let passes = if phase == Phase::Decode { 1 } else { predicted.load.passes.len() };
                let of_device = times.entry((device, phase)).or_default();
                of_device.measured += measured;
                of_device.launches += launch_ms(&predicted, device) * passes as f64;
                of_device.passes = passes as f64;
                for label in &stage.blocks {
                    let found = blocks_of(label);
                    if found.is_empty() {
                        let message = format!("{} has a block {label}, which this model lacks", self.file);
                        return Err(InputErrors(vec![InputError::new(message, HINT)]));
                    }
                    of_device.blocks.extend(found);
                }
            }
        }
        let reads_ms = self.run.token.and_then(|token| token.disk).map_or(0.0, |disk| disk.busy_ms);
        let decode = times.get(&(DeviceId::Cpu, Phase::Decode));
        let contention = decode.map_or(1.0, |times| {
            let expected = times.predicted(&predicted, DeviceId::Cpu, Phase::Decode) + times.launches;
            contention(times.measured, expected, reads_ms)
        });
        let correction = |((device, phase), times): ((DeviceId, Phase), DeviceTimes)| {
            let slowed = match device {
                DeviceId::Cpu => slowed_by_reads(contention, times.measured, reads_ms * times.passes),
                DeviceId::Gpu(_) => 0.0,
            };
            let correction = times.correction(times.predicted(&predicted, device, phase), slowed)?;
            Some(((device, phase), correction))
        };
        let disk = self.run.disk.map(|disk| disk.gb_per_second * 1e6).filter(|rate| *rate > 0.0);
        let overhead_ms = self.run.token.map(|token| token.rest_ms);
        let experts = self.expert_hits(&predicted);
        let devices = times.into_iter().filter_map(correction).collect();
        Ok(Corrections { devices, disk, contention, overhead_ms, experts })
    }

    /// How often a token found an expert in memory, if a profile's corpus does not say how often that is.
    fn expert_hits(&self, predicted: &Problem) -> Option<ExpertHits> {
        let (used, memory) = (self.run.token?.experts?, self.run.disk?.experts?);
        let experts = predicted.blocks.iter().find_map(|block| block.experts)?;
        let hits = ExpertHits {
            hit_rate: used.in_memory / used.used,
            cached_share: memory.cache_bytes as f64 / memory.all_bytes as f64,
            used_share: experts.active as f64 / experts.count as f64,
        };
        let is_known = (0.0..=1.0).contains(&hits.hit_rate) && hits.cached_share > 0.0 && hits.cached_share < 1.0;
        Some(hits).filter(|hits| is_known && hits.used_share < 1.0 && predicted.expert_hits.is_empty())
    }

    /// Refuses a run in which a layer and its experts computed on different devices, if the layer is one block here: neither time is the layer's.
    fn refuse_divided_among_devices(&self, analysis: &Analysis) -> Result<(), InputErrors> {
        let is_block = |wanted: &str| analysis.segmentation.blocks.iter().any(|block| block.label == wanted);
        let device_of = |wanted: &str| {
            let stage = self.run.stages.iter().find(|stage| stage.blocks.iter().any(|label| label == wanted));
            stage.map(used_device)
        };
        let labels = self.run.stages.iter().flat_map(|stage| &stage.blocks);
        let mut experts = labels.filter(|label| label.ends_with(OF_EXPERTS) && !is_block(label));
        let divided = experts.find(|label| {
            let layer = label.strip_suffix(OF_EXPERTS).unwrap_or(label);
            device_of(layer).is_some_and(|device| Some(device) != device_of(label))
        });
        let Some(divided) = divided else { return Ok(()) };
        let message = format!("in {} another device than that of its layer computed {divided}", self.file);
        Err(InputErrors(vec![InputError::new(
            message,
            "plan with the same --cpu-moe or --n-cpu-moe as the plan of that run",
        )]))
    }

    /// What a person should know about the run. `prompt`: tokens of the prompt that is planned for.
    pub fn notes(&self, corrections: &Corrections, prompt: u64) -> Vec<String> {
        let mut notes = Vec::new();
        if let Some(percent) = self.run.others_cpu_percent {
            notes.push(format!("{}: other programs took {percent} % of the machine's processors", self.file));
        }
        let measured = self.run.prompt_tokens;
        if measured.saturating_mul(SHORTER) < prompt {
            notes.push(format!(
                "{}: a prompt of {measured} tokens says little about one of {prompt}, the prompt planned for (--prompt-tokens); measure \
                 with hpp-exec bench PLAN --json --prompt-tokens {prompt}",
                self.file
            ));
        }
        let mut parts: Vec<String> = corrections.devices.iter().map(words).collect();
        if corrections.contention > 1.0 {
            parts.push(format!(
                "reading from disk makes computing on cpu take up to {:.2} times as long",
                corrections.contention
            ));
        }
        parts.extend(corrections.disk.map(|rate| format!("the disk delivers {:.2} GB/s", rate / 1e6)));
        parts.extend(corrections.experts.map(|experts| {
            format!(
                "{:.0} % of the experts that a token uses are in memory, which holds {:.0} % of all",
                100.0 * experts.hit_rate,
                100.0 * experts.cached_share
            )
        }));
        notes.push(match parts.is_empty() {
            true => format!("{} measured no device of this plan", self.file),
            false => format!("{}: {}", self.file, parts.join(", ")),
        });
        notes
    }
}

impl Corrections {
    /// Whether the run says how often experts are in memory.
    pub fn has_expert_hits(&self) -> bool {
        self.experts.is_some()
    }

    /// The same for a plan whose passes read all experts.
    pub fn without_expert_hits(self) -> Self {
        Corrections { experts: None, ..self }
    }

    /// Multiplies the times of the blocks on every device that the run used, and takes over the disk's rate, the time of the rest, and how often
    /// experts are in memory.
    pub fn apply(&self, problem: &mut Problem) {
        for ((device, phase), DeviceCorrection { blocks: factor, .. }) in &self.devices {
            let costs = match device {
                DeviceId::Cpu => &mut problem.cpu,
                DeviceId::Gpu(gpu) => &mut problem.gpus[*gpu].blocks,
            };
            for cost in costs {
                match phase {
                    Phase::Decode => {
                        cost.decode_ms *= factor;
                        cost.short_pass_ms.iter_mut().for_each(|ms| *ms *= factor);
                    }
                    Phase::Prefill => cost.prefill_ms.iter_mut().for_each(|ms| *ms *= factor),
                }
            }
        }
        problem.pass_overhead_ms = self.overhead_ms.unwrap_or(problem.pass_overhead_ms);
        if let Some(experts) = &self.experts {
            problem.expert_hits = experts.curves();
        }
        if let Some(disk) = self.disk.filter(|_| problem.disk_bytes_per_ms.is_some()) {
            // The rate is that of reading while the host computes.
            (problem.disk_bytes_per_ms, problem.disk_contention) = (Some(disk), Contention::new(self.contention, 1.0));
        }
    }
}

/// How many times as long the host computes while the disk is read, if that is why a token's partitions took longer than expected. That
/// counts as contention and not as a slower processor, because a pass of more tokens reads no more: its further tokens take no longer.
pub fn contention(measured: f64, expected: f64, reads_ms: f64) -> f64 {
    let share = (measured - expected) / measured.min(reads_ms);
    match share > 0.0 && share.is_finite() {
        true => 1.0 / (1.0 - share.min(1.0 - 1.0 / MOST_CONTENTION)),
        false => 1.0,
    }
}

/// The part of a measured time that reading from disk added: while both happen, all time beyond that of computing alone.
pub fn slowed_by_reads(contention: f64, measured: f64, reads_ms: f64) -> f64 {
    measured.min(reads_ms) * (1.0 - 1.0 / contention)
}

fn words(((device, phase), correction): (&(DeviceId, Phase), &DeviceCorrection)) -> String {
    let what = if *phase == Phase::Decode { "a token" } else { "a prompt" };
    format!("{what} takes {:.2} times as long as expected on {device}", correction.partitions)
}

fn decode_ms(stage: &StageTelemetry) -> f64 {
    stage.decode_ms_median.unwrap_or(stage.decode_ms_per_token)
}

/// The device that computed: a partition of a GPU that is missing runs on the CPU.
fn used_device(stage: &StageTelemetry) -> Option<DeviceId> {
    if stage.device == "cpu" || stage.provider == Provider::CPU.name() {
        return Some(DeviceId::Cpu);
    }
    stage.device.strip_prefix("gpu")?.parse().ok().map(DeviceId::Gpu)
}

fn has(problem: &Problem, device: DeviceId) -> bool {
    matches!(device, DeviceId::Cpu) || matches!(device, DeviceId::Gpu(gpu) if gpu < problem.gpus.len())
}

fn costs(problem: &Problem, device: DeviceId) -> &[Cost] {
    match device {
        DeviceId::Cpu => &problem.cpu,
        DeviceId::Gpu(gpu) => &problem.gpus[gpu].blocks,
    }
}

fn launch_ms(problem: &Problem, device: DeviceId) -> f64 {
    match device {
        DeviceId::Cpu => problem.cpu_launch_ms,
        DeviceId::Gpu(gpu) => problem.gpus[gpu].launch_ms,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hit_rate_that_a_run_measured_is_predicted_for_its_cache() {
        for (hit_rate, cached_share, used_share) in
            [(0.85, 0.25, 0.125), (0.3, 0.5, 0.125), (0.95, 0.75, 0.25), (0.88, 0.25, 0.25)]
        {
            let experts = ExpertHits { hit_rate, cached_share, used_share };
            let curves = experts.curves();
            assert!(curves.iter().all(|curve| curve[0] == 0.0 && curve.is_sorted()), "{curves:?}");
            let memory = hpp_partition::ExpertMemory { cache: (cached_share * 8e6) as u64, rest_level: 0 };
            let visited = (used_share * 8e6) as u64;
            let reads = hpp_partition::ExpertReads { all: 8_000_000, visited, largest: visited };
            let read = |curve: &[f64]| memory.read_bytes(reads, curve) as f64 / visited as f64;
            assert!((read(&curves[0]) - (1.0 - hit_rate)).abs() < 0.01, "{experts:?}: {}", read(&curves[0]));
            // Several sequences find fewer, but no fewer than if all experts were as likely.
            let of_several: Vec<f64> = curves.iter().map(|curve| read(curve)).collect();
            assert!(
                of_several.is_sorted()
                    && of_several.iter().all(|read_share| *read_share <= read(&[]).max(1.0 - hit_rate) + 0.01),
                "{of_several:?}"
            );
        }
        // Where nothing was in memory, or everything, the curves have their limits.
        for hit_rate in [0.0, 1.0] {
            let curves = ExpertHits { hit_rate, cached_share: 0.5, used_share: 0.125 }.curves();
            assert!(curves.iter().flatten().all(|rate| (0.0..=1.0 / 0.875).contains(rate)), "{curves:?}");
        }
    }

    #[test]
    fn what_a_token_takes_longer_than_expected_beside_reads_is_contention_up_to_a_limit() {
        // 20 of 40 ms are added by reads that last longer than the token computes: it computes at half of its speed.
        assert_eq!(contention(40.0, 20.0, 100.0), 2.0);
        assert_eq!(slowed_by_reads(2.0, 40.0, 100.0), 20.0);
        // Reads of 30 ms add 15 to 55.
        assert_eq!(contention(55.0, 40.0, 30.0), 2.0);
        assert_eq!(slowed_by_reads(2.0, 55.0, 30.0), 15.0);
        // No more than the limit, none if nothing is read, and none if a token is faster than expected.
        assert!((contention(90.0, 10.0, 100.0) - MOST_CONTENTION).abs() < 1e-9);
        assert_eq!((contention(40.0, 20.0, 0.0), slowed_by_reads(1.0, 40.0, 0.0)), (1.0, 0.0));
        assert_eq!((contention(10.0, 20.0, 100.0), slowed_by_reads(1.0, 40.0, 10.0)), (1.0, 0.0));
    }
}
