//! Rules for convolution, pooling and resampling: spatial sizes follow from kernel, stride and padding.

use crate::infer::context::{Context, Rule, wrap_all};
use crate::infer::fact::{Facts, fact, one, ranked};
use crate::infer::poly::{as_constant, constant, divide_down, divide_up, multiply, sum};
use hpp_schema::{DType, Dim, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "Conv" | "DeformConv" => conv,
        "ConvTranspose" => conv_transpose,
        "AveragePool" => pool,
        "MaxPool" => max_pool,
        "GlobalAveragePool" | "GlobalMaxPool" => global_pool,
        "Resize" | "Upsample" => resize,
        "GridSample" => grid_sample,
        "RoiAlign" => regions,
        "Col2Im" | "DFT" | "STFT" => same_type,
        _ => return None,
    })
}

fn conv(cx: &Context) -> Facts {
    one(cx.dtype(0), conv_shape(cx, 0, 1))
}

/// `[N, M, spatial..]`, the shape of a convolution of input `x` with weights `w`.
pub(super) fn conv_shape(cx: &Context, x: usize, w: usize) -> Option<Shape> {
    let input = cx.shape(x)?;
    let kernel: Shape = match (cx.ints("kernel_shape"), cx.shape(w)) {
        (Some(sizes), _) => sizes.iter().copied().map(constant).collect(),
        (None, Some(weight)) => weight.get(2..)?.to_vec(),
        (None, None) => ranked(input.len().checked_sub(2)?),
    };
    let window = Window::of(cx, kernel, input.len().checked_sub(2)?)?;
    Some([&[input[0].clone(), cx.dim(w, 0)], window.over(&input[2..]).as_slice()].concat())
}

/// A sliding window: one entry per spatial axis.
struct Window {
    kernel: Shape,
    strides: Vec<i64>,
    dilations: Vec<i64>,
    padding: Padding,
    round_up: bool,
}

enum Padding {
    Sizes(Vec<i64>),
    Same,
}

impl Window {
    fn of(cx: &Context, kernel: Shape, axes: usize) -> Option<Window> {
        let per_axis = |name| cx.ints(name).map_or_else(|| vec![1; axes], <[i64]>::to_vec);
        let (strides, dilations) = (per_axis("strides"), per_axis("dilations"));
        let padding = match cx.text("auto_pad") {
            Some("SAME_UPPER" | "SAME_LOWER") => Padding::Same,
            Some("VALID") => Padding::Sizes(vec![0; 2 * axes]),
            _ => Padding::Sizes(cx.ints("pads").map_or_else(|| vec![0; 2 * axes], <[i64]>::to_vec)),
        };
        let padded = matches!(&padding, Padding::Sizes(sizes) if sizes.len() != 2 * axes);
        let fits = kernel.len() == axes && strides.len() == axes && dilations.len() == axes && !padded;
        let round_up = cx.int("ceil_mode", 0) != 0;
        fits.then_some(Window { kernel, strides, dilations, padding, round_up })
    }

    fn over(&self, spatial: &[Dim]) -> Shape {
        (0..spatial.len()).map(|i| self.along(&spatial[i], i)).collect()
    }

    fn along(&self, dim: &Dim, i: usize) -> Dim {
        let Padding::Sizes(pads) = &self.padding else { return divide_up(dim, self.strides[i]) };
        let reach = multiply(&(self.kernel[i].clone() - constant(1)), &constant(self.dilations[i])) + constant(1);
        let both = constant(pads[i]) + constant(pads[i + self.kernel.len()]);
        let room = dim.clone() + both - reach;
        let stride = self.strides[i];
        if !self.round_up || stride == 1 {
            return divide_down(&room, stride) + constant(1);
        }
        let (Some(size), Some(room)) = (as_constant(dim), as_constant(&room)) else { return Dim::Unknown };
        constant(rounded_up(size.saturating_add(pads[i]), room, stride))
    }
}

/// Number of window steps if the last window may extend past the end but must not begin past the data.
fn rounded_up(data: i64, room: i64, stride: i64) -> i64 {
    let Some(whole) = room.checked_div(stride) else { return -1 };
    let extends = room % stride != 0 && whole.saturating_add(1).saturating_mul(stride) < data;
    whole.saturating_add(if extends { 2 } else { 1 })
}

