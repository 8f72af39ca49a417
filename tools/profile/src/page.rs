//! Writes the HTML report: computes the work of each block and a sweep of VRAM budgets, and renders them with the profile.

use crate::error::ProfileError;
use crate::estimate::{RooflineEstimator, blocks_at};
use crate::report::{BlockWork, ReportInput, Sweep, render};
use crate::store;
use hpp_model::{Analysis, CostSource, DEFAULT_CHUNK, Scenario, problem};
use hpp_partition::Phase;
use hpp_partition::{Budget, Mechanisms, Objective, Options, Planner, sweep};
use hpp_schema::{Finding, Profile};
use std::path::Path;

/// The workload of the sweep.
const PROMPT_TOKENS: u64 = 512;
const NEW_TOKENS: u64 = 128;
/// Number of budgets in the sweep.
const POINTS: u64 = 12;

/// How a report begins.
pub const START: &[u8] = b"<!DOCTYPE html>";

/// Writes the report.
pub fn write(
    path: &Path,
    analysis: &Analysis,
    profile: &Profile,
    roofline: &RooflineEstimator,
) -> Result<(), ProfileError> {
    let (work, sweep) = (work(analysis, profile, roofline), vram_sweep(analysis, profile));
    let page = render(&ReportInput { profile, work: &work, sweep: &sweep });
    Ok(store::write(path, page.as_bytes(), START)?)
}

/// Operations and bytes of each block at every measured token count.
fn work(analysis: &Analysis, profile: &Profile, roofline: &RooflineEstimator) -> Vec<BlockWork> {
    let blocks = blocks_at(analysis, 1);
    let work_at = |phase, tokens: &[u64], block| tokens.iter().map(|t| (*t, roofline.work(phase, *t, block))).collect();
    let block_work = |(index, block): (usize, &hpp_partition::BlockSpec)| BlockWork {
        block: block.label.clone(),
        decode: work_at(Phase::Decode, &profile.settings.contexts, index),
        prefill: work_at(Phase::Prefill, &profile.settings.prefill_tokens, index),
    };
    blocks.iter().enumerate().map(block_work).collect()
}

/// Plans for evenly spaced budgets up to 9/8 of the model's size.
fn vram_sweep(analysis: &Analysis, profile: &Profile) -> Sweep {
    let Some(gpu) = profile.machine.rates.as_ref().and_then(|machine| machine.gpus.first()) else {
        return Sweep::Absent(
            "No device was measured beside the CPU, so there is no memory of one to plan for.".into(),
        );
    };
    let context = analysis.context;
    let prompt = PROMPT_TOKENS.min(context.div_ceil(2));
    let new_tokens = NEW_TOKENS.min(context - prompt);
    let threads = profile.host.threads.into();
    let load = Scenario {
        batch: 1,
        context,
        prompt,
        new_tokens,
        prefill_chunk: context.min(DEFAULT_CHUNK),
        threads,
        divides_prompts: false,
    };
    let blocks = hpp_model::blocks(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, load);
    let all = hpp_partition::Demand::of(&blocks).total();
    let most = (all + all / 8).min(gpu.memory.0).max(1);
    let budget = Budget { vram: vec![most], ..Budget::default() };
    let mechanisms = Mechanisms::ResidentCpu;
    let options = Options { planner: Planner::Exact, objective: Objective::Mixed, mechanisms, slots: None };
    match problem(analysis, load, CostSource::Profile(profile), budget) {
        Err(findings) => Sweep::Absent(format!("Nothing could be planned: {}.", listed(&findings))),
        Ok(problem) => {
            let budgets: Vec<u64> = (1..=POINTS).map(|part| most / POINTS * part).collect();
            let points = sweep(&problem, &options, &budgets);
            Sweep::Done { points, load: problem.load, gpu: gpu.name.clone() }
        }
    }
}

fn listed(findings: &[Finding]) -> String {
    findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
