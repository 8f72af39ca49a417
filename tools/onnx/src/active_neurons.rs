//! Rewrites partitions for the host so that they compute only the active neurons of ReLU networks, with HPP's own operators (`hpp-backend:
//! operators`). These want a row of weights for each neuron; a weight that is stored by columns is replaced by a transposed copy in a virtual file.

use crate::flatten::Fresh;
use crate::model::Model;
use crate::proto::{ModelProto, NodeProto, OperatorSetIdProto, TensorProto};
use crate::store::{Layout, refer};
use crate::tensor::TensorError;
use crate::virtual_file::{Computed, VirtualFile, VirtualFiles};
use crate::weight_source::WeightSource;
use crate::weights::{NEURONS_FILE, WeightFile};
use hpp_graph::{Attribute, Block, Graph, NeuronLayout, Node, NodeId, ReluProduct, ValueId};
use hpp_schema::DType;
use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;

/// The domain of HPP's operators, and its version.
const DOMAIN: (&str, i64) = ("hpp", 1);

/// The reason why active neurons cannot be computed alone.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ActiveNeuronsError {
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error("the model has a weight file named {NEURONS_FILE:?}, a name that computing active neurons uses itself")]
    FileTaken,
}

/// The products of a model that can leave out inactive neurons.
#[derive(Clone, Debug)]
pub struct ActiveNeurons {
    /// The replaced nodes, by first output.
    replaced: HashMap<String, Replacement>,
    /// Weights with a row for each neuron, by the name of the weight that they replace.
    transposed: HashMap<String, TensorProto>,
    contents: VirtualFile,
    /// The names of the weights of these products.
    weights: HashSet<String>,
    /// Bytes of all weights of these products.
    bytes: u64,
}

#[derive(Clone, Debug)]
enum Replacement {
    /// A product with the activations.
    Rows,
    /// The multiplication of a gate with the first output of a product.
    Gate { gate: String, product: String },
}

impl ActiveNeurons {
    /// Finds the products of these blocks whose weights are float32 or float16 matrices; `None` if there are none.
    pub fn find(model: &Model, graph: &Graph, blocks: &[Block]) -> Result<Option<Self>, ActiveNeuronsError> {
        if model.weights.files.iter().any(|file| file.location == NEURONS_FILE) {
            return Err(ActiveNeuronsError::FileTaken);
        }
        let mut finder = Finder {
            model,
            graph,
            layout: Layout::default(),
            found: ActiveNeurons {
                replaced: HashMap::new(),
                transposed: HashMap::new(),
                contents: VirtualFile::default(),
                weights: HashSet::new(),
                bytes: 0,
            },
        };
        let products: Vec<ReluProduct> = blocks.iter().flat_map(|block| ReluProduct::of(graph, block)).collect();
        // A product that a gate is multiplied with may have a ReLU before it too: then it is computed where the gate is active.
        let mut gated = HashSet::new();
        for product in &products {
            gated.extend(finder.add_gate(product)?);
        }
        for product in products.iter().filter(|product| !gated.contains(&product.node)) {
            finder.add_rows(product)?;
        }
        Ok(Some(finder.found).filter(|found| !found.replaced.is_empty()))
    }

    /// The virtual file of transposed weights in the model's directory; `None` if no weight is transposed.
    pub fn file(&self, model: &Model) -> Option<WeightFile> {
        let path = model.dir().join(NEURONS_FILE);
        let file = WeightFile { location: NEURONS_FILE.to_owned(), path, bytes: self.contents.bytes() };
        (!self.transposed.is_empty()).then_some(file)
    }

    /// The contents of [`NEURONS_FILE`].
    pub fn contents(&self) -> &VirtualFile {
        &self.contents
    }

    /// Bytes of all weights that belong to neurons.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether these products read this weight, as it is stored: 16-bit numbers are not widened.
    pub fn reads(&self, weight: &str) -> bool {
        self.weights.contains(weight)
    }

