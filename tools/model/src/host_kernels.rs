//! Finds out what a model's operators and weights demand of ONNX Runtime's CPU kernels.
//!
//! ONNX Runtime can copy weights into a layout that its kernels read faster (packing). 4-bit and 8-bit products are a hundred times
//! faster with it, so a model that has some is packed. For 32-bit weights it gains a tenth, takes seconds per gigabyte at load and
//! needs memory for the copy; without it, weights stay mapped from their file and the system may evict them. The two layouts round
//! differently, so one decision holds for all partitions of a model: it computes the same numbers whole and split.

use hpp_onnx::proto::{GraphProto, ModelProto, NodeProto, TensorProto};
use hpp_onnx::walk;
use hpp_schema::{DType, HostKernels};
use std::collections::{HashMap, HashSet};
use std::convert::Infallible;

/// Operators whose kernels pack weights narrower than 32 bits, and convolutions, whose kernels always pack. `true`: ONNX Runtime can
/// save the packed weights and load them again unchanged. It offers that for all of them; these were tested.
const PACKED: [(&str, bool); 18] = [
    ("Conv", false),
    ("ConvInteger", false),
    ("ConvTranspose", false),
    ("DequantizeLinear", true),
    ("DynamicQuantizeLSTM", false),
    ("DynamicQuantizeMatMul", true),
    ("GRU", false),
    ("LSTM", false),
    ("MatMulBnb4", false),
    ("MatMulFpQ4", false),
    ("MatMulInteger", true),
    ("MatMulIntegerToFloat", true),
    ("MatMulNBits", true),
    ("QAttention", false),
    ("QGemm", false),
    ("QLinearConv", false),
    ("QLinearMatMul", false),
    ("QMoE", true),
];

/// The kernel of this operator accepts constant weights in either of two layouts, and assumes one of them if weights are inputs: a
/// model exported for CUDA then gives wrong results without an error.
const CONSTANT_WEIGHTS: &str = "QMoE";

/// Operators with CPU kernels that read 16-bit weights as they are.
const HALF_READERS: [&str; 5] = ["ActiveGateMatMul", "ActiveRowsMatMul", "Gather", "MatMulNBits", "QMoE"];

/// Experts that compute with activations of 8 bits state this level.
const INTEGER_EXPERTS: (&str, &str, i64) = ("QMoE", "accuracy_level", 4);

/// What the operators and weights of a model demand, functions and bodies included.
pub fn host_kernels(model: &ModelProto) -> HostKernels {
    let mut kernels = HostKernels { packed: has_narrow_floats(model), ..HostKernels::default() };
    model.graph.iter().for_each(|graph| add_graph(graph, &mut kernels));
    kernels.widened = model.graph.as_ref().is_some_and(widens_weights);
    kernels.folded = model.graph.as_ref().is_some_and(folds_weights);
    model.functions.iter().flat_map(|function| &function.node).for_each(|node| add_node(node, &mut kernels));
    kernels
}

fn add_graph(graph: &GraphProto, kernels: &mut HostKernels) {
    graph.node.iter().for_each(|node| add_node(node, kernels));
}

fn add_node(node: &NodeProto, kernels: &mut HostKernels) {
    if let Some((operator, saved)) = PACKED.iter().find(|(operator, _)| *operator == node.op_type()) {
        kernels.packed = true;
        if !saved && kernels.unsaved.is_none() {
            kernels.unsaved = Some((*operator).to_owned());
        }
    }
    kernels.constant_weights |= node.op_type() == CONSTANT_WEIGHTS;
    let (experts, attribute, level) = INTEGER_EXPERTS;
    let states_level = || node.attribute.iter().any(|stated| stated.name() == attribute && stated.i() == level);
    kernels.integer_experts |= node.op_type() == experts && states_level();
    walk::bodies(node).for_each(|body| add_graph(body, kernels));
}

/// Whether the CPU provider widens the 16-bit weights that this operator reads.
pub(crate) fn reads_widened(operator: &str) -> bool {
    !HALF_READERS.contains(&operator)
}

/// Whether a node reads a 16-bit weight that the CPU provider widens.
fn widens_weights(graph: &GraphProto) -> bool {
    let is_half = |tensor: &&TensorProto| {
        let dtype = DType::from_onnx(tensor.data_type());
        matches!(dtype, Some(DType::Float16 | DType::Bfloat16)) && !tensor.dims.is_empty()
    };
    let half: HashSet<&str> = graph.initializer.iter().filter(is_half).map(TensorProto::name).collect();
    let reads_half = |node: &NodeProto| node.input.iter().any(|name| half.contains(name.as_str()));
    graph.node.iter().any(|node| reads_widened(node.op_type()) && reads_half(node))
}

/// From this many elements of a weight on, a value computed from the weight takes so much memory that it matters.
const LARGE: u64 = 16 << 10;

