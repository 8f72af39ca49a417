//! Writes a plan directory: weight files, partitions, the tapped model, file records, and at the end `plan.yaml`.

use crate::destination::{Destination, NotLinkable};
use crate::draft_files::{self, DRAFT_DIR, ModelWeights};
use crate::error::SplitError;
use crate::output::{Leftovers, OutputDir, PLAN_FILE, Resume};
use crate::own_draft::OwnDraft;
use crate::records::{Records, record_unhashed};
use crate::weight_inputs::{SLOTS_FILE, WeightSource, weights_to_inputs};
pub use crate::write_options::WriteOptions;
use hpp_graph::{PartitionGraph, ValueId};
use hpp_model::{Analysis, CONFIG_FILES, host_kernels, shared_weights};
use hpp_onnx::proto::ModelProto;
use hpp_onnx::{
    EXPERTS_FILE, Extractor, Model, NEURONS_FILE, QUANTIZED_FILE, ROWS_FILE, WeightFile, needs_externalising,
};
use hpp_schema::{
    DeviceKind, FileRecord, FileRole, HostKernels, OutputUse, Partition, Plan, Provider, Residency, Severity,
};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Weights that were embedded in the model file, or that `--pack` copied.
const WEIGHTS_FILE: &str = "weights.bin";
/// Intermediate file for embedded weights with `--pack`.
const EMBEDDED_FILE: &str = "embedded.bin";
/// Intermediate file for the embedded weights of the unsplit model, if it has others than the partitions.
const EMBEDDED_WHOLE_FILE: &str = "embedded.whole.bin";
/// The unsplit model with boundary tensors as outputs.
const TAPPED_FILE: &str = "tapped.onnx";
/// The unsplit model in a packed directory.
const WHOLE_FILE: &str = "whole.onnx";

/// A plan directory being written.
pub struct PlanWriter<'a> {
    options: WriteOptions,
    analysis: &'a Analysis,
    own_draft: Option<&'a OwnDraft>,
    /// Whether the plan has an unsplit model of its own: where it is packed, and where the exported model computes with other weights or
    /// activations.
    has_own_whole: bool,
    /// The weight file for the embedded weights of the unsplit model, if it is not that of the partitions.
    whole_files: Vec<WeightFile>,
    /// `None` in a dry run.
    output: Option<OutputDir>,
    destination: Destination,
}

impl<'a> PlanWriter<'a> {
    /// Locks and prepares the directory for a plan and the model's own draft, if it has one.
    pub fn begin(
        options: WriteOptions,
        analysis: &'a Analysis,
        own_draft: Option<&'a OwnDraft>,
        target: &Path,
    ) -> Result<Self, SplitError> {
        let has_own_whole = options.has_own_whole(analysis);
        let options = options.for_analysis(analysis);
        let resume = match own_draft {
            _ if options.pack => Resume::Everything,
            Some(_) => Resume::Directory(DRAFT_DIR),
            None => Resume::Nothing,
        };
        let output = OutputDir::begin(target, options.force, resume)?;
        let destination = Destination::new(output.target(), Some(&output))?;
        let output = Some(output);
        Ok(PlanWriter { options, analysis, own_draft, has_own_whole, whole_files: vec![], output, destination })
    }

    /// What stays if this process ends while it writes; `None` in a dry run.
    pub fn leftovers(&self) -> Option<Leftovers> {
        self.output.as_ref().map(OutputDir::leftovers)
    }

    /// Computes the plan as it would be written, without writing.
    pub fn dry_run(
        options: WriteOptions,
        analysis: &'a Analysis,
        own_draft: Option<&'a OwnDraft>,
        target: &Path,
        parts: &[PartitionGraph],
        plan: Plan,
    ) -> Result<Plan, SplitError> {
        let has_own_whole = options.has_own_whole(analysis);
        let options = options.for_analysis(analysis);
        let destination = Destination::new(target, None)?;
        let mut writer =
            PlanWriter { options, analysis, own_draft, has_own_whole, whole_files: vec![], output: None, destination };
        writer.write(parts, plan)
    }

