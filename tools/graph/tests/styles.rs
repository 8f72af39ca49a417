//! Unusual architectures: parallel residuals, post-norm, hybrids, side inputs, per-layer embedding tables.

mod build;

use build::Build;
use hpp_graph::{
    Attribute, BlockKind, Body, Graph, Origin, Segmentation, StateChange, Weight, cut, infer, join, segment,
    whole_mixtures,
};
use hpp_schema::DType;

struct Net {
    b: Build,
    count: usize,
    /// Size of hidden states, queries, keys and values.
    width: usize,
}

/// Builds layers. Every method adds nodes and returns the name of its result.
impl Net {
    fn new(input: &str, dtype: DType, dims: &str) -> Self {
        let mut b = Build::default();
        b.input(input, dtype, dims);
        Net { b, count: 0, width: 8 }
    }

    fn fresh(&mut self) -> String {
        self.count += 1;
        format!("t{}", self.count)
    }

    fn op(&mut self, op: &str, inputs: &[&str]) -> String {
        let out = self.fresh();
        self.b.node(op, inputs, &[&out]);
        out
    }

    fn linear(&mut self, x: &str) -> String {
        let weight = self.fresh();
        self.b.weight(&weight, &format!("{0}, {0}", self.width));
        let product = self.op("MatMul", &[x, &weight]);
        let bias = self.fresh();
        self.b.weight(&bias, &self.width.to_string());
        self.op("Add", &[&product, &bias])
    }

    fn norm(&mut self, x: &str) -> String {
        let scale = self.fresh();
        self.b.weight(&scale, &self.width.to_string());
        let square = self.op("Mul", &[x, x]);
        let mean = self.op("ReduceMean", &[&square]);
        let root = self.op("Sqrt", &[&mean]);
        let scaled = self.op("Div", &[x, &root]);
        self.op("Mul", &[&scaled, &scale])
    }

    fn attention(&mut self, x: &str, memory: &str) -> String {
        let (q, k, v) = (self.linear(x), self.linear(memory), self.linear(memory));
        let turned = self.op("Transpose", &[&k]);
        let scores = self.op("MatMul", &[&q, &turned]);
        let weights = self.op("Softmax", &[&scores]);
        let mixed = self.op("MatMul", &[&weights, &v]);
        self.linear(&mixed)
    }

    /// A node with a body of `nodes` nodes that captures these values.
    fn with_body(&mut self, op: &str, inputs: &[&str], captures: &[&str], nodes: usize) -> String {
        let out = self.op(op, &[inputs, captures].concat());
        let node = self.b.graph.nodes.last_mut().unwrap();
        node.captures = node.inputs.split_off(inputs.len()).into_iter().flatten().collect();
        let body = Body {
            structure: 0,
            output_dtypes: vec![None],
            output_shapes: vec![None],
            weight_bytes: 0,
            nodes,
            packed: Default::default(),
        };
        node.attributes.insert("body".to_owned(), Attribute::Body(body));
        out
    }

    /// Declares the shape of a value.
    fn typed(&mut self, name: &str, dims: &str) {
        self.b.typed(name, DType::Float32, dims);
    }

    fn feed_forward(&mut self, x: &str) -> String {
        let wide = self.linear(x);
        let active = self.op("Gelu", &[&wide]);
        self.linear(&active)
    }

    /// A router and experts that are all computed and weighted.
    fn mixture(&mut self, x: &str, experts: usize) -> String {
        let scores = self.linear(x);
        let shares = self.op("Softmax", &[&scores]);
        let mut sum: Option<String> = None;
        for _ in 0..experts {
            let y = self.feed_forward(x);
            let part = self.op("Mul", &[&y, &shares]);
            sum = Some(match sum {
                Some(sum) => self.op("Add", &[&sum, &part]),
                None => part,
            });
        }
        sum.unwrap()
    }

    fn embedding(&mut self, ids: &str) -> String {
        let table = self.fresh();
        self.b.weight(&table, &format!("32, {}", self.width));
        self.op("Gather", &[&table, ids])
    }

    fn finish(mut self, x: &str) -> Graph {
        self.b.output(x);
        self.b.graph
    }
}

