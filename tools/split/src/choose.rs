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
use crate::request::{Limits, PlanningRequest, STATES_ON_DISK, WhyOnDisk};
use crate::sequences::choose_sequences;
use hpp_model::Analysis;
use hpp_partition::{Mechanisms, Objective, Options, Placement, plan, tokens_per_second};

/// A plan with shorter passes must take less time by at least this share.
const LEAST_GAIN: f64 = 1e-6;

/// KV caches go to disk if a token takes less time by this share: what that costs is estimated from bytes alone, and rows of several
/// sequences are not batched then.
const WORTH_THE_DISK: f64 = 0.2;

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
}

/// A chosen plan.
#[derive(Clone)]
pub struct Chosen {
    /// What was asked of the planner, with the chosen length of passes and home of KV caches.
    pub request: PlanningRequest,
    /// Where blocks compute.
    pub partitioning: Partitioning,
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

    /// The fastest plan, without compressed copies of weights that gain too little. KV caches that may lie anywhere are on disk
    /// where no plan has room for them in memory, or where weights would use that memory much better.
    pub fn choose(&self) -> Result<Chosen, SplitError> {
        let mut chosen = self.with_some_kv_home()?;
        let Chosen { request, partitioning } = &mut chosen;
        if drop_useless_copies(request, self.args, self.analysis, self.costs, partitioning) {
            *partitioning = place_sequences(request, self.args)?;
        }
        Ok(chosen)
    }

    fn with_some_kv_home(&self) -> Result<Chosen, SplitError> {
        let in_memory = self.with_best_passes(self.limits());
        let on_disk = |why| self.with_best_passes(Limits { kv_on_disk: Some(why), ..self.limits() });
        match in_memory {
            Err(refusal @ SplitError::OverBudget { .. }) if self.may_move_kv() => {
                on_disk(WhyOnDisk::TooLittleMemory).map_err(|smaller| smaller.or_smaller(Some(refusal)))
            }
            Ok(chosen) if self.may_move_kv() && chosen.may_gain_from_kv_on_disk() => {
                Ok(chosen.or_faster(on_disk(WhyOnDisk::Faster)))
            }
            chosen => chosen,
        }
    }

    /// Whether KV caches may lie on disk although nobody asked for it.
    fn may_move_kv(&self) -> bool {
        self.args.kv == KvHomeArg::Auto && STATES_ON_DISK
    }

    /// The fastest plan with these limits. Where memory is too small for all weights, shorter passes leave them more of it. Which length is
    /// best is estimated by plans without streaming, which take a hundredth of the time to find; only the best is planned as asked.
    fn with_best_passes(&self, limits: Limits) -> Result<Chosen, SplitError> {
        let longest = self.with_fitting_passes(limits)?;
        if !longest.is_short_of_memory() {
            return Ok(longest);
        }
        let mut best: Option<PlanningRequest> = None;
        let mut least = estimate(&longest.request);
        let mut shorter = longest.request.shorter_pass();
        while let Some(longest_pass) = shorter {
            let request = self.request(Limits { longest_pass, ..limits })?;
            shorter = request.shorter_pass();
            let estimated = estimate(&request);
            if estimated < least {
                (best, least) = (Some(request), estimated);
            }
        }
        let planned = best.and_then(|mut request| {
            let partitioning = place_sequences(&mut request, self.args).ok()?;
            Some(Chosen { request, partitioning })
        });
        Ok(planned.filter(|planned| planned.uses_memory_better_than(&longest)).unwrap_or(longest))
    }

    /// The plan with the longest passes that fit, and whose activations leave the host room for weights.
    fn with_fitting_passes(&self, limits: Limits) -> Result<Chosen, SplitError> {
        let mut request = self.request(limits)?;
        let placed = loop {
            let placed = place_sequences(&mut request, self.args);
            let shorter = match &placed {
                Err(SplitError::OverBudget { .. }) => request.shorter_pass(),
                Ok(found) => request.shorter_pass_on_host(self.analysis, &found.solution.placements),
                Err(_) => None,
            };
            match shorter {
                Some(longest_pass) => request = self.request(Limits { longest_pass, ..limits })?,
                None => break placed.map(|partitioning| Chosen { request: request.clone(), partitioning }),
            }
        };
        placed.map_err(|refusal| with_confirmed_budget(&request, self.args, refusal))
    }

