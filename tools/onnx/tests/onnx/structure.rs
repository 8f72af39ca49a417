//! Graph structure: order, cycles, names, captures, defaults.

use crate::build::{body, header, int, model, node, open, opset, refusal, tensor, untyped, value, with};
use hpp_graph::{Attribute, Origin};
use hpp_onnx::{Note, proto::*};
use hpp_schema::{DType, Dim};

fn line(nodes: Vec<NodeProto>) -> ModelProto {
    model(GraphProto {
        node: nodes,
        input: vec![value("x", DType::Float32, &["batch", "a + 1", "4"])],
        output: vec![untyped("y")],
        ..GraphProto::default()
    })
}

#[test]
fn unordered_nodes_are_sorted_and_noted() {
    let source = line(vec![node("Neg", &["b"], &["y"]), node("Abs", &["a"], &["b"]), node("Exp", &["x"], &["a"])]);
    let read = open(&source).unwrap();
    assert_eq!(read.notes(), [Note::Sorted]);
    let ops: Vec<String> = read.graph().unwrap().nodes.into_iter().map(|n| n.op_type).collect();
    assert_eq!(ops, ["Exp", "Abs", "Neg"]);
    assert!(open(&line(vec![node("Neg", &["x"], &["y"])])).unwrap().notes().is_empty());
}

#[test]
fn a_cycle_is_named() {
    let source = line(vec![
        node("Neg", &["x"], &["y"]),
        node("Add", &["x", "c"], &["a"]),
        node("Abs", &["a"], &["b"]),
        node("Exp", &["b"], &["c"]),
    ]);
    let error = refusal(&source);
    assert!(error.contains("the graph has a cycle"), "{error}");
    for op in ["Add", "Abs", "Exp"] {
        assert!(error.contains(op), "{error}");
    }
    assert!(!error.contains("Neg"), "{error}");
    let itself = refusal(&line(vec![node("Neg", &["y"], &["y"])]));
    assert!(itself.contains("cycle"), "{itself}");
}

#[test]
fn names_are_defined_once_and_before_use() {
    let twice = refusal(&line(vec![node("Neg", &["x"], &["y"]), node("Abs", &["x"], &["y"])]));
    assert!(twice.contains("\"y\" is defined twice: by Neg") && twice.contains("and by Abs"), "{twice}");
    let undefined = refusal(&line(vec![node("Neg", &["nowhere"], &["y"])]));
    assert!(undefined.contains("reads \"nowhere\", which nothing defines"), "{undefined}");
    let output = refusal(&line(vec![node("Neg", &["x"], &["z"])]));
    assert!(output.contains("graph outputs reads \"y\""), "{output}");
    let input = refusal(&line(vec![node("Neg", &["x"], &["x"]), node("Neg", &["x"], &["y"])]));
    assert!(input.contains("\"x\" is defined twice"), "{input}");
    let mut weights = line(vec![node("Neg", &["x"], &["y"])]);
    weights.graph.get_or_insert_default().initializer =
        vec![tensor("w", DType::Int8, &[1]), tensor("w", DType::Int8, &[1])];
    assert!(refusal(&weights).contains("\"w\" is defined twice"));
}

#[test]
fn declared_dimensions_keep_their_expressions() {
    let graph = open(&line(vec![node("Neg", &["x"], &["y"])])).unwrap().graph().unwrap();
    let x = graph.value(graph.inputs[0]);
    assert_eq!(x.shape.as_deref().unwrap(), [Dim::symbol("batch"), "1 + a".parse().unwrap(), Dim::fixed(4)]);
    let y = graph.value(graph.outputs[0]);
    assert_eq!((y.dtype, &y.shape), (None, &None));
}

#[test]
fn a_default_that_is_also_an_input_is_a_weight() {
    let mut source = line(vec![node("Add", &["x", "w"], &["y"])]);
    let graph = source.graph.get_or_insert_default();
    graph.input.push(value("w", DType::Float32, &["4"]));
    graph.initializer.push(tensor("w", DType::Float32, &[4]));
    let graph = open(&source).unwrap().graph().unwrap();
    assert_eq!(graph.inputs.len(), 1);
    assert!(matches!(graph.value(graph.find("w").unwrap()).origin, Origin::Weight(_)));
}

#[test]
fn optional_inputs_and_outputs_are_left_out() {
    let graph = open(&line(vec![node("Split", &["x", "", "x"], &["", "y"])])).unwrap().graph().unwrap();
    let node = &graph.nodes[0];
    assert_eq!((node.inputs[1], node.outputs[0]), (None, None));
    assert_eq!(node.inputs[0], node.inputs[2]);
    assert!(matches!(graph.value(node.outputs[1].unwrap()).origin, Origin::Node { slot: 1, .. }));
    assert_eq!(graph.value(graph.inputs[0]).consumers.len(), 1);
}

