//! Evaluates shapes for given values of the symbols, and counts operations of products and convolutions.

use crate::infer::rules::einsum_axes;
use crate::{Attribute, Graph, Node, ValueId};
use hpp_schema::{Dim, Shape, Symbols};

/// One node, and the values of the symbols.
pub(super) struct Sizes<'a> {
    pub graph: &'a Graph,
    pub node: &'a Node,
    pub symbols: &'a Symbols,
}

impl Sizes<'_> {
    fn id(&self, input: usize) -> Option<ValueId> {
        self.node.inputs.get(input).copied().flatten()
    }

    /// Whether an input is present.
    pub fn has(&self, input: usize) -> bool {
        self.id(input).is_some()
    }

    /// An input's shape.
    pub fn shape(&self, input: usize) -> Option<&Shape> {
        self.graph.value(self.id(input)?).shape.as_ref()
    }

    fn eval(&self, dim: &Dim) -> Option<u64> {
        dim.eval(self.symbols)
    }

    /// A dimension of an input; negative axes count from the end.
    pub fn dim(&self, input: usize, axis: isize) -> Option<u64> {
        self.dim_of(self.id(input)?, axis)
    }

    /// A dimension of a value.
    pub fn dim_of(&self, id: ValueId, axis: isize) -> Option<u64> {
        let shape = self.graph.value(id).shape.as_ref()?;
        let axis = if axis < 0 { shape.len().checked_add_signed(axis)? } else { axis as usize };
        self.eval(shape.get(axis)?)
    }

    /// Number of elements of a value.
    pub fn elements(&self, id: ValueId) -> Option<u64> {
        let shape = self.graph.value(id).shape.as_ref()?;
        shape.iter().try_fold(1u64, |count, dim| count.checked_mul(self.eval(dim)?))
    }

    /// Number of elements of an input.
    pub fn count(&self, input: usize) -> Option<u64> {
        self.elements(self.id(input)?)
    }

    /// Number of elements of an output.
    pub fn output(&self, at: usize) -> Option<u64> {
        self.elements((*self.node.outputs.get(at)?)?)
    }

    /// A dimension of an output.
    pub fn output_dim(&self, at: usize, axis: isize) -> Option<u64> {
        self.dim_of((*self.node.outputs.get(at)?)?, axis)
    }

    /// Elements that an elementwise operator or a reduction processes: those of the first output or, in a reduction, of
    /// the first input if that is larger.
    pub fn widest(&self) -> Option<u64> {
        let output = self.output(0)?;
        if self.node.op_type.starts_with("Reduce") { Some(output.max(self.count(0)?)) } else { Some(output) }
    }

    /// A positive integer attribute.
    pub fn attribute(&self, name: &str) -> Option<u64> {
        u64::try_from(self.node.int(name)?).ok().filter(|size| *size > 0)
    }

    /// Number of tokens in the first input: the product of all axes but the last, and but the heads of
    /// `[batch, heads, length, width]`.
    pub fn tokens(&self) -> Option<u64> {
        let width = self.dim(0, -1)?;
        let heads = if self.shape(0)?.len() == 4 { self.dim(0, 1)? } else { 1 };
        self.count(0)?.checked_div(width.checked_mul(heads)?)
    }

    /// An axis attribute.
    pub fn axis(&self, name: &str, default: i64) -> Option<isize> {
        isize::try_from(self.node.int(name).unwrap_or(default)).ok()
    }

    /// `2 * (output elements) * (inner dimension)`.
    pub fn product(&self) -> Option<u64> {
        let transposed = self.node.int("transA").unwrap_or(0) != 0;
        let inner = self.dim(0, if transposed { -2 } else { -1 })?;
        times(&[2, self.output(0)?, inner])
    }

    /// Like [`product`](Self::product), but for a packed right side, of which only the width is known.
    pub fn packed_product(&self, width: Option<u64>) -> Option<u64> {
        times(&[2, self.count(0)?, width?])
    }

    /// Width of query, key and value together.
    pub fn qkv_width(&self) -> Option<u64> {
        self.attribute("Nq")?.checked_add(self.attribute("Nkv")?.checked_mul(2)?)
    }

    /// `2 * (output elements) * taps`, where a weight `[M, C / group, kernel..]` has `C / group * kernel` taps.
    pub fn convolution(&self, weight: usize) -> Option<u64> {
        let taps = self.count(weight)?.checked_div(self.dim(weight, 0)?)?;
        times(&[2, self.output(0)?, taps])
    }

    /// `2 * (input elements) * taps`, for a weight `[C, M / group, kernel..]`.
    pub fn transposed_convolution(&self) -> Option<u64> {
        let taps = self.count(1)?.checked_div(self.dim(1, 0)?)?;
        times(&[2, self.count(0)?, taps])
    }

    /// Two per combination of all letters; one for a single operand.
    pub fn einsum(&self) -> Option<u64> {
        let Some(Attribute::String(equation)) = self.node.attributes.get("equation") else { return None };
        let shapes: Vec<&Shape> = (0..self.node.inputs.len()).map(|at| self.shape(at)).collect::<Option<_>>()?;
        let dims = einsum_axes(std::str::from_utf8(equation).ok()?, &shapes)?;
        let all = dims.iter().try_fold(1u64, |count, dim| count.checked_mul(self.eval(dim)?))?;
        times(&[shapes.len().min(2) as u64, all])
    }

    /// Both weight matrices, for each step and sequence.
    pub fn recurrent(&self) -> Option<u64> {
        let weights = self.count(1)?.checked_add(self.count(2)?)?;
        times(&[2, self.dim(0, 0)?, self.dim(0, 1)?, weights])
    }
}

/// The product of all factors; `None` on overflow.
pub(super) fn times(factors: &[u64]) -> Option<u64> {
    factors.iter().try_fold(1u64, |product, factor| product.checked_mul(*factor))
}
