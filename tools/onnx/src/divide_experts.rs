//! Divides the experts of a mixture between two operators: the first has the experts that stay on a GPU, the second the others.
//!
//! `QMoE` with `normalize_routing_weights` weighs the results of the `k` experts with the largest logits by the softmax of these logits. Here the same experts are selected before
//! both operators, and their weights `w` computed. The first operator gets the logits of its experts, with a very low number for those that are
//! not selected; its own softmax has only its own experts, so its result is multiplied by the sum of their `w`. The second operator gets the `w`
//! of its experts as factors, so that ONNX Runtime's kernel for the CPU does not compute those of weight 0. (The kernel for CUDA ignores factors.)
//! The result differs from the undivided operator's in its last bits.

use crate::flatten::Fresh;
use crate::gather::{Gather, Range};
use crate::model::Model;
use crate::names;
use crate::proto::attribute_proto::AttributeType;
use crate::proto::{AttributeProto, NodeProto, TensorProto};
use crate::set_attribute::int_attribute;
use crate::store::{Layout, refer};
use crate::tensor::{self, TensorError};
use crate::virtual_file::{VirtualFile, VirtualFiles};
use crate::weight_source::WeightSource;
use crate::weights::{EXPERTS_FILE, FileRange, Storage, WeightFile};
use hpp_graph::{DivisibleMixture, Graph, NodeId, ValueId};
use hpp_schema::DType;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// The logit of an expert that is not selected: the lowest of float16, and for other types a number that no softmax of sensible logits reaches.
fn unselected(dtype: DType) -> f32 {
    if dtype == DType::Float16 { -65504.0 } else { -1e30 }
}

/// The first opset with `ScatterElements`.
const FIRST_OPSET: i64 = 11;
/// The first opset in which the axes of a sum are an input.
const AXES_AS_INPUT: i64 = 13;

/// How the experts of a mixture are divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertDivision {
    /// The mixture.
    pub mixture: DivisibleMixture,
    /// The experts of the first operator, in ascending order: at least one, and not all.
    pub first: Vec<u32>,
}

/// A model with divided mixtures.
#[derive(Clone, Debug)]
pub struct DividedMixtures {
    /// The model. The experts' weights are in [`EXPERTS_FILE`], which does not exist on disk.
    pub model: Model,
    /// The contents of that file.
    pub contents: VirtualFile,
    /// The names of the results of both operators, for each division.
    pub results: Vec<[String; 2]>,
}

/// The reason why mixtures cannot be divided.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExpertDivisionError {
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error("the model has a weight file named {EXPERTS_FILE:?}, a name that dividing experts uses itself")]
    FileTaken,
    #[error("the model has opset {0}, and dividing experts needs {FIRST_OPSET}")]
    OldOpset(i64),
    #[error("the weight {name:?} is sparse, so that the weights of single experts cannot be copied")]
    Sparse { name: String },
}

/// Divides mixtures of a model whose graph is `graph`. `virtual_files` are the contents of weight files that do not exist on disk.
pub fn divide_experts(
    model: &Model,
    graph: &Graph,
    divisions: &[ExpertDivision],
    virtual_files: &VirtualFiles,
) -> Result<DividedMixtures, ExpertDivisionError> {
    if model.weights.files.iter().any(|file| file.location == EXPERTS_FILE) {
        return Err(ExpertDivisionError::FileTaken);
    }
    let default = model.proto.opset_import.iter().find(|opset| names::default_domain(opset.domain()).is_empty());
    let opset = default.map_or(1, |opset| opset.version());
    if opset < FIRST_OPSET {
        return Err(ExpertDivisionError::OldOpset(opset));
    }
    let mut writer = Writer::new(model, graph, virtual_files, opset);
    let by_node: BTreeMap<NodeId, &ExpertDivision> =
        divisions.iter().map(|division| (division.mixture.node, division)).collect();
    for (id, node) in (0..).map(NodeId).zip(&model.graph_proto().node) {
        match by_node.get(&id) {
            Some(division) => writer.divide(node, division)?,
            None => writer.nodes.push(node.clone()),
        }
    }
    Ok(writer.finish())
}

