//! Weights that must stay constants because a kernel or a body requires it.
//!
//! | operator | inputs | when | why |
//! |---|---|---|---|
//! | MatMulNBits | weights, scales, zero points (1 to 3) | `weight_prepacked` is 1 or 2 | the CUDA kernel repacks them when the session is created, and supports constants only |
//! | MatMulNBits | group index (4) | always | as an input, it makes the CUDA kernel synchronize with the device in each run |
//! | QMoE | experts' weights, scales, zero points (from 2) | `weights_prepacked` is 0 | the kernel packs them when the session is created |
//! | QMoE | the same | `quant_type` is one of the `fp4` types | the same |
//!
//! Source: the CUDA provider of ONNX Runtime 1.31. On WebGPU, everything that was tried works as an input. Weights that
//! bodies of `If`, `Loop` and `Scan` read also stay constants, and so do weights that the graph returns.

use crate::names;
use crate::proto::{GraphProto, NodeProto};
use crate::tensor::TensorShape;
use hpp_schema::DType;
use std::collections::HashSet;

/// Integer tensors of at most this many elements are structure: sizes, axes and indices.
const MAX_STRUCTURE: u64 = 64;

/// Domain of ONNX Runtime's own operators.
const CONTRIB: &str = "com.microsoft";

/// Whether a tensor is structure rather than a weight: empty, a scalar, or a small integer tensor.
pub(crate) fn is_structure(shape: &TensorShape) -> bool {
    let integers = matches!(shape.dtype, DType::Int64 | DType::Int32 | DType::Bool);
    shape.elements <= 1 || (integers && shape.elements <= MAX_STRUCTURE)
}

/// Names of the weights of a graph that must stay constants.
pub struct Constants {
    names: HashSet<String>,
}

impl Constants {
    /// Collects the names from a graph.
    pub fn of(graph: &GraphProto) -> Self {
        let captured = graph.node.iter().flat_map(names::captures);
        let required = graph.node.iter().flat_map(required_constants);
        let returned = graph.output.iter().map(|output| output.name());
        Constants { names: captured.chain(required).chain(returned).map(str::to_owned).collect() }
    }

    /// Whether the weight of this name must stay a constant.
    pub fn contains(&self, name: &str) -> bool {
        self.names.contains(name)
    }
}

/// Inputs that the kernels of a node require as constants.
fn required_constants(node: &NodeProto) -> impl Iterator<Item = &str> {
    let contrib = node.domain() == CONTRIB;
    let is_required = move |at: usize| match node.op_type() {
        "MatMulNBits" if contrib => {
            at == 4 || ((1..=3).contains(&at) && matches!(int(node, "weight_prepacked"), Some(1 | 2)))
        }
        "QMoE" if contrib => at >= 2 && (int(node, "weights_prepacked") == Some(0) || is_fp4(node)),
        _ => false,
    };
    node.input.iter().enumerate().filter(move |(at, _)| is_required(*at)).map(|(_, name)| name.as_str())
}

fn is_fp4(node: &NodeProto) -> bool {
    let kind = node.attribute.iter().find(|a| a.name() == "quant_type");
    kind.is_some_and(|a| a.s().windows(3).any(|part| part == b"fp4"))
}

fn int(node: &NodeProto, name: &str) -> Option<i64> {
    node.attribute.iter().find(|a| a.name() == name).map(|a| a.i())
}
