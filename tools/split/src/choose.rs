//! Chooses a plan: the placement of the blocks, the length of passes, and where KV caches lie if nobody says so.
//!
//! Everything that asks for the plan of some memory asks here: the plan that is written, `--sweep-vram`, and the effects of more memory that
//! `--explain` reports. So they agree.

use crate::cli::{KvHomeArg, PlanningArgs, SplitArgs};
use crate::compression::drop_useless_copies;
use crate::costs::Costs;
use crate::error::SplitError;
use crate::local_machine::LocalMachine;
use crate::partitioning::{Partitioning, place, with_confirmed_budget};
use crate::request::{LEAST_CHUNK, Limits, MIN_CHUNK, PlanningRequest, STATES_ON_DISK, WhyOnDisk};
use crate::sequences::{choose_sequences, estimated_ms_per_token};
use crate::unwritten_plan::throughput_of;
use hpp_model::Analysis;
use hpp_partition::{Mechanisms, Objective, Options, Placement, Problem, plan, tokens_per_second};
use std::panic::resume_unwind;

/// A plan with shorter passes must take less time by at least this share.
const LEAST_GAIN: f64 = 1e-6;

/// Passes shorter than [`MIN_CHUNK`] are planned only if an estimate gains at least this share: kernels take longer for each token of a short pass
/// of a prompt, which estimates do not know. Passes of 32 tokens took 5 % (int4) and 15 % (float32) more than those of 192, passes of 64 up to 4 % (16 layers, hidden
/// size 512, two threads of an idle AMD EPYC, by hand, 2026-11-27, three rounds).
const LEAST_GAIN_OF_SHORTEST: f64 = 0.05;
/// [`LEAST_GAIN_OF_SHORTEST`] if only generated tokens count, whose passes stay the same. Less is not worth slower prompts.
const LEAST_DECODE_GAIN_OF_SHORTEST: f64 = 0.01;

/// KV caches go to disk only if a token then takes less time by this share. A smaller gain is not certain: reads of the caches are priced
/// at one rate for every disk. It also costs row batching, which states on disk exclude.
pub const WORTH_THE_DISK: f64 = 0.2;
/// KV caches on disk that gain less than [`WORTH_THE_DISK`], but at least this share, are worth a note.
const WORTH_TELLING: f64 = 0.05;
/// KV caches on disk are planned only if the estimated gain is at least [`WORTH_THE_DISK`] divided by this.
const ESTIMATED_GAIN_DIVISOR: f64 = 2.0;

/// What a plan is made from.
#[derive(Clone, Copy)]
pub struct PlanInputs<'a> {
    /// Settings.
    pub args: &'a SplitArgs,
    /// The model.
    pub analysis: &'a Analysis,
    /// Where costs come from.
    pub costs: &'a Costs,
    /// Memory of this machine.
    pub local: &'a LocalMachine,
    /// Host memory that something else takes, bytes.
    pub reserved: u64,
    /// An alternative to the settings and the model, which is planned too.
    pub alternative: Option<Alternative<'a>>,
}

/// Other values of settings that the user left open, and the model analysed with them.
#[derive(Clone, Copy)]
pub struct Alternative<'a> {
    /// Settings.
    pub args: &'a SplitArgs,
    /// The model.
    pub analysis: &'a Analysis,
}

/// A chosen plan.
#[derive(Clone)]
pub struct Chosen {
    /// What was asked of the planner, with the chosen length of passes and home of KV caches.
    pub request: PlanningRequest,
    /// Where blocks compute.
    pub partitioning: Partitioning,
    /// Whether it is a plan of [`PlanInputs::alternative`].
    pub is_alternative: bool,
    /// Milliseconds per token of the plan with KV caches on disk, if that is faster but gains too little to be chosen.
    pub with_kv_on_disk_ms: Option<f64>,
}