/// The nodes and weights of the new model.
struct Writer<'a> {
    model: &'a Model,
    graph: &'a Graph,
    virtual_files: &'a VirtualFiles,
    opset: i64,
    /// Indices of initializers by name.
    sources: HashMap<&'a str, usize>,
    fresh: Fresh,
    layout: Layout,
    contents: VirtualFile,
    nodes: Vec<NodeProto>,
    tensors: Vec<(TensorProto, Storage)>,
    /// The new weights, by the divided weight and its experts.
    slices: HashMap<(&'a str, Vec<u32>), String>,
    results: Vec<[String; 2]>,
}

impl<'a> Writer<'a> {
    fn new(model: &'a Model, graph: &'a Graph, virtual_files: &'a VirtualFiles, opset: i64) -> Self {
        let initializers = &model.graph_proto().initializer;
        Writer {
            model,
            graph,
            virtual_files,
            opset,
            sources: initializers.iter().enumerate().map(|(index, tensor)| (tensor.name(), index)).collect(),
            fresh: Fresh::for_graph(model.graph_proto()),
            layout: Layout::default(),
            contents: VirtualFile::default(),
            nodes: vec![],
            tensors: vec![],
            slices: HashMap::new(),
            results: vec![],
        }
    }

    fn divide(&mut self, node: &NodeProto, division: &ExpertDivision) -> Result<(), ExpertDivisionError> {
        let ExpertDivision { mixture, first } = division;
        let others: Vec<u32> = (0..mixture.count as u32).filter(|expert| !first.contains(expert)).collect();
        let (hidden, router) = (&node.input[DivisibleMixture::HIDDEN], &node.input[DivisibleMixture::ROUTER]);
        let prefix = node.output[0].clone();
        let mut steps = Steps { prefix: &prefix, writer: self };
        let dtype = steps.dtype_of(mixture, DivisibleMixture::ROUTER);

        // The weights of all experts. Of equal logits the kernel prefers the later expert and `TopK` the earlier one, so the order is reversed.
        let reversed = |experts: &[u32]| -> Vec<i64> {
            experts.iter().map(|expert| mixture.count as i64 - 1 - i64::from(*expert)).collect()
        };
        let order: Vec<i64> = (0..mixture.count as i64).rev().collect();
        let order = steps.ints("order", &order);
        let from_last = steps.gather("from_last", router, &order);
        let logits = steps.cast("logits", &from_last, DType::Float32);
        let k = steps.ints("k", &[mixture.active as i64]);
        let top = ["top", "numbers"].map(|part| steps.name(part));
        steps.push("TopK", &[&logits, &k], &[&top[0], &top[1]], vec![]);
        let shares = steps.add("Softmax", "shares", &[&top[0]], vec![int_attribute("axis", -1)]);
        let shape = steps.add("Shape", "shape", &[&logits], vec![]);
        let zeros = steps.add("ConstantOfShape", "zeros", &[&shape], vec![]);
        let axis = vec![int_attribute("axis", 1)];
        let weights = steps.add("ScatterElements", "weights", &[&zeros, &top[1], &shares], axis);

        let indices = steps.ints("first", &reversed(first));
        let of_first = steps.gather("weights_of_first", &weights, &indices);
        let indices = steps.ints("others", &reversed(&others));
        let of_others = steps.gather("weights_of_others", &weights, &indices);
        let of_others = steps.cast("factors", &of_others, dtype);

        let first_logits = steps.first_logits(router, first, &of_first, dtype);
        let first_result =
            steps.operator(node, division, "result_of_first", first, |copy| copy.input[1] = first_logits)?;
        let sum = steps.sum(&of_first);
        let sum = steps.cast("sum", &sum, steps.dtype_of(mixture, DivisibleMixture::HIDDEN));
        let sum = steps.of_rank(mixture, hidden, sum);
        let scaled = steps.add("Mul", "scaled", &[&first_result, &sum], vec![]);
        let result = steps.operator(node, division, "result_of_others", &others, |copy| {
            let inputs = copy.input.len().max(DivisibleMixture::AGGREGATION + 1);
            copy.input.resize(inputs, String::new());
            copy.input[DivisibleMixture::ROUTER] = of_others.clone();
            copy.input[DivisibleMixture::AGGREGATION] = of_others;
            set(copy, int_attribute("normalize_routing_weights", 0));
        })?;
        steps.push("Add", &[&scaled, &result], &[&prefix], vec![]);
        self.results.push([first_result, result]);
        Ok(())
    }

