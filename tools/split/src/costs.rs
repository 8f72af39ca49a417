//! Where costs come from: a profile, a machine file, or assumptions; read, and held against the model and this machine.

use crate::cli::PlanningArgs;
use crate::complaint::{Complaint, Complaints};
use crate::presets;
use hpp_model::{Analysis, Load, Source, ThisHost, model_hash};
use hpp_schema::{DocumentError, Machine, Profile};
use std::path::Path;

/// Longest profile or machine file read, the same as `hpp-schema` parses.
const MOST_BYTES: u64 = 64 << 20;

/// Costs to plan with.
#[derive(Debug)]
pub enum Costs {
    /// Round numbers.
    Assumed,
    /// A machine file.
    Machine(Box<Machine>),
    /// A profile, and the name of its file.
    Profile(Box<Profile>, String),
}

impl Costs {
    /// Reads what the settings name; what is wrong with it joins the complaints.
    pub fn read(args: &PlanningArgs, complaints: &mut Complaints) -> Costs {
        let read = match (&args.profile, &args.machine) {
            (Some(path), _) => text(path)
                .and_then(|text| Profile::from_yaml(&text).map_err(|error| damaged(path, &error)))
                .map(|profile| Costs::Profile(Box::new(profile), file_name(path))),
            (None, Some(path)) => machine(path)
                .and_then(|text| Machine::from_yaml(&text).map_err(|error| damaged(path, &error)))
                .map(|machine| Costs::Machine(Box::new(machine))),
            (None, None) => Ok(Costs::Assumed),
        };
        read.unwrap_or_else(|found| {
            complaints.0.extend(found);
            Costs::Assumed
        })
    }

    /// As the planning problem takes them.
    pub fn source(&self) -> Source<'_> {
        match self {
            Costs::Assumed => Source::Assumed,
            Costs::Machine(machine) => Source::Machine(machine),
            Costs::Profile(profile, _) => Source::Profile(profile),
        }
    }

    /// As a plan says where its predictions come from.
    pub fn label(&self) -> String {
        match self {
            Costs::Assumed => "static".to_owned(),
            Costs::Machine(machine) => format!("machine: {}", machine.name),
            Costs::Profile(profile, file) => format!("profile: {file} of {}", profile.date),
        }
    }

    /// A profile speaks of one model on one machine.
    pub fn belongs(&self, analysis: &Analysis, allow_other_machine: bool) -> Result<(), Complaints> {
        let Costs::Profile(profile, file) = self else { return Ok(()) };
        let mut found = Complaints::default();
        match model_hash(&analysis.model) {
            Ok(hash) => found.require(
                hash == profile.model.hash,
                format!("{file} was measured of another model ({})", profile.model.name),
                "profile this one: hpp-profile MODEL --prompts FILE",
            ),
            Err(error) => found.0.push(Complaint { message: format!("{error}: {}", error.source), hint: None }),
        }
        let differences = ThisHost::read().differences(&profile.host);
        found.require(
            differences.is_empty() || allow_other_machine,
            format!("{file} was measured on another machine: {}", differences.join(", ")),
            "profile this one with hpp-profile, or plan for that machine with --allow-other-machine",
        );
        found.refuse()
    }

    /// What a person should know of predictions from here.
    pub fn notes(&self, load: Load) -> Vec<String> {
        let Costs::Profile(profile, file) = self else { return vec![] };
        let mut notes: Vec<String> = profile.busy_machine().map(|busy| format!("{file}: {busy}")).into_iter().collect();
        let mut beyond = |what: &str, asked: u64, measured: &[u64]| {
            if let Some(most) = measured.iter().max().filter(|most| asked > **most) {
                notes.push(format!("{file} measured {what} up to {most} tokens; {asked} lie beyond it"));
            }
        };
        beyond("contexts", load.decode_context(), &profile.settings.contexts);
        beyond("prompts", load.prompt.min(load.chunk), &profile.settings.prefill_tokens);
        notes
    }
}

/// The text of a machine: of a file, or of a preset where there is no such file.
fn machine(path: &Path) -> Result<String, Vec<Complaint>> {
    let preset = path.to_str().filter(|_| !path.exists());
    let names_a_file = path.components().count() > 1 || path.extension().is_some();
    match preset.and_then(presets::find) {
        Some(preset) => Ok(preset.to_owned()),
        None if path.exists() || names_a_file => text(path),
        None => {
            let message = format!("there is no machine {:?}: known by name are {}", path.display(), presets::names());
            Err(vec![Complaint::new(
                message,
                "give one of these names, or a YAML file like those in fixtures/machines",
            )])
        }
    }
}

fn text(path: &Path) -> Result<String, Vec<Complaint>> {
    let text = hpp_io::read_text(path, MOST_BYTES);
    text.map_err(|why| vec![Complaint { message: format!("cannot read {}: {why}", path.display()), hint: None }])
}

fn damaged(path: &Path, error: &DocumentError) -> Vec<Complaint> {
    let file = path.display();
    match error.findings() {
        [] => vec![Complaint { message: format!("{file}: {error}"), hint: None }],
        findings => findings.iter().map(|finding| Complaint::in_file(&file.to_string(), finding)).collect(),
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
