//! The last step of loading: locks part of the streamed weights in host memory and starts to stream the rest.

use crate::error::EngineError;
use crate::ids::{Id, StageId};
use crate::port::{Backend, WeightResidency};
use crate::program::{Program, Stage};
use crate::reporter::{Reporter, listed};
use crate::runtime::Runtime;
use crate::telemetry::StageTelemetry;
use crate::weights::WeightTier;
use crate::weights::budget::{HostMemoryBudget, HostMemoryInUse, is_on_host, largest_experts};
use hpp_schema::{ByteSize, Partition, Plan, Provider};
use tracing::info;

/// Warms up, locks as many bytes of each partition as the budget says and sets the window of the disk tier. Does nothing if no
/// partition streams.
pub(super) fn lock_weights<B: Backend>(
    program: &Program,
    runtime: &mut Runtime<B>,
    budget: HostMemoryBudget,
    reporter: &dyn Reporter,
) -> Result<(), EngineError> {
    let plan = &program.plan;
    let streams =
        |partition: &Partition| budget.residency(plan, &partition.decode_variant()) == WeightResidency::ReadFromDisk;
    if !plan.partitions.iter().any(streams) {
        return Ok(());
    }
    let is_fallback = gpu_fallback(program, budget, &runtime.recorder.telemetry.stages);
    let (rss, process_limit) = (runtime.pool.backend.memory_use().resident, runtime.pool.backend.memory_limit());
    if let Some(fallback) = budget.too_large_fallback(plan, &is_fallback, rss) {
        match process_limit.filter(|limit| fallback.needed > *limit) {
            Some(limit) => return Err(fallback.error(limit)),
            None => reporter.warning(&fallback.warning()),
        }
    }
    if runtime.weights.disk.wants_warm_up() {
        let started = runtime.pool.backend.now();
        runtime.warm_up(program)?;
        let ms = runtime.pool.backend.now().saturating_sub(started).as_millis();
        info!(ms, "warm-up runs done, to see which weights runs read");
    }
    let in_use = HostMemoryInUse::of(program, &runtime.lanes[0], &runtime.pool.backend);
    let rss = in_use.rss;
    let budget = budget.fit_sequences(plan, &is_fallback, in_use);
    runtime.max_sequences = budget.sequences();
    let (locked, window) = (budget.locked(plan, &is_fallback, in_use), budget.window(plan, &is_fallback));
    let (states, sequences) = (in_use.states, budget.sequences());
    let lane = in_use.lane;
    info!(limit = budget.limit(), rss, window, states, lane, sequences, locked = locked.total(), "host memory budget");
    runtime.lock_stages(program, locked.at_load())?.iter().for_each(|warning| reporter.warning(warning));
    (runtime.locked_now, runtime.locked) = (locked.total(), locked);
    let window = window + widen_window(program, runtime, window)?;
    let rss = runtime.pool.backend.memory_use().resident;
    let expert_cache = budget.expert_cache(plan, &is_fallback, HostMemoryInUse { rss, ..in_use });
    info!(rss, expert_cache, "weights locked");
    // The weights that every run of a stage needs are in memory at once, even if the window is smaller.
    let beyond_window = runtime.weights.disk.largest_stage().saturating_sub(window);
    let expert_cache = expert_cache.saturating_sub(beyond_window);
    let telemetry = &mut runtime.recorder.telemetry;
    [telemetry.expert_bytes, telemetry.expert_cache_bytes] = runtime.weights.disk.set_expert_cache(expert_cache);
    warn_of_whole_mixtures(program, runtime, reporter);
    // The experts of one partition always get their memory; if it is missing, less is read ahead.
    let missing = largest_experts(plan).saturating_sub(expert_cache);
    runtime.weights.disk.set_window(window.saturating_sub(missing));
    runtime.weights.disk.set_order(&program.run_order(&runtime.route));
    runtime.weights.prefetch(&runtime.pool)?;
    warn_if_over_limit(budget.limit(), runtime.pool.backend.memory_use().resident, reporter);
    Ok(())
}