    /// The name of a weight with the slices of another one that belong to these experts.
    fn slices(&mut self, name: &'a str, experts: &[u32], part: &str) -> Result<String, ExpertDivisionError> {
        if let Some(known) = self.slices.get(&(name, experts.to_vec())) {
            return Ok(known.clone());
        }
        let new = self.fresh.name(&format!("{name}/{part}"));
        let source = self.sources.get(name).copied();
        let source = source.ok_or_else(|| ExpertDivisionError::Sparse { name: name.to_owned() })?;
        let tensor = &self.model.graph_proto().initializer[source];
        let bytes = tensor::shape_of(tensor)?.bytes.unwrap_or(0);
        let count = tensor.dims[0].max(1) as u64;
        let mut ranges: Vec<Range> = Vec::new();
        for start in experts.iter().map(|expert| u64::from(*expert) * bytes / count) {
            match ranges.last_mut() {
                Some(last) if last.start + last.length == start => last.length += bytes / count,
                _ => ranges.push(Range { start, length: bytes / count }),
            }
        }
        let source = WeightSource::of(self.model, source, self.virtual_files)?;
        let gather = Gather { source, rows: 1, stride: bytes, ranges };
        let mut dims = tensor.dims.clone();
        dims[0] = experts.len() as i64;
        let mut slices =
            TensorProto { name: Some(new.clone()), dims, data_type: tensor.data_type, ..TensorProto::default() };
        let length = gather.bytes();
        let offset = self.layout.place(length);
        self.contents.put_computed(offset, Arc::new(gather), length);
        refer(&mut slices, EXPERTS_FILE, offset, length);
        // The virtual file comes after the files of the model.
        let range = FileRange { file: self.model.weights.files.len(), offset, length };
        self.tensors.push((slices, Storage::External(range)));
        self.slices.insert((name, experts.to_vec()), new.clone());
        Ok(new)
    }

    fn finish(self) -> DividedMixtures {
        let mut model = self.model.clone();
        let graph = model.proto.graph.get_or_insert_default();
        graph.node = self.nodes;
        let mut read: HashSet<String> = graph.node.iter().flat_map(names::reads).map(str::to_owned).collect();
        read.extend(graph.output.iter().map(|output| output.name().to_owned()));
        let sliced: HashSet<&str> = self.slices.keys().map(|(name, _)| *name).collect();
        let is_kept = |name: &str| !sliced.contains(name) || read.contains(name);
        let old = std::mem::take(&mut graph.initializer).into_iter().zip(std::mem::take(&mut model.weights.storage));
        let all = old.filter(|(tensor, _)| is_kept(tensor.name())).chain(self.tensors);
        (graph.initializer, model.weights.storage) = all.unzip();
        // Old models list weights as inputs too.
        graph.input.retain(|input| is_kept(input.name()));
        let path = model.dir().join(EXPERTS_FILE);
        let bytes = self.contents.bytes();
        model.weights.files.push(WeightFile { location: EXPERTS_FILE.to_owned(), path, bytes });
        DividedMixtures { model, contents: self.contents, results: self.results }
    }
}

/// Adds the nodes of one mixture, whose new names begin with `prefix`.
struct Steps<'s, 'a> {
    prefix: &'s str,
    writer: &'s mut Writer<'a>,
}

