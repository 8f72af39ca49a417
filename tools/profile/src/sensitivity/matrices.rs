//! Finds the weight matrices of a block: which can be rounded, along which axis, and which are already quantized.

use hpp_graph::{Attribute, Graph, Node, NodeId, ValueId};
use hpp_schema::{DType, Dim};
use std::collections::{BTreeMap, BTreeSet};

/// Weight matrices that the products and lookups of a block read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Matrices {
    /// Float weights by name, with the reduction axis of the product (for a lookup table, the axis of a row).
    pub floats: BTreeMap<String, usize>,
    /// Bits of the quantized weights.
    pub quantized: BTreeSet<u32>,
}

impl Matrices {
    /// The matrices of these nodes.
    pub fn of(graph: &Graph, nodes: &[NodeId]) -> Self {
        let mut found = Matrices::default();
        for id in nodes {
            let node = graph.node(*id);
            if let Some(bits) = quantized_operator(node) {
                found.quantized.insert(bits);
                continue;
            }
            for (slot, axis) in operands(graph, node) {
                if let Some(value) = node.inputs.get(slot).copied().flatten() {
                    found.trace(graph, value, axis);
                }
            }
        }
        found
    }

    /// Follows an operand back to its weight through operators that keep all elements.
    fn trace(&mut self, graph: &Graph, mut value: ValueId, mut axis: usize) {
        for _ in 0..16 {
            if graph.weight(value).is_some() {
                return self.take(graph, value, axis);
            }
            let Some(node) = graph.producer(value).map(|id| graph.node(id)) else { return };
            let Some(input) = node.inputs.first().copied().flatten() else { return };
            match node.op_type.as_str() {
                "Transpose" => axis = permuted(node, axis, rank(graph, value)),
                "Cast" | "CastLike" | "Identity" => {}
                "DequantizeLinear" => {
                    self.quantized.extend(graph.value(input).dtype.and_then(DType::bits).map(|bits| bits as u32));
                    return;
                }
                _ => return,
            }
            value = input;
        }
    }

    fn take(&mut self, graph: &Graph, weight: ValueId, axis: usize) {
        let about = graph.value(weight);
        let sizes: Vec<u64> = about.shape.iter().flatten().filter_map(Dim::as_fixed).collect();
        let is_float = matches!(about.dtype, Some(DType::Float32 | DType::Float16 | DType::Bfloat16));
        if is_float && sizes.len() >= 2 && axis < sizes.len() && sizes.iter().filter(|size| **size > 1).count() >= 2 {
            self.floats.entry(about.name.clone()).or_insert(axis);
        }
    }

    /// Why these cannot be rounded; `None` if they can.
    pub fn refusal(&self) -> Option<String> {
        if !self.quantized.is_empty() {
            let bits: Vec<String> = self.quantized.iter().map(u32::to_string).collect();
            return Some(format!("already {} bits", bits.join(" and ")));
        }
        self.floats.is_empty().then(|| "it has no weight matrices of floats".to_owned())
    }
}

/// Bits of the quantized weights of an operator.
fn quantized_operator(node: &Node) -> Option<u32> {
    let attribute = |name: &str, usual: i64| u32::try_from(node.int(name).unwrap_or(usual)).ok();
    match node.op_type.as_str() {
        "MatMulNBits" | "GatherBlockQuantized" => attribute("bits", 4),
        "QMoE" => attribute("expert_weight_bits", 4),
        "MatMulBnb4" | "MatMulFpQ4" => Some(4),
        "MatMulInteger"
        | "QLinearMatMul"
        | "DynamicQuantizeMatMul"
        | "QGemm"
        | "QAttention"
        | "ConvInteger"
        | "QLinearConv" => Some(8),
        _ => None,
    }
}

/// Inputs that may be weight matrices, each with the axis that the operator reduces.
fn operands(graph: &Graph, node: &Node) -> Vec<(usize, usize)> {
    let input = |slot: usize| node.inputs.get(slot).copied().flatten();
    let rank = |slot: usize| input(slot).map_or(0, |value| rank(graph, value));
    let flag = |name: &str| node.int(name).unwrap_or(0) == 1;
    let last = |slot: usize| (slot, rank(slot).saturating_sub(1));
    let before_last = |slot: usize| (slot, rank(slot).saturating_sub(2));
    match node.op_type.as_str() {
        "MatMul" | "FusedMatMul" | "TransposeMatMul" | "Gemm" | "FusedGemm" => {
            let left = if flag("transA") { before_last(0) } else { last(0) };
            let right = if flag("transB") { last(1) } else { before_last(1) };
            vec![left, right]
        }
        "Conv" => vec![(1, 1)],
        "Gather" if node.int("axis").unwrap_or(0) == 0 => vec![last(0)],
        "Attention" if node.domain == "com.microsoft" => vec![(1, 0)],
        "MoE" => experts(graph, node),
        "Einsum" => einsum(node),
        _ => vec![],
    }
}

