//! Divides matrix products with weights: by columns where every shard has the whole input, by rows where each shard has a part of it.

use super::analyse::{Analysis, Divided, unchanged};
use super::{InputDivision, NodeDivision, RowsReason, ShardLayout, WeightSlice};
use crate::{Node, ValueId};
use hpp_schema::DType;

/// The direction in which a product is divided.
enum Way {
    /// By columns. These are the sizes of their sections.
    Columns(Vec<u64>),
    /// By rows. These are the sizes of their sections.
    Rows(Vec<u64>),
}

impl Way {
    fn layout(&self) -> ShardLayout {
        match self {
            Way::Columns(sections) => ShardLayout::Columns(sections.clone()),
            Way::Rows(_) => ShardLayout::Partial,
        }
    }

    /// The division of a node before its inputs are divided.
    fn division(&self, node: &Node) -> NodeDivision {
        NodeDivision { is_partial: matches!(self, Way::Rows(_)), ..unchanged(node) }
    }
}

/// Sizes of a quantized matrix with `N` columns of `K` rows, in quantization blocks along the rows.
struct BlockSizes {
    rows: u64,
    columns: u64,
    bits: u64,
    block_size: u64,
}

impl BlockSizes {
    fn of(node: &Node) -> Option<Self> {
        let positive = |value: Option<i64>| value.and_then(|value| u64::try_from(value).ok()).filter(|size| *size > 0);
        let [rows, columns, block_size] = ["K", "N", "block_size"].map(|name| positive(node.int(name)));
        let bits = positive(Some(node.int("bits").unwrap_or(4))).filter(|bits| *bits <= 8)?;
        let sizes = BlockSizes { rows: rows?, columns: columns?, bits, block_size: block_size? };
        // Refused if the sizes are so large that products of them could overflow 64 bits.
        sizes.rows.checked_mul(sizes.columns)?.checked_mul(64)?;
        Some(sizes)
    }

    fn blocks(&self) -> u64 {
        self.rows.div_ceil(self.block_size)
    }

    /// Bytes of the zero points of a column, if they are packed.
    fn zero_point_bytes(&self) -> u64 {
        (self.blocks() * self.bits).div_ceil(8)
    }
}

