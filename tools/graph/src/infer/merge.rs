//! How inferred facts meet what the file says: the file wins, gaps are filled, disagreements are noted.

use super::Disagreement;
use super::fact::Fact;
use super::poly::{as_constant, differ};
use crate::{Graph, ValueId};
use hpp_schema::{Dim, Shape};
use std::collections::{BTreeMap, BTreeSet};

/// Contents of tensors larger than this are not tracked.
pub(super) const MAX_ELEMENTS: usize = 64;

/// No real tensor has more dimensions; hostile input must not make shapes grow for ever.
const MAX_RANK: usize = 64;

/// Symbols of the file that nothing but an exporter's numbering stands behind, and what they turned out to be.
///
/// A symbol is opaque when no graph input carries it: nobody could give it a value before running.
pub(super) struct Opaque {
    bound: BTreeSet<String>,
    meanings: BTreeMap<String, Option<Dim>>,
}

impl Opaque {
    /// Takes every symbol of the graph's inputs as meaningful.
    pub fn of(graph: &Graph) -> Self {
        let shapes = graph.inputs.iter().filter_map(|id| graph.value(*id).shape.as_ref());
        let bound = shapes.flatten().flat_map(|dim| dim.symbols().into_iter().map(str::to_owned)).collect();
        Opaque { bound, meanings: BTreeMap::new() }
    }

    /// Whether every symbol of `dim` comes from a graph input.
    fn is_bound(&self, dim: &Dim) -> bool {
        *dim != Dim::Unknown && dim.symbols().into_iter().all(|s| self.bound.contains(s))
    }

    /// Whether `declared` says less than `inferred`. An opaque name is remembered for where nothing is inferred.
    fn says_less(&mut self, declared: &Dim, inferred: &Dim) -> bool {
        if self.is_bound(declared) || !self.is_bound(inferred) {
            return *declared == Dim::Unknown;
        }
        if let Some(name) = declared.as_symbol() {
            let meaning = self.meanings.entry(name.to_owned()).or_insert_with(|| Some(inferred.clone()));
            meaning.take_if(|meaning| meaning != inferred);
        }
        true
    }

    /// Puts meanings in place of names everywhere. A name with two meanings keeps none.
    pub fn replace_in(self, graph: &mut Graph) {
        let meanings: BTreeMap<String, Dim> = self.meanings.into_iter().filter_map(|(n, m)| Some((n, m?))).collect();
        if meanings.is_empty() {
            return;
        }
        for dim in graph.values.iter_mut().filter_map(|v| v.shape.as_mut()).flatten() {
            if dim.symbols().iter().any(|s| meanings.contains_key(*s)) {
                *dim = dim.substitute(&meanings);
            }
        }
    }
}

/// Drops what no tensor can have: negative sizes, absurd ranks, long contents.
pub(super) fn sane(mut fact: Fact) -> Fact {
    fact.elements = fact.elements.filter(|elements| elements.len() <= MAX_ELEMENTS);
    fact.shape = fact.shape.filter(|shape| shape.len() <= MAX_RANK);
    for dim in fact.shape.iter_mut().flatten() {
        if as_constant(dim).is_some_and(|size| size < 0) {
            *dim = Dim::Unknown;
        }
    }
    fact
}

/// Takes an inferred fact over what the file says: for constants, whose tensor is the file's better word.
pub(super) fn correct(graph: &mut Graph, id: ValueId, fact: &Fact, disagreements: &mut Vec<Disagreement>) {
    let value = &mut graph.values[id.0 as usize];
    if let (Some(declared), Some(inferred)) = (&value.shape, &fact.shape)
        && contradicts(declared, inferred)
    {
        disagreements.push(Disagreement::Shape { value: id, declared: declared.clone(), inferred: inferred.clone() });
    }
    if let (Some(declared), Some(inferred)) = (value.dtype, fact.dtype)
        && declared != inferred
    {
        disagreements.push(Disagreement::DType { value: id, declared, inferred });
    }
    value.dtype = fact.dtype.or(value.dtype);
    value.shape = fact.shape.clone().or(value.shape.take());
}

/// Fills a value's gaps from an inferred fact and notes what does not agree.
pub(super) fn merge(
    graph: &mut Graph,
    id: ValueId,
    inferred: &Fact,
    opaque: &mut Opaque,
    disagreements: &mut Vec<Disagreement>,
) {
    let value = &mut graph.values[id.0 as usize];
    match (value.dtype, inferred.dtype) {
        (None, found) => value.dtype = found,
        (Some(declared), Some(inferred)) if declared != inferred => {
            disagreements.push(Disagreement::DType { value: id, declared, inferred });
        }
        _ => {}
    }
    let Some(found) = &inferred.shape else { return };
    let Some(declared) = &mut value.shape else {
        value.shape = Some(found.clone());
        return;
    };
    if contradicts(declared, found) {
        let (declared, inferred) = (declared.clone(), found.clone());
        disagreements.push(Disagreement::Shape { value: id, declared, inferred });
        return;
    }
    for (declared, found) in declared.iter_mut().zip(found) {
        if opaque.says_less(declared, found) {
            *declared = found.clone();
        }
    }
}

/// Whether no values of the symbols make the two shapes equal.
pub(super) fn contradicts(declared: &Shape, inferred: &Shape) -> bool {
    declared.len() != inferred.len() || declared.iter().zip(inferred).any(|(a, b)| differ(a, b))
}
