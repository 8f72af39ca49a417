//! From a request to a place for every block: by the planner, or by hand.

use crate::cli::{GpuLayers, KvPlace, SplitArgs, Stream};
use crate::error::SplitError;
use crate::pieces::Apart;
use crate::predict::Expected;
use crate::request::{Request, with_default_margin};
use hpp_model::{FromDisk, Piece};
use hpp_partition::{
    Block, Choice, Mechanisms, NoFit, Options, Phase, Place, Problem, Solution, Usage, Where, evaluate, fits, gpu_layers,
    plan, stream_layers, usage_of_partitions,
};
use hpp_schema::memory::READ_AHEAD;

/// Slots of a ring where blocks are streamed by hand and nobody says how many: one computes, one is ready, one is on its way.
const SLOTS: u32 = 3;

/// A placement, what it is expected to take, and the pieces it makes of the model.
#[derive(Clone, Debug)]
pub struct Placement {
    /// A choice for every block, with its times.
    pub solution: Solution,
    /// Runs of blocks that become partitions.
    pub pieces: Vec<Piece>,
    /// Whether a person placed blocks.
    pub by_hand: bool,
    /// The fewest pieces that were asked for.
    pub at_least: usize,
}

/// Decides where every block computes.
pub fn place(request: &Request, args: &SplitArgs) -> Result<Placement, SplitError> {
    let (solution, by_hand) = choose(request, args)?;
    let placement = match by_hand {
        true => Placement::new(request, args.partitions, solution, true),
        false => planned(request, args, solution),
    };
    placement.check(request)?;
    refuse_split_kv(&request.problem.blocks, &placement.solution.choices, args.kv)?;
    refuse_too_many(&placement.pieces, args.max_partitions)?;
    Ok(placement)
}

/// A planner's solution cut into pieces, or a simpler one that takes less when its pieces are priced.
pub fn planned(request: &Request, args: &SplitArgs, solution: Solution) -> Placement {
    let placement = Placement::new(request, args.partitions, solution, false);
    in_one_place(request, args, &placement).unwrap_or(placement)
}

/// The best placement in which every block computes in one place and stays there, where that takes less. Blocks that are streamed
/// or change their place between phases are pieces of their own in both; starting those pieces is priced only here.
fn in_one_place(request: &Request, args: &SplitArgs, planned: &Placement) -> Option<Placement> {
    let moves = |choice: &Choice| choice.prefill != choice.decode || matches!(choice.decode, Where::Streamed(_));
    if !planned.solution.choices.iter().any(moves) {
        return None;
    }
    let options = Options { mechanisms: Mechanisms::ResidentCpuDisk, ..request.options };
    let other = Placement::new(request, args.partitions, plan(&request.problem, &options).ok()?, false);
    let bound_ms = planned.solution.bound_ms;
    let solution = Solution { bound_ms, proven: false, ..other.solution.clone() };
    (other.solution.objective_ms < planned.solution.objective_ms).then_some(Placement { solution, ..other })
}

fn choose(request: &Request, args: &SplitArgs) -> Result<(Solution, bool), SplitError> {
    let problem = &request.problem;
    let on_host = || judged(request, args, vec![Choice::both(Where::Cpu); problem.blocks.len()], &[]);
    let counted = matches!(args.planning.stream, Some(Stream::Count(_)));
    let (solution, by_hand) = match args.gpu_layers {
        Some(GpuLayers::Count(_)) => (counted_layers(request, args)?, true),
        None if counted => (counted_layers(request, args)?, true),
        Some(GpuLayers::Auto) if problem.budget.vram.is_empty() => {
            return Err(SplitError::setting(
                "--gpu-layers auto needs a budget",
                "say how much VRAM there is: --vram 24G",
            ));
        }
        // Without a budget, what a person names goes to a GPU and nothing else.
        _ if request.budgets.vram.is_empty() && args.assign.is_some() => (on_host(), true),
        _ => match (plan(problem, &request.options), &args.assign) {
            (Ok(solution), _) => (solution, false),
            // Placing by hand starts from the host when the budget alone leads nowhere.
            (Err(_), Some(_)) => (on_host(), true),
            (Err(source), None) => return Err(no_fit(request)(source)),
        },
    };
    match &args.assign {
        None => Ok((solution, by_hand)),
        Some(assign) => {
            // The blocks that a person names move.
            let places = assign.places(&problem.blocks)?;
            refuse_missing(request, places.iter().flatten())?;
            let named = places.into_iter().map(|place| place.map(Choice::both));
            let choices = named.zip(solution.choices).map(|(named, choice)| named.unwrap_or(choice)).collect();
            Ok((judged(request, args, choices, &solution.slots), true))
        }
    }
}

