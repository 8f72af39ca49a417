//! Layers of real exporters' models are divided by rows: blocks, what crosses between shards, states; the bytes of parts of weights; and
//! what is refused.

use crate::build::{int, model, node, save, tensor, value, with};
use hpp_graph::{
    BlockKind, Graph, PartitionGraph, RowNode, RowsError, RowsReason, Segmentation, Shard, ValueId, cut, divide_rows,
    infer, join, segment,
};
use hpp_onnx::proto::{GraphProto, ModelProto, NodeProto, TensorProto};
use hpp_onnx::{
    Bits, BlockFormat, Choice, Model, QUANTIZED_FILE, QuantizeOptions, Roles, RowSplit, ScaleRule, Storage,
    VirtualFile, VirtualFiles, quantize, split_rows,
};
use hpp_schema::DType;
use std::collections::BTreeSet;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

const F: DType = DType::Float32;

fn known(model: &Model) -> Graph {
    let mut graph = model.graph().unwrap();
    infer::infer(&mut graph);
    graph
}

fn fixture(name: &str) -> Model {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    Model::open(&fixtures.join(name)).unwrap()
}

/// A model with some layers divided, its graph and its segmentation.
struct Divided {
    split: RowSplit,
    graph: Graph,
    segmentation: Segmentation,
}

impl Divided {
    fn of(model: &Model, is_divided: impl Fn(u32) -> bool, shards: usize) -> Result<Self, RowsError> {
        let before = known(model);
        let old = segment(&before);
        let layers = old.blocks.iter().enumerate().filter_map(|(index, block)| match block.kind {
            BlockKind::Layer(layer) if is_divided(layer) => Some(index),
            _ => None,
        });
        let division = divide_rows(&before, &old, &layers.collect::<Vec<_>>(), shards)?;
        let split = split_rows(model, &before, &division, &VirtualFiles::new()).unwrap();
        let graph = known(&split.model);
        let segmentation = division.segmentation(&before, &old, &graph, &split.nodes);
        Ok(Divided { split, graph, segmentation })
    }

    fn labels(&self) -> Vec<&str> {
        self.segmentation.blocks.iter().map(|block| block.label.as_str()).collect()
    }

    fn name(&self, id: ValueId) -> &str {
        &self.graph.value(id).name
    }

    /// Single blocks as partitions.
    fn parts(&self) -> Vec<PartitionGraph> {
        let groups: Vec<_> = (0..self.segmentation.blocks.len()).map(|block| block..block + 1).collect();
        cut(&self.graph, &self.segmentation, &groups).unwrap()
    }

    fn weight(&self, name: &str) -> &TensorProto {
        let initializers = &self.split.model.graph_proto().initializer;
        initializers.iter().find(|tensor| tensor.name() == name).unwrap_or_else(|| panic!("no weight {name:?}"))
    }

    /// Dimensions and bytes of a part of a weight.
    fn stored(&self, name: &str) -> (&[i64], Vec<u8>) {
        (&self.weight(name).dims, stored_in(&self.split.model, &self.split.contents, name))
    }

    fn node(&self, output: &str) -> &NodeProto {
        let nodes = &self.split.model.graph_proto().node;
        nodes.iter().find(|node| node.output.iter().any(|name| name == output)).unwrap_or_else(|| panic!("no {output}"))
    }

    fn attribute(&self, output: &str, name: &str) -> i64 {
        self.node(output).attribute.iter().find(|attribute| attribute.name() == name).unwrap().i()
    }
}

/// The bytes of a weight that is in the model's last file, which does not exist on disk.
fn stored_in(model: &Model, contents: &VirtualFile, name: &str) -> Vec<u8> {
    let at = model.graph_proto().initializer.iter().position(|tensor| tensor.name() == name);
    let Storage::External(range) = model.weights().storage[at.unwrap()] else { panic!("{name} is embedded") };
    assert_eq!(range.file, model.weights().files.len() - 1);
    let mut reader = contents.reader();
    reader.seek(SeekFrom::Start(range.offset)).unwrap();
    let mut bytes = vec![0; range.length as usize];
    reader.read_exact(&mut bytes).unwrap();
    bytes
}

