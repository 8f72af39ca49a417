//! The engine's errors. Each message says what the engine was doing, to what, and, where there is one, the next step.

use hpp_schema::{ByteSize, DType, Finding, Provider, WHOLE};
use std::io;
use std::path::PathBuf;

/// An error of a backend.
#[derive(Clone, Debug, thiserror::Error)]
pub enum BackendError {
    /// The run was ended on request.
    #[error("the run was stopped on request")]
    Stopped,
    /// The runtime library refused.
    #[error("cannot {doing}: {cause}")]
    Runtime {
        /// The operation and its object.
        doing: String,
        /// The library's message.
        cause: String,
    },
    /// Memory ran out.
    #[error("cannot reserve {bytes} bytes of {place}: {cause}")]
    OutOfMemory {
        /// Requested bytes.
        bytes: u64,
        /// Which memory.
        place: String,
        /// The system's message.
        cause: String,
    },
    /// States on disk found no room.
    #[error("cannot reserve {bytes} bytes of disk in {}: {cause}", .dir.display())]
    NoDiskRoom {
        /// The directory.
        dir: std::path::PathBuf,
        /// Requested bytes.
        bytes: u64,
        /// The system's message.
        cause: String,
    },
    /// Prepared weights could not be written or read.
    #[error("cannot prepare {what}: {cause}")]
    Preparation {
        /// The weights of which partition, and the directory of prepared weights.
        what: String,
        /// The system's message, with advice.
        cause: String,
    },
    /// No provider in the plan's list can run the partition.
    #[error("no provider can run it: {}", list(.refused))]
    NoProvider {
        /// Each provider with the reason, in the order tried.
        refused: Vec<(Provider, String)>,
    },
    /// A tensor does not fit the port or buffer that it is bound or copied to: a bug in the engine, or a plan that contradicts its files.
    #[error("{what} does not fit: {why}")]
    Misfit {
        /// The tensor.
        what: String,
        /// How.
        why: String,
    },
}

/// An error of the engine.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// The plan contradicts itself.
    #[error("the plan cannot run:\n  {}", .findings.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  "))]
    Plan {
        /// All contradictions.
        findings: Vec<Finding>,
    },
    /// Files are missing, or are not those that the plan was made for.
    #[error("the files are not the ones this plan was made for:\n  {}", .problems.join("\n  "))]
    Files {
        /// One line for each file.
        problems: Vec<String>,
        /// The error of the first file that cannot be read; `None` if all can be read.
        unreadable: Option<io::ErrorKind>,
    },
    /// Another process wrote to a file while the plan was running.
    #[error("{} was changed while it was in use: {why}; tokens from here on would be wrong", .path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// The evidence.
        why: String,
    },
    /// A partition could not be loaded.
    #[error("cannot load partition {partition} from {}", .file.display())]
    Load {
        /// Its name.
        partition: String,
        /// Its file.
        file: PathBuf,
        /// Why.
        source: BackendError,
    },
    /// A partition file has other inputs or outputs than the plan says.
    #[error("partition {partition} is not what the plan says:\n  {}", .problems.join("\n  "))]
    Mismatch {
        /// Its name.
        partition: String,
        /// One line for each difference.
        problems: Vec<String>,
    },
    /// A benchmarked partition has other inputs or outputs than the case says.
    #[error("{case} does not fit the partition:\n  {}", .problems.join("\n  "))]
    Case {
        /// The case's name.
        case: String,
        /// One line for each difference.
        problems: Vec<String>,
    },
    /// A partition failed while running.
    #[error("partition {partition} failed while {doing}")]
    Run {
        /// Its name.
        partition: String,
        /// The operation that failed.
        doing: String,
        /// Why.
        source: BackendError,
    },
    /// A device failed at an operation that was queued earlier.
    #[error("a device failed while it computed")]
    Device {
        /// Why.
        source: BackendError,
    },
    /// Memory for weights, a sequence or a boundary could not be reserved or used.
    #[error("cannot prepare {what}")]
    Memory {
        /// What it is for.
        what: String,
        /// Why.
        source: BackendError,
    },
    /// This process may use less memory than the plan's minimum.
    #[error(
        "the plan was made for {} of host memory and needs at least {}, but this process may use {}",
        human(.planned), human(.needed), human(.limit)
    )]
    TooLittleMemory {
        /// What the plan was made for, bytes.
        planned: u64,
        /// What this process may use, bytes.
        limit: u64,
        /// What the plan needs with no weights locked, bytes.
        needed: u64,
    },
    /// A partition that was planned for a GPU runs on the host, whose memory does not hold its weights.
    #[error("{}, and this process may use {}", fallback_needs(.partition, .weights, .needed), human(.limit))]
    FallbackTooLarge {
        /// The partition.
        partition: String,
        /// Bytes of its weights.
        weights: u64,
        /// Bytes of host memory that it needs with the rest of the process.
        needed: u64,
        /// What this process may use, bytes.
        limit: u64,
    },
    /// The sequence would grow past the context.
    #[error("{asked} tokens do not fit: the sequence has {used} of a context of {context}")]
    ContextExceeded {
        /// Tokens in this step.
        asked: u64,
        /// Tokens in the sequence so far.
        used: u64,
        /// Most tokens it can hold.
        context: u64,
    },
    /// The plan cannot provide the requested context.
    #[error("a context of {asked} tokens is not possible: {why}")]
    Context {
        /// Requested tokens.
        asked: u64,
        /// Why not.
        why: String,
    },
    /// A token id outside the model's vocabulary.
    #[error("token {token} at position {position} is out of range: the model knows ids 0 to {}", .vocab - 1)]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Where it is in the sequence.
        position: u64,
        /// How many ids there are.
        vocab: u64,
    },
    /// A step without tokens.
    #[error("there is nothing to run: the input is empty")]
    EmptyInput,
    /// An input the model needs was not given.
    #[error("the model needs an input {name:?} ({dtype}) that was not given")]
    MissingInput {
        /// Its name.
        name: String,
        /// Its element type.
        dtype: DType,
    },
    /// An input was given that does not fit.
    #[error("input {name:?} does not fit: {why}")]
    WrongInput {
        /// Its name.
        name: String,
        /// How.
        why: String,
    },
    /// An output is not what the engine needs.
    #[error("output {name:?} cannot be used: {why}")]
    WrongOutput {
        /// Its name.
        name: String,
        /// How.
        why: String,
    },
    /// This kind of model does not support the operation.
    #[error("{0}")]
    Unsupported(&'static str),
    /// A partition cannot be moved as requested.
    #[error("partition {partition} cannot be moved: {why}")]
    CannotMove {
        /// Its name.
        partition: String,
        /// Why not.
        why: String,
    },
    /// The run was ended by a [`CancelHandle`](crate::CancelHandle).
    #[error("stopped on request")]
    Cancelled,
    /// An earlier step of this sequence failed or was cancelled half way, so its state is inconsistent.
    #[error("this sequence was interrupted in the middle of a step; start a new one")]
    Interrupted,
}

