//! Which operators ONNX Runtime has, and which element types its CPU kernels take: what a session would refuse, found before
//! anything is written. The table is generated, see `tools/scripts/operators.py`.

use hpp_graph::{Graph, Node, NodeId, ValueId};
use hpp_onnx::Model;
use hpp_onnx::proto::NodeProto;
use hpp_schema::DType;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::LazyLock;

/// The default domain in the table.
const ONNX: &str = "ai.onnx";

static TABLE: LazyLock<Table> = LazyLock::new(|| Table::parse(include_str!("operators/table.txt")));

#[derive(Default)]
struct Table {
    runtime: &'static str,
    /// The newest opset of each domain.
    domains: HashMap<&'static str, i64>,
    operators: HashMap<(&'static str, &'static str), Operator>,
}

#[derive(Default)]
struct Operator {
    /// Whether a session may compute it by its definition where there is no kernel.
    has_body: bool,
    schemas: Vec<Schema>,
    kernels: Vec<Kernel>,
}

/// The types of an operator's inputs and outputs from an opset on, by name.
struct Schema {
    since: i64,
    inputs: Vec<&'static str>,
    outputs: Vec<&'static str>,
}

/// A CPU kernel: for which opsets, and which element types each name may stand for.
struct Kernel {
    first: i64,
    last: i64,
    types: Vec<(&'static str, Vec<&'static str>)>,
}

impl Table {
    fn parse(text: &'static str) -> Table {
        let mut table = Table::default();
        let mut current = (ONNX, "");
        for line in text.lines() {
            let words: Vec<&'static str> = line.split(' ').collect();
            let number = |at: usize| words.get(at).and_then(|word| word.parse::<i64>().ok());
            match (words[0], words.len()) {
                ("runtime", 2) => table.runtime = words[1],
                ("domain", 3) => drop(number(2).map(|newest| table.domains.insert(words[1], newest))),
                ("op", 3 | 4) => {
                    current = (words[1], words[2]);
                    table.operators.entry(current).or_default().has_body = words.len() == 4;
                }
                ("schema", 4) => {
                    let list = |at: usize| words[at].split(',').filter(|word| *word != ".").collect();
                    let schema = Schema { since: number(1).unwrap_or(1), inputs: list(2), outputs: list(3) };
                    table.operators.entry(current).or_default().schemas.push(schema);
                }
                ("cpu", 3..) => {
                    let types = words[3..].iter().filter_map(|word| word.split_once('='));
                    let types = types.map(|(name, types)| (name, types.split(',').collect())).collect();
                    let kernel = Kernel { first: number(1).unwrap_or(1), last: number(2).unwrap_or(i64::MAX), types };
                    table.operators.entry(current).or_default().kernels.push(kernel);
                }
                _ => {}
            }
        }
        table
    }
}

fn domain(name: &str) -> &str {
    if name.is_empty() { ONNX } else { name }
}

/// Findings that many nodes share, with how many and the first of them.
#[derive(Default)]
struct Shared(BTreeMap<String, (usize, String)>);

impl Shared {
    fn add(&mut self, what: String, node: &str) {
        self.0.entry(what).or_insert_with(|| (0, node.to_owned())).0 += 1;
    }

    fn lines(self) -> Vec<String> {
        let line = |(what, (count, first)): (String, (usize, String))| match count {
            1 => format!("{what} (node {first:?})"),
            _ => format!("{what} ({count} nodes, the first is {first:?})"),
        };
        self.0.into_iter().map(line).collect()
    }
}

/// Opsets and operators of a model that ONNX Runtime does not have.
pub fn unknown_operators(model: &Model) -> Vec<String> {
    let proto = model.proto();
    let opsets: HashMap<&str, i64> =
        proto.opset_import.iter().map(|import| (domain(import.domain()), import.version())).collect();
    let runtime = TABLE.runtime;
    let mut lines: Vec<String> = Vec::new();
    for (name, version) in &opsets {
        if let Some(newest) = TABLE.domains.get(name).filter(|newest| version > newest) {
            lines.push(format!(
                "the model uses opset {version} of {name}, and ONNX Runtime {runtime} has opsets up to {newest}"
            ));
        }
    }
    if !lines.is_empty() {
        lines.sort();
        return lines;
    }
    let own: HashSet<(&str, &str)> =
        proto.functions.iter().map(|function| (domain(function.domain()), function.name())).collect();
    let mut found = Shared::default();
    every_node(&model.graph_proto().node, &mut |node| {
        let (from, op) = (domain(node.domain()), node.op_type());
        if own.contains(&(from, op)) {
            return;
        }
        let schemas = TABLE.operators.get(&(from, op)).map(|operator| &operator.schemas);
        match schemas.and_then(|schemas| schemas.iter().map(|schema| schema.since).min()) {
            None => found.add(format!("ONNX Runtime {runtime} has no operator {op} in the domain {from}"), node.name()),
            Some(since) => {
                if let Some(version) = opsets.get(from).filter(|version| since > **version) {
                    let what =
                        format!("the operator {op} is there from opset {since} on, and the model uses {version}");
                    found.add(what, node.name());
                }
            }
        }
    });
    found.lines()
}

/// Nodes, and those of their bodies.
fn every_node<'a>(nodes: &'a [NodeProto], see: &mut dyn FnMut(&'a NodeProto)) {
    for node in nodes {
        see(node);
        for attribute in &node.attribute {
            attribute.g.iter().chain(&attribute.graphs).for_each(|body| every_node(&body.node, see));
        }
    }
}