impl PlanInputs<'_> {
    /// The request for passes as long as they may be.
    pub fn request(&self, limits: Limits) -> Result<PlanningRequest, SplitError> {
        Ok(PlanningRequest::new(self.args, self.analysis, self.costs, self.local, limits)?)
    }

    /// The limits before anything is chosen.
    pub fn limits(&self) -> Limits {
        Limits { reserved: self.reserved, ..Limits::default() }
    }

    /// These inputs with the alternative and the settings exchanged.
    pub fn swapped(self) -> Self {
        let Some(Alternative { args, analysis }) = self.alternative else { return self };
        PlanInputs {
            args,
            analysis,
            alternative: Some(Alternative { args: self.args, analysis: self.analysis }),
            ..self
        }
    }

    /// The fastest plan, with the settings or with the alternative.
    pub fn choose(&self) -> Result<Chosen, SplitError> {
        let chosen = self.plan_with_these_settings();
        if self.alternative.is_none() {
            return chosen;
        }
        match (chosen, self.swapped().plan_with_these_settings()) {
            (Err(SplitError::OverBudget { .. }), Ok(other)) => Ok(Chosen { is_alternative: true, ..other }),
            (Ok(chosen), Ok(other)) if other.cost() < chosen.cost() => Ok(Chosen { is_alternative: true, ..other }),
            (chosen, _) => chosen,
        }
    }

    /// The fastest plan with these settings, without compressed copies of weights that gain too little. If the settings leave the place of KV
    /// caches open, they are on disk where no plan has room for them in memory, or where weights would use that memory much better.
    fn plan_with_these_settings(&self) -> Result<Chosen, SplitError> {
        let mut chosen = self.plan_usual_or_shortest_passes()?;
        let Chosen { request, partitioning, .. } = &mut chosen;
        if drop_useless_copies(request, self.args, self.analysis, self.costs, partitioning) {
            request.reset_to_single_sequence();
            *partitioning = place_sequences(request, self.args)?;
        }
        Ok(chosen)
    }

    /// The fastest plan with passes of the usual lengths. If none fits, the plan with the shortest passes, which is better than none although it
    /// reads the weights many times for a prompt.
    fn plan_usual_or_shortest_passes(&self) -> Result<Chosen, SplitError> {
        let usual = self.limits();
        let planned = self.fastest_candidate(&self.candidates(usual)?);
        if let Err(refusal @ SplitError::OverBudget { .. }) = planned {
            self.check_smallest()?;
            return self.or_with_kv_on_disk(usual, Err(refusal)).or_else(|refusal| {
                let shortest = Limits { shortest_pass: LEAST_CHUNK, ..usual };
                match refusal {
                    SplitError::OverBudget { .. } => {
                        self.or_with_kv_on_disk(shortest, self.fastest_candidate(&self.candidates(shortest)?))
                    }
                    other => Err(other),
                }
            });
        }
        self.or_with_kv_on_disk(usual, planned)
    }

    /// Refuses at once if not even the plan that needs least memory fits: with the shortest passes, and with KV caches in memory or, if they may
    /// move, on disk. So a refusal does not wait until plans with longer passes have failed.
    fn check_smallest(&self) -> Result<(), SplitError> {
        let confirmed = |request, refusal| Err(with_confirmed_budget(&request, self.args, refusal));
        // Errors other than too little memory may concern this length of passes only.
        let (request, in_memory) = match self.place_smallest(None)? {
            (request, Err(refusal @ SplitError::OverBudget { .. })) => (request, refusal),
            _ => return Ok(()),
        };
        if !self.may_move_kv() {
            return confirmed(request, in_memory);
        }
        match self.place_smallest(Some(WhyOnDisk::TooLittleMemory))? {
            (_, Err(on_disk)) if in_memory.needs_no_more_than(&on_disk) => {
                confirmed(request, in_memory.without_kv_hint())
            }
            (request, Err(on_disk @ SplitError::OverBudget { .. })) => confirmed(request, on_disk),
            _ => Ok(()),
        }
    }

    /// The request with the shortest passes and its placement, or why there is none.
    fn place_smallest(
        &self,
        kv_on_disk: Option<WhyOnDisk>,
    ) -> Result<(PlanningRequest, Result<Partitioning, SplitError>), SplitError> {
        let limits = Limits { kv_on_disk, shortest_pass: LEAST_CHUNK, ..self.limits() };
        let mut request = self.request(limits)?;
        if let Some(longest_pass) = request.shorter_passes(LEAST_CHUNK).last() {
            request = self.request(Limits { longest_pass, ..limits })?;
        }
        let placed = place_sequences(&mut request, self.args);
        Ok((request, placed))
    }

    /// The plan with KV caches on disk where they do not fit in memory (`planned` is a refusal), or where that is faster than `planned`.
    fn or_with_kv_on_disk(&self, limits: Limits, planned: Result<Chosen, SplitError>) -> Result<Chosen, SplitError> {
        let on_disk = |why| self.candidates(Limits { kv_on_disk: Some(why), ..limits });
        match planned {
            Err(refusal @ SplitError::OverBudget { .. }) if self.may_move_kv() => {
                // A GPU that is too small may hold the activations of shorter passes: then the caches stay in memory.
                let shortest = Limits { shortest_pass: LEAST_CHUNK, ..limits };
                if refusal.is_of_gpu()
                    && let Ok(chosen) = self.candidates(shortest).and_then(|short| self.fastest_candidate(&short))
                {
                    return Ok(chosen);
                }
                let found = on_disk(WhyOnDisk::TooLittleMemory).and_then(|on_disk| self.fastest_candidate(&on_disk));
                found.map_err(|smaller| smaller.or_smaller(refusal))
            }
            Ok(chosen) if self.may_move_kv() && chosen.may_gain_from_kv_on_disk() => {
                let on_disk = on_disk(WhyOnDisk::Faster)?;
                let least_gain = WORTH_THE_DISK / ESTIMATED_GAIN_DIVISOR;
                let decode_ms = chosen.partitioning.solution.decode_ms;
                match on_disk.estimate.decode_ms < decode_ms * (1.0 - least_gain) {
                    true => Ok(chosen.or_faster(self.fastest_candidate(&on_disk))),
                    false => Ok(chosen),
                }
            }
            chosen => chosen,
        }
    }

    /// Whether KV caches may lie on disk although nobody asked for it.
    fn may_move_kv(&self) -> bool {
        self.args.kv == KvHomeArg::Auto && STATES_ON_DISK && self.costs.source().disk_reads().is_some()
    }

    /// The requests that may be planned with these limits: with the longest passes and, if memory is too small for all weights or for more
    /// sequences, with shorter passes, which leave more memory for them.
    fn candidates(&self, limits: Limits) -> Result<Candidates, SplitError> {
        let longest = self.request(limits)?;
        let mut estimate = Estimate::of(&longest, self.args);
        let mut shorter = Vec::new();
        if longest.may_be_short_of_memory() || plans_sequences(&longest, self.args) {
            let long: Vec<u64> = longest.shorter_passes(MIN_CHUNK).collect();
            let short: Vec<u64> = longest.shorter_passes(LEAST_CHUNK).filter(|pass| *pass < MIN_CHUNK).collect();
            shorter.extend(self.fastest_of(&long, limits, 0.0, &mut estimate)?);
            shorter.extend(self.fastest_of(&short, limits, least_gain_of_shortest(&longest), &mut estimate)?);
        }
        Ok(Candidates { longest, shorter, estimate })
    }

    /// The request for the fastest of these lengths of passes by the estimates, if it takes less time than `estimate` by the share `least_gain`.
    /// Its estimate then replaces `estimate`.
    fn fastest_of(
        &self,
        passes: &[u64],
        limits: Limits,
        least_gain: f64,
        estimate: &mut Estimate,
    ) -> Result<Option<PlanningRequest>, SplitError> {
        let (mut fastest, mut most_ms) = (None, estimate.objective_ms * (1.0 - least_gain));
        for longest_pass in passes {
            let request = self.request(Limits { longest_pass: *longest_pass, ..limits })?;
            let estimated = Estimate::of(&request, self.args);
            if estimated.objective_ms < most_ms {
                most_ms = estimated.objective_ms;
                (fastest, *estimate) = (Some(request), estimated);
            }
        }
        Ok(fastest)
    }

    /// The fastest plan of all candidates, which are planned at the same time.
    fn fastest_candidate(&self, candidates: &Candidates) -> Result<Chosen, SplitError> {
        let (longest, shorter) = std::thread::scope(|scope| {
            let shorter = candidates.shorter.iter().cloned();
            let shorter: Vec<_> = shorter.map(|request| scope.spawn(|| self.plan_request(request))).collect();
            let longest = self.plan_with_longest_fitting_passes(candidates.longest.clone());
            let shorter = shorter.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
            (longest, shorter.collect::<Vec<_>>())
        });
        let shorter = shorter.into_iter().flatten().chain(self.halve_passes_while_faster(candidates, &longest));
        let faster = |best: Chosen, other: Chosen| if other.uses_memory_better_than(&best) { other } else { best };
        match longest {
            Ok(longest) if !longest.is_short_of_memory() && !plans_sequences(&longest.request, self.args) => {
                Ok(longest)
            }
            Ok(longest) => Ok(shorter.fold(longest, faster)),
            Err(refusal) => shorter.reduce(faster).ok_or(refusal),
        }
    }

    /// The fastest plan with passes shorter than the longest that fit, if nothing was estimated because nothing fits without streaming to GPUs.
    /// Halves the length of passes as long as each plan is faster than the one before.
    fn halve_passes_while_faster(
        &self,
        candidates: &Candidates,
        longest: &Result<Chosen, SplitError>,
    ) -> Option<Chosen> {
        let longest = longest.as_ref().ok().filter(|_| candidates.estimate.objective_ms.is_infinite())?;
        let halved = |chosen: &Chosen| {
            let longest_pass = chosen.request.shorter_pass()?;
            let request = self.request(Limits { longest_pass, ..chosen.request.limits }).ok()?;
            self.plan_request(request).ok().filter(|shorter| shorter.uses_memory_better_than(chosen))
        };
        std::iter::successors(halved(longest), halved).last()
    }

    /// The plan with passes of at most this many tokens, with KV caches where the settings have them.
    pub fn plan_with_passes_of(&self, longest_pass: u64) -> Result<Chosen, SplitError> {
        self.plan_request(self.request(Limits { longest_pass, ..self.limits() })?)
    }

    fn plan_request(&self, mut request: PlanningRequest) -> Result<Chosen, SplitError> {
        let partitioning = place_sequences(&mut request, self.args)?;
        Ok(Chosen::new(request, partitioning))
    }

    /// The plan with the longest passes that fit, and whose activations leave the host room for weights.
    fn plan_with_longest_fitting_passes(&self, mut request: PlanningRequest) -> Result<Chosen, SplitError> {
        let limits = request.limits;
        let mut shortest_fits = false;
        loop {
            let placed = place_sequences(&mut request, self.args);
            let shorter = match &placed {
                Err(SplitError::OverBudget { .. }) => {
                    if !shortest_fits && let Some(longest_pass) = request.shorter_passes(limits.shortest_pass).last() {
                        let shortest = self.request(Limits { longest_pass, ..limits })?;
                        if let Err(refusal @ SplitError::OverBudget { .. }) = self.plan_request(shortest) {
                            return Err(refusal);
                        }
                        shortest_fits = true;
                    }
                    request.shorter_pass()
                }
                Ok(found) => request.shorter_pass_on_host(self.analysis, &found.solution.placements),
                Err(_) => None,
            };
            match shorter {
                Some(longest_pass) => request = self.request(Limits { longest_pass, ..limits })?,
                None => return placed.map(|partitioning| Chosen::new(request, partitioning)),
            }
        }
    }

    /// Calls `use_inputs` with these inputs for other memory budgets, whose plans are never measured.
    pub fn with_memory<T>(&self, vram: Vec<u64>, ram: Option<u64>, use_inputs: impl FnOnce(&PlanInputs) -> T) -> T {
        let size = hpp_schema::ByteSize;
        let vram: Vec<_> = vram.into_iter().map(size).collect();
        let change = |args: &mut SplitArgs| {
            args.vram = if vram.is_empty() { args.vram.clone() } else { vram.clone() };
            args.ram = ram.map(size).or(args.ram);
            args.planning = PlanningArgs { sweep_vram: None, refine: None, ..args.planning.clone() };
        };
        self.with_settings(change, use_inputs)
    }

    /// Calls `use_inputs` with these inputs and changed settings.
    pub fn with_settings<T>(&self, change: impl Fn(&mut SplitArgs), use_inputs: impl FnOnce(&PlanInputs) -> T) -> T {
        let changed = |args: &SplitArgs| {
            let mut args = args.clone();
            change(&mut args);
            args
        };
        let args = changed(self.args);
        let other = self.alternative.map(|other| (changed(other.args), other.analysis));
        let alternative = other.as_ref().map(|(args, analysis)| Alternative { args, analysis });
        use_inputs(&PlanInputs { args: &args, alternative, ..*self })
    }
}

