//! Cost of attention: the products of queries with keys, and of the resulting weights with values.

use super::sizes::{Sizes, times};

/// The sizes that determine the cost of an attention.
struct Extent {
    /// Batch times query heads times query length.
    rows: u64,
    /// Keys that each query attends to.
    keys: u64,
    /// Width of a key plus width of a value.
    widths: u64,
    /// Operations of fused projections.
    projection: u64,
}

/// `2 * rows * keys * widths`, plus fused projections. A local window limits the keys.
pub(super) fn flops(s: &Sizes) -> Option<u64> {
    let extent = extent(s)?;
    let keys = s.attribute("local_window_size").map_or(extent.keys, |window| extent.keys.min(window));
    times(&[2, extent.rows, keys, extent.widths])?.checked_add(extent.projection)
}

/// Bytes of the scores that CPU kernels hold at once: a float for each query of each head and each key.
pub(super) fn scores(s: &Sizes) -> Option<u64> {
    let Extent { rows, keys, .. } = extent(s)?;
    times(&[size_of::<f32>() as u64, rows, keys])
}

fn extent(s: &Sizes) -> Option<Extent> {
    let standard = s.node.domain != "com.microsoft";
    match s.node.op_type.as_str() {
        "Attention" if standard => plain(s),
        "GroupQueryAttention" | "SparseAttention" => grouped(s),
        "MultiHeadAttention" => multi_head(s, 6),
        "DecoderMaskedMultiHeadAttention" => multi_head(s, 5),
        "PagedAttention" | "SparsePagedAttention" => paged(s),
        "PackedMultiHeadAttention" => packed(s),
        _ => projected(s),
    }
}

fn plain(s: &Sizes) -> Option<Extent> {
    let flat = s.shape(0)?.len() == 3;
    let length = if flat { 1 } else { 2 };
    let heads = if flat { s.attribute("q_num_heads")? } else { s.dim(0, 1)? };
    let kv_heads = if flat { s.attribute("kv_num_heads")? } else { 1 };
    let width = |at| s.dim(at, -1)?.checked_div(kv_heads);
    let past = if s.has(4) { s.dim(4, 2)? } else { 0 };
    Some(Extent {
        rows: times(&[s.dim(0, 0)?, heads, s.dim(0, length)?])?,
        keys: s.output_dim(1, 2).or_else(|| past.checked_add(s.dim(1, length)?))?,
        widths: width(1)?.checked_add(width(2)?)?,
        projection: 0,
    })
}

fn grouped(s: &Sizes) -> Option<Extent> {
    let heads = s.attribute("num_heads")?;
    let packed = heads.checked_add(s.attribute("kv_num_heads")?.checked_mul(2)?)?;
    let width = s.dim(0, -1)?.checked_div(if s.has(1) { heads } else { packed })?;
    let past = if s.has(3) { s.dim(3, 2)? } else { 0 };
    let new = if s.has(1) { s.dim(1, 1)? } else { s.dim(0, 1)? };
    Some(Extent {
        rows: times(&[s.dim(0, 0)?, heads, s.dim(0, 1)?])?,
        keys: s.output_dim(1, 2).or_else(|| past.checked_add(new))?,
        widths: width.checked_mul(2)?,
        projection: 0,
    })
}

fn multi_head(s: &Sizes, past: usize) -> Option<Extent> {
    let heads = s.attribute("num_heads")?;
    let value = s.output_dim(0, -1)?.checked_div(heads)?;
    let key = if s.has(1) && s.shape(0)?.len() == 3 { s.dim(0, -1)?.checked_div(heads)? } else { value };
    let (batch, queries) = (s.dim(0, 0)?, s.dim(0, 1)?);
    let new = match s.shape(1).map(Vec::len) {
        Some(4) => s.dim(1, 2)?,
        Some(_) => s.dim(1, 1)?,
        None => queries,
    };
    let before = if s.has(past) { s.dim(past, 2)? } else { 0 };
    Some(Extent {
        rows: times(&[batch, heads, queries])?,
        keys: s.output_dim(1, 2).or_else(|| before.checked_add(new))?,
        widths: key.checked_add(value)?,
        projection: 0,
    })
}

/// The lengths of the sequences are in a tensor, so the number of keys is taken from the symbol
/// `total_sequence_length`.
fn paged(s: &Sizes) -> Option<Extent> {
    let heads = s.attribute("num_heads")?;
    let packed = heads.checked_add(s.attribute("kv_num_heads")?.checked_mul(2)?)?;
    let width = s.dim(0, -1)?.checked_div(if s.has(1) { heads } else { packed })?;
    let value = s.attribute("v_head_size").unwrap_or(width);
    Some(Extent {
        rows: times(&[heads, s.dim(0, 0)?])?,
        keys: *s.symbols.get("total_sequence_length")?,
        widths: width.checked_add(value)?,
        projection: 0,
    })
}

fn packed(s: &Sizes) -> Option<Extent> {
    let heads = s.attribute("num_heads")?;
    let width = s.output_dim(0, -1)?.checked_div(heads)?;
    Some(Extent {
        rows: times(&[heads, s.dim(0, 0)?])?,
        keys: s.dim(4, 1)?,
        widths: width.checked_mul(2)?,
        projection: 0,
    })
}

/// With fused projections of query, key and value: input `[.., W]`, weights `[W, 3 * hidden]`.
fn projected(s: &Sizes) -> Option<Extent> {
    let heads = s.attribute("num_heads")?;
    let width = s.output_dim(0, -1)?.checked_div(heads)?;
    let projection = times(&[2, s.count(0)?, s.dim(1, 1)?])?;
    if s.node.op_type == "PackedAttention" {
        return Some(Extent {
            rows: times(&[heads, s.dim(0, 0)?])?,
            keys: s.dim(3, 1)?,
            widths: width.checked_mul(2)?,
            projection,
        });
    }
    let past = if s.node.op_type == "QAttention" { 8 } else { 4 };
    let before = if s.has(past) { s.dim(past, 3)? } else { 0 };
    Some(Extent {
        rows: times(&[s.dim(0, 0)?, heads, s.dim(0, 1)?])?,
        keys: s.output_dim(1, 3).or_else(|| before.checked_add(s.dim(0, 1)?))?,
        widths: width.checked_mul(2)?,
        projection,
    })
}

/// Per token and head, one product writes the state and another reads it. A delta rule adds a third one for the
/// correction.
pub(super) fn linear(s: &Sizes) -> Option<u64> {
    let delta = match s.node.attributes.get("update_rule") {
        Some(crate::Attribute::String(rule)) => rule.ends_with(b"delta"),
        _ => true,
    };
    let products = if delta { 3 } else { 2 };
    let tokens = if s.node.op_type == "GatedDeltaNet" {
        s.output(0)?.checked_div(s.output_dim(0, -1)?)?.checked_div(s.output_dim(0, -2)?)?
    } else {
        times(&[s.dim(0, 0)?, s.dim(0, 1)?])?
    };
    let state = times(&[s.output_dim(1, -3)?, s.output_dim(1, -2)?, s.output_dim(1, -1)?])?;
    times(&[2, products, tokens, state])
}
