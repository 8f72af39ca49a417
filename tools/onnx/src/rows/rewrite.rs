//! Rewrites the graph of a model: copies of the nodes of divided layers for each shard, sums of the shards' summands, parts of weights.

use super::weights::PartWeights;
use super::{RowSplit, RowSplitError, interface};
use crate::flatten::Fresh;
use crate::model::Model;
use crate::names;
use crate::proto::NodeProto;
use crate::set_attribute::int_attribute;
use crate::virtual_file::VirtualFiles;
use crate::weights::{ROWS_FILE, WeightFile};
use hpp_graph::{Graph, InputDivision, NodeDivision, NodeId, RowDivision, RowNode, ShardLayout, ValueId, shard_name};
use hpp_schema::DType;
use std::collections::{HashMap, HashSet};

pub(super) fn rewrite(
    model: &Model,
    graph: &Graph,
    division: &RowDivision,
    virtual_files: &VirtualFiles,
) -> Result<RowSplit, RowSplitError> {
    let mut rewriter = Rewriter::new(model, graph, division, virtual_files);
    for (id, node) in (0..).map(NodeId).zip(&model.graph_proto().node) {
        match division.node(id) {
            Some(divided) => rewriter.divide(id, node, divided)?,
            None => rewriter.nodes.push((node.clone(), RowNode::Whole(id))),
        }
    }
    rewriter.finish()
}

/// Which tensor of a shard a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Of {
    /// The value that the shard's nodes read.
    Shard(usize),
    /// The shard's summand.
    Summand(usize),
}

struct Rewriter<'a> {
    model: &'a Model,
    graph: &'a Graph,
    division: &'a RowDivision,
    weights: PartWeights<'a>,
    fresh: Fresh,
    names: HashMap<(ValueId, Of), String>,
    nodes: Vec<(NodeProto, RowNode)>,
}

impl<'a> Rewriter<'a> {
    fn new(model: &'a Model, graph: &'a Graph, division: &'a RowDivision, virtual_files: &'a VirtualFiles) -> Self {
        let mut used = names::all(model.graph_proto());
        // Names of divided states are reserved: the segmentation expects them.
        let states = graph.inputs.iter().chain(&graph.outputs).map(|id| &graph.value(*id).name);
        used.extend(states.flat_map(|name| (0..division.shards()).map(move |shard| shard_name(name, shard))));
        Rewriter {
            model,
            graph,
            division,
            weights: PartWeights::new(model, virtual_files, division.shards()),
            fresh: Fresh::avoiding(used),
            names: HashMap::new(),
            nodes: vec![],
        }
    }

    /// Adds the copies of a node and, if it computes summands, the sums.
    fn divide(&mut self, id: NodeId, node: &NodeProto, divided: &NodeDivision) -> Result<(), RowSplitError> {
        let shards = 0..self.division.shards();
        for shard in shards.clone().filter(|shard| self.division.is_kept(RowNode::Copy(id, *shard))) {
            let copy = self.copy(id, node, divided, shard)?;
            self.nodes.push((copy, RowNode::Copy(id, shard)));
        }
        let sum = self.graph.node(id).outputs.first().copied().flatten().filter(|_| divided.is_partial);
        for shard in shards.filter(|shard| self.division.is_kept(RowNode::Sum(id, *shard))) {
            if let Some(value) = sum {
                let sums = self.sum(node, value, shard);
                self.nodes.extend(sums.into_iter().map(|sum| (sum, RowNode::Sum(id, shard))));
            }
        }
        Ok(())
    }

    fn copy(
        &mut self,
        id: NodeId,
        node: &NodeProto,
        divided: &NodeDivision,
        shard: usize,
    ) -> Result<NodeProto, RowSplitError> {
        let graph = self.graph;
        let mut copy = node.clone();
        copy.name = node.name.as_ref().map(|name| shard_name(name, shard));
        for ((at, value), input) in graph.node(id).inputs.iter().enumerate().zip(&divided.inputs) {
            if let Some(value) = value {
                copy.input[at] = self.input(id, *value, input, shard)?;
            }
        }
        while copy.input.last().is_some_and(String::is_empty) {
            copy.input.pop();
        }
        for (at, value) in graph.node(id).outputs.iter().enumerate() {
            if let Some(value) = value {
                let of = if divided.is_partial { Of::Summand(shard) } else { Of::Shard(shard) };
                copy.output[at] = self.name(*value, of);
            }
        }
        for (name, value) in &divided.attributes {
            copy.attribute.retain(|attribute| attribute.name() != *name);
            copy.attribute.push(int_attribute(name, *value));
        }
        Ok(copy)
    }

