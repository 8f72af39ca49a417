//! Inference on every available model: removes the declarations of inner values, infers them again, and compares.
//!
//! Covers `fixtures/models`, and the directory in `HPP_MODELS` if it is set.

use hpp_graph::infer::{Disagreement, bytes_read, flops, infer};
use hpp_graph::{Graph, Origin, ValueId, segment};
use hpp_onnx::Model;
use hpp_schema::{DType, Dim, Shape, Symbols};
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
    model.graph().unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn is_inner(graph: &Graph, id: ValueId) -> bool {
    graph.producer(id).is_some()
}

/// The graph without declarations of the outputs of its nodes.
fn without_declarations(graph: &Graph) -> Graph {
    let mut graph = graph.clone();
    for value in graph.values.iter_mut().filter(|v| matches!(v.origin, Origin::Node { .. })) {
        (value.dtype, value.shape) = (None, None);
    }
    graph
}

/// Whether a control-flow operator produces the value: its bodies are not in the graph.
fn comes_from_a_body(graph: &Graph, id: ValueId) -> bool {
    graph.producer(id).is_some_and(|node| matches!(graph.node(node).op_type.as_str(), "If" | "Loop" | "Scan"))
}

#[test]
fn inferred_types_equal_declared_types() {
    for path in models() {
        let declared = read(&path);
        let mut inferred = without_declarations(&declared);
        let report = infer(&mut inferred);
        assert!(report.unknown_ops.is_empty(), "{}: {:?}", path.display(), report.unknown_ops);
        for id in declared.value_ids().filter(|id| is_inner(&declared, *id)) {
            let (said, found) = (declared.value(id).dtype, inferred.value(id).dtype);
            let name = &declared.value(id).name;
            assert!(found.is_some(), "{}: {name} has no type", path.display());
            assert!(said.is_none() || said == found, "{}: {name} is {said:?}, not {found:?}", path.display());
        }
    }
}

/// Only constants may contradict: exporters declare constant vectors as scalars.
#[test]
fn no_declaration_contradicts_the_rules() {
    for path in models() {
        let mut graph = read(&path);
        let report = infer(&mut graph);
        for disagreement in &report.disagreements {
            let (Disagreement::Shape { value, .. } | Disagreement::DType { value, .. }) = disagreement;
            let constant = graph.producer(*value).is_some_and(|node| graph.node(node).op_type == "Constant");
            assert!(constant, "{}: {}: {disagreement:?}", path.display(), graph.value(*value).name);
        }
    }
}

/// Whether `NonZero` finds at run time how many tokens each expert computes.
fn has_rows_of_run_time(path: &Path) -> bool {
    path.to_string_lossy().contains("qwen3-moe")
}

/// Shapes inferred without declarations never contradict them, and nearly every dimension is inferred.
#[test]
fn declared_shapes_are_inferred() {
    let (mut known, mut all) = (0, 0);
    for path in models() {
        let declared = read(&path);
        let mut inferred = without_declarations(&declared);
        infer(&mut inferred);
        let (mut known_here, mut all_here) = (0, 0);
        for id in declared.value_ids().filter(|id| is_inner(&declared, *id) && !comes_from_a_body(&declared, *id)) {
            let name = &declared.value(id).name;
            let Some(found) = &inferred.value(id).shape else { panic!("{}: {name} has no rank", path.display()) };
            known_here += found.iter().filter(|dim| **dim != Dim::Unknown).count();
            all_here += found.len();
            let constant = declared.node(declared.producer(id).unwrap()).op_type == "Constant";
            if let Some(said) = declared.value(id).shape.as_ref().filter(|_| !constant) {
                assert!(compatible(said, found), "{}: {name} is {said:?}, not {found:?}", path.display());
            }
        }
        println!("{:>5}/{:<5} dimensions known  {}", known_here, all_here, path.display());
        if has_rows_of_run_time(&path) {
            assert!(known_here * 10 >= all_here * 7, "{known_here} of {all_here}");
            continue;
        }
        known += known_here;
        all += all_here;
    }
    println!("{known}/{all} in all");
    assert!(known * 1000 >= all * 995, "{known} of {all}");
}

