//! Rules for attention operators: output shapes from query length and value width, and caches that grow or keep their
//! size.

use crate::infer::context::{Context, Rule};
use crate::infer::fact::{Fact, Facts, fact};
use crate::infer::poly::{constant, divide, multiply};
use hpp_schema::{DType, Dim, Shape};

/// The standard operators (operator set 23 and later).
pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "Attention" => attention,
        "RotaryEmbedding" => super::elementwise::keep,
        "LinearAttention" => linear,
        "CausalConvWithState" => conv_with_state,
        _ => return None,
    })
}

/// The `com.microsoft` operators.
pub(super) fn contrib(op: &str) -> Option<Rule> {
    Some(match op {
        "GroupQueryAttention" => grouped,
        "SparseAttention" => sparse,
        "MultiHeadAttention" | "DecoderMaskedMultiHeadAttention" => multi_head,
        "Attention" | "QAttention" | "DecoderMaskedSelfAttention" => projected,
        "PagedAttention" | "SparsePagedAttention" => paged,
        "PackedAttention" | "PackedMultiHeadAttention" => packed,
        "LinearAttention" => linear,
        "GatedDeltaNet" => delta_net,
        "CausalConvWithState" => conv_with_state,
        "VarlenCausalConvWithState" => conv_packed,
        "LinearAttentionGate" => gate,
        _ => return None,
    })
}

/// A cache `[batch, heads, length, width]` with `new` more tokens along its third axis.
fn grown(cx: &Context, past: usize, new: &Dim) -> Option<Shape> {
    let mut cache = cx.shape_of(past).filter(|shape| shape.len() == 4)?;
    cache[2] = cache[2].clone() + new.clone();
    Some(cache)
}

/// Query, key and value are `[batch, heads, length, width]` or `[batch, length, heads * width]`.
fn attention(cx: &Context) -> Facts {
    let Some(query) = cx.shape(0) else { return (0..4).map(|at| fact(attention_type(cx, at), None)).collect() };
    let flat = query.len() == 3;
    let (q_heads, kv_heads) =
        if flat { (cx.size("q_num_heads"), cx.size("kv_num_heads")) } else { (cx.dim(0, 1), cx.dim(1, 1)) };
    let split = |at: usize| if flat { divide(&cx.dim(at, 2), &kv_heads) } else { cx.dim(at, 3) };
    let new = if flat { cx.dim(1, 1) } else { cx.dim(1, 2) };
    let queries = if flat { cx.dim(0, 1) } else { cx.dim(0, 2) };
    let total = if cx.input(4).is_some() { cx.dim(4, 2) + new } else { new };
    let out = if flat {
        vec![query[0].clone(), queries.clone(), multiply(&q_heads, &split(2))]
    } else {
        vec![cx.dim(0, 0), q_heads.clone(), queries.clone(), split(2)]
    };
    let cache = |at: usize| vec![cx.dim(0, 0), kv_heads.clone(), total.clone(), split(at)];
    let scores = vec![cx.dim(0, 0), q_heads.clone(), queries, total.clone()];
    let shapes = [out, cache(1), cache(2), scores];
    shapes.into_iter().enumerate().map(|(at, shape)| fact(attention_type(cx, at), Some(shape))).collect()
}

fn attention_type(cx: &Context, output: usize) -> Option<DType> {
    if output == 2 { cx.dtype(2) } else { cx.dtype(0) }
}

/// Width of one head. If `packed`, keys and values follow the query in the same tensor.
fn head_width(cx: &Context, packed: bool) -> Dim {
    let heads = cx.size("num_heads");
    let all = if packed { heads + multiply(&constant(2), &cx.size("kv_num_heads")) } else { heads };
    divide(&cx.dim(0, -1), &all)
}

/// Shape of the output: that of the query, without keys and values packed behind it.
fn grouped_output(cx: &Context) -> Option<Shape> {
    let mut shape = cx.shape_of(0)?;
    if cx.input(1).is_none() {
        *shape.last_mut()? = multiply(&cx.size("num_heads"), &head_width(cx, true));
    }
    Some(shape)
}

