//! Embeds small external tensors that are structure (sizes, axes, scalars) into the model's file.

use crate::lift::is_structure;
use crate::proto::{ModelProto, TensorProto};
use crate::tensor;
use crate::virtual_file::VirtualFiles;
use crate::weights::{WeightError, parse_external};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Embeds external initializers that are structure, so that equal values give equal models wherever they were stored.
/// Locations are relative to `dir`, or keys of `virtual_files`.
pub fn embed_structure(model: &mut ModelProto, dir: &Path, virtual_files: &VirtualFiles) -> Result<(), WeightError> {
    for tensor in model.graph.iter_mut().flat_map(|graph| &mut graph.initializer) {
        let shape = tensor::shape_of(tensor)?;
        if !is_structure(&shape) || !tensor::is_external(tensor)? {
            continue;
        }
        let external = parse_external(tensor)?;
        let path = dir.join(external.location);
        let length = shape.bytes.unwrap_or_default();
        let bytes = match virtual_files.get(external.location) {
            Some(file) => read(file.reader(), external.offset, length),
            None => File::open(&path).and_then(|file| read(file, external.offset, length)),
        };
        let failed = |source| WeightError::Io { name: tensor.name().to_owned(), path: path.clone(), source };
        let bytes = bytes.map_err(failed)?;
        *tensor = TensorProto {
            name: tensor.name.take(),
            dims: std::mem::take(&mut tensor.dims),
            data_type: tensor.data_type,
            raw_data: Some(bytes.into()),
            ..TensorProto::default()
        };
    }
    Ok(())
}

fn read(mut file: impl Read + Seek, offset: u64, length: u64) -> io::Result<Vec<u8>> {
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = vec![0; usize::try_from(length).map_err(io::Error::other)?];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}