#[test]
fn blocks_come_in_the_order_of_parts_and_shards() {
    let divided = Divided::of(&fixture("genai/llama3-fp32-cpu"), |layer| layer == 1 || layer == 2, 2).unwrap();
    let mut wanted = vec!["embedding".to_owned(), "layers.0".to_owned()];
    for layer in 1..3 {
        wanted.extend(["attention.0", "attention.1", "mlp.0", "mlp.1"].map(|part| format!("layers.{layer}.{part}")));
    }
    wanted.extend(["layers.3", "head"].map(str::to_owned));
    assert_eq!(divided.labels(), wanted);
    let blocks = &divided.segmentation.blocks;
    assert_eq!((blocks[5].shard, blocks[1].shard), (Some(Shard { part: 1, index: 1, count: 2 }), None));
    assert_eq!((blocks[5].kind, divided.segmentation.layer_count()), (BlockKind::Layer(1), 4));
    // What begins a run of divided layers has no sum of the layer before, so it is of another class.
    let classes: Vec<u32> = blocks[2..10].iter().map(|block| block.class.0).collect();
    assert_eq!((classes[0], classes[2]), (classes[1], classes[3]));
    assert_eq!((classes[4], classes[6]), (classes[5], classes[2]));
    assert_ne!(classes[0], classes[4]);
    let states = |block: &hpp_graph::Block| {
        let past = |state: &usize| divided.name(divided.segmentation.states[*state].pair.past).to_owned();
        block.states.iter().map(past).collect::<Vec<_>>()
    };
    assert_eq!(states(&blocks[3]), ["past_key_values.1.key.shard1", "past_key_values.1.value.shard1"]);
    assert_eq!(states(&blocks[1]), ["past_key_values.0.key", "past_key_values.0.value"]);
    assert!(states(&blocks[4]).is_empty());
}

/// Parts as the cutter makes them, of a model and divided layers of it.
fn exchanges_only_summands(name: &str, is_divided: impl Fn(u32) -> bool, shards: usize) {
    let divided = Divided::of(&fixture(name), is_divided, shards).unwrap();
    let parts = divided.parts();
    let shard_of = |block: usize| divided.segmentation.blocks[block].shard.map(|shard| shard.index);
    let mut summands = BTreeSet::new();
    for part in &parts {
        let (label, own) = (&divided.segmentation.blocks[part.blocks.start].label, shard_of(part.blocks.start));
        for input in part.boundary_inputs() {
            let producer = divided.graph.producer(*input).unwrap();
            let from = shard_of(divided.segmentation.block_of(producer).unwrap());
            let is_summand = divided.name(*input).contains(".summand.shard");
            assert!(
                is_summand || from.is_none() || from == own.or(Some(0)),
                "{name} {label} reads {}",
                divided.name(*input)
            );
            summands.extend(is_summand.then_some(divided.name(*input)));
        }
        assert!(part.foreign_states(&divided.segmentation).is_empty(), "{name} {label}");
    }
    assert!(!summands.is_empty(), "{name}");
    let is_weight_only = |id| divided.segmentation.weights.is_weight_only(id);
    join(&divided.graph, &parts, is_weight_only).unwrap();
}

#[test]
fn shards_exchange_only_summands() {
    exchanges_only_summands("genai/llama3-fp32-cpu", |layer| layer == 1 || layer == 2, 2);
    for name in ["llama3-int4-cpu", "qwen3-int4-cpu", "phi2-fp32-cpu", "gemma2-fp32-cpu", "llama3-fp32-cpu-hidden"] {
        exchanges_only_summands(&format!("genai/{name}"), |_| true, 2);
        // With a whole layer in between.
        exchanges_only_summands(&format!("genai/{name}"), |layer| layer != 1, 2);
    }
}