    /// The name that a shard's copy of a node reads for an input.
    fn input(
        &mut self,
        reader: NodeId,
        value: ValueId,
        input: &InputDivision,
        shard: usize,
    ) -> Result<String, RowSplitError> {
        let graph = self.graph;
        let name = &graph.value(value).name;
        Ok(match input {
            InputDivision::Own => self.own(reader, value, shard),
            InputDivision::FirstOnly if shard == 0 => name.clone(),
            InputDivision::FirstOnly => String::new(),
            InputDivision::Slice(slice) => self.weights.part(name, slice, shard, &mut self.fresh)?,
            InputDivision::Ints(ints) => {
                let dtype = graph.value(value).dtype.unwrap_or(DType::Int64);
                self.weights.ints(name, dtype, ints, &mut self.fresh)
            }
        })
    }

    /// The name under which a shard's copy of a node reads a value that is not sliced. Values from before the divided layers are the same for all
    /// shards.
    fn own(&mut self, reader: NodeId, value: ValueId, shard: usize) -> String {
        if self.division.is_divided_past(value) {
            return shard_name(&self.graph.value(value).name, shard);
        }
        match self.graph.producer(value) {
            Some(producer) if self.division.is_same_run(producer, reader) => self.name(value, Of::Shard(shard)),
            _ => self.graph.value(value).name.clone(),
        }
    }

    /// The name of a shard's tensor for a value of a divided layer. If shard 0 has the whole value, its tensor keeps the value's name, so that
    /// later blocks read it.
    fn name(&mut self, value: ValueId, of: Of) -> String {
        if let Some(known) = self.names.get(&(value, of)) {
            return known.clone();
        }
        let name = self.graph.value(value).name.as_str();
        let new = match (of, self.division.layout(value)) {
            (Of::Shard(shard), Some(ShardLayout::State)) => shard_name(name, shard),
            (Of::Shard(shard), Some(ShardLayout::Columns(_) | ShardLayout::Heads { .. })) => {
                self.fresh.name(&shard_name(name, shard))
            }
            (Of::Summand(shard), _) => self.fresh.name(&shard_name(&format!("{name}.summand"), shard)),
            (Of::Shard(0), _) => name.to_owned(),
            (Of::Shard(shard), _) => self.fresh.name(&shard_name(name, shard)),
        };
        self.names.insert((value, of), new.clone());
        new
    }

    /// Adds the summands of all shards in their order.
    fn sum(&mut self, node: &NodeProto, value: ValueId, shard: usize) -> Vec<NodeProto> {
        let result = self.name(value, Of::Shard(shard));
        let shards = self.division.shards();
        let mut sum = self.name(value, Of::Summand(0));
        let mut nodes = vec![];
        for other in 1..shards {
            let summand = self.name(value, Of::Summand(other));
            let output = if other + 1 == shards { result.clone() } else { self.fresh.name(&format!("{result}.sum")) };
            nodes.push(NodeProto {
                name: node.name.as_ref().map(|name| shard_name(&format!("{name}/sum{other}"), shard)),
                op_type: Some("Add".to_owned()),
                input: vec![sum, summand],
                output: vec![output.clone()],
                metadata_props: node.metadata_props.clone(),
                ..NodeProto::default()
            });
            sum = output;
        }
        nodes
    }

    fn finish(mut self) -> Result<RowSplit, RowSplitError> {
        let mut model = self.model.clone();
        let graph = model.proto.graph.get_or_insert_default();
        let returned: HashSet<&str> = graph.output.iter().map(|output| output.name()).collect();
        let mut read: HashSet<String> =
            self.nodes.iter().flat_map(|(node, _)| names::reads(node)).map(str::to_owned).collect();
        read.extend(returned.into_iter().map(str::to_owned));
        self.nodes
            .retain(|(node, _)| node.op_type() != "Constant" || node.output.iter().any(|name| read.contains(name)));
        let (nodes, places): (Vec<NodeProto>, Vec<RowNode>) = self.nodes.into_iter().unzip();
        graph.node = nodes;
        let sliced = self.weights.sliced();
        let is_kept = |name: &str| !sliced.contains(name) || read.contains(name);
        let old = std::mem::take(&mut graph.initializer).into_iter().zip(std::mem::take(&mut model.weights.storage));
        let kept = old.filter(|(tensor, _)| is_kept(tensor.name()));
        let all = kept.chain(std::mem::take(&mut self.weights.tensors));
        (graph.initializer, model.weights.storage) = all.unzip();
        // Old models list weights as inputs too.
        graph.input.retain(|input| is_kept(input.name()));
        interface::rewrite(self.graph, self.division, graph)?;
        let contents = self.weights.contents;
        let path = model.dir().join(ROWS_FILE);
        model.weights.files.push(WeightFile { location: ROWS_FILE.to_owned(), path, bytes: contents.bytes() });
        Ok(RowSplit { model, contents, nodes: places })
    }
}
