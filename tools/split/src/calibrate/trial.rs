//! Trials: writes a model with some of its matrices quantized and measures how much its answers diverge.
//!
//! The reference is a plan of the model where it is; a trial is a directory in it. Each block is a partition of its own, so that only
//! the blocks with quantized matrices are written.

use super::corpus::Corpus;
use super::divergence::DivergenceProbe;
use super::free_memory::check_memory;
use super::{Formats, Purpose, inputs};
use crate::amount::digits;
use crate::cli::SplitArgs;
use crate::costs::Costs;
use crate::destination::Destination;
use crate::draft_files::{self, ModelWeights};
use crate::error::SplitError;
use crate::files::{PlanWriter, WriteOptions};
use crate::interrupt::Release;
use crate::local_machine::LocalMachine;
use crate::output::PLAN_FILE;
use crate::own_draft::OwnDraft;
use hpp_io::WorkDir;
use hpp_model::{Analysis, AnalysisOptions, LogitsMode, analyse, analyse_with};
use hpp_onnx::{InputMoments, QuantizeOptions};
use hpp_schema::Plan;
use hpp_schema::memory::PROCESS;
use hpp_schema::probe::FEW_POSITIONS;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The directory of a trial in that of the reference.
const TRIAL: &str = "trial";

/// A model, its reference plan and the child that compares.
pub struct Trials<'a> {
    args: &'a SplitArgs,
    analysis: &'a Analysis,
    options: QuantizeOptions,
    costs: &'a Costs,
    corpus: Corpus,
    probe: DivergenceProbe,
    reference: Plan,
    weights: ModelWeights,
    /// Whether it has warned of few positions.
    warned: bool,
    /// Removed with its contents on drop.
    dir: WorkDir,
    /// Dropped last.
    _release: Release,
}

impl<'a> Trials<'a> {
    /// Writes the reference into a temporary directory beside `--out` and starts the child.
    pub fn begin(
        args: &'a SplitArgs,
        analysis: &'a Analysis,
        options: QuantizeOptions,
        costs: &'a Costs,
        corpus: Corpus,
    ) -> Result<Self, SplitError> {
        let parent = args.out.as_deref().and_then(|out| out.parent()).filter(|parent| parent.is_dir());
        let parent = parent.map_or_else(|| PathBuf::from("."), PathBuf::from);
        let failed = |source| SplitError::Io { action: "create a directory in", path: parent.clone(), source };
        let dir = WorkDir::new(&parent, ".hpp-calibration-").map_err(failed)?;
        let probe = DivergenceProbe::start()?;
        let release = probe.release_on_drop();
        let own = analyse(analysis.model.path(), args.context, LogitsMode::Requested)?;
        let OwnDraft { analysis: own, parts, plan, host_memory, .. } = OwnDraft::of(own, args, costs, 1)?;
        check_memory(host_memory.saturating_add(PROCESS), LocalMachine::detect(false).ram())?;
        let write = WriteOptions { in_place: true, ..WriteOptions::default() };
        let reference = PlanWriter::begin(write, &own, None, &dir.path().join("reference"))?.finish(&parts, plan)?;
        let weights = ModelWeights::of([analysis.model.proto()]);
        Ok(Trials {
            args,
            analysis,
            options,
            costs,
            corpus,
            probe,
            reference,
            weights,
            warned: false,
            dir,
            _release: release,
        })
    }

    /// The options, with what was decided so far.
    pub fn options(&self) -> &QuantizeOptions {
        &self.options
    }

    /// The options for one format of all matrices, with compensation of errors if the model diverges less for it.
    pub fn options_with_compensation(mut self) -> Result<QuantizeOptions, SplitError> {
        self.choose_compensation(None)?;
        Ok(self.options)
    }

