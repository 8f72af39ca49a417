//! What a partition becomes, and the bytes of transposed weights.

use super::{ActiveNeurons, Transposed};
use crate::Model;
use crate::proto::attribute_proto::AttributeType;
use crate::proto::tensor_shape_proto::{Dimension, dimension};
use crate::proto::type_proto::{Tensor, Value};
use crate::proto::{
    AttributeProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto, TensorShapeProto, TypeProto,
    ValueInfoProto,
};
use crate::virtual_file::Computed;
use crate::weight_source::WeightSource;
use hpp_graph::{Block, BlockKind, ClassId, NodeId, infer};
use hpp_schema::DType;
use proptest::prelude::*;
use prost::Message;

const WIDTH: i64 = 3;
const NEURONS: i64 = 5;

fn node(op: &str, inputs: &[&str], output: &str) -> NodeProto {
    NodeProto {
        name: Some(format!("node of {output}")),
        op_type: Some(op.to_owned()),
        input: inputs.iter().map(|input| (*input).to_owned()).collect(),
        output: vec![output.to_owned()],
        ..NodeProto::default()
    }
}

fn with(mut node: NodeProto, name: &str, number: f32) -> NodeProto {
    let name = Some(name.to_owned());
    node.attribute.push(match name.as_deref() {
        Some("alpha" | "beta") => {
            AttributeProto { name, f: Some(number), r#type: Some(AttributeType::Float as i32), ..Default::default() }
        }
        _ => AttributeProto {
            name,
            i: Some(number as i64),
            r#type: Some(AttributeType::Int as i32),
            ..Default::default()
        },
    });
    node
}

fn value(name: &str, dtype: DType, last: i64) -> ValueInfoProto {
    let dim = [dimension::Value::DimParam("tokens".to_owned()), dimension::Value::DimValue(last)];
    let dim = dim.map(|value| Dimension { value: Some(value), denotation: None }).to_vec();
    let tensor = Tensor { elem_type: Some(dtype.to_onnx()), shape: Some(TensorShapeProto { dim }) };
    let r#type = Some(TypeProto { value: Some(Value::TensorType(tensor)), denotation: None });
    ValueInfoProto { name: Some(name.to_owned()), r#type, ..ValueInfoProto::default() }
}

/// A tensor whose bytes count up.
fn tensor(name: &str, dtype: DType, dims: &[i64]) -> TensorProto {
    let bytes = dtype.bytes_for(dims.iter().product::<i64>() as u64).unwrap();
    TensorProto {
        name: Some(name.to_owned()),
        data_type: Some(dtype.to_onnx()),
        dims: dims.to_vec(),
        raw_data: Some((0..bytes).map(|byte| byte as u8).collect()),
        ..TensorProto::default()
    }
}

/// A model from `x` to `y` with these nodes and weights.
fn model(dtype: DType, node: Vec<NodeProto>, weights: &[(&str, &[i64])]) -> ModelProto {
    let graph = GraphProto {
        node,
        input: vec![value("x", dtype, WIDTH)],
        output: vec![value("y", dtype, WIDTH)],
        initializer: weights.iter().map(|(name, dims)| tensor(name, dtype, dims)).collect(),
        ..GraphProto::default()
    };
    let opset_import = vec![OperatorSetIdProto { domain: None, version: Some(21) }];
    ModelProto { ir_version: Some(10), opset_import, graph: Some(graph), ..ModelProto::default() }
}

/// The model as read, and what is found in it.
fn found(proto: &ModelProto) -> (Model, Option<ActiveNeurons>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.onnx");
    std::fs::write(&path, proto.encode_to_vec()).unwrap();
    let model = Model::open(&path).unwrap();
    let mut graph = model.graph().unwrap();
    infer::infer(&mut graph);
    let block = Block {
        label: "all".into(),
        kind: BlockKind::Layer(0),
        nodes: (0..graph.nodes.len()).map(|id| NodeId(id as u32)).collect(),
        states: vec![],
        weights: vec![],
        class: ClassId(0),
        is_experts: false,
        shard: None,
    };
    let active = ActiveNeurons::find(&model, &graph, &[block]).unwrap();
    (model, active)
}

/// The nodes of the rewritten model, as `Operator(inputs) -> output`.
fn rewritten(proto: &ModelProto) -> (Vec<String>, ModelProto) {
    let (model, active) = found(proto);
    let mut partition = model.proto().clone();
    let count = active.unwrap().apply(&mut partition);
    let nodes = &partition.graph.as_ref().unwrap().node;
    assert_eq!(count, nodes.iter().filter(|node| node.domain() == "hpp").count());
    let line =
        |node: &NodeProto| format!("{}({}) -> {}", node.op_type(), node.input.join(", "), node.output.join(", "));
    (nodes.iter().map(line).collect(), partition)
}

/// Up projection, ReLU, and this down projection with a weight of these dimensions.
fn ungated(down: NodeProto, dims: &[i64]) -> ModelProto {
    let nodes = vec![node("MatMul", &["x", "up"], "u"), node("Relu", &["u"], "on"), down];
    model(DType::Float16, nodes, &[("up", &[WIDTH, NEURONS]), ("down", dims), ("bias", &[WIDTH])])
}

fn gated(product: NodeProto, dims: &[i64]) -> ModelProto {
    let nodes = vec![
        product,
        node("MatMul", &["x", "gate"], "g"),
        node("Relu", &["g"], "on"),
        node("Mul", &["on", "u"], "h"),
        node("MatMul", &["h", "down"], "y"),
    ];
    let weights: [(&str, &[i64]); 4] =
        [("up", dims), ("gate", &[WIDTH, NEURONS]), ("down", &[NEURONS, WIDTH]), ("bias", &[NEURONS])];
    model(DType::Float32, nodes, &weights)
}

fn initializer<'a>(model: &'a ModelProto, name: &str) -> &'a TensorProto {
    model.graph.as_ref().unwrap().initializer.iter().find(|tensor| tensor.name() == name).unwrap()
}

