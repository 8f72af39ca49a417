//! Writing a plan and everything it names: weights made reachable, partitions, taps, records, the plan last.

use crate::destination::Destination;
use crate::error::SplitError;
use crate::lifted::{SLOTS_FILE, Which, lift};
use crate::output::{Output, PLAN_FILE};
use crate::records::{Records, note_unhashed};
use hpp_graph::{Part, ValueId};
use hpp_model::{Analysis, shared_weights};
use hpp_onnx::proto::ModelProto;
use hpp_onnx::{Extractor, Model, needs_externalising};
use hpp_schema::{DeviceKind, FileRole, OutputUse, Partition, Plan, Residency};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Weights that were inside the model file, or that `--pack` gathered.
const WEIGHTS_FILE: &str = "weights.bin";
/// Embedded weights on their way into a packed file.
const EMBEDDED_FILE: &str = "embedded.bin";
/// The unsplit model with boundary outputs.
const TAPPED_FILE: &str = "tapped.onnx";
/// The unsplit model in a packed directory.
const WHOLE_FILE: &str = "whole.onnx";

/// How a plan directory is written.
#[derive(Clone, Copy, Debug)]
pub struct How {
    /// Replace the plan that is there.
    pub force: bool,
    /// Copy the weight bytes the partitions read, so that nothing else is needed.
    pub pack: bool,
    /// Leave weight files where they are, where no other file has to lie beside them.
    pub in_place: bool,
    /// Hash every weight byte.
    pub hash_weights: bool,
    /// Which pieces have their weights as inputs.
    pub lifted: Which,
}

/// A plan that was written.
pub struct Written {
    /// The plan.
    pub plan: Plan,
    /// Weight files that are hard links to the model's own.
    pub hard_links: Vec<String>,
}

/// A plan directory being written.
pub struct Writing<'a> {
    how: How,
    analysis: &'a Analysis,
    to: Destination,
}

impl<'a> Writing<'a> {
    /// Prepares the directory.
    pub fn begin(how: How, analysis: &'a Analysis, target: &Path) -> Result<Self, SplitError> {
        let output = Output::begin(target, how.force, how.pack)?;
        let target = output.target().to_owned();
        Ok(Writing { how, analysis, to: Destination::new(&target, Some(output))? })
    }

    /// The plan as it would be written.
    pub fn imagine(
        how: How,
        analysis: &'a Analysis,
        target: &Path,
        parts: &[Part],
        plan: Plan,
    ) -> Result<Plan, SplitError> {
        Writing { how, analysis, to: Destination::new(target, None)? }.write(parts, plan)
    }

    /// Writes everything and moves it into place, or leaves nothing.
    pub fn finish(mut self, parts: &[Part], plan: Plan) -> Result<Written, SplitError> {
        let written = self.write(parts, plan);
        let (output, hard_links) = self.to.finish();
        let Some(output) = output else { return Ok(Written { plan: written?, hard_links }) };
        match written {
            Ok(plan) => {
                let target = output.target().to_owned();
                output.commit()?;
                note_unhashed(&plan, &target);
                Ok(Written { plan, hard_links })
            }
            Err(error) => {
                if let Some(left) = output.abandon() {
                    eprintln!("warning: cannot remove {}: remove it by hand", left.display());
                }
                Err(error)
            }
        }
    }

    /// Writes everything but the move into place; gives the plan as written.
    fn write(&mut self, parts: &[Part], mut plan: Plan) -> Result<Plan, SplitError> {
        let model = self.externalise(&self.analysis.model)?;
        let mut protos = self.protos(&model, parts, &plan)?;
        let weights_dir = if self.how.pack { self.pack(&model, &mut protos)? } else { self.place(&model, &plan)? };
        let slots = self.lift(&model, &mut plan, &mut protos, &weights_dir)?;
        for (name, proto) in &protos {
            let made = |source| SplitError::Extract { name: name.clone(), source };
            self.to.write_model(name, proto).map_err(|e| made(Box::new(e)))?;
        }
        self.name_files(&mut plan, &weights_dir);
        self.name_texts(&mut plan)?;
        plan.files = self.records(&model, &plan, &weights_dir, slots)?;
        let yaml = plan.to_yaml().map_err(SplitError::Plan)?;
        self.to.write(PLAN_FILE, yaml.into_bytes())?;
        Ok(plan)
    }

