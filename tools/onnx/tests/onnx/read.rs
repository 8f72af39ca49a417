//! Every model can be read, and its graph equals the protobuf.

use crate::models;
use hpp_graph::Origin;
use hpp_onnx::Model;

#[test]
fn every_model_reads_into_a_graph() {
    for path in models::all() {
        let model = Model::open(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let graph = model.graph().unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert_eq!(graph.nodes.len(), model.graph_proto().node.len());
        for id in graph.node_ids() {
            let node = graph.node(id);
            for read in node.reads() {
                assert!(graph.value(read).consumers.contains(&id));
                assert!(graph.producer(read).is_none_or(|producer| producer < id), "{}", path.display());
            }
        }
        let weights = graph.value_ids().filter(|v| graph.weight(*v).is_some()).count();
        assert_eq!(weights, model.graph_proto().initializer.len(), "{}", path.display());
        assert!(graph.inputs.iter().all(|v| matches!(graph.value(*v).origin, Origin::Input)));
        assert!(!graph.outputs.is_empty());
    }
}

#[test]
fn merged_decoders_become_the_branch_that_reads_state() {
    for path in models::all().iter().filter(|p| p.ends_with("decoder_model_merged.onnx")) {
        let model = Model::open(path).unwrap();
        let choice = model.branch().expect("a merged decoder");
        assert_eq!((choice.condition.as_str(), choice.value), ("use_cache_branch", true));
        assert!(choice.state_inputs.iter().all(|name| name.starts_with("past_key_values.")), "{choice:?}");
        assert_eq!(choice.dropped_inputs[0].name, "use_cache_branch");
        let graph = model.graph().unwrap();
        assert!(graph.nodes.len() > 500 && graph.nodes.iter().all(|n| n.op_type != "If"));
        let names: Vec<&str> = graph.outputs.iter().map(|v| graph.value(*v).name.as_str()).collect();
        assert_eq!(names[0], "logits");
        assert!(names.iter().skip(1).all(|name| name.starts_with("present.")), "{names:?}");
    }
}

#[test]
fn functions_are_inlined() {
    let functions = models::all().into_iter().filter(|p| p.to_string_lossy().contains("functions"));
    for path in functions {
        let model = Model::open(&path).unwrap();
        let graph = model.graph().unwrap();
        assert!(model.proto().functions.is_empty());
        assert!(graph.nodes.len() > 400, "{}", graph.nodes.len());
        assert!(graph.nodes.iter().all(|n| n.domain.is_empty()));
    }
}
