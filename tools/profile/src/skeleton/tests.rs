//! Skeletons of models that exporters made: what they keep, and that they run.

use super::*;
use crate::sample;
use hpp_schema::{PLAN_VERSION, Plan, Provider};

#[test]
fn a_skeleton_has_every_state_and_the_scores_and_no_weights() {
    for (name, states) in [("genai/llama3-fp32-cpu", 8), ("optimum/llama-with-past", 8), ("genai/lfm2-fp32-cpu", 6)] {
        let (analysis, dir) = (sample::analysis(name), tempfile::tempdir().unwrap());
        let path = write(&analysis, dir.path()).unwrap();
        let plan = Plan::from_yaml(&std::fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!((plan.hpp_plan, plan.states.len(), plan.partitions.len()), (PLAN_VERSION, states, 1), "{name}");
        let partition = &plan.partitions[0];
        assert_eq!(partition.providers, [Provider::CPU]);
        assert_eq!((partition.bytes.weights.0, partition.outputs.len()), (0, states + 1), "{name}");
        let bytes = std::fs::metadata(dir.path().join(&partition.file)).unwrap().len();
        assert!(bytes < 32 << 10, "{name}: {bytes}");
    }
}

#[test]
fn models_without_token_ids_or_scores_have_none() {
    let refused = |name: &str| {
        let dir = tempfile::tempdir().unwrap();
        write(&sample::analysis(name), dir.path()).unwrap_err().to_string()
    };
    assert_eq!(refused("genai/llama3-fp32-cpu-noembed"), "the model takes no token ids");
    assert_eq!(refused("optimum/bert"), "the model has no logits");
}