/// Equal rank, and no two sizes that differ whatever the symbols are.
fn compatible(a: &Shape, b: &Shape) -> bool {
    let same = |(a, b): (&Dim, &Dim)| match a.clone() - b.clone() {
        Dim::Unknown => true,
        Dim::Known(terms) => terms.is_empty() || terms.keys().any(|product| !product.is_empty()),
    };
    a.len() == b.len() && a.iter().zip(b).all(same)
}

/// Every value at a boundary has an inferred type and a shape that can be evaluated, and one of them is a hidden state
/// `[batch, sequence, width]`.
#[test]
fn boundaries_are_evaluable() {
    for path in models() {
        let mut graph = without_declarations(&read(&path));
        infer(&mut graph);
        let inputs: Vec<&Shape> = graph.inputs.iter().filter_map(|id| graph.value(*id).shape.as_ref()).collect();
        for boundary in segment(&graph).boundaries {
            for id in &boundary.values {
                let value = graph.value(*id);
                assert!(value.dtype.is_some(), "{}: {}", path.display(), value.name);
                let shape = value.shape.as_ref().unwrap_or_else(|| panic!("{}: {}", path.display(), value.name));
                let given = |symbol: &&str| inputs.iter().copied().flatten().any(|dim| dim.symbols().contains(symbol));
                let evaluable = |dim: &Dim| *dim != Dim::Unknown && dim.symbols().iter().all(given);
                assert!(shape.iter().all(evaluable), "{}: {} is {shape:?}", path.display(), value.name);
            }
            assert!(boundary.values.iter().any(|id| is_hidden_state(&graph, *id)), "{}", path.display());
        }
    }
}

/// A float tensor with a symbolic first dimension and a fixed width (or number of channels).
fn is_hidden_state(graph: &Graph, id: ValueId) -> bool {
    let value = graph.value(id);
    let shape = value.shape.as_deref().unwrap_or_default();
    let fixed = |dim: &Dim| dim.as_fixed().is_some();
    value.dtype.is_some_and(DType::is_float)
        && shape.first().is_some_and(|dim| !fixed(dim))
        && shape.iter().skip(1).any(fixed)
}

/// Given values for the inputs' symbols, the work of every node can be counted, bodies and token-packed attention
/// aside.
#[test]
fn costs_are_known() {
    for path in models() {
        let mut graph = without_declarations(&read(&path));
        infer(&mut graph);
        let symbols = sizes_of(&graph);
        let uncounted: Vec<&str> = graph
            .node_ids()
            .filter(|node| flops(&graph, *node, &symbols).is_none())
            .map(|node| graph.node(node).op_type.as_str())
            .filter(|op| !matches!(*op, "If" | "Loop" | "Scan"))
            .collect();
        let most = if has_rows_of_run_time(&path) { graph.nodes.len() / 5 } else { graph.nodes.len() / 50 };
        assert!(uncounted.len() <= most, "{}: {uncounted:?}", path.display());
        for node in graph.node_ids() {
            assert!(bytes_read(&graph, node, &symbols).is_some(), "{}: {}", path.display(), graph.node(node).op_type);
        }
    }
}

/// A size for each symbol: one sequence, a step of one token after seven.
fn sizes_of(graph: &Graph) -> Symbols {
    let shapes = graph.inputs.iter().filter_map(|id| graph.value(*id).shape.as_ref()).flatten();
    let named = shapes.flat_map(Dim::symbols).map(|name| {
        let size = match name {
            name if name.contains("past") => 7,
            name if name.contains("total") => 8,
            name if name.contains("dim") => 16,
            _ => 1,
        };
        (name.to_owned(), size)
    });
    named.chain([("total_sequence_length".to_owned(), 8)]).collect()
}
