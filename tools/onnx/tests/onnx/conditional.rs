//! Written-out experts are put under conditions where that changes no bit, and left alone elsewhere.

use crate::models;
use hpp_graph::{Graph, Mixture, infer, segment, written_out};
use hpp_onnx::{Model, compute_selected_experts};
use hpp_schema::SelectedBy;
use std::path::Path;

fn known(model: &Model) -> Graph {
    let mut graph = model.graph().unwrap();
    infer::infer(&mut graph);
    graph
}

fn fixture(name: &str) -> Model {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    Model::open(&fixtures.join(name)).unwrap()
}

fn mixtral() -> Model {
    fixture("optimum/mixtral-with-past")
}

#[test]
fn only_models_that_write_experts_out_change() {
    for path in models::all() {
        let model = Model::open(&path).unwrap();
        let is_written_out = ["mixtral", "qwen3-moe"].iter().any(|name| path.to_string_lossy().contains(name));
        assert_eq!(compute_selected_experts(&model, &known(&model)).is_some(), is_written_out, "{}", path.display());
    }
}

/// A fixture, its layers, the experts of each, and what selects two of them.
const WRITTEN_OUT: [(&str, usize, usize, SelectedBy); 2] = [
    ("optimum/mixtral-with-past", 4, 4, SelectedBy::Scores),
    ("optimum/qwen3-moe-with-past", 2, 8, SelectedBy::Numbers),
];

#[test]
fn every_expert_becomes_a_branch_with_its_weights() {
    for (name, layers, count, selected_by) in WRITTEN_OUT {
        becomes_branches(&fixture(name), layers, count, selected_by);
    }
}

fn becomes_branches(model: &Model, layers: usize, count: usize, selected_by: SelectedBy) {
    let graph = known(model);
    let (rewritten, experts) = compute_selected_experts(model, &graph).unwrap();
    assert_eq!(experts, layers * count);
    let rewritten = known(&rewritten);
    let ifs: Vec<_> = rewritten.nodes.iter().filter(|node| node.op_type == "If").collect();
    assert_eq!(ifs.len(), layers * count);
    for node in ifs {
        let weights =
            node.captures.iter().filter(|id| rewritten.weight(**id).is_some_and(|weight| weight.bytes > 1024));
        assert_eq!(weights.count(), 3, "{}", node.name);
        let after = node.outputs[0].unwrap();
        let before = graph.find(&rewritten.value(after).name).unwrap();
        assert_eq!(rewritten.value(after).shape, graph.value(before).shape, "{}", node.name);
    }
    let mut segmentation = segment(&rewritten);
    let with_experts: Vec<usize> = (0..segmentation.blocks.len())
        .filter(|block| Mixture::of(&rewritten, &segmentation.blocks[*block]).is_some())
        .collect();
    assert_eq!(with_experts.len(), layers);
    let mixtures = with_experts.iter().map(|block| {
        let mixture = Mixture::of(&rewritten, &segmentation.blocks[*block]).unwrap();
        assert_eq!((mixture.count, mixture.active, mixture.weights.len()), (count as u64, 2, 3 * count));
        assert_eq!((mixture.selected_by, mixture.is_apart), (selected_by, true));
        (*block, mixture.nodes)
    });
    let mixtures: Vec<_> = mixtures.collect();
    // The selection is computed in the first half, and every expert in the second.
    segmentation = segmentation.divided_at_experts(&rewritten, &mixtures);
    for block in segmentation.blocks.iter().filter(|block| block.is_experts) {
        let experts = block.nodes.iter().filter(|id| rewritten.node(**id).op_type == "If");
        assert_eq!(experts.count(), count, "{}", block.label);
        assert!(block.nodes.iter().all(|id| rewritten.node(*id).op_type != "TopK"), "{}", block.label);
    }
}

