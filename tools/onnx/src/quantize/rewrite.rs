//! Rewrites the graph of a model: operators on quantized weights, references to these weights, and no weights that nothing reads any more.

use super::block_quantizer::{Bits, ScaleType};
use super::contents::{Jobs, Part, PartContents};
use super::matrix::{Job, Matrix, Place};
use super::moments::{InputMoments, WeightMoments};
use super::select::{Chosen, Operator, Selection};
use super::{QuantizeError, QuantizeSummary, Quantized};
use crate::flatten::Fresh;
use crate::model::Model;
use crate::names::{self, default_domain};
use crate::proto::{GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto};
use crate::read::position_in;
use crate::set_attribute::int_attribute;
use crate::store::{Layout, refer};
use crate::tensor;
use crate::virtual_file::VirtualFile;
use crate::weights::{FileRange, QUANTIZED_FILE, Storage, WeightFile};
use bytes::Bytes;
use hpp_graph::Graph;
use hpp_schema::DType;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// The domain of ONNX Runtime's operators.
const DOMAIN: &str = "com.microsoft";
/// Activations are rounded to 8 bits, block by block, as GenAI's model builder chooses for the CPU: about three times as fast
/// as computing in float32 there. Other providers ignore it.
const ACCURACY_LEVEL: i64 = 4;

/// Rewrites the model as the selection says.
pub(super) fn rewrite(
    model: &Model,
    graph: &Graph,
    selection: &Selection,
    moments: Option<&Arc<InputMoments>>,
) -> Result<Quantized, QuantizeError> {
    if model.weights.files.iter().any(|file| file.location == QUANTIZED_FILE) {
        return Err(QuantizeError::NameTaken);
    }
    let mut rewriter = Rewriter { moments, ..Rewriter::new(model, graph) };
    let mut nodes: Vec<Vec<NodeProto>> = model.graph_proto().node.iter().map(|node| vec![node.clone()]).collect();
    for chosen in &selection.chosen {
        // A sparse weight is not an initializer that can be read in slabs.
        let Some(weight) = rewriter.weight(chosen)? else { continue };
        let at = chosen.node.0 as usize;
        nodes[at] = rewriter.replace(&model.graph_proto().node[at], chosen, weight);
    }
    Ok(rewriter.finish(nodes.concat(), selection))
}

/// The job of an initializer.
pub(super) fn make_job(model: &Model, name: &str, source: usize, chosen: &Chosen) -> Result<Job, QuantizeError> {
    let size = |size: u64| usize::try_from(size).ok();
    let elements = chosen.depth.saturating_mul(chosen.columns);
    // Checked, because offsets in bytes are computed as `usize`.
    let sizes = size(chosen.depth).zip(size(chosen.columns)).filter(|_| size(elements.saturating_mul(8)).is_some());
    let (depth, columns) = sizes.ok_or_else(|| QuantizeError::TooLarge { name: name.to_owned(), elements })?;
    let place = place(model, source)?;
    let Chosen { dtype, transposed, format, .. } = *chosen;
    let scales = if dtype == DType::Float16 { ScaleType::Float16 } else { ScaleType::Float32 };
    Ok(Job {
        matrix: Matrix { name: name.to_owned(), dtype, place, depth, columns, transposed },
        format,
        scales,
        moments: None,
    })
}

/// Where the bytes of an initializer are.
fn place(model: &Model, source: usize) -> Result<Place, QuantizeError> {
    if let Storage::External(span) = model.weights.storage[source] {
        return Ok(Place::File(model.weights.files[span.file].path.clone(), span.offset));
    }
    let tensor = &model.graph_proto().initializer[source];
    let raw = tensor::embedded_bytes(tensor, &tensor::shape_of(tensor)?)?.unwrap_or_default();
    Ok(match position_in(&model.file, &raw) {
        Some(position) => Place::File(model.path.clone(), position),
        None => Place::Memory(Bytes::from(raw.into_owned())),
    })
}

/// What makes two quantized weights the same: source, orientation and format.
#[derive(PartialEq, Eq, Hash)]
struct JobKey(Identity, bool, super::BlockFormat);

/// Identifies the bytes of a weight: two names of the same bytes are one weight.
#[derive(PartialEq, Eq, Hash)]
enum Identity {
    External(FileRange),
    Embedded(usize),
}

/// The initializers of a quantized weight.
struct Names {
    /// The numbers in the shape for `MatMulNBits`: `[columns, blocks, bytes of a block]`.
    product: Option<String>,
    /// The numbers in the shape for `GatherBlockQuantized`: `[rows, bytes of a row]`.
    table: Option<String>,
    scales: String,
    zero_points: Option<String>,
    /// Index of the initializer that was quantized.
    source: usize,
    /// Name of the initializer that was quantized.
    base: String,
}

