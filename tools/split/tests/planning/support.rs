//! Runs the command and builds profiles of the small models in this repository.

use hpp_model::{Analysis, LogitsMode, Scenario, ThisHost, analyse, model_hash};
use hpp_schema::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The model most tests plan for.
pub const LLAMA: &str = "genai/llama3-fp32-cpu";

/// The result of a command.
#[derive(Debug)]
pub struct Done {
    pub status: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    /// Panics unless it succeeded.
    #[track_caller]
    pub fn success(self) -> Self {
        assert_eq!(self.status, Some(0), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        self
    }

    /// Panics unless it failed with these words on stderr.
    #[track_caller]
    pub fn refusal(self, words: &[&str]) -> Self {
        assert_eq!(self.status, Some(1), "stdout: {}\nstderr: {}", self.stdout, self.stderr);
        assert!(self.stderr.contains("error: ") && !self.stderr.contains("panicked"), "{}", self.stderr);
        for word in words {
            assert!(self.stderr.contains(word), "{word:?} is not in: {}", self.stderr);
        }
        self
    }

    /// The JSON on stdout.
    #[track_caller]
    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }
}

/// Runs `hpp-split` with these arguments.
pub fn split(arguments: &[&str]) -> Done {
    split_with(&[], arguments)
}

/// Runs `hpp-split` with these environment variables and arguments.
pub fn split_with(variables: &[(&str, &str)], arguments: &[&str]) -> Done {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpp-split"));
    let output = command.args(arguments).envs(variables.iter().copied()).stdin(Stdio::null()).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    Done { status: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// `hpp-split MODEL --dry-run --json` with more arguments, as a plan.
#[track_caller]
pub fn planned(more: &[&str]) -> Plan {
    let model = fixture(LLAMA);
    let arguments = [&[model.to_str().unwrap(), "--dry-run", "--json"], more].concat();
    serde_json::from_str(&split(&arguments).success().stdout).unwrap()
}

/// A model of this repository.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

/// A copy of a model of this repository below `dir`.
pub fn copied(name: &str, dir: &Path) -> PathBuf {
    let to = dir.join(name);
    std::fs::create_dir_all(&to).unwrap();
    for entry in std::fs::read_dir(fixture(name)).unwrap().flatten() {
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
    to
}

/// A machine file of this repository.
pub fn machine(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/machines").join(name);
    path.to_str().unwrap().to_owned()
}

/// `gpu0:layers.2+layers.3 cpu:head`.
pub fn places(plan: &Plan) -> String {
    let line = |p: &Partition| format!("{}:{}", p.device, p.blocks.join("+"));
    plan.partitions.iter().map(line).collect::<Vec<_>>().join(" ")
}

/// A profile of a model of this repository: a layer takes `cpu_ms` on the host and `gpu_ms` on the GPU, other blocks a
/// tenth.
pub fn profile(model: &str, cpu_ms: f64, gpu_ms: f64) -> Profile {
    let analysis = analyse(&fixture(model), None, LogitsMode::Requested).unwrap();
    let blocks = blocks(&analysis);
    let mut classes: Vec<ClassCosts> = Vec::new();
    for block in &blocks {
        if classes.iter().all(|known| known.class != block.class) {
            let share = if block.label.starts_with("layers") { 1.0 } else { 0.1 };
            let providers = vec![costs(Provider::CPU, cpu_ms * share), costs(Provider::WEBGPU, gpu_ms * share)];
            classes.push(ClassCosts { class: block.class, block: block.label.clone(), providers });
        }
    }
    let hash = model_hash(&analysis.model).unwrap();
    Profile {
        hpp_profile: PROFILE_VERSION,
        model: ProfiledModel { name: analysis.name.clone(), hash, weight_bytes: ByteSize(1 << 20), blocks },
        host: host(),
        date: "2025-06-01T12:00:00Z".into(),
        settings: ProfileSettings {
            provider_options: Default::default(),
            providers: vec![Provider::CPU, Provider::WEBGPU],
            contexts: vec![128, 512],
            prefill_tokens: vec![64, 512],
            quick: true,
            all_blocks: false,
            activations: Default::default(),
            decode_tokens: 8,
        },
        machine: MeasuredMachine {
            rates: Some(rates()),
            curves: vec![],
            tflops: None,
            contention: vec![],
            disk_contention: None,
            failures: vec![],
        },
        classes,
        pass: Some(PassCosts { timing: Some(timing(0.03)), failure: None }),
        corpus: None,
        sensitivity: vec![],
        hotness: vec![],
        others_cpu_share: None,
        notes: vec![],
    }
}

fn blocks(analysis: &Analysis) -> Vec<ProfiledBlock> {
    let mut numbers = BTreeMap::new();
    let all = planner_blocks(analysis);
    let bytes = |at: usize| all[at].weights.iter().map(|(_, bytes)| bytes).sum();
    let block = |(at, block): (usize, &hpp_graph::Block)| {
        let next = numbers.len() as u32;
        let class = *numbers.entry(block.class).or_insert(next);
        ProfiledBlock { label: block.label.clone(), class, weight_bytes: ByteSize(bytes(at)) }
    };
    analysis.segmentation.blocks.iter().enumerate().map(block).collect()
}

fn planner_blocks(analysis: &Analysis) -> Vec<hpp_partition::BlockSpec> {
    let scenario = Scenario {
        batch: 1,
        context: analysis.context,
        prompt: 1,
        new_tokens: 1,
        prefill_chunk: 1,
        threads: 1,
        divides_prompts: false,
    };
    hpp_model::blocks(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, scenario)
}

fn timing(ms: f64) -> TimingStats {
    TimingStats { runs: 3, median_ms: ms, p10_ms: ms, p90_ms: ms }
}

fn costs(provider: Provider, ms: f64) -> ProviderCosts {
    let point = |tokens| CostPoint { tokens, ms: Some(ms), single: Some(timing(ms + 0.1)), run: None, failure: None };
    let phase = || PhaseCosts {
        points: vec![point(128), point(512)],
        fit: Some(Fit { constant_ms: ms, linear_ms: 0.0, quadratic_ms: 0.0, worst_relative_error: 0.0, r2: 1.0 }),
    };
    ProviderCosts {
        provider,
        run_length: 1,
        launch_ms: Some(0.1),
        decode: phase(),
        prefill: phase(),
        memory: None,
        failure: None,
    }
}

fn host() -> Host {
    let ThisHost { cpu, cores, memory, system } = ThisHost::read();
    Host { cpu, cores, memory, system, threads: 1, onnxruntime: "1.31.1".into(), hpp: "0.1.0".into(), devices: vec![] }
}

fn rates() -> Machine {
    let mut machine = Machine::from_yaml(&std::fs::read_to_string(machine("rtx4060-laptop.yaml")).unwrap()).unwrap();
    machine.gpus[0].provider = Provider::WEBGPU;
    machine
}