/// Stacked expert weights are `[experts, out, in]` or `[experts, in, out]`. The hidden size tells which; if both axes have it, the former is
/// assumed. The second projection has the hidden size as output, the others have it as input.
fn experts(graph: &Graph, node: &Node) -> Vec<(usize, usize)> {
    let hidden = node.inputs.first().copied().flatten().and_then(|value| size(graph, value, None));
    let axis = |slot: usize, starts_from_hidden: bool| {
        let weight = node.inputs.get(slot).copied().flatten()?;
        let (one, two) = (size(graph, weight, Some(1)), size(graph, weight, Some(2)));
        let sums_over_two = if starts_from_hidden { two == hidden } else { one == hidden };
        Some((slot, if sums_over_two { 2 } else { 1 }))
    };
    [axis(2, true), axis(4, false), axis(6, true)].into_iter().flatten().collect()
}

/// The last axis of each operand that is absent from the output.
fn einsum(node: &Node) -> Vec<(usize, usize)> {
    let Some(Attribute::String(equation)) = node.attributes.get("equation") else { return vec![] };
    let equation: String = String::from_utf8_lossy(equation).split_whitespace().collect();
    let Some((left, right)) = equation.split_once("->").filter(|_| !equation.contains('.')) else { return vec![] };
    let summed = |(slot, labels): (usize, &str)| {
        labels
            .chars()
            .rev()
            .position(|l| !right.contains(l))
            .map(|from_end| (slot, labels.chars().count() - 1 - from_end))
    };
    left.split(',').enumerate().filter_map(summed).collect()
}

fn rank(graph: &Graph, value: ValueId) -> usize {
    graph.value(value).shape.as_ref().map_or(0, Vec::len)
}

/// The size of an axis; `None` selects the last axis.
fn size(graph: &Graph, value: ValueId, axis: Option<usize>) -> Option<u64> {
    let shape = graph.value(value).shape.as_ref()?;
    shape.get(axis.unwrap_or(shape.len().checked_sub(1)?))?.as_fixed()
}