    /// The model with no large weights inside its file.
    fn externalise(&mut self, model: &Model) -> Result<Model, SplitError> {
        if !needs_externalising(model) {
            return Ok(model.clone());
        }
        let location = if self.how.pack { EMBEDDED_FILE } else { WEIGHTS_FILE };
        self.to.externalise(model, location)
    }

    /// Every ONNX file of the directory, by name.
    fn protos(&mut self, model: &Model, parts: &[Part], plan: &Plan) -> Result<Vec<(String, ModelProto)>, SplitError> {
        let extractor = Extractor::new(model, &self.analysis.graph);
        let mut protos = Vec::new();
        for (part, partition) in parts.iter().zip(&plan.partitions) {
            let name = partition.file.clone();
            let made = extractor.part(&partition.name, part);
            protos.push((name.clone(), made.map_err(|e| SplitError::Extract { name, source: Box::new(e) })?));
        }
        protos.push((TAPPED_FILE.to_owned(), extractor.tapped(&self.taps(parts, plan))));
        if self.how.pack {
            protos.push((WHOLE_FILE.to_owned(), self.whole(&extractor)?));
        }
        Ok(protos)
    }

    /// The model as it was before its head was rewritten: what a packed plan is verified against.
    fn whole(&mut self, extractor: &Extractor) -> Result<ModelProto, SplitError> {
        match &self.analysis.before {
            Some((model, graph)) => Ok(Extractor::new(&self.externalise(model)?, graph).tapped(&[])),
            None => Ok(extractor.tapped(&[])),
        }
    }

    /// Every tensor that crosses between partitions.
    fn taps(&self, parts: &[Part], plan: &Plan) -> Vec<ValueId> {
        let mut taps = Vec::new();
        for (part, partition) in parts.iter().zip(&plan.partitions) {
            let crossing = part.outputs.iter().zip(&partition.outputs).filter(|(_, o)| o.to == OutputUse::Boundary);
            taps.extend(crossing.map(|(id, _)| *id));
        }
        taps
    }

    /// Copies the bytes the files need into one file beside them.
    fn pack(&mut self, model: &Model, protos: &mut [(String, ModelProto)]) -> Result<String, SplitError> {
        let mut plain: Vec<ModelProto> = protos.iter().map(|(_, proto)| proto.clone()).collect();
        self.to.pack(&mut plain, model.weights(), WEIGHTS_FILE)?;
        protos.iter_mut().zip(plain).for_each(|((_, proto), packed)| *proto = packed);
        self.to.remove(EMBEDDED_FILE);
        Ok(".".to_owned())
    }

    /// Makes inputs of the weights of pieces that are streamed or can move. Says whether some of the weights are in a file of
    /// their own now.
    fn lift(
        &mut self,
        model: &Model,
        plan: &mut Plan,
        protos: &mut Vec<(String, ModelProto)>,
        weights_dir: &str,
    ) -> Result<bool, SplitError> {
        let shared = shared_weights(self.analysis);
        let dir = self.to.weights_dir(weights_dir, model);
        let slots = lift(plan, protos, &shared, self.how.lifted, (&dir, self.to.made()))?;
        if slots.is_empty() {
            return Ok(false);
        }
        if weights_dir != "." {
            let why =
                "weights inside the model file are streamed from a file beside the plan, and the others lie elsewhere";
            return Err(SplitError::setting(why, "choose --out on the model's file system, or use --pack"));
        }
        if !self.how.pack && model.weights().files.iter().any(|file| file.location == SLOTS_FILE) {
            let why =
                format!("the model has weights in a file called {SLOTS_FILE}, which a plan that streams needs itself");
            return Err(SplitError::setting(why, "use --pack"));
        }
        self.to.write(SLOTS_FILE, slots)?;
        Ok(true)
    }

