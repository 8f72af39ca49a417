//! A model small enough to be worked out by hand: two layers of attention, a ReLU network and a mixture of experts, written as
//! exporters that fuse nothing, or one operator, would.

use crate::child::Probe;
use hpp_model::{LogitsMode, analyse};
use hpp_onnx::proto::attribute_proto::AttributeType;
use hpp_onnx::proto::tensor_shape_proto::{Dimension, dimension};
use hpp_onnx::proto::type_proto::{Tensor, Value};
use hpp_onnx::proto::*;
use hpp_profile::taps::{self, Wanted};
use hpp_schema::{DType, Statistics};
use std::path::Path;

const LAYERS: usize = 2;
const VOCAB: usize = 24;
const HIDDEN: usize = 8;
const HEADS: usize = 2;
const HEAD: usize = HIDDEN / HEADS;
const NEURONS: usize = 12;
const EXPERTS: usize = 4;
const TOP_K: usize = 2;

/// How attention is written.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Style {
    TakenApart,
    MultiHead,
    Standard,
}

/// A number of a weight: the same for the same name and place, and as good as random.
fn number(name: &str, at: usize) -> f32 {
    let seed = name.bytes().fold(17u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
    let mixed = (seed ^ (at as u32).wrapping_mul(0x9e37_79b9)).wrapping_mul(0x85eb_ca6b);
    (((mixed ^ (mixed >> 13)).wrapping_mul(0xc2b2_ae35) >> 8) as f32 / (1 << 23) as f32 - 1.0) / 2.0
}

fn matrix(name: &str, rows: usize, columns: usize) -> Vec<Vec<f64>> {
    (0..rows).map(|r| (0..columns).map(|c| number(name, r * columns + c).into()).collect()).collect()
}

/// The graph, written.
struct Writer {
    graph: GraphProto,
    style: Style,
}

impl Writer {
    fn weight(&mut self, name: &str, dims: &[usize]) -> String {
        let bytes: Vec<u8> = (0..dims.iter().product()).flat_map(|i| number(name, i).to_le_bytes()).collect();
        self.tensor(name, DType::Float32, dims, bytes)
    }

    fn ints(&mut self, name: &str, values: &[i64]) -> String {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.tensor(name, DType::Int64, &[values.len()], bytes)
    }

    fn tensor(&mut self, name: &str, dtype: DType, dims: &[usize], bytes: Vec<u8>) -> String {
        self.graph.initializer.push(TensorProto {
            name: Some(name.into()),
            data_type: Some(dtype.to_onnx()),
            dims: dims.iter().map(|d| *d as i64).collect(),
            raw_data: Some(bytes.into()),
            ..TensorProto::default()
        });
        name.into()
    }

    fn node(&mut self, op: &str, inputs: &[&str], outputs: &[&str], ints: &[(&str, &[i64])]) -> String {
        let attribute = |(name, values): &(&str, &[i64])| {
            let one = values.len() == 1 && *name != "perm";
            AttributeProto {
                name: Some((*name).into()),
                r#type: Some(if one { AttributeType::Int } else { AttributeType::Ints } as i32),
                i: one.then(|| values[0]),
                ints: if one { vec![] } else { values.to_vec() },
                ..AttributeProto::default()
            }
        };
        self.graph.node.push(NodeProto {
            name: Some(format!("{op} {}", outputs[0])),
            op_type: Some(op.into()),
            domain: (op == "MultiHeadAttention").then(|| "com.microsoft".into()),
            input: inputs.iter().map(|s| (*s).into()).collect(),
            output: outputs.iter().map(|s| (*s).into()).collect(),
            attribute: ints.iter().map(attribute).collect(),
            ..NodeProto::default()
        });
        outputs[0].into()
    }

    fn project(&mut self, input: &str, name: &str, rows: usize, columns: usize) -> String {
        let weight = self.weight(name, &[rows, columns]);
        self.node("MatMul", &[input, &weight], &[&format!("{name} out")], &[])
    }

    fn attention(&mut self, layer: usize, hidden: &str) -> String {
        let name = |what: &str| format!("layer {layer} {what}");
        let [q, k, v] = ["q", "k", "v"].map(|what| self.project(hidden, &name(what), HIDDEN, HIDDEN));
        let heads = HEADS as i64;
        let mixed = match self.style {
            Style::MultiHead => {
                self.node("MultiHeadAttention", &[&q, &k, &v], &[&name("mixed")], &[("num_heads", &[heads])])
            }
            Style::Standard => {
                let ints: [(&str, &[i64]); 2] = [("q_num_heads", &[heads]), ("kv_num_heads", &[heads])];
                self.node("Attention", &[&q, &k, &v], &[&name("mixed")], &ints)
            }
            Style::TakenApart => self.taken_apart(layer, [q, k, v]),
        };
        self.project(&mixed, &name("o"), HIDDEN, HIDDEN)
    }

    fn taken_apart(&mut self, layer: usize, qkv: [String; 3]) -> String {
        let name = |what: &str| format!("layer {layer} {what}");
        let to_heads = self.ints(&name("to heads"), &[0, 0, HEADS as i64, HEAD as i64]);
        let perms: [&[i64]; 3] = [&[0, 2, 1, 3], &[0, 2, 3, 1], &[0, 2, 1, 3]];
        let mut turned = Vec::new();
        for (input, perm) in qkv.iter().zip(perms) {
            let split = self.node("Reshape", &[input, &to_heads], &[&format!("{input} heads")], &[]);
            turned.push(self.node("Transpose", &[&split], &[&format!("{input} turned")], &[("perm", perm)]));
        }
        let scores = self.node("MatMul", &[&turned[0], &turned[1]], &[&name("scores")], &[]);
        let root = self.tensor(&name("root"), DType::Float32, &[], (HEAD as f32).sqrt().to_le_bytes().to_vec());
        let scaled = self.node("Div", &[&scores, &root], &[&name("scaled")], &[]);
        let weights = self.node("Softmax", &[&scaled], &[&name("weights")], &[("axis", &[-1])]);
        let mixed = self.node("MatMul", &[&weights, &turned[2]], &[&name("by head")], &[]);
        let back = self.node("Transpose", &[&mixed], &[&name("back")], &[("perm", &[0, 2, 1, 3])]);
        let flat = self.ints(&name("flat"), &[0, 0, HIDDEN as i64]);
        self.node("Reshape", &[&back, &flat], &[&name("mixed")], &[])
    }

    /// Squared ReLU, then a mixture of experts each of which adds one vector.
    fn feed_forward(&mut self, layer: usize, hidden: &str) -> String {
        let name = |what: &str| format!("layer {layer} {what}");
        let up = self.project(hidden, &name("up"), HIDDEN, NEURONS);
        let relu = self.node("Relu", &[&up], &[&name("relu")], &[]);
        let square = self.node("Mul", &[&relu, &relu], &[&name("square")], &[]);
        let down = self.project(&square, &name("down"), NEURONS, HIDDEN);
        let added = self.node("Add", &[hidden, &down], &[&name("after neurons")], &[]);
        let scores = self.project(&added, &name("router"), HIDDEN, EXPERTS);
        let chances = self.node("Softmax", &[&scores], &[&name("chances")], &[("axis", &[-1])]);
        let k = self.ints(&name("top k"), &[TOP_K as i64]);
        let outputs = [name("best"), name("experts")];
        self.node("TopK", &[&chances, &k], &[&outputs[0], &outputs[1]], &[("axis", &[-1])]);
        let zero = self.tensor(&name("zero"), DType::Float32, &[], vec![0; 4]);
        let none = self.node("Mul", &[&chances, &zero], &[&name("none")], &[]);
        let ints: [(&str, &[i64]); 1] = [("axis", &[-1])];
        let gates = self.node("ScatterElements", &[&none, &outputs[1], &outputs[0]], &[&name("gates")], &ints);
        let mixture = self.project(&gates, &name("mixture"), EXPERTS, HIDDEN);
        self.node("Add", &[&added, &mixture], &[&name("end")], &[])
    }

    fn model(style: Style) -> ModelProto {
        let mut writer = Writer { graph: GraphProto::default(), style };
        let table = writer.weight("table", &[VOCAB, HIDDEN]);
        let mut hidden = writer.node("Gather", &[&table, "input_ids"], &["embedded"], &[]);
        for layer in 0..LAYERS {
            let mixed = writer.attention(layer, &hidden);
            hidden = writer.node("Add", &[&hidden, &mixed], &[&format!("layer {layer} middle")], &[]);
            hidden = writer.feed_forward(layer, &hidden);
        }
        let head = writer.weight("head", &[HIDDEN, VOCAB]);
        writer.node("MatMul", &[&hidden, &head], &["logits"], &[]);
        writer.graph.input = vec![value("input_ids", DType::Int64, &["batch", "sequence"])];
        writer.graph.output = vec![value("logits", DType::Float32, &["batch", "sequence", &VOCAB.to_string()])];
        let opset = |domain: &str, version| OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) };
        let opset_import = vec![opset("", 23), opset("com.microsoft", 1)];
        ModelProto { ir_version: Some(10), opset_import, graph: Some(writer.graph), ..ModelProto::default() }
    }
}

