//! The input of a rule: one node, facts about its inputs, and its attributes.

use super::fact::{Elements, Fact, Facts, fact};
use super::merge::MAX_ELEMENTS;
use super::poly::{as_constant, constant};
use crate::{Attribute, Graph, Node, ValueId};
use hpp_schema::{DType, Dim, Shape};

/// Derives facts about the outputs of a node.
pub(super) type Rule = fn(&Context) -> Facts;

/// One node, as its rule sees it.
pub(super) struct Context<'a> {
    pub graph: &'a Graph,
    pub node: &'a Node,
    /// Known elements of each value, by index.
    pub elements: &'a [Option<Elements>],
}

impl<'a> Context<'a> {
    /// The value at an input, if present.
    pub fn input(&self, at: usize) -> Option<ValueId> {
        self.node.inputs.get(at).copied().flatten()
    }

    /// Element type of an input.
    pub fn dtype(&self, at: usize) -> Option<DType> {
        self.graph.value(self.input(at)?).dtype
    }

    /// Shape of an input.
    pub fn shape(&self, at: usize) -> Option<&'a Shape> {
        self.graph.value(self.input(at)?).shape.as_ref()
    }

    /// A copy of an input's shape.
    pub fn shape_of(&self, at: usize) -> Option<Shape> {
        self.shape(at).cloned()
    }

    /// One dimension of an input; negative axes count from the end.
    pub fn dim(&self, at: usize, axis: i64) -> Dim {
        let Some(shape) = self.shape(at) else { return Dim::Unknown };
        wrap(axis, shape.len()).map_or(Dim::Unknown, |axis| shape[axis].clone())
    }

    /// Type and shape of an input.
    pub fn same(&self, at: usize) -> Fact {
        fact(self.dtype(at), self.shape_of(at))
    }

    /// Elements of an input: the tracked ones, or unknown ones for a small integer vector of known length.
    pub fn elements(&self, at: usize) -> Option<Elements> {
        let id = self.input(at)?;
        if let Some(elements) = &self.elements[id.0 as usize] {
            return Some(elements.clone());
        }
        let value = self.graph.value(id);
        let count = match value.shape.as_deref()? {
            [] => 1,
            [length] => usize::try_from(length.as_fixed()?).ok()?,
            _ => return None,
        };
        let countable = matches!(value.dtype, Some(DType::Int64 | DType::Int32 | DType::Bool));
        (countable && count <= MAX_ELEMENTS).then(|| vec![Dim::Unknown; count])
    }

    /// Elements of an input, if all are numbers.
    pub fn constants(&self, at: usize) -> Option<Vec<i64>> {
        self.elements(at)?.iter().map(as_constant).collect()
    }

    /// The element of an input with exactly one.
    pub fn scalar(&self, at: usize) -> Option<Dim> {
        let elements = self.elements(at)?;
        if elements.len() == 1 { elements.into_iter().next() } else { None }
    }

    /// A list of integers that is an attribute in older operator sets and an input in newer ones.
    pub fn list(&self, attribute: &str, input: usize) -> Option<Vec<i64>> {
        self.ints(attribute).map(<[i64]>::to_vec).or_else(|| self.constants(input))
    }

    /// Whether such a list is present, even if its elements are unknown.
    pub fn has_list(&self, attribute: &str, input: usize) -> bool {
        self.node.attributes.contains_key(attribute) || self.input(input).is_some()
    }

    /// An integer attribute or its default.
    pub fn int(&self, name: &str, default: i64) -> i64 {
        self.node.int(name).unwrap_or(default)
    }

    /// A positive integer attribute as a dimension; unknown otherwise.
    pub fn size(&self, name: &str) -> Dim {
        self.node.int(name).filter(|v| *v > 0).map_or(Dim::Unknown, constant)
    }

    /// An attribute with a list of integers.
    pub fn ints(&self, name: &str) -> Option<&'a [i64]> {
        match self.node.attributes.get(name) {
            Some(Attribute::Ints(values)) => Some(values),
            _ => None,
        }
    }

    /// A string attribute.
    pub fn text(&self, name: &str) -> Option<&'a str> {
        match self.node.attributes.get(name) {
            Some(Attribute::String(bytes)) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }

    /// An attribute that names an element type.
    pub fn dtype_attribute(&self, name: &str) -> Option<DType> {
        DType::from_onnx(i32::try_from(self.node.int(name)?).ok()?)
    }

    /// Version of the node's operator set; the newest if the file does not declare it.
    pub fn opset(&self) -> i64 {
        self.graph.opsets.get(&self.node.domain).copied().unwrap_or(i64::MAX)
    }

    /// The `axis` attribute as an index below `rank`.
    pub fn axis(&self, default: i64, rank: usize) -> Option<usize> {
        wrap(self.int("axis", default), rank)
    }
}

/// An axis, counted from the end if negative, as an index; `None` if out of range.
pub(super) fn wrap(axis: i64, rank: usize) -> Option<usize> {
    let axis = if axis < 0 { axis.checked_add(i64::try_from(rank).ok()?)? } else { axis };
    usize::try_from(axis).ok().filter(|axis| *axis < rank)
}

/// Several axes as indices; `None` if one is out of range.
pub(super) fn wrap_all(axes: &[i64], rank: usize) -> Option<Vec<usize>> {
    axes.iter().map(|axis| wrap(*axis, rank)).collect()
}
