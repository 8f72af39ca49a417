//! What a rule says of one output: element type, shape, and the elements of small integer tensors.

use super::context::Context;
use hpp_schema::{DType, Dim, Shape};

/// The contents of a small integer (or boolean) tensor in row-major order, each element symbolic or unknown.
pub(super) type Elements = Vec<Dim>;

/// Everything a rule found out about one output; what it left out stays as the file has it.
#[derive(Clone, Debug, Default)]
pub(super) struct Fact {
    pub dtype: Option<DType>,
    pub shape: Option<Shape>,
    pub elements: Option<Elements>,
}

/// What a rule says of all outputs, in order; missing ones are unknown.
pub(super) type Facts = Vec<Fact>;

/// What an operator's outputs are, given its inputs.
pub(super) type Rule = fn(&Context) -> Facts;

/// A fact of a type and a shape.
pub(super) fn fact(dtype: Option<DType>, shape: Option<Shape>) -> Fact {
    Fact { dtype, shape, elements: None }
}

/// One output.
pub(super) fn one(dtype: Option<DType>, shape: Option<Shape>) -> Facts {
    vec![fact(dtype, shape)]
}

/// One output of a fixed type.
pub(super) fn typed(dtype: DType, shape: Option<Shape>) -> Facts {
    one(Some(dtype), shape)
}

/// A shape of `rank` unknown dimensions.
pub(super) fn ranked(rank: usize) -> Shape {
    vec![Dim::Unknown; rank]
}

impl Fact {
    /// This fact with these elements.
    pub fn holding(mut self, elements: Option<Elements>) -> Fact {
        self.elements = elements;
        self
    }
}
