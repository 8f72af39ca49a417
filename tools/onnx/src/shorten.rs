//! Shortens weights to their first rows. The bytes of these rows stay where they are; the bytes of the other rows are not read any more.

use crate::model::Model;
use crate::proto::TensorProto;
use crate::store::refer_to_length;
use crate::tensor;
use crate::weights::Storage;
use std::collections::BTreeMap;

/// Shortens weights, by name, to this many first rows (along axis 0). A weight that has no more rows, or whose elements are stored one by one in
/// the model file, does not change. Returns the names of the shortened weights.
pub fn keep_rows(model: &mut Model, rows: &BTreeMap<String, u64>) -> Vec<String> {
    let Some(graph) = model.proto.graph.as_mut() else { return vec![] };
    let weights = graph.initializer.iter_mut().zip(&mut model.weights.storage);
    let wanted = weights.filter_map(|(tensor, storage)| Some((*rows.get(tensor.name())?, tensor, storage)));
    wanted.filter_map(|(rows, tensor, storage)| shorten(tensor, storage, rows)).collect()
}

/// Shortens one weight to its first rows. Returns its name if it had more.
fn shorten(tensor: &mut TensorProto, storage: &mut Storage, rows: u64) -> Option<String> {
    let shape = tensor::shape_of(tensor).ok()?;
    let all = shape.dims.first().copied().filter(|all| rows < *all)?;
    let bytes = shape.bytes.filter(|bytes| bytes % all == 0)? / all * rows;
    match storage {
        Storage::External(range) => {
            range.length = bytes;
            refer_to_length(tensor, bytes);
        }
        Storage::Embedded => {
            let raw = tensor.raw_data.as_mut()?;
            raw.truncate(usize::try_from(bytes).ok()?);
        }
    }
    tensor.dims[0] = i64::try_from(rows).ok()?;
    Some(tensor.name().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Weights;
    use crate::proto::{GraphProto, ModelProto};
    use crate::weights::FileRange;
    use bytes::Bytes;
    use hpp_schema::DType;

    fn table(name: &str) -> TensorProto {
        TensorProto {
            name: Some(name.into()),
            data_type: Some(DType::Float32.to_onnx()),
            dims: vec![10, 3],
            ..TensorProto::default()
        }
    }

    #[test]
    fn first_rows_stay_where_they_are() {
        let in_file = TensorProto { raw_data: Some((0..120u8).collect::<Bytes>()), ..table("in file") };
        let elements = TensorProto { float_data: vec![1.0; 30], ..table("elements") };
        let mut external = table("external");
        crate::store::refer(&mut external, "weights", 64, 120);
        let short = TensorProto { raw_data: Some(Bytes::from(vec![0; 120])), ..table("short") };
        let graph =
            GraphProto { initializer: vec![in_file, elements, external, short.clone()], ..GraphProto::default() };
        let embedded = Storage::Embedded;
        let range = Storage::External(FileRange { file: 0, offset: 64, length: 120 });
        let mut model = Model {
            path: "model.onnx".into(),
            file: Bytes::new(),
            proto: ModelProto { graph: Some(graph), ..ModelProto::default() },
            weights: Weights { files: vec![], storage: vec![embedded, embedded, range, embedded] },
            notes: vec![],
        };
        let rows = ["in file", "elements", "external"].map(|name| (name.to_owned(), 4));
        let rows = rows.into_iter().chain([("short".to_owned(), 10)]).collect();
        assert_eq!(keep_rows(&mut model, &rows), ["in file", "external"]);
        let [in_file, elements, external, unchanged] = &model.graph_proto().initializer[..] else { panic!() };
        assert_eq!(
            (&in_file.dims[..], in_file.raw_data.as_deref()),
            (&[4, 3][..], Some(&(0..48u8).collect::<Vec<_>>()[..]))
        );
        assert_eq!((&elements.dims[..], elements.float_data.len()), (&[10, 3][..], 30));
        assert_eq!(external.dims, [4, 3]);
        assert_eq!(external.external_data.last().unwrap().value(), "48");
        assert_eq!(model.weights.storage[2], Storage::External(FileRange { file: 0, offset: 64, length: 48 }));
        assert_eq!(unchanged, &short);
    }
}
