//! Plans many models on every machine preset and prints one line for each problem: what the planner found, its lower bound and
//! how long it took. With `--against FILE` (an earlier output) it prints a Markdown table of the differences instead.
//!
//! Arguments are model directories; without any, all models below `fixtures/models` are planned.

use hpp_model::{Analysis, CostSource, LogitsMode, Scenario, analyse, problem};
use hpp_partition::{Budget, Demand, Mechanisms, Objective, Options, Planner, Problem, plan};
use hpp_schema::Machine;
use hpp_schema::memory::{PROCESS, READ_AHEAD};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Instant;

/// Device memory of each problem, as parts of all that the model needs.
const VRAM_PARTS: [f64; 4] = [0.12, 0.35, 0.6, 0.9];
/// Host memory, likewise: plenty, and half.
const RAM_PARTS: [f64; 2] = [2.0, 0.5];
/// Models above this size are planned within the machine's real memory; smaller ones as if they filled it.
const LARGE: u64 = 256 << 20;
/// Columns that name a problem.
const NAMES: usize = 7;

const HEAD: &str = "model\tblocks\tmachine\tvram MiB\tram MiB\tobjective\tmechanisms\tms\tgap\tseconds";

fn main() {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let against = arguments.iter().position(|argument| argument == "--against");
    let against = against.map(|at| arguments.drain(at..at + 2).nth(1).expect("--against takes a file"));
    let mut models: Vec<PathBuf> = arguments.into_iter().map(PathBuf::from).collect();
    if models.is_empty() {
        find_models(&repository().join("fixtures/models"), &mut models);
    }
    models.sort();
    let mut lines = Vec::new();
    for path in &models {
        let Ok(analysis) = analyse(path, None, LogitsMode::Requested) else { continue };
        for (name, machine) in machines() {
            for problem in problems(&analysis, &machine) {
                for options in options(&problem) {
                    let line = line(path, &name, &problem, &options);
                    if against.is_none() {
                        println!("{line}");
                    }
                    lines.push(line);
                }
            }
        }
    }
    if let Some(file) = against {
        print!("{}", compared(&std::fs::read_to_string(file).expect("the earlier output"), &lines));
    } else {
        eprintln!("{HEAD}");
    }
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn find_models(dir: &Path, found: &mut Vec<PathBuf>) {
    let entries: Vec<PathBuf> = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|e| e.path()).collect();
    if entries.iter().any(|path| path.extension().is_some_and(|extension| extension == "onnx")) {
        found.push(dir.to_owned());
    }
    entries.iter().filter(|path| path.is_dir()).for_each(|path| find_models(path, found));
}

fn machines() -> Vec<(String, Machine)> {
    let dir = repository().join("fixtures/machines");
    let mut machines: Vec<(String, Machine)> = std::fs::read_dir(dir)
        .expect("the machine presets are there")
        .flatten()
        .map(|entry| {
            let text = std::fs::read_to_string(entry.path()).expect("a preset can be read");
            let name = entry.path().file_stem().unwrap_or_default().to_string_lossy().into_owned();
            (name, Machine::from_yaml(&text).expect("a preset is a machine"))
        })
        .collect();
    machines.sort_by(|a, b| a.0.cmp(&b.0));
    machines
}

/// The problems of one model on one machine, with every budget that the machine allows.
fn problems(analysis: &Analysis, machine: &Machine) -> Vec<Problem> {
    let context = analysis.context;
    let chunk = if machine.gpus.is_empty() { context } else { context.min(hpp_model::DEFAULT_CHUNK) };
    let load = Scenario {
        batch: 1,
        context,
        prompt: context.min(512),
        new_tokens: 128,
        prefill_chunk: chunk,
        threads: 8,
        divides_prompts: true,
    };
    let all = hpp_model::blocks(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, load);
    let total = Demand::of(&all).total();
    let is_large = total > LARGE;
    let mut budgets: Vec<(Vec<u64>, u64)> = Vec::new();
    for vram in VRAM_PARTS {
        for ram in RAM_PARTS {
            let vram = machine.gpus.iter().map(|gpu| ((total as f64 * vram) as u64).min(gpu.memory.0)).collect();
            let available = machine.cpu.memory.0 - machine.cpu.memory.0 / 16;
            let process = if is_large { PROCESS } else { 0 };
            let budget = (vram, ((total as f64 * ram) as u64 + process).min(available));
            if !budgets.contains(&budget) {
                budgets.push(budget);
            }
        }
    }
    let problem = |(vram, ram): (Vec<u64>, u64)| {
        let margin = vram.iter().min().map_or(0, |smallest| (smallest / 16).min(1 << 30));
        let (process, read_ahead) = if is_large { (PROCESS, READ_AHEAD) } else { (0, 0) };
        let budget = Budget { vram, ram: Some(ram), margin, process, read_ahead, ..Budget::default() };
        problem(analysis, load, CostSource::Machine(machine), budget).ok()
    };
    budgets.into_iter().filter_map(problem).collect()
}

