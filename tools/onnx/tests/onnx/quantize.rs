//! Quantized models: which operators become which, which weights stay, and what is written when the model is packed.

use crate::build::{attribute, external, int, model, node, open, save, tensor, value, with};
use hpp_graph::infer;
use hpp_onnx::proto::attribute_proto::AttributeType;
use hpp_onnx::proto::*;
use hpp_onnx::{
    Bits, BlockFormat, Choice, LeftReason, Model, PackError, QUANTIZED_FILE, QuantizeError, QuantizeOptions, Quantized,
    Roles, ScaleRule, Storage, VirtualFiles, pack, pack_virtually, quantize,
};
use hpp_schema::DType;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

const F: DType = DType::Float32;

fn options() -> QuantizeOptions {
    let format = BlockFormat { bits: Bits::Four, block_size: 32, asymmetric: false, scale: ScaleRule::Extremes };
    QuantizeOptions { format, budget: None, formats: None, head: Choice::Same, embedding: Choice::None, moments: None }
}

/// Quantizes with `ids` as token ids and the node that produces `logits` as head.
fn quantized(model: &Model, options: &QuantizeOptions) -> Result<Quantized, QuantizeError> {
    let mut graph = model.graph().unwrap();
    infer::infer(&mut graph);
    let mut roles = Roles::default();
    roles.tokens.extend(graph.find("ids"));
    roles.head.extend(graph.find("logits").and_then(|logits| graph.producer(logits)));
    quantize(model, &graph, &roles, options)
}

/// `x [1, 5, 64]`, `ids [1, 5]` and these nodes.
fn of(nodes: Vec<NodeProto>, weights: Vec<TensorProto>, outputs: &[&str]) -> ModelProto {
    model(GraphProto {
        node: nodes,
        input: vec![value("x", F, &["1", "5", "64"]), value("ids", DType::Int64, &["1", "5"])],
        output: outputs.iter().map(|name| value(name, F, &["1", "5", "96"])).collect(),
        initializer: weights,
        ..GraphProto::default()
    })
}

/// Floats that are finite, unlike [`tensor`]'s counting bytes.
fn floats(name: &str, dims: &[i64]) -> TensorProto {
    let count = dims.iter().product::<i64>();
    let bytes = (0..count).flat_map(|i| ((i * 31 % 17) as f32 / 8.0 - 1.0).to_le_bytes());
    TensorProto { raw_data: Some(bytes.collect()), ..tensor(name, F, dims) }
}

fn operators(quantized: &Quantized) -> Vec<&str> {
    quantized.model.graph_proto().node.iter().map(|node| node.op_type()).collect()
}

fn weights(quantized: &Quantized) -> BTreeMap<&str, (DType, &[i64])> {
    let dtype = |tensor: &TensorProto| DType::from_onnx(tensor.data_type()).unwrap();
    quantized.model.graph_proto().initializer.iter().map(|t| (t.name(), (dtype(t), t.dims.as_slice()))).collect()
}

fn ints(node: &NodeProto) -> BTreeMap<&str, i64> {
    node.attribute.iter().map(|a| (a.name(), a.i())).collect()
}

#[test]
fn a_product_becomes_the_operator_of_onnx_runtime() {
    let proto = of(vec![node("MatMul", &["x", "w"], &["y"])], vec![floats("w", &[64, 96])], &["y"]);
    let done = quantized(&open(&proto).unwrap(), &options()).unwrap();
    let product = &done.model.graph_proto().node[0];
    assert_eq!((product.op_type(), product.domain()), ("MatMulNBits", "com.microsoft"));
    assert_eq!(product.input, ["x", "w_Q4G32", "w_Q4G32_scales"]);
    let expected = [("K", 64), ("N", 96), ("accuracy_level", 4), ("bits", 4), ("block_size", 32)];
    assert_eq!(ints(product), expected.into());
    let expected = [("w_Q4G32", (DType::Uint8, &[96, 2, 16][..])), ("w_Q4G32_scales", (F, &[96, 2]))];
    assert_eq!(weights(&done), expected.into());
    assert!(done.model.proto().opset_import.iter().any(|opset| opset.domain() == "com.microsoft"));
    assert_eq!((done.summary.bytes_before, done.summary.bytes_after), (64 * 96 * 4, 96 * 32 + 96 * 8));
    let spans = done.model.weights().storage.iter().filter(|at| matches!(at, Storage::External(_))).count();
    assert_eq!((spans, done.model.weights().files[0].location.as_str()), (2, QUANTIZED_FILE));
    // The result is a model that can be segmented and cut.
    let mut graph = done.model.graph().unwrap();
    infer::infer(&mut graph);
    assert_eq!(graph.value(graph.find("y").unwrap()).shape.as_ref().unwrap()[2].as_fixed(), Some(96));
}