impl EngineError {
    /// Whether an error of one sequence's pass concerns all sequences: a cancelled pass, changed files, a lost device.
    pub(crate) fn concerns_all(&self) -> bool {
        matches!(self, EngineError::Cancelled | EngineError::Changed { .. } | EngineError::Device { .. })
    }

    /// If a run looked up a row that a table of the model does not have: the number of that row, and the number of the table's last row.
    pub(crate) fn missing_row(&self) -> Option<(i64, i64)> {
        let EngineError::Run { source: BackendError::Runtime { cause, .. }, .. } = self else { return None };
        let (row, range) = cause.split_once("out of data bounds, idx=")?.1.split_once(' ')?;
        let last = range.split_once(',')?.1.split_once(']')?.0;
        Some((row.parse().ok()?, last.parse().ok()?))
    }

    /// Whether a run combined tensors of lengths that do not go together.
    fn is_of_lengths(&self) -> bool {
        let EngineError::Run { source: BackendError::Runtime { cause, .. }, .. } = self else { return false };
        cause.contains("broadcast an axis by a dimension other than 1")
    }

    /// Whether a kernel refused what its node asks for.
    fn lacks_kernel(&self) -> bool {
        let EngineError::Run { source: BackendError::Runtime { cause, .. }, .. } = self else { return false };
        cause.contains("not supported") || cause.contains("not implemented") || cause.contains("NOT_IMPLEMENTED")
    }

