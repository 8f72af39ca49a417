//! Divides partitions that are read from disk before their mixture of experts, so that the runtime knows which experts a pass selects
//! before it reads them.

use crate::error::SplitError;
use crate::partitioning::Partitioning;
use crate::request::PlanningRequest;
use hpp_graph::{EarlyRouter, ExpertCounts, Graph, Mixture, NodeId, PartitionGraph, Segmentation, cut};
use hpp_model::{Analysis, PartitionSpec};
use hpp_partition::{BlockPlacement, Placement};

/// The partitions of a plan. Those of a mixture that is read by demand are divided in two.
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
}

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
    let mut divided =
        Divided { specs: Vec::new(), mixtures: Vec::new(), origins: Vec::new(), segmentation, parts: Vec::new() };
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
    if request.read_experts_ahead {
        divided.predict(&analysis.graph, request.movable);
    }
    Ok(divided)
}

impl Divided {
    /// Lets a partition before each mixture predict which experts the next mixture selects.
    fn predict(&mut self, graph: &Graph, movable: bool) {
        let mixtures: Vec<usize> = (0..self.mixtures.len()).filter(|index| self.mixtures[*index].is_some()).collect();
        for (&index, &later) in mixtures.iter().zip(mixtures.iter().skip(1)) {
            if let Some((producer, router)) = self.early_router(graph, index, later, movable) {
                self.parts[index].prediction = Some(router.prediction.clone());
                self.parts[producer].early_router = Some(router);
            }
        }
    }

    /// The router of partition `later`, and the partition before `index` that computes it too: the one that has the hidden state for it. `None`
    /// if none can: layers share the file of partitions whose weights are inputs on a GPU.
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
        is_on_host
            && ExpertCounts::of(&analysis.graph, found).is_some()
            && Mixture::of(&analysis.graph, found).is_none()
    };
    let whole: Vec<usize> = (0..analysis.segmentation.blocks.len()).filter(is_whole).collect();
    let label = |block: &usize| &analysis.segmentation.blocks[*block].label;
    let blocks = match (whole.first()?, whole.last()?) {
        (first, last) if first == last => label(first).clone(),
        (first, last) => format!("{} to {}", label(first), label(last)),
    };
    Some(format!(
        "the experts of {blocks} are read whole in each pass: only of QMoE and MoE, and of experts that the model adds one after the other, with a router in the graph, constant weights and 16 KiB \
         or more for an expert, is known before it runs which experts it selects, and pays to read them alone"
    ))
}

/// The mixture of a partition that is one block on the host in both phases.
fn mixture(request: &PlanningRequest, analysis: &Analysis, spec: &PartitionSpec) -> Option<Mixture> {
    let is_one_on_host = spec.blocks.len() == 1 && spec.placement == BlockPlacement::both(Placement::Cpu);
    let block = spec.blocks.start;
    request.problem.blocks[block].experts.filter(|_| is_one_on_host)?;
    Mixture::of(&analysis.graph, &analysis.segmentation.blocks[block])
}