    /// Makes every weight file visible beside the partitions; where that cannot be, names the model's own directory.
    fn place(&mut self, model: &Model, plan: &Plan) -> Result<String, SplitError> {
        // Weights that are inputs come from one directory, and some of them lie in a file beside the plan.
        let gpu = |device: &str| plan.devices.iter().any(|d| d.name == device && d.kind == DeviceKind::Gpu);
        let streams = plan.partitions.iter().flat_map(Partition::forms).any(|form| {
            gpu(form.device) && (form.residency == Residency::Streamed || self.how.lifted == Which::Movable)
        });
        if self.how.in_place && !streams && !needs_externalising(&self.analysis.model) {
            return Ok(self.to.relative(self.analysis.model.dir()));
        }
        let Some((location, why)) = self.to.place(model)? else { return Ok(".".to_owned()) };
        if needs_externalising(&self.analysis.model) {
            return Err(SplitError::setting(
                format!(
                    "{location} cannot be linked into the output directory ({why}), and the model has embedded weights too"
                ),
                "choose --out on the model's file system, or use --pack",
            ));
        }
        eprintln!(
            "note: {location} cannot be linked into the output directory ({why}); hpp-exec reads it where it is, but stock \
             ONNX Runtime will not open the partitions: choose --out on the model's file system, or use --pack"
        );
        Ok(self.to.relative(self.analysis.model.dir()))
    }

    fn name_files(&self, plan: &mut Plan, weights_dir: &str) {
        for partition in &mut plan.partitions {
            partition.weights_dir = weights_dir.to_owned();
        }
        plan.model.tapped = Some(TAPPED_FILE.to_owned());
        (plan.model.source, plan.model.weights_dir) = match self.how.pack {
            true => (WHOLE_FILE.to_owned(), ".".to_owned()),
            false => (self.to.relative(self.analysis.model.path()), self.to.relative(self.analysis.model.dir())),
        };
        if self.how.pack {
            // The packed whole is the flattened model: its branch is chosen already.
            plan.model.inputs.retain(|input| input.role != hpp_schema::InputRole::UseCacheBranch);
        }
    }

    /// Tokenizer and chat template: named where they are, copied into a packed directory.
    fn name_texts(&mut self, plan: &mut Plan) -> Result<(), SplitError> {
        let Some(generation) = &mut plan.generation else { return Ok(()) };
        let config = &self.analysis.config;
        let mut name = |path: &Option<PathBuf>| path.as_deref().map(|path| self.text(path)).transpose();
        generation.tokenizer = name(&config.tokenizer)?;
        generation.tokenizer_config = name(&config.tokenizer_config)?;
        generation.chat_template = name(&config.chat_template)?;
        Ok(())
    }

    fn text(&mut self, path: &Path) -> Result<String, SplitError> {
        let file = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        if !self.how.pack {
            return Ok(self.to.relative(path));
        }
        self.to.copy(&file, path)?;
        Ok(file)
    }

    fn records(
        &self,
        model: &Model,
        plan: &Plan,
        weights_dir: &str,
        slots: bool,
    ) -> Result<Vec<hpp_schema::FileRecord>, SplitError> {
        let mut records = Records::new(&self.to, self.how.hash_weights || self.how.pack);
        let is_own = needs_externalising(&self.analysis.model);
        records.add(&plan.model.source, FileRole::Source)?;
        if self.how.pack {
            records.add_own(WEIGHTS_FILE, FileRole::Weights)?;
        } else {
            for file in &model.weights().files {
                let path =
                    if weights_dir == "." { file.location.clone() } else { format!("{weights_dir}/{}", file.location) };
                match is_own && file.location == WEIGHTS_FILE {
                    true => records.add_own(&path, FileRole::Weights)?,
                    false => records.add(&path, FileRole::Weights)?,
                }
            }
        }
        if slots {
            records.add_own(SLOTS_FILE, FileRole::Weights)?;
        }
        let mut seen = HashSet::new();
        let forms = plan.partitions.iter().flat_map(Partition::forms);
        let files = forms.flat_map(|form| [Some(form.file), form.host_file]).flatten();
        for file in files.filter(|file| seen.insert(*file)) {
            records.add(file, FileRole::Partition)?;
        }
        records.add(TAPPED_FILE, FileRole::Tapped)?;
        let texts = plan.generation.iter().flat_map(|g| [&g.tokenizer, &g.tokenizer_config, &g.chat_template]);
        for text in texts.flatten() {
            records.add(text, FileRole::Text)?;
        }
        Ok(records.done())
    }
}