    /// Writes all files and moves them into place, or removes them on an error. Returns the plan with paths and file records.
    pub fn finish(mut self, parts: &[PartitionGraph], plan: Plan) -> Result<Plan, SplitError> {
        let written = self.write(parts, plan);
        let Some(output) = self.output else { return written };
        match written {
            Ok(plan) => {
                let target = output.target().to_owned();
                output.commit()?;
                tracing::info!(directory = %target.display(), "plan written");
                record_unhashed(&plan, &target);
                Ok(plan)
            }
            Err(error) => {
                if let Some(left) = output.abandon() {
                    tell!("warning: cannot remove {}: delete it yourself", left.display());
                }
                Err(error)
            }
        }
    }

    /// Writes all files to the destination; returns the plan with paths and file records.
    fn write(&mut self, parts: &[PartitionGraph], mut plan: Plan) -> Result<Plan, SplitError> {
        let model = self.externalise(&self.analysis.model)?;
        let mut protos = self.protos(&model, parts, &plan)?;
        self.compute_active_neurons(&plan, &mut protos);
        for (partition, (_, proto)) in plan.partitions.iter_mut().zip(&protos) {
            partition.host_kernels = HostKernels { packed: plan.model.host_kernels.packed, ..host_kernels(proto) };
        }
        let weights_dir =
            if self.options.pack { self.pack(&model, &mut protos)? } else { self.link_weights(&model, &plan)? };
        let model_weights = ModelWeights::of(protos.iter().map(|(_, proto)| proto));
        let has_slots_file = self.weights_to_inputs(&model, &mut plan, &mut protos, &weights_dir)?;
        for (name, proto) in &protos {
            let failed = |e| SplitError::Extract { name: name.clone(), source: Box::new(e) };
            self.destination.write_model(name, proto).map_err(failed)?;
        }
        self.set_paths(&mut plan, &weights_dir);
        self.add_tokenizer_files(&mut plan)?;
        self.add_config()?;
        plan.files = self.records(&model, &plan, &weights_dir, has_slots_file)?;
        self.write_own_draft(&mut plan, &model_weights)?;
        refuse_unusable(&plan)?;
        let yaml = plan.to_yaml().map_err(SplitError::Plan)?;
        self.destination.write(PLAN_FILE, yaml.into_bytes())?;
        let bytes = plan.files.iter().map(|file| file.bytes.0).fold(0, u64::saturating_add);
        tracing::info!(files = plan.files.len(), bytes, weights_dir, "files of the plan recorded");
        Ok(plan)
    }

    /// Rewrites the partitions that compute on the host's own provider in both phases.
    fn compute_active_neurons(&self, plan: &Plan, protos: &mut [(String, ModelProto)]) {
        let Some(active) = &self.analysis.active_neurons else { return };
        let on_host = |partition: &Partition| {
            partition.variants().all(|variant| variant.device == "cpu" && variant.providers == [Provider::CPU])
        };
        for (partition, (name, proto)) in plan.partitions.iter().zip(protos) {
            if on_host(partition) {
                let products = active.apply(proto);
                tracing::debug!(partition = name, products, "only active neurons are computed");
            }
        }
    }

    /// Writes the model's own draft, if it has one, and records it in the plan.
    fn write_own_draft(&mut self, plan: &mut Plan, weights: &ModelWeights) -> Result<(), SplitError> {
        let Some(own_draft) = self.own_draft else { return Ok(()) };
        let mut directory = self.destination.directory(DRAFT_DIR)?;
        let record = draft_files::write(own_draft, plan, weights, &mut directory)?;
        self.destination.adopt(&directory, DRAFT_DIR, PLAN_FILE);
        let mut records = Records::new(&self.destination, true);
        records.add(&record.plan, FileRole::Draft)?;
        plan.files.extend(records.done());
        plan.draft = Some(record);
        Ok(())
    }