    /// Replaces the products in a partition. Returns how many nodes were replaced.
    pub fn apply(&self, partition: &mut ModelProto) -> usize {
        let Some(graph) = &mut partition.graph else { return 0 };
        let mut fresh = Fresh::for_graph(graph);
        let outputs: HashSet<String> = graph.output.iter().map(|output| output.name().to_owned()).collect();
        let output = |node: &NodeProto| node.output.first().cloned().unwrap_or_default();
        let products: HashMap<String, NodeProto> = graph.node.iter().map(|node| (output(node), node.clone())).collect();
        let (mut count, mut merged, mut weights) = (0, HashSet::new(), HashSet::new());
        let mut nodes = Vec::with_capacity(graph.node.len());
        for node in std::mem::take(&mut graph.node) {
            let replacement = self.replaced.get(&output(&node));
            let new = match replacement {
                Some(Replacement::Rows) => rows(&node, &mut fresh),
                // A product that is an output of the partition is computed whole.
                Some(Replacement::Gate { gate, product }) if !outputs.contains(product) => {
                    products.get(product).map_or(vec![], |product| {
                        merged.insert(output(product));
                        gated(&node, gate, product)
                    })
                }
                Some(Replacement::Gate { .. }) => vec![],
                None => vec![],
            };
            if new.is_empty() {
                nodes.push(node);
                continue;
            }
            count += 1;
            weights.extend(new.iter().flat_map(|node| node.input.clone()));
            nodes.extend(new);
        }
        nodes.retain(|node| !merged.contains(&output(node)));
        graph.node = nodes;
        graph.value_info.retain(|info| !merged.contains(info.name()));
        for tensor in graph.initializer.iter_mut().filter(|tensor| weights.contains(tensor.name())) {
            if let Some(transposed) = self.transposed.get(tensor.name()) {
                *tensor = transposed.clone();
            }
        }
        if count > 0 {
            let (domain, version) = (Some(DOMAIN.0.to_owned()), Some(DOMAIN.1));
            partition.opset_import.push(OperatorSetIdProto { domain, version });
        }
        count
    }
}

/// A product with activations, and the addition of its bias.
fn rows(node: &NodeProto, fresh: &mut Fresh) -> Vec<NodeProto> {
    let [activations, weight, bias @ ..] = node.input.as_slice() else { return vec![] };
    let product =
        |output: Vec<String>| own("ActiveRowsMatMul", node, vec![activations.clone(), weight.clone()], output);
    let Some(bias) = bias.first().filter(|bias| !bias.is_empty()) else { return vec![product(node.output.clone())] };
    let sum = fresh.name(&format!("{}.active", node.output[0]));
    let add = NodeProto {
        name: node.name.as_ref().map(|name| format!("{name}/bias")),
        op_type: Some("Add".to_owned()),
        input: vec![sum.clone(), bias.clone()],
        output: node.output.clone(),
        ..NodeProto::default()
    };
    vec![product(vec![sum]), add]
}

fn gated(node: &NodeProto, gate: &str, product: &NodeProto) -> Vec<NodeProto> {
    let [tokens, weight, ..] = product.input.as_slice() else { return vec![] };
    let inputs = vec![gate.to_owned(), tokens.clone(), weight.clone()];
    vec![own("ActiveGateMatMul", node, inputs, node.output.clone())]
}

fn own(operator: &str, of: &NodeProto, input: Vec<String>, output: Vec<String>) -> NodeProto {
    NodeProto {
        name: of.name.clone(),
        op_type: Some(operator.to_owned()),
        domain: Some(DOMAIN.0.to_owned()),
        input,
        output,
        ..NodeProto::default()
    }
}

struct Finder<'a> {
    model: &'a Model,
    graph: &'a Graph,
    layout: Layout,
    found: ActiveNeurons,
}