    /// Compensates errors from now on, if the model with these formats then diverges less on prompts whose inputs were not observed.
    pub fn choose_compensation(&mut self, formats: Option<&Formats>) -> Result<(), SplitError> {
        let Some(moments) = self.observe_inputs()? else { return Ok(()) };
        let (positions, moments) = (moments.positions, Arc::new(moments));
        let nearest = self.divergence(formats, Purpose::Choice)?;
        self.options.moments = Some(moments);
        let compensated = self.divergence(formats, Purpose::Choice)?;
        let kept = if compensated < nearest { "kept" } else { "not kept" };
        let [with, without] = [compensated, nearest].map(|divergence| digits(divergence, 3));
        tell!(
            "calibration: errors compensated for the inputs of {positions} positions: KL {with} nats, to the nearest {without}: {kept}"
        );
        if compensated >= nearest {
            self.options.moments = None;
        }
        Ok(())
    }

    /// Observes the inputs of the matrices with the prompts for sensitivity. `None` if no matrix has inputs that can be observed.
    fn observe_inputs(&mut self) -> Result<Option<InputMoments>, SplitError> {
        let parent = self.dir.path().parent().unwrap_or(Path::new("."));
        let failed = |source| SplitError::Io { action: "create a directory in", path: parent.to_owned(), source };
        let dir = WorkDir::new(parent, ".hpp-moments-").map_err(failed)?;
        let own = analyse(self.analysis.model.path(), self.args.context, LogitsMode::Requested)?;
        let draft = OwnDraft::of(own, self.args, self.costs, 1)?;
        inputs::observe(draft, &self.options, &self.corpus.sensitivity, &mut self.probe, dir)
    }

    /// The mean divergence of the model with these formats from the original, nats; `None` for the format of the options.
    pub fn divergence(&mut self, formats: Option<&Formats>, purpose: Purpose) -> Result<f64, SplitError> {
        let options = QuantizeOptions { budget: None, formats: formats.cloned(), ..self.options.clone() };
        let path = self.analysis.model.path();
        let exported = AnalysisOptions::as_exported(self.args.context, LogitsMode::Requested);
        let quantized = analyse_with(path, AnalysisOptions { quantize: Some(&options), ..exported })?;
        let partitions = quantized.segmentation.blocks.len();
        let trial = OwnDraft::of(quantized, self.args, self.costs, partitions)?;
        let reference = self.dir.path().join("reference");
        let mut directory = Destination::at(&reference).directory(TRIAL)?;
        draft_files::write(&trial, &self.reference, &self.weights, &mut directory)?;
        let prompts = match purpose {
            Purpose::Sensitivity => &self.corpus.sensitivity,
            Purpose::Choice => &self.corpus.choice,
        };
        let other = reference.join(TRIAL);
        let divergence = self.probe.compare(&reference.join(PLAN_FILE), &other.join(PLAN_FILE), prompts)?;
        if let Some(warning) = few_positions(divergence.positions, purpose).filter(|_| !self.warned) {
            self.warned = true;
            tell!("warning: {warning}");
        }
        let failed = |source| SplitError::Io { action: "remove", path: other.clone(), source };
        fs::remove_dir_all(&other).map_err(failed)?;
        Ok(divergence.mean)
    }
}

/// The warning about prompts with few positions.
fn few_positions(positions: u64, purpose: Purpose) -> Option<String> {
    let half = match purpose {
        Purpose::Sensitivity => "with which it observes the matrices",
        Purpose::Choice => "with which it chooses among proposals",
    };
    (positions < FEW_POSITIONS).then(|| {
        format!(
            "--calibration has only {positions} positions in the half of its prompts {half}: the choice may suit these texts and not \
             others; give {} or more in all",
            2 * FEW_POSITIONS
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_positions_are_warned_of_with_the_number_that_is_enough() {
        let said = few_positions(999, Purpose::Choice).unwrap_or_default();
        assert!(
            said.contains("only 999 positions") && said.contains("chooses") && said.contains("2000 or more"),
            "{said}"
        );
        assert_eq!(few_positions(1000, Purpose::Sensitivity), None);
    }
}
