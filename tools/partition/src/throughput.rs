//! Passes over several sequences, and over several tokens of one: their times, and the number of sequences to run together.
//!
//! The runtime fetches the weights of a partition once and then runs it for each sequence of the pass. So with `n` sequences everything
//! that belongs to a sequence counts `n` times (computing, launches, boundaries, states, the overhead of a pass), and the weights that
//! are read from disk or copied to a GPU count once. If the runtime computes the tokens of all sequences as rows of one run, a run counts
//! once, with the time of as many tokens of one sequence. [`Problem::with_sequences`] makes that problem from the one for a single sequence;
//! the simulator, memory limits and the planner apply to it unchanged. FlexGen (Sheng et al., arXiv:2303.06865) derives the same block
//! schedule.

use crate::memory::usage_with_cuts;
use crate::plan::{plan_from, plan_roughly};
use crate::{
    BlockPlacement, BlockSpec, Budget, Cost, FilledState, GpuCosts, GrowingState, Options, OverBudget, Phase,
    Placement, Problem, RowBatching, Solution, Workload,
};
use crate::{fits, plan, simulate};
use hpp_schema::memory::{BINDING, RESERVE};

/// Numbers of tokens of short passes, which verify drafts. Their times are known apart from those of passes of one token.
pub const SHORT_PASS_TOKENS: [u64; 5] = [2, 4, 8, 16, 32];
/// Numbers of sequences that are tried.
const SEQUENCES: [u64; 7] = [1, 2, 4, 8, 16, 32, MOST_SEQUENCES];

/// The most sequences that are tried.
pub const MOST_SEQUENCES: u64 = 64;
/// More sequences must increase the tokens per second by this factor to be worth their memory.
const LEAST_GAIN: f64 = 1.05;
/// [`LEAST_GAIN`] where experts are read from disk and nothing is known of how mixtures select them: the tokens of one sequence may select the
/// same experts, and several sequences need more of the cache. With random mixtures of 64 and 32 experts, two sequences gave 0.82 to 0.89 and
/// 0.78 to 0.85 of the tokens per second of one sequence, where independent selections predict 1.07 (by hand, 2026-11-27).
const LEAST_GAIN_OF_UNKNOWN_EXPERTS: f64 = 1.3;
/// The search ends after this many successive numbers of sequences without a gain, because each is planned.
const MOST_WITHOUT_GAIN: u32 = 2;
/// A further sequence counts as free if a pass takes at most this times as long as with one.
const MAX_FREE_SLOWDOWN: f64 = 1.1;

/// The time of a pass of generated tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PassTime {
    /// Sequences in the pass.
    pub sequences: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Milliseconds, in the steady state.
    pub ms: f64,
}

/// What a placement gives with several sequences, and with several tokens of one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Throughput {
    /// Times of passes: of one token of 1, 2, 4, ... sequences that fit in memory, and of [`SHORT_PASS_TOKENS`] of one sequence.
    pub passes: Vec<PassTime>,
    /// The number of sequences to run together.
    pub sequences: u64,
    /// Generated tokens per second of all of them, their prompts included.
    pub tokens_per_second: f64,
    /// The largest number of sequences whose pass takes little longer than a pass of one.
    pub free_sequences: u64,
    /// Passes after the prompt of at most this many tokens compute where single tokens compute; longer ones where prompts
    /// compute.
    pub decode_tokens: u64,
}

