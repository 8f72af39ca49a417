//! Divides partitions that are read from disk before their mixture of experts, so that the runtime knows which experts a pass selects
//! before it reads them.

use crate::cli::SplitArgs;
use crate::error::SplitError;
use crate::partitioning::Partitioning;
use crate::request::PlanningRequest;
use crate::table;
use hpp_graph::{
    EarlyRouter, Graph, Mixture, NodeId, PartitionGraph, Segmentation, WholeMixture, cut, has_mixture, whole_mixtures,
};
use hpp_model::{Analysis, DiskStreaming, PartitionSpec};
use hpp_partition::{BlockPlacement, Placement};
use hpp_schema::ByteSize;
use std::collections::BTreeSet;

/// The partitions of a plan. Partitions with a mixture that is read by demand are divided in two.
pub struct Divided {
    /// The blocks of the partitions; the same block twice where one is divided.
    pub specs: Vec<PartitionSpec>,
    /// The mixture that each partition begins with, where its experts are read by demand.
    pub mixtures: Vec<Option<Mixture>>,
    /// For each partition the partition of the placement that it belongs to.
    pub origins: Vec<usize>,
    /// The blocks, divided where partitions are.
    pub segmentation: Segmentation,
    /// The part of the graph of each partition.
    pub parts: Vec<PartitionGraph>,
    /// Bytes of host memory for second copies of routers, which predict experts.
    early_routers: u64,
}

/// Second copies of routers may take at most the unused margin of each GPU divided by this.
const MARGIN_DIVISOR: u64 = 4;

/// Divides the partitions of a placement whose experts are read by demand. `parts` are those of the undivided partitions.
pub fn divide(
    request: &PlanningRequest,
    analysis: &Analysis,
    partitioning: &Partitioning,
    parts: Vec<PartitionGraph>,
) -> Result<Divided, SplitError> {
    let specs = &partitioning.partitions;
    let by_demand = partitioning.disk_streaming(request).is_some_and(|disk| disk.expert_cache.is_some());
    let wanted = |spec: &PartitionSpec| mixture(request, analysis, spec).filter(|_| by_demand);
    let wanted: Vec<Option<Mixture>> = specs.iter().map(wanted).collect();
    if wanted.iter().all(Option::is_none) {
        return Ok(Divided {
            specs: specs.clone(),
            origins: (0..specs.len()).collect(),
            segmentation: analysis.segmentation.clone(),
            mixtures: wanted,
            parts,
            early_routers: 0,
        });
    }
    let is_divided = |spec: &PartitionSpec, mixture: &Mixture| {
        !mixture.is_routed_before(&analysis.graph, &analysis.segmentation.blocks[spec.blocks.start])
    };
    let node = |(spec, mixture): (&PartitionSpec, &Option<Mixture>)| {
        let mixture = mixture.as_ref().filter(|mixture| is_divided(spec, mixture))?;
        Some((spec.blocks.start, mixture.nodes.clone()))
    };
    let nodes: Vec<(usize, Vec<NodeId>)> = specs.iter().zip(&wanted).filter_map(node).collect();
    let segmentation = analysis.segmentation.divided_at_experts(&analysis.graph, &nodes);
    let mut divided = Divided {
        specs: Vec::new(),
        mixtures: Vec::new(),
        origins: Vec::new(),
        segmentation,
        parts: Vec::new(),
        early_routers: 0,
    };
    let (mut groups, mut next) = (Vec::new(), 0);
    for (origin, (spec, mixture)) in specs.iter().zip(wanted).enumerate() {
        let mut add = |blocks: usize, mixture: Option<Mixture>| {
            groups.push(next..next + blocks);
            next += blocks;
            divided.specs.push(spec.clone());
            divided.mixtures.push(mixture);
            divided.origins.push(origin);
        };
        match mixture {
            Some(mixture) if is_divided(spec, &mixture) => {
                add(spec.blocks.len(), None);
                add(1, Some(mixture));
            }
            mixture => add(spec.blocks.len(), mixture),
        }
    }
    divided.parts =
        cut(&analysis.graph, &divided.segmentation, &groups).map_err(|error| SplitError::Cut(Box::new(error)))?;
    if let Some(disk) = partitioning.disk_streaming(request).filter(|_| request.read_experts_ahead) {
        divided.predict(request, &analysis.graph, &disk);
    }
    Ok(divided)
}

