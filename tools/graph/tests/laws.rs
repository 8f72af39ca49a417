//! Properties of segmentation and cutting that hold for any graph, checked on random graphs.

mod build;

use build::Build;
use hpp_graph::{Graph, NodeId, PartitionGraph, Segmentation, cut, join, segment};
use hpp_schema::DType;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A random node: an operator, and indices of earlier values as inputs.
#[derive(Clone, Debug)]
struct Step {
    op: usize,
    from: [prop::sample::Index; 3],
    returned: bool,
}

fn step() -> impl Strategy<Value = Step> {
    let index = any::<prop::sample::Index>;
    (0usize..16, [index(), index(), index()], prop::bool::weighted(0.1)).prop_map(|(op, from, returned)| Step {
        op,
        from,
        returned,
    })
}

/// A graph whose debug output lists nodes, one per line.
struct Shown(Graph);

impl std::fmt::Debug for Shown {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = |ids: &[hpp_graph::ValueId]| ids.iter().map(|v| self.0.value(*v).name.clone()).collect::<Vec<_>>();
        writeln!(f, "{:?} -> {:?}", names(&self.0.inputs), names(&self.0.outputs))?;
        self.0.node_ids().try_for_each(|id| writeln!(f, "  {} {}", id.0, describe(&self.0, id)))
    }
}

fn random_graph() -> impl Strategy<Value = Shown> {
    let inputs = (1usize..4, 0usize..5, 1usize..5);
    (inputs, prop::collection::vec(step(), 1..60)).prop_map(|((inputs, states, weights), steps)| {
        let mut b = Build::default();
        let mut names: Vec<String> = vec![];
        for i in 0..inputs {
            b.input(&format!("in{i}"), if i == 0 { DType::Int64 } else { DType::Float32 }, "batch, sequence, 8");
            names.push(format!("in{i}"));
        }
        for i in 0..states {
            b.input(&format!("past{i}"), DType::Float32, "batch, 2, past, 4");
            names.push(format!("past{i}"));
        }
        for i in 0..weights {
            b.weight(&format!("w{i}"), if i % 2 == 0 { "8, 8" } else { "8" });
        }
        let fixed = Fixed { inputs, states, weights };
        for (i, step) in steps.iter().enumerate() {
            add_step(&mut b, &mut names, &fixed, i, step);
        }
        if b.graph.outputs.is_empty() {
            b.output(&names[names.len() - 1].clone());
        }
        Shown(b.graph)
    })
}

struct Fixed {
    inputs: usize,
    states: usize,
    weights: usize,
}

fn add_step(b: &mut Build, names: &mut Vec<String>, fixed: &Fixed, i: usize, step: &Step) {
    let any = |k: usize| names[step.from[k].index(names.len())].clone();
    let weight = format!("w{}", step.from[2].index(fixed.weights));
    let past = |k: usize| format!("past{}", step.from[k].index(fixed.states.max(1)));
    let (x, y, out) = (any(0), any(1), format!("v{i}"));
    match step.op {
        0..=2 => b.node("MatMul", &[&x, &weight], &[&out]),
        3 => b.node("MatMul", &[&x, &y], &[&out]),
        4 | 5 => b.node("Add", &[&x, &y], &[&out]),
        6 => b.node("Shape", &[&x], &[&out]),
        7 => b.node("Reshape", &[&x, &y], &[&out]),
        8 => b.node("Gather", &[&weight, &x], &[&out]),
        9 => b.node("Transpose", &[&weight], &[&out]),
        10 => b.node("Softmax", &[&x], &[&out]),
        11 => b.node("com.example::Mystery", &[&x, &y], &[&out]),
        12 => b.node("RandomNormalLike", &[&x], &[&out]),
        13 if fixed.states > 0 => {
            let id = b.node_with("Concat", &[&past(0), &x], &[&out], &[("axis", 2)]);
            b.typed(&out, DType::Float32, "batch, 2, past + sequence, 4");
            b.output(&out);
            id
        }
        14 if fixed.states > 0 => b.node("Shape", &[&past(1)], &[&out]),
        15 if fixed.states > 0 => {
            let kept = format!("k{i}");
            let op = "com.microsoft::GroupQueryAttention";
            let id = b.node(op, &[&x, "", "", &past(0), &past(1)], &[&out, &kept]);
            b.typed(&kept, DType::Float32, "batch, 2, past + sequence, 4");
            b.output(&kept);
            id
        }
        _ => b.node("Identity", &[&format!("in{}", step.from[1].index(fixed.inputs))], &[&out]),
    };
    if step.returned && !b.graph.outputs.contains(&b.get(&out)) {
        b.output(&out);
    }
    names.push(out);
}