/// Caches grow by the new keys, except sliding-window caches, which keep their size.
fn grouped(cx: &Context) -> Facts {
    let new = if cx.input(1).is_some() { cx.dim(1, 1) } else { cx.dim(0, 1) };
    let cache = |at: usize| {
        let dtype = cx.dtype(at).or(cx.dtype(0));
        let shape = match cx.input(at) {
            Some(_) if cx.int("sliding_window_cache", 0) != 0 => cx.shape_of(at),
            Some(_) => grown(cx, at, &new),
            None => {
                let width = head_width(cx, cx.input(1).is_none());
                cx.shape(0).map(|_| vec![cx.dim(0, 0), cx.size("kv_num_heads"), new.clone(), width])
            }
        };
        fact(dtype, shape)
    };
    let scores = vec![cx.dim(0, 0), cx.size("num_heads"), cx.dim(0, 1), Dim::Unknown];
    vec![fact(cx.dtype(0), grouped_output(cx)), cache(3), cache(4), fact(cx.dtype(0), Some(scores))]
}

fn sparse(cx: &Context) -> Facts {
    vec![fact(cx.dtype(0), grouped_output(cx)), cx.same(3), cx.same(4)]
}

/// Past caches are inputs 6 and 7 of `MultiHeadAttention`, 5 and 6 of the decoder variant. A key or value of rank 4 is
/// itself a cache.
fn multi_head(cx: &Context) -> Facts {
    let past = if cx.node.op_type == "MultiHeadAttention" { 6 } else { 5 };
    let heads = cx.size("num_heads");
    let width = match cx.shape(2).map(Vec::as_slice) {
        Some([_, _, width]) => width.clone(),
        Some([_, heads, _, width]) => multiply(heads, width),
        _ => match cx.shape(0).map(Vec::as_slice) {
            Some([_, _, heads, _, width]) => multiply(heads, width),
            Some([_, _, width]) if cx.input(1).is_some() => width.clone(),
            _ => Dim::Unknown,
        },
    };
    let output = cx.shape(0).map(|_| vec![cx.dim(0, 0), cx.dim(0, 1), width.clone()]);
    let new = match cx.shape(1).map(Vec::len) {
        Some(4) => cx.dim(1, 2),
        Some(_) => cx.dim(1, 1),
        None if cx.input(1).is_none() => cx.dim(0, 1),
        None => Dim::Unknown,
    };
    let shared = cx.int("past_present_share_buffer", 0) != 0;
    let cache = |at: usize, whole: usize| {
        let shape = match cx.input(at) {
            Some(_) if shared || cx.shape(1).is_some_and(|key| key.len() == 4) => cx.shape_of(at),
            Some(_) => grown(cx, at, &new),
            None => cx.shape(whole).map(|shape| match shape.as_slice() {
                [batch, length, width] => vec![batch.clone(), heads.clone(), length.clone(), divide(width, &heads)],
                _ => shape.clone(),
            }),
        };
        fact(cx.dtype(0), shape)
    };
    let scores = vec![cx.dim(0, 0), heads.clone(), cx.dim(0, 1), Dim::Unknown];
    vec![fact(cx.dtype(0), output), cache(past, 1), cache(past + 1, 2), fact(cx.dtype(0), Some(scores))]
}

/// With fused input projections: weights are `[width, q + k + v]`, the cache is `[2, batch, heads, length, width]`.
fn projected(cx: &Context) -> Facts {
    let quantized = cx.node.op_type == "QAttention";
    let (dtype, past) = if quantized { (cx.dtype(3), 8) } else { (cx.dtype(0), 4) };
    let width = match cx.ints("qkv_hidden_sizes") {
        Some([_, _, value]) => constant(*value),
        _ => divide(&cx.dim(1, 1), &constant(3)),
    };
    let output = cx.shape(0).map(|_| vec![cx.dim(0, 0), cx.dim(0, 1), width.clone()]);
    let heads = cx.size("num_heads");
    let new = cx.dim(0, 1);
    let present = match cx.input(past) {
        Some(_) if cx.int("past_present_share_buffer", 0) != 0 => cx.shape_of(past),
        Some(_) => cx.shape_of(past).filter(|shape| shape.len() == 5).map(|mut shape| {
            shape[3] = shape[3].clone() + new;
            shape
        }),
        None => Some(vec![constant(2), cx.dim(0, 0), heads.clone(), new, divide(&width, &heads)]),
    };
    vec![fact(dtype, output), fact(dtype, present)]
}