    /// A hint for the user, if there is one.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            EngineError::Plan { .. } => Some("make the plan again with hpp-split"),
            EngineError::Files { .. } | EngineError::Mismatch { .. } => Some(
                "restore the files, or make the plan again: with hpp-split --force, or if you gave a model, by the same command",
            ),
            EngineError::Changed { .. } => Some(
                "restore the file and run again, or if the change was meant, make the plan again: with hpp-split --force, or if you gave a model, by the same \
                 command",
            ),
            EngineError::Load { source: BackendError::NoProvider { refused }, .. } => {
                match refused.iter().any(|(provider, _)| *provider == Provider::CPU) {
                    true => Some(
                        "run `hpp-exec devices` to see why the planned provider is not used, or export the model for the CPU",
                    ),
                    false => Some("run `hpp-exec devices` to see what this machine has, or drop --strict"),
                }
            }
            EngineError::Load { source: BackendError::Runtime { .. }, partition, .. } if partition != WHOLE => Some(
                "`hpp-exec verify PLAN` loads the unsplit model first: if ONNX Runtime refuses that too, the model itself is at fault: export it again",
            ),
            EngineError::Load { source: BackendError::Runtime { cause, .. }, .. } if lacks_file(cause) => Some(
                "`hpp-exec verify` also runs the unsplit model: restore its files, weights included, where they were when it was split",
            ),
            EngineError::Load { source: BackendError::Runtime { cause, .. }, .. } if has_no_kernel(cause) => Some(
                "the unsplit model is always loaded on the CPU, and ONNX Runtime refuses it there (hpp-split MODEL --vram 0 says what the CPU lacks): \
                 compare with an export for the CPU, with hpp-exec verify PLAN --kl PROMPTS.jsonl --against MODEL",
            ),
            EngineError::Run { .. } if self.missing_row().is_some() => Some(
                "a number of the inputs has no row in one of the model's tables: a token id that the vocabulary lacks, or more tokens than \
                 there are positions",
            ),
            EngineError::Run { .. } if self.is_of_lengths() => Some(
                "the last two numbers are lengths that do not go together: inputs are longer than the model has positions, or their lengths \
                 differ from each other",
            ),
            EngineError::Run { .. } if self.lacks_kernel() => Some(
                "this device has no kernel for what the model asks for: if a warning says that a GPU is missing, run the plan where it is; \
                 else export the model for this device (hpp-split --vram 0 says what the CPU lacks)",
            ),
            EngineError::ContextExceeded { .. } => {
                Some("ask for a longer --context when splitting, or shorten the text")
            }
            EngineError::FallbackTooLarge { .. } => {
                Some("plan for this machine without --vram (hpp-split, with --ram), or raise this process's limit")
            }
            EngineError::TooLittleMemory { .. } => {
                Some("raise this process's limit, or make the plan again with a smaller --ram or --context")
            }
            EngineError::Memory { source: BackendError::NoDiskRoom { .. }, .. } => {
                Some("--state-dir names another directory for states on disk; a shorter --context needs less")
            }
            EngineError::Memory { source: BackendError::OutOfMemory { .. }, .. } => {
                Some("a shorter --context needs less memory for state; a plan with smaller budgets, less for weights")
            }
            _ => None,
        }
    }
}

/// Says what a partition that fell back to the host needs, given in bytes: the first half of an error or of a warning.
pub(crate) fn fallback_needs(partition: &str, weights: &u64, needed: &u64) -> String {
    let (weights, needed) = (human(weights), human(needed));
    format!(
        "{partition} was planned for a GPU and runs on the CPU, where each run needs its {weights} of weights at once: about {needed} of host \
         memory"
    )
}

fn human(bytes: &u64) -> String {
    ByteSize(*bytes).human()
}

/// Whether ONNX Runtime's message is about a file of weights that is missing.
fn lacks_file(cause: &str) -> bool {
    ["External data path", "No such file"].iter().any(|words| cause.contains(words))
}

/// Whether ONNX Runtime's message says that it has no kernel for an operator or for its types.
fn has_no_kernel(cause: &str) -> bool {
    ["Could not find an implementation", "Type Error"].iter().any(|words| cause.contains(words))
}

fn list(refused: &[(Provider, String)]) -> String {
    let lines: Vec<String> = refused.iter().map(|(provider, why)| format!("{}: {why}", provider.name())).collect();
    lines.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `verify` itself would only be sent to `verify`.
    #[test]
    fn a_partition_that_cannot_be_loaded_is_compared_with_the_unsplit_model() {
        let hint = |partition: &str, cause: &str| {
            let source = BackendError::Runtime { doing: "load".into(), cause: cause.into() };
            EngineError::Load { partition: partition.into(), file: "x.onnx".into(), source }.hint()
        };
        assert!(hint("cpu_0", "Type Error").unwrap().contains("hpp-exec verify PLAN"));
        assert!(hint(WHOLE, "Type Error").unwrap().contains("an export for the CPU"));
        assert_eq!(hint(WHOLE, "std::bad_alloc"), None);
        let missing = "External data path does not exist: m/model.onnx.data";
        assert!(hint(WHOLE, missing).unwrap().contains("restore its files, weights included"));
    }

    #[test]
    fn missing_rows_and_wrong_lengths_are_known_from_the_library_s_message() {
        let error = |cause: &str| EngineError::Run {
            partition: "cpu_0".into(),
            doing: "running".into(),
            source: BackendError::Runtime { doing: "run".into(), cause: cause.into() },
        };
        let gather = error(
            "Non-zero status code returned while running Gather node. Name:'/embeddings/Gather' Status Message: indices element out of \
             data bounds, idx=-9000 must be within the inclusive range [-512,511]",
        );
        assert_eq!(gather.missing_row(), Some((-9000, 511)));
        assert!(gather.hint().is_some_and(|hint| hint.contains("token id")));
        let add = error(
            "Non-zero status code returned while running Add node. Name:'/embeddings/Add_1' Status Message: axis == 1 || axis == largest was \
             false. Attempting to broadcast an axis by a dimension other than 1. 512 by 2000",
        );
        assert!(add.missing_row().is_none() && add.hint().is_some_and(|hint| hint.contains("longer than the model")));
        let other = error("Non-zero status code returned while running Reshape node");
        assert_eq!((other.missing_row(), other.hint()), (None, None));
        let kernel = error("GroupQueryAttention (CPU): q_norm_weight / k_norm_weight inputs are not supported.");
        assert!(kernel.hint().is_some_and(|hint| hint.contains("no kernel")));
    }
}