/// The options to plan with: for large models also each objective, and the mechanisms that `--kv cpu` allows.
fn options(problem: &Problem) -> Vec<Options> {
    let options_for = |objective, mechanisms| Options { planner: Planner::Exact, objective, mechanisms, slots: None };
    let mut all = vec![options_for(Objective::Mixed, Mechanisms::All)];
    if problem.blocks.len() > 12 {
        all.push(options_for(Objective::Decode, Mechanisms::All));
        all.push(options_for(Objective::Prefill, Mechanisms::All));
        all.push(options_for(Objective::Mixed, Mechanisms::ResidentCpuDisk));
    }
    all
}

fn line(model: &Path, machine: &str, problem: &Problem, options: &Options) -> String {
    let begun = Instant::now();
    let (ms, gap) = match plan(problem, options) {
        Ok(solution) => (format!("{:.6}", solution.objective_ms), format!("{:.6}", solution.gap())),
        Err(over_budget) => {
            (format!("refused: {} MiB for {}", over_budget.required_budget() >> 20, over_budget.device), "0".to_owned())
        }
    };
    let seconds = begun.elapsed().as_secs_f64();
    let mib = |bytes: u64| format!("{:.2}", bytes as f64 / f64::from(1 << 20));
    let vram = problem.budget.vram.iter().map(|bytes| mib(*bytes)).collect::<Vec<_>>().join("+");
    let model = model.file_name().unwrap_or_default().to_string_lossy();
    let ram = problem.budget.ram.map_or_else(String::new, mib);
    let (objective, mechanisms) = (options.objective, options.mechanisms);
    let blocks = problem.blocks.len();
    format!("{model}\t{blocks}\t{machine}\t{vram}\t{ram}\t{objective:?}\t{mechanisms:?}\t{ms}\t{gap}\t{seconds:.4}")
}

/// The result for one problem.
struct Outcome {
    ms: Option<f64>,
    gap: f64,
    seconds: f64,
}

fn parsed(line: &str) -> Option<(String, Outcome)> {
    let columns: Vec<&str> = line.split('\t').collect();
    let [ms, gap, seconds] = columns.get(NAMES..)? else { return None };
    let found = Outcome { ms: ms.parse().ok(), gap: gap.parse().ok()?, seconds: seconds.parse().ok()? };
    Some((columns[..NAMES].join("\t"), found))
}

/// One row for each model, objective and set of mechanisms, and the problems that changed most.
fn compared(before: &str, after: &[String]) -> String {
    let before: BTreeMap<String, Outcome> = before.lines().filter_map(parsed).collect();
    let mut groups: BTreeMap<String, Vec<(String, &Outcome, Outcome)>> = BTreeMap::new();
    for (name, now) in after.iter().filter_map(|line| parsed(line)) {
        let Some(earlier) = before.get(&name) else { continue };
        let columns: Vec<&str> = name.split('\t').collect();
        let group = format!("{} | {} | {} | {}", columns[0], columns[1], columns[5], columns[6]);
        groups.entry(group).or_default().push((name, earlier, now));
    }
    let mut text = "| model | blocks | objective | mechanisms | problems | worst loss | median loss | best gain | \
                    seconds before, after | worst gap before, after | refused before, after |\n\
                    |---|---|---|---|---|---|---|---|---|---|---|\n"
        .to_owned();
    let mut losses: Vec<(f64, String)> = Vec::new();
    for (group, problems) in groups {
        let mut loss: Vec<f64> = Vec::new();
        for (name, earlier, now) in &problems {
            if let (Some(a), Some(b)) = (earlier.ms, now.ms) {
                loss.push(b / a - 1.0);
                losses.push((b / a - 1.0, name.replace('\t', " | ")));
            }
        }
        loss.sort_by(f64::total_cmp);
        let percent = |part: Option<&f64>| part.map_or_else(String::new, |part| format!("{:+.3} %", 100.0 * part));
        let max = |of: &dyn Fn(&(String, &Outcome, Outcome)) -> f64| problems.iter().map(of).fold(0.0, f64::max);
        let seconds = (max(&|p| p.1.seconds), max(&|p| p.2.seconds));
        let gaps = (100.0 * max(&|p| p.1.gap), 100.0 * max(&|p| p.2.gap));
        let refused = |of: &dyn Fn(&(String, &Outcome, Outcome)) -> bool| problems.iter().filter(|p| of(p)).count();
        text += &format!(
            "| {group} | {} | {} | {} | {} | {:.2}, {:.2} | {:.1} %, {:.1} % | {}, {} |\n",
            problems.len(),
            percent(loss.last()),
            percent(loss.get(loss.len() / 2)),
            percent(loss.first()),
            seconds.0,
            seconds.1,
            gaps.0,
            gaps.1,
            refused(&|p| p.1.ms.is_none()),
            refused(&|p| p.2.ms.is_none()),
        );
    }
    losses.sort_by(|a, b| b.0.total_cmp(&a.0));
    text += "\n| largest losses | model | blocks | machine | VRAM MiB | RAM MiB | objective | mechanisms |\n|---|---|---|---|---|---|---|---|\n";
    for (loss, name) in losses.iter().take(12).filter(|(loss, _)| *loss > 1e-6) {
        text += &format!("| {:+.3} % | {name} |\n", 100.0 * loss);
    }
    text
}