impl Problem {
    /// The problem for passes of `sequences` sequences, from the problem for one; `as_rows`: their tokens are rows of one run on the
    /// host.
    pub fn with_sequences(&self, sequences: u64, as_rows: bool) -> Problem {
        let times = sequences as f64;
        let runs = if as_rows { 1.0 } else { times };
        let cost = |cost: &Cost| Cost {
            decode_ms: if as_rows { cost.rows_ms(sequences) } else { cost.decode_ms * times },
            short_pass_ms: cost.short_pass_ms.iter().map(|ms| ms * times).collect(),
            prefill_ms: cost.prefill_ms.iter().map(|ms| ms * times).collect(),
        };
        let costs = |all: &[Cost]| all.iter().map(cost).collect();
        let many = |bytes: u64| bytes.saturating_mul(sequences);
        let block = |block: &BlockSpec| BlockSpec {
            kv_bytes: many(block.kv_bytes),
            kv_tensors: many(block.kv_tensors),
            kv_grows: block.kv_grows.map(|grows| GrowingState { fixed: many(grows.fixed), token: many(grows.token) }),
            kv_filled: block.kv_filled.map(|state| FilledState {
                fixed: many(state.fixed),
                token: many(state.token),
                ..state
            }),
            boundary_bytes: many(block.boundary_bytes),
            boundary_tensors: many(block.boundary_tensors),
            ..block.clone()
        };
        let gpu =
            |gpu: &GpuCosts| GpuCosts { blocks: costs(&gpu.blocks), launch_ms: gpu.launch_ms * times, ..gpu.clone() };
        let further = self.of_further_sequence().saturating_mul(sequences.saturating_sub(1));
        let process = self.budget.process.saturating_add(further);
        Problem {
            blocks: self.blocks.iter().map(block).collect(),
            budget: Budget { process, ..self.budget.clone() },
            cpu: costs(&self.cpu),
            gpus: self.gpus.iter().map(gpu).collect(),
            cpu_launch_ms: self.cpu_launch_ms * runs,
            pass_overhead_ms: self.pass_overhead_ms * times,
            load: Workload { sequences: self.load.sequences.saturating_mul(sequences), ..self.load.clone() },
            ..self.clone()
        }
    }

    /// The problem for several sequences before any block has a place. With a GPU it has no rows, because some blocks may be computed
    /// there.
    pub fn for_sequences(&self, sequences: u64) -> Problem {
        let on_host = vec![BlockPlacement::both(Placement::Cpu); self.blocks.len()];
        let is_in_memory = || self.holds_weights(sequences, &on_host, &[]);
        self.with_sequences(sequences, self.gpus.is_empty() && self.batches_rows(&on_host, is_in_memory))
    }

    /// Whether host memory holds all weights of a placement but tables, beside the states of this many sequences.
    fn holds_weights(&self, sequences: u64, placements: &[BlockPlacement], slots: &[u32]) -> bool {
        let many = self.with_sequences(sequences, false);
        usage_with_cuts(&many, placements, slots).host_holds_all_but_tables(&many)
    }

    /// Host memory of a further sequence of a pass besides its state, bytes: what enters and leaves a block for the longest pass, and
    /// bindings to as many partitions as blocks. The runtime counts the same for the partitions that it has.
    fn of_further_sequence(&self) -> u64 {
        let tokens = self.load.passes.iter().copied().max().unwrap_or(1);
        let boundary = self.blocks.iter().map(|block| block.boundary_bytes).max().unwrap_or(0);
        let bindings = BINDING.saturating_mul(self.blocks.len() as u64);
        boundary.saturating_mul(2).saturating_mul(tokens).saturating_add(bindings)
    }

    /// The problem with [`RESERVE`] less memory: the runtime leaves that free if it chooses the number of sequences by memory.
    fn beside_reserve(&self) -> Problem {
        let process = self.budget.process.saturating_add(RESERVE);
        Problem { budget: Budget { process, reserve: 0, ..self.budget.clone() }, ..self.clone() }
    }

    /// Hit rates of caches for experts with this problem's number of sequences; empty if unknown.
    pub fn expert_hits(&self) -> &[f64] {
        let doublings = self.load.sequences.max(1).ilog2() as usize;
        self.expert_hits.get(doublings).or(self.expert_hits.last()).map_or(&[], Vec::as_slice)
    }

    /// The factor by which a plan for this problem's number of sequences must increase the tokens per second of a plan
    /// for fewer.
    fn least_gain(&self, placements: &[BlockPlacement], slots: &[u32]) -> f64 {
        let reads_experts = || usage_with_cuts(self, placements, slots).expert_memory(self, Phase::Decode).is_some();
        match self.expert_hits.is_empty() && reads_experts() {
            true => LEAST_GAIN_OF_UNKNOWN_EXPERTS,
            false => LEAST_GAIN,
        }
    }

