//! Every model reads, and its graph says what the protobuf says.

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
