//! Extracted parts are complete, minimal, typed and deterministic.

use crate::build::{body, external, holding, model, node, open, opset, save, tensor, untyped, value, with};
use crate::models;
use hpp_graph::{Graph, NodeId, PartitionGraph, ValueId, cut, infer, segment};
use hpp_onnx::{ExtractError, Extractor, Model, link, proto::*, write_model};
use hpp_schema::DType;
use prost::Message;
use std::collections::{BTreeMap, HashMap};

fn one_part_per_block(graph: &Graph) -> Vec<PartitionGraph> {
    let segmentation = segment(graph);
    let groups: Vec<_> = (0..segmentation.blocks.len()).map(|i| i..i + 1).collect();
    cut(graph, &segmentation, &groups).unwrap()
}

#[test]
fn every_model_in_one_part_per_block() {
    for path in models::all() {
        let model = Model::open(&path).unwrap();
        let mut graph = model.graph().unwrap();
        infer::infer(&mut graph);
        let dir = tempfile::tempdir().unwrap();
        for file in &model.weights().files {
            link(file, dir.path()).unwrap();
        }
        let extractor = Extractor::new(&model, &graph);
        for (i, part) in one_part_per_block(&graph).iter().enumerate() {
            let name = format!("part_{i}");
            let proto = extractor.part(&name, part).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            let file = dir.path().join(name + ".onnx");
            let bytes = write_model(&file, &proto).unwrap();
            assert_eq!(bytes, std::fs::metadata(&file).unwrap().len());
            same_as_in_the_whole(&graph, part, &Model::open(&file).unwrap());
        }
    }
}

/// Nodes, inputs and outputs of the part, and no weight it does not read.
fn same_as_in_the_whole(graph: &Graph, part: &PartitionGraph, written: &Model) {
    let again = written.graph().unwrap();
    let names = |graph: &Graph, ids: &[ValueId]| ids.iter().map(|v| graph.value(*v).name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&again, &again.inputs), names(graph, &part.inputs));
    assert_eq!(names(&again, &again.outputs), names(graph, &part.outputs));
    assert_eq!(again.nodes.len(), part.nodes.len());
    for (mine, theirs) in part.nodes.iter().zip(&again.nodes) {
        let mine = graph.node(*mine);
        assert_eq!((&mine.op_type, &mine.name, &mine.attributes), (&theirs.op_type, &theirs.name, &theirs.attributes));
    }
    for id in again.value_ids().filter(|v| again.weight(*v).is_some()) {
        let value = again.value(id);
        assert!(!value.consumers.is_empty() || again.outputs.contains(&id), "{} is not read", value.name);
    }
    assert!(again.inputs.iter().all(|v| again.value(*v).dtype.is_some()));
}

#[test]
fn the_same_part_gives_the_same_bytes() {
    let path = models::all().into_iter().find(|p| p.to_string_lossy().contains("llama3-int4-cpu")).unwrap();
    let once = || {
        let model = Model::open(&path).unwrap();
        let graph = model.graph().unwrap();
        let extractor = Extractor::new(&model, &graph);
        one_part_per_block(&graph).iter().map(|p| extractor.part("p", p).unwrap().encode_to_vec()).collect::<Vec<_>>()
    };
    assert_eq!(once(), once());
}

fn part(graph: &Graph, nodes: &[u32], inputs: &[&str], outputs: &[&str]) -> PartitionGraph {
    let find = |names: &[&str]| names.iter().map(|n| graph.find(n).unwrap()).collect();
    PartitionGraph {
        nodes: nodes.iter().map(|i| NodeId(*i)).collect(),
        inputs: find(inputs),
        outputs: find(outputs),
        ..PartitionGraph::default()
    }
}