    /// The model without large embedded weights.
    fn externalise(&mut self, model: &Model) -> Result<Model, SplitError> {
        if !needs_externalising(model) {
            return Ok(model.clone());
        }
        let location = if self.options.pack { EMBEDDED_FILE } else { WEIGHTS_FILE };
        self.destination.externalise(model, location)
    }

    /// The models to write, by file name: partitions first, in order.
    fn protos(
        &mut self,
        model: &Model,
        parts: &[PartitionGraph],
        plan: &Plan,
    ) -> Result<Vec<(String, ModelProto)>, SplitError> {
        let extractor = Extractor::new(model, &self.analysis.graph);
        let mut protos = Vec::new();
        for (part, partition) in parts.iter().zip(&plan.partitions) {
            let name = partition.file.clone();
            let proto = extractor.part(&partition.name, part);
            protos.push((name.clone(), proto.map_err(|e| SplitError::Extract { name, source: Box::new(e) })?));
        }
        protos.push((TAPPED_FILE.to_owned(), extractor.tapped(&self.taps(parts, plan))));
        if self.has_own_whole {
            protos.push((WHOLE_FILE.to_owned(), self.whole(&extractor)?));
        }
        Ok(protos)
    }

    /// The model before its head was rewritten and its layers were divided, against which `hpp-exec verify` compares such a plan.
    fn whole(&mut self, extractor: &Extractor) -> Result<ModelProto, SplitError> {
        match &self.analysis.before {
            Some((model, graph)) if self.analysis.has_parts_of_weights() && needs_externalising(model) => {
                // Its embedded weights are more than those of the partitions.
                let model = self.destination.externalise(model, EMBEDDED_WHOLE_FILE)?;
                let files = model.weights().files.iter();
                self.whole_files = files.filter(|file| file.location == EMBEDDED_WHOLE_FILE).cloned().collect();
                Ok(Extractor::new(&model, graph).tapped(&[]))
            }
            Some((model, graph)) => Ok(Extractor::new(&self.externalise(model)?, graph).tapped(&[])),
            None => Ok(extractor.tapped(&[])),
        }
    }

    /// Every tensor that crosses between partitions.
    fn taps(&self, parts: &[PartitionGraph], plan: &Plan) -> Vec<ValueId> {
        let mut taps = Vec::new();
        for (part, partition) in parts.iter().zip(&plan.partitions) {
            let crossing = part.outputs.iter().zip(&partition.outputs).filter(|(_, o)| o.to == OutputUse::Boundary);
            taps.extend(crossing.map(|(id, _)| *id));
        }
        taps
    }

    /// Copies the weight bytes that the models read into one file in the directory; returns the weights directory.
    fn pack(&mut self, model: &Model, protos: &mut [(String, ModelProto)]) -> Result<String, SplitError> {
        let mut models: Vec<ModelProto> = protos.iter().map(|(_, proto)| proto.clone()).collect();
        if let Some(quantized) = &self.analysis.quantized {
            self.destination.add_virtual(QUANTIZED_FILE, quantized.contents.clone());
        }
        if let Some(rows) = &self.analysis.rows {
            self.destination.add_virtual(ROWS_FILE, rows.contents.clone());
        }
        if let Some(experts) = &self.analysis.gpu_experts {
            self.destination.add_virtual(EXPERTS_FILE, experts.contents.clone());
        }
        let mut weights = model.weights().clone();
        if let Some(active) = &self.analysis.active_neurons {
            self.destination.add_virtual(NEURONS_FILE, active.contents().clone());
            weights.files.extend(active.file(model));
        }
        weights.files.append(&mut self.whole_files);
        self.destination.pack(&mut models, &weights, WEIGHTS_FILE)?;
        protos.iter_mut().zip(models).for_each(|((_, proto), packed)| *proto = packed);
        for file in [EMBEDDED_FILE, EMBEDDED_WHOLE_FILE, EXPERTS_FILE, NEURONS_FILE, QUANTIZED_FILE, ROWS_FILE] {
            self.destination.remove(file);
        }
        Ok(".".to_owned())
    }

