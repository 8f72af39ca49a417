//! Turns groups of consecutive blocks into parts: nodes, inputs and outputs of one graph per partition.
//!
//! Every part recomputes the globals that it needs. Where a global reads the *shape* of another part's state or hidden
//! state, the part that owns the value sends the shape tensor instead. Does not know files or devices.

use crate::segmentation::Segmentation;
use crate::{EarlyRouter, Graph, NodeId, Origin, Prediction, ValueId, ops};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The nodes and values of one partition.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartitionGraph {
    /// The blocks inside.
    pub blocks: Range<usize>,
    /// Every node that the part runs, in execution order, including the weight-only nodes that it reads.
    pub nodes: Vec<NodeId>,
    /// The nodes of `nodes` that belong to another part and run here too. Weight-only nodes are not listed.
    pub duplicated: Vec<NodeId>,
    /// Graph inputs: inputs of the model in its order, then states in the model's order, then values of earlier parts.
    pub inputs: Vec<ValueId>,
    /// Number of `inputs` that are inputs of the model but not states. They come first.
    pub model_inputs: usize,
    /// Number of `inputs` that are states. They follow the model inputs.
    pub state_inputs: usize,
    /// Graph outputs: outputs of the model in its order, then values for later parts.
    pub outputs: Vec<ValueId>,
    /// Replacements for shape reads: where the model reads the shape of the key, this part reads the shape of the
    /// value, a state of its own with the same symbolic shape.
    pub same_shape: BTreeMap<ValueId, ValueId>,
    /// The router of a later part, which this part computes too. Its logits are this part's last output.
    pub early_router: Option<EarlyRouter>,
    /// The logits of an [`EarlyRouter`] in an earlier part. They are this part's last input; no node reads them, only the runtime.
    pub prediction: Option<Prediction>,
}

impl PartitionGraph {
    /// Inputs that earlier parts produce.
    pub fn boundary_inputs(&self) -> &[ValueId] {
        &self.inputs[self.model_inputs + self.state_inputs..]
    }

    /// Inputs that are states.
    pub fn states(&self) -> &[ValueId] {
        &self.inputs[self.model_inputs..self.model_inputs + self.state_inputs]
    }

    /// States of other parts that this part also reads. This happens where the part needs the shape of a later part's state and has no state of the
    /// same shape itself: an embedding that derives positions from the length of the cache. A planner should not cut between these two parts.
    pub fn foreign_states(&self, segmentation: &Segmentation) -> Vec<ValueId> {
        let owns =
            |v: &ValueId| segmentation.states.iter().any(|s| s.pair.past == *v && self.blocks.contains(&s.block));
        self.states().iter().copied().filter(|v| !owns(v)).collect()
    }
}

/// Why the groups are not a partition of the blocks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// A group is empty, out of range, or does not begin where the previous one ends.
    #[error(
        "cannot cut {blocks} blocks into these groups: group {group} is {start}..{end}, expected one starting at {expected}"
    )]
    Groups {
        /// Number of blocks.
        blocks: usize,
        /// Index of the first wrong group.
        group: usize,
        /// Its start.
        start: usize,
        /// Its end.
        end: usize,
        /// The start that was expected.
        expected: usize,
    },
    /// The groups end before the last block.
    #[error("cannot cut {blocks} blocks into these groups: they end at block {end}")]
    Short {
        /// Number of blocks.
        blocks: usize,
        /// The end of the last group.
        end: usize,
    },
}

/// Cuts a model into one part per group of consecutive blocks.
pub fn cut(
    graph: &Graph,
    segmentation: &Segmentation,
    groups: &[Range<usize>],
) -> Result<Vec<PartitionGraph>, CutError> {
    check_groups(segmentation.blocks.len(), groups)?;
    let mut cutter = Cutter::new(graph, segmentation, groups);
    cutter.place_owned_nodes();
    cutter.resolve_shape_reads();
    cutter.place_model_outputs();
    cutter.place_unread_nodes();
    Ok(cutter.finish(groups))
}

fn check_groups(blocks: usize, groups: &[Range<usize>]) -> Result<(), CutError> {
    let mut expected = 0;
    for (group, range) in groups.iter().enumerate() {
        if range.start != expected || range.end <= range.start || range.end > blocks {
            return Err(CutError::Groups { blocks, group, start: range.start, end: range.end, expected });
        }
        expected = range.end;
    }
    if expected != blocks { Err(CutError::Short { blocks, end: expected }) } else { Ok(()) }
}

/// A part under construction.
#[derive(Default)]
struct PartDraft {
    nodes: BTreeSet<NodeId>,
    inputs: BTreeSet<ValueId>,
    outputs: BTreeSet<ValueId>,
    same_shape: BTreeMap<ValueId, ValueId>,
}

