//! Which operators are divided by rows, and how; and what is refused.

mod build;

use build::Build;
use hpp_graph::{
    Attribute, BlockKind, Graph, InputDivision, RowDivision, RowNode, RowsError, RowsReason, ShardLayout, WeightSlice,
    divide_rows, infer, segment,
};
use hpp_schema::DType;

/// An MLP from `mid` to the value that it returns.
type Mlp<'a> = &'a dyn Fn(&mut Build, usize) -> String;

/// A decoder of two layers with 4 heads of 4 elements, 2 of keys and values, and hidden states of 8 elements.
fn decoder(mlp: Mlp) -> Graph {
    let mut b = Build::default();
    b.input("input_ids", DType::Int64, "batch, sequence");
    b.input("lengths", DType::Int32, "batch");
    b.input("total", DType::Int32, "1");
    for layer in 0..2 {
        for kind in ["key", "value"] {
            b.input(&format!("past.{layer}.{kind}"), DType::Float32, "batch, 2, past, 4");
        }
    }
    b.weight("table", "32, 8");
    b.node("Gather", &["table", "input_ids"], &["h0"]);
    for layer in 0..2 {
        attention(&mut b, layer);
        let n = |name: &str| format!("{name}{layer}");
        let narrow = mlp(&mut b, layer);
        b.node("Add", &[&n("mid"), &narrow], &[&format!("h{}", layer + 1)]);
    }
    b.weight("head", "8, 32");
    b.node("MatMul", &["h2", "head"], &["logits"]);
    b.output("logits");
    for layer in 0..2 {
        for kind in ["key", "value"] {
            let name = format!("present.{layer}.{kind}");
            b.typed(&name, DType::Float32, "batch, 2, past + sequence, 4");
            b.output(&name);
        }
    }
    b.graph
}

fn attention(b: &mut Build, layer: usize) {
    let n = |name: &str| format!("{name}{layer}");
    for (name, columns) in [("q", 16), ("k", 8), ("v", 8)] {
        b.weight(&n(&format!("w{name}")), &format!("8, {columns}"));
        b.node("MatMul", &[&n("h"), &n(&format!("w{name}"))], &[&n(name)]);
    }
    let (past, present) = (|kind: &str| format!("past.{layer}.{kind}"), |kind: &str| format!("present.{layer}.{kind}"));
    let inputs = [&n("q"), &n("k"), &n("v"), &past("key"), &past("value"), "lengths", "total"];
    let outputs = [&n("mixed"), &present("key"), &present("value")];
    let heads = [("num_heads", 4), ("kv_num_heads", 2)];
    b.node_with("com.microsoft::GroupQueryAttention", &inputs, &outputs.map(|s| s as &str), &heads);
    b.weight(&n("wo"), "16, 8");
    b.node("MatMul", &[&n("mixed"), &n("wo")], &[&n("o")]);
    b.node("Add", &[&n("h"), &n("o")], &[&n("mid")]);
}

/// Adds a value with integers.
fn ints(b: &mut Build, name: &str, ints: &[i64]) {
    let weight = hpp_graph::Weight { bytes: 8 * ints.len() as u64, ints: Some(ints.to_vec()), content: None };
    let shape = build::shape(&ints.len().to_string());
    b.value(name, Some(DType::Int64), Some(shape), hpp_graph::Origin::Weight(weight));
}

/// `mid` times a matrix of these columns, as `wide`.
fn up(b: &mut Build, layer: usize, columns: u64) -> String {
    let n = |name: &str| format!("{name}{layer}");
    b.weight(&n("up"), &format!("8, {columns}"));
    b.node("MatMul", &[&n("mid"), &n("up")], &[&n("wide")]);
    n("wide")
}

/// This value of these columns times a matrix, as `narrow`.
fn down(b: &mut Build, layer: usize, value: &str, rows: u64) -> String {
    let n = |name: &str| format!("{name}{layer}");
    b.weight(&n("down"), &format!("{rows}, 8"));
    b.node("MatMul", &[value, &n("down")], &[&n("narrow")]);
    n("narrow")
}

fn divided(graph: &mut Graph, shards: usize) -> Result<RowDivision, RowsError> {
    infer::infer(graph);
    let segmentation = segment(graph);
    let layers = (0..segmentation.blocks.len()).filter(|i| matches!(segmentation.blocks[*i].kind, BlockKind::Layer(_)));
    divide_rows(graph, &segmentation, &layers.collect::<Vec<_>>(), shards)
}

fn refusal(mlp: Mlp) -> RowsError {
    divided(&mut decoder(mlp), 2).expect_err("the model was divided")
}

fn relu(b: &mut Build, layer: usize) -> String {
    let wide = up(b, layer, 16);
    b.node("Relu", &[&wide], &[&format!("active{layer}")]);
    down(b, layer, &format!("active{layer}"), 16)
}

/// How the copies of the node that produces a value read their second input.
fn second_input(graph: &Graph, division: &RowDivision, value: &str) -> InputDivision {
    let id = graph.producer(graph.find(value).unwrap()).unwrap();
    division.node(id).unwrap().inputs[1].clone()
}

