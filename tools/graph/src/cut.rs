//! Turns groups of consecutive blocks into parts: nodes, inputs and outputs of one graph each, joined by values.
//!
//! Globals are recomputed wherever they are needed. Where that would take another part's state or hidden state, only
//! for its *shape*, the shape travels instead. Knows nothing of files and devices.

use crate::segment::Segmentation;
use crate::{Graph, NodeId, Origin, ValueId, ops};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// One partition's share of the graph.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    /// The blocks inside.
    pub blocks: Range<usize>,
    /// Every node of this part, in execution order; weight-only nodes it reads are among them.
    pub nodes: Vec<NodeId>,
    /// Those of `nodes` that also run in an earlier part or belong to another one (weight-only nodes aside).
    pub duplicated: Vec<NodeId>,
    /// Graph inputs: the model's in its order, then states in the model's order, then values of earlier parts.
    pub inputs: Vec<ValueId>,
    /// How many of `inputs` are the model's, states aside; states follow, then values of earlier parts.
    pub model_inputs: usize,
    /// How many of `inputs` are states; they follow the model inputs.
    pub state_inputs: usize,
    /// Graph outputs: the model's in its order, then what only later parts read.
    pub outputs: Vec<ValueId>,
    /// Where the model reads the shape of the first of a pair, this part reads that of the second: a state of its own
    /// that has the same symbolic shape.
    pub same_shape: BTreeMap<ValueId, ValueId>,
}

impl Part {
    /// Values of earlier parts it reads.
    pub fn boundary_inputs(&self) -> &[ValueId] {
        &self.inputs[self.model_inputs + self.state_inputs..]
    }

    /// The states it reads.
    pub fn states(&self) -> &[ValueId] {
        &self.inputs[self.model_inputs..self.model_inputs + self.state_inputs]
    }

    /// States that belong to another part and that this one reads too. It happens only where no other way is known
    /// to the shape of a later part's state (an embedding that numbers positions by how long the cache is); a planner
    /// does well not to cut between the two.
    pub fn foreign_states(&self, segmentation: &Segmentation) -> Vec<ValueId> {
        let owns =
            |v: &ValueId| segmentation.states.iter().any(|s| s.pair.past == *v && self.blocks.contains(&s.block));
        self.states().iter().copied().filter(|v| !owns(v)).collect()
    }
}

/// Why blocks cannot be grouped as asked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// Groups must cover all blocks in order.
    #[error(
        "cannot cut {blocks} blocks into these groups: group {group} is {start}..{end}, expected one starting at {expected}"
    )]
    Groups {
        /// How many blocks there are.
        blocks: usize,
        /// The first group that does not fit.
        group: usize,
        /// Its start.
        start: usize,
        /// Its end.
        end: usize,
        /// Where it had to start.
        expected: usize,
    },
    /// The groups end too early.
    #[error("cannot cut {blocks} blocks into these groups: they end at block {end}")]
    Short {
        /// How many blocks there are.
        blocks: usize,
        /// Where the groups end.
        end: usize,
    },
}

/// Cuts a model into one part per group of consecutive blocks.
pub fn cut(graph: &Graph, segmentation: &Segmentation, groups: &[Range<usize>]) -> Result<Vec<Part>, CutError> {
    check_groups(segmentation.blocks.len(), groups)?;
    let mut cutter = Cutter::new(graph, segmentation, groups);
    cutter.place_owned_nodes();
    cutter.settle_shapes();
    cutter.place_model_outputs();
    cutter.place_leftovers();
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

/// A part while it is put together.
#[derive(Default)]
struct Draft {
    nodes: BTreeSet<NodeId>,
    inputs: BTreeSet<ValueId>,
    outputs: BTreeSet<ValueId>,
    same_shape: BTreeMap<ValueId, ValueId>,
}

struct Cutter<'a> {
    graph: &'a Graph,
    segmentation: &'a Segmentation,
    drafts: Vec<Draft>,
    /// The part of each node that has one.
    owner: Vec<Option<usize>>,
    /// The part of each past input.
    state_owner: BTreeMap<ValueId, usize>,
    /// Shape reads somebody needs, waiting until it is known what each part has at hand.
    shapes: Vec<(usize, NodeId)>,
}