struct Cutter<'a> {
    graph: &'a Graph,
    segmentation: &'a Segmentation,
    drafts: Vec<PartDraft>,
    /// The part that owns each node; `None` for globals and weight-only nodes.
    owner: Vec<Option<usize>>,
    /// The part that owns each state input.
    state_owner: BTreeMap<ValueId, usize>,
    /// Shape reads that a part needs, as (part, node). They are resolved once the contents of all parts are known.
    pending_shape_reads: Vec<(usize, NodeId)>,
}

impl<'a> Cutter<'a> {
    fn new(graph: &'a Graph, segmentation: &'a Segmentation, groups: &[Range<usize>]) -> Self {
        let part_of = |block: usize| groups.partition_point(|g| g.end <= block);
        let owner = graph.node_ids().map(|n| segmentation.block_of(n).map(part_of)).collect();
        let state_owner = segmentation.states.iter().map(|s| (s.pair.past, part_of(s.block))).collect();
        let drafts = groups.iter().map(|_| PartDraft::default()).collect();
        Cutter { graph, segmentation, drafts, owner, state_owner, pending_shape_reads: vec![] }
    }

    fn owner(&self, id: NodeId) -> Option<usize> {
        self.owner[id.0 as usize]
    }

    /// Whether a node reads only the shape of a value that one part owns. Such a node can run in any part that has the value.
    fn is_movable_shape_read(&self, id: NodeId) -> bool {
        let node = self.graph.node(id);
        let source = node.inputs.first().copied().flatten().filter(|_| ops::reads_shape_only(node));
        source.is_some_and(|v| match self.graph.value(v).origin {
            Origin::Input => self.state_owner.contains_key(&v),
            Origin::Weight(_) => false,
            Origin::Node { node, .. } => self.owner(node).is_some(),
        })
    }

    fn place_owned_nodes(&mut self) {
        for id in self.graph.node_ids() {
            if let Some(part) = self.owner(id).filter(|_| !self.is_movable_shape_read(id)) {
                self.place(part, id);
            }
        }
    }

    /// Adds a node to a part, with everything it depends on.
    fn place(&mut self, part: usize, id: NodeId) {
        let mut todo = vec![id];
        while let Some(id) = todo.pop() {
            if self.drafts[part].nodes.insert(id) {
                let reads: Vec<ValueId> = self.graph.node(id).reads().collect();
                todo.extend(reads.into_iter().filter_map(|v| self.require(part, v)));
            }
        }
    }

    /// Makes a value available in a part. Returns the producer of the value if the part has to run it too.
    fn require(&mut self, part: usize, value: ValueId) -> Option<NodeId> {
        let producer = match self.graph.value(value).origin {
            Origin::Weight(_) => return None,
            Origin::Input => {
                self.fetch_input(part, value);
                return None;
            }
            Origin::Node { node, .. } => node,
        };
        if self.drafts[part].nodes.contains(&producer) {
            return None;
        }
        if self.is_movable_shape_read(producer) {
            self.pending_shape_reads.push((part, producer));
            return None;
        }
        match self.owner(producer) {
            Some(owner) if owner < part => {
                self.send(owner, part, value);
                None
            }
            // The node belongs to this part, is a global, is weight-only, or belongs to a later part whose shape this part needs.
            _ => Some(producer),
        }
    }

    fn fetch_input(&mut self, part: usize, value: ValueId) {
        let foreign = self.state_owner.get(&value).is_some_and(|owner| *owner > part);
        let replacement = foreign.then(|| self.same_shape_state(part, value)).flatten();
        match replacement.filter(|_| !self.reads_contents(part, value)) {
            Some(own) => {
                self.drafts[part].same_shape.insert(value, own);
                self.drafts[part].inputs.insert(own);
            }
            None => {
                self.drafts[part].inputs.insert(value);
            }
        }
    }

    /// Whether a node that the part owns reads the contents of the value.
    fn reads_contents(&self, part: usize, value: ValueId) -> bool {
        let consumers = self.graph.value(value).consumers.iter();
        consumers.copied().any(|c| self.owner(c) == Some(part) && !ops::reads_shape_only(self.graph.node(c)))
    }

    /// A state of the part with provably the same shape as the value.
    fn same_shape_state(&self, part: usize, value: ValueId) -> Option<ValueId> {
        let wanted = self.graph.value(value);
        let shape = wanted.shape.as_ref()?;
        if shape.contains(&hpp_schema::Dim::Unknown) {
            return None;
        }
        let own = self.state_owner.iter().filter(|(_, owner)| **owner == part).map(|(v, _)| *v);
        own.into_iter()
            .find(|v| self.graph.value(*v).shape.as_ref() == Some(shape) && self.graph.value(*v).dtype == wanted.dtype)
    }

    fn send(&mut self, from: usize, to: usize, value: ValueId) {
        self.drafts[from].outputs.insert(value);
        self.drafts[to].inputs.insert(value);
    }

    fn resolve_shape_reads(&mut self) {
        while let Some((part, id)) = self.pending_shape_reads.pop() {
            self.resolve_shape_read(part, id);
        }
    }