#[test]
fn a_product_with_rows_of_neurons_is_replaced() {
    let plain = ungated(node("MatMul", &["on", "down"], "y"), &[NEURONS, WIDTH]);
    let (nodes, partition) = rewritten(&plain);
    assert_eq!(nodes[1..], ["Relu(u) -> on", "ActiveRowsMatMul(on, down) -> y"]);
    assert_eq!(initializer(&partition, "down"), initializer(&plain, "down"));
    let imported: Vec<(&str, i64)> = partition.opset_import.iter().map(|set| (set.domain(), set.version())).collect();
    assert_eq!(imported, [("", 21), ("hpp", 1)]);
    let (model, active) = found(&plain);
    let active = active.unwrap();
    assert_eq!((active.bytes(), active.file(&model)), ((NEURONS * WIDTH * 2) as u64, None));
}

#[test]
fn a_bias_is_added_and_columns_are_transposed() {
    let gemm = with(node("Gemm", &["on", "down", "bias"], "y"), "transB", 1.0);
    let source = ungated(gemm, &[WIDTH, NEURONS]);
    let (nodes, partition) = rewritten(&source);
    assert_eq!(nodes[2..], ["ActiveRowsMatMul(on, down) -> y.active", "Add(y.active, bias) -> y"]);
    let down = initializer(&partition, "down");
    assert_eq!((down.dims.as_slice(), &down.raw_data), (&[NEURONS, WIDTH][..], &None));
    let location = &down.external_data[0];
    assert_eq!((location.key(), location.value()), ("location", "hpp.neurons.bin"));
    let (model, active) = found(&source);
    let bytes = (NEURONS * WIDTH * 2) as u64;
    assert_eq!(active.unwrap().file(&model).map(|file| file.bytes), Some(bytes));
    // A Gemm whose weight has rows of neurons needs no copy.
    let (nodes, partition) = rewritten(&ungated(node("Gemm", &["on", "down"], "y"), &[NEURONS, WIDTH]));
    assert_eq!(nodes[2..], ["ActiveRowsMatMul(on, down) -> y"]);
    assert!(initializer(&partition, "down").raw_data.is_some());
}

#[test]
fn a_product_and_its_gate_become_one_operator() {
    let wanted =
        ["MatMul(x, gate) -> g", "Relu(g) -> on", "ActiveGateMatMul(on, x, up) -> h", "ActiveRowsMatMul(h, down) -> y"];
    let (nodes, partition) = rewritten(&gated(node("MatMul", &["x", "up"], "u"), &[WIDTH, NEURONS]));
    assert_eq!(nodes, wanted);
    assert_eq!(initializer(&partition, "up").dims, [NEURONS, WIDTH]);
    assert!(initializer(&partition, "down").raw_data.is_some());
    // Rows of neurons already.
    let gemm = with(node("Gemm", &["x", "up"], "u"), "transB", 1.0);
    let (nodes, partition) = rewritten(&gated(gemm, &[NEURONS, WIDTH]));
    assert_eq!(nodes, wanted);
    assert!(initializer(&partition, "up").raw_data.is_some());
}