#[test]
fn every_shape_is_known_and_sums_keep_their_names() {
    for name in ["llama3-fp32-cpu", "qwen3-int4-cpu", "phi2-fp32-cpu"] {
        let model = fixture(&format!("genai/{name}"));
        let before = known(&model);
        let divided = Divided::of(&model, |_| true, 2).unwrap();
        assert!(
            divided.split.model.graph_proto().value_info.iter().all(|info| divided.graph.find(info.name()).is_some())
        );
        for value in divided.graph.value_ids().filter(|id| !divided.graph.value(*id).consumers.is_empty()) {
            let value = divided.graph.value(value);
            assert!(value.dtype.is_some() && value.shape.is_some(), "{name}: {:?}", value.name);
        }
        for value in before.value_ids().map(|id| before.value(id)) {
            if let Some(same) = divided.graph.find(&value.name) {
                assert_eq!(divided.graph.value(same).shape, value.shape, "{name}: {:?}", value.name);
            }
        }
        let sums = divided.split.nodes.iter().filter(|node| matches!(node, RowNode::Sum(..))).count();
        // Of the last two summands only shard 0 needs the sum.
        let layers = divided.segmentation.layer_count();
        let last = if name.starts_with("phi2") { 2 } else { 1 };
        assert_eq!(sums, layers * 2 * 2 - last, "{name}");
    }
}

#[test]
fn heads_and_splits_have_the_sizes_of_a_shard() {
    let divided = Divided::of(&fixture("genai/qwen3-int4-cpu"), |_| true, 2).unwrap();
    let at = |part: &str| format!("/model/layers.2/attn/{part}.shard1");
    let attention = at("GroupQueryAttention/output_0");
    assert_eq!((divided.attribute(&attention, "num_heads"), divided.attribute(&attention, "kv_num_heads")), (2, 1));
    let ints = |output: &str, input: usize| {
        let name = &divided.node(output).input[input];
        divided.graph.ints(divided.graph.find(name).unwrap()).unwrap().to_vec()
    };
    assert_eq!(ints(&at("qkv_proj/Split/output_0"), 1), [64, 32, 32]);
    assert_eq!(ints(&at("q_norm/Reshape_1/output_0"), 1), [0, -1, 32]);
    assert_eq!(ints(&at("q_norm/Reshape_2/output_0"), 1), [0, -1, 64]);
    assert_eq!(ints(&at("k_norm/Reshape_2/output_0"), 1), [0, -1, 32]);
    let past = divided.graph.find("past_key_values.2.key.shard1").unwrap();
    assert_eq!(divided.graph.value(past).shape.as_ref().unwrap()[1].as_fixed(), Some(1));
    // Norms are shared; nothing reads the whole matrices or the old sizes any more.
    divided.weight("model.layers.2.attn.q_norm.layernorm.weight");
    let initializers = &divided.split.model.graph_proto().initializer;
    assert!(!initializers.iter().any(|tensor| tensor.name() == "model.layers.2.attn.qkv_proj.MatMul.weight_Q4"));
    assert!(divided.graph.find("/model/constants/INT64/[128, 64, 64]").is_none());
}

#[test]
fn a_bias_of_a_sum_is_added_by_every_shard_and_one_of_columns_is_sliced() {
    let divided = Divided::of(&fixture("genai/phi2-fp32-cpu"), |_| true, 2).unwrap();
    assert_eq!(divided.labels()[1..4], ["layers.0.part0.0", "layers.0.part0.1", "layers.1.part0.0"]);
    let biased = divided.node("/model/layers.0/attn/o_proj/Add/output_0.shard1");
    assert_eq!(biased.input[1], "model.layers.0.attn.o_proj.Add.bias");
    let sliced = divided.node("/model/layers.0/mlp/fc1/Add/output_0.shard1");
    assert_eq!(sliced.input[1], "model.layers.0.mlp.fc1.Add.bias.shard1");
    assert_eq!(divided.weight(&sliced.input[1]).dims, [64]);
}

const HIDDEN: usize = 64;

/// `MatMulNBits` of 64 rows in blocks of 16, with zero points and a bias.
fn quantized(input: &str, name: &str, columns: i64, output: &str) -> NodeProto {
    let weights = ["B", "scales", "zero", "bias"].map(|part| format!("{name}.{part}"));
    let inputs = [input, &weights[0], &weights[1], &weights[2], "", &weights[3]];
    let attributes = [("K", HIDDEN as i64), ("N", columns), ("bits", 4), ("block_size", 16)];
    let product = NodeProto { domain: Some("com.microsoft".into()), ..node("MatMulNBits", &inputs, &[output]) };
    attributes.into_iter().fold(product, |product, (name, value)| with(product, int(name, value)))
}

