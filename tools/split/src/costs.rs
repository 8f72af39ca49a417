//! Reads the source of costs (a profile, a machine file, or neither, and a run that corrects it) and checks that a profile belongs to the model and
//! this machine.

use crate::cli::PlanningArgs;
use crate::input_errors::{InputError, InputErrors};
use crate::measured_run::MeasuredRun;
use crate::presets;
use hpp_model::{Analysis, CostSource, Scenario, ThisHost, model_hash, unreliable_times};
use hpp_schema::{Activations, DocumentError, Machine, Predictions, Profile};
use std::path::Path;

/// Size limit of a profile or machine file, bytes; equal to the limit in `hpp-schema`.
const MAX_BYTES: u64 = 64 << 20;
/// Hint for a file that is no profile, or a damaged one.
const GIVE_PROFILE: &str = "give the file that hpp-profile wrote, or measure again: hpp-profile MODEL --out FILE";
/// Hint for what is no machine.
const GIVE_MACHINE: &str = "give the name of a preset, or a YAML file like those in fixtures/machines";

/// The source of costs, and a run that corrects them.
#[derive(Clone, Debug)]
pub struct Costs {
    basis: CostBasis,
    run: Option<MeasuredRun>,
}

/// The source of costs.
#[derive(Clone, Debug)]
enum CostBasis {
    /// Neither file: assumed rates.
    Assumed,
    /// A machine file.
    Machine(Box<Machine>),
    /// A profile, and the name of its file.
    Profile(Box<Profile>, String),
}

impl Costs {
    /// Reads the files that the settings name; adds what is wrong with them to `errors`.
    pub fn read(args: &PlanningArgs, errors: &mut InputErrors) -> Costs {
        let read = match (&args.profile, &args.machine) {
            (Some(path), _) => read_text(path, GIVE_PROFILE)
                .and_then(|text| Profile::from_yaml(&text).map_err(|error| parse_errors(path, &error, GIVE_PROFILE)))
                .map(|profile| CostBasis::Profile(Box::new(profile), file_name(path))),
            (None, Some(path)) => machine(path)
                .and_then(|text| Machine::from_yaml(&text).map_err(|error| parse_errors(path, &error, GIVE_MACHINE)))
                .map(|machine| CostBasis::Machine(Box::new(machine))),
            (None, None) => Ok(CostBasis::Assumed),
        };
        let basis = read.unwrap_or_else(|found| {
            errors.0.extend(found);
            CostBasis::Assumed
        });
        let run = args.from_telemetry.as_deref().map(MeasuredRun::read).transpose().unwrap_or_else(|error| {
            errors.0.push(error);
            None
        });
        let costs = Costs { basis, run };
        tracing::info!(source = costs.label(), "costs read");
        costs
    }

