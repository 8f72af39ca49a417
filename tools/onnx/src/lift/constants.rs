//! Which weights stay constants: those a kernel or a body can only take so.
//!
//! | operator | inputs | when | why |
//! |---|---|---|---|
//! | MatMulNBits | weights, scales, zero points (1 to 3) | `weight_prepacked` is 1 or 2 | the CUDA kernel lays them out when the session is made, and takes no others |
//! | MatMulNBits | group index (4) | always | as an input it costs the CUDA kernel a wait for the device in each run |
//! | QMoE | experts' weights, scales, zero points (from 2) | `weights_prepacked` is 0 | packed when the session is made |
//! | QMoE | the same | `quant_type` is one of the `fp4` kinds | likewise |
//!
//! Read in the CUDA provider of ONNX Runtime 1.31; everything tried works as an input on WebGPU. What bodies of `If`, `Loop`
//! and `Scan` read stays too, and so do weights that are returned as they are.

use crate::names;
use crate::proto::{GraphProto, NodeProto};
use crate::tensor::TensorShape;
use hpp_schema::DType;
use std::collections::HashSet;

/// Integers up to this many are sizes, axes and indices: structure.
const STRUCTURE: u64 = 64;

/// Domain of ONNX Runtime's own operators.
const CONTRIB: &str = "com.microsoft";

/// Whether a tensor is part of the graph's structure rather than a weight: nothing or one number, or a few integers.
pub(crate) fn is_structure(shape: &TensorShape) -> bool {
    let integers = matches!(shape.dtype, DType::Int64 | DType::Int32 | DType::Bool);
    shape.elements <= 1 || (integers && shape.elements <= STRUCTURE)
}

/// Weights of a graph that cannot be inputs.
pub struct Constants {
    names: HashSet<String>,
}

impl Constants {
    /// Of a graph.
    pub fn of(graph: &GraphProto) -> Self {
        let captured = graph.node.iter().flat_map(names::captures);
        let demanded = graph.node.iter().flat_map(demanded);
        let returned = graph.output.iter().map(|output| output.name());
        Constants { names: captured.chain(demanded).chain(returned).map(str::to_owned).collect() }
    }

    /// Whether the weight of this name has to stay.
    pub fn forces(&self, name: &str) -> bool {
        self.names.contains(name)
    }
}

/// Inputs of a node that its kernels take as constants only.
fn demanded(node: &NodeProto) -> impl Iterator<Item = &str> {
    let contrib = node.domain() == CONTRIB;
    let demanded = move |at: usize| match node.op_type() {
        "MatMulNBits" if contrib => {
            at == 4 || ((1..=3).contains(&at) && matches!(int(node, "weight_prepacked"), Some(1 | 2)))
        }
        "QMoE" if contrib => at >= 2 && (int(node, "weights_prepacked") == Some(0) || is_fp4(node)),
        _ => false,
    };
    node.input.iter().enumerate().filter(move |(at, _)| demanded(*at)).map(|(_, name)| name.as_str())
}

fn is_fp4(node: &NodeProto) -> bool {
    let kind = node.attribute.iter().find(|a| a.name() == "quant_type");
    kind.is_some_and(|a| a.s().windows(3).any(|part| part == b"fp4"))
}

fn int(node: &NodeProto, name: &str) -> Option<i64> {
    node.attribute.iter().find(|a| a.name() == name).map(|a| a.i())
}