fn check(graph: &Graph, layers: usize) -> Segmentation {
    let s = segment(graph);
    let labels: Vec<_> = s.blocks.iter().map(|b| b.label.as_str()).collect();
    assert_eq!(s.layer_count(), layers, "{labels:?} {:?}", s.undecided);
    let groups: Vec<_> = (0..s.blocks.len()).map(|i| i..i + 1).collect();
    let parts = cut(graph, &s, &groups).unwrap();
    join(graph, &parts, |n| s.weights.is_weight_only(n)).unwrap();
    s
}

fn widths(s: &Segmentation) -> Vec<usize> {
    s.boundaries.iter().map(|b| b.values.len()).collect()
}

fn classes(s: &Segmentation) -> Vec<u32> {
    s.blocks.iter().map(|b| b.class.0).collect()
}

#[test]
fn attention_and_feed_forward_side_by_side() {
    let mut n = Net::new("ids", DType::Int64, "batch, sequence");
    let mut x = n.embedding("ids");
    for _ in 0..4 {
        let (a, b) = (n.norm(&x), n.norm(&x));
        let (a, b) = (n.attention(&a, &a), n.feed_forward(&b));
        let both = n.op("Add", &[&a, &b]);
        x = n.op("Add", &[&both, &x]);
    }
    let x = n.norm(&x);
    let x = n.linear(&x);
    let s = check(&n.finish(&x), 4);
    assert_eq!(widths(&s), [1; 5]);
    assert_eq!(classes(&s), [0, 1, 1, 1, 1, 2]);
}

#[test]
fn norms_after_each_sum() {
    let mut n = Net::new("ids", DType::Int64, "batch, sequence");
    let x = n.embedding("ids");
    let mut x = n.norm(&x);
    for _ in 0..4 {
        let y = n.attention(&x, &x);
        let sum = n.op("Add", &[&x, &y]);
        let middle = n.norm(&sum);
        let y = n.feed_forward(&middle);
        let sum = n.op("Add", &[&middle, &y]);
        x = n.norm(&sum);
    }
    let s = check(&n.finish(&x), 4);
    assert_eq!(widths(&s), [1; 4]);
    assert_eq!(classes(&s), [0, 1, 1, 1, 1]);
}

#[test]
fn image_patches_then_layers() {
    let mut n = Net::new("pixels", DType::Float32, "batch, 3, 16, 16");
    n.b.weight("patch", "8, 3, 4, 4");
    n.b.weight("class_token", "1, 1, 8");
    n.b.weight("positions", "1, 17, 8");
    let x = n.op("Conv", &["pixels", "patch"]);
    let x = n.op("Flatten", &[&x]);
    let x = n.op("Concat", &["class_token", &x]);
    let mut x = n.op("Add", &[&x, "positions"]);
    for _ in 0..3 {
        let y = n.norm(&x);
        let y = n.attention(&y, &y);
        x = n.op("Add", &[&x, &y]);
        let y = n.norm(&x);
        let y = n.feed_forward(&y);
        x = n.op("Add", &[&x, &y]);
    }
    let x = n.norm(&x);
    let x = n.op("Slice", &[&x]);
    let x = n.linear(&x);
    let s = check(&n.finish(&x), 3);
    assert_eq!(widths(&s), [1; 4]);
    assert_eq!(classes(&s), [0, 1, 1, 1, 2]);
}

#[test]
fn cross_attention_does_not_make_a_layer() {
    for layers in [1, 2, 4] {
        let mut n = Net::new("ids", DType::Int64, "batch, sequence");
        n.b.input("encoder_hidden_states", DType::Float32, "batch, encoded, 8");
        let mut x = n.embedding("ids");
        for _ in 0..layers {
            let y = n.norm(&x);
            let y = n.attention(&y, &y);
            x = n.op("Add", &[&x, &y]);
            let y = n.norm(&x);
            let y = n.attention(&y, "encoder_hidden_states");
            x = n.op("Add", &[&x, &y]);
            let y = n.norm(&x);
            let y = n.feed_forward(&y);
            x = n.op("Add", &[&x, &y]);
        }
        let x = n.linear(&x);
        let s = check(&n.finish(&x), layers);
        assert_eq!(widths(&s), vec![1; layers + 1]);
    }
}