fn slice(rows: u64, sections: &[u64], axis: usize) -> InputDivision {
    InputDivision::Slice(WeightSlice { rows, sections: sections.to_vec(), axis })
}

#[test]
fn columns_then_rows() {
    let mut graph = decoder(&relu);
    let division = divided(&mut graph, 2).unwrap();
    let layout = |name: &str| division.layout(graph.find(name).unwrap()).unwrap().clone();
    assert_eq!((layout("q1"), layout("active1")), (ShardLayout::Columns(vec![16]), ShardLayout::Columns(vec![16])));
    assert_eq!((layout("o1"), layout("mid1")), (ShardLayout::Partial, ShardLayout::Replicated));
    assert_eq!(layout("present.1.key"), ShardLayout::State);
    let input = |value: &str| second_input(&graph, &division, value);
    assert_eq!((input("wide1"), input("narrow1")), (slice(8, &[16], 1), slice(1, &[16], 0)));
    // Behind the last summands only shard 0 goes on.
    let node = |value: &str| graph.producer(graph.find(value).unwrap()).unwrap();
    let kept = |node: RowNode| division.is_kept(node);
    assert!(kept(RowNode::Sum(node("narrow0"), 1)) && kept(RowNode::Sum(node("narrow1"), 0)));
    assert!(!kept(RowNode::Sum(node("narrow1"), 1)) && kept(RowNode::Copy(node("narrow1"), 1)));
    let half = WeightSlice { rows: 1, sections: vec![16], axis: 0 };
    assert_eq!(half.ranges(1, 2), [(8, 8)]);
    let packed = WeightSlice { rows: 3, sections: vec![8, 4, 4], axis: 1 };
    assert_eq!((packed.columns(), packed.ranges(1, 2)), (16, vec![(4, 4), (10, 2), (14, 2)]));
}

#[test]
fn a_packed_matrix_is_divided_as_its_readers_take_it_apart() {
    let by_slices = |b: &mut Build, layer: usize| {
        let wide = up(b, layer, 24);
        let n = |name: &str| format!("{name}{layer}");
        for (name, bounds) in [("zero", 0), ("half", 12), ("end", i64::MAX), ("axis", -1)] {
            ints(b, &n(name), &[bounds]);
        }
        b.node("Slice", &[&wide, &n("zero"), &n("half"), &n("axis")], &[&n("gate")]);
        b.node("Slice", &[&wide, &n("half"), &n("end"), &n("axis")], &[&n("other")]);
        b.node("Mul", &[&n("gate"), &n("other")], &[&n("active")]);
        down(b, layer, &n("active"), 12)
    };
    let mut graph = decoder(&by_slices);
    let division = divided(&mut graph, 2).unwrap();
    assert_eq!(second_input(&graph, &division, "wide0"), slice(8, &[12, 12], 1));
    let id = graph.producer(graph.find("other0").unwrap()).unwrap();
    let bounds = [InputDivision::Ints(vec![6]), InputDivision::Ints(vec![12])];
    assert_eq!(division.node(id).unwrap().inputs[1..3], bounds);
    let by_split = |b: &mut Build, layer: usize| {
        let wide = up(b, layer, 24);
        let n = |name: &str| format!("{name}{layer}");
        b.node_with("Split", &[&wide], &[&n("gate"), &n("other")], &[("axis", -1), ("num_outputs", 2)]);
        b.node("Mul", &[&n("gate"), &n("other")], &[&n("active")]);
        down(b, layer, &n("active"), 12)
    };
    let mut graph = decoder(&by_split);
    let division = divided(&mut graph, 2).unwrap();
    assert_eq!(second_input(&graph, &division, "wide0"), slice(8, &[12, 12], 1));
}

#[test]
fn transposed_weights_and_biases_are_divided_along_the_other_axis() {
    let gemm = |b: &mut Build, layer: usize| {
        let n = |name: &str| format!("{name}{layer}");
        b.weight(&n("up"), "16, 8");
        b.weight(&n("up_bias"), "16");
        b.weight(&n("down"), "8, 16");
        b.weight(&n("down_bias"), "8");
        let transposed = [("transB", 1)];
        b.node_with("Gemm", &[&n("mid"), &n("up"), &n("up_bias")], &[&n("wide")], &transposed);
        b.node("Tanh", &[&n("wide")], &[&n("active")]);
        b.node_with("Gemm", &[&n("active"), &n("down"), &n("down_bias")], &[&n("narrow")], &transposed);
        n("narrow")
    };
    let mut graph = decoder(&gemm);
    let division = divided(&mut graph, 2).unwrap();
    let inputs = |value: &str| {
        let id = graph.producer(graph.find(value).unwrap()).unwrap();
        division.node(id).unwrap().inputs[1..].to_vec()
    };
    assert_eq!(inputs("wide1"), [slice(1, &[16], 0), slice(1, &[16], 0)]);
    assert_eq!(inputs("narrow1"), [slice(8, &[16], 1), InputDivision::FirstOnly]);
}

