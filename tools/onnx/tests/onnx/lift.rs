//! Weights as inputs: equal partitions give one file, no information is lost, and required constants stay.

use crate::build::{attribute, body, external, int, model, node, tensor, untyped, value, with};
use crate::models;
use hpp_graph::{Graph, cut, infer, segment};
use hpp_onnx::proto::attribute_proto::AttributeType;
use hpp_onnx::{Extractor, Lifted, Model, VirtualFiles, WeightBytes, embed_structure, lift, proto::*};
use hpp_schema::DType;
use prost::Message;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;

/// A model in one partition for each block, structure embedded.
fn partitions(path: &Path) -> Vec<ModelProto> {
    let model = Model::open(path).unwrap();
    let mut graph: Graph = model.graph().unwrap();
    infer::infer(&mut graph);
    let segmentation = segment(&graph);
    let groups: Vec<_> = (0..segmentation.blocks.len()).map(|i| i..i + 1).collect();
    let extractor = Extractor::new(&model, &graph);
    let parts = cut(&graph, &segmentation, &groups).unwrap();
    let named = |(i, part): (usize, _)| {
        let mut proto = extractor.part(&format!("part_{i}"), part).unwrap();
        embed_structure(&mut proto, model.dir(), &VirtualFiles::new()).unwrap();
        proto
    };
    parts.iter().enumerate().map(named).collect()
}

/// Weights that more than one of these reads.
fn shared(partitions: &[ModelProto]) -> HashSet<String> {
    let mut readers: HashMap<&str, usize> = HashMap::new();
    for tensor in partitions.iter().flat_map(|p| &p.graph.as_ref().unwrap().initializer) {
        *readers.entry(tensor.name()).or_default() += 1;
    }
    readers.into_iter().filter(|(_, count)| *count > 1).map(|(name, _)| name.to_owned()).collect()
}

fn lift_all(partitions: &[ModelProto]) -> Vec<Lifted> {
    let shared = shared(partitions);
    partitions.iter().map(|partition| lift(partition, |name| shared.contains(name)).unwrap()).collect()
}

/// A number for each partition; partitions with the same file have the same number.
fn files(name: &str) -> Vec<usize> {
    let path = models::all().into_iter().find(|path| path.to_string_lossy().contains(name)).unwrap();
    let lifted = lift_all(&partitions(&path));
    let mut distinct: Vec<Vec<u8>> = vec![];
    let file = |lifted: &Lifted| {
        let bytes = lifted.proto.encode_to_vec();
        let known = distinct.iter().position(|other| *other == bytes);
        known.unwrap_or_else(|| {
            distinct.push(bytes);
            distinct.len() - 1
        })
    };
    let files = lifted.iter().map(file).collect();
    let weights: HashSet<String> = lifted.iter().flat_map(|l| &l.weights).map(|w| format!("{:?}", w.bytes)).collect();
    assert_eq!(weights.len(), lifted.iter().map(|l| l.weights.len()).sum::<usize>(), "{name}: no weight is anothers");
    files
}

/// The first layer may have a different residual input, and the last may return a normalised one.
#[test]
fn layers_that_differ_only_in_weights_share_a_file() {
    for (name, wanted) in [
        ("genai/llama3-fp32-cpu/", &[0, 1, 2, 2, 3, 4][..]),
        ("genai/llama3-int4-cpu/", &[0, 1, 2, 2, 3, 4]),
        ("genai/qwen3-int4-cpu/", &[0, 1, 2, 2, 2, 2, 3, 4]),
        ("optimum/llama-with-past/", &[0, 1, 2, 2, 2, 3]),
        ("optimum-legacy/gpt2-merged/", &[0, 1, 1, 1, 1, 2]),
        ("torch/gpt-dynamo/", &[0, 1, 2, 2, 2, 3]),
        // The second layer also returns the length of the past.
        ("torch/llama-dynamo-kv/", &[0, 1, 2, 3, 3, 4]),
    ] {
        assert_eq!(files(name), wanted, "{name}");
    }
}

#[test]
fn putting_the_weights_back_gives_the_partition_again() {
    for path in models::all() {
        let partitions = partitions(&path);
        for (lifted, partition) in lift_all(&partitions).iter().zip(&partitions) {
            let again = put_back(lifted);
            let mut names = Names::default();
            let (a, b) = (partition.graph.as_ref().unwrap(), again.graph.as_ref().unwrap());
            names.graph(a, b);
            let new = |old: &String| names.there[old].clone();
            let order = |infos: &[ValueInfoProto]| infos.iter().map(|i| i.name().to_owned()).collect::<Vec<_>>();
            assert_eq!(lifted.inputs.iter().map(new).collect::<Vec<_>>(), order(&b.input), "{}", path.display());
            assert_eq!(lifted.outputs.iter().map(new).collect::<Vec<_>>(), order(&b.output), "{}", path.display());
            assert_eq!(sorted(&lifted.inputs), sorted(&order(&a.input)));
            assert_eq!(sorted(&lifted.outputs), sorted(&order(&a.output)));
            assert_eq!(partition.opset_import, again.opset_import);
            assert_eq!(partition.functions, again.functions);
        }
    }
}