/// The weights of it: with all dimensions, or flat.
fn quantized_weights(name: &str, columns: i64, is_flat: bool) -> Vec<TensorProto> {
    let shaped = |dims: &[i64]| if is_flat { vec![dims.iter().product()] } else { dims.to_vec() };
    vec![
        tensor(&format!("{name}.B"), DType::Uint8, &[columns, 4, 8]),
        tensor(&format!("{name}.scales"), F, &shaped(&[columns, 4])),
        tensor(&format!("{name}.zero"), DType::Uint8, &shaped(&[columns, 2])),
        tensor(&format!("{name}.bias"), F, &[columns]),
    ]
}

/// The file of a model, with its weights inside.
struct Tiny {
    dir: tempfile::TempDir,
}

impl Tiny {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &decoder());
        Tiny { dir }
    }

    fn open(&self) -> Model {
        Model::open(self.dir.path()).unwrap()
    }
}

/// A decoder of two layers: 4 heads of 16 elements, 2 heads of keys and values in a packed matrix, 32 neurons.
fn decoder() -> ModelProto {
    let state = |name: String| value(&name, F, &["batch", "2", "past", "16"]);
    let mut graph = GraphProto {
        node: vec![node("Gather", &["table", "ids"], &["h0"])],
        input: vec![value("ids", DType::Int64, &["batch", "sequence"])],
        initializer: vec![tensor("table", F, &[32, 64]), tensor("head", F, &[64, 32])],
        ..GraphProto::default()
    };
    graph.input.extend(["lengths", "total"].map(|name| value(name, DType::Int32, &["batch"])));
    for layer in 0..2 {
        for kind in ["key", "value"] {
            graph.input.push(state(format!("past.{layer}.{kind}")));
            graph.output.push(state(format!("present.{layer}.{kind}")));
        }
        let n = |name: &str| format!("{name}{layer}");
        let (past, present) =
            (|kind: &str| format!("past.{layer}.{kind}"), |kind: &str| format!("present.{layer}.{kind}"));
        let inputs = [&n("qkv"), "", "", &past("key"), &past("value"), "lengths", "total"].map(str::to_owned);
        let outputs = [n("mixed"), present("key"), present("value")];
        let mut gqa = with(with(node("GroupQueryAttention", &[], &[]), int("num_heads", 4)), int("kv_num_heads", 2));
        (gqa.input, gqa.output, gqa.domain) = (inputs.to_vec(), outputs.to_vec(), Some("com.microsoft".into()));
        graph.node.extend([
            quantized(&n("h"), &n("wqkv"), 128, &n("qkv")),
            gqa,
            quantized(&n("mixed"), &n("wo"), 64, &n("o")),
            node("Add", &[&n("h"), &n("o")], &[&n("mid")]),
            node("MatMul", &[&n("mid"), &n("up")], &[&n("wide")]),
            node("Add", &[&n("wide"), &n("up_bias")], &[&n("biased")]),
            node("Relu", &[&n("biased")], &[&n("active")]),
            node("MatMul", &[&n("active"), &n("down")], &[&n("narrow")]),
            node("Add", &[&n("mid"), &n("narrow")], &[&format!("h{}", layer + 1)]),
        ]);
        graph.initializer.extend(quantized_weights(&n("wqkv"), 128, false));
        graph.initializer.extend(quantized_weights(&n("wo"), 64, true));
        let dense = [("up", vec![64, 32]), ("up_bias", vec![1, 1, 32]), ("down", vec![32, 64])];
        graph.initializer.extend(dense.map(|(name, dims)| tensor(&n(name), F, &dims)));
    }
    graph.node.push(node("MatMul", &["h2", "head"], &["logits"]));
    graph.output.push(value("logits", F, &["batch", "sequence", "32"]));
    model(graph)
}

/// The bytes of [`tensor`], of which these ranges of each row of `row` bytes are taken.
fn gathered(total: usize, row: usize, ranges: &[(usize, usize)]) -> Vec<u8> {
    let all: Vec<u8> = (0..total).map(|i| i as u8).collect();
    let of_row = |row: &[u8]| ranges.iter().flat_map(|(start, length)| row[*start..start + length].to_vec()).collect();
    all.chunks(row).map(of_row).collect::<Vec<Vec<u8>>>().concat()
}