/// Times of a plan. With GPUs they are estimates: those of a plan without streaming before its blocks become partitions, which takes a hundredth
/// of the time to find. Infinite if none fits.
#[derive(Clone, Copy)]
struct Estimate {
    /// The time that the objective minimises, milliseconds.
    objective_ms: f64,
    /// The time of a token of one sequence, milliseconds.
    decode_ms: f64,
}

impl Estimate {
    fn of(request: &PlanningRequest, args: &SplitArgs) -> Self {
        if plans_sequences(request, args) {
            return Estimate { objective_ms: estimated_ms_per_token(request, args), decode_ms: f64::INFINITY };
        }
        let times = if request.problem.gpus.is_empty() {
            place(request, args).ok().map(|placed| (placed.solution.objective_ms, placed.solution.decode_ms))
        } else {
            let options = Options { mechanisms: Mechanisms::ResidentCpuDisk, ..request.options };
            plan(request.single(), &options).ok().map(|found| (found.objective_ms, found.decode_ms))
        };
        let (objective_ms, decode_ms) = times.unwrap_or((f64::INFINITY, f64::INFINITY));
        Estimate { objective_ms, decode_ms }
    }
}

/// Whether the plan is for as many sequences as give most tokens per second.
fn plans_sequences(request: &PlanningRequest, args: &SplitArgs) -> bool {
    request.options.objective == Objective::Throughput && !args.has_manual_placement()
}