fn sorted(names: &[String]) -> Vec<String> {
    let mut names = names.to_vec();
    names.sort();
    names
}

/// The canonical file with its weights as constants.
fn put_back(lifted: &Lifted) -> ModelProto {
    let mut proto = lifted.proto.clone();
    let graph = proto.graph.as_mut().unwrap();
    let inputs = graph.input.split_off(lifted.inputs.len());
    assert_eq!(inputs.len(), lifted.weights.len());
    for (input, weight) in inputs.iter().zip(&lifted.weights) {
        let dims: Vec<i64> = weight.shape.iter().map(|size| *size as i64).collect();
        let sizes: Vec<String> = weight.shape.iter().map(u64::to_string).collect();
        let sizes: Vec<&str> = sizes.iter().map(String::as_str).collect();
        assert_eq!(*input, value(input.name(), weight.dtype, &sizes));
        graph.initializer.push(match &weight.bytes {
            WeightBytes::External { location, offset, length } => {
                let entries =
                    [("location", location.clone()), ("offset", offset.to_string()), ("length", length.to_string())];
                let entries = entries.each_ref().map(|(key, value)| (*key, value.as_str()));
                external(input.name(), weight.dtype, &dims, &entries)
            }
            WeightBytes::Embedded(bytes) => {
                TensorProto { raw_data: Some(bytes.clone()), ..tensor_header(input.name(), weight.dtype, &dims) }
            }
        });
    }
    proto
}

fn tensor_header(name: &str, dtype: DType, dims: &[i64]) -> TensorProto {
    crate::build::header(name, dtype, dims)
}

/// A bijective renaming of one graph into another, found by walking both.
#[derive(Default)]
struct Names {
    there: HashMap<String, String>,
    back: HashMap<String, String>,
}

impl Names {
    fn same(&mut self, a: &str, b: &str) {
        assert_eq!(a.is_empty(), b.is_empty());
        let (there, back) =
            (self.there.entry(a.into()).or_insert(b.into()), self.back.entry(b.into()).or_insert(a.into()));
        assert_eq!((there.as_str(), back.as_str()), (b, a));
    }

    fn graph(&mut self, a: &GraphProto, b: &GraphProto) {
        assert_eq!(a.node.len(), b.node.len());
        for (a, b) in a.node.iter().zip(&b.node) {
            self.node(a, b);
        }
        assert_eq!((a.input.len(), a.output.len()), (b.input.len(), b.output.len()));
        let data = |graph: &GraphProto| -> BTreeMap<String, TensorProto> {
            graph.initializer.iter().map(|t| (t.name().to_owned(), t.clone())).collect()
        };
        let (mine, theirs) = (data(a), data(b));
        let read: Vec<(&String, &TensorProto)> =
            mine.iter().filter(|(name, _)| self.there.contains_key(*name)).collect();
        assert_eq!(read.len(), theirs.len(), "initializers that are read");
        for (name, tensor) in read {
            same_tensor(tensor, &theirs[&self.there[name]]);
        }
        for (graph, other, names) in [(a, b, &self.there)] {
            let infos: HashMap<&str, &ValueInfoProto> = other.input.iter().map(|i| (i.name(), i)).collect();
            for info in graph.input.iter().filter(|info| names.contains_key(info.name())) {
                same_type(info, infos[names[info.name()].as_str()]);
            }
        }
    }

    fn node(&mut self, a: &NodeProto, b: &NodeProto) {
        assert_eq!((a.op_type(), a.domain(), a.overload()), (b.op_type(), b.domain(), b.overload()));
        assert_eq!(
            (a.input.len(), a.output.len(), a.attribute.len()),
            (b.input.len(), b.output.len(), b.attribute.len())
        );
        a.input.iter().zip(&b.input).chain(a.output.iter().zip(&b.output)).for_each(|(a, b)| self.same(a, b));
        for (a, b) in a.attribute.iter().zip(&b.attribute) {
            if let (Some(a), Some(b)) = (&a.g, &b.g) {
                self.graph(a, b);
                a.output.iter().zip(&b.output).for_each(|(a, b)| self.same(a.name(), b.name()));
            }
            let plain = |a: &AttributeProto| {
                let mut a = AttributeProto { g: None, doc_string: None, ..a.clone() };
                a.t.iter_mut().for_each(|t| (t.name, t.doc_string) = (None, None));
                a
            };
            assert_eq!(plain(a), plain(b));
        }
    }
}

