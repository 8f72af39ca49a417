//! Merges inferred facts into declarations of the file: declarations win, gaps are filled, contradictions are recorded.

use super::Disagreement;
use super::fact::Fact;
use super::poly::{as_constant, differ};
use crate::{Graph, ValueId};
use hpp_schema::{Dim, Shape};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of elements of a tensor whose elements are tracked.
pub(super) const MAX_ELEMENTS: usize = 64;

/// Maximum rank. No real tensor has more dimensions; the limit stops hostile input from growing shapes without bound.
const MAX_RANK: usize = 64;

/// Symbols that the exporter invented for inner dimensions, and the inferred dimensions that replace them.
///
/// A symbol is invented if no graph input has it: its value is not known before a run.
pub(super) struct ExporterSymbols {
    /// Symbols of graph inputs.
    bound: BTreeSet<String>,
    /// The dimension that replaces each invented symbol; `None` if inference found different ones.
    replacements: BTreeMap<String, Option<Dim>>,
}

impl ExporterSymbols {
    /// Collects the symbols of the graph's inputs.
    pub fn of(graph: &Graph) -> Self {
        let shapes = graph.inputs.iter().filter_map(|id| graph.value(*id).shape.as_ref());
        let bound = shapes.flatten().flat_map(|dim| dim.symbols().into_iter().map(str::to_owned)).collect();
        ExporterSymbols { bound, replacements: BTreeMap::new() }
    }

    /// Whether every symbol of `dim` comes from a graph input.
    fn is_bound(&self, dim: &Dim) -> bool {
        *dim != Dim::Unknown && dim.symbols().into_iter().all(|s| self.bound.contains(s))
    }

    /// Whether `inferred` is more specific than `declared`. Records the replacement of an invented symbol.
    fn is_more_specific(&mut self, declared: &Dim, inferred: &Dim) -> bool {
        if self.is_bound(declared) || !self.is_bound(inferred) {
            return *declared == Dim::Unknown;
        }
        if let Some(name) = declared.as_symbol() {
            let replacement = self.replacements.entry(name.to_owned()).or_insert_with(|| Some(inferred.clone()));
            replacement.take_if(|replacement| replacement != inferred);
        }
        true
    }

    /// Substitutes invented symbols everywhere. A symbol with two different replacements stays.
    pub fn substitute(self, graph: &mut Graph) {
        let replacements: BTreeMap<String, Dim> =
            self.replacements.into_iter().filter_map(|(name, dim)| Some((name, dim?))).collect();
        if replacements.is_empty() {
            return;
        }
        for dim in graph.values.iter_mut().filter_map(|v| v.shape.as_mut()).flatten() {
            if dim.symbols().iter().any(|s| replacements.contains_key(*s)) {
                *dim = dim.substitute(&replacements);
            }
        }
    }
}

/// Drops facts that no tensor can have: negative sizes, excessive ranks. Also drops element lists that are too long to
/// track.
pub(super) fn drop_impossible(mut fact: Fact) -> Fact {
    fact.elements = fact.elements.filter(|elements| elements.len() <= MAX_ELEMENTS);
    fact.shape = fact.shape.filter(|shape| shape.len() <= MAX_RANK);
    for dim in fact.shape.iter_mut().flatten() {
        if as_constant(dim).is_some_and(|size| size < 0) {
            *dim = Dim::Unknown;
        }
    }
    fact
}

/// Replaces a declaration by an inferred fact: for `Constant` nodes, whose tensor is authoritative.
pub(super) fn overwrite(graph: &mut Graph, id: ValueId, fact: &Fact, disagreements: &mut Vec<Disagreement>) {
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

/// Fills the gaps of a declaration from an inferred fact, and records contradictions.
pub(super) fn merge(
    graph: &mut Graph,
    id: ValueId,
    inferred: &Fact,
    symbols: &mut ExporterSymbols,
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
        if symbols.is_more_specific(declared, found) {
            *declared = found.clone();
        }
    }
}

/// Whether the shapes differ for every value of the symbols.
pub(super) fn contradicts(declared: &Shape, inferred: &Shape) -> bool {
    declared.len() != inferred.len() || declared.iter().zip(inferred).any(|(a, b)| differ(a, b))
}