impl<'a> Steps<'_, 'a> {
    fn name(&mut self, part: &str) -> String {
        self.writer.fresh.name(&format!("{}/{part}", self.prefix))
    }

    fn push(&mut self, op_type: &str, inputs: &[&str], outputs: &[&str], attribute: Vec<AttributeProto>) {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        self.writer.nodes.push(NodeProto {
            name: Some(format!("{}/{op_type}", outputs[0])),
            op_type: Some(op_type.to_owned()),
            input: owned(inputs),
            output: owned(outputs),
            attribute,
            ..NodeProto::default()
        });
    }

    /// Adds a node; returns the name of its output.
    fn add(&mut self, op_type: &str, part: &str, inputs: &[&str], attribute: Vec<AttributeProto>) -> String {
        let output = self.name(part);
        self.push(op_type, inputs, &[&output], attribute);
        output
    }

    fn gather(&mut self, part: &str, matrix: &str, columns: &str) -> String {
        self.add("Gather", part, &[matrix, columns], vec![int_attribute("axis", 1)])
    }

    fn cast(&mut self, part: &str, value: &str, to: DType) -> String {
        self.add("Cast", part, &[value], vec![int_attribute("to", i64::from(to.to_onnx()))])
    }

    /// The logits of the first operator's experts, a very low number for those of weight 0.
    fn first_logits(&mut self, router: &str, first: &[u32], weights: &str, dtype: DType) -> String {
        let columns: Vec<i64> = first.iter().copied().map(i64::from).collect();
        let columns = self.ints("columns_of_first", &columns);
        let logits = self.gather("all_logits_of_first", router, &columns);
        let zero = self.float("zero", 0.0);
        let is_selected = self.add("Greater", "is_selected", &[weights, &zero], vec![]);
        let lowest = self.float("lowest", unselected(dtype));
        let lowest = self.cast("unselected", &lowest, dtype);
        self.add("Where", "logits_of_first", &[&is_selected, &logits, &lowest], vec![])
    }

    /// The sum of each row, `[tokens, 1]`.
    fn sum(&mut self, matrix: &str) -> String {
        if self.writer.opset < AXES_AS_INPUT {
            let axes = AttributeProto {
                name: Some("axes".to_owned()),
                r#type: Some(AttributeType::Ints as i32),
                ints: vec![1],
                ..AttributeProto::default()
            };
            return self.add("ReduceSum", "sum_of_first", &[matrix], vec![axes]);
        }
        let axes = self.ints("axes", &[1]);
        self.add("ReduceSum", "sum_of_first", &[matrix, &axes], vec![])
    }

    /// `sum`, `[tokens, 1]`, in the rank of the hidden states.
    fn of_rank(&mut self, mixture: &DivisibleMixture, hidden: &str, sum: String) -> String {
        let value = self.value_of(mixture, DivisibleMixture::HIDDEN);
        if self.writer.graph.value(value).shape.as_ref().is_none_or(|shape| shape.len() == 2) {
            return sum;
        }
        let shape = self.add("Shape", "hidden_shape", &[hidden], vec![]);
        let outer = self.ints("outer", &[0, 1]);
        let sizes = self.add("Gather", "outer_sizes", &[&shape, &outer], vec![int_attribute("axis", 0)]);
        let one = self.ints("one", &[1]);
        let sizes = self.add("Concat", "sum_shape", &[&sizes, &one], vec![int_attribute("axis", 0)]);
        self.add("Reshape", "sums", &[&sum, &sizes], vec![])
    }

    /// A copy of the mixture with these experts only, changed by `change`; returns the name of its result.
    fn operator(
        &mut self,
        node: &NodeProto,
        division: &ExpertDivision,
        part: &str,
        experts: &[u32],
        change: impl FnOnce(&mut NodeProto),
    ) -> Result<String, ExpertDivisionError> {
        let mixture = &division.mixture;
        let mut copy = node.clone();
        let output = self.name(part);
        for at in &mixture.sliced {
            let name = self.writer.graph.value(self.value_of(mixture, *at)).name.as_str();
            copy.input[*at] = self.writer.slices(name, experts, part)?;
        }
        set(&mut copy, int_attribute("k", mixture.active.min(experts.len() as u64) as i64));
        copy.name = Some(format!("{output}/{}", node.op_type()));
        copy.output = vec![output.clone()];
        change(&mut copy);
        self.writer.nodes.push(copy);
        Ok(output)
    }

    fn ints(&mut self, part: &str, values: &[i64]) -> String {
        let raw = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.constant(part, DType::Int64, vec![values.len() as i64], raw)
    }

    fn float(&mut self, part: &str, value: f32) -> String {
        self.constant(part, DType::Float32, vec![], value.to_le_bytes().to_vec())
    }

    fn constant(&mut self, part: &str, dtype: DType, dims: Vec<i64>, raw: Vec<u8>) -> String {
        let name = self.name(part);
        let tensor = TensorProto {
            name: Some(name.clone()),
            dims,
            data_type: Some(dtype.to_onnx()),
            raw_data: Some(raw.into()),
            ..TensorProto::default()
        };
        self.writer.tensors.push((tensor, Storage::Embedded));
        name
    }

    fn value_of(&self, mixture: &DivisibleMixture, at: usize) -> ValueId {
        self.writer.graph.node(mixture.node).inputs[at].expect("a divisible mixture has this input")
    }

    fn dtype_of(&self, mixture: &DivisibleMixture, at: usize) -> DType {
        self.writer.graph.value(self.value_of(mixture, at)).dtype.unwrap_or(DType::Float32)
    }
}

fn set(node: &mut NodeProto, attribute: AttributeProto) {
    node.attribute.retain(|other| other.name() != attribute.name());
    node.attribute.push(attribute);
}
