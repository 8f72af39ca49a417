//! Which blocks hold operators that a provider computes wrongly.

use crate::{Analysis, Source};
use hpp_graph::{Block, Graph, NodeId};
use hpp_partition::Problem;
use hpp_schema::{Provider, ProviderFault};

/// The first operator among these nodes that a provider computes wrongly.
pub(crate) fn fault(graph: &Graph, nodes: &[NodeId], provider: Provider) -> Option<&'static ProviderFault> {
    nodes.iter().find_map(|node| ProviderFault::find(provider, &graph.node(*node).op_type))
}

/// Blocks that a provider computes wrongly, by position, each with what goes wrong.
pub fn faulty_blocks(analysis: &Analysis, provider: Provider) -> Vec<(usize, &'static ProviderFault)> {
    let blocks = analysis.segmentation.blocks.iter().enumerate();
    let faulty = |(at, block): (usize, &Block)| Some((at, fault(&analysis.graph, &block.nodes, provider)?));
    blocks.filter_map(faulty).collect()
}

/// Makes it infinitely slow to compute a block on a GPU whose provider gets one of its operators wrong, so that no planner chooses
/// that.
pub fn avoid_faults(problem: &mut Problem, analysis: &Analysis, source: Source<'_>) {
    let providers = source.rates().into_iter().flat_map(|machine| &machine.gpus).map(|gpu| gpu.provider);
    for (gpu, provider) in problem.gpus.iter_mut().zip(providers) {
        for (block, _) in faulty_blocks(analysis, provider) {
            let Some(cost) = gpu.blocks.get_mut(block) else { continue };
            cost.decode_ms = f64::INFINITY;
            cost.prefill_ms.fill(f64::INFINITY);
        }
    }
}