/// The input axis of a Transpose that becomes this output axis.
fn permuted(node: &Node, axis: usize, rank: usize) -> usize {
    match node.attributes.get("perm") {
        Some(Attribute::Ints(perm)) => perm.get(axis).and_then(|to| usize::try_from(*to).ok()).unwrap_or(axis),
        _ => rank.saturating_sub(axis + 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_graph::{Origin, Weight};
    use hpp_schema::Shape;

    /// A graph of one block, its values made on the way.
    #[derive(Default)]
    struct Build {
        graph: Graph,
        nodes: Vec<NodeId>,
    }

    impl Build {
        fn value(&mut self, name: &str, dtype: DType, dims: &[u64], origin: Origin) -> ValueId {
            let shape: Shape = dims.iter().map(|d| Dim::fixed(*d)).collect();
            self.graph.add_value(name, Some(dtype), Some(shape), origin)
        }

        fn weight(&mut self, name: &str, dtype: DType, dims: &[u64]) -> ValueId {
            self.value(name, dtype, dims, Origin::Weight(Weight { bytes: 0, ints: None, content: None }))
        }

        fn node(&mut self, op: &str, inputs: &[ValueId], dims: &[u64], attributes: &[(&str, Attribute)]) -> ValueId {
            let output = self.value(&format!("{op} {}", self.graph.nodes.len()), DType::Float32, dims, Origin::Input);
            let node = Node {
                name: String::new(),
                domain: String::new(),
                op_type: op.into(),
                inputs: inputs.iter().map(|v| Some(*v)).collect(),
                captures: vec![],
                outputs: vec![Some(output)],
                attributes: attributes.iter().map(|(n, a)| ((*n).to_owned(), a.clone())).collect(),
            };
            let id = self.graph.add_node(node);
            self.nodes.push(id);
            output
        }

        fn matrices(&self) -> Matrices {
            Matrices::of(&self.graph, &self.nodes)
        }
    }

    #[test]
    fn each_operator_sums_along_its_own_axis() {
        use Attribute::{Int, Ints, String};
        let mut b = Build::default();
        let x = b.value("x", DType::Float32, &[1, 5, 8], Origin::Input);
        let f = DType::Float32;
        let [plain, gemm, table, head, stack, back, einsum, conv] = [
            ("plain", &[8, 6][..]),
            ("gemm", &[6, 8]),
            ("table", &[9, 8]),
            ("head", &[9, 8]),
            ("stack", &[4, 12, 8]),
            ("back", &[4, 8, 6]),
            ("einsum", &[2, 8, 3]),
            ("conv", &[8, 8, 3]),
        ]
        .map(|(name, dims)| b.weight(name, f, dims));
        b.node("MatMul", &[x, plain], &[1, 5, 6], &[]);
        b.node("Gemm", &[x, gemm], &[5, 6], &[("transB", Int(1))]);
        b.node("Gather", &[table, x], &[1, 5, 8], &[]);
        let turned = b.node("Transpose", &[head], &[8, 9], &[("perm", Ints(vec![1, 0]))]);
        let cast = b.node("Cast", &[turned], &[8, 9], &[]);
        b.node("MatMul", &[x, cast], &[1, 5, 9], &[]);
        b.node("MoE", &[x, x, stack, x, back], &[1, 5, 8], &[]);
        b.node("Einsum", &[x, einsum], &[1, 5, 6], &[("equation", String(b"bsd, hdk -> bshk".to_vec()))]);
        b.node("Conv", &[x, conv], &[1, 8, 5], &[]);
        let bias = b.weight("bias", f, &[2, 8]);
        b.node("Add", &[x, bias], &[1, 5, 8], &[]);
        let expected = [
            ("back", 2),
            ("conv", 1),
            ("einsum", 1),
            ("gemm", 1),
            ("head", 1),
            ("plain", 0),
            ("stack", 2),
            ("table", 1),
        ];
        let found = b.matrices();
        assert_eq!(found.floats, expected.map(|(name, axis)| (name.to_owned(), axis)).into());
        assert_eq!(found.refusal(), None);
    }

    #[test]
    fn experts_may_be_stacked_the_other_way() {
        let mut b = Build::default();
        let x = b.value("x", DType::Float32, &[5, 8], Origin::Input);
        let (fc1, fc2) = (b.weight("fc1", DType::Float16, &[4, 8, 12]), b.weight("fc2", DType::Float16, &[4, 6, 8]));
        b.node("MoE", &[x, x, fc1, x, fc2], &[5, 8], &[]);
        assert_eq!(b.matrices().floats, [("fc1".to_owned(), 1), ("fc2".to_owned(), 1)].into());
    }

    #[test]
    fn quantized_weights_are_not_rounded_again() {
        let mut b = Build::default();
        let x = b.value("x", DType::Float32, &[1, 5, 8], Origin::Input);
        let (float, int8) = (b.weight("float", DType::Float32, &[8, 6]), b.weight("int8", DType::Int8, &[8, 6]));
        b.node("MatMul", &[x, float], &[1, 5, 6], &[]);
        assert_eq!(b.matrices().refusal(), None);
        let wide = b.node("DequantizeLinear", &[int8, x], &[8, 6], &[]);
        b.node("MatMul", &[x, wide], &[1, 5, 6], &[]);
        assert_eq!(b.matrices().refusal().unwrap(), "already 8 bits");
        b.node("MatMulNBits", &[x, int8], &[1, 5, 6], &[("bits", Attribute::Int(4))]);
        assert_eq!(b.matrices().refusal().unwrap(), "already 4 and 8 bits");
    }

    #[test]
    fn vectors_and_tables_nobody_multiplies_by_are_left_alone() {
        let mut b = Build::default();
        let x = b.value("x", DType::Float32, &[1, 5, 8], Origin::Input);
        let (norm, cos, row) = (
            b.weight("norm", DType::Float32, &[8]),
            b.weight("cos", DType::Float32, &[64, 8]),
            b.weight("row", DType::Float32, &[1, 8]),
        );
        b.node("LayerNormalization", &[x, norm], &[1, 5, 8], &[]);
        b.node("RotaryEmbedding", &[x, cos], &[1, 5, 8], &[]);
        b.node("MatMul", &[x, row], &[1, 5, 8], &[]);
        assert!(b.matrices().floats.is_empty());
        assert!(b.matrices().refusal().unwrap().contains("no weight matrices"));
    }
}
