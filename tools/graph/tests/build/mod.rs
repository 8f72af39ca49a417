//! Builds small graphs for tests, with values by name.

use hpp_graph::{Attribute, Graph, Node, NodeId, Origin, ValueId, Weight};
use hpp_schema::{DType, Dim, Shape};
use std::collections::BTreeMap;

/// A graph under construction.
#[derive(Clone, Debug, Default)]
pub struct Build {
    pub graph: Graph,
    names: BTreeMap<String, ValueId>,
}

pub fn shape(text: &str) -> Shape {
    text.split(',').filter(|t| !t.trim().is_empty()).map(|t| Dim::from_param(t.trim())).collect()
}

#[allow(dead_code)]
impl Build {
    pub fn value(&mut self, name: &str, dtype: Option<DType>, shape: Option<Shape>, origin: Origin) -> ValueId {
        assert!(!self.names.contains_key(name), "{name} is defined twice");
        let id = self.graph.add_value(name, dtype, shape, origin);
        self.names.insert(name.to_owned(), id);
        id
    }

    pub fn input(&mut self, name: &str, dtype: DType, dims: &str) -> ValueId {
        let id = self.value(name, Some(dtype), Some(shape(dims)), Origin::Input);
        self.graph.inputs.push(id);
        id
    }

    pub fn weight(&mut self, name: &str, dims: &str) -> ValueId {
        let shape = shape(dims);
        let elements: u64 = shape.iter().map(|d| d.as_fixed().unwrap()).product();
        let weight = Weight { bytes: elements * 4, ints: None, content: None };
        self.value(name, Some(DType::Float32), Some(shape), Origin::Weight(weight))
    }

    /// Adds a node: an operator as `domain::Op`, and names of inputs and outputs (empty for an omitted one).
    pub fn node(&mut self, op: &str, inputs: &[&str], outputs: &[&str]) -> NodeId {
        self.node_with(op, inputs, outputs, &[])
    }

    pub fn node_with(&mut self, op: &str, inputs: &[&str], outputs: &[&str], ints: &[(&str, i64)]) -> NodeId {
        let (domain, op_type) = op.split_once("::").unwrap_or(("", op));
        let inputs = inputs.iter().map(|n| (!n.is_empty()).then(|| self.get(n))).collect();
        let made: Vec<Option<ValueId>> = outputs
            .iter()
            .map(|n| (!n.is_empty()).then(|| self.value(n, Some(DType::Float32), None, Origin::Input)))
            .collect();
        let attributes = ints.iter().map(|(n, v)| ((*n).to_owned(), Attribute::Int(*v))).collect();
        let name = format!("n{}", self.graph.nodes.len());
        let (domain, op_type) = (domain.to_owned(), op_type.to_owned());
        self.graph.add_node(Node { name, domain, op_type, inputs, captures: vec![], outputs: made, attributes })
    }

    pub fn get(&self, name: &str) -> ValueId {
        *self.names.get(name).unwrap_or_else(|| panic!("no value {name}"))
    }

    pub fn typed(&mut self, name: &str, dtype: DType, dims: &str) {
        let id = self.get(name);
        self.graph.values[id.0 as usize].dtype = Some(dtype);
        self.graph.values[id.0 as usize].shape = Some(shape(dims));
    }

    pub fn untyped(&mut self, name: &str) {
        let id = self.get(name);
        self.graph.values[id.0 as usize].dtype = None;
    }

    pub fn output(&mut self, name: &str) {
        let id = self.get(name);
        self.graph.outputs.push(id);
    }
}

/// How a decoder stores keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code)]
pub enum Cache {
    /// GroupQueryAttention.
    Fused,
    /// Concat, product, softmax, product.
    Appended,
    /// No cache.
    None,
}