/// A state-space layer has a convolution window and a recurrence, with projections in between.
#[test]
fn convolution_and_recurrence_are_one_layer() {
    let mut n = Net::new("ids", DType::Int64, "batch, sequence");
    let mut x = n.embedding("ids");
    for layer in 0..4 {
        for (kind, dims) in [("conv", "batch, 8, 3"), ("ssm", "batch, 8, 4")] {
            n.b.input(&format!("past.{layer}.{kind}"), DType::Float32, dims);
        }
        let y = n.norm(&x);
        let y = n.linear(&y);
        let window = n.fresh();
        n.b.node_with("Concat", &[&format!("past.{layer}.conv"), &y], &[&window], &[("axis", 2)]);
        n.b.node("Slice", &[&window], &[&format!("present.{layer}.conv")]);
        let kernel = n.fresh();
        n.b.weight(&kernel, "8, 1, 4");
        let y = n.op("Conv", &[&window, &kernel]);
        let (step, gate) = (n.linear(&y), n.linear(&y));
        let kept = n.op("Mul", &[&format!("past.{layer}.ssm"), &step]);
        n.b.node("Add", &[&kept, &gate], &[&format!("present.{layer}.ssm")]);
        let y = n.op("MatMul", &[&format!("present.{layer}.ssm"), &gate]);
        let y = n.linear(&y);
        x = n.op("Add", &[&x, &y]);
        for (kind, dims) in [("conv", "batch, 8, 3"), ("ssm", "batch, 8, 4")] {
            n.b.typed(&format!("present.{layer}.{kind}"), DType::Float32, dims);
            n.b.output(&format!("present.{layer}.{kind}"));
        }
    }
    let x = n.norm(&x);
    let x = n.linear(&x);
    let s = check(&n.finish(&x), 4);
    assert_eq!(widths(&s), [1; 5]);
    assert_eq!(s.states.len(), 8);
    assert!(s.states.iter().all(|s| s.pair.change == StateChange::Replace));
}

/// Every layer adds a row looked up by token. The tables stay with the embedding; the rows cross boundaries.
#[test]
fn embeddings_for_each_layer_stay_with_the_embedding() {
    let mut n = Net::new("ids", DType::Int64, "batch, sequence");
    let mut x = n.embedding("ids");
    let extra = n.embedding("ids");
    for _ in 0..4 {
        let y = n.norm(&x);
        let y = n.attention(&y, &y);
        x = n.op("Add", &[&x, &y]);
        let part = n.op("Slice", &[&extra]);
        let gated = n.op("Mul", &[&x, &part]);
        let y = n.feed_forward(&gated);
        x = n.op("Add", &[&x, &y]);
    }
    let x = n.linear(&x);
    let graph = n.finish(&x);
    let s = check(&graph, 4);
    let parts = cut(&graph, &s, &[0..1, 1..3, 3..6]).unwrap();
    let tables = |p: &hpp_graph::PartitionGraph| p.nodes.iter().filter(|n| graph.node(**n).op_type == "Gather").count();
    assert_eq!(parts.iter().map(tables).collect::<Vec<_>>(), [2, 0, 0]);
    assert_eq!(widths(&s), [2, 2, 2, 2, 1]);
}

/// Each layer also reads the values of the first layer.
#[test]
fn values_of_the_first_layer_cross_every_boundary() {
    let mut n = Net::new("ids", DType::Int64, "batch, sequence");
    let mut x = n.embedding("ids");
    let mut first: Option<String> = None;
    for _ in 0..6 {
        let y = n.norm(&x);
        let (q, k, v) = (n.linear(&y), n.linear(&y), n.linear(&y));
        let v = match &first {
            Some(first) => n.op("Add", &[&v, &first.clone()]),
            None => {
                first = Some(v.clone());
                v
            }
        };
        let turned = n.op("Transpose", &[&k]);
        let scores = n.op("MatMul", &[&q, &turned]);
        let weights = n.op("Softmax", &[&scores]);
        let mixed = n.op("MatMul", &[&weights, &v]);
        let y = n.linear(&mixed);
        x = n.op("Add", &[&x, &y]);
        let y = n.norm(&x);
        let y = n.feed_forward(&y);
        x = n.op("Add", &[&x, &y]);
    }
    let x = n.linear(&x);
    let s = check(&n.finish(&x), 6);
    assert_eq!(widths(&s), [1, 2, 2, 2, 2, 2, 1]);
}