impl Analysis<'_> {
    /// Divides a product with a weight. `None` if no shard has only a part of an input and no input is a weight.
    pub(super) fn product(&self, node: &Node) -> Result<Option<(NodeDivision, Vec<ShardLayout>)>, RowsReason> {
        let input = |at: usize| node.inputs.get(at).copied().flatten();
        let weights = &self.segmentation.weights;
        let (Some(a), Some(b)) = (input(0), input(1)) else { return Ok(None) };
        if self.first_part(node).is_none() && !weights.is_weight_like(self.graph, b) {
            return Ok(None);
        }
        if !weights.is_weight_like(self.graph, b) || weights.is_weight_like(self.graph, a) {
            return Err(RowsReason::Form("multiplies a part of a value with what is not a weight"));
        }
        self.stored(b)?;
        let divided = match node.op_type.as_str() {
            "MatMulNBits" => self.quantized(node, a),
            _ => self.plain(node, a, b),
        };
        divided.map(Some)
    }

    /// The direction of the division: by rows if shards have parts of the input and its last axis has `rows` elements; by columns if they have all
    /// of it.
    fn way(&self, node: &Node, input: ValueId, rows: u64, columns: u64) -> Result<Way, RowsReason> {
        match self.seen(input) {
            ShardLayout::Columns(sections) if sections.iter().sum::<u64>() == rows => Ok(Way::Rows(sections.clone())),
            ShardLayout::Replicated => {
                let output = node.outputs.first().copied().flatten();
                let sections = output.map(|output| self.sections(output, columns)).transpose()?;
                sections.map(Way::Columns).ok_or(RowsReason::Form("has no result"))
            }
            _ => Err(RowsReason::Operator { value: self.name(input) }),
        }
    }

    /// Divides `MatMul`, `FusedMatMul` and `Gemm`. The weight is `[rows, columns]`, or transposed.
    fn plain(&self, node: &Node, input: ValueId, weight: ValueId) -> Divided {
        let is_gemm = node.op_type == "Gemm";
        let others = if is_gemm { vec!["transA"] } else { vec!["transA", "transBatchA", "transBatchB"] };
        if others.iter().any(|name| node.int(name).unwrap_or(0) != 0) {
            return Err(RowsReason::Form("multiplies transposed values"));
        }
        let is_transposed = node.op_type != "MatMul" && node.int("transB").unwrap_or(0) != 0;
        let sizes = self.sizes(weight).filter(|sizes| sizes.len() == 2);
        let sizes = sizes.ok_or(RowsReason::Form("multiplies with a weight that has other than two dimensions"))?;
        let (rows, columns) = if is_transposed { (sizes[1], sizes[0]) } else { (sizes[0], sizes[1]) };
        let way = self.way(node, input, rows, columns)?;
        let (is_by_rows, sections) = match &way {
            Way::Columns(sections) => (false, sections),
            Way::Rows(sections) => (true, sections),
        };
        // A range of the tensor's first axis is contiguous. A range of the second axis is in every row.
        let slice = match is_by_rows != is_transposed {
            true => WeightSlice { rows: 1, sections: sections.clone(), axis: 0 },
            false => WeightSlice { rows: sizes[0], sections: sections.clone(), axis: 1 },
        };
        let mut division = way.division(node);
        division.inputs[1] = InputDivision::Slice(self.checked(weight, slice)?);
        if let Some(bias) = node.inputs.get(2).copied().flatten() {
            division.inputs[2] = self.bias(bias, &way)?;
        }
        Ok((division, vec![way.layout()]))
    }

    /// Divides a vector that is added to the result: by columns, each shard adds its slice; by rows, only shard 0 adds the vector.
    fn bias(&self, bias: ValueId, way: &Way) -> Result<InputDivision, RowsReason> {
        self.stored(bias)?;
        let sizes = self.sizes(bias).unwrap_or_default();
        let Way::Columns(sections) = way else { return Ok(InputDivision::FirstOnly) };
        if sizes.iter().product::<u64>() == 1 {
            return Ok(InputDivision::Own);
        }
        let (axis, columns) = (sizes.len().saturating_sub(1), sections.iter().sum::<u64>());
        if sizes.iter().product::<u64>() != columns || sizes.get(axis) != Some(&columns) {
            return Err(RowsReason::Form("adds what is not one number for each column"));
        }
        let slice = WeightSlice { rows: 1, sections: sections.clone(), axis };
        Ok(InputDivision::Slice(self.checked(bias, slice)?))
    }

    /// Divides `MatMulNBits`. The numbers are `[columns, blocks, bytes of a block]`, the scales `[columns, blocks]`, the zero points like the
    /// scales or packed. Exporters may merge dimensions.
    fn quantized(&self, node: &Node, input: ValueId) -> Divided {
        let unknown = RowsReason::Form("has quantized weights in a form that this build does not know how to divide");
        let sizes = BlockSizes::of(node).ok_or(unknown.clone())?;
        let at = |at: usize| node.inputs.get(at).copied().flatten();
        if at(4).is_some() || node.int("weight_prepacked").unwrap_or(0) != 0 || node.inputs.len() > 6 {
            return Err(unknown);
        }
        let way = self.way(node, input, sizes.rows, sizes.columns)?;
        let mut division = way.division(node);
        let shards = self.shards as i64;
        match &way {
            Way::Columns(sections) => {
                for (at, value) in (1..4).filter_map(|index| Some((index, at(index)?))) {
                    let slice = WeightSlice { rows: 1, sections: sections.clone(), axis: 0 };
                    division.inputs[at] = InputDivision::Slice(self.checked(value, slice)?);
                }
                division.attributes.push(("N", sizes.columns as i64 / shards));
            }
            Way::Rows(sections) => {
                let blocks = self.sections_in_blocks(&sizes, sections)?;
                for (at, value) in (1..3).filter_map(|index| Some((index, at(index)?))) {
                    division.inputs[at] = InputDivision::Slice(self.of_columns(value, &sizes, blocks.clone())?);
                }
                if let Some(value) = at(3) {
                    let units = self.zero_point_sections(value, &sizes, &blocks)?;
                    division.inputs[3] = InputDivision::Slice(self.of_columns(value, &sizes, units)?);
                }
                division.attributes.push(("K", sizes.rows as i64 / shards));
            }
        }
        if let Some(bias) = at(5) {
            division.inputs[5] = self.bias(bias, &way)?;
        }
        Ok((division, vec![way.layout()]))
    }

    /// A slice that has some of the quantization blocks of every column.
    fn of_columns(&self, value: ValueId, sizes: &BlockSizes, sections: Vec<u64>) -> Result<WeightSlice, RowsReason> {
        let rank = self.graph.value(value).shape.as_ref().map_or(0, Vec::len);
        self.checked(value, WeightSlice { rows: sizes.columns, sections, axis: usize::from(rank > 1) })
    }

    /// Converts sections of rows to numbers of quantization blocks. Refuses a shard that would get a part of a block.
    fn sections_in_blocks(&self, sizes: &BlockSizes, sections: &[u64]) -> Result<Vec<u64>, RowsReason> {
        let in_blocks = |rows: &u64| {
            let of_shard = rows / self.shards;
            let is_whole = of_shard.is_multiple_of(sizes.block_size);
            let refused = RowsReason::Blocks { block_size: sizes.block_size, rows: of_shard };
            if is_whole { Ok(rows / sizes.block_size) } else { Err(refused) }
        };
        sections.iter().map(in_blocks).collect()
    }

    /// Converts sections in blocks to units of the zero points, which are bytes if zero points are packed.
    fn zero_point_sections(&self, value: ValueId, sizes: &BlockSizes, blocks: &[u64]) -> Result<Vec<u64>, RowsReason> {
        let elements: u64 = self.sizes(value).unwrap_or_default().iter().product();
        let is_packed =
            self.graph.value(value).dtype == Some(DType::Uint8) && elements == sizes.columns * sizes.zero_point_bytes();
        if !is_packed {
            return Ok(blocks.to_vec());
        }
        let in_bytes = |blocks: &u64| {
            let of_shard = blocks / self.shards;
            let is_whole = (of_shard * sizes.bits).is_multiple_of(8);
            let refused = RowsReason::ZeroPoints { bits: sizes.bits, blocks: of_shard };
            if is_whole { Ok(blocks * sizes.bits / 8) } else { Err(refused) }
        };
        blocks.iter().map(in_bytes).collect()
    }
}
