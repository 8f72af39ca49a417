//! `hpp-split MODEL`: read, understand, place, cut, write.

use crate::cli::SplitArgs;
use crate::complaint::Complaints;
use crate::costs::Costs;
use crate::error::SplitError;
use crate::explain::explained;
use crate::files::{How, Writing};
use crate::place::{Placement, place};
use crate::predict::predictions;
use crate::reason::reasons;
use crate::refine::{Tried, refine};
use crate::request::Request;
use crate::{operators, presets, print, request, settings, sweep, targets, trace};
use hpp_graph::{Part, cut};
use hpp_model::{Analysis, Decision, Logits, analyse, assemble, faulty_blocks};
use hpp_schema::{Plan, Provider};
use std::path::{Path, PathBuf};

/// Splits a model as the arguments say.
pub fn run(args: &SplitArgs) -> Result<(), SplitError> {
    if args.model.is_none() && args.planning.machine.as_deref() == Some(Path::new(presets::LIST)) {
        return Ok(hpp_io::print_line(&presets::list())?);
    }
    let (analysis, costs) = understand(args)?;
    let here = request::look(args, &costs);
    let mut request = Request::new(args, &analysis, &costs, &here)?;
    note(args, &analysis, &costs, &request);
    if let Some(range) = args.planning.sweep_vram {
        return sweep::run(&request, args, range, &costs.label());
    }
    let target = args.out.clone().unwrap_or_else(|| default_out(&analysis));
    let (placement, tried) = decide(&mut request, args, &analysis, &target)?;
    let placement = targets::keep(&mut request, args, placement)?;
    let source = if tried.is_empty() { costs.label() } else { format!("{}, refined", costs.label()) };
    let Draft { placement, parts, plan } = draft(&request, &analysis, placement, source)?;
    if let Some(path) = &args.planning.trace {
        trace::write(&request, &placement, path)?;
    }
    let plan = write(args, &analysis, &parts, plan, &target)?;
    let explained = match args.planning.explain {
        true => Some(explained(&request, &placement, args, &analysis, &costs)?),
        false => None,
    };
    // Where the plan is does not depend on stdout: it is said even where the table cannot be shown.
    let shown = print::all(args, &plan, explained.as_ref(), &tried);
    if !args.dry_run {
        print::written(&target, &plan);
    }
    Ok(shown?)
}

/// The settings, the costs and the model, with everything at once that is wrong with the first two.
fn understand(args: &SplitArgs) -> Result<(Analysis, Costs), SplitError> {
    let mut complaints: Complaints = settings::check(args);
    let costs = Costs::read(&args.planning, &mut complaints);
    complaints.refuse()?;
    let hint = "hpp-split MODEL, an ONNX file or the directory an exporter left; `hpp-split --help` has the options";
    let path = args.model.as_deref().ok_or_else(|| SplitError::setting("no model was given", hint))?;
    let analysis = analyse(path, args.context, if args.all_logits { Logits::All } else { Logits::AskedFor })?;
    operators::check(&analysis, args.allow_unknown_operators)?;
    costs.belongs(&analysis, args.planning.allow_other_machine)?;
    Ok((analysis, costs))
}

fn note(args: &SplitArgs, analysis: &Analysis, costs: &Costs, request: &Request) {
    if let Some(fault) = faults(analysis).filter(|_| !request.problem.gpus.is_empty()) {
        eprintln!("note: {fault}");
    }
    let here = request::notes(args, &request.here);
    for note in analysis.notes.iter().chain(&costs.notes(request.load)).chain(&here) {
        eprintln!("note: {note}");
    }
}