/// Groups of consecutive blocks, cut wherever a bit is set.
fn groups(blocks: usize, bits: u64) -> Vec<Range<usize>> {
    let mut starts: Vec<usize> = (0..blocks).filter(|b| *b == 0 || bits >> (b % 64) & 1 == 1).collect();
    starts.push(blocks);
    starts.windows(2).map(|w| w[0]..w[1]).collect()
}

fn each_node_once(graph: &Graph, s: &Segmentation) -> Result<(), TestCaseError> {
    let mut seen: BTreeMap<NodeId, usize> = BTreeMap::new();
    for id in s.blocks.iter().flat_map(|b| &b.nodes).chain(&s.globals) {
        *seen.entry(*id).or_default() += 1;
    }
    for id in graph.node_ids() {
        let expected = usize::from(!s.weights.is_weight_only(id));
        prop_assert_eq!(seen.get(&id).copied().unwrap_or(0), expected, "node {:?}", id);
    }
    Ok(())
}

/// A value whose contents a later block reads is in every boundary between the two blocks.
fn crossing_values_are_in_boundaries(graph: &Graph, s: &Segmentation) -> Result<(), TestCaseError> {
    for id in graph.node_ids().filter(|id| graph.node(*id).op_type != "Shape") {
        let Some(to) = s.block_of(id) else { continue };
        for value in graph.node(id).reads() {
            let producer = graph.producer(value).filter(|p| graph.node(*p).op_type != "Shape");
            let Some(from) = producer.and_then(|p| s.block_of(p)) else { continue };
            prop_assert!(from <= to, "{} flows backwards", graph.value(value).name);
            for between in from..to {
                prop_assert!(s.boundaries[between].values.contains(&value), "{}", graph.value(value).name);
            }
        }
    }
    Ok(())
}

/// A part lists exactly the inputs that it reads, and exactly one earlier part returns each boundary input.
fn parts_are_tight(graph: &Graph, parts: &[PartitionGraph]) -> Result<(), TestCaseError> {
    let mut senders: BTreeMap<_, usize> = BTreeMap::new();
    for part in parts {
        for value in part.boundary_inputs() {
            prop_assert_eq!(senders.get(value).copied(), Some(1), "senders of {}", graph.value(*value).name);
        }
        let reads: BTreeSet<_> = part.nodes.iter().flat_map(|n| graph.node(*n).reads()).collect();
        for input in &part.inputs {
            let replaces_shape = part.same_shape.values().any(|v| v == input);
            prop_assert!(reads.contains(input) || replaces_shape || part.outputs.contains(input));
        }
        prop_assert_eq!(part.inputs.iter().collect::<BTreeSet<_>>().len(), part.inputs.len());
        prop_assert!(part.nodes.windows(2).all(|w| w[0] < w[1]), "nodes in execution order");
        for value in &part.outputs {
            *senders.entry(*value).or_default() += 1;
        }
    }
    Ok(())
}

/// The nodes of all parts as text by names. Duplicates collapse, because they produce the same values.
fn rejoined(graph: &Graph, parts: &[PartitionGraph]) -> BTreeSet<String> {
    parts.iter().flat_map(|p| &p.nodes).map(|id| describe(graph, *id)).collect()
}