#[test]
fn zero_points_are_packed_and_names_do_not_collide() {
    let nodes = vec![node("MatMul", &["x", "w"], &["w_Q4G32"]), node("Identity", &["w_Q4G32"], &["y"])];
    let proto = of(nodes, vec![floats("w", &[64, 96])], &["y"]);
    let format = BlockFormat { bits: Bits::Four, block_size: 16, asymmetric: true, scale: ScaleRule::Extremes };
    let done = quantized(&open(&proto).unwrap(), &QuantizeOptions { format, ..options() }).unwrap();
    assert_eq!(weights(&done)["w_Q4G16_zero_points"], (DType::Uint8, &[96, 2][..]));
    // Small ones look like sizes, which the reader of graphs reads: these have no bytes yet.
    let few = of(vec![node("MatMul", &["x", "w"], &["y"])], vec![floats("w", &[64, 64])], &["y"]);
    let format = BlockFormat { block_size: 32, ..format };
    let done_few = quantized(&open(&few).unwrap(), &QuantizeOptions { format, ..options() }).unwrap();
    assert_eq!(weights(&done_few)["w_Q4G32_zero_points"], (DType::Uint8, &[64, 1][..]));
    assert!(done_few.model.graph().is_ok());
    let done = quantized(&open(&proto).unwrap(), &options()).unwrap();
    assert_eq!(done.model.graph_proto().node[0].input[1], "w_Q4G32_1");
}

#[test]
fn a_gemm_keeps_its_bias_and_a_scaled_one_is_left() {
    let flat = || with(node("Flatten", &["x"], &["flat"]), int("axis", 2));
    let gemm = |inputs: &[&str]| with(node("Gemm", inputs, &["y"]), int("transB", 1));
    let weights_of = || vec![floats("w", &[96, 64]), floats("bias", &[96])];
    let proto = of(vec![flat(), gemm(&["flat", "w", "bias"])], weights_of(), &["y"]);
    let done = quantized(&open(&proto).unwrap(), &options()).unwrap();
    assert_eq!(operators(&done), ["Flatten", "MatMulNBits", "Add"]);
    assert_eq!(weights(&done)["w_Q4G32"].1, [96, 2, 16]);
    let [_, product, add] = &done.model.graph_proto().node[..] else { panic!("three nodes") };
    assert_eq!((&add.input, add.output[0].as_str()), (&vec![product.output[0].clone(), "bias".to_owned()], "y"));
    let alpha = AttributeProto { f: Some(0.5), ..attribute("alpha", AttributeType::Float) };
    let proto = of(vec![flat(), with(gemm(&["flat", "w", "bias"]), alpha)], weights_of(), &["y"]);
    let error = quantized(&open(&proto).unwrap(), &options()).unwrap_err().to_string();
    assert!(error.contains("1 of a Gemm with alpha"), "{error}");
}

#[test]
fn bfloat16_products_are_computed_in_float32() {
    let weight =
        TensorProto { raw_data: Some([0x80, 0x3f].repeat(64 * 96).into()), ..tensor("w", DType::Bfloat16, &[64, 96]) };
    let cast = |input: &str, output: &str, to| with(node("Cast", &[input], &[output]), int("to", to));
    let nodes = vec![cast("x", "a", 16), node("MatMul", &["a", "w"], &["b"]), cast("b", "y", 1)];
    let done = quantized(&open(&of(nodes, vec![weight], &["y"])).unwrap(), &options()).unwrap();
    assert_eq!(operators(&done), ["Cast", "Cast", "MatMulNBits", "Cast", "Cast"]);
    assert_eq!(weights(&done)["w_Q4G32_scales"].0, F);
    let mut graph = done.model.graph().unwrap();
    infer::infer(&mut graph);
    assert_eq!(graph.value(graph.find("b").unwrap()).dtype, Some(DType::Bfloat16));
}