    /// The same for other settings of memory, which are planned and never measured.
    pub fn with_memory<T>(&self, vram: Vec<u64>, ram: Option<u64>, use_inputs: impl FnOnce(&PlanInputs) -> T) -> T {
        let planning = PlanningArgs { sweep_vram: None, refine: None, ..self.args.planning.clone() };
        let sizes = |bytes: Vec<u64>| bytes.into_iter().map(hpp_schema::ByteSize).collect();
        let vram = if vram.is_empty() { self.args.vram.clone() } else { sizes(vram) };
        let args =
            SplitArgs { vram, ram: ram.map(hpp_schema::ByteSize).or(self.args.ram), planning, ..self.args.clone() };
        use_inputs(&PlanInputs { args: &args, ..*self })
    }
}

/// The objective of a plan for one sequence without streaming, milliseconds; infinite if none fits.
fn estimate(request: &PlanningRequest) -> f64 {
    let objective = match request.options.objective {
        Objective::Throughput => Objective::Mixed,
        objective => objective,
    };
    let options = Options { objective, mechanisms: Mechanisms::ResidentCpuDisk, ..request.options };
    plan(request.single(), &options).map_or(f64::INFINITY, |solution| solution.objective_ms)
}

/// Places the blocks: for several sequences, if the objective is their throughput.
fn place_sequences(request: &mut PlanningRequest, args: &SplitArgs) -> Result<Partitioning, SplitError> {
    if request.options.objective == Objective::Throughput && !args.has_manual_placement() {
        choose_sequences(request, args)?;
    }
    place(request, args)
}

impl Chosen {
    /// Whether it is faster because it holds more weights where they are used. That shorter passes alone seem faster is no reason.
    fn uses_memory_better_than(&self, other: &Chosen) -> bool {
        let least = other.cost();
        let [this, that] = [&self.partitioning.solution, &other.partitioning.solution];
        let holds_more = this.placements != that.placements || this.decode_ms < that.decode_ms;
        holds_more && self.cost() < least - LEAST_GAIN * least.abs()
    }

    /// Whether KV caches in host memory take the place of weights that are read from disk instead.
    fn may_gain_from_kv_on_disk(&self) -> bool {
        let Chosen { request, partitioning } = self;
        !partitioning.is_manual()
            && !request.problem.budget.host_kv_on_disk
            && request.options.objective != Objective::Throughput
            && partitioning.disk_streaming(request).is_some_and(|disk| !disk.holds_all())
    }

    /// The plan with KV caches on disk, if it is worth that; a lower bound holds for both.
    fn or_faster(mut self, on_disk: Result<Chosen, SplitError>) -> Chosen {
        let Ok(mut on_disk) = on_disk else { return self };
        let [now, then] = [&mut self, &mut on_disk].map(|chosen| &mut chosen.partitioning.solution);
        let bound_ms = now.bound_ms.min(then.bound_ms);
        let (is_first_proven, is_faster) = (now.proven, then.objective_ms < now.objective_ms);
        for solution in [&mut *now, &mut *then] {
            (solution.bound_ms, solution.proven) = (bound_ms, false);
        }
        now.proven = is_first_proven && !is_faster;
        if then.decode_ms < now.decode_ms * (1.0 - WORTH_THE_DISK) { on_disk } else { self }
    }

    /// What the objective makes small.
    fn cost(&self) -> f64 {
        let solution = &self.partitioning.solution;
        match self.request.options.objective {
            Objective::Throughput => -tokens_per_second(&self.request.problem, solution.prefill_ms, solution.decode_ms),
            _ => solution.objective_ms,
        }
    }

    /// Whether more memory could hold weights that are streamed, or blocks that compute on the host beside a GPU.
    fn is_short_of_memory(&self) -> bool {
        let Chosen { request, partitioning } = self;
        let on_host = || partitioning.solution.placements.iter().any(|placement| placement.decode == Placement::Cpu);
        partitioning.streams_weights(request) || !request.problem.gpus.is_empty() && on_host()
    }
}
