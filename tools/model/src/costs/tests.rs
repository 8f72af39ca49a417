//! Compares predicted numbers of boundary and state tensors with the partitions that models of each exporter are really
//! cut into.

use super::{Scenario, blocks};
use crate::{Analysis, LogitsMode, analyse};
use hpp_graph::cut;
use hpp_partition::{BlockRole, BlockSpec};
use std::path::Path;

fn fixture(name: &str) -> (Analysis, Vec<BlockSpec>) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name);
    let a = analyse(&path, None, LogitsMode::Requested).unwrap();
    let scenario = Scenario {
        batch: 1,
        context: 512,
        prompt: 100,
        new_tokens: 40,
        prefill_chunk: 64,
        threads: 1,
        divides_prompts: true,
    };
    let blocks = blocks(&a.graph, &a.segmentation, &a.states, &a.inputs, scenario);
    (a, blocks)
}

/// Number of floating-point tensors that enter a partition that begins with this block. Integer shape tensors may cross
/// too, but a session on a device reads them from host memory, so they are not copied.
fn crossing(a: &Analysis, block: usize) -> u64 {
    let groups = [0..block, block..a.segmentation.blocks.len()];
    let parts = cut(&a.graph, &a.segmentation, &groups).unwrap();
    let shipped = parts[1].inputs.iter().filter(|id| parts[0].outputs.contains(id));
    shipped.filter(|id| a.graph.value(**id).dtype.is_some_and(|dtype| dtype.is_float())).count() as u64
}

#[test]
fn boundary_tensors_match_a_cut_before_the_block() {
    let exports = [
        "genai/llama3-fp32-cpu",
        "genai/lfm2-fp32-cpu",
        "genai/phi2-fp32-cpu",
        "genai/llama3-fp16-webgpu",
        "optimum/llama-with-past",
        "optimum/bert",
        "optimum-legacy/gpt2-merged",
        "torch/llama-dynamo-kv",
    ];
    for name in exports {
        let (a, blocks) = fixture(name);
        assert_eq!(blocks[0].boundary_tensors, 0, "{name}: nothing enters the first block from another");
        for (at, block) in blocks.iter().enumerate().skip(1) {
            assert_eq!(block.boundary_tensors, crossing(&a, at), "{name} {}", block.label);
        }
    }
}

/// The residual sum and the next addend are two tensors.
#[test]
fn genai_models_have_two_boundary_tensors_between_layers() {
    let tensors = |name| fixture(name).1.iter().map(|block| block.boundary_tensors).collect::<Vec<_>>();
    assert_eq!(tensors("genai/llama3-fp32-cpu"), [0, 1, 2, 2, 2, 1]);
    assert_eq!(tensors("optimum/llama-with-past"), [0, 1, 1, 1, 1, 1]);
    let (_, blocks) = fixture("genai/llama3-fp32-cpu");
    assert_eq!(blocks[2].boundary_bytes, 2 * blocks[1].boundary_bytes, "boundary_bytes counts all tensors");
}

#[test]
fn attention_has_two_state_tensors_and_a_convolution_one() {
    for (name, of_layers) in [("genai/llama3-fp32-cpu", [2, 2, 2, 2]), ("genai/lfm2-fp32-cpu", [1, 2, 1, 2])] {
        let (_, blocks) = fixture(name);
        let layers = blocks.iter().filter(|block| matches!(block.kind, BlockRole::Layer(_)));
        assert_eq!(layers.map(|block| block.kv_tensors).collect::<Vec<_>>(), of_layers, "{name}");
        assert_eq!((blocks[0].kv_tensors, blocks[5].kv_tensors), (0, 0), "{name}");
    }
}

/// ONNX Runtime transposes the table of a tied model when it creates a session: passes take no memory for it.
#[test]
fn a_tied_table_is_transposed_once() {
    for (name, folds) in [
        ("genai/gemma2-fp32-cpu", BlockRole::Embedding),
        ("optimum/opt-with-past", BlockRole::Head),
        ("torch/gpt-dynamo", BlockRole::Head),
    ] {
        let (_, blocks) = fixture(name);
        let table = |block: &BlockSpec| block.weights.iter().map(|(_, bytes)| *bytes).max().unwrap();
        for block in &blocks {
            // Small constants are computed too.
            let folded = if block.kind == folds { table(block) >> 12 } else { 0 };
            assert_eq!(block.folded_once() >> 12, folded, "{name}: {block:?}");
            assert!(block.workspace_bytes >= block.folded_bytes, "{name}: {block:?}");
        }
    }
    // Of a weight that a model reshapes there is no copy.
    let (_, blocks) = fixture("genai/llama3-tied-int4-cpu-shared");
    assert!(blocks.iter().all(|block| block.folded_bytes < 4096));
}
