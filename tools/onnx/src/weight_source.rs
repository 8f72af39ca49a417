//! Where the bytes of a weight are, for values that are computed from them.

use crate::model::Model;
use crate::read::position_in;
use crate::tensor::{self, TensorError};
use crate::virtual_file::{VirtualFile, VirtualFiles};
use crate::weights::Storage;
use bytes::Bytes;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

/// The place of the bytes of a weight.
#[derive(Clone, Debug)]
pub(crate) enum WeightSource {
    /// In a file, from this offset on.
    File(PathBuf, u64),
    /// In a file that does not exist on disk, from this offset on.
    Virtual(VirtualFile, u64),
    /// In memory.
    Memory(Bytes),
}

impl WeightSource {
    /// The place of an initializer's bytes, by its index in the model's graph. `virtual_files` are the contents of weight files that do not exist
    /// on disk.
    pub fn of(model: &Model, index: usize, virtual_files: &VirtualFiles) -> Result<Self, TensorError> {
        if let Storage::External(span) = model.weights.storage[index] {
            let file = &model.weights.files[span.file];
            return Ok(match virtual_files.get(&file.location) {
                Some(contents) => WeightSource::Virtual(contents.clone(), span.offset),
                None => WeightSource::File(file.path.clone(), span.offset),
            });
        }
        let tensor = &model.graph_proto().initializer[index];
        let raw = tensor::embedded_bytes(tensor, &tensor::shape_of(tensor)?)?.unwrap_or_default();
        Ok(match position_in(&model.file, &raw) {
            Some(position) => WeightSource::File(model.path.clone(), position),
            None => WeightSource::Memory(Bytes::from(raw.into_owned())),
        })
    }

    /// Reads bytes from offset `at` of the weight on.
    pub fn read(&self, at: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.read_parts([(at, buffer)].into_iter())
    }

    /// Reads several ranges of bytes, each from an offset of the weight on.
    pub fn read_parts<'a>(&self, parts: impl Iterator<Item = (u64, &'a mut [u8])>) -> io::Result<()> {
        match self {
            WeightSource::File(path, begin) => read_exactly(File::open(path)?, *begin, parts),
            WeightSource::Virtual(file, begin) => read_exactly(file.reader(), *begin, parts),
            WeightSource::Memory(bytes) => read_exactly(io::Cursor::new(bytes), 0, parts),
        }
    }
}

fn read_exactly<'a>(
    mut from: impl Read + Seek,
    begin: u64,
    mut parts: impl Iterator<Item = (u64, &'a mut [u8])>,
) -> io::Result<()> {
    parts.try_for_each(|(at, buffer)| {
        from.seek(SeekFrom::Start(begin + at))?;
        from.read_exact(buffer)
    })
}
