//! The shards' parts of weights: where their bytes come from, their names, and their places in the virtual file.

use super::RowSplitError;
use crate::flatten::Fresh;
use crate::gather::{Gather, Range};
use crate::model::Model;
use crate::proto::TensorProto;
use crate::store::{Layout, refer};
use crate::tensor;
use crate::virtual_file::{VirtualFile, VirtualFiles};
use crate::weight_source::WeightSource;
use crate::weights::{FileRange, ROWS_FILE, Storage};
use hpp_graph::WeightSlice;
use hpp_schema::DType;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

/// The part of a weight that belongs to a shard.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Part {
    /// Index of the initializer.
    source: usize,
    slice: WeightSlice,
    shard: usize,
}

/// The new initializers that copies of nodes read instead of the model's own.
pub(super) struct PartWeights<'a> {
    model: &'a Model,
    virtual_files: &'a VirtualFiles,
    shards: usize,
    /// Indices of initializers by name.
    sources: HashMap<&'a str, usize>,
    names: HashMap<Part, String>,
    lists: HashMap<(DType, Vec<i64>), String>,
    layout: Layout,
    /// The contents of the virtual file.
    pub contents: VirtualFile,
    /// New initializers with their locations.
    pub tensors: Vec<(TensorProto, Storage)>,
}

impl<'a> PartWeights<'a> {
    pub fn new(model: &'a Model, virtual_files: &'a VirtualFiles, shards: usize) -> Self {
        let initializers = &model.graph_proto().initializer;
        PartWeights {
            model,
            virtual_files,
            shards,
            sources: initializers.iter().enumerate().map(|(index, tensor)| (tensor.name(), index)).collect(),
            names: HashMap::new(),
            lists: HashMap::new(),
            layout: Layout::default(),
            contents: VirtualFile::default(),
            tensors: vec![],
        }
    }

    /// The name of a shard's part of a weight.
    pub fn part(
        &mut self,
        name: &str,
        slice: &WeightSlice,
        shard: usize,
        fresh: &mut Fresh,
    ) -> Result<String, RowSplitError> {
        let source = self.sources.get(name).copied();
        let source = source.ok_or_else(|| RowSplitError::Sparse { name: name.to_owned() })?;
        let part = Part { source, slice: slice.clone(), shard };
        if let Some(known) = self.names.get(&part) {
            return Ok(known.clone());
        }
        let new = fresh.name(&hpp_graph::shard_name(name, shard));
        self.add(&part, &new)?;
        self.names.insert(part, new.clone());
        Ok(new)
    }

    fn add(&mut self, part: &Part, name: &str) -> Result<(), RowSplitError> {
        let tensor = &self.model.graph_proto().initializer[part.source];
        let gather = self.gather(tensor, part)?;
        let mut dims = tensor.dims.clone();
        if let Some(size) = dims.get_mut(part.slice.axis) {
            *size /= self.shards as i64;
        }
        let mut new =
            TensorProto { name: Some(name.to_owned()), dims, data_type: tensor.data_type, ..Default::default() };
        let length = gather.bytes();
        let offset = self.layout.place(length);
        self.contents.put_computed(offset, Arc::new(gather), length);
        refer(&mut new, ROWS_FILE, offset, length);
        // The virtual file comes after the files of the model.
        let range = FileRange { file: self.model.weights.files.len(), offset, length };
        self.tensors.push((new, Storage::External(range)));
        Ok(())
    }

    fn gather(&self, tensor: &TensorProto, part: &Part) -> Result<Gather, RowSplitError> {
        let uneven = || RowSplitError::Uneven { name: tensor.name().to_owned() };
        let bytes = tensor::shape_of(tensor)?.bytes.ok_or_else(uneven)?;
        let units = part.slice.rows.checked_mul(part.slice.columns()).filter(|units| *units > 0).ok_or_else(uneven)?;
        if !bytes.is_multiple_of(units) || bytes == 0 {
            return Err(uneven());
        }
        let unit = bytes / units;
        let range = |(start, length): (u64, u64)| Range { start: start * unit, length: length * unit };
        Ok(Gather {
            source: WeightSource::of(self.model, part.source, self.virtual_files)?,
            rows: part.slice.rows,
            stride: part.slice.columns() * unit,
            ranges: part.slice.ranges(part.shard, self.shards).into_iter().map(range).collect(),
        })
    }

    /// Names of the weights that were divided into parts.
    pub fn sliced(&self) -> HashSet<&'a str> {
        let initializers = &self.model.graph_proto().initializer;
        self.names.keys().map(|part| initializers[part.source].name()).collect()
    }

    /// The name of a list of integers of this type.
    pub fn ints(&mut self, of: &str, dtype: DType, ints: &[i64], fresh: &mut Fresh) -> String {
        if let Some(known) = self.lists.get(&(dtype, ints.to_vec())) {
            return known.clone();
        }
        let name = fresh.name(&format!("{of}.shards"));
        let raw: Vec<u8> = match dtype {
            DType::Int32 => ints.iter().flat_map(|int| (*int as i32).to_le_bytes()).collect(),
            _ => ints.iter().flat_map(|int| int.to_le_bytes()).collect(),
        };
        let tensor = TensorProto {
            name: Some(name.clone()),
            dims: vec![ints.len() as i64],
            data_type: Some(if dtype == DType::Int32 { dtype } else { DType::Int64 }.to_onnx()),
            raw_data: Some(raw.into()),
            ..TensorProto::default()
        };
        self.tensors.push((tensor, Storage::Embedded));
        self.lists.insert((dtype, ints.to_vec()), name.clone());
        name
    }
}
