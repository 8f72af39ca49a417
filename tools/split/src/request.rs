//! What the planner is asked: the model's costs, the limits, the wish.

use crate::cli::{GpuLayers, KvPlace, SplitArgs, Stream};
use crate::complaint::{Complaint, Complaints};
use crate::costs::Costs;
use hpp_model::{Analysis, DEFAULT_CHUNK, Load, avoid_faults, problem};
use hpp_partition::{Budget, KvHome, Options, Packing, Problem};
use hpp_schema::memory::{PROCESS, READ_AHEAD};
use hpp_schema::{Budgets, ByteSize, ModelKind};

/// Device memory where none is said and blocks are placed by hand: as much as they like.
const UNLIMITED: u64 = 1 << 50;
/// Part of a machine's host memory that is left to others.
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
}

impl Request {
    /// From the settings, with everything at once that stands in the way.
    pub fn new(args: &SplitArgs, analysis: &Analysis, costs: &Costs) -> Result<Self, Complaints> {
        let (budget, shown) = budget(args, costs);
        let load = load(analysis, args, !budget.vram.is_empty());
        let budgets = Budgets {
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
        let against = args.stands_against_streaming();
        let (options, movable) = (args.planning.options(against), args.movable);
        Ok(Request { load, problem, options, budgets, movable, margin_unsaid: args.margin.is_none() })
    }
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
fn budget(args: &SplitArgs, costs: &Costs) -> (Budget, Vec<u64>) {
    let source = costs.source();
    let asked: Vec<u64> = args.vram.iter().map(|size| size.0).collect();
    let shown = match (asked.is_empty(), args.planning.sweep_vram) {
        (false, _) => asked,
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