#[test]
fn what_cannot_be_divided_is_refused_with_its_reason() {
    let with = |operator: &'static str| {
        move |b: &mut Build, layer: usize| {
            let wide = up(b, layer, 16);
            b.node(operator, &[&wide], &[&format!("active{layer}")]);
            down(b, layer, &format!("active{layer}"), 16)
        }
    };
    let reason = refusal(&with("Softmax"));
    assert_eq!(reason.reason, RowsReason::Operator { value: "wide0".into() });
    assert!(reason.to_string().starts_with("cannot divide layers.0 by rows: Softmax \"n"), "{reason}");
    let odd = |b: &mut Build, layer: usize| {
        let wide = up(b, layer, 15);
        down(b, layer, &wide, 15)
    };
    assert_eq!(refusal(&odd).reason, RowsReason::Columns { columns: 15, kind: "columns", shards: 2 });
    let norm = |b: &mut Build, layer: usize| {
        let wide = up(b, layer, 16);
        b.weight(&format!("norm{layer}"), "16");
        b.node("RMSNormalization", &[&wide, &format!("norm{layer}")], &[&format!("active{layer}")]);
        down(b, layer, &format!("active{layer}"), 16)
    };
    assert!(matches!(refusal(&norm).reason, RowsReason::Form(text) if text.contains("norm over all heads")));
    let turned = |b: &mut Build, layer: usize| {
        b.weight(&format!("stored{layer}"), "16, 8");
        b.node("Transpose", &[&format!("stored{layer}")], &[&format!("turned{layer}")]);
        b.node("MatMul", &[&format!("mid{layer}"), &format!("turned{layer}")], &[&format!("wide{layer}")]);
        down(b, layer, &format!("wide{layer}"), 16)
    };
    assert_eq!(refusal(&turned).reason, RowsReason::ComputedWeight { weight: "turned0".into() });
    // Only a product by columns, whose result is added to the hidden state.
    let square = |b: &mut Build, layer: usize| up(b, layer, 8);
    let mixed = RowsReason::Mixed { part: "wide0".into(), whole: "mid0".into() };
    assert_eq!(refusal(&square).reason, mixed);
    let random = |b: &mut Build, layer: usize| {
        b.node("Dropout", &[&format!("mid{layer}")], &[&format!("dropped{layer}")]);
        relu(b, layer)
    };
    assert!(matches!(refusal(&random).reason, RowsReason::Random));
    let convolution = |b: &mut Build, layer: usize| {
        b.weight(&format!("kernel{layer}"), "8, 8, 1");
        b.node("Conv", &[&format!("mid{layer}"), &format!("kernel{layer}")], &[&format!("narrow{layer}")]);
        format!("narrow{layer}")
    };
    assert_eq!(refusal(&convolution).reason, RowsReason::Matrix { weight: "kernel0".into() });
}

#[test]
fn only_layers_are_divided_and_nothing_outside_reads_parts() {
    let graph = &mut decoder(&relu);
    infer::infer(graph);
    let segmentation = segment(graph);
    for (blocks, shards) in [(vec![0], 2), (vec![1], 1), (vec![99], 2)] {
        let error = divide_rows(graph, &segmentation, &blocks, shards).unwrap_err();
        assert_eq!(error.reason, RowsReason::NotALayer { shards });
    }
    // A model that also returns activations of which each shard has a part.
    let mut returned = decoder(&relu);
    let activations = returned.find("active0").unwrap();
    returned.outputs.push(activations);
    assert_eq!(divided(&mut returned, 2).unwrap_err().reason, RowsReason::Returned { value: "active0".into() });
}

/// Attributes of hostile models overflow nothing.
#[test]
fn absurd_numbers_are_refused() {
    for heads in [i64::MAX, i64::MAX - 1, 0, -2, 1 << 62] {
        for name in ["num_heads", "kv_num_heads"] {
            let mut graph = decoder(&relu);
            let attention = graph.nodes.iter_mut().filter(|node| node.op_type == "GroupQueryAttention");
            attention.for_each(|node| drop(node.attributes.insert(name.into(), Attribute::Int(heads))));
            assert!(divided(&mut graph, 2).is_err(), "{name} {heads}");
        }
        for name in ["K", "N", "bits", "block_size"] {
            let quantized = |b: &mut Build, layer: usize| {
                let n = |name: &str| format!("{name}{layer}");
                let mut sizes = [("K", 8), ("N", 16), ("bits", 4), ("block_size", 16)];
                sizes.iter_mut().filter(|size| size.0 == name).for_each(|size| size.1 = heads);
                [("B", "16, 1, 8"), ("scales", "16, 1"), ("zero", "16, 1")].iter().for_each(|(part, dims)| {
                    b.weight(&n(part), dims);
                });
                let inputs = [&n("mid"), &n("B"), &n("scales"), &n("zero")];
                b.node_with("com.microsoft::MatMulNBits", &inputs.map(|s| s as &str), &[&n("wide")], &sizes);
                down(b, layer, &n("wide"), 16)
            };
            let _ = divided(&mut decoder(&quantized), 2);
        }
    }
}