fn same_tensor(a: &TensorProto, b: &TensorProto) {
    let raw = |t: &TensorProto| -> Vec<u8> {
        let floats = t.float_data.iter().flat_map(|v| v.to_le_bytes());
        let longs = t.int64_data.iter().flat_map(|v| v.to_le_bytes());
        let ints = t.int32_data.iter().flat_map(|v| v.to_le_bytes());
        t.raw_data().iter().copied().chain(floats).chain(longs).chain(ints).collect()
    };
    let place = |t: &TensorProto| -> Vec<(String, String)> {
        t.external_data.iter().map(|e| (e.key().to_owned(), e.value().to_owned())).collect()
    };
    assert_eq!((a.data_type, &a.dims, place(a), raw(a)), (b.data_type, &b.dims, place(b), raw(b)));
}

/// Element type and rank, and the sizes that are numbers.
fn same_type(a: &ValueInfoProto, b: &ValueInfoProto) {
    let sizes = |info: &ValueInfoProto| {
        use type_proto::Value;
        let Some(Value::TensorType(tensor)) = info.r#type.as_ref().and_then(|t| t.value.clone()) else { panic!() };
        let dims = tensor.shape.into_iter().flat_map(|shape| shape.dim);
        let number = |d: tensor_shape_proto::Dimension| match d.value {
            Some(tensor_shape_proto::dimension::Value::DimValue(size)) => Some(size),
            _ => None,
        };
        (tensor.elem_type, dims.map(number).collect::<Vec<_>>())
    };
    assert_eq!(sizes(a), sizes(b));
}

/// A graph of these nodes and weights, from `x` to the last node's output.
fn of(nodes: Vec<NodeProto>, weights: Vec<TensorProto>) -> ModelProto {
    let last = nodes.last().unwrap().output[0].clone();
    model(GraphProto {
        input: vec![value("x", DType::Float32, &["n", "4"])],
        output: vec![value(&last, DType::Float32, &["n", "4"])],
        node: nodes,
        initializer: weights,
        ..GraphProto::default()
    })
}

/// Names of the weights that become inputs, in order.
fn lifts(model: &ModelProto, shared: &[&str]) -> Vec<String> {
    let lifted = lift(model, |name| shared.contains(&name)).unwrap();
    let constants = lifted.proto.graph.as_ref().unwrap().initializer.len();
    let all = model.graph.as_ref().unwrap().initializer.len();
    assert_eq!(lifted.weights.len() + constants, all, "each is one or the other");
    lifted.weights.into_iter().map(|weight| weight.name).collect()
}

#[test]
fn structure_stays_and_weights_become_inputs() {
    let weights = vec![
        tensor("axes", DType::Int64, &[64]),
        tensor("long", DType::Int64, &[65]),
        tensor("mask", DType::Bool, &[2, 32]),
        tensor("bytes", DType::Uint8, &[2]),
        tensor("one", DType::Float32, &[1, 1]),
        tensor("two", DType::Float32, &[2]),
        TensorProto { string_data: vec![vec![]; 70], ..tensor_header("words", DType::String, &[70]) },
    ];
    let names = ["axes", "long", "mask", "bytes", "one", "two", "words"];
    let graph = of(vec![node("Odd", &[&["x"], &names[..]].concat(), &["y"])], weights);
    assert_eq!(lifts(&graph, &[]), ["long", "bytes", "two"]);
}

#[test]
fn shared_and_returned_weights_stay() {
    let place = [("location", "w"), ("offset", "8"), ("length", "16")];
    let cache = external("cache", DType::Float32, &[4], &place);
    let mut source = of(
        vec![node("Add", &["x", "cache"], &["a"]), node("Add", &["a", "own"], &["b"])],
        vec![tensor("own", DType::Float32, &[4]), cache.clone(), tensor("given", DType::Float32, &[4])],
    );
    source.graph.as_mut().unwrap().output.push(value("given", DType::Float32, &["4"]));
    assert_eq!(lifts(&source, &["cache"]), ["own"]);
    let lifted = lift(&source, |name| name == "cache").unwrap();
    let constants = lifted.proto.graph.unwrap().initializer;
    assert_eq!(constants[0], TensorProto { name: Some("c0".into()), ..cache });
    assert_eq!((lifted.outputs, lifted.kept), (vec!["b".to_owned(), "given".to_owned()], 16));
}

