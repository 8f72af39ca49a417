//! A router of a later mixture is copied into an earlier part, where it computes with that part's hidden state.

use crate::build::node;
use hpp_graph::{EarlyRouter, Graph, Mixture, NodeId, PartitionGraph, infer};
use hpp_onnx::proto::{ModelProto, NodeProto};
use hpp_onnx::{Extractor, Model, write_model};
use hpp_schema::SelectedBy;
use std::collections::BTreeSet;
use std::path::Path;

fn known(model: &Model) -> Graph {
    let mut graph = model.graph().unwrap();
    infer::infer(&mut graph);
    graph
}

/// Four layers with a mixture each.
fn trained() -> Model {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    Model::open(&fixtures.join("genai/learned-gpt-oss-int4-cpu")).unwrap()
}

/// Its experts are too small to be read one by one, but routed like larger ones.
fn mixtures(graph: &Graph) -> Vec<Mixture> {
    let operators = graph.node_ids().filter(|id| graph.node(*id).op_type == "QMoE");
    let mixture = |id: NodeId| Mixture {
        nodes: vec![id],
        router: graph.node(id).inputs[1].unwrap(),
        count: 16,
        active: 4,
        selected_by: SelectedBy::Logits,
        weights: [2, 5].iter().filter_map(|input| graph.node(id).inputs[*input]).collect(),
        is_apart: false,
    };
    operators.map(mixture).collect()
}

/// A model that refers to the weights of another.
fn open_beside_weights(proto: &ModelProto, source: &Model) -> Model {
    let dir = tempfile::tempdir().unwrap();
    for file in &source.weights().files {
        std::fs::copy(&file.path, dir.path().join(&file.location)).unwrap();
    }
    write_model(&dir.path().join("model.onnx"), proto).unwrap();
    Model::open(dir.path()).unwrap()
}

fn operators(model: &ModelProto) -> Vec<&str> {
    model.graph.as_ref().unwrap().node.iter().map(|node| node.op_type()).collect()
}

#[test]
fn the_next_router_is_computed_with_the_hidden_state_of_this_layer() {
    let model = trained();
    let graph = known(&model);
    let mixtures = mixtures(&graph);
    assert_eq!(mixtures.len(), 4);
    let routers: Vec<EarlyRouter> =
        mixtures.windows(2).map(|pair| EarlyRouter::of(&graph, &pair[0], &pair[1]).unwrap()).collect();
    let router = &routers[0];
    let name = |id| graph.value(id).name.as_str();
    assert_eq!(name(router.hidden_state().unwrap()), "/model/layers.0/post_attention_layernorm/output_3");
    assert_eq!(name(router.prediction.router), "/model/layers.1/moe/router/Reshape/output_0");
    let read: BTreeSet<&str> = router.replaced.keys().map(|id| name(*id)).collect();
    let both = ["/model/layers.1/attn/o_proj/Add/output_0", "/model/layers.1/input_layernorm/output_3"];
    assert_eq!(read, BTreeSet::from(both));
    // A part of nothing else, whose input is the hidden state.
    let part = PartitionGraph {
        inputs: vec![router.hidden_state().unwrap()],
        early_router: Some(router.clone()),
        prediction: Some(routers[1].prediction.clone()),
        ..PartitionGraph::default()
    };
    let proto = Extractor::new(&model, &graph).part("early", &part).unwrap();
    let copied = ["SkipSimplifiedLayerNormalization", "MatMulNBits", "Add", "Constant", "Reshape"];
    let mut found = operators(&proto);
    found.sort_by_key(|operator| copied.iter().position(|other| other == operator));
    assert_eq!(found, copied);
    let early = open_beside_weights(&proto, &model).graph().unwrap();
    let names = |ids: &[hpp_graph::ValueId]| ids.iter().map(|id| early.value(*id).name.clone()).collect::<Vec<_>>();
    assert_eq!(names(&early.inputs), [name(router.hidden_state().unwrap()), &routers[1].prediction.name]);
    assert_eq!(names(&early.outputs), [&*router.prediction.name]);
    let (given, right) = (early.outputs[0], router.prediction.router);
    assert_eq!(early.value(given).shape, graph.value(right).shape);
    assert_eq!(early.value(given).dtype, graph.value(right).dtype);
}

/// A router that also reads what is neither a hidden state nor a weight, or whose hidden states are not normalised, predicts nothing.
#[test]
fn other_forms_of_routers_are_left_alone() {
    let changed = |change: fn(&mut Vec<NodeProto>)| {
        let mut proto = trained().proto().clone();
        change(&mut proto.graph.as_mut().unwrap().node);
        let graph = known(&open_beside_weights(&proto, &trained()));
        let mixtures = mixtures(&graph);
        EarlyRouter::of(&graph, &mixtures[0], &mixtures[1])
    };
    assert!(changed(|_| {}).is_some());
    let scaled_by_attention = |nodes: &mut Vec<NodeProto>| {
        let at = nodes.iter().position(|node| node.output[0] == "/model/layers.1/moe/router/Add/output_0").unwrap();
        nodes[at].input[1] = "/model/layers.0/moe/router/Add/output_0".into();
    };
    assert_eq!(changed(scaled_by_attention), None);
    let unnormalised = |nodes: &mut Vec<NodeProto>| {
        let at = nodes.iter().position(|node| node.output[0].ends_with("layers.1/post_attention_layernorm/output_0"));
        let sum = node("Add", &nodes[at.unwrap()].input[..2].iter().map(String::as_str).collect::<Vec<_>>(), &[]);
        let outputs = nodes[at.unwrap()].output.clone();
        let again = node("Identity", &[&outputs[0]], &[&outputs[3]]);
        nodes[at.unwrap()] = NodeProto { output: vec![outputs[0].clone()], ..sum };
        nodes.insert(at.unwrap() + 1, again);
    };
    assert_eq!(changed(unnormalised), None);
}
