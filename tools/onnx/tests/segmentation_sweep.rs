//! Blocks, states and cuts of every available model, compared with the exporter's configuration.
//!
//! Covers `fixtures/models`, and the directory in `HPP_MODELS` if it is set.

use hpp_graph::{BlockKind, Graph, PartitionGraph, Segmentation, StateChange, cut, infer, join, segment};
use hpp_onnx::Model;
use serde_json::Value as Json;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

fn models() -> Vec<PathBuf> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    let mut found = vec![];
    collect(&fixtures, &mut found);
    assert!(!found.is_empty(), "no models under {}", fixtures.display());
    if let Some(more) = std::env::var_os("HPP_MODELS") {
        collect(Path::new(&more), &mut found);
    }
    found.sort();
    found
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
    let entries = std::fs::read_dir(directory).unwrap_or_else(|e| panic!("{}: {e}", directory.display()));
    for path in entries.map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            collect(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "onnx") {
            found.push(path);
        }
    }
}

fn read(path: &Path) -> Graph {
    let model = Model::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut graph = model.graph().unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    infer::infer(&mut graph);
    graph
}

fn json(path: &Path) -> Option<Json> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// The number of layers in the model's configuration.
fn configured_layers(path: &Path) -> Option<u64> {
    let directory = path.parent()?;
    if let Some(config) = json(&directory.join("genai_config.json")) {
        return config["model"]["decoder"]["num_hidden_layers"].as_u64();
    }
    let encoder = path.file_name()?.to_str()?.starts_with("encoder");
    let config = json(&directory.join("config.json"))?;
    let keys: &[&str] = if encoder { &["num_layers"] } else { &["num_decoder_layers"] };
    let keys = keys.iter().chain(&["num_hidden_layers", "n_layer", "num_layers"]);
    keys.filter_map(|k| config[k].as_u64()).next()
}

/// The number of different layer numbers in the names of states.
fn numbered_layers(graph: &Graph) -> Option<u64> {
    let pasts = graph.inputs.iter().map(|v| graph.value(*v).name.as_str()).filter(|n| n.starts_with("past"));
    let number = |name: &str| name.split('.').find_map(|part| part.parse::<u64>().ok());
    let numbers: BTreeSet<u64> = pasts.filter_map(number).collect();
    (!numbers.is_empty()).then_some(numbers.len() as u64)
}

/// Exports of four layers without a configuration.
const FOUR_LAYERS: [&str; 5] = [
    "torch/gpt-dynamo",
    "torch/gpt-torchscript",
    "torch/gpt-torchscript-functions",
    "torch/llama-dynamo",
    "torch/llama-dynamo-kv",
];

fn expected_layers(path: &Path, graph: &Graph) -> Option<u64> {
    let listed = FOUR_LAYERS.iter().any(|m| path.parent().is_some_and(|d| d.ends_with(m)));
    configured_layers(path).or_else(|| numbered_layers(graph)).or(listed.then_some(4))
}

fn labels(s: &Segmentation) -> Vec<&str> {
    s.blocks.iter().map(|b| b.label.as_str()).collect()
}

fn is_genai(path: &Path) -> bool {
    path.parent().is_some_and(|d| d.join("genai_config.json").exists())
}

/// `graph` with meaningless names.
fn nameless(mut graph: Graph) -> Graph {
    let outputs: BTreeSet<_> = graph.outputs.iter().copied().collect();
    for id in graph.value_ids() {
        let kind = if outputs.contains(&id) { 'b' } else { 'a' };
        graph.values[id.0 as usize].name = format!("{kind}{}", (id.0 + 1).wrapping_mul(2_654_435_761));
    }
    graph.nodes.iter_mut().for_each(|n| n.name.clear());
    graph
}

#[test]
fn decoders_and_encoders_have_the_layers_their_configuration_names() {
    let mut checked = 0;
    for path in models() {
        let graph = read(&path);
        let s = segment(&graph);
        assert!(s.undecided.is_empty(), "{}: {:?}", path.display(), s.undecided);
        if let Some(layers) = expected_layers(&path, &graph) {
            assert_eq!(s.layer_count() as u64, layers, "{}: {:?}", path.display(), labels(&s));
            checked += 1;
        }
    }
    assert!(checked >= 5, "only {checked} models say how many layers they have");
}

#[test]
fn residual_networks_have_stem_blocks_and_head() {
    for path in models().into_iter().filter(|p| p.parent().is_some_and(|d| d.to_string_lossy().contains("resnet18"))) {
        let s = segment(&read(&path));
        let mut expected = vec!["stem".to_owned()];
        expected.extend((0..8).map(|i| format!("blocks.{i}")));
        expected.push("head".to_owned());
        assert_eq!(labels(&s), expected, "{}", path.display());
    }
}

/// Models with fused residual norms pass two tensors between layers and one to the head; others pass one.
#[test]
fn as_few_tensors_cross_as_the_exporter_allows() {
    for path in models() {
        let s = segment(&read(&path));
        for (i, boundary) in s.boundaries.iter().enumerate() {
            let between_layers =
                matches!((s.blocks[i].kind, s.blocks[i + 1].kind), (BlockKind::Layer(_), BlockKind::Layer(_)));
            let expected = if is_genai(&path) && between_layers { 2 } else { 1 };
            assert_eq!(boundary.values.len(), expected, "{} after {}", path.display(), s.blocks[i].label);
        }
    }
}