impl Finder<'_> {
    fn add_rows(&mut self, product: &ReluProduct) -> Result<(), ActiveNeuronsError> {
        if is_plain_product(self.graph, product.node, product.weight) {
            self.add_weight(product.weight, product.layout == NeuronLayout::Columns)?;
            self.found.bytes += product.bytes;
            self.found.replaced.insert(self.output(product.node), Replacement::Rows);
        }
        Ok(())
    }

    /// Returns the product that a gate is multiplied with, if it can be replaced.
    fn add_gate(&mut self, product: &ReluProduct) -> Result<Option<NodeId>, ActiveNeuronsError> {
        let Some(gated) = product.gated else { return Ok(None) };
        let node = self.graph.node(gated.node);
        let shape = |value: ValueId| self.graph.value(value).shape.as_ref();
        let product = node.outputs[0].and_then(shape);
        let has_bias = node.inputs.get(2).is_some_and(Option::is_some);
        if is_plain_product(self.graph, gated.node, gated.weight)
            && !has_bias
            && product.is_some()
            && product == shape(gated.gate)
        {
            // Neurons are the outputs of this product.
            self.add_weight(gated.weight, !transposes(node))?;
            self.found.bytes += gated.bytes;
            let (gate, product) = (self.graph.value(gated.gate).name.clone(), self.output(gated.node));
            self.found.replaced.insert(self.output(gated.gating), Replacement::Gate { gate, product });
            return Ok(Some(gated.node));
        }
        Ok(None)
    }

    fn output(&self, node: NodeId) -> String {
        let output = self.graph.node(node).outputs.first().copied().flatten();
        output.map(|value| self.graph.value(value).name.clone()).unwrap_or_default()
    }

    /// Adds a weight, and a transposed copy if its neurons are columns.
    fn add_weight(&mut self, weight: ValueId, has_columns: bool) -> Result<(), ActiveNeuronsError> {
        let name = &self.graph.value(weight).name;
        self.found.weights.insert(name.clone());
        if !has_columns {
            return Ok(());
        }
        let initializers = &self.model.graph_proto().initializer;
        let Some(index) = initializers.iter().position(|tensor| tensor.name() == name) else { return Ok(()) };
        let tensor = &initializers[index];
        let [rows, columns] = [0, 1].map(|axis| tensor.dims[axis] as u64);
        let element = if self.graph.value(weight).dtype == Some(DType::Float32) { 4 } else { 2 };
        let source = WeightSource::of(self.model, index, &VirtualFiles::new())?;
        let length = rows * columns * element;
        let offset = self.layout.place(length);
        self.found.contents.put_computed(offset, Arc::new(Transposed { source, rows, columns, element }), length);
        let (dims, data_type) = (vec![tensor.dims[1], tensor.dims[0]], tensor.data_type);
        let mut new = TensorProto { name: Some(name.clone()), dims, data_type, ..TensorProto::default() };
        refer(&mut new, NEURONS_FILE, offset, length);
        self.found.transposed.insert(name.clone(), new);
        Ok(())
    }
}

/// Whether a node is a product whose second input is this weight, as stored, in float32 or float16.
fn is_plain_product(graph: &Graph, node: NodeId, weight: ValueId) -> bool {
    let node = graph.node(node);
    let factor = |name: &str| match node.attributes.get(name) {
        Some(Attribute::Float(factor)) => *factor,
        _ => 1.0,
    };
    node.inputs.get(1).copied().flatten() == Some(weight)
        && matches!(graph.value(weight).dtype, Some(DType::Float32 | DType::Float16))
        && graph.value(weight).shape.as_ref().is_some_and(|shape| shape.len() == 2)
        && matches!(node.op_type.as_str(), "MatMul" | "Gemm")
        && (factor("alpha"), factor("beta")) == (1.0, 1.0)
}

fn transposes(node: &Node) -> bool {
    node.int("transB").unwrap_or(0) != 0
}

/// A transposed matrix, whose bytes are gathered from the stored one.
#[derive(Debug)]
struct Transposed {
    source: WeightSource,
    /// Rows and columns as stored.
    rows: u64,
    columns: u64,
    /// Bytes of an element.
    element: u64,
}

impl Computed for Transposed {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let row_bytes = self.rows * self.element;
        let end = (offset + buffer.len() as u64).min(self.columns * row_bytes);
        let (first, last) = (offset / row_bytes, end.div_ceil(row_bytes));
        let size = |bytes: u64| usize::try_from(bytes).map_err(io::Error::other);
        let (element, width) = (size(self.element)?, size((last - first) * self.element)?);
        if width == 0 {
            return Ok(0);
        }
        // The columns from `first` to `last`, of each stored row.
        let mut columns = vec![0; size(self.rows)? * width];
        let at = |row: usize| (row as u64 * self.columns + first) * self.element;
        self.source.read_parts(columns.chunks_mut(width).enumerate().map(|(row, part)| (at(row), part)))?;
        let mut rows = vec![0; columns.len()];
        for (column, row) in rows.chunks_mut(size(row_bytes)?).enumerate() {
            for (to, from) in row.chunks_mut(element).zip(columns.chunks(width)) {
                to.copy_from_slice(&from[column * element..][..element]);
            }
        }
        let start = size(offset - first * row_bytes)?;
        let length = size(end - offset)?;
        buffer[..length].copy_from_slice(&rows[start..start + length]);
        Ok(length)
    }
}

#[cfg(test)]
mod tests;