/// Every second layer reads the keys and values of the layer before it, so no single node separates the two. The cut
/// between them lies between the layers and not inside the attention, where scores that grow with the square of the sequence
/// would cross.
#[test]
fn layers_that_share_keys_and_values_are_not_cut_inside_the_attention() {
    let mut n = Net::new("ids", DType::Int64, "batch, sequence");
    n.width = 64;
    let mut x = n.embedding("ids");
    n.typed(&x, "batch, sequence, 64");
    let mut shared = None;
    for layer in 0..6 {
        let y = n.norm(&x);
        let q = n.linear(&y);
        if layer % 2 == 0 {
            let (k, v) = (n.linear(&y), n.linear(&y));
            shared = Some((n.op("Transpose", &[&k]), v));
        }
        let (k, v) = shared.clone().unwrap();
        let scores = n.op("MatMul", &[&q, &k]);
        let weights = n.op("Softmax", &[&scores]);
        let mixed = n.op("MatMul", &[&weights, &v]);
        let y = n.linear(&mixed);
        let middle = n.op("Add", &[&x, &y]);
        let y = n.norm(&middle);
        let y = n.feed_forward(&y);
        x = n.op("Add", &[&middle, &y]);
        for name in [&q, &v, &middle, &x] {
            n.typed(name, "batch, sequence, 64");
        }
        n.typed(&k, "batch, 64, sequence");
        for name in [&scores, &weights] {
            n.typed(name, "batch, sequence, sequence");
        }
    }
    let x = n.linear(&x);
    let graph = n.finish(&x);
    let s = check(&graph, 6);
    assert_eq!(widths(&s), [1, 3, 1, 3, 1, 3, 1]);
    assert_eq!(classes(&s), [0, 1, 2, 1, 2, 1, 2, 3]);
    let linear = hpp_schema::Dim::from_param("batch*sequence*64");
    for value in s.boundaries.iter().flat_map(|b| &b.values) {
        let dims = graph.value(*value).shape.clone().unwrap();
        let elements = dims.into_iter().reduce(|a, b| a * b).unwrap();
        assert_eq!(elements, linear, "{}", graph.value(*value).name);
    }
}

/// The last layer resembles not the previous layer but the one before it.
#[test]
fn dense_layers_and_mixtures_of_experts_alternate() {
    for (last_is_mixture, head) in [(true, 1), (false, 1), (true, 2), (false, 2)] {
        let mut n = Net::new("ids", DType::Int64, "batch, sequence");
        let mut x = n.embedding("ids");
        for layer in 0..4 {
            let y = n.norm(&x);
            let y = n.attention(&y, &y);
            x = n.op("Add", &[&x, &y]);
            let y = n.norm(&x);
            let y = if (layer % 2 == 1) == last_is_mixture { n.mixture(&y, 4) } else { n.feed_forward(&y) };
            x = n.op("Add", &[&x, &y]);
        }
        x = n.norm(&x);
        for _ in 1..head {
            x = n.linear(&x);
        }
        let table = n.fresh();
        n.b.weight(&table, "8, 32");
        let x = n.op("MatMul", &[&x, &table]);
        let x = n.op("Tanh", &[&x]);
        let s = check(&n.finish(&x), 4);
        assert_eq!(widths(&s), [1; 5]);
        assert_eq!(classes(&s), [0, 1, 2, 1, 2, 3], "last is mixture: {last_is_mixture}, head: {head}");
    }
}

