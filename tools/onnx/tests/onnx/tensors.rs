//! Every kind of tensor survives reading, the graph and extraction.

use crate::build::{self, header, holding, model, node, open, refusal, save, tensor, value, with};
use hpp_graph::{Attribute, PartitionGraph};
use hpp_onnx::{Extractor, Model, proto::*, write_model};
use hpp_schema::{DType, Dim};

/// Extracts the whole model as one partition, writes and reads it, and returns its protobuf.
fn through(model: &ModelProto) -> ModelProto {
    let model = open(model).unwrap_or_else(|e| panic!("{}", build::chain(&e)));
    let graph = model.graph().unwrap();
    let part = PartitionGraph {
        nodes: graph.node_ids().collect(),
        inputs: graph.inputs.clone(),
        outputs: graph.outputs.clone(),
        ..PartitionGraph::default()
    };
    let part = Extractor::new(&model, &graph).part("all", &part).unwrap();
    let dir = tempfile::tempdir().unwrap();
    write_model(&dir.path().join("all.onnx"), &part).unwrap();
    Model::open(dir.path()).unwrap().proto().clone()
}

#[test]
fn every_element_type_is_kept() {
    let sized = DType::ALL.into_iter().filter(|t| t.bits().is_some());
    let weights: Vec<TensorProto> = sized.map(|t| tensor(&t.to_string(), t, &[3, 5])).collect();
    let source = holding(weights.clone());
    let graph = open(&source).unwrap().graph().unwrap();
    for weight in &weights {
        let found = graph.value(graph.find(weight.name()).unwrap());
        assert_eq!(found.dtype.unwrap().to_string(), weight.name());
        assert_eq!(found.shape.as_deref().unwrap(), [Dim::fixed(3), Dim::fixed(5)]);
    }
    let bytes = |name: &str| graph.weight(graph.find(name).unwrap()).unwrap().bytes;
    assert_eq!((bytes("int4"), bytes("uint2"), bytes("float6e2m3")), (8, 4, 12));
    assert_eq!((bytes("bfloat16"), bytes("float8e4m3fn"), bytes("complex128")), (30, 15, 240));
    assert_eq!(through(&source).graph.unwrap().initializer, weights);
}

#[test]
fn strings_and_empty_tensors() {
    let strings = TensorProto {
        string_data: vec![b"one".to_vec(), "zw\u{f6}lf".into(), vec![]],
        ..header("words", DType::String, &[3])
    };
    let empty = header("empty", DType::Float32, &[0, 7]);
    let scalar = TensorProto { float_data: vec![0.5], ..header("half", DType::Float32, &[]) };
    let source = holding(vec![strings, empty, scalar]);
    let graph = open(&source).unwrap().graph().unwrap();
    let weight = |name: &str| graph.weight(graph.find(name).unwrap()).unwrap();
    assert_eq!((weight("words").bytes, weight("empty").bytes, weight("half").bytes), (9, 0, 4));
    assert_eq!(through(&source).graph.unwrap().initializer, source.graph.unwrap().initializer);
}

#[test]
fn the_graph_keeps_small_integers_but_not_learned_vectors() {
    let axes = TensorProto { int64_data: vec![-1, 2], ..header("axes", DType::Int64, &[2]) };
    let flags = TensorProto { raw_data: Some(vec![1, 0].into()), ..header("flags", DType::Bool, &[2]) };
    let norm = tensor("norm", DType::Float32, &[64]);
    let eps = tensor("eps", DType::Float32, &[]);
    let graph = open(&holding(vec![axes, flags, norm, eps])).unwrap().graph().unwrap();
    let weight = |name: &str| graph.weight(graph.find(name).unwrap()).unwrap();
    assert_eq!(weight("axes").ints.as_deref(), Some(&[-1, 2][..]));
    assert_eq!(weight("flags").ints.as_deref(), Some(&[1, 0][..]));
    assert_eq!((&weight("norm").ints, weight("norm").content), (&None, None));
    assert!(weight("eps").content.is_some());
}

