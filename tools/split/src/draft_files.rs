//! Writes the files of a model's own draft into a directory of the plan: partitions, quantized weights, `plan.yaml`.
//!
//! A partition that holds nothing but weights of the model (the embedding) refers to the model's own file, so that both
//! map the same pages, and nothing is written twice. All other weights are in one file beside the draft's plan.

use crate::destination::Destination;
use crate::error::SplitError;
use crate::output::PLAN_FILE;
use crate::own_draft::OwnDraft;
use crate::records::Records;
use hpp_model::host_kernels;
use hpp_onnx::proto::{ModelProto, TensorProto};
use hpp_onnx::{Extractor, QUANTIZED_FILE, is_external, needs_externalising, walk};
use hpp_schema::{ByteSize, FileRecord, FileRole, HostKernels, OwnDraft as DraftRecord, Plan};
use std::collections::{BTreeSet, HashMap};

/// The directory of a draft in that of the plan.
pub const DRAFT_DIR: &str = "draft";
/// Weights that only the draft has.
const WEIGHTS_FILE: &str = "weights.bin";
/// Intermediate file for weights that are embedded in the model.
const EMBEDDED_FILE: &str = "embedded.bin";

/// External weights of a plan's files by name.
pub struct ModelWeights(HashMap<String, TensorProto>);

impl ModelWeights {
    /// The external weights of these files.
    pub fn of<'a>(protos: impl IntoIterator<Item = &'a ModelProto>) -> Self {
        let graphs = protos.into_iter().flat_map(|proto| proto.graph.iter());
        let initializers = graphs.flat_map(|graph| &graph.initializer);
        let external = initializers.filter(|tensor| is_external(tensor).unwrap_or(false));
        ModelWeights(external.map(|tensor| (tensor.name().to_owned(), tensor.clone())).collect())
    }

    /// A file with its external weights in the files of the plan; `None` if one of them is not there.
    fn refer(&self, proto: &ModelProto) -> Option<ModelProto> {
        let mut proto = proto.clone();
        walk::tensors_mut(&mut proto, &mut |tensor| {
            if is_external(tensor).map_err(drop)? {
                let ours = self.0.get(tensor.name()).ok_or(())?;
                let is_same = (ours.data_type, &ours.dims) == (tensor.data_type, &tensor.dims);
                tensor.external_data = if is_same { ours.external_data.clone() } else { return Err(()) };
            }
            Ok(())
        })
        .ok()?;
        Some(proto)
    }
}

/// Writes the draft of `plan`, whose paths and records are complete, to the directory of `destination`. Returns what the plan records of it.
pub fn write(
    draft: &OwnDraft,
    plan: &Plan,
    weights: &ModelWeights,
    destination: &mut Destination,
) -> Result<DraftRecord, SplitError> {
    let model = match needs_externalising(&draft.analysis.model) {
        true => destination.externalise(&draft.analysis.model, EMBEDDED_FILE)?,
        false => draft.analysis.model.clone(),
    };
    let mut own = draft.plan.clone();
    let extractor = Extractor::new(&model, &draft.analysis.graph);
    let mut files = Vec::new();
    for (part, partition) in draft.parts.iter().zip(&mut own.partitions) {
        let name = partition.file.clone();
        let extracted = extractor.part(&partition.name, part);
        let proto = extracted.map_err(|error| SplitError::Extract { name, source: Box::new(error) })?;
        partition.host_kernels = HostKernels { packed: own.model.host_kernels.packed, ..host_kernels(&proto) };
        let shared = weights.refer(&proto);
        partition.weights_dir = if shared.is_some() { above(weights_dir(plan)) } else { ".".to_owned() };
        files.push((partition.file.clone(), shared.is_some(), shared.unwrap_or(proto)));
    }
    let mut packed: Vec<ModelProto> =
        files.iter().filter(|(_, shared, _)| !shared).map(|(_, _, proto)| proto.clone()).collect();
    if let Some(quantized) = &draft.analysis.quantized {
        destination.add_virtual(QUANTIZED_FILE, quantized.contents.clone());
    }
    destination.pack(&mut packed, model.weights(), WEIGHTS_FILE)?;
    [EMBEDDED_FILE, QUANTIZED_FILE].into_iter().for_each(|file| destination.remove(file));
    let mut packed = packed.into_iter();
    for (name, shared, proto) in &files {
        let packed = if *shared { None } else { packed.next() };
        let failed = |error| SplitError::Extract { name: name.clone(), source: Box::new(error) };
        destination.write_model(name, packed.as_ref().unwrap_or(proto)).map_err(failed)?;
    }
    set_paths(&mut own, plan);
    let shared = files.iter().filter(|(_, shared, _)| *shared).map(|(_, _, proto)| proto);
    own.files = records(&own, plan, &locations(shared), destination)?;
    let yaml = own.to_yaml().map_err(SplitError::Plan)?;
    destination.write(PLAN_FILE, yaml.into_bytes())?;
    Ok(DraftRecord {
        plan: format!("{DRAFT_DIR}/{PLAN_FILE}"),
        bits: draft.bits,
        host_memory: ByteSize(draft.host_memory),
        sequence_memory: ByteSize(draft.sequence_memory),
    })
}