/// Which blocks the plan keeps away from a provider that computes them wrongly, and why.
fn faults(analysis: &Analysis) -> Option<String> {
    let faulty = faulty_blocks(analysis, Provider::Webgpu);
    let (_, fault) = faulty.first()?;
    let blocks: Vec<_> = faulty.iter().map(|(block, _)| analysis.segmentation.blocks[*block].label.as_str()).collect();
    Some(format!(
        "{}'s {} {}; {} of {} blocks ({} to {}) compute on CUDA or the CPU only (docs/PROVIDERS.md)",
        Provider::Webgpu.name(),
        fault.operator,
        fault.what,
        blocks.len(),
        analysis.segmentation.blocks.len(),
        blocks[0],
        blocks[blocks.len() - 1]
    ))
}

/// A placement: as planned, by hand, or the fastest of those that were run.
fn decide(
    request: &mut Request,
    args: &SplitArgs,
    analysis: &Analysis,
    target: &Path,
) -> Result<(Placement, Vec<Tried>), SplitError> {
    match args.planning.refine {
        Some(tokens) => refine(request, args, analysis, tokens, target),
        None => Ok((place(request, args)?, vec![])),
    }
}

/// A plan that is not written yet.
pub struct Draft {
    /// Where blocks compute, pieces joined where states would be torn apart.
    pub placement: Placement,
    /// The cut, one part for each piece.
    pub parts: Vec<Part>,
    /// The plan.
    pub plan: Plan,
}

/// Cuts the model as placed and puts the plan together.
pub fn draft(
    request: &Request,
    analysis: &Analysis,
    placement: Placement,
    source: String,
) -> Result<Draft, SplitError> {
    let (placement, parts) = cut_where_states_stay_whole(request, analysis, placement)?;
    placement.check(request)?;
    operators::check_host(analysis, &placement, &parts, request.allow_unknown_operators)?;
    let plan = assemble(&Decision {
        analysis,
        blocks: &request.problem.blocks,
        pieces: &placement.pieces,
        slots: &placement.solution.slots,
        disk: placement.disk(request),
        budgets: request.budgets.clone(),
        kv: request.problem.budget.kv,
        parts: &parts,
        load: request.load,
        reasons: reasons(request, &placement),
        predictions: predictions(request, &placement, source),
    });
    Ok(Draft { placement, parts, plan })
}

/// Cuts, and joins a part to the next one while it reads a state that the next one owns.
fn cut_where_states_stay_whole(
    request: &Request,
    analysis: &Analysis,
    mut placement: Placement,
) -> Result<(Placement, Vec<Part>), SplitError> {
    loop {
        let groups: Vec<_> = placement.pieces.iter().map(|piece| piece.blocks.clone()).collect();
        let parts = cut(&analysis.graph, &analysis.segmentation, &groups).map_err(|e| SplitError::Cut(Box::new(e)))?;
        let foreign = |part: &Part| !part.foreign_states(&analysis.segmentation).is_empty();
        match parts.iter().position(foreign) {
            Some(index) if index + 1 < parts.len() => placement = placement.join_with_next(index, request),
            _ => return Ok((placement, parts)),
        }
    }
}

fn default_out(analysis: &Analysis) -> PathBuf {
    PathBuf::from(format!("{}.hpp", analysis.name))
}

/// The plan as written, or as it would be.
fn write(args: &SplitArgs, analysis: &Analysis, parts: &[Part], plan: Plan, target: &Path) -> Result<Plan, SplitError> {
    let how = How {
        force: args.force,
        pack: args.pack,
        in_place: args.in_place,
        hash_weights: args.hash_weights,
        lifted: args.lifted(),
    };
    match args.dry_run {
        true => Writing::imagine(how, analysis, target, parts, plan),
        false => {
            let written = Writing::begin(how, analysis, target)?.finish(parts, plan)?;
            if let Some(first) = written.hard_links.first() {
                eprintln!(
                    "note: {first} in the plan is a hard link to the model's own file; while both exist, Python's onnx.load \
                     refuses the model and the plan's pieces (ONNX Runtime opens them). If that matters: --pack copies the \
                     weights, or delete the plan first"
                );
            }
            Ok(written.plan)
        }
    }
}