fn describe(graph: &Graph, id: NodeId) -> String {
    let node = graph.node(id);
    let name = |v: &Option<hpp_graph::ValueId>| v.map(|v| graph.value(v).name.clone());
    let (inputs, outputs): (Vec<_>, Vec<_>) =
        (node.inputs.iter().map(name).collect(), node.outputs.iter().map(name).collect());
    format!("{} {}({inputs:?}) -> {outputs:?} {:?}", node.domain, node.op_type, node.attributes)
}

fn laws_hold(graph: &Graph, bits: u64) -> Result<(), TestCaseError> {
    let s = segment(graph);
    each_node_once(graph, &s)?;
    crossing_values_are_in_boundaries(graph, &s)?;
    for bits in [bits, 0, u64::MAX] {
        let parts = cut(graph, &s, &groups(s.blocks.len(), bits)).unwrap();
        let nodes = join(graph, &parts, |n| s.weights.is_weight_only(n));
        prop_assert!(nodes.is_ok(), "{}", nodes.unwrap_err());
        parts_are_tight(graph, &parts)?;
        let (joined, read) = (rejoined(graph, &parts), unread_weight_only_nodes(graph, &s));
        let whole: BTreeSet<String> =
            graph.node_ids().filter(|id| !read.contains(id)).map(|id| describe(graph, id)).collect();
        prop_assert!(joined.is_superset(&whole), "lost {:?}", whole.difference(&joined).next());
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_cut_joins_again(Shown(graph) in random_graph(), bits in any::<u64>()) {
        laws_hold(&graph, bits)?;
    }
}

/// Weight-only nodes that no other node reads, except nodes of this set.
fn unread_weight_only_nodes(graph: &Graph, s: &Segmentation) -> BTreeSet<NodeId> {
    let mut idle = BTreeSet::new();
    for id in graph.node_ids().rev().filter(|id| s.weights.is_weight_only(*id)) {
        let returned = graph.node(id).writes().any(|v| graph.outputs.contains(&v));
        if !returned && graph.consumers_of(id).iter().all(|c| idle.contains(c)) {
            idle.insert(id);
        }
    }
    idle
}

/// The first hidden state is a lookup by a value that is computed on another lookup by token: both are computed before the first layer, and
/// a later block reads that value too.
#[test]
fn a_lookup_by_a_value_of_another_lookup_stays_before_the_layers() {
    let mut b = Build::default();
    b.input("tokens", DType::Int64, "batch, sequence, 8");
    for state in ["past0", "past1"] {
        b.input(state, DType::Float32, "batch, 2, past, 4");
    }
    b.weight("table", "8, 8");
    b.node("Gather", &["table", "tokens"], &["first"]);
    b.node("MatMul", &["tokens", "table"], &["side0"]);
    b.node("MatMul", &["first", "first"], &["codes"]);
    b.node("MatMul", &["tokens", "table"], &["side1"]);
    b.node("MatMul", &["past0", "table"], &["keys0"]);
    b.node("MatMul", &["past0", "table"], &["keys1"]);
    b.node("Gather", &["table", "codes"], &["hidden"]);
    b.node("MatMul", &["hidden", "keys1"], &["mixed"]);
    b.node("MatMul", &["keys0", "side0"], &["beside"]);
    b.node_with("Concat", &["past0", "tokens"], &["present0"], &[("axis", 2)]);
    b.typed("present0", DType::Float32, "batch, 2, past + sequence, 4");
    b.output("present0");
    b.node("Reshape", &["codes", "tokens"], &["unread"]);
    b.node("MatMul", &["mixed", "table"], &["projected"]);
    b.node("MatMul", &["side1", "projected"], &["last"]);
    b.node("MatMul", &["first", "side1"], &["other"]);
    laws_hold(&b.graph, 0).unwrap();
    let s = segment(&b.graph);
    let block = |name: &str| s.block_of(b.graph.producer(b.get(name)).unwrap());
    assert_eq!([block("first"), block("codes"), block("hidden")], [Some(0); 3]);
}