/// An `If` whose branches read `a`, and `b` two bodies down; `local` is their own.
fn nested(rename: &str) -> NodeProto {
    let inner = GraphProto {
        node: vec![node("Add", &["b", rename], &["inner_out"])],
        output: vec![untyped("inner_out")],
        ..GraphProto::default()
    };
    let outer = || GraphProto {
        node: vec![
            node("Neg", &["a"], &[rename]),
            with(node("Loop", &["", "", rename], &["out"]), body("body", inner.clone())),
        ],
        initializer: vec![tensor("own weight", DType::Float32, &[8])],
        output: vec![value("out", DType::Float32, &["4"])],
        ..GraphProto::default()
    };
    with(with(node("If", &["c"], &["y"]), body("then_branch", outer())), body("else_branch", outer()))
}

#[test]
fn bodies_capture_what_they_do_not_define() {
    let source = |name: &str| {
        line(vec![node("Neg", &["x"], &["a"]), node("Abs", &["x"], &["b"]), node("Cast", &["x"], &["c"]), nested(name)])
    };
    let graph = open(&source("local")).unwrap().graph().unwrap();
    let node = graph.nodes.last().unwrap();
    let names: Vec<&str> = node.captures.iter().map(|v| graph.value(*v).name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    assert!(graph.value(graph.find("a").unwrap()).consumers.len() == 1);
    let Attribute::Body(one) = &node.attributes["then_branch"] else { panic!() };
    assert_eq!((one.nodes, one.weight_bytes, one.output_dtypes.as_slice()), (3, 32, &[Some(DType::Float32)][..]));

    // Inner names do not affect the structure; operators do.
    let other = open(&source("elsewhere")).unwrap().graph().unwrap();
    assert_eq!(node.attributes, other.nodes.last().unwrap().attributes);
}

#[test]
fn a_body_with_an_undefined_read_is_refused() {
    let source = line(vec![node("Neg", &["x"], &["a"]), node("Cast", &["x"], &["c"]), nested("local")]);
    let error = refusal(&source);
    assert!(error.contains("If node") && error.contains("reads \"b\""), "{error}");
}

#[test]
fn deep_bodies_are_read_and_deeper_ones_refused() {
    let deep = |levels: usize| {
        let mut inner =
            GraphProto { node: vec![node("Neg", &["x"], &["o"])], output: vec![untyped("o")], ..GraphProto::default() };
        for _ in 0..levels {
            let branches = |graph: &GraphProto| body("body", graph.clone());
            inner = GraphProto {
                node: vec![with(node("Loop", &["", "", "x"], &["o"]), branches(&inner))],
                output: vec![untyped("o")],
                ..GraphProto::default()
            };
        }
        let mut source = line(inner.node);
        source.graph.get_or_insert_default().output = vec![untyped("o")];
        source
    };
    let graph = open(&deep(28)).unwrap().graph().unwrap();
    assert!(matches!(&graph.nodes[0].attributes["body"], Attribute::Body(b) if b.nodes == 28));
    assert!(refusal(&deep(60)).contains("nested more than"), "{}", refusal(&deep(60)));
}

#[test]
fn unknown_domains_and_attributes() {
    let mut custom = node("Frobnicate", &["x"], &["y"]);
    custom.domain = Some("org.example".into());
    let mut source = line(vec![with(custom, int("level", 9))]);
    source.opset_import.push(opset("org.example", 3));
    let graph = open(&source).unwrap().graph().unwrap();
    assert_eq!((graph.nodes[0].domain.as_str(), graph.nodes[0].int("level")), ("org.example", Some(9)));
    assert_eq!(graph.opsets["org.example"], 3);

    let odd = AttributeProto { name: Some("odd".into()), r#type: Some(40), ..AttributeProto::default() };
    let error = refusal(&line(vec![with(node("Neg", &["x"], &["y"]), odd)]));
    assert!(error.contains("attribute \"odd\"") && error.contains("type 40"), "{error}");
}

#[test]
fn opaque_attributes_differ_by_content() {
    let key = |elements: i64| {
        let many = AttributeProto {
            tensors: vec![header("t", DType::Int8, &[elements])],
            ..crate::build::attribute("many", attribute_proto::AttributeType::Tensors)
        };
        let graph = open(&line(vec![with(node("Neg", &["x"], &["y"]), many)])).unwrap().graph();
        graph.map(|g| g.nodes[0].attributes["many"].clone())
    };
    assert_ne!(key(0).unwrap(), key(0).map(|_| Attribute::Opaque(0)).unwrap());
}