fn contrib(node: NodeProto) -> NodeProto {
    NodeProto { domain: Some("com.microsoft".into()), ..node }
}

#[test]
fn constants_that_kernels_require_stay() {
    let names = ["q", "scales", "zeros", "groups", "bias"];
    let weights = || names.iter().map(|name| tensor(name, DType::Uint8, &[8])).collect::<Vec<_>>();
    let bits = |attributes: &[AttributeProto]| {
        let mut bits = contrib(node("MatMulNBits", &[&["x"], &names[..]].concat(), &["y"]));
        bits.attribute.extend_from_slice(attributes);
        lifts(&of(vec![bits], weights()), &[])
    };
    assert_eq!(bits(&[]), ["q", "scales", "zeros", "bias"]);
    assert_eq!(bits(&[int("weight_prepacked", 0)]), ["q", "scales", "zeros", "bias"]);
    assert_eq!(bits(&[int("weight_prepacked", 1)]), ["bias"]);
    assert_eq!(bits(&[int("weight_prepacked", 2)]), ["bias"]);
    let experts = |attributes: &[AttributeProto]| {
        let mut experts = contrib(node("QMoE", &["x", "x", "q", "scales", "", "zeros", "groups", "bias"], &["y"]));
        experts.attribute.extend_from_slice(attributes);
        lifts(&of(vec![experts], weights()), &[])
    };
    let kind = |kind: &str| {
        let s = Some(kind.as_bytes().to_vec());
        AttributeProto { s, ..attribute("quant_type", AttributeType::String) }
    };
    assert_eq!(experts(&[]).len(), 5);
    assert_eq!(experts(&[int("weights_prepacked", 1), kind("int")]).len(), 5);
    assert_eq!(experts(&[int("weights_prepacked", -1)]).len(), 5);
    assert!(experts(&[int("weights_prepacked", 0)]).is_empty());
    assert!(experts(&[kind("fp4")]).is_empty() && experts(&[kind("nvfp4")]).is_empty());
    // Another domain's operator of the same name is another operator.
    let mut other = node("MatMulNBits", &["x", "q", "scales", "zeros", "groups"], &["y"]);
    other.attribute.push(int("weight_prepacked", 1));
    assert_eq!(lifts(&of(vec![other], weights()[..4].to_vec()), &[]).len(), 4);
}

#[test]
fn weights_that_bodies_read_stay_with_consistent_names() {
    let branch = |weight: &str, out: &str| GraphProto {
        name: Some(format!("branch of {weight}")),
        node: vec![node("Mul", &["a", weight], &["m"]), node("Add", &["m", "inside"], &[out])],
        output: vec![untyped(out)],
        initializer: vec![tensor("inside", DType::Float32, &[4])],
        ..GraphProto::default()
    };
    let make = |prefix: &str| {
        let weight = format!("{prefix} w");
        let both = format!("{prefix} both");
        let choice = with(node("If", &["c"], &["y"]), body("then_branch", branch(&weight, "o")));
        let choice = with(choice, body("else_branch", branch(&both, &format!("{prefix} p"))));
        let mut source = of(
            vec![node("Add", &["x", &both], &["a"]), node("Add", &["a", "own"], &["b"]), choice],
            vec![
                tensor(&weight, DType::Float32, &[4]),
                tensor(&both, DType::Float32, &[4]),
                tensor("own", DType::Float32, &[4]),
            ],
        );
        source.graph.as_mut().unwrap().input.push(value("c", DType::Bool, &[]));
        source
    };
    let (one, two) = (make("one"), make("two"));
    assert_eq!(lifts(&one, &[]), ["own"]);
    let (one, two) = (lift(&one, |_| false).unwrap(), lift(&two, |_| false).unwrap());
    assert_eq!(one.proto, two.proto);
    let graph = one.proto.graph.unwrap();
    let inner = graph.node[2].attribute[0].g.as_ref().unwrap();
    assert_eq!(inner.node[0].input, [graph.node[0].output[0].clone(), "c1".to_owned()]);
    assert_eq!(inner.output[0].name(), inner.node[1].output[0]);
    let mut names: Vec<&String> =
        graph.node[2].attribute.iter().flat_map(|a| &a.g.as_ref().unwrap().node).flat_map(|n| &n.output).collect();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 4, "no name is given twice");
}

