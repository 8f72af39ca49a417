//! Writes plans for measuring into a work directory: everything on the host, weights in the model's files.

use hpp_graph::{PartitionGraph, cut};
use hpp_model::{Analysis, Decision, PartitionSpec, ProviderPolicy, Scenario, assemble, blocks, host_kernels};
use hpp_onnx::proto::ModelProto;
use hpp_onnx::{Extractor, LinkOutcome, Model, externalise, hash, link, needs_externalising, write_bytes, write_model};
use hpp_partition::{BlockPlacement, KvHome, Packing, Placement};
use hpp_schema::{
    Budgets, ByteSize, FileRecord, FileRole, Finding, HostKernels, Partition, Plan, Predictions, Severity,
};
use std::fs;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// File for weights that were embedded in the model file.
const WEIGHTS_FILE: &str = "weights.bin";
/// File name of the plan.
const PLAN_FILE: &str = "plan.yaml";

/// Why a plan for measuring could not be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum PlanDirError {
    #[error("cannot cut the model")]
    Cut(#[source] Box<hpp_graph::CutError>),
    #[error("cannot make {name}")]
    Extract { name: String, source: Box<hpp_onnx::ExtractError> },
    #[error("cannot provide the weights")]
    Weights(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot provide the weights: {location} lies outside the model's directory and cannot be linked ({why})")]
    NotLinkable { location: String, why: String },
    #[error(transparent)]
    Write(#[from] hpp_onnx::WriteError),
    #[error(transparent)]
    Hash(#[from] hash::HashError),
    #[error("cannot write the plan as YAML")]
    Yaml(#[source] Box<hpp_schema::PlanError>),
    #[error("the plan for measuring is inconsistent: {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Plan(Vec<Finding>),
    #[error("cannot look at {}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl PlanDirError {
    /// What the user can do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            PlanDirError::NotLinkable { .. } => Some("copy the weights beside the model"),
            PlanDirError::Write(hpp_onnx::WriteError::DiskFull { .. }) => {
                Some("free space on the disk of the temporary directory, or set TMPDIR to another")
            }
            _ => None,
        }
    }
}

/// A model whose weights plans can reference.
pub(crate) struct ReferencedModel {
    /// The model without large embedded weights.
    pub model: Model,
    /// The directory that its locations are relative to, without symlinks.
    pub dir: PathBuf,
}

impl ReferencedModel {
    /// Uses the model's directory; or `work`, if weights are embedded in the model file or links lead out of its directory.
    pub fn reach(model: &Model, work: &Path) -> Result<Self, PlanDirError> {
        let own = real(model.dir())?;
        let files = &model.weights().files;
        if files.is_empty() && needs_externalising(model) {
            let moved = externalise(model, work, WEIGHTS_FILE).map_err(|e| PlanDirError::Weights(Box::new(e)))?;
            return Ok(ReferencedModel { model: moved, dir: real(work)? });
        }
        if files.iter().all(|file| file.path.starts_with(&own)) {
            return Ok(ReferencedModel { model: model.clone(), dir: own });
        }
        for file in files {
            match link(file, work).map_err(|e| PlanDirError::Weights(Box::new(e)))? {
                LinkOutcome::NotLinkable { why } => {
                    return Err(PlanDirError::NotLinkable { location: file.location.clone(), why });
                }
                LinkOutcome::AlreadyThere | LinkOutcome::HardLink | LinkOutcome::Clone => {}
            }
        }
        Ok(ReferencedModel { model: model.clone(), dir: real(work)? })
    }
}

/// A plan on the host and its parts, not written yet.
pub(crate) struct Draft {
    pub parts: Vec<PartitionGraph>,
    pub plan: Plan,
}

impl Draft {
    /// Makes one partition for each group of blocks. `change` may modify the parts before the plan is made.
    pub fn new(
        analysis: &Analysis,
        groups: &[Range<usize>],
        change: impl FnOnce(&mut [PartitionGraph]),
    ) -> Result<Self, PlanDirError> {
        let context = analysis.context;
        let load = Scenario {
            batch: 1,
            context,
            prompt: 1,
            new_tokens: 0,
            prefill_chunk: context,
            threads: 1,
            divides_prompts: false,
        };
        let blocks = blocks(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, load);
        let mut parts =
            cut(&analysis.graph, &analysis.segmentation, groups).map_err(|error| PlanDirError::Cut(Box::new(error)))?;
        change(&mut parts);
        let placement = BlockPlacement { prefill: Placement::Cpu, decode: Placement::Cpu };
        let pieces: Vec<PartitionSpec> =
            groups.iter().map(|blocks| PartitionSpec { blocks: blocks.clone(), placement }).collect();
        let margin = ByteSize(0);
        let mixtures = vec![None; pieces.len()];
        let plan = assemble(&Decision {
            analysis,
            blocks: &blocks,
            partitions: &pieces,
            mixtures: &mixtures,
            segmentation: &analysis.segmentation,
            slots: &[],
            budgets: Budgets { vram: vec![], ram: None, context: load.context, batch: load.batch, margin },
            providers: &ProviderPolicy::default(),
            movable: false,
            disk: None,
            packing: Packing::default(),
            compress_permille: 0,
            heap: 0,
            session_creation: 0,
            kv: KvHome::Device,
            host_kv_on_disk: false,
            parts: &parts,
            scenario: load,
            reasons: vec!["to measure with".to_owned(); pieces.len()],
            decode_tokens: 1,
            predictions: Predictions { source: "none".to_owned(), ..Predictions::default() },
        });
        Ok(Draft { parts, plan })
    }

    /// Makes the model of each part.
    pub fn protos(&self, analysis: &Analysis, model: &Model) -> Result<Vec<ModelProto>, PlanDirError> {
        let extractor = Extractor::new(model, &analysis.graph);
        let make = |(part, partition): (&PartitionGraph, &Partition)| {
            let made = extractor.part(&partition.name, part);
            made.map_err(|source| PlanDirError::Extract { name: partition.name.clone(), source: Box::new(source) })
        };
        self.parts.iter().zip(&self.plan.partitions).map(make).collect()
    }
}

/// A partition's model and the directory of its weights.
pub(crate) struct PartitionFile<'a> {
    pub proto: &'a ModelProto,
    /// Directory that its locations are relative to, without symlinks.
    pub weights: &'a Path,
}

/// Writes the partition files and then the plan into `dir`; returns the plan's path.
pub(crate) fn write(
    dir: &Path,
    analysis: &Analysis,
    mut plan: Plan,
    files: &[PartitionFile],
) -> Result<PathBuf, PlanDirError> {
    let base = real(dir)?;
    let mut records = Records { base: &base, records: Vec::new() };
    plan.model.source = records.add(&real(analysis.model.path())?, FileRole::Source)?;
    plan.model.weights_dir = relative(&base, &real(analysis.model.dir())?);
    for (partition, file) in plan.partitions.iter_mut().zip(files) {
        write_model(&base.join(&partition.file), file.proto)?;
        records.add(&base.join(&partition.file), FileRole::Partition)?;
        partition.weights_dir = relative(&base, file.weights);
        partition.host_kernels = HostKernels { packed: plan.model.host_kernels.packed, ..host_kernels(file.proto) };
    }
    if let Some(generation) = &mut plan.generation {
        let config = &analysis.config;
        let mut name = |path: &Option<PathBuf>| match path {
            Some(path) => records.add(&real(path)?, FileRole::Text).map(Some),
            None => Ok(None),
        };
        generation.tokenizer = name(&config.tokenizer)?;
        generation.tokenizer_config = name(&config.tokenizer_config)?;
        generation.chat_template = name(&config.chat_template)?;
    }
    plan.files = records.records;
    let wrong: Vec<Finding> = plan.check().into_iter().filter(|f| f.severity == Severity::Error).collect();
    if !wrong.is_empty() {
        return Err(PlanDirError::Plan(wrong));
    }
    let yaml = plan.to_yaml().map_err(|error| PlanDirError::Yaml(Box::new(error)))?;
    let path = base.join(PLAN_FILE);
    write_bytes(&path, yaml.as_bytes())?;
    Ok(path)
}

/// Records of the plan's files.
struct Records<'a> {
    base: &'a Path,
    records: Vec<FileRecord>,
}

impl Records<'_> {
    /// Adds a file once; returns its path relative to the plan.
    fn add(&mut self, file: &Path, role: FileRole) -> Result<String, PlanDirError> {
        let path = relative(self.base, file);
        if self.records.iter().all(|record| record.path != path) {
            let about = fs::metadata(file).map_err(|source| PlanDirError::Io { path: file.to_owned(), source })?;
            let (bytes, sampled) = (ByteSize(about.len()), hash::sampled(file)?);
            self.records.push(FileRecord { path: path.clone(), role, bytes, sampled, blake3: None });
        }
        Ok(path)
    }
}

/// Resolves the symlinks of a path.
pub(crate) fn real(path: &Path) -> Result<PathBuf, PlanDirError> {
    // The directory of `model.onnx` is the current one.
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    fs::canonicalize(path).map_err(|source| PlanDirError::Io { path: path.to_owned(), source })
}

/// A path as a plan writes it: relative to the plan, with forward slashes.
fn relative(base: &Path, path: &Path) -> String {
    let relative = pathdiff::diff_paths(path, base).unwrap_or_else(|| path.to_owned());
    let parts: Vec<_> = relative.components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
    if parts.is_empty() { ".".to_owned() } else { parts.join("/") }
}
