//! Rules for operators that create tensors from attributes or shapes: constants, ranges, shapes, random numbers.

use super::elementwise::retyped;
use crate::Attribute;
use crate::infer::context::{Context, Rule};
use crate::infer::fact::{Elements, Fact, Facts, fact, one, ranked, typed};
use crate::infer::merge::MAX_ELEMENTS;
use crate::infer::poly::{as_constant, constant, divide_up, multiply, product};
use crate::ops::shape_axes;
use hpp_schema::{DType, Dim, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "Constant" => literal,
        "ConstantOfShape" => filled,
        "Shape" => shape,
        "Size" => size,
        "Range" => range,
        "EyeLike" | "RandomNormalLike" | "RandomUniformLike" => retyped,
        "RandomNormal" | "RandomUniform" => random,
        "Multinomial" => multinomial,
        "HannWindow" | "HammingWindow" | "BlackmanWindow" => window,
        _ => return None,
    })
}

fn literal(cx: &Context) -> Facts {
    cx.node.attributes.iter().find_map(|(name, value)| literal_of(name, value)).into_iter().collect()
}

fn literal_of(name: &str, value: &Attribute) -> Option<Fact> {
    let vector = |dtype, length: usize| fact(Some(dtype), Some(vec![constant(length as i64)]));
    let scalar = |dtype| fact(Some(dtype), Some(vec![]));
    Some(match (name, value) {
        ("value", Attribute::Tensor(tensor)) => {
            let shape = tensor.dims.iter().copied().map(Dim::fixed).collect();
            let elements = tensor.ints.as_ref().map(|ints| ints.iter().copied().map(constant).collect());
            fact(Some(tensor.dtype), Some(shape)).with_elements(elements)
        }
        ("value_int", Attribute::Int(value)) => scalar(DType::Int64).with_elements(Some(vec![constant(*value)])),
        ("value_ints", Attribute::Ints(values)) => vector(DType::Int64, values.len())
            .with_elements((values.len() <= MAX_ELEMENTS).then(|| values.iter().copied().map(constant).collect())),
        ("value_float", _) => scalar(DType::Float32),
        ("value_floats", Attribute::Floats(values)) => vector(DType::Float32, values.len()),
        ("value_string", _) => scalar(DType::String),
        ("value_strings", Attribute::Strings(values)) => vector(DType::String, values.len()),
        _ => return None,
    })
}

fn filled(cx: &Context) -> Facts {
    let value = match cx.node.attributes.get("value") {
        Some(Attribute::Tensor(tensor)) => Some(tensor),
        _ => None,
    };
    let shape: Option<Shape> = cx.elements(0);
    let count = shape.as_ref().and_then(|s| product(s).as_fixed()).filter(|n| *n <= MAX_ELEMENTS as u64);
    let number = value.and_then(|t| t.ints.as_ref()).and_then(|ints| ints.first()).copied();
    let elements = count.zip(number).map(|(count, number)| vec![constant(number); count as usize]);
    vec![fact(Some(value.map_or(DType::Float32, |t| t.dtype)), shape).with_elements(elements)]
}

/// Attributes `start` and `end` exist since operator set 15.
fn shape(cx: &Context) -> Facts {
    let Some(dims) = cx.shape(0) else { return typed(DType::Int64, Some(ranked(1))) };
    let elements: Elements = dims[shape_axes(cx.node, dims.len())].to_vec();
    vec![fact(Some(DType::Int64), Some(vec![constant(elements.len() as i64)])).with_elements(Some(elements))]
}

fn size(cx: &Context) -> Facts {
    let count = cx.shape(0).map(|shape| vec![product(shape)]);
    vec![fact(Some(DType::Int64), Some(vec![])).with_elements(count)]
}

fn range(cx: &Context) -> Facts {
    let dtype = cx.dtype(0).or(cx.dtype(1));
    let step = cx.input(2).map_or(Some(constant(1)), |_| cx.scalar(2));
    let bounds = (cx.scalar(0), cx.scalar(1), step);
    let (Some(start), Some(limit), Some(step)) = bounds else { return one(dtype, Some(ranked(1))) };
    let count = steps(&start, &limit, &step);
    let known = as_constant(&count).filter(|n| *n <= MAX_ELEMENTS as i64);
    let elements = known.map(|n| (0..n).map(|i| start.clone() + multiply(&constant(i), &step)).collect());
    vec![fact(dtype, Some(vec![count])).with_elements(elements)]
}

/// `max(ceil((limit - start) / step), 0)`. A symbolic range is assumed not to be empty.
fn steps(start: &Dim, limit: &Dim, step: &Dim) -> Dim {
    let Some(step) = as_constant(step) else { return Dim::Unknown };
    let (span, step) = match step {
        1.. => (limit.clone() - start.clone(), step),
        _ => (start.clone() - limit.clone(), step.saturating_neg()),
    };
    match as_constant(&span) {
        Some(span) => divide_up(&constant(span.max(0)), step),
        None => divide_up(&span, step),
    }
}

fn random(cx: &Context) -> Facts {
    let shape = cx.ints("shape").map(|dims| dims.iter().copied().map(constant).collect());
    one(cx.dtype_attribute("dtype").or(Some(DType::Float32)), shape)
}

fn multinomial(cx: &Context) -> Facts {
    let samples = constant(cx.int("sample_size", 1));
    one(cx.dtype_attribute("dtype").or(Some(DType::Int32)), Some(vec![cx.dim(0, 0), samples]))
}

fn window(cx: &Context) -> Facts {
    let length = cx.scalar(0).unwrap_or(Dim::Unknown);
    one(cx.dtype_attribute("output_datatype").or(Some(DType::Float32)), Some(vec![length]))
}