#[test]
fn a_tied_weight_is_quantized_once_for_head_and_embedding() {
    let nodes = vec![
        node("Gather", &["table", "ids"], &["e"]),
        node("Transpose", &["table"], &["turned"]),
        node("MatMul", &["e", "turned"], &["logits"]),
    ];
    let proto = of(nodes, vec![floats("table", &[96, 64])], &["logits"]);
    let model = open(&proto).unwrap();
    let both = quantized(&model, &QuantizeOptions { embedding: Choice::Same, ..options() }).unwrap();
    assert_eq!(operators(&both), ["GatherBlockQuantized", "MatMulNBits"]);
    let spans = |quantized: &Quantized, name: &str| {
        let initializers = &quantized.model.graph_proto().initializer;
        let at = initializers.iter().position(|t| t.name() == name).unwrap();
        match quantized.model.weights().storage[at] {
            Storage::External(span) => span,
            Storage::Embedded => panic!("{name} is embedded"),
        }
    };
    assert_eq!(spans(&both, "table_Q4G32"), spans(&both, "table_Q4G32_table"));
    assert_eq!(weights(&both)["table_Q4G32_table"].1, [96, 32]);
    assert!(!weights(&both).contains_key("table"));
    assert_eq!((both.summary.bytes_tied, both.summary.bytes_after), (96 * (32 + 8), 96 * (32 + 8)));
    assert_eq!((both.summary.bytes_kept, both.summary.formats.values().sum::<usize>()), (0, 1));
    // Without the embedding, its floats stay.
    let head = quantized(&model, &options()).unwrap();
    assert_eq!(operators(&head), ["Gather", "MatMulNBits"]);
    assert!(weights(&head).contains_key("table"));
    assert_eq!((head.summary.bytes_kept, head.summary.bytes_tied), (96 * 64 * 4, 0));
    // In other bits, there are two.
    let eight = QuantizeOptions { head: Choice::Bits(Bits::Eight), embedding: Choice::Same, ..options() };
    assert_eq!(quantized(&model, &eight).unwrap().summary.formats.values().collect::<Vec<_>>(), [&1, &1]);
    let none = QuantizeOptions { head: Choice::None, ..options() };
    assert!(quantized(&model, &none).unwrap_err().to_string().contains("as asked"));
}

#[test]
fn a_tied_weight_in_given_bits_counts_once_in_a_budget() {
    let nodes = vec![
        node("Gather", &["table", "ids"], &["e"]),
        node("MatMul", &["e", "w"], &["h"]),
        node("Transpose", &["table"], &["turned"]),
        node("MatMul", &["h", "turned"], &["logits"]),
    ];
    let weights = vec![floats("table", &[96, 64]), floats("w", &[64, 64])];
    let dir = tempfile::tempdir().unwrap();
    let model = Model::open(&save(dir.path(), &of(nodes, weights, &["logits"]))).unwrap();
    // In 8 bits with a scale for each 32, and in 4 bits with a scale for each 64.
    let (eight, table, matrix) = (Choice::Bits(Bits::Eight), 96 * (64 + 8), 64 * (32 + 4));
    let with = |(head, embedding), budget| {
        quantized(&model, &QuantizeOptions { budget: Some(budget), head, embedding, ..options() })
    };
    let smallest = |choices| match with(choices, 1).unwrap_err() {
        QuantizeError::Budget { smallest, .. } => smallest,
        other => panic!("{other}"),
    };
    let both = (eight, eight);
    assert_eq!(smallest(both), table + matrix);
    assert_eq!(with(both, table + matrix).unwrap().summary.bytes_after, table + matrix);
    // One of both in given bits: the table is there twice, whichever operator comes first.
    for choices in [(eight, Choice::Same), (Choice::Same, eight)] {
        assert_eq!(smallest(choices), table + matrix + 96 * (32 + 4), "{choices:?}");
    }
    // The head keeps its floats, and with them the embedding: as asked, not because they fit.
    let kept = with((Choice::None, Choice::Same), 96 * 64 * 4 + 64 * (64 + 8)).unwrap();
    assert_eq!(kept.summary.left, [(LeftReason::Asked, 1)].into());
}