/// Every second layer is an attention alone. The last layer has the same operators as the previous one but matrices of other
/// shapes, as if quantized differently, and does not end after its attention.
#[test]
fn the_last_layer_may_have_other_shapes() {
    let mut n = Net::new("ids", DType::Int64, "batch, sequence");
    let mut x = n.embedding("ids");
    for inner in [None, Some(16), None, Some(16), Some(24)] {
        let y = n.norm(&x);
        let y = n.attention(&y, &y);
        x = n.op("Add", &[&x, &y]);
        if let Some(inner) = inner {
            let (up, down) = (n.fresh(), n.fresh());
            n.b.weight(&up, &format!("8, {inner}"));
            n.b.weight(&down, &format!("{inner}, 8"));
            let y = n.norm(&x);
            let wide = n.op("MatMul", &[&y, &up]);
            let y = n.op("MatMul", &[&wide, &down]);
            x = n.op("Add", &[&x, &y]);
        }
    }
    let x = n.norm(&x);
    let x = n.linear(&x);
    let graph = n.finish(&x);
    let s = check(&graph, 5);
    let products = |b: &hpp_graph::Block| b.nodes.iter().filter(|n| graph.node(**n).op_type == "MatMul").count();
    assert_eq!(s.blocks.iter().map(products).collect::<Vec<_>>(), [0, 6, 8, 6, 8, 8, 1]);
}

/// Every layer computes its own rotary tables, as in older exporters.
#[test]
fn rotary_tables_in_every_layer() {
    let mut n = Net::new("ids", DType::Int64, "batch, sequence");
    n.b.input("position_ids", DType::Int64, "batch, sequence");
    n.b.weight("cos_table", "64, 8");
    let mut x = n.embedding("ids");
    for _ in 0..4 {
        let y = n.norm(&x);
        let (q, k, v) = (n.linear(&y), n.linear(&y), n.linear(&y));
        let cos = n.op("Gather", &["cos_table", "position_ids"]);
        let (q, k) = (n.op("Mul", &[&q, &cos]), n.op("Mul", &[&k, &cos]));
        let turned = n.op("Transpose", &[&k]);
        let scores = n.op("MatMul", &[&q, &turned]);
        let weights = n.op("Softmax", &[&scores]);
        let mixed = n.op("MatMul", &[&weights, &v]);
        let y = n.linear(&mixed);
        x = n.op("Add", &[&x, &y]);
        let y = n.norm(&x);
        let y = n.feed_forward(&y);
        x = n.op("Add", &[&x, &y]);
    }
    let x = n.linear(&x);
    let s = check(&n.finish(&x), 4);
    assert_eq!(widths(&s), [1; 5]);
    assert_eq!(classes(&s), [0, 1, 1, 1, 1, 2]);
}

/// Recurrent layers as loops over the tokens, whose small bodies capture the hidden state and the matrices. A body of that size
/// in an `If` chooses between constants. The sequences that the loops return have no element type and do not cross.
#[test]
fn loops_with_small_bodies_compute_with_the_matrices_they_capture() {
    for (op, blocks) in [("Loop", 4), ("Scan", 4), ("If", 1)] {
        let mut n = Net::new("ids", DType::Int64, "batch, sequence");
        n.b.input("steps", DType::Int64, "");
        let mut x = n.embedding("ids");
        for _ in 0..3 {
            let (input, recurrent) = (n.fresh(), n.fresh());
            n.b.weight(&input, "8, 8");
            n.b.weight(&recurrent, "8, 8");
            let rows = n.with_body(op, &["steps"], &[&x, &input, &recurrent], 14);
            n.b.untyped(&rows);
            let y = n.op("ConcatFromSequence", &[&rows]);
            n.b.untyped(&y);
            x = n.op("Add", &[&x, &y]);
        }
        let x = n.linear(&x);
        let graph = n.finish(&x);
        let s = check(&graph, 0);
        let labels: Vec<_> = s.blocks.iter().map(|b| b.label.as_str()).collect();
        assert_eq!(labels.len(), blocks, "{op} {labels:?}");
        let crossing = s.boundaries.iter().flat_map(|b| &b.values);
        assert!(crossing.into_iter().all(|v| graph.value(*v).dtype.is_some()), "{op}");
    }
}

