//! Extracts parts of a model as separate models with exactly the weights, functions and operator sets that they need.
//!
//! External weights stay references into the original file; no weight is read or copied. Invariant: equal parts give
//! equal bytes.

use crate::flatten::{Fresh, Renamer, needed_functions};
use crate::model::Model;
use crate::names::{self, default_domain, label};
use crate::proto::{GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorAnnotation, ValueInfoProto};
use crate::typed;
use crate::walk;
use hpp_graph::{EarlyRouter, Graph, NodeId, Origin, PartitionGraph, Prediction, ValueId};
use std::collections::{HashMap, HashSet};

/// Newest IR version that ONNX Runtime loads.
const NEWEST_RUNNABLE_IR: i64 = 13;

/// Oldest IR version in which weights are not also graph inputs.
const OLDEST_PLAIN_IR: i64 = 4;

/// The reason why a part cannot be extracted.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExtractError {
    #[error("cannot extract part {part}: {reader} reads {value:?}, which is neither an input nor computed before it")]
    Missing { part: String, reader: String, value: String },
    #[error("cannot extract part {part}: the element type of its input {value:?} is unknown")]
    UnknownType { part: String, value: String },
    #[error("cannot extract part {part}: its input {value:?} is a weight")]
    WeightInput { part: String, value: String },
}

/// Extracts parts of one model.
pub struct Extractor<'a> {
    model: &'a Model,
    graph: &'a Graph,
    infos: HashMap<&'a str, &'a ValueInfoProto>,
}

impl<'a> Extractor<'a> {
    /// `graph` must be `model.graph()`, possibly with inferred facts.
    pub fn new(model: &'a Model, graph: &'a Graph) -> Self {
        let source = model.graph_proto();
        let infos = source.value_info.iter().chain(&source.output).chain(&source.input);
        Extractor { model, graph, infos: infos.map(|info| (info.name(), info)).collect() }
    }

    /// The part as a model whose graph is called `name`.
    pub fn part(&self, name: &str, part: &PartitionGraph) -> Result<ModelProto, ExtractError> {
        let mut nodes = self.nodes(part);
        nodes.extend(part.early_router.iter().flat_map(|router| self.copies(router)));
        let early = part.early_router.as_ref().map(|router| self.predicted(&router.prediction));
        let predicted = part.prediction.as_ref().map(|prediction| Ok(self.predicted(prediction)));
        let used = self.used_names(name, &nodes, part)?;
        let source = self.model.graph_proto();
        let annotations = annotations(source, &used);
        let used = with_parameters(used, &annotations);
        let graph = GraphProto {
            name: Some(name.to_owned()),
            input: part.inputs.iter().map(|v| self.input(name, *v)).chain(predicted).collect::<Result<_, _>>()?,
            output: part.outputs.iter().map(|v| self.info(*v)).chain(early).collect(),
            initializer: source.initializer.iter().filter(|t| used.contains(t.name())).cloned().collect(),
            sparse_initializer: {
                let wanted = |s: &&_| used.contains(names::sparse_name(s));
                source.sparse_initializer.iter().filter(wanted).cloned().collect()
            },
            value_info: self.value_infos(&nodes, part),
            quantization_annotation: annotations,
            doc_string: source.doc_string.clone(),
            metadata_props: source.metadata_props.clone(),
            node: nodes,
        };
        Ok(with_graph(self.model.proto(), graph))
    }

    /// The whole model with additional outputs.
    pub fn tapped(&self, values: &[ValueId]) -> ModelProto {
        let mut graph = self.model.graph_proto().clone();
        let mut outputs: HashSet<String> = graph.output.iter().map(|o| o.name().to_owned()).collect();
        for value in values {
            if outputs.insert(self.graph.value(*value).name.clone()) {
                graph.output.push(self.info(*value));
            }
        }
        graph.value_info.retain(|info| !outputs.contains(info.name()));
        with_graph(self.model.proto(), graph)
    }

    /// The part's nodes, with shape reads redirected as [`PartitionGraph::same_shape`] says.
    fn nodes(&self, part: &PartitionGraph) -> Vec<NodeProto> {
        let source = &self.model.graph_proto().node;
        let mut nodes: Vec<NodeProto> = part.nodes.iter().map(|id| source[id.0 as usize].clone()).collect();
        let name = |v: &ValueId| self.graph.value(*v).name.clone();
        let swapped: HashMap<String, String> = part
            .same_shape
            .iter()
            .filter(|(from, _)| !part.inputs.contains(from))
            .map(|(from, to)| (name(from), name(to)))
            .collect();
        if !swapped.is_empty() {
            let mut fresh = Fresh::for_graph(&GraphProto::default());
            nodes.iter_mut().for_each(|node| Renamer::new(&mut fresh, "", swapped.clone()).reads(node));
        }
        nodes
    }

