//! Puts into a model's file what is structure and lies in weight files: sizes, axes, single numbers.

use super::contents::Made;
use crate::lift::is_structure;
use crate::proto::{ModelProto, TensorProto};
use crate::tensor;
use crate::weights::{WeightError, parse_place};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Embeds external initializers that are structure; the same numbers are then the same bytes, wherever they lay. `dir` is what
/// locations are relative to, but for those of files that are `made` and not written.
pub fn embed_structure(model: &mut ModelProto, dir: &Path, made: &Made) -> Result<(), WeightError> {
    for tensor in model.graph.iter_mut().flat_map(|graph| &mut graph.initializer) {
        let shape = tensor::shape_of(tensor)?;
        if !is_structure(&shape) || !tensor::is_external(tensor)? {
            continue;
        }
        let place = parse_place(tensor)?;
        let path = dir.join(place.location);
        let length = shape.bytes.unwrap_or_default();
        let bytes = match made.get(place.location) {
            Some(contents) => read(contents.reader(), place.offset, length),
            None => File::open(&path).and_then(|file| read(file, place.offset, length)),
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
