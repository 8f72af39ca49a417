//! Rules for quantized operators: the output type comes from a zero point, a scale or an attribute.

use super::broadcast::inputs;
use super::contract::{gemm_shape, product_shape};
use super::conv::conv_shape;
use crate::infer::context::{Context, Rule};
use crate::infer::fact::{Facts, fact, one, typed};
use crate::infer::poly::{constant, sum};
use hpp_schema::{DType, Dim, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "QuantizeLinear" => quantize,
        "DequantizeLinear" => dequantize,
        "DynamicQuantizeLinear" => dynamic,
        "ConvInteger" => conv_integer,
        "QLinearConv" => q_conv,
        "QLinearMatMul" => q_matmul,
        _ => return None,
    })
}

pub(super) fn contrib(op: &str) -> Option<Rule> {
    Some(match op {
        "QuantizeLinear" => quantize,
        "DequantizeLinear" => dequantize,
        "QLinearConv" => q_conv,
        "QLinearAdd" | "QLinearMul" => q_binary,
        "QLinearLeakyRelu" | "QLinearSigmoid" | "QLinearSoftmax" => super::elementwise::keep,
        "QLinearAveragePool" | "QLinearGlobalAveragePool" | "QLinearReduceMean" => typed_as_first,
        "QLinearConcat" => q_concat,
        "QLinearWhere" => q_where,
        "QGemm" => q_gemm,
        "DynamicQuantizeMatMul" => dynamic_matmul,
        "MatMulIntegerToFloat" => to_float,
        _ => return None,
    })
}

fn quantize(cx: &Context) -> Facts {
    one(cx.dtype(2).or(cx.dtype_attribute("output_dtype")).or(Some(DType::Uint8)), cx.shape_of(0))
}

fn dequantize(cx: &Context) -> Facts {
    one(cx.dtype_attribute("output_dtype").or(cx.dtype(1)), cx.shape_of(0))
}

fn dynamic(cx: &Context) -> Facts {
    let scalar = |dtype| fact(Some(dtype), Some(vec![]));
    vec![fact(Some(DType::Uint8), cx.shape_of(0)), scalar(DType::Float32), scalar(DType::Uint8)]
}

fn conv_integer(cx: &Context) -> Facts {
    typed(DType::Int32, conv_shape(cx, 0, 1))
}

fn q_conv(cx: &Context) -> Facts {
    let channels_last = cx.int("channels_last", 0) != 0;
    one(cx.dtype(7), if channels_last { None } else { conv_shape(cx, 0, 3) })
}

fn q_matmul(cx: &Context) -> Facts {
    one(cx.dtype(7), product_shape(cx, 0, 3))
}

fn q_binary(cx: &Context) -> Facts {
    one(cx.dtype(0), inputs(cx, [0, 3]))
}

fn typed_as_first(cx: &Context) -> Facts {
    one(cx.dtype(0), None)
}

/// Inputs are scale and zero point of the output, then tensor, scale and zero point of each part.
fn q_concat(cx: &Context) -> Facts {
    let parts: Vec<usize> = (2..cx.node.inputs.len()).step_by(3).collect();
    let joined = || -> Option<Shape> {
        let mut shape = cx.shape_of(*parts.first()?)?;
        let axis = cx.axis(0, shape.len())?;
        shape[axis] = sum(&parts.iter().map(|at| cx.dim(*at, axis as i64)).collect::<Vec<Dim>>());
        Some(shape)
    };
    one(cx.dtype(1), joined())
}

fn q_where(cx: &Context) -> Facts {
    one(cx.dtype(1), inputs(cx, [0, 1, 4]))
}

/// The result is requantized if a zero point for it is given, else float.
fn q_gemm(cx: &Context) -> Facts {
    one(cx.dtype(8).or(Some(DType::Float32)), gemm_shape(cx, 0, 3))
}

fn dynamic_matmul(cx: &Context) -> Facts {
    typed(DType::Float32, product_shape(cx, 0, 1))
}

fn to_float(cx: &Context) -> Facts {
    one(cx.dtype(2), product_shape(cx, 0, 1))
}

/// `com.microsoft::GatherBlockQuantized`: dequantized rows of a packed table, whose bytes hold `8 / bits` elements
/// each.
pub(super) fn gather_block(cx: &Context) -> Facts {
    let shape = super::indexing::gathered(cx, "gather_axis").and_then(|mut shape| {
        let packed = cx.dtype(0) == Some(DType::Uint8);
        let (Some(last), true) = (shape.last_mut(), packed) else { return Some(shape) };
        let per_byte = 8i64.checked_div(cx.int("bits", 4)).filter(|n| *n > 0)?;
        *last = crate::infer::poly::multiply(last, &constant(per_byte));
        Some(shape)
    });
    one(cx.dtype(2), shape)
}