/// x -> Neg a -> Add(a, w) b -> If(c){captures b, u} y; `v` unused by the first two.
fn sample() -> ModelProto {
    let branch = || GraphProto {
        node: vec![node("Mul", &["b", "u"], &["o"])],
        output: vec![untyped("o")],
        ..GraphProto::default()
    };
    let choice = with(node("If", &["c"], &["y"]), body("then_branch", branch()));
    let mut source = model(GraphProto {
        name: Some("whole".into()),
        node: vec![
            node("Neg", &["x"], &["a"]),
            node("Add", &["a", "w"], &["b"]),
            with(choice, body("else_branch", branch())),
        ],
        input: vec![
            value("x", DType::Float32, &["n"]),
            value("c", DType::Bool, &[]),
            value("w", DType::Float32, &["4"]),
        ],
        output: vec![value("y", DType::Float32, &["n"])],
        initializer: vec![
            tensor("w", DType::Float32, &[4]),
            tensor("u", DType::Float32, &[4]),
            tensor("w_scale", DType::Float32, &[1]),
        ],
        value_info: vec![value("a", DType::Float32, &["n"]), value("b", DType::Float32, &["n"])],
        quantization_annotation: vec![TensorAnnotation {
            tensor_name: Some("w".into()),
            quant_parameter_tensor_names: vec![StringStringEntryProto {
                key: Some("SCALE_TENSOR".into()),
                value: Some("w_scale".into()),
            }],
        }],
        metadata_props: vec![StringStringEntryProto { key: Some("k".into()), value: Some("v".into()) }],
        doc_string: Some("of the graph".into()),
        ..GraphProto::default()
    });
    source.opset_import.push(opset("com.microsoft", 1));
    source.metadata_props = vec![StringStringEntryProto { key: Some("author".into()), value: Some("me".into()) }];
    source.doc_string = Some("of the model".into());
    source.producer_name = Some("someone".into());
    source.ir_version = Some(14);
    source
}

#[test]
fn a_part_has_what_it_needs_and_keeps_metadata() {
    let model = open(&sample()).unwrap();
    let graph = model.graph().unwrap();
    let extractor = Extractor::new(&model, &graph);
    let first = extractor.part("first", &part(&graph, &[0, 1], &["x"], &["b"])).unwrap();
    assert_eq!(first.ir_version, Some(13), "what ONNX Runtime loads");
    assert_eq!(first.opset_import, [opset("", 21)], "no domain that nothing uses");
    assert_eq!((first.producer_name(), first.doc_string()), ("someone", "of the model"));
    assert_eq!(first.metadata_props, sample().metadata_props);
    let inside = first.graph.unwrap();
    assert_eq!((inside.name(), inside.doc_string()), ("first", "of the graph"));
    let weights: Vec<&str> = inside.initializer.iter().map(|t| t.name()).collect();
    assert_eq!(weights, ["w", "w_scale"], "with the scale its annotation names");
    assert_eq!(inside.quantization_annotation.len(), 1);
    assert_eq!(inside.input, [value("x", DType::Float32, &["n"])], "an overridable default is a plain weight");
    assert_eq!(inside.output, [value("b", DType::Float32, &["n"])]);
    assert_eq!(inside.value_info, [value("a", DType::Float32, &["n"])]);

    let second = extractor.part("second", &part(&graph, &[2], &["b", "c"], &["y"])).unwrap().graph.unwrap();
    assert_eq!(second.initializer.len(), 1, "what only a body captures");
    assert_eq!(second.initializer[0].name(), "u");
    assert!(second.quantization_annotation.is_empty());
}

#[test]
fn an_incomplete_part_is_refused() {
    let model = open(&sample()).unwrap();
    let graph = model.graph().unwrap();
    let extractor = Extractor::new(&model, &graph);
    let missing = extractor.part("p", &part(&graph, &[1], &[], &["b"])).unwrap_err();
    assert!(matches!(&missing, ExtractError::Missing { value, .. } if value == "a"), "{missing}");
    let captured = extractor.part("p", &part(&graph, &[2], &["c"], &["y"])).unwrap_err();
    assert!(matches!(&captured, ExtractError::Missing { value, .. } if value == "b"), "{captured}");
    let disorder = extractor.part("p", &part(&graph, &[1, 0], &["x"], &["b"])).unwrap_err();
    assert!(matches!(disorder, ExtractError::Missing { .. }));
    let output = extractor.part("p", &part(&graph, &[0], &["x"], &["b"])).unwrap_err();
    assert!(output.to_string().contains("its list of outputs"), "{output}");
    let weight = extractor.part("p", &part(&graph, &[1], &["a", "w"], &["b"])).unwrap_err();
    assert!(matches!(weight, ExtractError::WeightInput { .. }));
    let mut blind = sample();
    blind.graph.get_or_insert_default().value_info.clear();
    let model = open(&blind).unwrap();
    let graph = model.graph().unwrap();
    let unknown = Extractor::new(&model, &graph).part("p", &part(&graph, &[1], &["a"], &["b"])).unwrap_err();
    assert!(matches!(&unknown, ExtractError::UnknownType { value, .. } if value == "a"), "{unknown}");
}