fn value(name: &str, dtype: DType, dims: &[&str]) -> ValueInfoProto {
    let dim = |text: &&str| {
        let value = match text.parse() {
            Ok(size) => dimension::Value::DimValue(size),
            Err(_) => dimension::Value::DimParam((*text).into()),
        };
        Dimension { value: Some(value), denotation: None }
    };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let tensor = Tensor { elem_type: Some(dtype.to_onnx()), shape };
    let r#type = Some(TypeProto { value: Some(Value::TensorType(tensor)), denotation: None });
    ValueInfoProto { name: Some(name.into()), r#type, ..ValueInfoProto::default() }
}

/// One row a token.
type Rows = Vec<Vec<f64>>;

/// What the arithmetic shows of a text: the hidden state after each block, and of each layer what worked.
#[derive(Default)]
struct Worked {
    hidden: Vec<Rows>,
    active: Vec<Rows>,
    chosen: Vec<Vec<Vec<usize>>>,
    /// Entropy of each head and token.
    entropy: Vec<Vec<f64>>,
    logits: Rows,
}

fn times(rows: &Rows, weight: &Rows) -> Rows {
    let product = |row: &Vec<f64>, c: usize| row.iter().zip(weight).map(|(x, w)| x * w[c]).sum();
    rows.iter().map(|row| (0..weight[0].len()).map(|c| product(row, c)).collect()).collect()
}

fn plus(a: &Rows, b: &Rows) -> Rows {
    a.iter().zip(b).map(|(a, b)| a.iter().zip(b).map(|(a, b)| a + b).collect()).collect()
}

fn softmax(scores: &[f64]) -> Vec<f64> {
    let sum: f64 = scores.iter().map(|s| s.exp()).sum();
    scores.iter().map(|s| s.exp() / sum).collect()
}

impl Worked {
    fn out(tokens: &[u32]) -> Self {
        let mut worked = Worked::default();
        let table = matrix("table", VOCAB, HIDDEN);
        let mut hidden: Rows = tokens.iter().map(|t| table[*t as usize].clone()).collect();
        worked.hidden.push(hidden.clone());
        for layer in 0..LAYERS {
            hidden = worked.layer(layer, hidden);
            worked.hidden.push(hidden.clone());
        }
        worked.logits = times(&hidden, &matrix("head", HIDDEN, VOCAB));
        worked
    }

    fn layer(&mut self, layer: usize, hidden: Rows) -> Rows {
        let weight = |what: &str, rows, columns| matrix(&format!("layer {layer} {what}"), rows, columns);
        let [q, k, v] = ["q", "k", "v"].map(|what| times(&hidden, &weight(what, HIDDEN, HIDDEN)));
        let mut mixed = vec![vec![0.0; HIDDEN]; hidden.len()];
        let mut entropy = Vec::new();
        for head in 0..HEADS {
            let head_part = |row: &Vec<f64>| row[head * HEAD..(head + 1) * HEAD].to_vec();
            for (at, q) in q.iter().map(head_part).enumerate() {
                let dot =
                    |k: &Vec<f64>| q.iter().zip(head_part(k)).map(|(q, k)| q * k).sum::<f64>() / (HEAD as f64).sqrt();
                let weights = softmax(&k.iter().map(dot).collect::<Vec<_>>());
                entropy.push(-weights.iter().map(|w| w * w.ln()).sum::<f64>());
                for (weight, v) in weights.iter().zip(v.iter().map(head_part)) {
                    (0..HEAD).for_each(|i| mixed[at][head * HEAD + i] += weight * v[i]);
                }
            }
        }
        self.entropy.push(entropy);
        let middle = plus(&hidden, &times(&mixed, &weight("o", HIDDEN, HIDDEN)));
        let up = times(&middle, &weight("up", HIDDEN, NEURONS));
        let square: Rows = up.iter().map(|row| row.iter().map(|x| x.max(0.0).powi(2)).collect()).collect();
        self.active.push(up.iter().map(|row| row.iter().map(|x| f64::from(u8::from(*x > 0.0))).collect()).collect());
        let after = plus(&middle, &times(&square, &weight("down", NEURONS, HIDDEN)));
        let mut chosen = Vec::new();
        let mut gates = Vec::new();
        for scores in times(&after, &weight("router", HIDDEN, EXPERTS)) {
            let chances = softmax(&scores);
            let mut order: Vec<usize> = (0..EXPERTS).collect();
            order.sort_by(|a, b| chances[*b].total_cmp(&chances[*a]));
            order.truncate(TOP_K);
            gates.push((0..EXPERTS).map(|e| if order.contains(&e) { chances[e] } else { 0.0 }).collect());
            chosen.push(order);
        }
        self.chosen.push(chosen);
        plus(&after, &times(&gates, &weight("mixture", EXPERTS, HIDDEN)))
    }
}

fn observe(style: Style, prompt: &[u32], decode_tokens: u64) -> Statistics {
    let home = tempfile::tempdir().unwrap();
    hpp_onnx::write_model(&home.path().join("model.onnx"), &Writer::model(style)).unwrap();
    observe_model(home.path(), prompt, decode_tokens)
}

fn observe_model(home: &Path, prompt: &[u32], decode_tokens: u64) -> Statistics {
    let analysis = analyse(home, Some(64), LogitsMode::Requested).unwrap();
    let labels: Vec<&str> = analysis.segmentation.blocks.iter().map(|b| b.label.as_str()).collect();
    assert_eq!(labels, ["embedding", "layers.0", "layers.1", "head"]);
    let work = tempfile::tempdir().unwrap();
    let tapped = taps::write(&analysis, Wanted { attention: true }, work.path()).unwrap();
    Probe::start().observe(&tapped.plan, &tapped.taps, &[prompt.to_vec()], decode_tokens)
}

fn close(have: f64, want: f64) {
    assert!((have - want).abs() <= 1e-4 * (1e-2 + want.abs()), "{have} instead of {want}");
}

#[test]
fn what_is_shown_is_what_the_arithmetic_says() {
    let prompt: Vec<u32> = vec![3, 17, 5, 0, 11, 11, 23, 8, 2];
    let worked = Worked::out(&prompt);
    for style in [Style::TakenApart, Style::MultiHead, Style::Standard] {
        let shown = observe(style, &prompt, 0);
        assert_eq!(shown.boundaries.len(), LAYERS + 1, "{style:?}");
        for (have, rows) in shown.boundaries.iter().zip(&worked.hidden) {
            let all: Vec<f64> = rows.concat();
            let n = all.len() as f64;
            let mean = all.iter().sum::<f64>() / n;
            assert_eq!(have.elements, all.len() as u64);
            close(have.mean, mean);
            close(have.mean_abs, all.iter().map(|x| x.abs()).sum::<f64>() / n);
            close(have.variance().unwrap(), all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n);
            close(have.max_abs, all.iter().fold(0.0, |most: f64, x| most.max(x.abs())));
        }
        for (have, pair) in shown.influence.iter().zip(worked.hidden.windows(2)) {
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            let apart = |(a, b): (&Vec<f64>, &Vec<f64>)| 1.0 - dot(a, b) / (dot(a, a) * dot(b, b)).sqrt();
            close(have.mean, pair[0].iter().zip(&pair[1]).map(apart).sum::<f64>() / prompt.len() as f64);
        }
        assert_eq!((shown.experts.len(), shown.neurons.len(), shown.attention.len()), (LAYERS, LAYERS, LAYERS));
        for layer in 0..LAYERS {
            let visits = worked.chosen[layer].concat();
            let counts: Vec<u64> = (0..EXPERTS).map(|e| visits.iter().filter(|v| **v == e).count() as u64).collect();
            assert_eq!((&shown.experts[layer].counts, shown.experts[layer].top_k), (&counts, TOP_K as u32));
            let active: Vec<u64> =
                (0..NEURONS).map(|n| worked.active[layer].iter().map(|row| row[n]).sum::<f64>() as u64).collect();
            assert_eq!(shown.neurons[layer].active, active, "{style:?}");
            let entropy = &worked.entropy[layer];
            assert_eq!(shown.attention[layer].rows, entropy.len() as u64);
            close(shown.attention[layer].mean, entropy.iter().sum::<f64>() / entropy.len() as f64);
        }
    }
}

/// Without a cache each new token computes the whole text again: of each pass only the new tokens count.
#[test]
fn generated_tokens_are_counted_once() {
    let prompt: Vec<u32> = vec![4, 9, 1];
    let mut tokens = prompt.clone();
    let mut active = vec![0u64; NEURONS];
    let count = |worked: &Worked, from: usize, active: &mut Vec<u64>| {
        worked.active[1][from..].iter().for_each(|row| row.iter().zip(&mut *active).for_each(|(x, n)| *n += *x as u64));
    };
    count(&Worked::out(&tokens), 0, &mut active);
    for _ in 0..3 {
        let logits = Worked::out(&tokens).logits.pop().unwrap();
        let best = (0..VOCAB).max_by(|a, b| logits[*a].total_cmp(&logits[*b])).unwrap();
        tokens.push(best as u32);
        count(&Worked::out(&tokens), tokens.len() - 1, &mut active);
    }
    let shown = observe(Style::TakenApart, &prompt, 3);
    assert_eq!((shown.prompt_tokens, shown.generated_tokens), (3, 3));
    assert_eq!((shown.neurons[1].tokens, &shown.neurons[1].active), (6, &active));
    assert_eq!(shown.boundaries[0].elements, 6 * HIDDEN as u64);
}
