//! The bytes of parts of weights: columns and rows of dense and quantized matrices, packed ones, biases; and weights that are not on disk.

use crate::build::{int, model, node, save, tensor, value, with};
use crate::rows::{Divided, fixture, known};
use hpp_graph::{RowsReason, divide_rows, segment};
use hpp_onnx::proto::{GraphProto, ModelProto, NodeProto, TensorProto};
use hpp_onnx::{
    Bits, BlockFormat, Choice, Model, QUANTIZED_FILE, QuantizeOptions, Roles, ScaleRule, Storage, VirtualFile,
    VirtualFiles, quantize, split_rows,
};
use hpp_schema::DType;
use std::io::{Read, Seek, SeekFrom};

const F: DType = DType::Float32;

const HIDDEN: usize = 64;

/// The bytes of a weight that is in the model's last file, which does not exist on disk.
fn stored_in(model: &Model, contents: &VirtualFile, name: &str) -> Vec<u8> {
    let at = model.graph_proto().initializer.iter().position(|tensor| tensor.name() == name);
    let Storage::External(range) = model.weights().storage[at.unwrap()] else { panic!("{name} is embedded") };
    assert_eq!(range.file, model.weights().files.len() - 1);
    let mut reader = contents.reader();
    reader.seek(SeekFrom::Start(range.offset)).unwrap();
    let mut bytes = vec![0; range.length as usize];
    reader.read_exact(&mut bytes).unwrap();
    bytes
}

/// Dimensions and bytes of a part of a weight.
fn stored<'a>(divided: &'a Divided, name: &str) -> (&'a [i64], Vec<u8>) {
    (&divided.weight(name).dims, stored_in(&divided.split.model, &divided.split.contents, name))
}

/// `MatMulNBits` of 64 rows in blocks of 16, with zero points and a bias.
fn quantized(input: &str, name: &str, columns: i64, output: &str) -> NodeProto {
    let weights = ["B", "scales", "zero", "bias"].map(|part| format!("{name}.{part}"));
    let inputs = [input, &weights[0], &weights[1], &weights[2], "", &weights[3]];
    let attributes = [("K", HIDDEN as i64), ("N", columns), ("bits", 4), ("block_size", 16)];
    let product = NodeProto { domain: Some("com.microsoft".into()), ..node("MatMulNBits", &inputs, &[output]) };
    attributes.into_iter().fold(product, |product, (name, value)| with(product, int(name, value)))
}

/// The weights of it: with all dimensions, or flat.
fn quantized_weights(name: &str, columns: i64, is_flat: bool) -> Vec<TensorProto> {
    let shaped = |dims: &[i64]| if is_flat { vec![dims.iter().product()] } else { dims.to_vec() };
    vec![
        tensor(&format!("{name}.B"), DType::Uint8, &[columns, 4, 8]),
        tensor(&format!("{name}.scales"), F, &shaped(&[columns, 4])),
        tensor(&format!("{name}.zero"), DType::Uint8, &shaped(&[columns, 2])),
        tensor(&format!("{name}.bias"), F, &[columns]),
    ]
}

/// The file of a model, with its weights inside.
struct Tiny {
    dir: tempfile::TempDir,
}

impl Tiny {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        save(dir.path(), &decoder());
        Tiny { dir }
    }

    fn open(&self) -> Model {
        Model::open(self.dir.path()).unwrap()
    }
}