#[test]
fn a_shape_is_read_from_the_parts_own_state() {
    let source = model(GraphProto {
        node: vec![node("Shape", &["past0"], &["s"]), node("Expand", &["past1", "s"], &["y"])],
        input: vec![value("past0", DType::Float32, &["n"]), value("past1", DType::Float32, &["n"])],
        output: vec![value("y", DType::Float32, &["n"])],
        ..GraphProto::default()
    });
    let model = open(&source).unwrap();
    let graph = model.graph().unwrap();
    let swap = BTreeMap::from([(graph.find("past0").unwrap(), graph.find("past1").unwrap())]);
    let part = PartitionGraph { same_shape: swap, ..part(&graph, &[0, 1], &["past1"], &["y"]) };
    let written = Extractor::new(&model, &graph).part("p", &part).unwrap().graph.unwrap();
    assert_eq!(written.node[0].input, ["past1"]);
    assert_eq!(written.input.len(), 1);
}

#[test]
fn parts_keep_the_functions_they_call() {
    let mut source = sample();
    let f = |name: &str, nodes: Vec<NodeProto>| FunctionProto {
        name: Some(name.into()),
        domain: Some("local".into()),
        input: vec!["i".into()],
        output: vec!["o".into()],
        node: nodes,
        opset_import: vec![opset("", 9), opset("local", 1)],
        ..FunctionProto::default()
    };
    let local = |op: &str, i: &str, o: &str| NodeProto { domain: Some("local".into()), ..node(op, &[i], &[o]) };
    source.functions = vec![
        f("Leaf", vec![node("Neg", &["i"], &["o"])]),
        f("Caller", vec![local("Leaf", "i", "o")]),
        f("Other", vec![node("Abs", &["i"], &["o"])]),
    ];
    source.opset_import.push(opset("local", 1));
    let graph = source.graph.get_or_insert_default();
    graph.node[0] = local("Caller", "x", "a");
    graph.node.push(local("Other", "y", "z"));
    let model = open(&source).unwrap();
    let graph = model.graph().unwrap();
    let written = Extractor::new(&model, &graph).part("p", &part(&graph, &[0, 1], &["x"], &["b"])).unwrap();
    let names: Vec<&str> = written.functions.iter().map(|f| f.name()).collect();
    // `Caller` uses nothing of the standard operator set itself and is inlined; what it calls cannot be.
    assert_eq!(names, ["Leaf"]);
    assert!(written.opset_import.iter().any(|o| o.domain() == "local"));
}

#[test]
fn external_weights_stay_references() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.data"), vec![1u8; 4096 + 64]).unwrap();
    let entries = [("location", "model.data"), ("offset", "4096"), ("length", "64")];
    let weight = external("w", DType::Float32, &[16], &entries);
    let model = Model::open(&save(dir.path(), &holding(vec![weight.clone()]))).unwrap();
    let graph = model.graph().unwrap();
    let part = part(&graph, &[1], &[], &["read 0"]);
    let written = Extractor::new(&model, &graph).part("p", &part).unwrap();
    assert_eq!(written.graph.unwrap().initializer, [weight]);
}

#[test]
fn tapped_models_return_more() {
    let model = open(&sample()).unwrap();
    let graph = model.graph().unwrap();
    let tapped = Extractor::new(&model, &graph).tapped(&[graph.find("a").unwrap(), graph.find("y").unwrap()]);
    let graph = tapped.graph.unwrap();
    let outputs: HashMap<&str, bool> = graph.output.iter().map(|o| (o.name(), o.r#type.is_some())).collect();
    assert_eq!(outputs, HashMap::from([("y", true), ("a", true)]));
    assert!(graph.value_info.iter().all(|info| info.name() != "a"));
}