#[test]
fn packed_queries_keys_and_values_are_three_ranges_of_columns() {
    let tiny = Tiny::new();
    let divided = Divided::of(&tiny.open(), |_| true, 2).unwrap();
    // Columns of shard 1: 32..64 of the queries, 80..96 of the keys, 112..128 of the values.
    let columns = [(32, 32), (80, 16), (112, 16)];
    let of = |bytes: usize| columns.map(|(start, length)| (start * bytes, length * bytes));
    let parts =
        [("B", 32, vec![64, 4, 8]), ("scales", 16, vec![64, 4]), ("zero", 2, vec![64, 2]), ("bias", 4, vec![64])];
    for (part, bytes, dims) in parts {
        let found = divided.stored(&format!("wqkv1.{part}.shard1"));
        assert_eq!(found, (&dims[..], gathered(128 * bytes, 128 * bytes, &of(bytes))), "{part}");
    }
    assert_eq!((divided.attribute("qkv1.shard1", "N"), divided.attribute("qkv1.shard1", "K")), (64, 64));
}

#[test]
fn rows_of_quantized_matrices_are_blocks_of_every_column_and_zero_points_bytes() {
    let tiny = Tiny::new();
    let divided = Divided::of(&tiny.open(), |_| true, 2).unwrap();
    for shard in 0..2 {
        let range = |bytes: usize| [(shard * bytes, bytes)];
        let stored = |part: &str| divided.stored(&format!("wo1.{part}.shard{shard}"));
        assert_eq!(stored("B"), (&[64, 2, 8][..], gathered(64 * 32, 32, &range(16))));
        assert_eq!(stored("scales"), (&[128][..], gathered(64 * 16, 16, &range(8))));
        assert_eq!(stored("zero"), (&[64][..], gathered(64 * 2, 2, &range(1))));
        let output = format!("o1.summand.shard{shard}");
        assert_eq!((divided.attribute(&output, "K"), divided.attribute(&output, "N")), (32, 64));
    }
    // The bias is in one summand.
    assert_eq!(divided.node("o1.summand.shard0").input[4..], ["", "wo1.bias"]);
    assert_eq!(divided.node("o1.summand.shard1").input.len(), 4);
    assert_eq!(divided.node("o1").input, ["o1.summand.shard0", "o1.summand.shard1"]);
}

#[test]
fn dense_matrices_are_divided_by_columns_then_by_rows() {
    let tiny = Tiny::new();
    let divided = Divided::of(&tiny.open(), |_| true, 4);
    let reason = RowsReason::Heads { heads: 2, kind: "heads of keys and values", shards: 4 };
    assert_eq!(divided.err().unwrap().reason, reason);
    let divided = Divided::of(&tiny.open(), |layer| layer == 1, 2).unwrap();
    let halves = [(64, 64)];
    assert_eq!(divided.stored("up1.shard1"), (&[64, 16][..], gathered(64 * 128, 128, &halves)));
    assert_eq!(divided.stored("up_bias1.shard1"), (&[1, 1, 16][..], gathered(128, 128, &halves)));
    assert_eq!(divided.stored("down1.shard1"), (&[16, 64][..], gathered(32 * 256, 32 * 256, &[(16 * 256, 16 * 256)])));
    assert_eq!(divided.weight("up0").dims, [64, 32]);
}