struct Rewriter<'a> {
    model: &'a Model,
    graph: &'a Graph,
    moments: Option<&'a Arc<InputMoments>>,
    fresh: Fresh,
    /// Indices of initializers by name.
    sources: HashMap<&'a str, usize>,
    by_key: HashMap<JobKey, usize>,
    jobs: Vec<Job>,
    names: Vec<Names>,
    /// Initializers that were quantized.
    quantized: HashSet<usize>,
}

impl<'a> Rewriter<'a> {
    fn new(model: &'a Model, graph: &'a Graph) -> Self {
        let proto = model.graph_proto();
        Rewriter {
            model,
            graph,
            moments: None,
            fresh: Fresh::for_graph(proto),
            sources: proto.initializer.iter().enumerate().map(|(index, tensor)| (tensor.name(), index)).collect(),
            by_key: HashMap::new(),
            jobs: vec![],
            names: vec![],
            quantized: HashSet::new(),
        }
    }

    /// The job of a weight. If an earlier operator reads the same weight in the same format, it is that operator's job.
    fn weight(&mut self, chosen: &Chosen) -> Result<Option<usize>, QuantizeError> {
        let name = self.graph.value(chosen.weight).name.as_str();
        let Some(source) = self.sources.get(name).copied() else { return Ok(None) };
        self.quantized.insert(source);
        let identity = match self.model.weights.storage[source] {
            Storage::External(span) => Identity::External(span),
            Storage::Embedded => Identity::Embedded(source),
        };
        let key = JobKey(identity, chosen.transposed, chosen.format);
        if let Some(job) = self.by_key.get(&key) {
            return Ok(Some(*job));
        }
        let mut job = make_job(self.model, name, source, chosen)?;
        // With 8 bits, errors are too small to compensate.
        let moments = self.moments.filter(|_| chosen.format.bits == Bits::Four);
        job.moments = moments.and_then(|moments| WeightMoments::of(moments, name));
        self.jobs.push(job);
        let base = format!("{name}_Q{}G{}", chosen.format.bits.count(), chosen.format.block_size);
        let names = Names {
            product: None,
            table: None,
            scales: self.fresh.name(&format!("{base}_scales")),
            zero_points: chosen.format.asymmetric.then(|| self.fresh.name(&format!("{base}_zero_points"))),
            source,
            base,
        };
        self.names.push(names);
        self.by_key.insert(key, self.jobs.len() - 1);
        Ok(Some(self.jobs.len() - 1))
    }

    /// The nodes that replace a node.
    fn replace(&mut self, node: &NodeProto, chosen: &Chosen, job: usize) -> Vec<NodeProto> {
        match chosen.operator {
            Operator::Gather => vec![self.lookup(node, chosen, job)],
            Operator::MatMul | Operator::Gemm => self.product(node, chosen, job),
        }
    }

    fn lookup(&mut self, node: &NodeProto, chosen: &Chosen, job: usize) -> NodeProto {
        let names = &mut self.names[job];
        let table = names.table.get_or_insert_with(|| self.fresh.name(&format!("{}_table", names.base))).clone();
        let mut input = vec![table, node.input[1].clone(), names.scales.clone()];
        input.extend(names.zero_points.clone());
        let attributes = [
            ("bits", chosen.format.bits.count() as i64),
            ("block_size", chosen.format.block_size as i64),
            ("gather_axis", 0),
            ("quantize_axis", 1),
        ];
        operator(node, "GatherBlockQuantized", input, &attributes)
    }

    fn product(&mut self, node: &NodeProto, chosen: &Chosen, job: usize) -> Vec<NodeProto> {
        let names = &mut self.names[job];
        let numbers = names.product.get_or_insert_with(|| self.fresh.name(&names.base)).clone();
        let mut input = vec![node.input[0].clone(), numbers, names.scales.clone()];
        input.extend(names.zero_points.clone());
        let attributes = [
            ("K", chosen.depth as i64),
            ("N", chosen.columns as i64),
            ("bits", chosen.format.bits.count() as i64),
            ("block_size", chosen.format.block_size as i64),
            ("accuracy_level", ACCURACY_LEVEL),
        ];
        let mut product = operator(node, "MatMulNBits", input, &attributes);
        let mut nodes = vec![];
        let mut after = vec![];
        let output = node.output[0].clone();
        // ONNX Runtime's CPU kernel takes float32 and float16.
        if chosen.dtype == DType::Bfloat16 {
            let wide = self.fresh.name(&format!("{output}_float32_input"));
            nodes.push(cast(node, "input", &node.input[0], &wide, DType::Float32));
            product.input[0] = wide;
        }
        let bias = node.input.get(2).filter(|bias| chosen.operator == Operator::Gemm && !bias.is_empty()).cloned();
        let before_bias = bias.as_ref().map_or(output.clone(), |_| self.fresh.name(&format!("{output}_without_bias")));
        if chosen.dtype == DType::Bfloat16 {
            let wide = self.fresh.name(&format!("{output}_float32"));
            after.push(cast(node, "output", &wide, &before_bias, DType::Bfloat16));
            product.output = vec![wide];
        } else {
            product.output = vec![before_bias.clone()];
        }
        after.extend(bias.map(|bias| plain(node, "Add", "bias", vec![before_bias, bias], &output)));
        nodes.push(product);
        nodes.extend(after);
        nodes
    }