/// The query holds the tokens of all sequences as `[tokens, width]`; paged caches are updated in place.
fn paged(cx: &Context) -> Facts {
    let output = match cx.size("v_head_size") {
        Dim::Unknown => grouped_output(cx),
        width => cx.shape(0).map(|_| vec![cx.dim(0, 0), multiply(&cx.size("num_heads"), &width)]),
    };
    vec![fact(cx.dtype(0), output), cx.same(3), cx.same(4)]
}

fn packed(cx: &Context) -> Facts {
    let width = if cx.node.op_type == "PackedAttention" {
        match cx.ints("qkv_hidden_sizes") {
            Some([_, _, value]) => constant(*value),
            _ => divide(&cx.dim(1, 1), &constant(3)),
        }
    } else {
        match cx.shape(0).map(Vec::as_slice) {
            Some([_, heads, _, width]) => multiply(heads, width),
            _ => cx.dim(2, 1),
        }
    };
    vec![fact(cx.dtype(0), cx.shape(0).map(|_| vec![cx.dim(0, 0), width]))]
}

/// The state is `[batch, kv_heads, key width, value width]`, with a leading window axis if it keeps several states.
fn linear(cx: &Context) -> Facts {
    let (q_heads, kv_heads) = (cx.int("q_num_heads", 0), cx.int("kv_num_heads", 0));
    let heads = |count: i64| if count > 0 { constant(count) } else { Dim::Unknown };
    let value_width = divide(&cx.dim(2, 2), &heads(kv_heads));
    let key_width = divide(&cx.dim(1, 2), &heads(kv_heads));
    let output = vec![cx.dim(0, 0), cx.dim(0, 1), multiply(&heads(q_heads.max(kv_heads)), &value_width)];
    let state = || {
        let one = [cx.dim(0, 0), heads(kv_heads), key_width, value_width];
        let window = Some(cx.int("state_window", 0)).filter(|window| *window > 0).map(constant);
        window.into_iter().chain(one).collect()
    };
    let known = cx.shape(0).is_some();
    let present =
        Fact { shape: cx.shape_of(3).or_else(|| known.then(state)), ..fact(cx.dtype(3).or(cx.dtype(0)), None) };
    vec![fact(cx.dtype(0), known.then_some(output)), present]
}

/// Tokens come first. The state is float32 for any type of activations.
fn delta_net(cx: &Context) -> Facts {
    let output = cx.shape_of(2).filter(|_| cx.input(1).is_some());
    let float = Some(DType::Float32);
    vec![fact(cx.dtype(0), output), fact(float, cx.shape_of(6)), fact(float, None)]
}

/// The state holds the last `(kernel - 1) * dilation` positions.
fn conv_with_state(cx: &Context) -> Facts {
    let state = || {
        let plain = cx.int("ndim", 1) == 1 && cx.int("channels_last", 0) == 0 && cx.int("state_window", 0) == 0;
        let [batch, channels, _] = cx.shape(0)?.as_slice() else { return None };
        let length = multiply(&(cx.dim(1, 2) - constant(1)), &constant(cx.int("dilation", 1)));
        plain.then(|| vec![batch.clone(), channels.clone(), length])
    };
    vec![cx.same(0), fact(cx.dtype(0), cx.shape_of(3).or_else(state))]
}

fn conv_packed(cx: &Context) -> Facts {
    vec![cx.same(0), cx.same(4), fact(cx.dtype(0), None)]
}

fn gate(cx: &Context) -> Facts {
    vec![cx.same(0), cx.same(0)]
}