/// Two towers that join at the end: the deeper one is cut into layers.
#[test]
fn two_towers_are_cut_along_the_deeper() {
    let mut n = Net::new("ids", DType::Int64, "batch, sequence");
    n.b.input("pixels", DType::Float32, "batch, patches, 8");
    let mut towers = vec![];
    for (start, depth) in [(None, 5), (Some("pixels"), 2)] {
        let mut x = match start {
            Some(x) => x.to_owned(),
            None => n.embedding("ids"),
        };
        for _ in 0..depth {
            let y = n.norm(&x);
            let y = n.attention(&y, &y);
            x = n.op("Add", &[&x, &y]);
            let y = n.norm(&x);
            let y = n.feed_forward(&y);
            x = n.op("Add", &[&x, &y]);
        }
        towers.push(n.linear(&x));
    }
    let x = n.op("MatMul", &[&towers[0].clone(), &towers[1].clone()]);
    check(&n.finish(&x), 5);
}

/// Layers with a router over `experts` scores, and what `mixture` makes of the hidden state, the scores and the numbers of the selected experts.
fn routed(experts: usize, mixture: fn(&mut Net, &str, &str, usize) -> String) -> Graph {
    let mut n = Net::new("ids", DType::Int64, "batch, sequence");
    let mut x = n.embedding("ids");
    for layer in 0..3 {
        let a = n.norm(&x);
        let a = n.attention(&a, &a);
        let middle = n.op("Add", &[&x, &a]);
        let y = n.norm(&middle);
        let (router, number) = (n.fresh(), n.fresh());
        n.b.weight(&router, &format!("8, {experts}"));
        let scores = n.op("MatMul", &[&y, &router]);
        let weight = Weight { bytes: 8, ints: Some(vec![2]), content: None };
        n.b.value(&number, Some(DType::Int64), Some(build::shape("1")), Origin::Weight(weight));
        let (best, numbers) = (format!("best.{layer}"), format!("numbers.{layer}"));
        n.b.node("TopK", &[&scores, &number], &[&best, &numbers]);
        let mixed = mixture(&mut n, &y, &numbers, experts);
        n.typed(&mixed, "batch, sequence, 8");
        x = n.op("Add", &[&middle, &mixed]);
    }
    let x = n.norm(&x);
    let x = n.linear(&x);
    let mut graph = n.finish(&x);
    infer::infer(&mut graph);
    graph
}

/// The weights of the selected experts, of all in one tensor.
fn gathered(n: &mut Net, y: &str, numbers: &str, experts: usize) -> String {
    let all = n.fresh();
    n.b.weight(&all, &format!("{experts}, 8, 8"));
    let selected = n.op("Gather", &[&all, numbers]);
    let products = n.op("MatMul", &[y, &selected]);
    n.op("ReduceSum", &[&products])
}

/// Experts one after the other, and one that all tokens use, whose results meet what was selected in a way that is not known.
fn one_by_one(n: &mut Net, y: &str, numbers: &str, experts: usize) -> String {
    let mut sum = n.linear(y);
    for _ in 0..experts {
        let result = n.linear(y);
        let result = n.op("com.example::Pick", &[&result, numbers]);
        sum = n.op("Add", &[&sum, &result]);
    }
    sum
}

#[test]
fn mixtures_whose_experts_are_not_separable_are_found_by_what_the_router_selects() {
    let matrix = 8 * 8 * 4;
    for form in [gathered, one_by_one] {
        let graph = routed(4, form);
        let s = segment(&graph);
        let found = whole_mixtures(&graph, &s);
        let of: Vec<_> = found.iter().map(|found| (found.count, found.active, found.bytes)).collect();
        assert_eq!(of, [(4, 2, 4 * matrix); 3]);
        assert!(found.iter().all(|found| matches!(s.blocks[found.block].kind, BlockKind::Layer(_))), "{found:?}");
    }
}

/// What is selected must be experts: as many slices or matrices as there are scores.
#[test]
fn a_selection_of_something_else_is_no_mixture() {
    let none = |graph: Graph| assert_eq!(whole_mixtures(&graph, &segment(&graph)), []);
    // Rows of a table.
    none(routed(4, |n, y, numbers, experts| {
        let table = n.fresh();
        n.b.weight(&table, &format!("{experts}, 8"));
        let rows = n.op("Gather", &[&table, numbers]);
        let dense = n.feed_forward(y);
        n.op("Add", &[&dense, &rows])
    }));
    // Fewer matrices than scores.
    none(routed(16, |n, y, numbers, _| one_by_one(n, y, numbers, 4)));
}
