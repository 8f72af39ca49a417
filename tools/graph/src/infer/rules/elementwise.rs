//! Rules for operators that keep or broadcast shapes: arithmetic, comparison, activation, casts.

use super::broadcast::{all_inputs, inputs};
use crate::infer::contents::{binary, select, unary, zip};
use crate::infer::context::{Context, Rule};
use crate::infer::fact::{Elements, Facts, fact, one};
use crate::infer::poly::divide;
use hpp_schema::DType;

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "Abs" | "Acos" | "Acosh" | "Asin" | "Asinh" | "Atan" | "Atanh" | "BitwiseNot" | "Ceil" | "Celu" | "Clip"
        | "Cos" | "Cosh" | "Elu" | "Erf" | "Exp" | "Floor" | "Gelu" | "HardSigmoid" | "HardSwish" | "Identity"
        | "LeakyRelu" | "Log" | "Mish" | "Neg" | "Not" | "PRelu" | "Reciprocal" | "Relu" | "Round" | "Selu"
        | "Shrink" | "Sigmoid" | "Sign" | "Sin" | "Sinh" | "Softplus" | "Softsign" | "Sqrt" | "Swish" | "SwiGLU"
        | "Tan" | "Tanh" | "ThresholdedRelu" | "CumSum" | "CumProd" | "Trilu" | "ReverseSequence" => keep,
        "Add" | "Sub" | "Mul" | "Div" | "Mod" | "Min" | "Max" | "Pow" | "Mean" | "Sum" | "BitShift" | "BitwiseAnd"
        | "BitwiseOr" | "BitwiseXor" | "And" | "Or" | "Xor" => arithmetic,
        "Equal" | "Less" | "LessOrEqual" | "Greater" | "GreaterOrEqual" => comparison,
        "IsNaN" | "IsInf" => predicate,
        "Where" => choice,
        "Cast" | "BitCast" => cast,
        "CastLike" => cast_like,
        "Dropout" => dropout,
        "Bernoulli" => retyped,
        _ => return None,
    })
}

/// Type and shape of input 0.
pub(super) fn keep(cx: &Context) -> Facts {
    let elements = unary(&cx.node.op_type).and_then(|op| Some(cx.elements(0)?.iter().map(op).collect()));
    vec![cx.same(0).with_elements(elements)]
}

fn arithmetic(cx: &Context) -> Facts {
    let dtype = cx.dtype(0).or_else(|| if cx.node.op_type == "Pow" { None } else { cx.dtype(1) });
    vec![fact(dtype, all_inputs(cx)).with_elements(folded(cx))]
}

/// The output elements of an operator with two inputs. Fractions are not tracked, so a float division must be exact.
fn folded(cx: &Context) -> Option<Elements> {
    let op = binary(&cx.node.op_type).filter(|_| cx.node.inputs.len() == 2)?;
    let fractional = cx.dtype(0).is_some_and(DType::is_float);
    let op = if fractional && cx.node.op_type == "Div" { divide } else { op };
    zip(&cx.elements(0)?, &cx.elements(1)?, op)
}

fn comparison(cx: &Context) -> Facts {
    vec![fact(Some(DType::Bool), all_inputs(cx)).with_elements(folded(cx))]
}

fn predicate(cx: &Context) -> Facts {
    one(Some(DType::Bool), cx.shape_of(0))
}

fn choice(cx: &Context) -> Facts {
    let elements = || select(&cx.elements(0)?, &cx.elements(1)?, &cx.elements(2)?);
    vec![fact(cx.dtype(1).or(cx.dtype(2)), inputs(cx, 0..3)).with_elements(elements())]
}

/// Integers keep their value in any numeric type; casts to boolean and bit casts drop the elements.
fn cast(cx: &Context) -> Facts {
    let to = cx.dtype_attribute("to");
    let keeps = cx.node.op_type == "Cast" && to.is_some_and(|t| t != DType::Bool);
    vec![fact(to, cx.shape_of(0)).with_elements(cx.elements(0).filter(|_| keeps))]
}

fn cast_like(cx: &Context) -> Facts {
    let keeps = cx.dtype(1).is_some_and(|t| t != DType::Bool);
    vec![fact(cx.dtype(1), cx.shape_of(0)).with_elements(cx.elements(0).filter(|_| keeps))]
}

/// The mask is boolean since operator set 10; before, it had the input's type.
fn dropout(cx: &Context) -> Facts {
    let mask = if cx.opset() >= 10 { Some(DType::Bool) } else { cx.dtype(0) };
    vec![cx.same(0).with_elements(cx.elements(0)), fact(mask, cx.shape_of(0))]
}

/// The shape of input 0, with the type in attribute `dtype` or else the type of input 0.
pub(super) fn retyped(cx: &Context) -> Facts {
    one(cx.dtype_attribute("dtype").or(cx.dtype(0)), cx.shape_of(0))
}
