//! The planning problem: what each block costs at each place, in milliseconds, and the limits.
//!
//! The numbers come from a profile, from a machine file through the roofline (the longer of moving the bytes and doing the
//! arithmetic; Williams et al., "Roofline: an insightful visual performance model", 2009), or from an assumed machine.

mod assumed;
mod measured;
mod packing;
mod passes;
mod roofline;

use crate::{Analysis, Load, streams};
use hpp_partition::{Budget, GpuCosts, Problem, Workload, condensed};
use hpp_schema::{ByteSize, Finding, GpuRates, Machine, Profile, Severity};
use passes::passes;

/// Where costs come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// Round numbers of a desktop, which order placements and promise nothing.
    Assumed,
    /// A machine in numbers, which need not be here.
    Machine(&'a Machine),
    /// What was measured of this model.
    Profile(&'a Profile),
}

impl Source<'_> {
    /// Memory of each accelerator; none where nothing is known of the machine.
    pub fn gpu_memory(&self) -> Vec<u64> {
        self.rates().iter().flat_map(|machine| &machine.gpus).map(|gpu| gpu.memory.0).collect()
    }

    /// Memory of the host, where it is known.
    pub fn host_memory(&self) -> Option<u64> {
        match self {
            Source::Assumed => None,
            Source::Machine(machine) => Some(machine.cpu.memory.0),
            Source::Profile(profile) => Some(profile.host.memory.0).filter(|memory| *memory > 0),
        }
    }

    /// Reading from disk past the page cache, 1e9 bytes a second; none where a machine was measured or described without one.
    fn disk(&self) -> Option<f64> {
        match self {
            Source::Assumed => Some(assumed::DISK_GB_PER_S),
            Source::Machine(_) | Source::Profile(_) => {
                self.rates().and_then(|machine| machine.disk).map(|disk| disk.read_gb_per_s)
            }
        }
    }

    /// What is known of the machine's rates.
    pub(crate) fn rates(&self) -> Option<&Machine> {
        match self {
            Source::Assumed => None,
            Source::Machine(machine) => Some(machine),
            Source::Profile(profile) => profile.machine.rates.as_ref(),
        }
    }
}

/// The problem of placing this model's blocks within a budget. Everything that stands in the way is found at once: budgets
/// beyond the machine's memory, accelerators there are none of, blocks that a profile does not know.
pub fn problem(analysis: &Analysis, load: Load, source: Source<'_>, budget: Budget) -> Result<Problem, Vec<Finding>> {
    let mut findings = beyond_the_machine(&source, &budget);
    let mut blocks = crate::blocks(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, load);
    streams::add_common_weights(analysis, &mut blocks);
    if !budget.vram.is_empty() {
        streams::fill(analysis, &mut blocks);
    }
    let workload = Workload {
        batch: load.batch,
        prompt_tokens: load.prompt,
        new_tokens: load.new_tokens,
        passes: passes(analysis, load),
    };
    let gpus = budget.vram.len();
    let costs = match source {
        Source::Assumed => Ok(roofline::costs(analysis, &blocks, &workload, &assumed::machine(gpus), gpus)),
        Source::Machine(machine) => Ok(roofline::costs(analysis, &blocks, &workload, machine, gpus)),
        Source::Profile(profile) => measured::costs(profile, &blocks, load, &workload, gpus),
    };
    match costs {
        Ok(costs) if findings.is_empty() => Ok(Problem {
            blocks: condensed(blocks),
            cpu: costs.cpu,
            gpus: costs.gpus,
            cpu_launch_ms: costs.cpu_launch_ms,
            pass_ms: pass_ms(analysis, &source),
            disk_bytes_per_ms: source.disk().map(per_ms),
            budget: Budget { packing: packing::packing(&analysis.model, &analysis.graph), ..budget },
            load: workload,
            cuts: Vec::new(),
        }),
        Ok(_) => Err(findings),
        Err(more) => {
            findings.extend(more);
            Err(findings)
        }
    }
}

/// The part of a [`Problem`] that depends on the source.
struct Costs {
    cpu: Vec<hpp_partition::Cost>,
    gpus: Vec<GpuCosts>,
    cpu_launch_ms: f64,
}

/// 1e9 bytes per second in bytes per millisecond.
fn per_ms(gb_per_s: f64) -> f64 {
    gb_per_s * 1e6
}

/// An accelerator's link and its costs, which the caller has worked out.
fn gpu_costs(gpu: &GpuRates, blocks: Vec<hpp_partition::Cost>, launch_ms: f64) -> GpuCosts {
    GpuCosts {
        blocks,
        launch_ms,
        to_device: per_ms(gpu.link.to_device_gb_per_s),
        from_device: per_ms(gpu.link.from_device_gb_per_s),
        latency_ms: gpu.link.latency_us / 1e3,
        compute_contention: gpu.contention.map_or(1.0, |c| c.compute),
        link_contention: gpu.contention.map_or(1.0, |c| c.link),
    }
}

/// Feeding a pass, reading its scores and choosing a token, milliseconds: as measured, where a profile says so.
fn pass_ms(analysis: &Analysis, source: &Source) -> f64 {
    let measured = match source {
        Source::Profile(profile) => profile.pass.as_ref().and_then(|pass| pass.timing),
        Source::Assumed | Source::Machine(_) => None,
    };
    match measured {
        Some(timing) => timing.median_ms,
        None => assumed_pass_ms(analysis.states.len() as f64, analysis.vocab_size.unwrap_or(0) as f64),
    }
}

/// Scores are read and compared one by one; states are bound one by one, or looked at whether they have to be. On two server
/// cores of the 2 GHz class `hpp-exec bench` found of a token that no partition bears, microseconds:
///
/// | states | scores | measured | this |
/// |---|---|---|---|
/// | 8 | 512 | 5 to 10 | 8 |
/// | 12 | 32,000 | 66 | 70 |
/// | 48 | 32,000 | 91 | 92 |
/// | 48 | 151,936 | 319 | 319 |
fn assumed_pass_ms(states: f64, scores: f64) -> f64 {
    2e-3 + 0.6e-3 * states + 1.9e-6 * scores
}

fn beyond_the_machine(source: &Source<'_>, budget: &Budget) -> Vec<Finding> {
    let mut findings = Vec::new();
    if let Some((asked, there)) = budget.ram.zip(source.host_memory()).filter(|(asked, there)| asked > there) {
        findings
            .push(finding("--ram", format!("{} are asked for, and the machine has {}", human(asked), human(there))));
    }
    let Some(machine) = source.rates() else {
        if !budget.vram.is_empty() && matches!(source, Source::Profile(_)) {
            let what = "the profile has no rates of the machine and its links; finish it with hpp-profile --resume";
            findings.push(finding("machine.rates", what.to_owned()));
        }
        return findings;
    };
    if budget.vram.len() > machine.gpus.len() {
        let what = format!("{} GPUs are asked for, and {} has {}", budget.vram.len(), machine.name, machine.gpus.len());
        findings.push(finding("gpus", what));
    }
    for (at, (asked, gpu)) in
        budget.vram.iter().zip(&machine.gpus).enumerate().filter(|(_, (asked, gpu))| **asked > gpu.memory.0)
    {
        let what = format!("--vram asks for {}, and {} has {}", human(*asked), gpu.name, gpu.memory.human());
        findings.push(finding(&format!("gpus[{at}]"), what));
    }
    findings
}

fn human(bytes: u64) -> String {
    ByteSize(bytes).human()
}

fn finding(place: &str, message: String) -> Finding {
    Finding { severity: Severity::Error, place: place.to_owned(), message }
}

#[cfg(test)]
mod tests;
