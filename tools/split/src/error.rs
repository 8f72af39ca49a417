//! Every error of this command, and its report on stderr.

use crate::calibrate::corpus::CorpusError;
use crate::calibrate::divergence::DivergenceError;
use crate::exec::ExecNotFound;
use crate::input_errors::InputErrors;
use crate::output::OutputError;
use hpp_io::{FileWriteError, LogFilterError, StdoutError};
use hpp_model::ModelError;
use hpp_partition::{AssignError, DeviceId, OverBudget};
use hpp_schema::ByteSize;
use std::io;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::PathBuf;
use std::process::ExitCode;

/// Why a split failed.
#[derive(Debug, thiserror::Error)]
pub enum SplitError {
    /// The model cannot be read or analysed.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model cannot be quantized for a draft.
    #[error("cannot make a draft of the model (--draft)")]
    Draft(#[source] Box<ModelError>),
    /// The model was read but cannot be cut.
    #[error("cannot cut the model")]
    Cut(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A partition cannot be extracted or written.
    #[error("cannot write {name}")]
    Extract {
        /// Its name.
        name: String,
        /// Why.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Weight bytes cannot be read, copied or hashed.
    #[error("cannot write or hash the weights")]
    Weights(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The plan cannot be serialised.
    #[error("cannot write the plan as YAML")]
    Plan(#[source] hpp_schema::PlanError),
    /// The placement does not fit.
    #[error("{what}")]
    OverBudget {
        /// Which memory is too small.
        what: Box<str>,
        /// A budget that suffices, bytes.
        bytes: u64,
        /// What is known about it.
        needed: NeededBudget,
        /// Number of GPUs, at most 255.
        gpus: u8,
        /// Host memory that --kv disk frees, bytes.
        freed_by_kv_on_disk: u64,
        /// Whether each GPU needs as much, and no block may move: layers are divided by rows.
        divides_rows: bool,
        /// Whether `bytes` are for each GPU.
        on_each_gpu: bool,
        /// A shorter context that fits, tokens, if one was found.
        fitting_context: Option<NonZeroU64>,
        /// The most slots with which the plan fits, if it fits with fewer.
        fitting_slots: Option<NonZeroU32>,
        /// The most layers that fit, if `--gpu-layers` asks for more.
        fitting_layers: Option<NonZeroU32>,
        /// Demand and budget.
        source: OverBudget,
    },
    /// The plan of this model breaks a rule of plans, so hpp-exec would not run it.
    #[error("no plan can be made of this model as it is divided here: {findings}")]
    Unusable {
        /// The broken rules.
        findings: String,
    },
    /// `--assign` names an unknown block or device.
    #[error("cannot apply --assign")]
    Assign(#[from] AssignError),
    /// A setting is invalid for this model.
    #[error("{message}")]
    Setting {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: &'static str,
    },
    /// `HPP_LOG` is invalid.
    #[error(transparent)]
    LogFilter(#[from] LogFilterError),
    /// The command line or a file it names has errors.
    #[error(transparent)]
    InputErrors(#[from] InputErrors),
    /// `--calibration` names a file that is no corpus.
    #[error(transparent)]
    Corpus(#[from] CorpusError),
    /// hpp-exec could not measure what quantizing costs.
    #[error(transparent)]
    Divergence(#[from] DivergenceError),
    /// `--refine` could not measure a plan.
    #[error(transparent)]
    Refine(#[from] RefineError),
    /// The output directory cannot be written.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// A result cannot be printed.
    #[error(transparent)]
    Stdout(#[from] StdoutError),
    /// A file named on the command line cannot be written.
    #[error(transparent)]
    Write(#[from] FileWriteError),
    /// A file could not be read or written.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The operation, as a verb.
        action: &'static str,
        /// The path it was applied to.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

/// What is known about a budget that suffices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NeededBudget {
    /// No smaller one suffices: for the placement that the user gave, or for any placement.
    Smallest,
    /// Another placement may need less.
    Enough,
    /// Host memory is too small, too.
    WithMoreRam,
    /// The memory of a GPU is too small, too.
    WithMoreVram,
    /// The machine has less.
    BeyondMachine,
}

impl SplitError {
    /// An invalid setting.
    pub fn setting(message: impl Into<String>, hint: &'static str) -> Self {
        SplitError::Setting { message: message.into(), hint }
    }

    /// Prints the error, its causes and a hint; returns the exit status. A closed stdout, as in `hpp-split ... | head`,
    /// is success.
    pub fn report(&self) -> ExitCode {
        match self {
            SplitError::InputErrors(errors) => return report_all(errors),
            SplitError::Stdout(error) if error.is_closed() => return ExitCode::SUCCESS,
            _ => {}
        }
        hpp_io::line_to_stderr(&hpp_schema::error_report(self, self.hint().as_deref()));
        let is_interrupted = matches!(
            self,
            SplitError::Refine(RefineError::Interrupted) | SplitError::Divergence(DivergenceError::Interrupted)
        );
        ExitCode::from(if is_interrupted { 130 } else { 1 })
    }

    /// Whether the memory of a GPU is too small.
    pub(crate) fn is_of_gpu(&self) -> bool {
        matches!(self, SplitError::OverBudget { source, .. } if source.device != DeviceId::Cpu)
    }

    /// This refusal of a plan with KV caches on disk, or that of the plan with them in memory if that needs less of the same memory.
    pub(crate) fn or_smaller(self, with_kv_in_memory: SplitError) -> SplitError {
        match with_kv_in_memory.needs_no_more_than(&self) {
            true => with_kv_in_memory.without_kv_hint(),
            false => self,
        }
    }

    /// Whether both are refusals for the same memory, and this one needs no more of it.
    pub(crate) fn needs_no_more_than(&self, other: &SplitError) -> bool {
        match (self, other) {
            (
                SplitError::OverBudget { bytes, source, .. },
                SplitError::OverBudget { bytes: others, source: of_other, .. },
            ) => bytes <= others && source.device == of_other.device,
            _ => false,
        }
    }

    /// This refusal without the hint to keep KV caches on disk.
    pub(crate) fn without_kv_hint(mut self) -> SplitError {
        if let SplitError::OverBudget { freed_by_kv_on_disk, .. } = &mut self {
            *freed_by_kv_on_disk = 0;
        }
        self
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            SplitError::OverBudget {
                source,
                bytes,
                needed,
                gpus,
                freed_by_kv_on_disk,
                fitting_context,
                fitting_slots,
                fitting_layers,
                divides_rows,
                on_each_gpu,
                ..
            } => {
                let flag = match source.device {
                    DeviceId::Cpu => "--ram".to_owned(),
                    DeviceId::Gpu(_) if *gpus == 1 => "--vram".to_owned(),
                    DeviceId::Gpu(_) if *on_each_gpu => "--vram on each GPU".to_owned(),
                    DeviceId::Gpu(gpu) => format!("--vram for gpu{gpu} alone"),
                };
                let slots = match fitting_slots {
                    Some(slots) => format!("give --slots {slots}, which fits"),
                    None => String::new(),
                };
                let assign = match (*gpus > 0, *divides_rows) {
                    (false, _) => "",
                    (true, false) => "move blocks with --assign",
                    (true, true) => "omit --split-mode, so that layers that do not fit compute elsewhere",
                };
                let on_host = source.device == DeviceId::Cpu;
                let draft = match source.draft {
                    0 => String::new(),
                    bytes => format!("omit --draft, which takes {} of it", ByteSize(bytes).human()),
                };
                let kv = match on_host && *freed_by_kv_on_disk >= source.missing() {
                    true => "keep KV caches on disk with --kv disk",
                    false => "",
                };
                let context = match fitting_context {
                    Some(tokens) => format!("lower --context: {tokens} tokens fit"),
                    None => String::new(),
                };
                let human = ByteSize(*bytes).human_rounded_up();
                let budget = match needed {
                    NeededBudget::Smallest => format!("the smallest sufficient {flag} is {human} ({bytes} bytes)"),
                    NeededBudget::Enough => format!("{human} ({bytes} bytes) of {flag} are enough"),
                    NeededBudget::WithMoreRam | NeededBudget::WithMoreVram => {
                        let other = if *needed == NeededBudget::WithMoreRam { "--ram" } else { "--vram" };
                        format!("{human} ({bytes} bytes) of {flag} are enough if {other} is raised, too")
                    }
                    NeededBudget::BeyondMachine => {
                        format!("this machine has too little memory: {human} ({bytes} bytes) of {flag} would be enough")
                    }
                };
                let layers = match fitting_layers {
                    Some(layers) => format!("give --gpu-layers {layers}, which fits, or auto"),
                    None => String::new(),
                };
                let others = [layers.as_str(), slots.as_str(), context.as_str(), kv, draft.as_str(), assign];
                let others: Vec<&str> = others.into_iter().filter(|other| !other.is_empty()).collect();
                if others.is_empty() { budget } else { format!("{budget}; or {}", others.join(", or ")) }
            }
            SplitError::Model(error) => error.hint()?,
            SplitError::Unusable { .. } => {
                "nothing was written; another --partitions or --assign may work, and if not, hpp-split lacks support for this model's states"
                    .to_owned()
            }
            SplitError::Draft(_) => {
                "omit --draft; a smaller model with the same tokens can draft too: hpp-exec --draft PLAN".to_owned()
            }
            SplitError::Setting { hint, .. } => (*hint).to_owned(),
            SplitError::LogFilter(error) => error.hint().to_owned(),
            SplitError::Output(error) => error.hint()?.to_owned(),
            SplitError::Refine(error) => error.hint()?.to_owned(),
            SplitError::Corpus(error) => error.hint().to_owned(),
            SplitError::Divergence(DivergenceError::NoExec(_)) => {
                "install hpp-exec beside hpp-split, or set HPP_EXEC to its path".to_owned()
            }
            SplitError::Divergence(DivergenceError::Interrupted) => return None,
            SplitError::Divergence(error) => {
                let mend = match error.is_full_disk() {
                    true => "free space on the disk that the message names (files of the calibration lie beside --out, and logits in TMPDIR)",
                    false => "correct what the message names",
                };
                format!("{mend}; or omit --calibration: int4 is then rounded to the nearest, and auto chooses bits by squared errors")
            }
            SplitError::Stdout(error) => error.hint().to_owned(),
            SplitError::Write(error) if hpp_io::is_full_disk(&error.source) => {
                "free space (or raise `ulimit -f`), or write the file on another disk".to_owned()
            }
            SplitError::Io { source, .. } if hpp_io::is_full_disk(source) => {
                "free space (or raise `ulimit -f`), or choose another disk with --out; nothing was left half-written".to_owned()
            }
            _ => return None,
        })
    }
}

/// Prints each error with its hint. A hint that consecutive errors share is printed once, after the last of them.
fn report_all(errors: &InputErrors) -> ExitCode {
    for (at, error) in errors.0.iter().enumerate() {
        hpp_io::line_to_stderr(&format!("error: {}", error.message));
        let is_repeated = errors.0.get(at + 1).is_some_and(|next| next.hint == error.hint);
        if let Some(hint) = error.hint.filter(|_| !is_repeated) {
            hpp_io::line_to_stderr(&format!("hint: {hint}"));
        }
    }
    ExitCode::from(1)
}

/// Why `--refine` could not measure a plan.
#[derive(Debug, thiserror::Error)]
pub enum RefineError {
    /// hpp-exec does not exist.
    #[error(transparent)]
    NoExec(#[from] ExecNotFound),
    /// A child process could not be started or waited for.
    #[error("cannot run {}", path.display())]
    Run {
        /// The program.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// hpp-exec failed; holds its stderr.
    #[error("hpp-exec could not run the plan: {0}")]
    Failed(String),
    /// The output of hpp-exec is not a benchmark report.
    #[error("hpp-exec printed something other than a measurement: {0}")]
    Output(String),
    /// The CPU ran a partition of a GPU.
    #[error(
        "the partition {partition} is planned for {device}, and the CPU ran it: its times are not those of {device}"
    )]
    OtherDevice {
        /// The partition.
        partition: String,
        /// Its device in the plan.
        device: String,
    },
    /// SIGINT or SIGTERM arrived.
    #[error("interrupted; nothing was written")]
    Interrupted,
}

impl RefineError {
    fn hint(&self) -> Option<&'static str> {
        match self {
            RefineError::NoExec(_) => Some("install hpp-exec beside hpp-split, or set HPP_EXEC to its path"),
            RefineError::Failed(_) => {
                Some("the message of hpp-exec is above; without --refine the plan is written unmeasured")
            }
            RefineError::OtherDevice { .. } => Some(
                "--refine needs the devices that the plan is for: `hpp-exec devices` says why one is missing; or plan without a GPU \
                 (--vram 0), or without --refine",
            ),
            _ => None,
        }
    }
}