impl Divided {
    /// Lets a partition before each mixture predict which experts the next mixture selects, as long as there is room for the second copy of a
    /// router that this needs. Predicts nothing if other weights are read from disk too: the runtime would then read no experts ahead.
    fn predict(&mut self, request: &PlanningRequest, graph: &Graph, disk: &DiskStreaming) {
        let mixtures: Vec<usize> = (0..self.mixtures.len()).filter(|index| self.mixtures[*index].is_some()).collect();
        let mut room = Room::beside(request, disk, graph, self.mixtures.iter().flatten());
        for (&index, &later) in mixtures.iter().zip(mixtures.iter().skip(1)) {
            let Some((producer, router)) = self.early_router(graph, index, later, request.movable) else { continue };
            if room.take(self.specs[producer].placement, router.weight_bytes(graph)) {
                self.parts[index].prediction = Some(router.prediction.clone());
                self.parts[producer].early_router = Some(router);
            }
        }
        self.early_routers = room.taken_of_host;
    }

    /// The router of partition `later`, and the partition before `index` that can compute it too because it produces the router's input. `None`
    /// if no partition can. A partition whose weights are inputs on a GPU cannot, because other layers share its class file.
    fn early_router(&self, graph: &Graph, index: usize, later: usize, movable: bool) -> Option<(usize, EarlyRouter)> {
        let router = EarlyRouter::of(graph, self.mixtures[index].as_ref()?, self.mixtures[later].as_ref()?)?;
        let node = graph.producer(router.hidden_state()?)?;
        let producer = self.parts[..index].iter().position(|part| part.nodes.contains(&node))?;
        let shares_file = |placement: Placement| match placement {
            Placement::Cpu => false,
            Placement::Resident(_) => movable,
            Placement::Streamed(_) => true,
        };
        let BlockPlacement { prefill, decode } = self.specs[producer].placement;
        let is_possible = !shares_file(prefill) && !shares_file(decode) && self.parts[producer].early_router.is_none();
        is_possible.then_some((producer, router))
    }

    /// How the plan reads from disk, with the memory for experts reduced by second copies of routers.
    pub fn disk_streaming(&self, disk: DiskStreaming) -> DiskStreaming {
        let expert_cache = disk.expert_cache.map(|cache| cache - self.early_routers.min(cache));
        DiskStreaming { expert_cache, ..disk }
    }
}

/// Memory for second copies of routers, bytes.
struct Room {
    /// Of the host: what the cache of experts has beyond the experts of one mixture.
    host: u64,
    taken_of_host: u64,
    /// Of each GPU.
    gpus: Vec<u64>,
}

impl Room {
    fn beside<'m>(
        request: &PlanningRequest,
        disk: &DiskStreaming,
        graph: &Graph,
        mixtures: impl Iterator<Item = &'m Mixture>,
    ) -> Room {
        let largest = mixtures.map(|mixture| mixture.bytes(graph)).max().unwrap_or(0);
        let cache = disk.expert_cache.filter(|_| disk.locked_share >= 1.0).unwrap_or(0);
        let of_gpu = request.problem.budget.margin / MARGIN_DIVISOR;
        Room { host: cache.saturating_sub(largest), taken_of_host: 0, gpus: vec![of_gpu; request.problem.gpus.len()] }
    }

    /// Takes room where a partition computes; false if there is too little.
    fn take(&mut self, placement: BlockPlacement, weights: u64) -> bool {
        let places = BTreeSet::from([placement.prefill, placement.decode]);
        // Kernels of the host may keep a packed copy beside the weights.
        let needed = |place: &Placement| if *place == Placement::Cpu { 2 * weights } else { weights };
        let fits = |place: &Placement| match place {
            Placement::Cpu => self.host >= needed(place),
            Placement::Resident(gpu) | Placement::Streamed(gpu) => {
                self.gpus.get(*gpu).is_some_and(|room| *room >= needed(place))
            }
        };
        let is_possible = self.host > 0 && places.iter().all(fits);
        for place in places.iter().filter(|_| is_possible) {
            match place {
                Placement::Cpu => {
                    self.host -= needed(place);
                    self.taken_of_host += needed(place);
                }
                Placement::Resident(gpu) | Placement::Streamed(gpu) => self.gpus[*gpu] -= needed(place),
            }
        }
        is_possible
    }
}

