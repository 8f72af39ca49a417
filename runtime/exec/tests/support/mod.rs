//! Plan directories of recorded models, and hpp-exec run on them.

#![allow(dead_code)]

pub mod browser;
#[path = "../../../backend/tests/support/mod.rs"]
mod recorded;
pub mod server;

use hpp_schema::{ByteSize, Device, DeviceKind, FileRecord, FileRole, GenerationConfig, Plan, Provider, sample_ranges};
pub use recorded::{Recorded, recorded};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

/// A directory with a recorded model, whole, and a plan for it.
pub struct PlanDir {
    dir: TempDir,
    pub model: Recorded,
    pub plan: Plan,
}

impl PlanDir {
    /// The model named `exporter/model`, for texts of up to `context` tokens.
    pub fn new(name: &str, context: u64) -> Self {
        let model = recorded().into_iter().find(|model| model.name() == name).unwrap_or_else(|| panic!("no {name}"));
        Self::of(model, context)
    }

    /// Any recorded model.
    pub fn of(model: Recorded, context: u64) -> Self {
        let dir = TempDir::new().unwrap();
        for entry in std::fs::read_dir(&model.dir).unwrap().flatten().filter(|e| e.path().is_file()) {
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        let mut plan = model.plan(context);
        plan.generation = model.kind().starts_with("decoder").then(|| generation(dir.path()));
        for file in ["model.onnx.data", "tokenizer.json"] {
            if dir.path().join(file).is_file() {
                let role = if file.ends_with("json") { FileRole::Text } else { FileRole::Weights };
                plan.files.push(record(dir.path(), file, role));
            }
        }
        let this = Self { dir, model, plan };
        this.save();
        this
    }

    /// This plan, changed to one for a GPU that this machine lacks.
    pub fn for_gpu(mut self, providers: Vec<Provider>) -> Self {
        self.plan.devices.push(Device::new("gpu0", DeviceKind::Gpu));
        self.plan.budgets.vram = vec![ByteSize(1 << 30)];
        self.plan.partitions[0].device = "gpu0".into();
        self.plan.partitions[0].providers = providers;
        self.plan.states.iter_mut().for_each(|state| state.device = "gpu0".into());
        self.save();
        self
    }

    /// Writes the plan as it is now.
    pub fn save(&self) {
        std::fs::write(self.path(), self.plan.to_yaml().unwrap()).unwrap();
    }

    /// The plan's file.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("plan.yaml")
    }

    /// A file beside the plan.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The recorded prompt as `--tokens` wants it.
    pub fn prompt(&self) -> String {
        self.model.prompt().iter().map(u32::to_string).collect::<Vec<_>>().join(",")
    }

    /// `hpp-exec PLAN args...`.
    pub fn run(&self, args: &[&str]) -> Ran {
        hpp_exec([self.path().to_str().unwrap()].into_iter().chain(args.iter().copied()))
    }

    /// `hpp-exec COMMAND PLAN args...`.
    pub fn command(&self, command: &str, args: &[&str]) -> Ran {
        hpp_exec([command, self.path().to_str().unwrap()].into_iter().chain(args.iter().copied()))
    }
}

/// A plan's record of a file.
pub fn record(dir: &Path, file: &str, role: FileRole) -> FileRecord {
    let bytes = std::fs::read(dir.join(file)).unwrap();
    let length = bytes.len() as u64;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&length.to_le_bytes());
    for (offset, size) in sample_ranges(length) {
        hasher.update(&bytes[offset as usize..(offset + size) as usize]);
    }
    FileRecord {
        path: file.into(),
        role,
        bytes: ByteSize(length),
        sampled: hasher.finalize().to_hex().to_string(),
        blake3: Some(blake3::hash(&bytes).to_hex().to_string()),
    }
}

fn generation(dir: &Path) -> GenerationConfig {
    let file = |name: &str| dir.join(name).is_file().then(|| name.to_owned());
    GenerationConfig {
        tokenizer: file("tokenizer.json"),
        tokenizer_config: file("tokenizer_config.json"),
        eos_token_ids: vec![0],
        ..GenerationConfig::default()
    }
}

/// Exit code and output of a process.
pub struct Ran {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Ran {
    pub fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        Self { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Asserts success.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, Some(0), "{}", self.stderr);
        self
    }

    /// Asserts a failure whose message contains all of these texts.
    #[track_caller]
    pub fn fails(self, code: i32, texts: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{}", self.stderr);
        for text in texts {
            assert!(self.stderr.contains(text), "{text:?} is not in:\n{}", self.stderr);
        }
        assert!(!self.stderr.contains("panicked"), "{}", self.stderr);
        assert_eq!(self.stdout, "", "results in spite of an error");
        self
    }

    /// The JSON object on stdout.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}\n{}", self.stdout, self.stderr))
    }
}

/// The command, ready to be changed.
pub fn command<'a>(args: impl IntoIterator<Item = &'a str>) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpp-exec"));
    command.args(args).stdin(Stdio::null());
    command
}

/// Runs the command to its end.
pub fn hpp_exec<'a>(args: impl IntoIterator<Item = &'a str>) -> Ran {
    Ran::of(command(args).output().unwrap())
}

/// Tokens out of a JSON report.
pub fn tokens(report: &Value) -> Vec<u32> {
    report["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect()
}