    /// The model with these nodes.
    fn finish(self, nodes: Vec<NodeProto>, selection: &Selection) -> Quantized {
        let mut model = self.model.clone();
        let index = model.weights.files.len();
        let laid_out = self.lay_out(index);
        let graph = model.proto.graph.get_or_insert_default();
        graph.node = live(nodes, graph);
        let used: HashSet<String> = graph.node.iter().flat_map(names::reads).map(str::to_owned).collect();
        let returned: HashSet<&str> = graph.output.iter().map(|output| output.name()).collect();
        let is_kept = |source: usize, name: &str| {
            !self.quantized.contains(&source) || used.contains(name) || returned.contains(name)
        };
        let mut summary = self.summary(selection);
        let mut kept = (vec![], vec![]);
        let mut dropped: HashSet<String> = HashSet::new();
        let old = std::mem::take(&mut graph.initializer).into_iter().zip(std::mem::take(&mut model.weights.storage));
        for (source, (tensor, storage)) in old.enumerate() {
            if is_kept(source, tensor.name()) {
                summary.bytes_kept += if self.quantized.contains(&source) { stored(&tensor) } else { 0 };
                kept.0.push(tensor);
                kept.1.push(storage);
            } else {
                dropped.insert(tensor.name().to_owned());
            }
            for (tensor, span) in laid_out.tensors.get(&source).into_iter().flatten() {
                kept.0.push(tensor.clone());
                kept.1.push(Storage::External(*span));
            }
        }
        (graph.initializer, model.weights.storage) = kept;
        // Old models list weights as inputs too.
        graph.input.retain(|input| !dropped.contains(input.name()));
        let known: HashSet<String> =
            names::given(graph).chain(names::produced(&graph.node)).map(str::to_owned).collect();
        graph.value_info.retain(|info| known.contains(info.name()));
        import_domain(&mut model.proto);
        let bytes = laid_out.contents.bytes();
        summary.bytes_after = laid_out.bytes;
        summary.bytes_tied = laid_out.bytes_tied;
        let path = model.dir().join(QUANTIZED_FILE);
        model.weights.files.push(WeightFile { location: QUANTIZED_FILE.to_owned(), path, bytes });
        Quantized { model, contents: laid_out.contents, summary }
    }

    fn summary(&self, selection: &Selection) -> QuantizeSummary {
        let positions = self.moments.map_or(0, |moments| moments.positions);
        let mut summary = QuantizeSummary { left: selection.left_counts(), positions, ..QuantizeSummary::default() };
        for job in &self.jobs {
            *summary.formats.entry(job.format).or_default() += 1;
            summary.compensated += usize::from(job.moments.is_some());
        }
        let initializers = &self.model.graph_proto().initializer;
        let mut spans = HashSet::new();
        for source in &self.quantized {
            let is_new = match self.model.weights.storage[*source] {
                Storage::External(span) => spans.insert(span),
                Storage::Embedded => true,
            };
            summary.bytes_before += if is_new { stored(&initializers[*source]) } else { 0 };
        }
        summary
    }