    /// Whether devices may compute for different sequences of a pass at the same time.
    pub(crate) fn has_pipelines(&self) -> bool {
        self.load.sequences > 1 && !self.gpus.is_empty()
    }

    /// Whether a placement computes the tokens of several sequences as rows of one run. `is_in_memory`: whether no weights but tables are read from
    /// disk.
    fn batches_rows(&self, placements: &[BlockPlacement], is_in_memory: impl FnOnce() -> bool) -> bool {
        let is_possible = match self.row_batching {
            RowBatching::Never => false,
            RowBatching::InMemory => is_in_memory(),
            RowBatching::Always => true,
        };
        is_possible && placements.iter().all(|placement| placement.decode == Placement::Cpu)
    }

    /// The problem whose decode step, and whose prompt, is one pass of `SHORT_PASS_TOKENS[pass]` tokens.
    fn with_short_pass(&self, pass: usize) -> Problem {
        let tokens = SHORT_PASS_TOKENS[pass];
        let cost = |cost: &Cost| {
            let ms = cost.short_pass_ms(pass);
            Cost { decode_ms: ms, prefill_ms: vec![ms], ..cost.clone() }
        };
        let costs = |all: &[Cost]| all.iter().map(cost).collect();
        let block = |block: &BlockSpec| BlockSpec {
            boundary_bytes: block.boundary_bytes.saturating_mul(tokens),
            ..block.clone()
        };
        Problem {
            blocks: self.blocks.iter().map(block).collect(),
            cpu: costs(&self.cpu),
            gpus: self.gpus.iter().map(|gpu| GpuCosts { blocks: costs(&gpu.blocks), ..gpu.clone() }).collect(),
            load: Workload { passes: vec![1], ..self.load.clone() },
            ..self.clone()
        }
    }
}

impl Cost {
    /// Milliseconds of a pass of this many rows: interpolated between passes of 1 and of [`SHORT_PASS_TOKENS`] tokens, and in proportion
    /// beyond the most of them.
    fn rows_ms(&self, rows: u64) -> f64 {
        let pass = |pass: usize| (SHORT_PASS_TOKENS[pass], self.short_pass_ms(pass));
        let next = SHORT_PASS_TOKENS.partition_point(|tokens| *tokens <= rows);
        let (fewer, fewer_ms) = next.checked_sub(1).map_or((1, self.decode_ms), pass);
        if next == SHORT_PASS_TOKENS.len() {
            return fewer_ms * rows as f64 / fewer as f64;
        }
        let (more, more_ms) = pass(next);
        let fraction = (rows - fewer) as f64 / (more - fewer) as f64;
        fewer_ms + fraction * (more_ms - fewer_ms)
    }

    /// Milliseconds of a pass of `SHORT_PASS_TOKENS[pass]` tokens; as many single tokens if that is not known.
    fn short_pass_ms(&self, pass: usize) -> f64 {
        self.short_pass_ms.get(pass).copied().unwrap_or(self.decode_ms * SHORT_PASS_TOKENS[pass] as f64)
    }
}