/// A decoder of two layers: 4 heads of 16 elements, 2 heads of keys and values in a packed matrix, 32 neurons.
fn decoder() -> ModelProto {
    let state = |name: String| value(&name, F, &["batch", "2", "past", "16"]);
    let mut graph = GraphProto {
        node: vec![node("Gather", &["table", "ids"], &["h0"])],
        input: vec![value("ids", DType::Int64, &["batch", "sequence"])],
        initializer: vec![tensor("table", F, &[32, 64]), tensor("head", F, &[64, 32])],
        ..GraphProto::default()
    };
    graph.input.extend(["lengths", "total"].map(|name| value(name, DType::Int32, &["batch"])));
    for layer in 0..2 {
        for kind in ["key", "value"] {
            graph.input.push(state(format!("past.{layer}.{kind}")));
            graph.output.push(state(format!("present.{layer}.{kind}")));
        }
        let n = |name: &str| format!("{name}{layer}");
        let (past, present) =
            (|kind: &str| format!("past.{layer}.{kind}"), |kind: &str| format!("present.{layer}.{kind}"));
        let inputs = [&n("qkv"), "", "", &past("key"), &past("value"), "lengths", "total"].map(str::to_owned);
        let outputs = [n("mixed"), present("key"), present("value")];
        let mut gqa = with(with(node("GroupQueryAttention", &[], &[]), int("num_heads", 4)), int("kv_num_heads", 2));
        (gqa.input, gqa.output, gqa.domain) = (inputs.to_vec(), outputs.to_vec(), Some("com.microsoft".into()));
        graph.node.extend([
            quantized(&n("h"), &n("wqkv"), 128, &n("qkv")),
            gqa,
            quantized(&n("mixed"), &n("wo"), 64, &n("o")),
            node("Add", &[&n("h"), &n("o")], &[&n("mid")]),
            node("MatMul", &[&n("mid"), &n("up")], &[&n("wide")]),
            node("Add", &[&n("wide"), &n("up_bias")], &[&n("biased")]),
            node("Relu", &[&n("biased")], &[&n("active")]),
            node("MatMul", &[&n("active"), &n("down")], &[&n("narrow")]),
            node("Add", &[&n("mid"), &n("narrow")], &[&format!("h{}", layer + 1)]),
        ]);
        graph.initializer.extend(quantized_weights(&n("wqkv"), 128, false));
        graph.initializer.extend(quantized_weights(&n("wo"), 64, true));
        let dense = [("up", vec![64, 32]), ("up_bias", vec![1, 1, 32]), ("down", vec![32, 64])];
        graph.initializer.extend(dense.map(|(name, dims)| tensor(&n(name), F, &dims)));
    }
    graph.node.push(node("MatMul", &["h2", "head"], &["logits"]));
    graph.output.push(value("logits", F, &["batch", "sequence", "32"]));
    model(graph)
}

/// The bytes of [`tensor`], of which these ranges of each row of `row` bytes are taken.
fn gathered(total: usize, row: usize, ranges: &[(usize, usize)]) -> Vec<u8> {
    let all: Vec<u8> = (0..total).map(|i| i as u8).collect();
    let of_row = |row: &[u8]| ranges.iter().flat_map(|(start, length)| row[*start..start + length].to_vec()).collect();
    all.chunks(row).map(of_row).collect::<Vec<Vec<u8>>>().concat()
}

#[test]
fn packed_queries_keys_and_values_are_three_ranges_of_columns() {
    let tiny = Tiny::new();
    let divided = Divided::of(&tiny.open(), |_| true, 2).unwrap();
    // Columns of shard 1: 32..64 of the queries, 80..96 of the keys, 112..128 of the values.
    let columns = [(32, 32), (80, 16), (112, 16)];
    let of = |bytes: usize| columns.map(|(start, length)| (start * bytes, length * bytes));
    let parts =
        [("B", 32, vec![64, 4, 8]), ("scales", 16, vec![64, 4]), ("zero", 2, vec![64, 2]), ("bias", 4, vec![64])];
    for (part, bytes, dims) in parts {
        let found = stored(&divided, &format!("wqkv1.{part}.shard1"));
        assert_eq!(found, (&dims[..], gathered(128 * bytes, 128 * bytes, &of(bytes))), "{part}");
    }
    assert_eq!((divided.attribute("qkv1.shard1", "N"), divided.attribute("qkv1.shard1", "K")), (64, 64));
}

#[test]
fn rows_of_quantized_matrices_are_blocks_of_every_column_and_zero_points_bytes() {
    let tiny = Tiny::new();
    let divided = Divided::of(&tiny.open(), |_| true, 2).unwrap();
    for shard in 0..2 {
        let range = |bytes: usize| [(shard * bytes, bytes)];
        let part = |part: &str| stored(&divided, &format!("wo1.{part}.shard{shard}"));
        assert_eq!(part("B"), (&[64, 2, 8][..], gathered(64 * 32, 32, &range(16))));
        assert_eq!(part("scales"), (&[128][..], gathered(64 * 16, 16, &range(8))));
        assert_eq!(part("zero"), (&[64][..], gathered(64 * 2, 2, &range(1))));
        let output = format!("o1.summand.shard{shard}");
        assert_eq!((divided.attribute(&output, "K"), divided.attribute(&output, "N")), (32, 64));
    }
    // The bias is in one summand.
    assert_eq!(divided.node("o1.summand.shard0").input[4..], ["", "wo1.bias"]);
    assert_eq!(divided.node("o1.summand.shard1").input.len(), 4);
    assert_eq!(divided.node("o1").input, ["o1.summand.shard0", "o1.summand.shard1"]);
}