/// The directory of the weights of the plan's partitions.
fn weights_dir(plan: &Plan) -> &str {
    plan.partitions.first().map_or(".", |partition| &partition.weights_dir)
}

/// A path of the plan as the draft's plan writes it.
fn above(path: &str) -> String {
    if path == "." { "..".to_owned() } else { format!("../{path}") }
}

/// Sets the model that the draft is compared with, what rounds that model, and the draft's tokenizer, to those of the plan.
fn set_paths(own: &mut Plan, plan: &Plan) {
    own.model.source = above(&plan.model.source);
    own.model.weights_dir = above(&plan.model.weights_dir);
    own.model.rounded_by.clone_from(&plan.model.rounded_by);
    let has_branch = plan.model.inputs.iter().any(|input| input.role.is_of_source_only());
    own.model.inputs.retain(|input| has_branch || !input.role.is_of_source_only());
    own.generation = plan.generation.clone().map(|generation| {
        let above = |path: Option<String>| path.map(|path| above(&path));
        hpp_schema::GenerationConfig {
            tokenizer: above(generation.tokenizer),
            tokenizer_config: above(generation.tokenizer_config),
            chat_template: above(generation.chat_template),
            ..generation
        }
    });
}

/// The files that these models' weights are in.
fn locations<'a>(protos: impl Iterator<Item = &'a ModelProto>) -> BTreeSet<String> {
    let tensors = protos.flat_map(|proto| proto.graph.iter()).flat_map(|graph| &graph.initializer);
    let entries = tensors.flat_map(|tensor| &tensor.external_data).filter(|entry| entry.key() == "location");
    entries.map(|entry| entry.value().to_owned()).collect()
}

/// Records of the draft's files: its own, and those of the plan that it uses.
fn records(
    own: &Plan,
    plan: &Plan,
    shared: &BTreeSet<String>,
    destination: &Destination,
) -> Result<Vec<FileRecord>, SplitError> {
    let mut records = Records::new(destination, true);
    records.add_written(WEIGHTS_FILE, FileRole::Weights)?;
    for partition in &own.partitions {
        records.add(&partition.file, FileRole::Partition)?;
    }
    let dir = weights_dir(plan);
    let is_shared = |record: &&FileRecord| match record.role {
        FileRole::Source | FileRole::Text => true,
        FileRole::Weights => shared
            .iter()
            .any(|location| record.path == if dir == "." { location.clone() } else { format!("{dir}/{location}") }),
        FileRole::Partition | FileRole::Tapped | FileRole::Draft => false,
    };
    let of_the_plan = plan.files.iter().filter(is_shared);
    // The plan's own check hashes them; with the draft, samples are compared once more.
    let of_the_plan =
        of_the_plan.map(|record| FileRecord { path: above(&record.path), blake3: None, ..record.clone() });
    Ok(of_the_plan.chain(records.done()).collect())
}
