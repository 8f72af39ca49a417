//! Shapes of states that are computed from the lengths of mask and tokens.

use crate::build::{body, int, model, node, open, opset, value, with};
use hpp_graph::{Graph, infer};
use hpp_onnx::{Model, StateShape, derive_state_shapes, proto::*};
use hpp_schema::{DType, Dim};

/// Nodes that read the shape of `past`, `[batch, 2, past, size]`, and make a tensor `{name}/made` of each shape.
fn reading(nodes: Vec<NodeProto>, size: &str) -> ModelProto {
    let made = |node: &NodeProto| {
        let shape = &node.output[0];
        super::build::node("ConstantOfShape", &[shape], &[&format!("{shape}/made")])
    };
    let made: Vec<NodeProto> = nodes.iter().map(made).collect();
    let present = with(node("Concat", &["past", "new"], &["present"]), int("axis", 2));
    model(GraphProto {
        node: [nodes, made, vec![present]].concat(),
        input: vec![
            value("ids", DType::Int64, &["batch", "sequence"]),
            value("mask", DType::Int64, &["batch", "total"]),
            value("past", DType::Float32, &["batch", "2", "past", size]),
            value("new", DType::Float32, &["batch", "2", "sequence", size]),
        ],
        output: vec![value("present", DType::Float32, &["batch", "2", "after", size])],
        ..GraphProto::default()
    })
}

/// Derives the shape of `past`, with or without its length.
fn derived(proto: &ModelProto, length: bool) -> (Model, Graph, usize) {
    let known = |model: &Model| {
        let mut graph = model.graph().unwrap();
        infer::infer(&mut graph);
        graph
    };
    let mut model = open(proto).unwrap();
    let graph = known(&model);
    let [past, tokens, mask] = ["past", "ids", "mask"].map(|name| graph.find(name).unwrap());
    let replaced =
        derive_state_shapes(&mut model, &graph, &[StateShape { past, tokens, length: length.then_some((2, mask)) }]);
    let graph = known(&model);
    (model, graph, replaced)
}

#[test]
fn lengths_of_mask_and_tokens_tell_the_length_of_a_state() {
    let shape = |name: &str, range: &[(&str, i64)]| {
        range.iter().fold(node("Shape", &["past"], &[name]), |node, (name, at)| with(node, int(name, *at)))
    };
    let proto = reading(
        vec![
            shape("whole", &[]),
            shape("length", &[("start", 2), ("end", 3)]),
            shape("last", &[("start", -2)]),
            shape("first", &[("end", -2)]),
            shape("beyond", &[("start", 1), ("end", 9)]),
            shape("none", &[("start", 3), ("end", 1)]),
        ],
        "4",
    );
    let (_, graph, replaced) = derived(&proto, true);
    // All but the one that reads no size.
    assert_eq!(replaced, 5);
    let past = Dim::symbol("total") - Dim::symbol("sequence");
    let (batch, two, four) = (Dim::symbol("batch"), Dim::fixed(2), Dim::fixed(4));
    for (name, sizes) in [
        ("whole", vec![batch.clone(), two.clone(), past.clone(), four.clone()]),
        ("length", vec![past.clone()]),
        ("last", vec![past.clone(), four.clone()]),
        ("beyond", vec![two.clone(), past, four]),
        ("first", vec![batch, two]),
    ] {
        let made = graph.find(&format!("{name}/made")).unwrap();
        assert_eq!(graph.value(made).shape, Some(sizes), "{name}");
    }
}

#[test]
fn other_readers_of_the_shape_stay() {
    let whole = || node("Shape", &["past"], &["whole"]);
    // A size that no other input has; a node of another domain; an operator set whose Sub takes floats only.
    let unknown = reading(vec![whole()], "head_size");
    let domain = reading(vec![NodeProto { domain: Some("other".into()), ..whole() }], "4");
    let old = ModelProto { opset_import: vec![opset("", 6)], ..reading(vec![whole()], "4") };
    for proto in [unknown, domain, old] {
        let (model, _, replaced) = derived(&proto, true);
        assert_eq!((replaced, model.proto()), (0, open(&proto).unwrap().proto()));
    }
    // The length alone is known, whatever the other sizes are.
    let length = with(with(node("Shape", &["past"], &["length"]), int("start", 2)), int("end", 3));
    assert_eq!(derived(&reading(vec![length], "head_size"), true).2, 1);
    // The batch alone, of a state whose length is not that of all tokens.
    let batch = with(node("Shape", &["past"], &["batch"]), int("end", 1));
    assert_eq!(derived(&reading(vec![batch, whole()], "4"), false).2, 1);
    // Nodes inside bodies.
    let branch = |name: &str| {
        let shape = GraphProto {
            name: Some(name.into()),
            node: vec![node("Shape", &["past"], &[name])],
            output: vec![value(name, DType::Int64, &["4"])],
            ..GraphProto::default()
        };
        body(&format!("{name}_branch"), shape)
    };
    let mut proto = reading(vec![with(with(node("If", &["choice"], &["any"]), branch("then")), branch("else"))], "4");
    proto.graph.as_mut().unwrap().input.push(value("choice", DType::Bool, &[]));
    assert_eq!(derived(&proto, true).2, 0);
}