#[test]
fn metadata_does_not_distinguish_partitions_but_structure_does() {
    let entry = || vec![StringStringEntryProto { key: Some("k".into()), value: Some("layer 3".into()) }];
    let named = |words: &str| AttributeProto {
        t: Some(TensorProto { doc_string: Some(words.into()), ..tensor(words, DType::Float32, &[2]) }),
        doc_string: Some(words.into()),
        ..attribute("value", AttributeType::Tensor)
    };
    let sample = |words: &str, axis: i64, dim: &str| {
        let a = format!("{words} a");
        let mut source = of(
            vec![with(node("Softmax", &["x"], &[&a]), int("axis", axis)), node("Add", &[&a, words], &["y"])],
            vec![tensor(words, DType::Float32, &[4])],
        );
        let graph = source.graph.as_mut().unwrap();
        graph.node.push(with(node("Constant", &[], &[&format!("{words} k")]), named(words)));
        graph.output[0] = value("y", DType::Float32, &[words, "4"]);
        graph.name = Some(words.into());
        graph.input[0] = value("x", DType::Float32, &[dim, dim]);
        graph.value_info = vec![value(&a, DType::Float32, &[words])];
        graph.quantization_annotation = vec![TensorAnnotation { tensor_name: Some(a), ..TensorAnnotation::default() }];
        (graph.metadata_props, graph.node[0].metadata_props) = (entry(), entry());
        (graph.doc_string, graph.node[0].doc_string) = (Some(words.into()), Some(words.into()));
        // Unread.
        graph.initializer.push(tensor(&format!("{words} scale"), DType::Float32, &[7]));
        (source.metadata_props, source.doc_string) = (entry(), Some(words.into()));
        lift(&source, |_| false).unwrap()
    };
    let one = sample("one", 1, "n");
    assert_eq!(one.proto, sample("two", 1, "m").proto);
    assert_ne!(one.proto, sample("one", 0, "n").proto);
    assert_ne!(one.proto, sample("one", 1, "4").proto);
    assert_eq!((one.inputs, one.outputs, one.weights.len()), (vec!["x".to_owned()], vec!["y".to_owned()], 1));
}

#[test]
fn inputs_come_in_the_order_they_are_read() {
    let mut source = of(vec![node("Add", &["late", "x"], &["b"]), node("Neg", &["b"], &["a"])], vec![]);
    let graph = source.graph.as_mut().unwrap();
    graph.input.insert(0, value("unread", DType::Float32, &["n"]));
    graph.input.push(value("late", DType::Float32, &["k", "n"]));
    graph.input.push(value("last", DType::Float32, &["k"]));
    graph.output.insert(0, untyped("unread"));
    graph.output.push(value("b", DType::Float32, &["n"]));
    let lifted = lift(&source, |_| false).unwrap();
    assert_eq!(
        (lifted.inputs, lifted.outputs),
        (owned(&["late", "x", "unread", "last"]), owned(&["b", "a", "unread"]))
    );
    let graph = lifted.proto.graph.unwrap();
    let wanted = [
        value("i0", DType::Float32, &["d0", "d1"]),
        value("i1", DType::Float32, &["d1", "4"]),
        value("i2", DType::Float32, &["d1"]),
        value("i3", DType::Float32, &["d0"]),
    ];
    assert_eq!(graph.input, wanted);
    assert_eq!(graph.output.iter().map(|o| o.name()).collect::<Vec<_>>(), ["o0", "o1", "i2"]);
}

fn owned(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn structure_in_weight_files_is_embedded_and_weights_are_not() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("w"), (0..64u8).collect::<Vec<_>>()).unwrap();
    let place = |offset: &'static str| [("location", "w"), ("offset", offset)];
    let mut source = of(
        vec![node("Odd", &["x", "axes", "one", "w"], &["y"])],
        vec![
            external("axes", DType::Int32, &[2], &place("4")),
            external("one", DType::Float32, &[], &place("12")),
            external("w", DType::Float32, &[2], &place("16")),
        ],
    );
    let weight = source.graph.as_ref().unwrap().initializer[2].clone();
    embed_structure(&mut source, dir.path(), &VirtualFiles::new()).unwrap();
    let after = &source.graph.as_ref().unwrap().initializer;
    let raw = |at: usize| after[at].raw_data().to_vec();
    assert_eq!((raw(0), raw(1)), ((4..12).collect(), (12..16).collect()));
    assert_eq!((after[0].name(), &after[0].dims[..]), ("axes", &[2][..]));
    assert_eq!(after[2], weight);
    let mut missing =
        of(vec![node("Odd", &["x", "axes"], &["y"])], vec![external("axes", DType::Int32, &[2], &place("60"))]);
    let error = embed_structure(&mut missing, dir.path(), &VirtualFiles::new()).unwrap_err();
    assert!(error.to_string().contains("axes"), "{error}");
}
