//! Rules for matrix products: the inner dimension is contracted, batch dimensions are broadcast.

use super::broadcast::broadcast;
use crate::infer::context::{Context, Rule};
use crate::infer::fact::{Facts, one, typed};
use hpp_schema::{DType, Dim, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "MatMul" => matmul,
        "Gemm" => gemm,
        "Einsum" => super::einsum::einsum,
        "MatMulInteger" => matmul_integer,
        _ => return None,
    })
}

fn matmul(cx: &Context) -> Facts {
    one(cx.dtype(0).or(cx.dtype(1)), product_shape(cx, 0, 1))
}

fn matmul_integer(cx: &Context) -> Facts {
    typed(DType::Int32, product_shape(cx, 0, 1))
}

/// The shape of `numpy.matmul` of two inputs.
pub(super) fn product_shape(cx: &Context, a: usize, b: usize) -> Option<Shape> {
    matmul_shape(cx.shape(a)?, cx.shape(b)?)
}

/// The shape of `numpy.matmul`: a vector on either side gets a dimension for the product and loses it afterwards.
pub(super) fn matmul_shape(a: &[Dim], b: &[Dim]) -> Option<Shape> {
    let (rows, a_batch): (&[Dim], &[Dim]) = match a {
        [] => return None,
        [_] => (&[], &[]),
        [batch @ .., m, _] => (std::slice::from_ref(m), batch),
    };
    let (columns, b_batch): (&[Dim], &[Dim]) = match b {
        [] => return None,
        [_] => (&[], &[]),
        [batch @ .., _, n] => (std::slice::from_ref(n), batch),
    };
    let mut shape = broadcast(a_batch, b_batch);
    shape.extend(rows.iter().chain(columns).cloned());
    Some(shape)
}

/// Also for fused operators with `Gemm`'s attributes.
pub(super) fn gemm(cx: &Context) -> Facts {
    one(cx.dtype(0).or(cx.dtype(1)), gemm_shape(cx, 0, 1))
}

/// `[M, N]`, the shape of a product of two matrices, each possibly transposed.
pub(super) fn gemm_shape(cx: &Context, a: usize, b: usize) -> Option<Shape> {
    cx.shape(a).or(cx.shape(b))?;
    let rows = cx.dim(a, if cx.int("transA", 0) == 0 { 0 } else { 1 });
    let columns = cx.dim(b, if cx.int("transB", 0) == 0 { 1 } else { 0 });
    Some(vec![rows, columns])
}

/// `com.microsoft::FusedMatMul`: `transA` swaps the last two axes, `transBatchA` moves the first axis to the matrix's
/// front.
pub(super) fn fused_matmul(cx: &Context) -> Facts {
    let side = |at, matrix: &str, batch: &str| {
        let mut shape = cx.shape_of(at)?;
        let rank = shape.len();
        if rank > 2 && cx.int(batch, 0) != 0 {
            shape[..rank - 1].rotate_left(1);
        }
        if rank > 1 && cx.int(matrix, 0) != 0 {
            shape.swap(rank - 1, rank - 2);
        }
        Some(shape)
    };
    let shape = || matmul_shape(&side(0, "transA", "transBatchA")?, &side(1, "transB", "transBatchB")?);
    one(cx.dtype(0), shape())
}