    /// Copies of a router's nodes with other names. They read the part's own hidden state.
    fn copies(&self, router: &EarlyRouter) -> Vec<NodeProto> {
        let name = |id: ValueId| self.graph.value(id).name.as_str();
        let EarlyRouter { nodes, replaced, prediction } = router;
        let copied = nodes.iter().flat_map(|id| self.graph.node(*id).writes());
        let renamed = copied.map(|id| match id == prediction.router {
            true => (name(id), prediction.name.clone()),
            false => (name(id), format!("{}/{}", prediction.name, name(id))),
        });
        let names: HashMap<&str, String> =
            renamed.chain(replaced.iter().map(|(from, to)| (name(*from), name(*to).to_owned()))).collect();
        let rename = |value: &mut String| names.get(value.as_str()).cloned().into_iter().for_each(|new| *value = new);
        let copy = |id: &NodeId| {
            let mut node = self.model.graph_proto().node[id.0 as usize].clone();
            node.name = Some(format!("{}/{}", prediction.name, node.name()));
            node.input.iter_mut().chain(&mut node.output).for_each(rename);
            node
        };
        nodes.iter().map(copy).collect()
    }

    fn predicted(&self, prediction: &Prediction) -> ValueInfoProto {
        ValueInfoProto { name: Some(prediction.name.clone()), ..self.info(prediction.router) }
    }

    /// Every name that the part reads or returns. Fails if a node reads a name before it is available.
    fn used_names(
        &self,
        part_name: &str,
        nodes: &[NodeProto],
        part: &PartitionGraph,
    ) -> Result<HashSet<String>, ExtractError> {
        let weights: HashSet<&str> = names::weights(self.model.graph_proto()).collect();
        let mut available: HashSet<&str> = part.inputs.iter().map(|v| self.graph.value(*v).name.as_str()).collect();
        let mut used = HashSet::new();
        let missing = |reader: String, value: &str| ExtractError::Missing {
            part: part_name.to_owned(),
            reader,
            value: value.to_owned(),
        };
        for node in nodes {
            for name in names::reads(node) {
                if !available.contains(name) && !weights.contains(name) {
                    return Err(missing(label(node), name));
                }
                used.insert(name.to_owned());
            }
            available.extend(node.output.iter().map(String::as_str));
            used.extend(node.output.iter().cloned());
        }
        for value in &part.outputs {
            let name = self.graph.value(*value).name.as_str();
            if !available.contains(name) && !weights.contains(name) {
                return Err(missing("its list of outputs".into(), name));
            }
            used.insert(name.to_owned());
        }
        Ok(used)
    }

    fn input(&self, part: &str, value: ValueId) -> Result<ValueInfoProto, ExtractError> {
        let name = || self.graph.value(value).name.clone();
        if matches!(self.graph.value(value).origin, Origin::Weight(_)) {
            return Err(ExtractError::WeightInput { part: part.to_owned(), value: name() });
        }
        let info = self.info(value);
        match info.r#type {
            Some(_) => Ok(info),
            None => Err(ExtractError::UnknownType { part: part.to_owned(), value: name() }),
        }
    }

    fn info(&self, value: ValueId) -> ValueInfoProto {
        let value = self.graph.value(value);
        typed::describe(value, self.infos.get(value.name.as_str()).copied())
    }

    /// The exporter's declarations of inner values, in the order of nodes.
    fn value_infos(&self, nodes: &[NodeProto], part: &PartitionGraph) -> Vec<ValueInfoProto> {
        let outputs: HashSet<&str> = part.outputs.iter().map(|v| self.graph.value(*v).name.as_str()).collect();
        let inside = names::produced(nodes).filter(|name| !outputs.contains(name));
        inside.filter_map(|name| self.infos.get(name)).map(|info| (*info).clone()).collect()
    }
}

/// `source` with another graph. Keeps the operator sets and functions that the nodes of `graph` use, and all metadata
/// but training information.
fn with_graph(source: &ModelProto, graph: GraphProto) -> ModelProto {
    let functions: Vec<_> = needed_functions(&graph.node, &source.functions).cloned().collect();
    let mut domains = HashSet::from([""]);
    functions.iter().flat_map(|f| &f.node).chain(&graph.node).for_each(|node| domains_of(node, &mut domains));
    let used = |import: &&OperatorSetIdProto| domains.contains(default_domain(import.domain()));
    ModelProto {
        ir_version: Some(source.ir_version().clamp(OLDEST_PLAIN_IR, NEWEST_RUNNABLE_IR)),
        opset_import: source.opset_import.iter().filter(used).cloned().collect(),
        producer_name: source.producer_name.clone(),
        producer_version: source.producer_version.clone(),
        domain: source.domain.clone(),
        model_version: source.model_version,
        doc_string: source.doc_string.clone(),
        metadata_props: source.metadata_props.clone(),
        training_info: vec![],
        configuration: source.configuration.clone(),
        functions,
        graph: Some(graph),
    }
}

fn domains_of<'a>(node: &'a NodeProto, into: &mut HashSet<&'a str>) {
    into.insert(default_domain(node.domain()));
    walk::bodies(node).flat_map(|body| &body.node).for_each(|inner| domains_of(inner, into));
}

/// Quantization annotations of the tensors that the part uses.
fn annotations(source: &GraphProto, used: &HashSet<String>) -> Vec<TensorAnnotation> {
    source.quantization_annotation.iter().filter(|a| used.contains(a.tensor_name())).cloned().collect()
}

fn with_parameters(mut used: HashSet<String>, annotations: &[TensorAnnotation]) -> HashSet<String> {
    let parameters = annotations.iter().flat_map(|a| &a.quant_parameter_tensor_names);
    used.extend(parameters.map(|p| p.value().to_owned()));
    used
}