/// A decoder in the style of exporters: embedding, pre-norm layers with residuals, final norm, head.
#[allow(dead_code)]
pub fn decoder(layers: usize, cache: Cache) -> Graph {
    let mut b = Build::default();
    b.input("input_ids", DType::Int64, "batch, sequence");
    b.input("mask", DType::Int64, "batch, total");
    b.weight("table", "32, 8");
    b.node("Gather", &["table", "input_ids"], &["h0"]);
    b.node("Shape", &["h0"], &["size"]);
    b.node("Cast", &["mask"], &["mask_real"]);
    if cache != Cache::None {
        for layer in 0..layers {
            b.input(&format!("past.{layer}.key"), DType::Float32, "batch, 2, past, 4");
            b.input(&format!("past.{layer}.value"), DType::Float32, "batch, 2, past, 4");
        }
    }
    for layer in 0..layers {
        decoder_layer(&mut b, layer, cache);
    }
    b.weight("final_norm", "8");
    b.node("RMSNormalization", &[&format!("h{layers}"), "final_norm"], &["final"]);
    b.weight("lm_head", "8, 32");
    b.node("MatMul", &["final", "lm_head"], &["logits"]);
    b.output("logits");
    if cache != Cache::None {
        for layer in 0..layers {
            for kind in ["key", "value"] {
                let name = format!("present.{layer}.{kind}");
                b.typed(&name, DType::Float32, "batch, 2, past + sequence, 4");
                b.output(&name);
            }
        }
    }
    b.graph
}

#[allow(dead_code)]
fn decoder_layer(b: &mut Build, layer: usize, cache: Cache) {
    let n = |name: &str| format!("{name}.{layer}");
    let entry = format!("h{layer}");
    b.weight(&n("norm1"), "8");
    b.node("RMSNormalization", &[&entry, &n("norm1")], &[&n("x")]);
    for name in ["q", "k", "v"] {
        b.weight(&n(&format!("w{name}")), "8, 8");
        b.node("MatMul", &[&n("x"), &n(&format!("w{name}"))], &[&n(name)]);
    }
    let (past, present) = (|k: &str| format!("past.{layer}.{k}"), |k: &str| format!("present.{layer}.{k}"));
    match cache {
        Cache::Fused => {
            let inputs = [&n("q"), &n("k"), &n("v"), &past("key"), &past("value"), "mask"];
            let outputs = [&n("mixed"), &present("key"), &present("value")];
            b.node("com.microsoft::GroupQueryAttention", &inputs.map(|s| s as &str), &outputs.map(|s| s as &str));
        }
        Cache::Appended => {
            b.node_with("Concat", &[&past("key"), &n("k")], &[&present("key")], &[("axis", 2)]);
            b.node_with("Concat", &[&past("value"), &n("v")], &[&present("value")], &[("axis", 2)]);
            attention(b, layer, &present("key"), &present("value"));
        }
        Cache::None => attention(b, layer, &n("k"), &n("v")),
    }
    b.weight(&n("wo"), "8, 8");
    b.node("MatMul", &[&n("mixed"), &n("wo")], &[&n("o")]);
    b.node("Add", &[&entry, &n("o")], &[&n("mid")]);
    b.weight(&n("norm2"), "8");
    b.node("RMSNormalization", &[&n("mid"), &n("norm2")], &[&n("y")]);
    b.weight(&n("up"), "8, 16");
    b.node("MatMul", &[&n("y"), &n("up")], &[&n("wide")]);
    b.node("Relu", &[&n("wide")], &[&n("active")]);
    b.weight(&n("down"), "16, 8");
    b.node("MatMul", &[&n("active"), &n("down")], &[&n("narrow")]);
    b.node("Add", &[&n("mid"), &n("narrow")], &[&format!("h{}", layer + 1)]);
}

#[allow(dead_code)]
fn attention(b: &mut Build, layer: usize, key: &str, value: &str) {
    let n = |name: &str| format!("{name}.{layer}");
    b.node("Transpose", &[key], &[&n("kt")]);
    b.node("MatMul", &[&n("q"), &n("kt")], &[&n("scores")]);
    b.node("Add", &[&n("scores"), "mask_real"], &[&n("masked")]);
    b.node("Softmax", &[&n("masked")], &[&n("probs")]);
    b.node("MatMul", &[&n("probs"), value], &[&n("mixed0")]);
    b.node("Reshape", &[&n("mixed0"), "size"], &[&n("mixed")]);
}
