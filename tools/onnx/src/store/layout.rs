//! The layout of weight files: weights in the given order, large ones aligned to pages, small ones to cache lines.

use crate::proto::{StringStringEntryProto, TensorProto, tensor_proto::DataLocation};

/// Weights of at least this size are page-aligned, so that they can be mapped, cloned and read with direct I/O.
const LARGE: u64 = 64 << 10;
const PAGE: u64 = 4096;
const LINE: u64 = 64;

/// Assigns offsets.
#[derive(Default)]
pub struct Layout {
    end: u64,
}

impl Layout {
    /// Assigns an offset to the next weight.
    pub fn place(&mut self, bytes: u64) -> u64 {
        let align = if bytes >= LARGE { PAGE } else { LINE };
        let offset = self.end.next_multiple_of(align);
        self.end = offset + bytes;
        offset
    }

    /// Length of the file so far.
    pub fn end(&self) -> u64 {
        self.end
    }
}

/// Turns a tensor into a reference to a range of a file. Name, type and dimensions stay.
pub fn refer(tensor: &mut TensorProto, location: &str, offset: u64, length: u64) {
    let entry = |key: &str, value: String| StringStringEntryProto { key: Some(key.into()), value: Some(value) };
    *tensor = TensorProto {
        dims: std::mem::take(&mut tensor.dims),
        data_type: tensor.data_type,
        name: tensor.name.take(),
        doc_string: tensor.doc_string.take(),
        metadata_props: std::mem::take(&mut tensor.metadata_props),
        data_location: Some(DataLocation::External as i32),
        external_data: vec![
            entry("location", location.to_owned()),
            entry("offset", offset.to_string()),
            entry("length", length.to_string()),
        ],
        ..TensorProto::default()
    };
}

/// Changes a reference to a range of a file so that it covers `length` bytes.
pub fn refer_to_length(tensor: &mut TensorProto, length: u64) {
    tensor.external_data.retain(|entry| entry.key() != "length");
    tensor.external_data.push(StringStringEntryProto { key: Some("length".into()), value: Some(length.to_string()) });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_weights_begin_on_pages() {
        let mut layout = Layout::default();
        assert_eq!(layout.place(10), 0);
        assert_eq!(layout.place(10), 64);
        assert_eq!(layout.place(LARGE), 4096);
        assert_eq!(layout.place(0), 4096 + LARGE);
        assert_eq!(layout.end(), 4096 + LARGE);
    }
}
