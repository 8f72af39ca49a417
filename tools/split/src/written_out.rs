//! Experts that an exporter wrote out, beside a GPU: there all of them compute each token, on the CPU only those that the token selects. Where the
//! user does not say where they compute, hpp-split plans both.

use crate::analysis::{Computation, analyse};
use crate::cli::SplitArgs;
use crate::error::SplitError;
use hpp_graph::written_out;
use hpp_model::Analysis;
use hpp_onnx::QuantizeOptions;
use std::path::Path;

/// What hpp-split says where it chose `--cpu-moe`.
pub const NOTE: &str = "experts compute on the CPU, as with --cpu-moe, which is expected to be faster: their exporter wrote them out, so a GPU \
                        computes all of them for each token, and the CPU those that a token selects";

/// The settings with `--cpu-moe`, and the model analysed with them. `None` if the user places blocks or experts, if no experts are written
/// out, or if they cannot be moved. `exported` is the model with all experts computed.
pub fn on_cpu(
    args: &SplitArgs,
    exported: &Analysis,
    path: &Path,
    quantize: Option<&QuantizeOptions>,
) -> Option<(SplitArgs, Analysis)> {
    if args.has_manual_placement()
        || args.layers_with_host_experts().is_some()
        || written_out(&exported.graph).is_empty()
    {
        return None;
    }
    let args = SplitArgs { cpu_moe: true, ..args.clone() };
    let moved: Result<Analysis, SplitError> = analyse(path, args.context, &args, quantize, Computation::SELECTED);
    Some((args, moved.ok()?))
}
