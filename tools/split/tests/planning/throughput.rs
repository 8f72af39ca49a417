//! Plans for many sequences that share each pass over the weights.

use crate::support::{fixture, machine, places, split};
use hpp_schema::*;
use std::fs;
use std::path::Path;

/// A machine whose host and link are slow, so that both copying weights to the GPU and computing on the host cost much.
fn slow_machine(dir: &Path) -> String {
    let text = fs::read_to_string(machine("rtx4060-laptop.yaml")).unwrap();
    let slower = text
        .replace("memory_gb_per_s: 60", "memory_gb_per_s: 0.5")
        .replace("tflops: 0.55", "tflops: 0.005")
        .replace("to_device_gb_per_s: 12.5", "to_device_gb_per_s: 0.5");
    let path = dir.join("slow.yaml");
    fs::write(&path, slower).unwrap();
    path.to_str().unwrap().to_owned()
}

fn planned(machine: &str, objective: &str) -> Plan {
    let model = fixture("genai/learned-llama-fp32-cpu");
    let budget = ["--vram", "8M", "--margin", "0", "--context", "32", "--prompt-tokens", "16", "--new-tokens", "16"];
    let arguments = [&[model.to_str().unwrap(), "--dry-run", "--json", "--machine", machine], &budget[..]].concat();
    let arguments = [&arguments[..], &["--objective", objective]].concat();
    serde_json::from_str(&split(&arguments).success().stdout).unwrap()
}

#[test]
fn many_sequences_make_streaming_worth_it() {
    let dir = tempfile::tempdir().unwrap();
    let machine = slow_machine(dir.path());
    let (one, many) = (planned(&machine, "mixed"), planned(&machine, "throughput"));
    assert!(!places(&one).is_empty() && one.partitions.iter().all(|partition| !partition.is_streamed()));
    assert!(many.partitions.iter().any(Partition::is_streamed), "{}", places(&many));
    let [alone, together] = [&one, &many].map(|plan| plan.predictions.throughput.clone().unwrap());
    assert!(together.sequences >= 8 && together.free_sequences > 1, "{together:?}");
    assert!(together.tokens_per_second > 2.0 * alone.tokens_per_second, "{together:?} and {alone:?}");
    assert!(many.predictions.decode_ms > one.predictions.decode_ms, "one sequence alone is faster with the other plan");
    assert_eq!(many.predictions.objective.as_ref().unwrap().kind, ObjectiveKind::Throughput);
    assert!(many.check().iter().all(|finding| finding.severity != Severity::Error));
    let ms = |sequences, tokens| {
        let pass = together.passes.iter().find(|pass| (pass.sequences, pass.tokens) == (sequences, tokens));
        pass.unwrap().ms
    };
    assert!(ms(1, 1) <= ms(2, 1) && ms(2, 1) <= ms(8, 1) && ms(8, 1) < 4.0 * ms(1, 1), "{together:?}");
    assert!(ms(1, 1) <= ms(1, 2) && ms(1, 2) <= ms(1, 32), "{together:?}");
}

#[test]
fn states_of_all_sequences_are_inside_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let plan = planned(&slow_machine(dir.path()), "throughput");
    let throughput = plan.predictions.throughput.as_ref().unwrap();
    let on_gpu = plan.states.iter().filter(|state| state.device == "gpu0").map(|state| state.bytes.0).sum::<u64>();
    let ring = plan.devices[1].ring.unwrap();
    let weights = plan.weights_on("gpu0").unwrap() + ring.slot_bytes.0 * u64::from(ring.slots);
    assert!(weights + throughput.sequences * on_gpu <= 8 << 20, "{throughput:?}");
}

#[test]
fn options_for_one_sequence_are_refused_with_throughput() {
    let model = fixture("genai/learned-llama-fp32-cpu");
    for option in [&["--refine", "8"][..], &["--at-least", "5"], &["--first-token-within", "5"]] {
        let arguments = [&[model.to_str().unwrap(), "--dry-run", "--objective", "throughput"], option].concat();
        split(&arguments).refusal(&["--objective throughput", "omit one of them"]);
    }
}