impl<'a> Cutter<'a> {
    fn new(graph: &'a Graph, segmentation: &'a Segmentation, groups: &[Range<usize>]) -> Self {
        let part_of = |block: usize| groups.partition_point(|g| g.end <= block);
        let owner = graph.node_ids().map(|n| segmentation.block_of(n).map(part_of)).collect();
        let state_owner = segmentation.states.iter().map(|s| (s.pair.past, part_of(s.block))).collect();
        let drafts = groups.iter().map(|_| Draft::default()).collect();
        Cutter { graph, segmentation, drafts, owner, state_owner, shapes: vec![] }
    }

    fn owner(&self, id: NodeId) -> Option<usize> {
        self.owner[id.0 as usize]
    }

    /// Reads only the shape of something that one part has and others should not fetch: runs where that is at hand.
    fn is_floating(&self, id: NodeId) -> bool {
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
            if let Some(part) = self.owner(id).filter(|_| !self.is_floating(id)) {
                self.place(part, id);
            }
        }
    }

    /// Puts a node into a part, with all it needs.
    fn place(&mut self, part: usize, id: NodeId) {
        let mut todo = vec![id];
        while let Some(id) = todo.pop() {
            if self.drafts[part].nodes.insert(id) {
                let reads: Vec<ValueId> = self.graph.node(id).reads().collect();
                todo.extend(reads.into_iter().filter_map(|v| self.fetch(part, v)));
            }
        }
    }

    /// Makes a value available in a part. Answers with its producer where that has to be placed in the part as well.
    fn fetch(&mut self, part: usize, value: ValueId) -> Option<NodeId> {
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
        if self.is_floating(producer) {
            self.shapes.push((part, producer));
            return None;
        }
        match self.owner(producer) {
            Some(owner) if owner < part => {
                self.ship(owner, part, value);
                None
            }
            // Its own, a global's, weight-only, or a later part's of which an earlier one needs the shape.
            _ => Some(producer),
        }
    }

    fn fetch_input(&mut self, part: usize, value: ValueId) {
        let foreign = self.state_owner.get(&value).is_some_and(|owner| *owner > part);
        let stand_in = foreign.then(|| self.same_shape_state(part, value)).flatten();
        match stand_in.filter(|_| !self.reads_contents(part, value)) {
            Some(own) => {
                self.drafts[part].same_shape.insert(value, own);
                self.drafts[part].inputs.insert(own);
            }
            None => {
                self.drafts[part].inputs.insert(value);
            }
        }
    }

    /// Whether a node that belongs to the part reads the contents of this value.
    fn reads_contents(&self, part: usize, value: ValueId) -> bool {
        let consumers = self.graph.value(value).consumers.iter();
        consumers.copied().any(|c| self.owner(c) == Some(part) && !ops::reads_shape_only(self.graph.node(c)))
    }

    /// A state of the part that provably has the shape of another.
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

    fn ship(&mut self, from: usize, to: usize, value: ValueId) {
        self.drafts[from].outputs.insert(value);
        self.drafts[to].inputs.insert(value);
    }

    fn settle_shapes(&mut self) {
        while let Some((part, id)) = self.shapes.pop() {
            self.settle_shape(part, id);
        }
    }

    /// Reads the shape in the part if what it is of is there; else in the part that has it, and ships the answer.
    fn settle_shape(&mut self, part: usize, id: NodeId) {
        let node = self.graph.node(id);
        let Some(source) = node.inputs.first().copied().flatten() else { return };
        let shape = node.outputs.first().copied().flatten();
        let owner = match self.graph.value(source).origin {
            Origin::Node { node, .. } => self.owner(node),
            _ => self.state_owner.get(&source).copied(),
        };
        match (owner, shape) {
            (Some(owner), Some(shape)) if owner < part && !self.has(part, source) => {
                let giver = self.giver(shape).filter(|giver| *giver < part).unwrap_or(owner);
                self.place(giver, id);
                self.ship(giver, part, shape);
            }
            _ => self.place(part, id),
        }
    }

    /// The part that already gives a value to others or to the caller.
    fn giver(&self, value: ValueId) -> Option<usize> {
        self.drafts.iter().position(|d| d.outputs.contains(&value))
    }

    fn has(&self, part: usize, value: ValueId) -> bool {
        let made = self.graph.producer(value).is_some_and(|p| self.drafts[part].nodes.contains(&p));
        made || self.drafts[part].inputs.contains(&value)
    }

    /// Every output of the model comes out of one part: its producer's, else the first that computes it anyway.
    fn place_model_outputs(&mut self) {
        for output in self.graph.outputs.clone() {
            let part = match self.graph.value(output).origin {
                Origin::Input => self.state_owner.get(&output).copied().unwrap_or(0),
                Origin::Weight(_) => self.drafts.len() - 1,
                Origin::Node { node, .. } => self.giver(output).unwrap_or_else(|| self.home(node)),
            };
            if let Some(producer) = self.fetch_output(part, output) {
                self.place(part, producer);
            }
            self.settle_shapes();
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

    /// The part a node counts as belonging to.
    fn home(&self, id: NodeId) -> usize {
        let runs = || self.drafts.iter().position(|d| d.nodes.contains(&id));
        let owned = self.owner(id).filter(|o| !self.is_floating(id) || self.drafts[*o].nodes.contains(&id));
        owned.or_else(runs).or(self.owner(id)).unwrap_or(0)
    }

    /// Nodes nobody needs still belong to the model.
    fn place_leftovers(&mut self) {
        for id in self.graph.node_ids().filter(|id| !self.segmentation.weights.is_weight_only(*id)) {
            if !self.drafts.iter().any(|d| d.nodes.contains(&id)) {
                self.place(self.home(id), id);
                self.settle_shapes();
            }
        }
    }

    fn finish(self, groups: &[Range<usize>]) -> Vec<Part> {
        let homes: Vec<usize> = self.graph.node_ids().map(|id| self.home(id)).collect();
        let is_duplicate =
            |part: usize, id: NodeId| homes[id.0 as usize] != part && !self.segmentation.weights.is_weight_only(id);
        let mut parts = vec![];
        for (index, (draft, blocks)) in self.drafts.iter().zip(groups).enumerate() {
            let nodes: Vec<NodeId> = draft.nodes.iter().copied().collect();
            let duplicated = nodes.iter().copied().filter(|id| is_duplicate(index, *id)).collect();
            let given = |v: &&ValueId| draft.inputs.contains(v);
            let (states, model): (Vec<ValueId>, Vec<ValueId>) =
                self.graph.inputs.iter().filter(given).partition(|v| self.state_owner.contains_key(v));
            let boundary = draft.inputs.iter().copied().filter(|v| self.graph.producer(*v).is_some());
            let (model_inputs, state_inputs) = (model.len(), states.len());
            let inputs = model.into_iter().chain(states).chain(boundary).collect();
            let returned = self.graph.outputs.iter().copied().filter(|v| draft.outputs.contains(v));
            let shipped = draft.outputs.iter().copied().filter(|v| !self.graph.outputs.contains(v));
            let outputs = unique(returned.chain(shipped));
            let (blocks, same_shape) = (blocks.clone(), draft.same_shape.clone());
            parts.push(Part { blocks, nodes, duplicated, inputs, model_inputs, state_inputs, outputs, same_shape });
        }
        parts
    }
}

fn unique(values: impl Iterator<Item = ValueId>) -> Vec<ValueId> {
    let mut seen = BTreeSet::new();
    values.filter(|v| seen.insert(*v)).collect()
}