/// Unlocks weights so that the window can hold the weights of two stages, if it lacks only a little. Returns by how many bytes the window grows.
fn widen_window<B: Backend>(program: &Program, runtime: &mut Runtime<B>, window: u64) -> Result<u64, EngineError> {
    let bytes_to_unlock = missing_window(runtime.weights.disk.stage_sizes(), window);
    let all = runtime.locked.total();
    // With experts that are read by demand, the window is smaller on purpose.
    if bytes_to_unlock == 0 || bytes_to_unlock > all || largest_experts(&program.plan) > 0 {
        return Ok(0);
    }
    let locked = runtime.locked.divided(all - bytes_to_unlock);
    info!(bytes_to_unlock, "weights unlocked so that the window holds two stages");
    // The warnings are the same as those of the first call.
    runtime.lock_stages(program, &locked)?;
    runtime.locked_now = locked.iter().sum();
    runtime.locked.set_at_load(locked);
    Ok(bytes_to_unlock)
}

/// Bytes that a window lacks to hold, beside the weights of the stage that computes, all weights of the next stage. Without them, the last chunks
/// of the next stage would be read only after the stage has computed, together with chunks of later stages, and the next stage would wait for all
/// of these. 0 if the window lacks nothing, or more than an eighth: then the plan reads only a smaller part of a stage ahead, and unlocking costs
/// more than it saves. `sizes`: bytes of the weights that are read of each stage.
///
/// Unlocking x bytes, x / n of each of n stages, makes two stages 2 x / n larger: a window of W bytes for stages of s bytes lacks the x with
/// `W + x = 2 (s + x / n)`.
fn missing_window(mut sizes: Vec<u64>, window: u64) -> u64 {
    let stages = sizes.len() as u64;
    if stages < 3 {
        return 0;
    }
    sizes.sort_unstable();
    let two = 2 * (sizes[sizes.len() / 2] + CHUNK_ROUNDING);
    let missing = two.saturating_sub(window) * stages / (stages - 2);
    if missing > window / 8 { 0 } else { missing }
}

/// What rounding to pages may add to the chunks of a stage, bytes.
const CHUNK_ROUNDING: u64 = 64 << 10;

/// Tells the user where experts cannot be read by demand although the plan says so.
fn warn_of_whole_mixtures<B: Backend>(program: &Program, runtime: &Runtime<B>, reporter: &dyn Reporter) {
    let is_whole = |(id, stage): (StageId, &Stage)| {
        let streams = runtime.weights.disk.streams(id);
        (stage.routing.is_some() && streams && !runtime.weights.disk.has_experts(id)).then(|| stage.name.clone())
    };
    let whole: Vec<String> = program.stages.entries().filter_map(is_whole).collect();
    if !whole.is_empty() {
        reporter.warning(&format!(
            "the experts of {} cannot be read one by one, so all are read in every pass, and memory may exceed the plan's; `hpp-split \
             --experts all` plans for that",
            listed(&whole)
        ));
    }
}

/// Whether each partition was planned for a GPU and streams on the host instead.
fn gpu_fallback(program: &Program, budget: HostMemoryBudget, telemetry: &[StageTelemetry]) -> Vec<bool> {
    let plan: &Plan = &program.plan;
    let mut is_fallback = vec![false; plan.partitions.len()];
    for (measured, stage) in telemetry.iter().zip(program.stages.iter()) {
        if measured.provider == Provider::CPU && !is_on_host(plan, &stage.device) {
            is_fallback[stage.partition.index()] = budget.streams_gpu_fallback();
        }
    }
    is_fallback
}

fn warn_if_over_limit(limit: Option<u64>, rss: Option<u64>, reporter: &dyn Reporter) {
    let Some((limit, rss)) = limit.zip(rss).filter(|(limit, rss)| rss > limit) else { return };
    reporter.warning(&format!(
        "{} of host memory are in use after loading, and the plan was made for {}",
        ByteSize(rss).human(),
        ByteSize(limit).human()
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_that_lacks_a_little_of_two_stages_is_widened_by_it() {
        const TWO: u64 = 200 << 20;
        let missing = |stages, window| missing_window(vec![TWO / 2; stages], window);
        let window = TWO - (10 << 20);
        let bytes_to_unlock = missing(32, window);
        // What is unlocked is read then, and the window holds it too.
        let two = TWO + 2 * CHUNK_ROUNDING + 2 * bytes_to_unlock / 32;
        assert!(bytes_to_unlock > 10 << 20 && (window + bytes_to_unlock).abs_diff(two) <= 64, "{bytes_to_unlock}");
        assert_eq!(missing(32, TWO + 2 * CHUNK_ROUNDING), 0);
        assert_eq!((missing(32, TWO - (40 << 20)), missing(32, 0), missing(2, window)), (0, 0, 0));
    }
}
