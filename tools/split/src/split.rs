//! `hpp-split MODEL`: read, understand, place, cut, write.

use crate::cli::SplitArgs;
use crate::error::SplitError;
use crate::files;
use crate::output::PLAN_FILE;
use crate::place::{Placement, check_budget, place};
use crate::predict::predictions;
use crate::reason::reason;
use crate::stdout;
use crate::table::plan_summary;
use hpp_graph::{Part, cut};
use hpp_model::{Analysis, DEFAULT_CHUNK, Decision, Load, Logits, analyse, assemble, blocks};
use hpp_schema::Plan;
use std::path::{Path, PathBuf};

/// Splits a model as the arguments say.
pub fn run(args: &SplitArgs) -> Result<(), SplitError> {
    let path = args.model.as_deref().expect("clap requires it");
    check_settings(args)?;
    let analysis = analyse(path, args.context, if args.all_logits { Logits::All } else { Logits::AskedFor })?;
    let load = load(&analysis, args);
    let blocks = blocks(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, load);
    let mut placement = place(&blocks, args)?;
    let parts = cut_where_states_stay_whole(&analysis, &mut placement)?;
    check_budget(&blocks, &placement)?;
    let plan = assemble(&Decision {
        analysis: &analysis,
        blocks: &blocks,
        runs: &placement.runs,
        budget: &placement.budget,
        parts: &parts,
        load,
        reasons: placement.runs.iter().map(|run| reason(&placement, &blocks, run)).collect(),
        predictions: predictions(&blocks, &placement.places, load),
    });
    for note in &analysis.notes {
        eprintln!("note: {note}");
    }
    if args.dry_run {
        return print(args, &plan, None);
    }
    let target = args.out.clone().unwrap_or_else(|| default_out(&analysis));
    let plan = write(args, &analysis, &parts, plan, &target)?;
    print(args, &plan, Some(&target))
}

fn check_settings(args: &SplitArgs) -> Result<(), SplitError> {
    let zero = |message: &str, hint| Err(SplitError::setting(message, hint));
    match args {
        _ if args.batch == 0 => zero("a batch of 0 sequences computes nothing", "give --batch 1 or more"),
        _ if args.partitions == 0 => zero("0 partitions hold nothing", "give --partitions 1 or more"),
        _ if args.prompt_tokens == 0 => zero("a prompt of 0 tokens predicts nothing", "give --prompt-tokens 1 or more"),
        _ if args.vram.iter().any(|v| v.0 == 0) => {
            zero("a VRAM budget of 0 holds nothing", "leave --vram out to compute on the CPU")
        }
        _ => Ok(()),
    }
}

/// What the plan has to carry: everything in one prefill pass on the host, chunks where a GPU's workspace is planned.
fn load(analysis: &Analysis, args: &SplitArgs) -> Load {
    let on_gpu = !args.vram.is_empty() || args.gpu_layers.is_some() || args.assign.is_some();
    let context = analysis.context;
    Load {
        batch: args.batch,
        context,
        prompt: args.prompt_tokens.min(context),
        chunk: if on_gpu { context.min(DEFAULT_CHUNK) } else { context },
    }
}

/// Cuts, and joins a part to the next one while it reads a state that the next one owns.
fn cut_where_states_stay_whole(analysis: &Analysis, placement: &mut Placement) -> Result<Vec<Part>, SplitError> {
    loop {
        let groups: Vec<_> = placement.runs.iter().map(|run| run.blocks.clone()).collect();
        let parts = cut(&analysis.graph, &analysis.segmentation, &groups).map_err(|e| SplitError::Cut(Box::new(e)))?;
        let foreign = |part: &Part| !part.foreign_states(&analysis.segmentation).is_empty();
        match parts.iter().position(foreign) {
            Some(index) if index + 1 < parts.len() => placement.join_with_next(index),
            _ => return Ok(parts),
        }
    }
}

fn default_out(analysis: &Analysis) -> PathBuf {
    PathBuf::from(format!("{}.hpp", analysis.name))
}

fn write(args: &SplitArgs, analysis: &Analysis, parts: &[Part], plan: Plan, target: &Path) -> Result<Plan, SplitError> {
    let writing = files::Writing::begin(args, analysis, target)?;
    match writing.write(parts, plan) {
        Ok(plan) => {
            writing.commit()?;
            Ok(plan)
        }
        Err(error) => {
            writing.abandon();
            Err(error)
        }
    }
}

fn print(args: &SplitArgs, plan: &Plan, target: Option<&Path>) -> Result<(), SplitError> {
    if args.json {
        stdout::line(&serde_json::to_string_pretty(plan).expect("plain data serialises"));
    } else {
        stdout::line(&plan_summary(plan));
    }
    if let Some(target) = target {
        eprintln!("wrote {}", target.join(PLAN_FILE).display());
        eprintln!("run it: hpp-exec {} --prompt \"...\"", target.join(PLAN_FILE).display());
    }
    Ok(())
}