#[test]
fn dense_matrices_are_divided_by_columns_then_by_rows() {
    let tiny = Tiny::new();
    let divided = Divided::of(&tiny.open(), |_| true, 4);
    let reason = RowsReason::Heads { heads: 2, kind: "heads of keys and values", shards: 4 };
    assert_eq!(divided.err().unwrap().reason, reason);
    let divided = Divided::of(&tiny.open(), |layer| layer == 1, 2).unwrap();
    let halves = [(64, 64)];
    assert_eq!(stored(&divided, "up1.shard1"), (&[64, 16][..], gathered(64 * 128, 128, &halves)));
    assert_eq!(stored(&divided, "up_bias1.shard1"), (&[1, 1, 16][..], gathered(128, 128, &halves)));
    assert_eq!(
        stored(&divided, "down1.shard1"),
        (&[16, 64][..], gathered(32 * 256, 32 * 256, &[(16 * 256, 16 * 256)]))
    );
    assert_eq!(divided.weight("up0").dims, [64, 32]);
}

#[test]
fn more_shards_add_their_summands_in_order() {
    let tiny = Tiny::new();
    let with_four_heads = |proto: &mut ModelProto| {
        for node in &mut proto.graph.as_mut().unwrap().node {
            node.attribute.iter_mut().filter(|a| a.name() == "num_heads").for_each(|a| a.i = Some(4));
            node.attribute.iter_mut().filter(|a| a.name() == "kv_num_heads").for_each(|a| a.i = Some(4));
            node.attribute.iter_mut().filter(|a| a.i() == 128).for_each(|a| a.i = Some(192));
        }
        let weights = &mut proto.graph.as_mut().unwrap().initializer;
        weights.retain(|weight| !weight.name().starts_with("wqkv"));
        weights.extend((0..2).flat_map(|layer| quantized_weights(&format!("wqkv{layer}"), 192, false)));
    };
    let mut proto = decoder();
    with_four_heads(&mut proto);
    save(tiny.dir.path(), &proto);
    let error = Divided::of(&tiny.open(), |_| true, 4).err().unwrap();
    assert_eq!(error.reason, RowsReason::ZeroPoints { bits: 4, blocks: 1 });
    assert_eq!((error.block.as_str(), error.node.as_str()), ("layers.0", "MatMulNBits \"MatMulNBits for o0\""));
    for node in proto.graph.as_mut().unwrap().node.iter_mut().filter(|node| node.op_type() == "MatMulNBits") {
        node.input[3].clear();
    }
    save(tiny.dir.path(), &proto);
    let divided = Divided::of(&tiny.open(), |_| true, 4).unwrap();
    assert_eq!(stored(&divided, "wo0.B.shard2"), (&[64, 1, 8][..], gathered(64 * 32, 32, &[(16, 8)])));
    let [last, middle] = ["o0.shard3", "o0.shard3.sum_1"].map(|output| divided.node(output).input.clone());
    assert_eq!(last, ["o0.shard3.sum_1", "o0.summand.shard3"]);
    assert_eq!(middle, ["o0.shard3.sum", "o0.summand.shard2"]);
    assert_eq!(divided.node("o0.shard3.sum").input, ["o0.summand.shard0", "o0.summand.shard1"]);
    assert_eq!(divided.labels()[4..6], ["layers.0.attention.3", "layers.0.mlp.0"]);
}

/// A model that is quantized and divided before anything is written.
#[test]
fn parts_of_weights_that_are_not_on_disk_are_read_from_their_virtual_file() {
    let model = fixture("genai/llama3-fp32-cpu");
    let format = BlockFormat { bits: Bits::Four, block_size: 32, asymmetric: true, scale: ScaleRule::Extremes };
    let (head, embedding) = (Choice::None, Choice::None);
    let options = QuantizeOptions { format, budget: None, formats: None, head, embedding, moments: None };
    let quantized = quantize(&model, &known(&model), &Roles::default(), &options).unwrap();
    let graph = known(&quantized.model);
    let segmentation = segment(&graph);
    let division = divide_rows(&graph, &segmentation, &[2], 2).unwrap();
    let files = VirtualFiles::from([(QUANTIZED_FILE.to_owned(), quantized.contents.clone())]);
    let split = split_rows(&quantized.model, &graph, &division, &files).unwrap();
    let whole = stored_in(&quantized.model, &quantized.contents, "model.layers.1.mlp.down_proj.MatMul.weight_Q4G32");
    let part = stored_in(&split.model, &split.contents, "model.layers.1.mlp.down_proj.MatMul.weight_Q4G32.shard1");
    // Columns of 256 rows in 8 blocks of 16 bytes.
    let wanted: Vec<u8> = whole.chunks(128).flat_map(|column| column[64..].to_vec()).collect();
    assert_eq!(part, wanted);
    let graph = known(&split.model);
    let again = divide_rows(&graph, &segment(&graph), &[1], 2).unwrap();
    let error = split_rows(&split.model, &graph, &again, &files).unwrap_err().to_string();
    assert!(error.contains("weight file named \"hpp.rows.bin\""), "{error}");
}