/// `--gpu-layers N` and `--stream N`: the last layers on the GPU for good, others streamed, the rest on the host.
fn counted_layers(request: &Request, args: &SplitArgs) -> Result<Solution, SplitError> {
    let blocks = &request.problem.blocks;
    let count = if let Some(GpuLayers::Count(count)) = args.gpu_layers { count } else { 0 };
    let resident = gpu_layers(blocks, count).into_iter().map(|place| match place {
        Place::Cpu => Where::Cpu,
        Place::Gpu(gpu) => Where::Resident(gpu),
    });
    let mut places: Vec<Where> = resident.collect();
    if let Some(Stream::Count(count)) = args.planning.stream {
        let streamed = stream_layers(blocks, &mut places, count);
        if streamed == 0 {
            return Err(SplitError::setting(
                "--stream streams layers that would compute on the host, and there are none",
                "lower --gpu-layers, or name blocks with --assign BLOCKS=stream",
            ));
        }
        // `all` is the largest number there is.
        if count != u64::MAX && count > streamed as u64 {
            let layers = crate::amount::count(streamed, "layer");
            eprintln!("note: --stream {count}: only {layers} would compute on the host, all of them are streamed");
        }
    }
    refuse_missing(request, places.iter())?;
    Ok(judged(request, args, places.into_iter().map(Choice::both).collect(), &[]))
}

/// Choices made by hand, with as many slots as were `planned` where something is streamed, or as are asked for.
fn judged(request: &Request, args: &SplitArgs, choices: Vec<Choice>, planned: &[u32]) -> Solution {
    let streams = |gpu| choices.iter().any(|c| Phase::BOTH.iter().any(|phase| c.of(*phase) == Where::Streamed(gpu)));
    let by_hand = args.planning.slots.unwrap_or(SLOTS);
    let slots = |gpu: usize| match planned.get(gpu) {
        _ if !streams(gpu) => 0,
        Some(planned) if *planned > 0 => *planned,
        _ => by_hand,
    };
    let slots = (0..request.problem.gpus.len()).map(slots).collect();
    evaluate(&request.problem, &request.options, choices, slots)
}

impl Placement {
    /// Cuts the choices into at least so many pieces. What was proven is proven of plans with no needless cuts.
    pub fn new(request: &Request, at_least: usize, solution: Solution, by_hand: bool) -> Self {
        let pieces = pieces(request, at_least, &solution.choices, &solution.slots);
        Placement { solution, pieces, by_hand, at_least }.judged_again(request)
    }

    /// Where pieces would begin for other choices.
    pub fn cuts(&self, request: &Request, choices: &[Choice]) -> Vec<usize> {
        let pieces = pieces(request, self.at_least, choices, &self.solution.slots);
        pieces.iter().skip(1).map(|piece| piece.blocks.start).collect()
    }

    /// How weights are read from disk where host memory cannot hold them.
    pub fn disk(&self, request: &Request) -> Option<FromDisk> {
        from_disk(&self.problem(request), &self.solution.choices, &self.solution.slots)
    }

    /// The request's problem with the cuts between pieces.
    pub fn problem(&self, request: &Request) -> Problem {
        let cuts = self.pieces.iter().skip(1).map(|piece| piece.blocks.start).collect();
        Problem { cuts, ..request.problem.clone() }
    }

    /// The same placement with its times as the request's costs have them, each piece started by itself.
    pub fn judged_again(mut self, request: &Request) -> Self {
        let problem = self.problem(request);
        let Solution { choices, slots, objective_ms, bound_ms, proven, .. } = self.solution;
        let judged = evaluate(&problem, &request.options, choices, slots);
        let proven = proven && judged.objective_ms <= objective_ms * (1.0 + 1e-9);
        self.solution = Solution { bound_ms, proven, ..judged };
        self
    }

    /// The same with the times it took when it was run, and nothing said of other plans.
    pub fn expecting(mut self, request: &Request, took: Expected) -> Self {
        let objective_ms = took.objective_ms(request.options.objective, request.load.new_tokens);
        let Expected { decode_ms, prefill_ms } = took;
        self.solution = Solution { decode_ms, prefill_ms, objective_ms, bound_ms: 0.0, proven: false, ..self.solution };
        self
    }

