//! Layers of real exporters' models are divided by rows: blocks, what crosses between shards, states; and what is refused.

use hpp_graph::{
    Block, BlockKind, Graph, PartitionGraph, RowNode, RowsError, Segmentation, Shard, ValueId, cut, divide_rows, infer,
    join, segment,
};
use hpp_onnx::proto::{NodeProto, TensorProto};
use hpp_onnx::{Model, RowSplit, VirtualFiles, split_rows};
use std::collections::BTreeSet;
use std::path::Path;

pub fn known(model: &Model) -> Graph {
    let mut graph = model.graph().unwrap();
    infer::infer(&mut graph);
    graph
}

pub fn fixture(name: &str) -> Model {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    Model::open(&fixtures.join(name)).unwrap()
}

/// A model with some layers divided, its graph and its segmentation.
pub struct Divided {
    pub split: RowSplit,
    pub graph: Graph,
    pub segmentation: Segmentation,
}

impl Divided {
    pub fn of(model: &Model, is_divided: impl Fn(u32) -> bool, shards: usize) -> Result<Self, RowsError> {
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

    pub fn labels(&self) -> Vec<&str> {
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

    pub fn weight(&self, name: &str) -> &TensorProto {
        let initializers = &self.split.model.graph_proto().initializer;
        initializers.iter().find(|tensor| tensor.name() == name).unwrap_or_else(|| panic!("no weight {name:?}"))
    }

    pub fn node(&self, output: &str) -> &NodeProto {
        let nodes = &self.split.model.graph_proto().node;
        nodes.iter().find(|node| node.output.iter().any(|name| name == output)).unwrap_or_else(|| panic!("no {output}"))
    }

    pub fn attribute(&self, output: &str, name: &str) -> i64 {
        self.node(output).attribute.iter().find(|attribute| attribute.name() == name).unwrap().i()
    }
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
    let states = |block: &Block| {
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