/// A note on mixtures that a plan reads from disk whole, because what they select cannot be told before they run. `None` if there is none,
/// or if the user wants that.
pub fn note_of_whole_mixtures(
    request: &PlanningRequest,
    analysis: &Analysis,
    partitioning: &Partitioning,
) -> Option<String> {
    let disk = partitioning.disk_streaming(request).filter(|disk| !disk.holds_all())?;
    let is_whole = |block: &usize| {
        let found = &analysis.segmentation.blocks[*block];
        let is_on_host = partitioning.solution.placements[*block].decode == Placement::Cpu && !disk.is_table[*block];
        is_on_host && has_mixture(&analysis.graph, found) && Mixture::of(&analysis.graph, found).is_none()
    };
    let whole: Vec<usize> = (0..analysis.segmentation.blocks.len()).filter(is_whole).collect();
    let label = |block: &usize| &analysis.segmentation.blocks[*block].label;
    let blocks = match (whole.first()?, whole.last()?) {
        (first, last) if first == last => label(first).clone(),
        (first, last) => format!("{} to {}", label(first), label(last)),
    };
    Some(format!(
        "all experts of {blocks} are read from disk in each pass: hpp-split can read only the selected ones of QMoE and MoE, and of experts whose results the model adds up one after the \
         other, if the router is in the graph, the weights are constants and an expert has at least 16 KiB"
    ))
}

/// Notes on blocks that look like mixtures whose experts cannot be read one by one in the form that the exporter wrote: one for each kind.
pub fn notes_of_unknown_forms(analysis: &Analysis) -> Vec<String> {
    let found = whole_mixtures(&analysis.graph, &analysis.segmentation);
    let alike = found.chunk_by(|a, b| (a.count, a.active, a.bytes) == (b.count, b.active, b.bytes));
    let note = |alike: &[WholeMixture]| {
        let labels: Vec<String> =
            alike.iter().map(|mixture| analysis.segmentation.blocks[mixture.block].label.clone()).collect();
        let WholeMixture { count, active, bytes, .. } = alike[0];
        let (all, each) = (ByteSize(bytes).human(), if alike.len() > 1 { " of each" } else { "" });
        format!(
            "{}: looks like a mixture (its router selects {active} of {count} experts) in a form whose experts are not separable: all of them \
             ({all}{each}) are kept in memory, or read in every pass. QMoE and MoE (GenAI's model builder), and experts that a model adds one \
             after the other in 32 bits (Optimum's Mixtral and Qwen3-MoE), are separable if an expert's matrices have 16 KiB or more",
            table::blocks(&labels)
        )
    };
    alike.map(note).collect()
}

/// A note on 4-bit experts that compute on the CPU with activations of floats, which is slower than it need be. `None` if there are none, or
/// if weights are moved for each pass, which then takes the time.
pub fn note_of_float_activations(
    request: &PlanningRequest,
    analysis: &Analysis,
    partitioning: &Partitioning,
) -> Option<String> {
    if partitioning.streams_weights(request) {
        return None;
    }
    let on_host = |block: &usize| partitioning.solution.placements[*block].decode == Placement::Cpu;
    let blocks = 0..analysis.segmentation.blocks.len();
    blocks.filter(on_host).any(|block| analysis.has_experts_with_float_activations(block)).then(|| {
        "4-bit experts compute with activations in floats on the CPU, as exported; hpp-split --int8-activations rounds these to 8 bits, about 1.5 \
         times as fast in memory, with slightly other logits"
            .to_owned()
    })
}

/// Whether layers could be divided before their experts, but the settings do not name such layers.
pub fn are_undivided(args: &SplitArgs, analysis: &Analysis) -> bool {
    let could_be = || analysis.segmentation.with_experts_apart(&analysis.graph, u32::MAX).1 > 0;
    args.layers_with_host_experts().is_none() && could_be()
}

/// The mixture of a partition that is one block on the host in both phases.
fn mixture(request: &PlanningRequest, analysis: &Analysis, spec: &PartitionSpec) -> Option<Mixture> {
    let is_one_on_host = spec.blocks.len() == 1 && spec.placement == BlockPlacement::both(Placement::Cpu);
    let block = spec.blocks.start;
    request.problem.blocks[block].experts.filter(|_| is_one_on_host)?;
    Mixture::of(&analysis.graph, &analysis.segmentation.blocks[block])
}