/// What of these nodes ONNX Runtime's CPU provider has no kernel for, by operator and element type.
pub fn without_cpu_kernel(graph: &Graph, nodes: impl IntoIterator<Item = NodeId>) -> Vec<String> {
    let mut found = Shared::default();
    for id in nodes {
        let node = graph.node(id);
        if let Some(what) = lacks_kernel(graph, node) {
            found.add(what, &node.name);
        }
    }
    found.lines()
}

fn lacks_kernel(graph: &Graph, node: &Node) -> Option<String> {
    let operator = TABLE.operators.get(&(domain(&node.domain), node.op_type.as_str()))?;
    // A session makes weights of constants, and computes what has a definition by it.
    if operator.has_body || node.op_type == "Constant" {
        return None;
    }
    let opset = graph.opsets.get(&node.domain).copied().unwrap_or(1);
    let schema = operator.schemas.iter().filter(|schema| schema.since <= opset).max_by_key(|schema| schema.since)?;
    let for_opset = |kernel: &&Kernel| (kernel.first..=kernel.last).contains(&schema.since);
    let kernels: Vec<&Kernel> = operator.kernels.iter().filter(for_opset).collect();
    let op = &node.op_type;
    if kernels.is_empty() {
        return Some(format!("{op} has no CPU kernel"));
    }
    let sides = [(&schema.inputs, &node.inputs), (&schema.outputs, &node.outputs)];
    let used: Vec<(&str, DType)> = sides.into_iter().flat_map(|(names, ids)| typed(graph, names, ids)).collect();
    let refused = |kernel: &&Kernel| used.iter().find(|(name, dtype)| !kernel.takes(name, *dtype)).map(|(_, t)| *t);
    let mut refusals: Vec<Option<DType>> = kernels.iter().map(refused).collect();
    match refusals.contains(&None) {
        true => None,
        false => refusals.pop().flatten().map(|dtype| format!("{op} of {dtype} has no CPU kernel")),
    }
}

/// The element type of each input or output whose type has a name; the last name may repeat.
fn typed<'a>(
    graph: &'a Graph,
    names: &'a [&'static str],
    ids: &'a [Option<ValueId>],
) -> impl Iterator<Item = (&'static str, DType)> + 'a {
    ids.iter().enumerate().filter_map(move |(at, id)| {
        let last = || names.last().filter(|name| name.ends_with('+'));
        let name = names.get(at).or_else(last)?.trim_end_matches('+');
        Some((name, graph.value((*id)?).dtype?)).filter(|(name, _)| *name != "-")
    })
}

impl Kernel {
    fn takes(&self, name: &str, dtype: DType) -> bool {
        let Some((_, allowed)) = self.types.iter().find(|(known, _)| *known == name) else { return true };
        let dtype = match dtype {
            DType::Float32 => "float".to_owned(),
            DType::Float64 => "double".to_owned(),
            other => other.to_string(),
        };
        // A session computes float16 in float32 where there is no kernel for it.
        allowed.iter().any(|one| *one == dtype || (dtype == "float16" && *one == "float"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Logits, analyse};
    use std::path::{Path, PathBuf};

    fn models() -> Vec<PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
        let below = |dir: &Path| std::fs::read_dir(dir).unwrap().flatten().map(|e| e.path()).collect::<Vec<_>>();
        let mut models: Vec<PathBuf> = below(&root).iter().flat_map(|exporter| below(exporter)).collect();
        models.sort();
        models
    }

    #[test]
    fn exporters_models_have_known_operators_and_kernels() {
        for path in models() {
            let analysis = analyse(&path, None, Logits::All).unwrap();
            assert_eq!(unknown_operators(&analysis.model), Vec::<String>::new(), "{}", path.display());
            let ids = (0..analysis.graph.nodes.len() as u32).map(NodeId);
            let lacking = without_cpu_kernel(&analysis.graph, ids);
            let gpu_only = path.ends_with("llama3-fp16-cuda-paged");
            assert_eq!(lacking.is_empty(), !gpu_only, "{}: {lacking:?}", path.display());
            assert!(!gpu_only || lacking[0].starts_with("PagedAttention has no CPU kernel"), "{lacking:?}");
        }
    }

    #[test]
    fn element_types_without_a_kernel_are_named() {
        let path = models().into_iter().find(|path| path.ends_with("genai/llama3-fp32-cpu")).unwrap();
        let mut graph = analyse(&path, None, Logits::All).unwrap().graph;
        let ids = || (0..graph.nodes.len() as u32).map(NodeId);
        let all: Vec<NodeId> = ids().collect();
        let mut with = |dtype: DType| {
            graph
                .values
                .iter_mut()
                .filter(|v| matches!(v.dtype, Some(DType::Float32 | DType::Float16)))
                .for_each(|v| v.dtype = Some(dtype));
            without_cpu_kernel(&graph, all.clone())
        };
        assert_eq!(with(DType::Float16), Vec::<String>::new());
        let lacking = with(DType::Bfloat16);
        assert!(lacking.iter().any(|line| line.starts_with("MatMul of bfloat16 has no CPU kernel (")), "{lacking:?}");
        assert!(lacking.iter().all(|line| !line.contains("Gather ")), "a Gather takes any type: {lacking:?}");
    }

    #[test]
    fn the_table_is_whole() {
        assert!(TABLE.operators.len() > 250 && TABLE.domains[ONNX] == 26 && !TABLE.runtime.is_empty());
        assert!(TABLE.operators.values().all(|operator| !operator.schemas.is_empty()));
    }
}