/// Operators whose result is as large as their largest input.
const KEEP_SIZE: [&str; 13] = [
    "Add",
    "Cast",
    "Concat",
    "Div",
    "Expand",
    "Flatten",
    "Identity",
    "Mul",
    "Reshape",
    "Squeeze",
    "Sub",
    "Transpose",
    "Unsqueeze",
];

/// Whether a node computes something large from weights alone.
fn folds_weights(graph: &GraphProto) -> bool {
    let is_large = |dims: &[i64]| {
        let sizes = dims.iter().map(|size| u64::try_from(*size).unwrap_or(0));
        sizes.fold(1, u64::saturating_mul) >= LARGE
    };
    // Constants, and whether they are large.
    let mut constants: HashMap<&str, bool> =
        graph.initializer.iter().map(|tensor| (tensor.name(), is_large(&tensor.dims))).collect();
    let mut found = false;
    for node in &graph.node {
        let stored = node.attribute.iter().filter_map(|attribute| attribute.t.as_ref());
        let is_constant = node.op_type() == "Constant";
        let mut is_result_large = is_constant && stored.into_iter().any(|tensor| is_large(&tensor.dims));
        if !is_constant {
            let reads = node.input.iter().filter(|name| !name.is_empty());
            let known: Option<Vec<bool>> = reads.map(|name| constants.get(name.as_str()).copied()).collect();
            let Some(known) = known.filter(|known| !known.is_empty()) else { continue };
            is_result_large = known.contains(&true) && KEEP_SIZE.contains(&node.op_type());
            found |= is_result_large;
        }
        constants.extend(node.output.iter().map(|name| (name.as_str(), is_result_large)));
    }
    found
}

/// Whether a weight is a floating-point tensor narrower than 32 bits: ONNX Runtime widens it at load and packs the result.
fn has_narrow_floats(model: &ModelProto) -> bool {
    let mut found = false;
    let Ok(()) = walk::tensors::<Infallible>(model, &mut |tensor| {
        let dtype = DType::from_onnx(tensor.data_type());
        found |= dtype.is_some_and(|dtype| dtype.is_float() && dtype.bits().is_some_and(|bits| bits < 32));
        Ok(())
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn fixture(name: &str) -> HostKernels {
        let model =
            Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models")).join(name).join("model.onnx");
        host_kernels(hpp_onnx::Model::open(&model).unwrap().proto())
    }

    #[test]
    fn tables_that_are_transposed_are_folded() {
        let folded = |name| fixture(name).folded;
        for name in ["genai/gemma2-fp32-cpu", "optimum/opt-with-past", "torch/gpt-dynamo"] {
            assert!(folded(name), "{name}");
        }
        for name in ["genai/llama3-fp32-cpu", "genai/qwen3-int4-cpu", "optimum/llama-with-past"] {
            assert!(!folded(name), "{name}");
        }
    }

    #[test]
    fn models_with_narrow_weights_are_packed() {
        for name in ["genai/llama3-fp32-cpu", "optimum/llama-with-past"] {
            assert!(fixture(name).is_default(), "{name}");
        }
        for (name, widened) in [("genai/llama3-int4-cpu", false), ("optimum/llama-with-past-fp16", true)] {
            assert_eq!(fixture(name), HostKernels { packed: true, widened, ..HostKernels::default() }, "{name}");
        }
        let mixture = HostKernels { packed: true, constant_weights: true, ..HostKernels::default() };
        assert_eq!(fixture("genai/gpt-oss-int4-cpu"), mixture);
    }

    #[test]
    fn operators_in_bodies_count_and_untested_ones_are_not_saved() {
        let node = |op_type: &str| NodeProto { op_type: Some(op_type.to_owned()), ..NodeProto::default() };
        let body = GraphProto { node: vec![node("MatMulNBits"), node("GRU"), node("LSTM")], ..GraphProto::default() };
        let attribute = hpp_onnx::proto::AttributeProto { g: Some(body), ..Default::default() };
        let loop_ = NodeProto { attribute: vec![attribute], ..node("Loop") };
        let graph = GraphProto { node: vec![loop_], ..GraphProto::default() };
        let model = ModelProto { graph: Some(graph), ..ModelProto::default() };
        let expected = HostKernels { packed: true, unsaved: Some("GRU".to_owned()), ..HostKernels::default() };
        assert_eq!(host_kernels(&model), expected);
    }

    #[test]
    fn experts_that_state_activations_of_8_bits_are_known() {
        let with_level = |op_type: &str, level: i64| {
            let name = Some("accuracy_level".to_owned());
            let stated = hpp_onnx::proto::AttributeProto { name, i: Some(level), ..Default::default() };
            let op_type = Some(op_type.to_owned());
            let node = NodeProto { op_type, attribute: vec![stated], ..NodeProto::default() };
            let graph = GraphProto { node: vec![node], ..GraphProto::default() };
            host_kernels(&ModelProto { graph: Some(graph), ..ModelProto::default() }).integer_experts
        };
        assert!(with_level("QMoE", 4));
        assert!(!with_level("QMoE", 0) && !with_level("MatMulNBits", 4));
    }
}