    /// Runs the shape read in the part if the value is there; otherwise in the part that owns the value, which sends
    /// the shape.
    fn resolve_shape_read(&mut self, part: usize, id: NodeId) {
        let node = self.graph.node(id);
        let Some(source) = node.inputs.first().copied().flatten() else { return };
        let shape = node.outputs.first().copied().flatten();
        let owner = match self.graph.value(source).origin {
            Origin::Node { node, .. } => self.owner(node),
            _ => self.state_owner.get(&source).copied(),
        };
        match (owner, shape) {
            (Some(owner), Some(shape)) if owner < part && !self.has(part, source) => {
                let sender = self.sender(shape).filter(|sender| *sender < part).unwrap_or(owner);
                self.place(sender, id);
                self.send(sender, part, shape);
            }
            _ => self.place(part, id),
        }
    }

    /// The part that already returns a value.
    fn sender(&self, value: ValueId) -> Option<usize> {
        self.drafts.iter().position(|d| d.outputs.contains(&value))
    }

    fn has(&self, part: usize, value: ValueId) -> bool {
        let made = self.graph.producer(value).is_some_and(|p| self.drafts[part].nodes.contains(&p));
        made || self.drafts[part].inputs.contains(&value)
    }

    /// Assigns every output of the model to one part: the one that owns the producer, else the first that computes it
    /// anyway.
    fn place_model_outputs(&mut self) {
        for output in self.graph.outputs.clone() {
            let part = match self.graph.value(output).origin {
                Origin::Input => self.state_owner.get(&output).copied().unwrap_or(0),
                Origin::Weight(_) => self.drafts.len() - 1,
                Origin::Node { node, .. } => self.sender(output).unwrap_or_else(|| self.home(node)),
            };
            if let Some(producer) = self.fetch_output(part, output) {
                self.place(part, producer);
            }
            self.resolve_shape_reads();
            self.drafts[part].outputs.insert(output);
        }
    }

    fn fetch_output(&mut self, part: usize, output: ValueId) -> Option<NodeId> {
        match self.graph.value(output).origin {
            Origin::Weight(_) => None,
            Origin::Input => {
                self.drafts[part].inputs.insert(output);
                None
            }
            Origin::Node { node, .. } => Some(node),
        }
    }

    /// The part that a node counts towards; in all others it is a duplicate.
    fn home(&self, id: NodeId) -> usize {
        let runs = || self.drafts.iter().position(|d| d.nodes.contains(&id));
        let owned = self.owner(id).filter(|o| !self.is_movable_shape_read(id) || self.drafts[*o].nodes.contains(&id));
        owned.or_else(runs).or(self.owner(id)).unwrap_or(0)
    }

    /// Adds nodes that no part has needed so far: the parts together must contain the whole model.
    fn place_unread_nodes(&mut self) {
        for id in self.graph.node_ids().filter(|id| !self.segmentation.weights.is_weight_only(*id)) {
            if !self.drafts.iter().any(|d| d.nodes.contains(&id)) {
                self.place(self.home(id), id);
                self.resolve_shape_reads();
            }
        }
    }

    fn finish(self, groups: &[Range<usize>]) -> Vec<PartitionGraph> {
        let homes: Vec<usize> = self.graph.node_ids().map(|id| self.home(id)).collect();
        let is_duplicate =
            |part: usize, id: NodeId| homes[id.0 as usize] != part && !self.segmentation.weights.is_weight_only(id);
        let mut parts = vec![];
        for (index, (draft, blocks)) in self.drafts.iter().zip(groups).enumerate() {
            let nodes: Vec<NodeId> = draft.nodes.iter().copied().collect();
            let duplicated = nodes.iter().copied().filter(|id| is_duplicate(index, *id)).collect();
            let is_input = |v: &&ValueId| draft.inputs.contains(v);
            let (states, model): (Vec<ValueId>, Vec<ValueId>) =
                self.graph.inputs.iter().filter(is_input).partition(|v| self.state_owner.contains_key(v));
            let boundary = draft.inputs.iter().copied().filter(|v| self.graph.producer(*v).is_some());
            let (model_inputs, state_inputs) = (model.len(), states.len());
            let inputs = model.into_iter().chain(states).chain(boundary).collect();
            let returned = self.graph.outputs.iter().copied().filter(|v| draft.outputs.contains(v));
            let sent = draft.outputs.iter().copied().filter(|v| !self.graph.outputs.contains(v));
            let outputs = unique(returned.chain(sent));
            let (blocks, same_shape) = (blocks.clone(), draft.same_shape.clone());
            parts.push(PartitionGraph {
                blocks,
                nodes,
                duplicated,
                inputs,
                model_inputs,
                state_inputs,
                outputs,
                same_shape,
                early_router: None,
                prediction: None,
            });
        }
        parts
    }
}

fn unique(values: impl Iterator<Item = ValueId>) -> Vec<ValueId> {
    let mut seen = BTreeSet::new();
    values.filter(|v| seen.insert(*v)).collect()
}