/// What a placement gives with several sequences. `problem` is for one sequence; the placement was planned for `planned` sequences. If host
/// memory holds all weights beside that many, a run does not read weights from disk, so a larger number must fit beside all weights.
pub fn throughput(problem: &Problem, planned: u64, options: &Options, solution: &Solution) -> Throughput {
    let decode_ms = |problem: &Problem| simulate(problem, &solution.placements, &solution.slots, Phase::Decode).ms;
    let holds_weights = |problem: &Problem| {
        usage_with_cuts(problem, &solution.placements, &solution.slots).host_holds_all_but_tables(problem)
    };
    let weights_stay = problem.holds_weights(planned, &solution.placements, &solution.slots);
    let as_rows = problem.batches_rows(&solution.placements, || weights_stay);
    let mut passes = Vec::new();
    let mut best = (1, 0.0);
    for sequences in SEQUENCES {
        let many = problem.with_sequences(sequences, as_rows);
        let checked = if sequences > 1 { many.beside_reserve() } else { many.clone() };
        // The plan was accepted for one sequence, so its speed is predicted whatever this check says.
        let fits = sequences == 1 || fits(&checked, &solution.placements, &solution.slots, options.mechanisms).is_ok();
        if !fits || weights_stay && !holds_weights(&checked) {
            break;
        }
        let ms = decode_ms(&many);
        let prompt_ms = simulate(&many, &solution.placements, &solution.slots, Phase::Prefill).ms;
        passes.push(PassTime { sequences, tokens: 1, ms });
        let rate = tokens_per_second(&many, prompt_ms, ms);
        if rate > best.1 * many.least_gain(&solution.placements, &solution.slots) {
            best = (sequences, rate);
        }
    }
    let most = passes.last().map_or(1, |pass| pass.sequences);
    let single_ms = passes.first().map_or(f64::INFINITY, |pass| pass.ms);
    let is_free =
        |sequences: u64| decode_ms(&problem.with_sequences(sequences, as_rows)) <= MAX_FREE_SLOWDOWN * single_ms;
    let short_pass = |(pass, tokens): (usize, &u64)| PassTime {
        sequences: 1,
        tokens: *tokens,
        ms: decode_ms(&problem.with_short_pass(pass)),
    };
    let short_passes: Vec<PassTime> = SHORT_PASS_TOKENS.iter().enumerate().map(short_pass).collect();
    let decode_tokens = decode_tokens(problem, solution, &short_passes);
    passes.extend(short_passes);
    Throughput {
        passes,
        sequences: best.0,
        tokens_per_second: best.1,
        free_sequences: largest_that_holds(most, is_free),
        decode_tokens,
    }
}

/// Plans for the number of sequences that gives most tokens per second, by rough plans. `problem` is for one sequence; returns the problem for that
/// number, too. Fails if not even one sequence fits.
pub fn plan_throughput(problem: &Problem, options: &Options) -> Result<(Problem, Solution), OverBudget> {
    let mut best: Option<(Problem, Solution, f64)> = None;
    let mut without_gain = 0;
    for sequences in SEQUENCES {
        let many = problem.for_sequences(sequences);
        let solution = match (plan_roughly(&many, options), &best) {
            (Ok(solution), _) => solution,
            (Err(_), None) => plan(&many, options)?,
            (Err(_), Some(_)) => break,
        };
        let rate = tokens_per_second(&many, solution.prefill_ms, solution.decode_ms);
        let least_gain = many.least_gain(&solution.placements, &solution.slots);
        if best.as_ref().is_none_or(|(_, _, before)| rate > before * least_gain) {
            (best, without_gain) = (Some((many, solution, rate)), 0);
        } else {
            without_gain += 1;
        }
        if without_gain == MOST_WITHOUT_GAIN {
            break;
        }
    }
    let (problem, rough, _) = best.expect("one sequence was planned");
    // Plans of other places of states are compared with this one.
    let solution = plan_from(&problem, options, &[&rough])?;
    Ok((problem, solution))
}

/// Generated tokens per second of all sequences of a problem, from prompt to answer.
pub fn tokens_per_second(problem: &Problem, prompt_ms: f64, token_ms: f64) -> f64 {
    let load = &problem.load;
    load.sequences as f64 * load.new_tokens as f64 * 1e3 / load.answer_ms(prompt_ms, token_ms)
}

/// The most tokens of a pass that takes less time where single tokens compute than where prompts compute, with moving the states
/// there and back. `short_passes` has the times where single tokens compute.
fn decode_tokens(problem: &Problem, solution: &Solution, short_passes: &[PassTime]) -> u64 {
    if solution.placements.iter().all(|placement| placement.prefill == placement.decode) {
        return 1;
    }
    let moves = solution.placements.iter().enumerate().map(|(block, placement)| problem.handover_ms(block, *placement));
    let moves_ms = 2.0 * moves.sum::<f64>();
    let prompt_ms = |pass: usize| {
        simulate(&problem.with_short_pass(pass), &solution.placements, &solution.slots, Phase::Prefill).ms + moves_ms
    };
    let is_faster = |(pass, time): (usize, &PassTime)| (time.ms <= prompt_ms(pass)).then_some(time.tokens);
    short_passes.iter().enumerate().map_while(is_faster).last().unwrap_or(1)
}

