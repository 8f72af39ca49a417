//! Gathered bytes are those of the ranges, wherever a read begins and however long it is.

use crate::Model;
use crate::gather::{Gather, Range};
use crate::proto::NodeProto;
use crate::virtual_file::{Computed, VirtualFile};
use crate::weight_source::WeightSource;
use hpp_graph::{divide_rows, infer, segment};
use proptest::prelude::*;
use std::sync::Arc;

/// Ranges of `rows` rows, with gaps between them, from these lengths.
fn example(lengths: &[(u8, u8)], rows: u64, source: impl FnOnce(&[u8]) -> WeightSource) -> (Gather, Vec<u8>) {
    let (mut stride, mut ranges) = (0, vec![]);
    for (gap, length) in lengths {
        ranges.push(Range { start: stride + u64::from(*gap), length: u64::from(*length) + 1 });
        stride += u64::from(*gap) + u64::from(*length) + 1;
    }
    let all: Vec<u8> = (0..stride * rows).map(|i| (i % 251) as u8).collect();
    let of_row =
        |row: u64| ranges.iter().flat_map(move |range| (0..range.length).map(move |i| row * stride + range.start + i));
    let wanted = (0..rows).flat_map(of_row).map(|at| all[at as usize]).collect();
    (Gather { source: source(&all), rows, stride, ranges: ranges.clone() }, wanted)
}

fn read_all(gather: &Gather, from: usize, chunk: usize) -> Vec<u8> {
    let (mut read, mut buffer) = (vec![], vec![0; chunk]);
    loop {
        let count = gather.read_at((from + read.len()) as u64, &mut buffer).unwrap();
        read.extend(&buffer[..count]);
        if count == 0 {
            return read;
        }
    }
}

proptest! {
    #[test]
    fn ranges_are_read_one_after_another(
        lengths in proptest::collection::vec((0u8..5, 0u8..9), 1..4),
        rows in 1u64..5,
        from in 0usize..40,
        chunk in 1usize..30,
    ) {
        let (gather, wanted) = example(&lengths, rows, |all| WeightSource::Memory(all.to_vec().into()));
        prop_assert_eq!(gather.bytes(), wanted.len() as u64);
        let from = from.min(wanted.len());
        prop_assert_eq!(read_all(&gather, from, chunk), &wanted[from..]);
    }
}

#[test]
fn files_and_virtual_files_are_read_from_the_beginning_of_the_weight() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("weights");
    let shifted = |all: &[u8]| [&[255; 7][..], all].concat();
    let (gather, wanted) = example(&[(2, 3), (0, 4)], 3, |all| {
        std::fs::write(&path, shifted(all)).unwrap();
        WeightSource::File(path.clone(), 7)
    });
    assert_eq!(read_all(&gather, 0, 100), wanted);
    let (inner, inner_wanted) = example(&[(1, 30)], 4, |all| WeightSource::Virtual(VirtualFile::from(shifted(all)), 7));
    assert_eq!(read_all(&inner, 5, 8), inner_wanted[5..]);
    // A file that is shorter than the model says is an error, not fewer bytes.
    std::fs::write(&path, [0; 20]).unwrap();
    assert!(gather.read_at(12, &mut [0; 100]).is_err());
}

/// Ranges that lie far apart are read alone.
#[test]
fn what_lies_between_distant_ranges_is_not_read() {
    let (far, rows) = (4 << 20, 3);
    let mut contents = VirtualFile::default();
    (0..rows).for_each(|row| contents.put_bytes(row * far, vec![row as u8; 10].into()));
    let ranges = vec![Range { start: 0, length: 10 }];
    let gather = Gather { source: WeightSource::Virtual(contents, 0), rows, stride: far, ranges };
    assert_eq!(gather.read_at(0, &mut [0; 30]).unwrap(), 10);
    let mut file = VirtualFile::default();
    file.put_computed(0, Arc::new(gather.clone()), gather.bytes());
    let mut read = vec![];
    std::io::Read::read_to_end(&mut file.reader(), &mut read).unwrap();
    assert_eq!(read, [[0; 10], [1; 10], [2; 10]].concat());
}

/// Each of 40 pairs of operators gives its columns two ways to the next: a search that follows every way would not end.
#[test]
fn columns_that_very_many_operators_read_are_refused() {
    const COLUMNS: &str = "/model/layers.0/mlp/gate_proj/MatMul/output_0";
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/genai/llama3-fp32-cpu");
    let mut model = Model::open(&path).unwrap();
    let nodes = &mut model.proto.graph.as_mut().unwrap().node;
    let last = "columns.40";
    for input in nodes.iter_mut().flat_map(|node| &mut node.input).filter(|input| *input == COLUMNS) {
        *input = last.to_owned();
    }
    let at = nodes.iter().position(|node| node.output == [COLUMNS]).unwrap() + 1;
    let node = |op_type: &str, input: Vec<String>, output: String| NodeProto {
        op_type: Some(op_type.to_owned()),
        input,
        output: vec![output],
        ..NodeProto::default()
    };
    let name = |number: usize| if number == 0 { COLUMNS.to_owned() } else { format!("columns.{number}") };
    let pair = |number: usize| {
        let gate = format!("gate.{number}");
        let sigmoid = node("Sigmoid", vec![name(number)], gate.clone());
        [sigmoid, node("Mul", vec![name(number), gate], name(number + 1))]
    };
    nodes.splice(at..at, (0..40).flat_map(pair));
    let mut graph = model.graph().unwrap();
    infer::infer(&mut graph);
    let refused = divide_rows(&graph, &segment(&graph), &[1], 2).unwrap_err().to_string();
    assert!(refused.contains("more operators read than this build follows"), "{refused}");
}
