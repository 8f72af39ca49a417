//! Activations of 8 bits: has operators with 4- and 8-bit weights compute in integers, which is faster and gives other logits.
//!
//! `accuracy_level` 4 of `MatMulNBits` and `QMoE` allows ONNX Runtime's CPU kernels to round activations to 8 bits, block by block. GenAI's
//! model builder states it for matrices and not for experts. Experts of 8 bits are computed so in any case.

use crate::Analysis;
use crate::expert_layout::set_in_both;
use hpp_graph::{Graph, Node, NodeId};
use hpp_onnx::Model;
use hpp_schema::Activations;

const ATTRIBUTE: &str = "accuracy_level";
const INT8: i64 = 4;

/// States activations of 8 bits in all operators that can take them and do not state them. Returns the number of these
/// operators.
pub(crate) fn round_to_8_bits(model: &mut Model, graph: &mut Graph) -> usize {
    let found: Vec<NodeId> = graph.node_ids().filter(|id| can_round(graph.node(*id))).collect();
    set_in_both(model, graph, &found, (ATTRIBUTE, INT8));
    found.len()
}

impl Analysis {
    /// The activations that the model computes with: those that it was analysed with, if that changed an operator.
    pub fn activations(&self) -> Activations {
        Activations::int8_if(self.integer_operators.is_some_and(|count| count > 0))
    }

    /// Whether a block has experts that activations of 8 bits would make faster on the CPU.
    pub fn has_experts_with_float_activations(&self, block: usize) -> bool {
        let nodes = self.segmentation.blocks[block].nodes.iter().map(|id| self.graph.node(*id));
        nodes.filter(|node| node.op_type == "QMoE").any(can_round)
    }
}

fn can_round(node: &Node) -> bool {
    let bits = |attribute: &str| node.int(attribute).unwrap_or(4);
    let is_in_blocks = node.int("block_size").is_some_and(|size| size > 0);
    let has_a_choice = match node.op_type.as_str() {
        "MatMulNBits" => matches!(bits("bits"), 4 | 8),
        "QMoE" => bits("expert_weight_bits") == 4,
        _ => false,
    };
    has_a_choice && is_in_blocks && node.int(ATTRIBUTE) != Some(INT8)
}

#[cfg(test)]
mod tests {
    use crate::{AnalysisOptions, LogitsMode, analyse_with};
    use hpp_schema::Activations;
    use std::path::Path;

    /// The number of changed operators of a model, and the level that each product of quantized weights states in the file that is
    /// cut.
    fn levels(name: &str, activations: Activations) -> (Option<usize>, Vec<(String, Option<i64>)>) {
        let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models")).join(name);
        let options = AnalysisOptions::as_exported(None, LogitsMode::All);
        let analysis = analyse_with(&path, AnalysisOptions { activations, ..options }).unwrap();
        let products = analysis.model.graph_proto().node.iter().filter(|node| node.domain() == "com.microsoft");
        let products = products.filter(|node| matches!(node.op_type(), "MatMulNBits" | "QMoE"));
        let level = |node: &hpp_onnx::proto::NodeProto| {
            node.attribute.iter().find(|attribute| attribute.name() == "accuracy_level").map(|attribute| attribute.i())
        };
        let levels: Vec<_> = products.map(|node| (node.op_type().to_owned(), level(node))).collect();
        let in_graph = analysis.graph.nodes.iter().filter_map(|node| node.int("accuracy_level")).count();
        assert_eq!(in_graph, levels.iter().filter(|(_, level)| level.is_some()).count());
        assert_eq!(
            analysis.activations() == Activations::Int8,
            analysis.integer_operators.is_some_and(|count| count > 0)
        );
        (analysis.integer_operators, levels)
    }

    #[test]
    fn experts_state_activations_of_8_bits_only_if_asked_to() {
        let (changed, exported) = levels("genai/gpt-oss-int4-cpu", Activations::Exported);
        let experts = |levels: &[(String, Option<i64>)]| -> Vec<_> {
            levels.iter().filter(|(operator, _)| operator == "QMoE").map(|(_, level)| *level).collect()
        };
        assert_eq!((changed, experts(&exported)), (None, vec![None; 4]));
        let (changed, int8) = levels("genai/gpt-oss-int4-cpu", Activations::Int8);
        assert!(int8.iter().all(|(_, level)| *level == Some(4)), "{int8:?}");
        assert_eq!(experts(&int8).len(), 4);
        let differ = exported.iter().zip(&int8).filter(|(before, after)| before != after).count();
        assert!(differ >= 4);
        assert_eq!(changed, Some(differ));
    }

    #[test]
    fn floating_point_models_have_nothing_to_change() {
        assert_eq!(levels("genai/llama3-fp32-cpu", Activations::Int8), (Some(0), vec![]));
    }

    #[test]
    fn blocks_with_slow_experts_are_known() {
        let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models/genai/gpt-oss-int4-cpu"));
        let slow = |activations| {
            let options = AnalysisOptions { activations, ..AnalysisOptions::as_exported(None, LogitsMode::All) };
            let analysis = analyse_with(path, options).unwrap();
            (0..analysis.segmentation.blocks.len())
                .filter(|block| analysis.has_experts_with_float_activations(*block))
                .count()
        };
        assert_eq!([Activations::Exported, Activations::Int8].map(slow), [4, 0]);
    }
}