    /// The source in the form that `hpp-model` takes.
    pub fn source(&self) -> CostSource<'_> {
        match &self.basis {
            CostBasis::Assumed => CostSource::Assumed,
            CostBasis::Machine(machine) => CostSource::Machine(machine),
            CostBasis::Profile(profile, _) => CostSource::Profile(profile),
        }
    }

    /// The number of GPUs of the described or profiled machine; `None` where rates are assumed.
    pub fn described_gpus(&self) -> Option<usize> {
        let source = self.source();
        let gpus = source.rates().map_or(0, |machine| machine.gpus.len());
        (!self.is_assumed()).then_some(gpus)
    }

    /// Whether a machine file describes a machine without a GPU.
    pub fn has_no_gpu(&self) -> bool {
        matches!(&self.basis, CostBasis::Machine(machine) if machine.gpus.is_empty())
    }

    /// The run whose times correct those of the source.
    pub fn run(&self) -> Option<&MeasuredRun> {
        self.run.as_ref()
    }

    /// Whether rates are assumed: neither a profile nor a machine file was given.
    pub fn is_assumed(&self) -> bool {
        matches!(self.basis, CostBasis::Assumed)
    }

    /// The profile, if one was given.
    pub fn profile(&self) -> Option<&Profile> {
        match &self.basis {
            CostBasis::Profile(profile, _) => Some(profile),
            CostBasis::Assumed | CostBasis::Machine(_) => None,
        }
    }

    /// The text in a plan that says where its predictions come from.
    pub fn label(&self) -> String {
        let basis = match &self.basis {
            CostBasis::Assumed => Predictions::STATIC.to_owned(),
            CostBasis::Machine(machine) => format!("machine: {}", machine.name),
            CostBasis::Profile(profile, file) => format!("profile: {file} of {}", profile.date),
        };
        self.run.iter().fold(basis, |basis, run| format!("{basis}, corrected by {}", run.file))
    }

    /// These costs, or assumed ones instead of a profile.
    pub fn without_profile(self) -> Self {
        let basis = if self.profile().is_some() { CostBasis::Assumed } else { self.basis };
        Costs { basis, ..self }
    }

    /// The costs of another model on this machine: without what was measured of this model.
    pub fn of_other_model(&self) -> Self {
        Costs { run: None, ..self.clone().without_profile() }
    }

    /// Refuses a profile of another model, or of another machine unless `allow_other_machine`.
    pub fn check_origin(&self, analysis: &Analysis, allow_other_machine: bool) -> Result<(), InputErrors> {
        let CostBasis::Profile(profile, file) = &self.basis else { return Ok(()) };
        let mut errors = InputErrors::default();
        match model_hash(analysis.undivided_model()) {
            Ok(hash) => errors.require(
                hash == profile.model.hash,
                format!("{file} was measured of another model ({})", profile.model.name),
                "profile this model with `hpp-profile MODEL --out FILE`, and give that file to --profile",
            ),
            Err(error) => errors.0.push(InputError { message: format!("{error}: {}", error.source), hint: None }),
        }
        let differences = ThisHost::read().differences(&profile.host);
        errors.require(
            differences.is_empty() || allow_other_machine,
            format!("{file} was measured on another machine: {}", differences.join(", ")),
            "profile this machine with hpp-profile, or plan for that machine with --allow-other-machine",
        );
        errors.into_result()
    }

    /// Refuses a profile that was measured with other activations than those of the plan.
    pub fn check_activations(&self, analysis: &Analysis) -> Result<(), InputErrors> {
        let CostBasis::Profile(profile, file) = &self.basis else { return Ok(()) };
        let mut errors = InputErrors::default();
        let activations = analysis.activations();
        errors.require(
            profile.settings.activations == activations,
            match activations {
                Activations::Exported => {
                    format!("{file} was measured with --int8-activations, and this plan is made without")
                }
                Activations::Int8 => format!("{file} was measured without --int8-activations"),
            },
            "give --int8-activations to hpp-profile and hpp-split, or to neither",
        );
        errors.into_result()
    }

    /// Warnings about the accuracy of predictions from this source.
    pub fn notes(&self, scenario: Scenario) -> Vec<String> {
        let CostBasis::Profile(profile, file) = &self.basis else { return vec![] };
        let doubts = profile.busy_machine().into_iter().chain(unreliable_times(profile));
        let mut notes: Vec<String> = doubts.map(|doubt| format!("{file}: {doubt}")).collect();
        let mut note_extrapolation = |what: &str, needed: u64, measured: &[u64]| {
            if let Some(most) = measured.iter().max().filter(|most| needed > **most) {
                notes.push(format!("{file} measured {what} up to {most} tokens; times for {needed} are extrapolated"));
            }
        };
        note_extrapolation("contexts", scenario.decode_context(), &profile.settings.contexts);
        note_extrapolation("prompts", scenario.prompt.min(scenario.prefill_chunk), &profile.settings.prefill_tokens);
        notes
    }
}

/// The text of a machine file, or of a preset if there is no such file.
fn machine(path: &Path) -> Result<String, Vec<InputError>> {
    let preset = path.to_str().filter(|_| !path.exists());
    let names_a_file = path.components().count() > 1 || path.extension().is_some();
    match preset.and_then(presets::find) {
        Some(preset) => Ok(preset.to_owned()),
        None if path.exists() || names_a_file => read_text(path, GIVE_MACHINE),
        None => {
            let message = format!("there is no machine {:?}; the presets are {}", path.display(), presets::names());
            Err(vec![InputError::new(message, GIVE_MACHINE)])
        }
    }
}

fn read_text(path: &Path, hint: &'static str) -> Result<String, Vec<InputError>> {
    let text = hpp_io::read_text(path, MAX_BYTES);
    text.map_err(|why| vec![InputError::new(format!("cannot read {}: {why}", path.display()), hint)])
}

fn parse_errors(path: &Path, error: &DocumentError, hint: &'static str) -> Vec<InputError> {
    let file = path.display();
    match error.findings() {
        [] => vec![InputError::new(format!("{file}: {error}"), hint)],
        findings => findings.iter().map(|finding| InputError::new(format!("{file}: {finding}"), hint)).collect(),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
