//! Finds blocks with operators that an execution provider computes wrongly, and keeps them off it.

use crate::{Analysis, CostSource};
use hpp_graph::{Block, Graph, NodeId};
use hpp_partition::Problem;
use hpp_schema::{Provider, ProviderFault};

/// The fault of the first of these nodes that a provider computes wrongly.
pub(crate) fn fault(graph: &Graph, nodes: &[NodeId], provider: Provider) -> Option<&'static ProviderFault> {
    nodes.iter().find_map(|node| ProviderFault::find(provider, &graph.node(*node).op_type))
}

/// Positions of blocks that a provider computes wrongly, each with the fault.
pub fn faulty_blocks(analysis: &Analysis, provider: Provider) -> Vec<(usize, &'static ProviderFault)> {
    let blocks = analysis.segmentation.blocks.iter().enumerate();
    let faulty = |(at, block): (usize, &Block)| Some((at, fault(&analysis.graph, &block.nodes, provider)?));
    blocks.filter_map(faulty).collect()
}

/// Sets the cost of a block to infinity on GPUs whose provider computes one of its operators wrongly, so that no
/// planner places it there.
pub fn avoid_faults(problem: &mut Problem, analysis: &Analysis, source: CostSource<'_>) {
    let providers = source.rates().into_iter().flat_map(|machine| &machine.gpus).map(|gpu| gpu.provider);
    for (gpu, provider) in problem.gpus.iter_mut().zip(providers) {
        for (block, _) in faulty_blocks(analysis, provider) {
            let Some(cost) = gpu.blocks.get_mut(block) else { continue };
            cost.make_impossible();
        }
    }
}