/// Requests with passes of different lengths, before any of them is planned as asked.
struct Candidates {
    /// Passes as long as they may be.
    longest: PlanningRequest,
    /// Shorter passes, where they are estimated to be faster.
    shorter: Vec<PlanningRequest>,
    /// The fastest of them by the estimates.
    estimate: Estimate,
}

/// The share that passes shorter than [`MIN_CHUNK`] must gain.
fn least_gain_of_shortest(request: &PlanningRequest) -> f64 {
    match request.options.objective {
        Objective::Decode => LEAST_DECODE_GAIN_OF_SHORTEST,
        Objective::Prefill | Objective::Mixed | Objective::Throughput => LEAST_GAIN_OF_SHORTEST,
    }
}

/// Places the blocks: for several sequences, if the objective is their throughput.
fn place_sequences(request: &mut PlanningRequest, args: &SplitArgs) -> Result<Partitioning, SplitError> {
    if plans_sequences(request, args) {
        choose_sequences(request, args)?;
    }
    let mut placed = place(request, args)?;
    for _ in 0..MOST_CORRECTIONS {
        let Some(other) = other_sequences(request, &placed) else { break };
        let before = std::mem::replace(&mut request.problem, other);
        match place(request, args) {
            Ok(other) => placed = other,
            Err(_) => {
                request.problem = before;
                break;
            }
        }
    }
    Ok(placed)
}