#[test]
fn sparse_initializers_are_kept() {
    let sparse = SparseTensorProto {
        values: Some(tensor("s", DType::Float32, &[2])),
        indices: Some(TensorProto { int64_data: vec![1, 5], ..header("", DType::Int64, &[2]) }),
        dims: vec![3, 4],
    };
    let mut source = holding(vec![]);
    let graph = source.graph.get_or_insert_default();
    graph.sparse_initializer.push(sparse.clone());
    graph.node.push(node("Identity", &["s"], &["dense"]));
    let read = open(&source).unwrap().graph().unwrap();
    let id = read.find("s").unwrap();
    assert_eq!(read.value(id).shape.as_deref().unwrap(), [Dim::fixed(3), Dim::fixed(4)]);
    assert_eq!(read.weight(id).unwrap().bytes, 8 + 16);
    assert_eq!(through(&source).graph.unwrap().sparse_initializer, [sparse]);
}

#[test]
fn inconsistent_weights_are_refused() {
    let short = TensorProto { raw_data: Some(vec![0; 15].into()), ..header("short", DType::Float32, &[4]) };
    let unknown = TensorProto { data_type: Some(99), ..tensor("odd", DType::Int8, &[1]) };
    let segmented = TensorProto { segment: Some(tensor_proto::Segment::default()), ..tensor("cut", DType::Int8, &[1]) };
    let nowhere = TensorProto { data_location: Some(7), ..tensor("lost", DType::Int8, &[1]) };
    let table = [
        (short, "\"short\" has 15 bytes, but its type and dimensions require 16"),
        (unknown, "\"odd\" has element type 99"),
        (segmented, "\"cut\" is stored in segments"),
        (nowhere, "\"lost\" has data location 7"),
        (header("vast", DType::Int8, &[1 << 40, 1 << 40]), "\"vast\" has dimensions"),
        (header("neg", DType::Int8, &[-3]), "\"neg\" has a negative dimension"),
    ];
    for (weight, expected) in table {
        let error = refusal(&holding(vec![weight]));
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_large_constant_is_a_weight_and_a_small_one_a_node() {
    let constant = |name: &str, elements: i64| {
        let t = AttributeProto {
            t: Some(tensor("", DType::Float32, &[elements])),
            ..build::attribute("value", attribute_proto::AttributeType::Tensor)
        };
        with(node("Constant", &[], &[name]), t)
    };
    let source = model(GraphProto {
        node: vec![constant("big", 8192), constant("small", 4), node("Sum", &["big", "small", "x"], &["y"])],
        input: vec![value("x", DType::Float32, &["1"])],
        output: vec![value("y", DType::Float32, &["8192"])],
        ..GraphProto::default()
    });
    let read = open(&source).unwrap();
    assert!(read.notes()[0].to_string().contains("1 large Constant"));
    let graph = read.graph().unwrap();
    assert_eq!(graph.weight(graph.find("big").unwrap()).unwrap().bytes, 32768);
    let small = graph.node(graph.producer(graph.find("small").unwrap()).unwrap());
    assert!(matches!(&small.attributes["value"], Attribute::Tensor(c) if c.bytes == 16 && c.dims == [4]));
}

#[test]
fn a_model_over_two_gigabytes_is_read_without_loading_it() {
    // One embedded weight of 2.5 GB in a sparse file: length-delimited headers around a hole.
    let bytes = 5u64 << 29;
    let mut weight = header("w", DType::Uint8, &[bytes as i64]);
    weight.raw_data = None;
    let mut dir_model = holding(vec![]);
    dir_model.graph.get_or_insert_default().node.push(node("Identity", &["w"], &["read"]));
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), &dir_model);
    build::append_huge_initializer(&path, &weight, bytes);
    let model = Model::open(&path).unwrap();
    let graph = model.graph().unwrap();
    assert_eq!(graph.weight(graph.find("w").unwrap()).unwrap().bytes, bytes);
    assert!(hpp_onnx::needs_externalising(&model));
}