/// A second product that is not plain stays, and the product with the activations is replaced nevertheless.
#[test]
fn a_gated_product_with_a_bias_stays() {
    let source = gated(node("Gemm", &["x", "up", "bias"], "u"), &[WIDTH, NEURONS]);
    let (nodes, partition) = rewritten(&source);
    let wanted = ["Gemm(x, up, bias) -> u", "MatMul(x, gate) -> g", "Relu(g) -> on", "Mul(on, u) -> h"];
    assert_eq!(nodes[..4], wanted);
    assert_eq!(nodes[4], "ActiveRowsMatMul(h, down) -> y");
    assert_eq!(initializer(&partition, "up"), initializer(&source, "up"));
}

#[test]
fn other_products_stay() {
    let scaled = with(node("Gemm", &["on", "down", "bias"], "y"), "alpha", 0.5);
    assert!(found(&ungated(scaled, &[NEURONS, WIDTH])).1.is_none());
    let weights: [(&str, &[i64]); 2] = [("up", &[WIDTH, NEURONS]), ("down", &[NEURONS, WIDTH])];
    let smooth =
        vec![node("MatMul", &["x", "up"], "u"), node("Sigmoid", &["u"], "on"), node("MatMul", &["on", "down"], "y")];
    assert!(found(&model(DType::Float32, smooth, &weights)).1.is_none());
    let other =
        vec![node("MatMul", &["x", "up"], "u"), node("Relu", &["u"], "on"), node("MatMul", &["on", "down"], "y")];
    assert!(found(&model(DType::Bfloat16, other.clone(), &weights)).1.is_none());
    assert!(found(&model(DType::Float32, other.clone(), &weights)).1.is_some());
    // Nodes of other partitions are not there to be replaced.
    let active = found(&model(DType::Float32, other, &weights)).1.unwrap();
    let mut partition = model(DType::Float32, vec![node("MatMul", &["x", "up"], "u")], &weights[..1]);
    let before = partition.clone();
    assert_eq!((active.apply(&mut partition), partition), (0, before));
}

proptest! {
    #[test]
    fn transposed_bytes_are_read_in_any_pieces(
        rows in 1u64..6, columns in 1u64..6, element in 1u64..5, from in 0usize..150, chunk in 1usize..40,
    ) {
        let at = |row: u64, column: u64, byte: u64| ((row * columns + column) * element + byte) as u8;
        let bytes: Vec<u8> = (0..rows * columns * element).map(|byte| byte as u8).collect();
        let mut wanted: Vec<u8> = vec![];
        for column in 0..columns {
            (0..rows).for_each(|row| wanted.extend((0..element).map(|byte| at(row, column, byte))));
        }
        let transposed = Transposed { source: WeightSource::Memory(bytes.into()), rows, columns, element };
        let from = from.min(wanted.len());
        let (mut read, mut buffer) = (Vec::<u8>::new(), vec![0; chunk]);
        loop {
            let count = transposed.read_at((from + read.len()) as u64, &mut buffer).unwrap();
            read.extend(&buffer[..count]);
            if count == 0 {
                break;
            }
        }
        prop_assert_eq!(&read, &wanted[from..]);
    }
}

/// With a ReLU before the network the gated product has inactive rows too. It is computed where its gate is active, with its weight as stored.
#[test]
fn a_gated_product_behind_a_relu_keeps_its_weight() {
    let nodes = vec![
        node("Relu", &["x"], "a"),
        with(node("Gemm", &["a", "up"], "u"), "transB", 1.0),
        with(node("Gemm", &["a", "gate"], "g"), "transB", 1.0),
        node("Relu", &["g"], "on"),
        node("Mul", &["on", "u"], "h"),
        node("MatMul", &["h", "down"], "y"),
    ];
    let square: &[i64] = &[WIDTH, WIDTH];
    let proto = model(DType::Float32, nodes, &[("up", square), ("gate", square), ("down", square)]);
    let (lines, partition) = rewritten(&proto);
    assert!(lines.contains(&"ActiveGateMatMul(on, a, up) -> h".to_owned()), "{lines:?}");
    assert!(lines.contains(&"ActiveRowsMatMul(h, down) -> y".to_owned()), "{lines:?}");
    let weight = |name: &str| partition.graph.as_ref().unwrap().initializer.iter().find(|w| w.name() == name).unwrap();
    // `gate` multiplies `a` by rows: it alone is transposed.
    assert_eq!([weight("up"), weight("gate")].map(|weight| weight.external_data.is_empty()), [true, false]);
}
