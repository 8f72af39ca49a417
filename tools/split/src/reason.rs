//! One line for each partition that says why it is where it is.

use crate::amount::{self, MEASURED};
use crate::place::Placement;
use crate::request::Request;
use hpp_model::{FromDisk, Piece};
use hpp_partition::{BlockKind, Choice, Alternative, Objective, RunExplanation, Where, explain_runs};
use hpp_schema::ByteSize;

/// Why each piece computes where it does, in the order of pieces.
pub fn reasons(request: &Request, placement: &Placement) -> Vec<String> {
    if placement.by_hand {
        return vec!["placed by hand".to_owned(); placement.pieces.len()];
    }
    if request.problem.gpus.is_empty() {
        let disk = placement.disk(request);
        return placement.pieces.iter().map(|piece| without_gpus(piece, disk.as_ref())).collect();
    }
    // With what starting each piece costs, as in the time they are compared with.
    let cuts = |choices: &[Choice]| placement.cuts(request, choices);
    let runs = explain_runs(&placement.problem(request), &request.options, &placement.solution, &cuts);
    let of = |piece: &Piece| runs.iter().find(|run| run.blocks.contains(&piece.blocks.start));
    placement
        .pieces
        .iter()
        .map(|piece| of(piece).map_or(String::new(), |run| reason(request, placement, run)))
        .collect()
}

/// Why a piece is as it is where the host is all there is.
fn without_gpus(piece: &Piece, disk: Option<&FromDisk>) -> String {
    match disk {
        None => "no GPU in this plan".to_owned(),
        Some(disk) if piece.blocks.clone().all(|block| disk.rows[block]) => TABLE.to_owned(),
        Some(disk) if disk.holds_all() => "fits in host memory".to_owned(),
        Some(disk) => format!(
            "{:.0} % of its weights fit in host memory, the rest is read from disk in each pass",
            100.0 * disk.locked
        ),
    }
}

const TABLE: &str = "embedding table: each token reads one row";

fn reason(request: &Request, placement: &Placement, run: &RunExplanation) -> String {
    let inside = &request.problem.blocks[run.blocks.clone()];
    let table = inside.iter().all(|block| block.kind == BlockKind::Embedding);
    if table && run.choice.decode == Where::Cpu {
        return TABLE.to_owned();
    }
    let now = placement.solution.objective_ms;
    match nearest(run) {
        None => "no other device can compute it".to_owned(),
        Some(other) => compared(request, other, now),
    }
}

/// The best of the other places: one that fits before one that does not.
fn nearest(run: &RunExplanation) -> Option<&Alternative> {
    let key = |other: &&Alternative| (other.no_fit.is_some(), other.objective_ms);
    run.elsewhere.iter().min_by(|a, b| {
        let (a, b) = (key(a), key(b));
        a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
    })
}

fn compared(request: &Request, other: &Alternative, now: f64) -> String {
    let place = place(other.place);
    match &other.no_fit {
        Some(no_fit) => {
            let short = no_fit.smallest().saturating_sub(no_fit.budget);
            format!("does not fit on {}: {} too much", no_fit.place, ByteSize(short).human())
        }
        None => format!("{place}: {}", difference(other.objective_ms - now, now, request.options.objective)),
    }
}

/// A place as people say it.
pub fn place(place: Where) -> String {
    match place {
        Where::Cpu => "on the CPU".to_owned(),
        Where::Resident(gpu) => format!("on gpu{gpu}"),
        Where::Streamed(gpu) => format!("streamed to gpu{gpu}"),
    }
}

/// What a change does to the objective, which is `now` so many milliseconds: `+31.5 s per answer`.
pub fn difference(ms: f64, now: f64, objective: Objective) -> String {
    let what = match objective {
        Objective::Decode => "per token",
        Objective::Prefill => "to the first token",
        Objective::Mixed => "per answer",
    };
    match ms {
        ms if !ms.is_finite() => "cannot compute there".to_owned(),
        ms if is_nothing(ms, now) => "same time".to_owned(),
        ms => format!("{} {what}", amount::difference(ms, MEASURED)),
    }
}

/// A difference this small, as a part of the whole, is rounding.
const ROUNDING: f64 = 1e-6;

/// Whether a difference is rounding.
pub fn is_nothing(difference_ms: f64, of_ms: f64) -> bool {
    difference_ms.abs() <= ROUNDING * of_ms.abs()
}
