//! Reads and analyses a model as the arguments say.

use crate::cli::SplitArgs;
use crate::error::SplitError;
use hpp_graph::{Block, ExpertCounts, whole_mixtures, written_out};
use hpp_model::{Analysis, AnalysisOptions, ExpertComputation, ExpertsOnGpu, analyse_with};
use hpp_onnx::QuantizeOptions;
use hpp_schema::Activations;
use std::path::Path;

/// How the model computes, as far as that depends on the machine.
#[derive(Clone, Copy, Debug)]
pub struct Computation<'a> {
    /// Which experts compute a pass.
    pub experts: ExpertComputation,
    /// How many shards each layer is divided into by rows; `None` for whole layers.
    pub shards: Option<usize>,
    /// Which experts stay on a GPU while the CPU computes the others.
    pub gpu_experts: Option<ExpertsOnGpu<'a>>,
}

impl Computation<'_> {
    /// Whole layers and mixtures, with experts that tokens select.
    pub const SELECTED: Self = Computation { experts: ExpertComputation::Selected, shards: None, gpu_experts: None };
}

/// Analyses a model as the settings say: quantized with `quantize`, and with the experts of `--cpu-moe` as blocks of
/// their own. Its name says how weights and activations were rounded.
pub fn analyse(
    path: &Path,
    context: Option<u64>,
    args: &SplitArgs,
    quantize: Option<&QuantizeOptions>,
    computation: Computation<'_>,
) -> Result<Analysis, SplitError> {
    let (logits, activations) = (args.logits_mode(), Activations::int8_if(args.int8_activations));
    let Computation { experts, shards, gpu_experts } = computation;
    let options = AnalysisOptions { context, logits, quantize, experts, activations, shards, gpu_experts };
    let mut analysis = analyse_with(path, options)?;
    if let Some(bits) = args.quantize.quantize.filter(|_| quantize.is_some()) {
        analysis.name = format!("{}-{}", analysis.name, bits.name());
    }
    if !analysis.activations().are_exported() {
        analysis.name.push_str("-int8-activations");
    }
    if args.active_neurons {
        analysis.compute_active_neurons()?;
    }
    let Some(layers) = args.layers_with_host_experts() else { return Ok(analysis) };
    let has_experts = |block: &Block| ExpertCounts::of(&analysis.graph, block).is_some();
    let has_whole = || !whole_mixtures(&analysis.graph, &analysis.segmentation).is_empty();
    if !analysis.segmentation.blocks.iter().any(has_experts) && written_out(&analysis.graph).is_empty() && !has_whole()
    {
        let what = "--cpu-moe and --n-cpu-moe move experts to the CPU, and this model has no mixture of experts";
        return Err(SplitError::setting(what, "omit them; --gpu-layers and --assign place whole layers"));
    }
    let mut analysis = analysis.with_experts_apart(layers).ok_or_else(|| {
        SplitError::setting(
            "--cpu-moe and --n-cpu-moe move experts to the CPU, and these layers have none that can be moved: experts of QMoE and MoE can be, and \
             with --cpu-moe or without a GPU also those that Optimum exports as single matrices, of at least 16 KiB each as quantized",
            "--cpu-moe moves the experts of all layers, also those that Optimum exports as single matrices; `hpp-split inspect` lists the layers \
             with experts; --assign places whole layers",
        )
    })?;
    let (all, divided) = (analysis.segmentation.layer_count(), analysis.layers_with_experts_apart());
    if args.n_cpu_moe.is_some_and(|asked| asked as usize > all) {
        let note = format!(
            "--n-cpu-moe {layers}: the model has {divided} layers with experts, and all of them compute their experts on the CPU"
        );
        analysis.notes.push(note);
    }
    Ok(analysis)
}