/// The number of sequences is corrected so often at most.
const MOST_CORRECTIONS: usize = 3;

/// The problem for another number of sequences, if that number is better with these partitions than the number of the problem. Fewer sequences
/// are better if they are hardly slower, because their states leave more memory for weights.
fn other_sequences(request: &PlanningRequest, placed: &Partitioning) -> Option<Problem> {
    let single = request.single.as_ref()?;
    let best = throughput_of(request, placed).sequences;
    let other = single.for_sequences(best);
    (other.load.sequences != request.problem.load.sequences).then_some(other)
}

impl Chosen {
    /// A plan of the settings as they are.
    pub fn new(request: PlanningRequest, partitioning: Partitioning) -> Self {
        Chosen { request, partitioning, is_alternative: false, with_kv_on_disk_ms: None }
    }

    /// Whether this plan is faster than `other` because it holds more weights where they are used, or more sequences. A gain from shorter
    /// passes alone does not count.
    fn uses_memory_better_than(&self, other: &Chosen) -> bool {
        let least = other.cost();
        let [this, that] = [&self.partitioning.solution, &other.partitioning.solution];
        let [these, those] = [self, other].map(|chosen| chosen.request.problem.load.sequences);
        let decodes_faster = these > those || these == those && this.decode_ms < that.decode_ms;
        let holds_more = this.placements != that.placements || decodes_faster;
        holds_more && self.cost() < least - LEAST_GAIN * least.abs()
    }