fn pool_shape(cx: &Context) -> Option<Shape> {
    let input = cx.shape(0)?;
    let kernel = cx.ints("kernel_shape")?.iter().copied().map(constant).collect();
    let window = Window::of(cx, kernel, input.len().checked_sub(2)?)?;
    Some([&input[..2], window.over(&input[2..]).as_slice()].concat())
}

fn pool(cx: &Context) -> Facts {
    one(cx.dtype(0), pool_shape(cx))
}

fn max_pool(cx: &Context) -> Facts {
    let shape = pool_shape(cx);
    vec![fact(cx.dtype(0), shape.clone()), fact(Some(DType::Int64), shape)]
}

fn global_pool(cx: &Context) -> Facts {
    let shape = cx.shape_of(0).map(|mut shape| {
        shape.iter_mut().skip(2).for_each(|dim| *dim = constant(1));
        shape
    });
    one(cx.dtype(0), shape)
}

fn conv_transpose(cx: &Context) -> Facts {
    let shape = || {
        let (input, weight) = (cx.shape(0)?, cx.shape(1)?);
        let axes = input.len().checked_sub(2)?;
        let window = Window::of(cx, weight.get(2..)?.to_vec(), axes)?;
        let channels = multiply(weight.get(1)?, &constant(cx.int("group", 1)));
        let spatial = match cx.ints("output_shape") {
            Some(sizes) if sizes.len() == axes => sizes.iter().copied().map(constant).collect(),
            _ => window.spread(&input[2..], cx.ints("output_padding").unwrap_or(&[])),
        };
        Some([&[input[0].clone(), channels], spatial.as_slice()].concat())
    };
    one(cx.dtype(0), shape())
}

impl Window {
    /// The spatial sizes of a transposed convolution: the inverse of `over`.
    fn spread(&self, spatial: &[Dim], extra: &[i64]) -> Shape {
        let along = |i: usize| {
            let stride = constant(self.strides[i]);
            let Padding::Sizes(pads) = &self.padding else { return multiply(&spatial[i], &stride) };
            let reach = multiply(&(self.kernel[i].clone() - constant(1)), &constant(self.dilations[i])) + constant(1);
            let both = constant(pads[i]) + constant(pads[i + self.kernel.len()]);
            let steps = multiply(&stride, &(spatial[i].clone() - constant(1)));
            sum([&steps, &reach, &constant(extra.get(i).copied().unwrap_or(0))]) - both
        };
        (0..spatial.len()).map(along).collect()
    }
}

/// Only sizes that are given as sizes are known; scales are fractions.
fn resize(cx: &Context) -> Facts {
    let shape = cx.shape_of(0).map(|mut shape| {
        let axes = match cx.ints("axes") {
            Some(axes) => wrap_all(axes, shape.len()).unwrap_or_default(),
            None => (0..shape.len()).collect(),
        };
        let stretched = cx.text("keep_aspect_ratio_policy").is_some_and(|policy| policy != "stretch");
        let sizes = cx.elements(3).filter(|sizes| sizes.len() == axes.len() && !stretched);
        for (i, axis) in axes.into_iter().enumerate() {
            shape[axis] = sizes.as_ref().map_or(Dim::Unknown, |sizes| sizes[i].clone());
        }
        shape
    });
    one(cx.dtype(0), shape)
}

fn grid_sample(cx: &Context) -> Facts {
    let shape = || {
        let (input, grid) = (cx.shape(0)?, cx.shape(1)?);
        let spatial = grid.get(1..grid.len().checked_sub(1)?)?;
        Some([input.get(..2)?, spatial].concat())
    };
    one(cx.dtype(0), shape())
}

/// `[regions, C, height, width]`.
fn regions(cx: &Context) -> Facts {
    let size = |name: &str| constant(cx.int(name, 1));
    one(cx.dtype(0), Some(vec![cx.dim(1, 0), cx.dim(0, 1), size("output_height"), size("output_width")]))
}

/// The type of input 0, without a shape.
fn same_type(cx: &Context) -> Facts {
    one(cx.dtype(0), None)
}
