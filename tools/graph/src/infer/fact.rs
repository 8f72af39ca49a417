//! Facts that a rule states about one output: element type, shape, and the elements of small integer tensors.

use hpp_schema::{DType, Dim, Shape};

/// The elements of a small integer or boolean tensor in row-major order, each symbolic or unknown.
pub(super) type Elements = Vec<Dim>;

/// The facts about one output. The declaration in the file fills missing fields.
#[derive(Clone, Debug, Default)]
pub(super) struct Fact {
    pub dtype: Option<DType>,
    pub shape: Option<Shape>,
    pub elements: Option<Elements>,
}

/// The facts about all outputs, in order; missing outputs are unknown.
pub(super) type Facts = Vec<Fact>;

/// A fact with a type and a shape.
pub(super) fn fact(dtype: Option<DType>, shape: Option<Shape>) -> Fact {
    Fact { dtype, shape, elements: None }
}

/// Facts about a single output.
pub(super) fn one(dtype: Option<DType>, shape: Option<Shape>) -> Facts {
    vec![fact(dtype, shape)]
}

/// Facts about a single output of a fixed type.
pub(super) fn typed(dtype: DType, shape: Option<Shape>) -> Facts {
    one(Some(dtype), shape)
}

/// A shape of `rank` unknown dimensions.
pub(super) fn ranked(rank: usize) -> Shape {
    vec![Dim::Unknown; rank]
}

impl Fact {
    /// This fact with these elements.
    pub fn with_elements(mut self, elements: Option<Elements>) -> Fact {
        self.elements = elements;
        self
    }
}