#[test]
fn a_tied_weight_may_be_stored_as_the_head_takes_it() {
    let nodes = vec![
        node("Transpose", &["head"], &["table"]),
        node("Gather", &["table", "ids"], &["e"]),
        node("MatMul", &["e", "head"], &["logits"]),
    ];
    let proto = of(nodes, vec![floats("head", &[64, 96])], &["logits"]);
    let both = quantized(&open(&proto).unwrap(), &QuantizeOptions { embedding: Choice::Same, ..options() }).unwrap();
    assert_eq!(operators(&both), ["GatherBlockQuantized", "MatMulNBits"]);
    assert_eq!((both.summary.bytes_kept, both.summary.formats.values().sum::<usize>()), (0, 1));
    assert_eq!(weights(&both)["head_Q4G32_table"].1, [96, 32]);
}

#[test]
fn weights_of_other_kinds_are_left_and_counted() {
    let nodes = vec![
        node("MatMul", &["x", "w"], &["y"]),
        node("MatMul", &["x", "small"], &["a"]),
        node("MatMul", &["x", "stack"], &["b"]),
        node("MatMul", &["left", "w2"], &["c"]),
        node("Add", &["y", "w3"], &["d"]),
    ];
    let weights_of = vec![
        floats("w", &[64, 96]),
        floats("small", &[64, 8]),
        floats("stack", &[1, 64, 96]),
        floats("left", &[96, 64]),
        floats("w2", &[64, 96]),
        floats("w3", &[1, 96]),
    ];
    let done = quantized(&open(&of(nodes, weights_of, &["y"])).unwrap(), &options()).unwrap();
    let expected = [(LeftReason::Small, 1), (LeftReason::ThreeDimensional, 1), (LeftReason::LeftOperand, 1)];
    assert_eq!(done.summary.left, expected.into());
    assert_eq!(done.summary.formats.values().sum::<usize>(), 1);
}

#[test]
fn a_quantized_model_and_one_without_matrices_are_refused_with_the_reason() {
    let done = quantized(
        &open(&of(vec![node("MatMul", &["x", "w"], &["y"])], vec![floats("w", &[64, 96])], &["y"])).unwrap(),
        &options(),
    );
    let done = done.unwrap().model;
    // The budget is not the reason, also where it is too small or larger than all weights.
    for budget in [None, Some(1), Some(1 << 30)] {
        let again = quantized(&done, &QuantizeOptions { budget, ..options() }).unwrap_err().to_string();
        assert!(again.contains("quantized already (operators that read quantized weights: 1)"), "{budget:?}: {again}");
    }
    let none = quantized(&open(&of(vec![node("Identity", &["x"], &["y"])], vec![], &["y"])).unwrap(), &options());
    assert!(none.unwrap_err().to_string().contains("no MatMul or Gemm"));
}

/// A model whose weight `w` is in a file.
fn external_model(dir: &Path, numbers: &[f32]) -> Model {
    let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    fs::write(dir.join("w.data"), &bytes).unwrap();
    let entries = [("location", "w.data"), ("offset", "0"), ("length", &bytes.len().to_string())];
    let weights_of = vec![external("w", F, &[64, 96], &entries), external("other", F, &[64, 96], &entries)];
    let nodes = vec![node("MatMul", &["x", "w"], &["y"]), node("MatMul", &["x", "other"], &["z"])];
    Model::open(&save(dir, &of(nodes, weights_of, &["y", "z"]))).unwrap()
}

