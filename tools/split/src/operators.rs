//! Models that ONNX Runtime cannot run are refused before anything is written, with what stands in the way by name.

use crate::complaint::{Complaint, Complaints};
use crate::place::Placement;
use hpp_graph::Part;
use hpp_model::{Analysis, unknown_operators, without_cpu_kernel};
use hpp_partition::{Phase, Where};

const UNKNOWN: &str = "export again with an opset and operators that ONNX Runtime has (torch.onnx.export takes opset_version); if \
                       a library of custom operators brings them, give --allow-unknown-operators";
const NO_KERNEL: &str = "export in float32 or float16, or with 4-bit weights, to compute on the CPU; or put these blocks on a GPU \
                         with more --vram or --assign; --allow-unknown-operators splits all the same";

/// Refuses opsets and operators that ONNX Runtime does not have.
pub fn check(analysis: &Analysis, allow: bool) -> Result<(), Complaints> {
    refuse(if allow { vec![] } else { unknown_operators(&analysis.model) }, UNKNOWN)
}

/// Refuses what computes on the host and has no kernel there.
pub fn check_host(analysis: &Analysis, placement: &Placement, parts: &[Part], allow: bool) -> Result<(), Complaints> {
    if allow {
        return Ok(());
    }
    let on_host = |choice: hpp_partition::Choice| Phase::BOTH.iter().any(|phase| choice.of(*phase) == Where::Cpu);
    let pieces = placement.pieces.iter().zip(parts).filter(|(piece, _)| on_host(piece.choice));
    let nodes = pieces.flat_map(|(_, part)| part.nodes.iter().copied());
    refuse(without_cpu_kernel(&analysis.graph, nodes), NO_KERNEL)
}

fn refuse(lines: Vec<String>, hint: &'static str) -> Result<(), Complaints> {
    Complaints(lines.into_iter().map(|line| Complaint::new(line, hint)).collect()).refuse()
}