    /// Turns weights of streamed and movable partitions into inputs. Returns whether it wrote [`SLOTS_FILE`].
    fn weights_to_inputs(
        &mut self,
        model: &Model,
        plan: &mut Plan,
        protos: &mut Vec<(String, ModelProto)>,
        weights_dir: &str,
    ) -> Result<bool, SplitError> {
        let shared = shared_weights(self.analysis);
        let dir = self.destination.weights_dir(weights_dir, model);
        let source = WeightSource { dir: &dir, dry_files: self.destination.dry_files() };
        let slots = weights_to_inputs(plan, protos, &shared, self.options.movable, source)?;
        if slots.is_empty() {
            return Ok(false);
        }
        if weights_dir != "." {
            let why = "embedded weights would be streamed from a file in the plan directory, but the model's weight \
                       files are elsewhere";
            return Err(SplitError::setting(why, "choose --out on the model's file system, or use --pack"));
        }
        if !self.options.pack && model.weights().files.iter().any(|file| file.location == SLOTS_FILE) {
            let why = format!(
                "the model has a weight file named {SLOTS_FILE}, a name that a plan with streaming uses itself"
            );
            return Err(SplitError::setting(why, "use --pack"));
        }
        self.destination.write(SLOTS_FILE, slots)?;
        Ok(true)
    }

    /// Links or clones every weight file into the plan directory; returns the weights directory, which is the model's
    /// own if that is impossible.
    fn link_weights(&mut self, model: &Model, plan: &Plan) -> Result<String, SplitError> {
        // All weight inputs come from one directory, and formerly embedded ones are in a file of the plan directory.
        let is_gpu = |device: &str| plan.devices.iter().any(|d| d.name == device && d.kind == DeviceKind::Gpu);
        let streams = plan.partitions.iter().flat_map(Partition::variants).any(|variant| {
            is_gpu(variant.device) && (variant.residency == Residency::Streamed || self.options.movable)
        });
        if self.options.in_place && !streams && !needs_externalising(&self.analysis.model) {
            return Ok(self.destination.relative(self.analysis.model.dir()));
        }
        let Some(NotLinkable { location, why }) = self.destination.link_weights(model)? else {
            return Ok(".".to_owned());
        };
        if needs_externalising(&self.analysis.model) {
            return Err(SplitError::setting(
                format!(
                    "{location} cannot be linked into the output directory ({why}), and the model has embedded weights too"
                ),
                "choose --out on the model's file system, or use --pack",
            ));
        }
        tell!(
            "note: {location} cannot be linked into the output directory ({why}); hpp-exec reads it from its own directory, but \
             stock ONNX Runtime cannot open the partitions: use --pack, or choose --out on the model's file system and as a user who owns the model's files"
        );
        Ok(self.destination.relative(self.analysis.model.dir()))
    }

    /// Fills in the paths of weights and model in the plan.
    fn set_paths(&self, plan: &mut Plan, weights_dir: &str) {
        for partition in &mut plan.partitions {
            partition.weights_dir = weights_dir.to_owned();
        }
        plan.model.tapped = Some(TAPPED_FILE.to_owned());
        (plan.model.source, plan.model.weights_dir) = match self.has_own_whole {
            true => (WHOLE_FILE.to_owned(), weights_dir.to_owned()),
            false => (
                self.destination.relative(self.analysis.model.path()),
                self.destination.relative(self.analysis.model.dir()),
            ),
        };
        if self.has_own_whole {
            // This model is flattened: it has no branch to choose.
            plan.model.inputs.retain(|input| !input.role.is_of_source_only());
        }
    }