    /// Whether KV caches in host memory take the place of weights that are read from disk instead.
    fn may_gain_from_kv_on_disk(&self) -> bool {
        let Chosen { request, partitioning, .. } = self;
        !partitioning.is_manual()
            && !request.problem.budget.host_kv_on_disk
            && request.options.objective != Objective::Throughput
            && partitioning.disk_streaming(request).is_some_and(|disk| !disk.holds_all())
    }

    /// Returns the plan with KV caches on disk if it gains enough, else this one. The smaller lower bound of both holds
    /// for the result.
    fn or_faster(mut self, on_disk: Result<Chosen, SplitError>) -> Chosen {
        let Ok(mut on_disk) = on_disk else { return self };
        let [now, then] = [&mut self, &mut on_disk].map(|chosen| &mut chosen.partitioning.solution);
        let bound_ms = now.bound_ms.min(then.bound_ms);
        let (is_first_proven, is_faster) = (now.proven, then.objective_ms < now.objective_ms);
        for solution in [&mut *now, &mut *then] {
            (solution.bound_ms, solution.proven) = (bound_ms, false);
        }
        now.proven = is_first_proven && !is_faster;
        let is_faster_by = |share: f64| then.decode_ms < now.decode_ms * (1.0 - share);
        if is_faster_by(WORTH_THE_DISK) {
            return on_disk;
        }
        let with_kv_on_disk_ms = is_faster_by(WORTH_TELLING).then_some(then.decode_ms);
        Chosen { with_kv_on_disk_ms, ..self }
    }

    /// The number that the objective minimises: milliseconds, or for throughput the negative tokens per second.
    pub fn cost(&self) -> f64 {
        let solution = &self.partitioning.solution;
        match self.request.options.objective {
            Objective::Throughput => -tokens_per_second(&self.request.problem, solution.prefill_ms, solution.decode_ms),
            _ => solution.objective_ms,
        }
    }

    /// Whether more memory could hold weights that are streamed, or blocks that compute on the host beside a GPU.
    fn is_short_of_memory(&self) -> bool {
        let Chosen { request, partitioning, .. } = self;
        let on_host = || partitioning.solution.placements.iter().any(|placement| placement.decode == Placement::Cpu);
        partitioning.streams_weights(request) || !request.problem.gpus.is_empty() && on_host()
    }
}