    /// Refuses a placement that needs more memory than there is.
    pub fn check(&self, request: &Request) -> Result<(), SplitError> {
        let Solution { choices, slots, .. } = &self.solution;
        fits(&request.problem, choices, slots, request.options.mechanisms).map_err(no_fit(request))?;
        // Partitions of the host hold some weights more than once.
        let problem = self.problem(request);
        let on_host = Usage { gpus: vec![], ..usage_of_partitions(&problem, choices, slots) };
        on_host.check(&problem, request.options.mechanisms).map_err(no_fit(request))
    }

    /// Makes a piece part of the one after it, on that one's device.
    pub fn join_with_next(mut self, index: usize, request: &Request) -> Self {
        let joined = self.pieces.remove(index).blocks;
        let next = &mut self.pieces[index];
        next.blocks.start = joined.start;
        self.solution.choices[joined].fill(next.choice);
        self.judged_again(request)
    }
}

fn pieces(request: &Request, at_least: usize, choices: &[Choice], slots: &[u32]) -> Vec<Piece> {
    let pieces = |problem: &Problem| {
        let disk = from_disk(problem, choices, slots);
        let apart = Apart {
            from_disk: disk.as_ref().is_some_and(|disk| !disk.holds_all()),
            tables: disk.is_some(),
            movable: request.movable,
        };
        crate::pieces::pieces(&request.problem, choices, at_least, apart)
    };
    // What fits in one partition may not fit in several, each with constants of its own.
    let cuts = pieces(&request.problem).iter().skip(1).map(|piece| piece.blocks.start).collect();
    pieces(&Problem { cuts, ..request.problem.clone() })
}

/// How weights are read that host memory cannot hold: within the budget in both phases.
fn from_disk(problem: &Problem, choices: &[Choice], slots: &[u32]) -> Option<FromDisk> {
    let usage = usage_of_partitions(problem, choices, slots);
    if problem.budget.host().is_none_or(|room| usage.host.total() <= room) {
        return None;
    }
    let locked = Phase::BOTH.map(|phase| usage.locked_share(problem, phase)).into_iter().fold(1.0, f64::min);
    let largest = usage.largest_read.into_iter().max().unwrap_or(0) as f64;
    let window = (locked < 1.0).then(|| ((1.0 - locked) * largest) as u64 + READ_AHEAD);
    let rows = (0..problem.blocks.len()).map(|block| problem.reads_rows(block)).collect();
    Some(FromDisk { locked, window, rows })
}

/// As the command says it.
pub fn no_fit(request: &Request) -> impl Fn(NoFit) -> SplitError + '_ {
    |source| {
        let what = match source.place {
            Place::Cpu if request.problem.gpus.is_empty() => "the model does not fit in host memory".to_owned(),
            Place::Cpu => "what the GPUs do not hold does not fit in host memory".to_owned(),
            Place::Gpu(index) => format!("the budget of gpu{index} is too small"),
        };
        let smallest = match source.place {
            Place::Gpu(_) if request.margin_unsaid => with_default_margin(source.demand.total()),
            _ => source.smallest(),
        };
        SplitError::NoFit { what, smallest, source }
    }
}

/// A block may only go to a GPU that there is.
fn refuse_missing<'a>(request: &Request, places: impl Iterator<Item = &'a Where>) -> Result<(), SplitError> {
    let gpus = request.problem.gpus.len();
    match places.filter_map(|place| place.gpu()).find(|gpu| *gpu >= gpus) {
        Some(gpu) => Err(SplitError::setting(
            format!("gpu{gpu} is asked for, but there are {gpus} GPUs"),
            "give --vram one size for each GPU, such as 24G,12G",
        )),
        None => Ok(()),
    }
}

fn refuse_split_kv(blocks: &[Block], choices: &[Choice], kv: KvPlace) -> Result<(), SplitError> {
    let on_host = blocks.iter().zip(choices).filter(|(b, c)| b.kv_bytes > 0 && c.decode == Where::Cpu).count();
    if kv == KvPlace::Gpu && on_host > 0 {
        return Err(SplitError::setting(
            format!("--kv gpu, but {on_host} layers with a KV cache compute on the CPU"),
            "a CPU layer's cache in VRAM would cross the bus twice for each token: use --kv follow, or place the layers on the GPU",
        ));
    }
    Ok(())
}

fn refuse_too_many(pieces: &[Piece], most: Option<usize>) -> Result<(), SplitError> {
    match most {
        Some(most) if pieces.len() > most => Err(SplitError::setting(
            format!("this placement needs {} partitions, but --max-partitions is {most}", pieces.len()),
            "allow more partitions, or place neighbouring blocks on one device",
        )),
        _ => Ok(()),
    }
}