/// Binary search: the largest number up to `most` for which a condition holds that holds for 1 and, once false, stays false.
fn largest_that_holds(most: u64, condition: impl Fn(u64) -> bool) -> u64 {
    let (mut holds, mut fails) = (1, most + 1);
    while fails - holds > 1 {
        let middle = holds + (fails - holds) / 2;
        if condition(middle) { holds = middle } else { fails = middle }
    }
    holds
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::tests::{dense, problem};
    use crate::{Budget, Mechanisms, Objective, Planner, evaluate};

    const OPTIONS: Options =
        Options { planner: Planner::Exact, objective: Objective::Throughput, mechanisms: Mechanisms::All, slots: None };

    /// A model of 6 layers on the host, of which `ram` bytes fit in memory and the rest is read from a disk.
    fn from_disk(ram: Option<u64>, disk_bytes_per_ms: f64) -> Problem {
        let budget = Budget { ram, ..Budget::default() };
        let mut blocks = dense(6, 30_000_000);
        blocks.iter_mut().for_each(|block| block.kv_bytes /= 100);
        Problem { disk_bytes_per_ms: Some(disk_bytes_per_ms), ..problem(blocks, budget) }
    }

    fn on_host(problem: &Problem) -> Solution {
        evaluate(problem, &OPTIONS, vec![BlockPlacement::both(Placement::Cpu); problem.blocks.len()], vec![])
    }

    fn times(throughput: &Throughput) -> Vec<(u64, u64, f64)> {
        throughput.passes.iter().map(|pass| (pass.sequences, pass.tokens, pass.ms)).collect()
    }

    #[test]
    fn without_streams_sequences_take_as_long_as_one_after_the_other() {
        let problem = from_disk(None, 1e6);
        let solution = on_host(&problem);
        let found = throughput(&problem, 1, &OPTIONS, &solution);
        assert_eq!((found.sequences, found.free_sequences, found.decode_tokens), (1, 1, 1));
        for (sequences, tokens, ms) in times(&found) {
            let expected = solution.decode_ms * sequences as f64;
            // Chunks of unknown cost count as single tokens, but for the launch and the overhead, which they need once.
            let least = if tokens > 1 { solution.decode_ms } else { 0.999 * expected };
            assert!(ms >= least && ms <= 1.001 * expected * tokens as f64, "{sequences} x {tokens}: {ms} ms");
        }
    }

    #[test]
    fn sequences_are_free_while_the_disk_is_slower_than_computing() {
        let problem = from_disk(Some(200 << 20), 1e5);
        let solution = on_host(&problem);
        let found = throughput(&problem, 1, &OPTIONS, &solution);
        let computing = simulate(&from_disk(None, 1e5), &solution.placements, &[], Phase::Decode).ms;
        let ratio = solution.decode_ms / computing;
        assert!(ratio > 8.0, "{ratio}");
        // Their states and bindings take memory from weights, so that not all of the ratio is free.
        assert!(found.free_sequences >= 6 && found.free_sequences as f64 <= MAX_FREE_SLOWDOWN * ratio, "{found:?}");
        let [one, eight] = [1, 8].map(|n| found.passes.iter().find(|p| (p.sequences, p.tokens) == (n, 1)).unwrap().ms);
        assert!(eight < 1.5 * one, "{one} and {eight}");
        assert!(found.sequences >= found.free_sequences, "{found:?}");
    }

    #[test]
    fn more_sequences_must_gain_more_where_the_use_of_experts_is_unknown() {
        let mut problem = from_disk(Some(200 << 20), 1e5);
        let gain = |problem: &Problem| problem.least_gain(&on_host(problem).placements, &[]);
        assert_eq!(gain(&problem), LEAST_GAIN);
        let experts = crate::Experts { bytes: 24 << 20, count: 8, active: 2 };
        problem.blocks.iter_mut().skip(1).for_each(|block| block.experts = Some(experts));
        assert_eq!(gain(&problem), LEAST_GAIN_OF_UNKNOWN_EXPERTS);
        let in_memory = Problem { budget: Budget::default(), ..problem.clone() };
        assert_eq!(gain(&in_memory), LEAST_GAIN);
        problem.expert_hits = vec![vec![0.0, 1.0]];
        assert_eq!(gain(&problem), LEAST_GAIN);
    }

    #[test]
    fn sequences_must_fit_in_memory() {
        let blocks = dense(8, 30_000_000);
        let states: u64 = blocks.iter().map(|block| block.kv_bytes).sum();
        let weights: u64 = blocks.iter().map(|block| block.weights[0].1).sum();
        let ram = weights + 5 * states + (1 << 20) + hpp_schema::memory::PROCESS + RESERVE;
        let budget = Budget { ram: Some(ram), process: hpp_schema::memory::PROCESS, ..Budget::default() };
        let mut problem = problem(blocks, budget);
        problem.blocks.iter_mut().for_each(|block| block.workspace_bytes = 0);
        let found = throughput(&problem, 1, &OPTIONS, &on_host(&problem));
        let most = found.passes.iter().map(|pass| pass.sequences).max();
        assert_eq!(most, Some(4), "{found:?}");
    }

    /// Weights that memory holds beside one sequence are not read from disk beside more: a run leaves them where the plan has them.
    #[test]
    fn sequences_must_fit_beside_weights_that_stay() {
        let passes = |ram: u64| {
            let problem = from_disk(Some(ram), 1e5);
            let solution = on_host(&problem);
            let found = throughput(&problem, 1, &OPTIONS, &solution);
            let most = found.passes.iter().map(|pass| pass.sequences).max().unwrap();
            (usage_with_cuts(&problem, &solution.placements, &[]).host_holds_all_but_tables(&problem), most)
        };
        let all = (1..).map(|mib| mib << 20).find(|ram| passes(*ram).0).unwrap();
        assert!(passes(all - (1 << 20)).1 > 16, "they share what is read");
        assert_eq!(passes(all), (true, 1));
        assert!(passes(all + (64 << 20)).1 > 16);
    }

    #[test]
    fn the_plan_for_throughput_takes_states_to_where_they_fit() {
        // One sequence fits on the GPU with all weights; many have room for their states only if layers are computed on the host.
        let blocks = dense(4, 30_000_000);
        let all: u64 = blocks.iter().map(|block| block.weights[0].1 + block.kv_bytes).sum();
        let mut problem = problem(blocks, Budget { vram: vec![all + 10_000_000], ..Budget::default() });
        problem.load.new_tokens = 100;
        problem.pass_overhead_ms = 0.5;
        let alone = plan(&problem, &OPTIONS).unwrap();
        let (many, together) = plan_throughput(&problem, &OPTIONS).unwrap();
        assert_eq!(many.load.sequences, 1, "nothing is shared where everything is resident: {together:?}");
        assert_eq!(alone.placements, together.placements);
        // On a host that reads from a slow disk the weights are shared.
        let problem = from_disk(Some(200 << 20), 1e5);
        let (many, together) = plan_throughput(&problem, &OPTIONS).unwrap();
        assert!(many.load.sequences >= 16, "{}", many.load.sequences);
        assert!(
            together.decode_ms > 0.0 && together.placements.iter().all(|placement| placement.decode == Placement::Cpu)
        );
    }

    #[test]
    fn rows_take_the_time_of_as_many_tokens() {
        let cost = Cost { decode_ms: 10.0, short_pass_ms: vec![12.0, 16.0, 24.0, 40.0, 70.0], prefill_ms: vec![] };
        let rows = [1, 2, 3, 4, 8, 12, 32, 64].map(|rows| cost.rows_ms(rows));
        assert_eq!(rows, [10.0, 12.0, 14.0, 16.0, 24.0, 32.0, 70.0, 140.0]);

        let mut problem = from_disk(None, 1e6);
        problem.row_batching = RowBatching::Always;
        problem.load.new_tokens = 100;
        problem.cpu.iter_mut().for_each(|cost| {
            cost.short_pass_ms = [1.1, 1.3, 2.0, 3.0, 6.0].map(|times| cost.decode_ms * times).to_vec();
        });
        let solution = on_host(&problem);
        let found = throughput(&problem, 1, &OPTIONS, &solution);
        let eight = found.passes.iter().find(|pass| (pass.sequences, pass.tokens) == (8, 1)).unwrap().ms;
        assert!((eight / solution.decode_ms - 2.0).abs() < 0.01, "{eight}");
        assert!(found.sequences >= 8, "{found:?}");
        // Some of it on a GPU: no rows.
        let [host, gpu] = [Placement::Cpu, Placement::Resident(0)].map(BlockPlacement::both);
        assert!(!problem.batches_rows(&[host, gpu], || true));
        let prompts_on_gpu = BlockPlacement { prefill: Placement::Streamed(0), decode: Placement::Cpu };
        assert!(problem.batches_rows(&[prompts_on_gpu], || false));
    }

    #[test]
    fn weights_from_disk_may_rule_out_rows() {
        let with = |ram: Option<u64>, row_batching: RowBatching| {
            let mut problem = Problem { row_batching, ..from_disk(ram, 1e6) };
            problem.cpu.iter_mut().for_each(|cost| {
                cost.short_pass_ms = [1.1, 1.3, 2.0, 3.0, 6.0].map(|times| cost.decode_ms * times).to_vec();
            });
            let found = throughput(&problem, 1, &OPTIONS, &on_host(&problem));
            found.passes.iter().find(|pass| (pass.sequences, pass.tokens) == (8, 1)).unwrap().ms
        };
        let (small, all) = (Some(200 << 20), None);
        let by_disk = [RowBatching::Never, RowBatching::InMemory, RowBatching::Always].map(|rows| with(small, rows));
        let in_memory = [RowBatching::Never, RowBatching::InMemory, RowBatching::Always].map(|rows| with(all, rows));
        assert!(by_disk[0] == by_disk[1] && by_disk[1] > by_disk[2], "{by_disk:?}");
        assert!(in_memory[0] > in_memory[1] && in_memory[1] == in_memory[2], "{in_memory:?}");
    }

    #[test]
    fn known_times_of_short_passes_are_used() {
        let mut problem = from_disk(None, 1e6);
        problem.cpu.iter_mut().for_each(|cost| cost.short_pass_ms = vec![cost.decode_ms * 1.5; 5]);
        let solution = on_host(&problem);
        let found = throughput(&problem, 1, &OPTIONS, &solution);
        let short_passes: Vec<f64> = found.passes.iter().filter(|pass| pass.tokens > 1).map(|pass| pass.ms).collect();
        assert_eq!(short_passes.len(), SHORT_PASS_TOKENS.len());
        assert!(
            short_passes.iter().all(|ms| *ms > 1.3 * solution.decode_ms && *ms < 1.51 * solution.decode_ms),
            "{short_passes:?}"
        );
    }

    #[test]
    fn short_passes_are_computed_where_tokens_are_unless_that_takes_longer() {
        // Prompts are streamed to the GPU, tokens are computed on the host, which takes long for many of them.
        let blocks = dense(4, 30_000_000);
        let mut problem = problem(blocks, Budget { vram: vec![200_000_000], ..Budget::default() });
        problem.gpus[0].to_device = 3e6;
        let placement = BlockPlacement { prefill: Placement::Streamed(0), decode: Placement::Cpu };
        let placements: Vec<BlockPlacement> = problem.blocks.iter().map(|_| placement).collect();
        let solution = evaluate(&problem, &OPTIONS, placements, vec![3]);
        let found = throughput(&problem, 1, &OPTIONS, &solution);
        assert!(found.decode_tokens >= 4 && found.decode_tokens < 32, "{found:?}");
    }
}