    /// Assigns an offset to each part of each job. `file` is the index of the quantized file.
    fn lay_out(&self, file: usize) -> LaidOut {
        let jobs = Arc::new(Jobs::new(self.jobs.clone()));
        let mut layout = Layout::default();
        let mut laid_out = LaidOut::default();
        for (job, names) in self.names.iter().enumerate() {
            let Job { matrix, format, scales, .. } = &self.jobs[job];
            let (blocks, columns) = (self.jobs[job].blocks() as i64, matrix.columns as i64);
            let mut tensors = vec![];
            let mut put = |part: Part, tensors_of_part: Vec<(&String, DType, Vec<i64>)>| {
                let length = jobs.bytes(job, part);
                let offset = layout.place(length);
                laid_out.bytes += length;
                let contents = PartContents { jobs: jobs.clone(), job, part };
                laid_out.contents.put_computed(offset, Arc::new(contents), length);
                for (name, dtype, dims) in tensors_of_part {
                    let mut tensor = TensorProto {
                        name: Some(name.clone()),
                        data_type: Some(dtype.to_onnx()),
                        dims,
                        ..TensorProto::default()
                    };
                    refer(&mut tensor, QUANTIZED_FILE, offset, length);
                    tensors.push((tensor, FileRange { file, offset, length }));
                }
            };
            let block = format.block_bytes() as i64;
            let product = names.product.iter().map(|name| (name, DType::Uint8, vec![columns, blocks, block]));
            let table = names.table.iter().map(|name| (name, DType::Uint8, vec![columns, blocks * block]));
            put(Part::Numbers, product.chain(table).collect());
            let scale_type = if *scales == ScaleType::Float16 { DType::Float16 } else { DType::Float32 };
            put(Part::Scales, vec![(&names.scales, scale_type, vec![columns, blocks])]);
            if let Some(zero_points) = &names.zero_points {
                let bytes = self.jobs[job].zero_point_bytes() as i64;
                put(Part::ZeroPoints, vec![(zero_points, DType::Uint8, vec![columns, bytes])]);
            }
            laid_out.tensors.entry(names.source).or_default().extend(tensors);
            if names.product.is_some() && names.table.is_some() {
                laid_out.bytes_tied += self.jobs[job].bytes();
            }
        }
        laid_out
    }
}

/// The quantized file and the tensors in it.
#[derive(Default)]
struct LaidOut {
    contents: VirtualFile,
    /// Bytes of the weights, without the gaps between them.
    bytes: u64,
    /// Bytes of the weights that both a lookup and a product read.
    bytes_tied: u64,
    /// New initializers, by the index of the initializer that was quantized.
    tensors: BTreeMap<usize, Vec<(TensorProto, FileRange)>>,
}

fn stored(tensor: &TensorProto) -> u64 {
    tensor::shape_of(tensor).ok().and_then(|shape| shape.bytes).unwrap_or_default()
}

/// Removes transpositions and copies of weights that nothing reads any more.
fn live(nodes: Vec<NodeProto>, graph: &GraphProto) -> Vec<NodeProto> {
    let mut read: HashSet<String> = graph.output.iter().map(|output| output.name().to_owned()).collect();
    let mut kept: Vec<NodeProto> = Vec::with_capacity(nodes.len());
    for node in nodes.into_iter().rev() {
        let is_link = matches!(node.op_type(), "Transpose" | "Identity");
        if is_link && !node.output.iter().any(|output| read.contains(output)) {
            continue;
        }
        read.extend(names::reads(&node).into_iter().map(str::to_owned));
        kept.push(node);
    }
    kept.reverse();
    kept
}

fn import_domain(model: &mut ModelProto) {
    if !model.opset_import.iter().any(|opset| default_domain(opset.domain()) == DOMAIN) {
        model.opset_import.push(OperatorSetIdProto { domain: Some(DOMAIN.to_owned()), version: Some(1) });
    }
}

/// An operator of ONNX Runtime in the place of another one, whose name, outputs and metadata it takes.
fn operator(of: &NodeProto, op_type: &str, input: Vec<String>, attributes: &[(&str, i64)]) -> NodeProto {
    NodeProto {
        name: of.name.clone(),
        op_type: Some(op_type.to_owned()),
        domain: Some(DOMAIN.to_owned()),
        input,
        output: of.output.clone(),
        attribute: attributes.iter().map(|(name, value)| int_attribute(name, *value)).collect(),
        metadata_props: of.metadata_props.clone(),
        ..NodeProto::default()
    }
}

/// An operator of ONNX beside the one that replaces `of`.
fn plain(of: &NodeProto, op_type: &str, suffix: &str, input: Vec<String>, output: &str) -> NodeProto {
    NodeProto {
        name: of.name.as_ref().map(|name| format!("{name}/{suffix}")),
        op_type: Some(op_type.to_owned()),
        input,
        output: vec![output.to_owned()],
        metadata_props: of.metadata_props.clone(),
        ..NodeProto::default()
    }
}

fn cast(of: &NodeProto, suffix: &str, input: &str, output: &str, to: DType) -> NodeProto {
    let node = plain(of, "Cast", suffix, vec![input.to_owned()], output);
    NodeProto { attribute: vec![int_attribute("to", i64::from(to.to_onnx()))], ..node }
}