/// Whether layer 0 still counts as written out after a change of the graph.
fn is_found(change: impl FnOnce(&mut hpp_onnx::proto::GraphProto)) -> bool {
    let model = mixtral();
    let mut proto = model.proto().clone();
    change(proto.graph.as_mut().unwrap());
    let dir = tempfile::tempdir().unwrap();
    hpp_onnx::write_model(&dir.path().join("model.onnx"), &proto).unwrap();
    let found = written_out(&known(&Model::open(dir.path()).unwrap())).len();
    assert!(found >= 3, "{found}");
    found == 4
}

#[test]
fn experts_that_something_else_needs_are_left_alone() {
    let at = |graph: &hpp_onnx::proto::GraphProto, name: &str| {
        let name = format!("/model/layers.0/block_sparse_moe/{name}");
        graph.node.iter().position(|node| node.name() == name).unwrap()
    };
    assert!(is_found(|_| {}));
    // The weighted result of an expert is an output.
    assert!(!is_found(|graph| {
        let output = graph.node[at(graph, "Mul_1")].output[0].clone();
        graph.output.push(hpp_onnx::proto::ValueInfoProto { name: Some(output), ..Default::default() });
    }));
    // Subtracted instead of added.
    assert!(!is_found(|graph| {
        let node = at(graph, "Add_2");
        graph.node[node].op_type = Some("Sub".into());
    }));
    // Two experts with the scores of one.
    assert!(!is_found(|graph| {
        let column = graph.node[at(graph, "Slice")].output[0].clone();
        let product = at(graph, "Mul_1");
        graph.node[product].input[1] = column;
    }));
    // Weights of 16 bits.
    assert!(!is_found(|graph| {
        let expert = "/model/layers.0/block_sparse_moe/experts.3/w2/MatMul";
        let weight = graph.node.iter().find(|node| node.name() == expert).unwrap().input[1].clone();
        let tensor = graph.initializer.iter_mut().find(|tensor| tensor.name() == weight).unwrap();
        tensor.data_type = Some(10);
        tensor.dims = vec![128, 64];
        tensor.raw_data = Some(vec![0; 128 * 64 * 2].into());
    }));
    // The weights of two columns.
    assert!(!is_found(|graph| {
        let end = graph.node[at(graph, "Slice_1")].input[2].clone();
        let next = graph.node[at(graph, "Slice_2")].input[2].clone();
        let slice = at(graph, "Slice_1");
        assert_ne!(end, next);
        graph.node[slice].input[2] = next;
    }));
}

/// Results that are scattered into ones instead of zeros, and tokens that another mask finds.
#[test]
fn experts_that_add_something_without_tokens_are_left_alone() {
    let found = |change: &dyn Fn(&mut hpp_onnx::proto::GraphProto)| {
        let mut proto = fixture("optimum/qwen3-moe-with-past").proto().clone();
        change(proto.graph.as_mut().unwrap());
        let dir = tempfile::tempdir().unwrap();
        hpp_onnx::write_model(&dir.path().join("model.onnx"), &proto).unwrap();
        written_out(&known(&Model::open(dir.path()).unwrap())).len()
    };
    let at = |graph: &hpp_onnx::proto::GraphProto, name: &str| {
        let name = format!("/model/layers.0/mlp/{name}");
        graph.node.iter().position(|node| node.name() == name).unwrap()
    };
    assert_eq!(found(&|_| {}), 2);
    let ones = |graph: &mut hpp_onnx::proto::GraphProto| {
        let zeros = at(graph, "ConstantOfShape_1");
        graph.node[zeros].attribute[0].t.as_mut().unwrap().raw_data = Some(1.0_f32.to_le_bytes().to_vec().into());
    };
    assert_eq!(found(&ones), 1);
    let other_mask = |graph: &mut hpp_onnx::proto::GraphProto| {
        let (first, second) = (at(graph, "NonZero"), at(graph, "NonZero_1"));
        graph.node[first].input[0] = graph.node[second].input[0].clone();
    };
    assert_eq!(found(&other_mask), 1);
}