#[test]
fn packing_computes_the_weights_once_and_a_dry_run_gives_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let numbers: Vec<f32> = (0..64 * 96).map(|i| (i % 101) as f32 / 50.0 - 1.0).collect();
    let done = quantized(&external_model(dir.path(), &numbers), &options()).unwrap();
    assert_eq!(done.summary.formats.values().sum::<usize>(), 1, "two names, the same bytes");
    let virtual_files = VirtualFiles::from([(QUANTIZED_FILE.to_owned(), done.contents.clone())]);
    let mut models = [done.model.proto().clone()];
    let out = tempfile::tempdir().unwrap();
    let pack_again = || {
        let mut models = [done.model.proto().clone()];
        pack(&mut models, done.model.weights(), &virtual_files, out.path(), "p.bin", &mut |_| {}).unwrap()
    };
    let stats = pack_again();
    assert_eq!((stats.copied, stats.resumed), (done.summary.bytes_after, 0));
    let packed = fs::read(out.path().join("p.bin")).unwrap();
    let dry = pack_virtually(&mut models, done.model.weights(), &virtual_files, "p.bin").unwrap();
    let mut bytes = vec![];
    std::io::Read::read_to_end(&mut dry.reader(), &mut bytes).unwrap();
    assert_eq!(bytes, packed);
    // An interrupted run left the numbers, and not all scales.
    fs::write(out.path().join("p.bin.partial"), &packed[..96 * 32 + 100]).unwrap();
    fs::remove_file(out.path().join("p.bin")).unwrap();
    let stats = pack_again();
    assert_eq!((stats.copied, stats.resumed), (96 * 8, 96 * 32));
    assert_eq!(fs::read(out.path().join("p.bin")).unwrap(), packed);
}

#[test]
fn a_number_that_is_not_finite_ends_packing_with_the_name_of_the_weight() {
    let dir = tempfile::tempdir().unwrap();
    let mut numbers = vec![1.0; 64 * 96];
    numbers[96 * 3 + 5] = f32::NAN;
    let done = quantized(&external_model(dir.path(), &numbers), &options()).unwrap();
    let virtual_files = VirtualFiles::from([(QUANTIZED_FILE.to_owned(), done.contents.clone())]);
    let mut models = [done.model.proto().clone()];
    let out = tempfile::tempdir().unwrap();
    let error = pack(&mut models, done.model.weights(), &virtual_files, out.path(), "p.bin", &mut |_| {}).unwrap_err();
    assert!(matches!(error, PackError::NotFinite(_)), "{error}");
    let text = error.to_string();
    assert!(text.contains("\"w\"") && text.contains("row 3, column 5 (byte 1172 of the weight)"), "{text}");
    assert!(!out.path().join("p.bin").exists());
}

/// A product `name` of random-looking weights of a size.
fn scaled(name: &str, scale: f32) -> TensorProto {
    let bytes = (0..128 * 96).flat_map(|i: i32| (scale * ((i * 7919 % 1013) as f32 / 500.0 - 1.0)).to_le_bytes());
    TensorProto { raw_data: Some(bytes.collect()), ..tensor(name, F, &[128, 96]) }
}

fn weight_bytes(model: &Model) -> u64 {
    let graph = model.graph().unwrap();
    graph.value_ids().filter_map(|id| graph.weight(id)).map(|weight| weight.bytes).sum()
}

#[test]
fn a_budget_goes_to_the_matrices_with_most_energy() {
    let products = [("a", 0.1), ("b", 10.0), ("c", 1.0)];
    let nodes = products.iter().map(|(name, _)| node("MatMul", &["long", name], &[&format!("{name} y")])).collect();
    let mut proto = of(nodes, products.iter().map(|(name, scale)| scaled(name, *scale)).collect(), &["a y"]);
    let graph = proto.graph.as_mut().unwrap();
    graph.input.push(value("long", F, &["1", "5", "128"]));
    let dir = tempfile::tempdir().unwrap();
    let model = Model::open(&save(dir.path(), &proto)).unwrap();
    let with = |budget| quantized(&model, &QuantizeOptions { budget: Some(budget), ..options() });
    let smallest = 3 * (128 / 2 + 4) * 96;
    for budget in [smallest, smallest + 12_000, smallest + 50_000, 3 * 128 * 96 * 4 - 1] {
        let done = with(budget).unwrap();
        assert!(weight_bytes(&done.model) <= budget, "{budget}");
        let bits = |name: &str| {
            let of_matrix = done.model.graph_proto().node.iter().find(|node| node.output[0] == format!("{name} y"));
            ints(of_matrix.unwrap()).get("bits").copied().unwrap_or(32)
        };
        assert!(bits("b") >= bits("c") && bits("c") >= bits("a"), "{budget}");
    }
    let error = with(smallest - 1).unwrap_err().to_string();
    assert!(error.contains("in the smallest formats"), "{error}");
    let all = with(3 * 128 * 96 * 4).unwrap_err().to_string();
    assert!(all.contains("nothing to quantize: all weights take 144 KiB as they are"), "{all}");
}
