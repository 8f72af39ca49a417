//! What the planner is asked: the model's costs, the limits, the wish.

use crate::cli::{GpuLayers, KvPlace, SplitArgs, Stream};
use crate::complaint::{Complaint, Complaints};
use crate::costs::Costs;
use crate::here::Here;
use hpp_model::{Analysis, DEFAULT_CHUNK, Load, avoid_faults, problem};
use hpp_partition::{Budget, KvHome, Options, Packing, Problem};
use hpp_schema::memory::{PROCESS, READ_AHEAD};
use hpp_schema::{Budgets, ByteSize, ModelKind};

/// Device memory where none is said and blocks are placed by hand: as much as they like.
const UNLIMITED: u64 = 1 << 50;
/// Part of the host memory of another machine that is left to other programs.
const HOST_SHARE: u64 = 16;

/// A planning problem and how it is to be solved.
#[derive(Clone, Debug)]
pub struct Request {
    /// What the costs are counted for.
    pub load: Load,
    /// The problem.
    pub problem: Problem,
    /// How to solve it.
    pub options: Options,
    /// The limits as a plan says them.
    pub budgets: Budgets,
    /// Whether blocks on a GPU are to be movable.
    pub movable: bool,
    /// Whether nobody said what to leave unused on GPUs.
    pub margin_unsaid: bool,
    /// Whether operators and element types that ONNX Runtime lacks are left to a library of custom operators.
    pub allow_unknown_operators: bool,
    /// What this machine has, where the plan is for it.
    pub here: Here,
}

impl Request {
    /// From the settings, with everything at once that stands in the way.
    pub fn new(args: &SplitArgs, analysis: &Analysis, costs: &Costs, here: &Here) -> Result<Self, Complaints> {
        let (budget, shown) = budget(args, costs, here);
        let load = load(analysis, args, !budget.vram.is_empty());
        let mut budgets = Budgets {
            vram: shown.into_iter().map(ByteSize).collect(),
            ram: budget.ram.map(ByteSize),
            context: load.context,
            batch: load.batch,
            margin: ByteSize(budget.margin),
        };
        let complain = |finding: &hpp_schema::Finding| Complaint::in_file(&costs.label(), finding);
        let mut problem = problem(analysis, load, costs.source(), budget)
            .map_err(|findings| Complaints(findings.iter().map(complain).collect()))?;
        // Whoever places blocks by hand knows why; the plan still names no provider that gets them wrong.
        if gpus_by_hand(args) == 0 {
            avoid_faults(&mut problem, analysis, costs.source());
        }
        if let Some(ram) = here.ram().filter(|ram| args.ram.is_none() && *ram < most_on_host(&problem)) {
            (problem.budget.ram, budgets.ram) = (Some(ram), Some(ByteSize(ram)));
        }
        let against = args.stands_against_streaming();
        let (options, movable) = (args.planning.options(against), args.movable);
        let (margin_unsaid, here) = (args.margin.is_none(), here.clone());
        let allow_unknown_operators = args.allow_unknown_operators;
        Ok(Request { load, problem, options, budgets, movable, margin_unsaid, allow_unknown_operators, here })
    }
}

/// What a plan looks at of this machine: nothing where it is for the machine of a file or a profile.
pub fn look(args: &SplitArgs, costs: &Costs) -> Here {
    if !matches!(costs, Costs::Assumed) {
        return Here::default();
    }
    Here::look(takes_gpus_of_this_machine(args) || !gives_no_gpu(args) && !args.vram.is_empty())
}

/// What was looked at and not asked for, and budgets beyond what this machine has.
pub fn notes(args: &SplitArgs, here: &Here) -> Vec<String> {
    let mut notes: Vec<String> =
        here.note(args.ram.is_none(), here.host.is_some() && takes_gpus_of_this_machine(args)).into_iter().collect();
    if let Some((asked, host)) = args.ram.zip(here.host).filter(|(asked, host)| asked.0 > host.available) {
        let [free, total] = [host.available, host.total].map(|bytes| ByteSize(bytes).human());
        let asked = asked.human();
        notes.push(format!("--ram {asked} is more than this machine has free ({free} of {total})"));
    }
    for (number, (asked, gpu)) in args.vram.iter().zip(&here.gpus).enumerate() {
        if let Some(free) = gpu.free.filter(|free| asked.0 > *free) {
            let (asked, free) = (asked.human(), ByteSize(free).human());
            notes.push(format!("--vram {asked} is more than gpu{number} ({}) has free: {free}", gpu.name));
        }
    }
    notes
}