#[test]
fn layers_of_one_kind_share_a_class() {
    for path in models() {
        let graph = read(&path);
        let s = segment(&graph);
        let signature = |b: &hpp_graph::Block| {
            let mut ops: Vec<_> = b.nodes.iter().map(|n| graph.node(*n).op_type.clone()).collect();
            ops.sort();
            let attributes: BTreeSet<String> =
                b.nodes.iter().map(|n| format!("{:?}", graph.node(*n).attributes)).collect();
            let sizes: Vec<u64> = b.weights.iter().map(|w| graph.weight(*w).unwrap().bytes).collect();
            (ops, attributes, sizes.iter().sum::<u64>())
        };
        let mut seen = BTreeMap::new();
        // The exporter's numbers of experts in the first layer are constants that its other nodes read too.
        let first = u32::from(path.to_string_lossy().contains("qwen3-moe"));
        let layers = s.blocks.iter().filter(|b| matches!(b.kind, BlockKind::Layer(layer) if layer >= first));
        for block in layers {
            let class = *seen.entry(signature(block)).or_insert(block.class);
            assert_eq!(class, block.class, "{}: {}", path.display(), block.label);
        }
    }
}

#[test]
fn states_are_the_recorded_pairs() {
    for path in models() {
        let (graph, recorded) = (read(&path), json(&path.with_file_name("reference.json")));
        let s = segment(&graph);
        let name = |v| graph.value(v).name.clone();
        let pairs: BTreeMap<String, String> =
            s.states.iter().filter_map(|s| Some((name(s.pair.past), name(s.pair.present?)))).collect();
        let pasts = graph
            .inputs
            .iter()
            .filter(|v| graph.value(**v).name.starts_with("past_key") || graph.value(**v).name.starts_with("past."));
        assert_eq!(s.states.len(), pasts.count(), "{}", path.display());
        let all = recorded.as_ref().and_then(|r| r["state_pairs"].as_object());
        for (past, present) in all.into_iter().flatten().filter(|(p, _)| graph.find(p).is_some()) {
            assert_eq!(pairs.get(past).map(String::as_str), present.as_str(), "{}: {past}", path.display());
        }
        for state in &s.states {
            assert!(state.layer.is_some(), "{}: {}", path.display(), name(state.pair.past));
            let read_only = name(state.pair.past).contains(".encoder.");
            assert_eq!(state.pair.change == StateChange::ReadOnly, read_only, "{}", path.display());
            if is_genai(&path) && name(state.pair.past).starts_with("past_key") {
                assert!(matches!(state.pair.change, StateChange::SharedBuffer { .. }), "{}", path.display());
            }
        }
    }
}

#[test]
fn names_do_not_matter() {
    for path in models() {
        let graph = read(&path);
        let (named, anonymous) = (segment(&graph), segment(&nameless(graph.clone())));
        let nodes = |s: &Segmentation| s.blocks.iter().map(|b| b.nodes.clone()).collect::<Vec<_>>();
        assert_eq!(labels(&named), labels(&anonymous), "{}", path.display());
        assert_eq!(nodes(&named), nodes(&anonymous), "{}", path.display());
        let pairs = |s: &Segmentation| s.states.iter().map(|s| s.pair.clone()).collect::<Vec<_>>();
        assert_eq!(pairs(&named), pairs(&anonymous), "{}", path.display());
    }
}

/// One group, one group per block, and every split into two groups.
fn groupings(blocks: usize) -> Vec<Vec<Range<usize>>> {
    let mut all = vec![vec![0..blocks], (0..blocks).map(|i| i..i + 1).collect()];
    all.extend((1..blocks).map(|at| vec![0..at, at..blocks]));
    all
}

#[test]
fn every_grouping_joins_and_no_part_contains_another() {
    for path in models() {
        let graph = read(&path);
        let s = segment(&graph);
        for groups in groupings(s.blocks.len()) {
            let parts = cut(&graph, &s, &groups).unwrap();
            join(&graph, &parts, |n| s.weights.is_weight_only(n))
                .unwrap_or_else(|e| panic!("{}: {groups:?}: {e}", path.display()));
            for part in &parts {
                contains_only_what_it_needs(&path, &graph, &s, part);
            }
        }
    }
}

fn contains_only_what_it_needs(path: &Path, graph: &Graph, s: &Segmentation, part: &PartitionGraph) {
    let place = format!("{}: blocks {:?}", path.display(), part.blocks);
    // An embedding that derives positions from the length of the cache reads a state's shape, if it is a part by itself. Layers with a sliding window
    // read the length of the first cache that holds all tokens.
    let alone = part.blocks == (0..1);
    let reads_contents = |past: &hpp_graph::ValueId| {
        let own = graph.value(*past).consumers.iter().filter(|id| part.nodes.contains(id));
        own.map(|id| graph.node(*id)).any(|node| node.op_type != "Shape")
    };
    assert!(alone || !part.foreign_states(s).iter().any(reads_contents), "{place}");
    let own: BTreeSet<_> = s.blocks[part.blocks.clone()].iter().flat_map(|b| b.weights.iter()).collect();
    let global: BTreeSet<_> = s.global_weights().into_iter().collect();
    for weight in s.weights.used_by_all(part.nodes.iter().copied()) {
        assert!(own.contains(&weight) || global.contains(&weight), "{place} takes {}", graph.value(weight).name);
    }
    let tiny = |v: &&hpp_graph::ValueId| graph.producer(**v).is_some_and(|p| graph.node(p).op_type == "Shape");
    let shapes = part.boundary_inputs().iter().filter(tiny).count();
    assert!(shapes <= 8, "{place} needs {shapes} shapes of others");
}