    /// Adds the paths of tokenizer and chat template; copies them into a packed directory.
    fn add_tokenizer_files(&mut self, plan: &mut Plan) -> Result<(), SplitError> {
        let Some(generation) = &mut plan.generation else { return Ok(()) };
        let config = &self.analysis.config;
        let mut add = |path: &Option<PathBuf>| path.as_deref().map(|path| self.add_tokenizer_file(path)).transpose();
        generation.tokenizer = add(&config.tokenizer)?;
        generation.tokenizer_config = add(&config.tokenizer_config)?;
        generation.chat_template = add(&config.chat_template)?;
        Ok(())
    }

    /// Copies the configuration of a model beside its own `whole.onnx`, so that this can be profiled and split like any model.
    fn add_config(&mut self) -> Result<(), SplitError> {
        let dir = &self.analysis.config.dir;
        let present = CONFIG_FILES.into_iter().map(|name| (name, dir.join(name))).filter(|(_, path)| path.is_file());
        let copied = present.filter(|_| self.has_own_whole);
        for (name, path) in copied.collect::<Vec<_>>() {
            self.destination.copy(name, &path)?;
        }
        Ok(())
    }

    fn add_tokenizer_file(&mut self, path: &Path) -> Result<String, SplitError> {
        let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !self.options.pack {
            return Ok(self.destination.relative(path));
        }
        self.destination.copy(&file, path)?;
        Ok(file)
    }

    fn records(
        &self,
        model: &Model,
        plan: &Plan,
        weights_dir: &str,
        has_slots_file: bool,
    ) -> Result<Vec<FileRecord>, SplitError> {
        let mut records = Records::new(&self.destination, self.options.hash_weights || self.options.pack);
        let is_written_here = needs_externalising(&self.analysis.model);
        records.add(&plan.model.source, FileRole::Source)?;
        if self.options.pack {
            records.add_written(WEIGHTS_FILE, FileRole::Weights)?;
        } else {
            for file in &model.weights().files {
                let path =
                    if weights_dir == "." { file.location.clone() } else { format!("{weights_dir}/{}", file.location) };
                match is_written_here && file.location == WEIGHTS_FILE {
                    true => records.add_written(&path, FileRole::Weights)?,
                    false => records.add(&path, FileRole::Weights)?,
                }
            }
        }
        if has_slots_file {
            records.add_written(SLOTS_FILE, FileRole::Weights)?;
        }
        let mut seen = HashSet::new();
        let variants = plan.partitions.iter().flat_map(Partition::variants);
        let files = variants.flat_map(|variant| [Some(variant.file), variant.host_file]).flatten();
        for file in files.filter(|file| seen.insert(*file)) {
            records.add(file, FileRole::Partition)?;
        }
        records.add(TAPPED_FILE, FileRole::Tapped)?;
        let tokenizer_files =
            plan.generation.iter().flat_map(|g| [&g.tokenizer, &g.tokenizer_config, &g.chat_template]);
        for file in tokenizer_files.flatten() {
            records.add(file, FileRole::Text)?;
        }
        Ok([records.done(), self.source_weights()?].concat())
    }

    /// The weight files of the exported model, if `hpp-exec verify` reads that model although the plan has weights of its
    /// own.
    fn source_weights(&self) -> Result<Vec<FileRecord>, SplitError> {
        let model = self.analysis.before.as_ref().map_or(&self.analysis.model, |(model, _)| model);
        let has_own_weights = self.options.pack && !self.has_own_whole;
        let files = if has_own_weights { &model.weights().files[..] } else { &[] };
        let mut records = Records::new(&self.destination, self.options.hash_weights);
        files.iter().try_for_each(|file| records.add(&self.destination.relative(&file.path), FileRole::Weights))?;
        Ok(records.done())
    }
}

/// Refuses a plan that hpp-exec would refuse: the model has something that a plan cannot say.
fn refuse_unusable(plan: &Plan) -> Result<(), SplitError> {
    let errors = plan.check().into_iter().filter(|finding| finding.severity == Severity::Error);
    let errors: Vec<String> = errors.map(|finding| finding.to_string()).collect();
    if errors.is_empty() { Ok(()) } else { Err(SplitError::Unusable { findings: errors.join("; ") }) }
}