/// Whether nobody says anything of GPUs, so that those of this machine are taken.
fn takes_gpus_of_this_machine(args: &SplitArgs) -> bool {
    let by_hand = gpus_by_hand(args) > 0 || matches!(args.gpu_layers, Some(GpuLayers::Count(_)));
    args.vram.is_empty() && args.planning.sweep_vram.is_none() && !by_hand
}

/// `--vram 0`.
fn gives_no_gpu(args: &SplitArgs) -> bool {
    matches!(args.vram.as_slice(), [ByteSize(0)])
}

/// Host memory that no placement of this problem exceeds: every block there, each a partition of its own.
fn most_on_host(problem: &Problem) -> u64 {
    let all = 0..problem.blocks.len();
    let weights = all.map(|block| problem.weight_bytes(block)).fold(0, u64::saturating_add);
    let state = problem.blocks.iter().map(|block| block.kv_bytes).fold(0, u64::saturating_add);
    let workspace = problem.blocks.iter().map(|block| block.workspace_bytes).max().unwrap_or(0);
    let budget = &problem.budget;
    [state, workspace, budget.process].into_iter().fold(budget.packing.packed(weights), u64::saturating_add)
}

/// Device memory left unused where nobody says: this part of the smallest, and no more than so many bytes.
const MARGIN_SHARE: u64 = 16;
const MOST_MARGIN: u64 = 1 << 30;

/// Device memory left unused where nobody says.
pub fn default_margin(vram: &[u64]) -> u64 {
    vram.iter().min().map_or(0, |smallest| (smallest / MARGIN_SHARE).min(MOST_MARGIN))
}

/// The smallest device memory that holds a demand beside the margin left where nobody says.
pub fn with_default_margin(demand: u64) -> u64 {
    let shared = u128::from(demand) * u128::from(MARGIN_SHARE);
    let shared = u64::try_from(shared.div_ceil(u128::from(MARGIN_SHARE - 1))).unwrap_or(u64::MAX);
    shared.min(demand.saturating_add(MOST_MARGIN))
}

/// The limits to keep, and device memory as a plan says it.
fn budget(args: &SplitArgs, costs: &Costs, here: &Here) -> (Budget, Vec<u64>) {
    let source = costs.source();
    let asked: Vec<u64> = args.vram.iter().map(|size| size.0).collect();
    let shown = match (asked.is_empty(), args.planning.sweep_vram) {
        _ if gives_no_gpu(args) => vec![],
        (false, _) => asked,
        (true, None) if takes_gpus_of_this_machine(args) && matches!(costs, Costs::Assumed) => here.vram(),
        // A sweep says how much; that of one GPU where nobody says of how many.
        (true, Some(range)) if source.gpu_memory().is_empty() => range.points().into_iter().max().into_iter().collect(),
        (true, _) => source.gpu_memory(),
    };
    let by_hand = gpus_by_hand(args);
    let vram = if shown.is_empty() { vec![UNLIMITED; by_hand] } else { shown.clone() };
    let host = source.host_memory().map(|memory| memory - memory / HOST_SHARE);
    let budget = Budget {
        vram,
        ram: args.ram.map(|size| size.0).or(host),
        margin: args.margin.map_or(default_margin(&shown), |size| size.0),
        kv: if args.kv == KvPlace::Cpu { KvHome::Host } else { KvHome::Device },
        process: PROCESS,
        reading: READ_AHEAD,
        // The model says.
        packing: Packing::default(),
    };
    (budget, shown)
}

/// GPUs that a placement by hand names.
fn gpus_by_hand(args: &SplitArgs) -> usize {
    let layers = usize::from(matches!(args.gpu_layers, Some(GpuLayers::Count(count)) if count > 0));
    let assigned = args.assign.as_ref().and_then(|assign| assign.highest_gpu()).map_or(0, |gpu| gpu + 1);
    let streamed = usize::from(matches!(args.planning.stream, Some(Stream::Count(_))));
    layers.max(streamed).max(assigned)
}

/// What the plan has to carry: everything in one prefill pass on the host, chunks where a GPU's workspace is planned.
fn load(analysis: &Analysis, args: &SplitArgs, on_gpu: bool) -> Load {
    let context = analysis.context;
    Load {
        batch: args.batch,
        context,
        prompt: args.prompt_tokens.min(context),
        // A model that runs once has no answer to go on with.
        new_tokens: if analysis.kind == ModelKind::SingleRun { 0 } else { args.new_tokens },
        chunk: if on_gpu { context.min(DEFAULT_CHUNK) } else { context },
    }
}
