//! Laws that hold for any graph, sought exceptions to with random ones.

mod build;

use build::Build;
use hpp_graph::{Graph, Liveness, NodeId, Part, Segmentation, cut, join, segment};
use hpp_schema::DType;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A random node: which operator, and where its inputs come from (indices into what exists by then).
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

/// A graph that shows its nodes, one per line, when a law fails.
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

/// Whatever one block makes and a later one reads for its contents is in every boundary between them.
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

/// A part lists what it reads and nothing else, and reads from the model or from exactly one earlier part.
fn parts_are_tight(graph: &Graph, parts: &[Part]) -> Result<(), TestCaseError> {
    let mut givers: BTreeMap<_, usize> = BTreeMap::new();
    for part in parts {
        for value in part.boundary_inputs() {
            prop_assert_eq!(givers.get(value).copied(), Some(1), "givers of {}", graph.value(*value).name);
        }
        let reads: BTreeSet<_> = part.nodes.iter().flat_map(|n| graph.node(*n).reads()).collect();
        for input in &part.inputs {
            let stands_in = part.same_shape.values().any(|v| v == input);
            prop_assert!(reads.contains(input) || stands_in || part.outputs.contains(input));
        }
        prop_assert_eq!(part.inputs.iter().collect::<BTreeSet<_>>().len(), part.inputs.len());
        prop_assert!(part.nodes.windows(2).all(|w| w[0] < w[1]), "nodes in execution order");
        for value in &part.outputs {
            *givers.entry(*value).or_default() += 1;
        }
    }
    Ok(())
}

/// The graph that parts add up to, by names, as text; duplicates collapse because they make the same values.
fn rejoined(graph: &Graph, parts: &[Part]) -> BTreeSet<String> {
    parts.iter().flat_map(|p| &p.nodes).map(|id| describe(graph, *id)).collect()
}

fn describe(graph: &Graph, id: NodeId) -> String {
    let node = graph.node(id);
    let name = |v: &Option<hpp_graph::ValueId>| v.map(|v| graph.value(v).name.clone());
    let (inputs, outputs): (Vec<_>, Vec<_>) =
        (node.inputs.iter().map(name).collect(), node.outputs.iter().map(name).collect());
    format!("{} {}({inputs:?}) -> {outputs:?} {:?}", node.domain, node.op_type, node.attributes)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_cut_joins_again(Shown(graph) in random_graph(), bits in any::<u64>()) {
        let s = segment(&graph);
        each_node_once(&graph, &s)?;
        crossing_values_are_in_boundaries(&graph, &s)?;
        for bits in [bits, 0, u64::MAX] {
            let parts = cut(&graph, &s, &groups(s.blocks.len(), bits)).unwrap();
            let nodes = join(&graph, &parts, |n| s.weights.is_weight_only(n));
            prop_assert!(nodes.is_ok(), "{}", nodes.unwrap_err());
            parts_are_tight(&graph, &parts)?;
            let (joined, read) = (rejoined(&graph, &parts), weight_only_nobody_reads(&graph, &s));
            let whole: BTreeSet<String> =
                graph.node_ids().filter(|id| !read.contains(id)).map(|id| describe(&graph, id)).collect();
            prop_assert!(joined.is_superset(&whole), "lost {:?}", whole.difference(&joined).next());
        }
    }

    #[test]
    fn liveness_is_what_counting_gives(Shown(graph) in random_graph()) {
        let liveness = Liveness::of(&graph);
        let counts = liveness.counts();
        prop_assert_eq!(counts.len(), graph.nodes.len() + 1);
        for (position, count) in counts.into_iter().enumerate() {
            let live: Vec<_> = graph.value_ids().filter(|v| {
                let made = graph.producer(*v).is_some_and(|p| (p.0 as usize) < position);
                let read_later = graph.value(*v).consumers.iter().any(|c| c.0 as usize >= position);
                made && (read_later || graph.outputs.contains(v))
            }).collect();
            prop_assert_eq!(liveness.at(position).len(), count);
            prop_assert_eq!(liveness.at(position), live);
        }
    }

    #[test]
    fn order_is_found_again(Shown(graph) in random_graph(), seed in any::<u64>()) {
        prop_assert!(graph.is_ordered());
        let order: Vec<NodeId> = graph.node_ids().collect();
        prop_assert_eq!(graph.topological_order().unwrap(), order);
        let shuffled = shuffle(&graph, seed);
        let mut rank = vec![0; shuffled.nodes.len()];
        for (i, id) in shuffled.topological_order().unwrap().into_iter().enumerate() {
            rank[id.0 as usize] = i;
        }
        for id in shuffled.node_ids() {
            for producer in shuffled.producers_of(id) {
                prop_assert!(rank[producer.0 as usize] < rank[id.0 as usize]);
            }
        }
    }
}

/// Nodes that compute on weights for no one but, at most, each other.
fn weight_only_nobody_reads(graph: &Graph, s: &Segmentation) -> BTreeSet<NodeId> {
    let mut idle = BTreeSet::new();
    for id in graph.node_ids().rev().filter(|id| s.weights.is_weight_only(*id)) {
        let returned = graph.node(id).writes().any(|v| graph.outputs.contains(&v));
        if !returned && graph.consumers_of(id).iter().all(|c| idle.contains(c)) {
            idle.insert(id);
        }
    }
    idle
}

/// The same graph with its nodes in another order.
fn shuffle(graph: &Graph, seed: u64) -> Graph {
    let mut order: Vec<usize> = (0..graph.nodes.len()).collect();
    order.sort_by_key(|i| (*i as u64 + 1).wrapping_mul(seed | 1).rotate_left(17));
    let mut shuffled = Graph { nodes: vec![], ..graph.clone() };
    shuffled.values.iter_mut().for_each(|v| v.consumers.clear());
    for i in order {
        shuffled.add_node(graph.nodes[i].clone());
    }
    shuffled
}

#[test]
fn a_cycle_is_named() {
    let mut b = Build::default();
    b.input("x", DType::Float32, "n");
    b.node("Add", &["x", "x"], &["a"]);
    b.node("Add", &["a", "x"], &["b"]);
    let mut graph = b.graph.clone();
    graph.nodes[0].inputs[1] = Some(b.get("b"));
    graph.values[b.get("b").0 as usize].consumers.push(NodeId(0));
    let error = graph.topological_order().unwrap_err();
    assert!(error.to_string().contains("cycle"), "{error}");
}