#[test]
fn more_shards_add_their_summands_in_order() {
    let tiny = Tiny::new();
    let with_four_heads = |proto: &mut ModelProto| {
        for node in &mut proto.graph.as_mut().unwrap().node {
            node.attribute.iter_mut().filter(|a| a.name() == "num_heads").for_each(|a| a.i = Some(4));
            node.attribute.iter_mut().filter(|a| a.name() == "kv_num_heads").for_each(|a| a.i = Some(4));
            node.attribute.iter_mut().filter(|a| a.i() == 128).for_each(|a| a.i = Some(192));
        }
        let weights = &mut proto.graph.as_mut().unwrap().initializer;
        weights.retain(|weight| !weight.name().starts_with("wqkv"));
        weights.extend((0..2).flat_map(|layer| quantized_weights(&format!("wqkv{layer}"), 192, false)));
    };
    let mut proto = decoder();
    with_four_heads(&mut proto);
    save(tiny.dir.path(), &proto);
    let error = Divided::of(&tiny.open(), |_| true, 4).err().unwrap();
    assert_eq!(error.reason, RowsReason::ZeroPoints { bits: 4, blocks: 1 });
    assert_eq!((error.block.as_str(), error.node.as_str()), ("layers.0", "MatMulNBits \"MatMulNBits for o0\""));
    for node in proto.graph.as_mut().unwrap().node.iter_mut().filter(|node| node.op_type() == "MatMulNBits") {
        node.input[3].clear();
    }
    save(tiny.dir.path(), &proto);
    let divided = Divided::of(&tiny.open(), |_| true, 4).unwrap();
    assert_eq!(divided.stored("wo0.B.shard2"), (&[64, 1, 8][..], gathered(64 * 32, 32, &[(16, 8)])));
    let [last, middle] = ["o0.shard3", "o0.shard3.sum_1"].map(|output| divided.node(output).input.clone());
    assert_eq!(last, ["o0.shard3.sum_1", "o0.summand.shard3"]);
    assert_eq!(middle, ["o0.shard3.sum", "o0.summand.shard2"]);
    assert_eq!(divided.node("o0.shard3.sum").input, ["o0.summand.shard0", "o0.summand.shard1"]);
    assert_eq!(divided.labels()[4..6], ["layers.0.attention.3", "layers.0.mlp.0"]);
}

/// A model that is quantized and divided before anything is written.
#[test]
fn parts_of_weights_that_are_not_on_disk_are_read_from_their_virtual_file() {
    let model = fixture("genai/llama3-fp32-cpu");
    let format = BlockFormat { bits: Bits::Four, block_size: 32, asymmetric: true, scale: ScaleRule::Extremes };
    let (head, embedding) = (Choice::None, Choice::None);
    let options = QuantizeOptions { format, budget: None, formats: None, head, embedding, moments: None };
    let quantized = quantize(&model, &known(&model), &Roles::default(), &options).unwrap();
    let graph = known(&quantized.model);
    let segmentation = segment(&graph);
    let division = divide_rows(&graph, &segmentation, &[2], 2).unwrap();
    let files = VirtualFiles::from([(QUANTIZED_FILE.to_owned(), quantized.contents.clone())]);
    let split = split_rows(&quantized.model, &graph, &division, &files).unwrap();
    let whole = stored_in(&quantized.model, &quantized.contents, "model.layers.1.mlp.down_proj.MatMul.weight_Q4G32");
    let part = stored_in(&split.model, &split.contents, "model.layers.1.mlp.down_proj.MatMul.weight_Q4G32.shard1");
    // Columns of 256 rows in 8 blocks of 16 bytes.
    let wanted: Vec<u8> = whole.chunks(128).flat_map(|column| column[64..].to_vec()).collect();
    assert_eq!(part, wanted);
    let graph = known(&split.model);
    let again = divide_rows(&graph, &segment(&graph), &[1], 2).unwrap();
    let error = split_rows(&split.model, &graph, &again, &files).unwrap_err().to_string();
    assert!(error.contains("weight file named \"hpp.rows.bin\""), "{error}");
}

#[test]
fn models_that_cannot_be_divided_are_refused_with_block_and_operator() {
    let refusal = |name: &str| Divided::of(&fixture(name), |_| true, 2).err().map(|error| error.to_string());
    let wanted = [
        ("genai/phi4-mini-fp16-cuda", "has 1 heads of keys and values, which cannot be divided equally among 2 shards"),
        ("genai/gpt-oss-int4-cpu", "layers.0 by rows: QMoE \"/model/layers.0/moe/QMoE\" is a mixture of experts"),
        ("genai/lfm2-fp32-cpu", "CausalConvWithState"),
        ("genai/qwen3.5-fp32-cpu", "reads the state \"past.0.conv\""),
        ("genai/llama3-fp16-cuda-paged", "which is not the KV cache of a GroupQueryAttention"),
        ("optimum/llama-with-past", "which is not the KV cache of a GroupQueryAttention"),
    ];
    for (name, text) in wanted {
        let refusal = refusal(name).unwrap_or_else(|| panic!("{name} was divided"));
        assert!(refusal.starts_with("cannot divide layers.0 by rows: ") && refusal.contains(text), "{name}: {refusal}");
    }
}
