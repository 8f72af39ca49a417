//! Divides mixtures of experts: the experts that tokens select most stay on a GPU, and the CPU computes the others.

use crate::analyse::QuantizedWeights;
use crate::error::ModelError;
use crate::{Analysis, ExpertsOnGpu};
use hpp_graph::{
    Attribute, DivisibleMixture, EXPECTED_EXPERTS, Graph, Segmentation, divisible_mixtures, has_mixture, infer,
    segment, whole_mixtures, written_out,
};
use hpp_onnx::{ExpertDivision, Model, QUANTIZED_FILE, VirtualFile, VirtualFiles, divide_experts};
use hpp_schema::ExpertStatistics;
use std::collections::{BTreeMap, HashMap};

/// What is known of experts that stay on a GPU while the CPU computes the others of their layer.
#[derive(Clone, Debug)]
pub struct GpuExperts {
    /// The contents of [`hpp_onnx::EXPERTS_FILE`], which the model refers to and which does not exist on disk.
    pub contents: VirtualFile,
    /// Experts of each layer on the GPU.
    pub experts: u64,
    /// Experts of the layer that has fewest, and of the layer that has most.
    pub counts: [u64; 2],
    /// Bytes of one expert's weights, by the label of its block; one entry for each layer whose experts are divided.
    pub expert_bytes: BTreeMap<String, u64>,
    /// Expected share of the selections that fall on experts on the GPU.
    pub share: f64,
    /// Whether a profile counted which experts tokens select. Otherwise the first experts of each layer are on the GPU, and all are taken to be
    /// equally likely.
    pub is_counted: bool,
}

/// A model with divided mixtures.
pub(crate) struct Divided {
    pub model: Model,
    pub graph: Graph,
    pub segmentation: Segmentation,
    pub experts: GpuExperts,
}

/// What to do about a model whose experts cannot be divided.
pub(crate) const WHOLE_MIXTURES: &str =
    "omit --gpu-experts; --cpu-moe, too, computes experts on the CPU and leaves the rest of the layers to the GPU";

pub(crate) fn divide(
    model: &Model,
    graph: &Graph,
    segmentation: &Segmentation,
    options: ExpertsOnGpu<'_>,
    quantized: Option<&QuantizedWeights>,
) -> Result<Divided, ModelError> {
    let mixtures = divisible_mixtures(graph, segmentation, options.layers);
    let Some(smallest) = mixtures.iter().map(|mixture| mixture.count).min() else {
        let what = "--gpu-experts divides the experts of QMoE operators whose weights are constants and which normalize the weights of the experts that a token selects, some of all; these layers have no such operator";
        let is_mixture = |block: &hpp_graph::Block| has_mixture(graph, block);
        if !segmentation.blocks.iter().any(is_mixture)
            && whole_mixtures(graph, segmentation).is_empty()
            && written_out(graph).is_empty()
        {
            let what = "--gpu-experts divides mixtures of experts, and this model has none";
            return Err(ModelError::setting(what, "omit --gpu-experts"));
        }
        return Err(ModelError::setting(what, WHOLE_MIXTURES));
    };
    let largest = mixtures.iter().map(|mixture| mixture.count).max().unwrap_or(smallest);
    if options.experts >= smallest {
        let what =
            format!("--gpu-experts {} leaves the CPU none of the {smallest} experts of a layer", options.experts);
        return Err(ModelError::setting(what, "give a smaller number, or omit it to place whole layers"));
    }
    let expert_bytes = mixtures.iter().map(|mixture| (mixture.block.clone(), mixture.expert_bytes(graph))).collect();
    let divisions: Vec<(ExpertDivision, f64, bool)> =
        mixtures.into_iter().map(|mixture| popular(mixture, options)).collect();
    let share = divisions.iter().map(|(_, share, _)| share).sum::<f64>() / divisions.len() as f64;
    let is_counted = divisions.iter().all(|(.., is_counted)| *is_counted);
    let divisions: Vec<ExpertDivision> = divisions.into_iter().map(|(division, ..)| division).collect();
    let virtual_files: VirtualFiles =
        quantized.map(|quantized| (QUANTIZED_FILE.to_owned(), quantized.contents.clone())).into_iter().collect();
    let divided = divide_experts(model, graph, &divisions, &virtual_files)?;
    let mut graph = divided.model.graph().map_err(|e| ModelError::Read(Box::new(e)))?;
    infer::infer(&mut graph);
    let results = divisions.iter().zip(&divided.results);
    let expected = results.flat_map(|(division, [first, others])| {
        // The share is that of all layers, so that blocks that compute the same have the same costs. Only the CPU's kernel is known to leave out
        // experts of weight 0.
        let active = division.mixture.active as f64;
        [(first.as_str(), active.min(options.experts as f64)), (others.as_str(), active * (1.0 - share))]
    });
    expect(&mut graph, &expected.collect());
    let segmentation = segment(&graph);
    let experts = GpuExperts {
        contents: divided.contents,
        experts: options.experts,
        counts: [smallest, largest],
        expert_bytes,
        share,
        is_counted,
    };
    Ok(Divided { model: divided.model, graph, segmentation, experts })
}

/// The experts of a mixture that tokens select most, the share of the selections that fall on them, and whether a profile counted that.
fn popular(mixture: DivisibleMixture, options: ExpertsOnGpu<'_>) -> (ExpertDivision, f64, bool) {
    let experts = options.experts as usize;
    let is_same =
        |layer: &&ExpertStatistics| layer.block == mixture.block && layer.counts.len() as u64 == mixture.count;
    let counted = options.statistics.iter().find(is_same).filter(|layer| layer.visits() > 0);
    let Some(layer) = counted else {
        let share = options.experts as f64 / mixture.count as f64;
        return (ExpertDivision { mixture, first: (0..options.experts as u32).collect() }, share, false);
    };
    let mut order: Vec<u32> = (0..layer.counts.len() as u32).collect();
    order.sort_by_key(|expert| std::cmp::Reverse(layer.counts[*expert as usize]));
    order.truncate(experts);
    order.sort_unstable();
    let visits: u64 = order.iter().map(|expert| layer.counts[*expert as usize]).sum();
    (ExpertDivision { mixture, first: order }, visits as f64 / layer.visits() as f64, true)
}

/// States in a graph how many experts the operators with these results are expected to compute for a token.
fn expect(graph: &mut Graph, expected: &HashMap<&str, f64>) {
    for node in 0..graph.nodes.len() {
        let result = graph.nodes[node].outputs.first().copied().flatten();
        let name = result.map(|id| graph.value(id).name.as_str());
        if let Some(experts) = name.and_then(|name| expected.get(name)) {
            let attribute = Attribute::Float(*experts as f32);
            graph.nodes[node].attributes.insert(EXPECTED_EXPERTS.to_owned(), attribute);
        }
    }
}

impl Analysis {
    /// Whether a block computes the experts of a layer that stay on a GPU.
    pub fn has_gpu_experts(&self, block: usize) -> bool {
        let block = &self.segmentation.blocks[block];
        let is_divided = |id| self.graph.node(id).attributes.contains_key(EXPECTED_EXPERTS);
        !block.is_experts && block.nodes.iter().any(|id| is_divided(*id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AnalysisOptions, LogitsMode, Scenario, analyse_with, blocks};
    use std::path::Path;

    const EXPERTS: u64 = 4;

    fn analysed(gpu_experts: Option<ExpertsOnGpu<'_>>) -> Analysis {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/genai/gpt-oss-int4-cpu");
        let options = AnalysisOptions { gpu_experts, ..AnalysisOptions::as_exported(Some(128), LogitsMode::Requested) };
        analyse_with(&path, options).unwrap().with_experts_apart(u32::MAX).unwrap()
    }

    fn counted(block: &str, counts: [u64; 4]) -> ExpertStatistics {
        ExpertStatistics {
            block: block.to_owned(),
            top_k: 2,
            tokens: counts.iter().sum::<u64>() / 2,
            counts: counts.to_vec(),
            reuse_distances: vec![0; 4],
            first_visits: 0,
            oracle_hits: vec![0; 4],
        }
    }

    #[test]
    fn the_experts_that_tokens_select_most_stay_on_the_gpu() {
        let mixture = DivisibleMixture {
            node: hpp_graph::NodeId(0),
            block: "layers.1".to_owned(),
            count: EXPERTS,
            active: 2,
            sliced: vec![],
        };
        let statistics = [counted("layers.0", [9, 0, 0, 0]), counted("layers.1", [10, 40, 20, 30])];
        let on_gpu = |experts, statistics| {
            let (division, share, is_counted) =
                popular(mixture.clone(), ExpertsOnGpu { layers: 2, experts, statistics });
            (division.first, share, is_counted)
        };
        assert_eq!(on_gpu(1, &statistics), (vec![1], 0.4, true));
        assert_eq!(on_gpu(2, &statistics), (vec![1, 3], 0.7, true));
        // Counts of another layer, of another number of experts, or of no token say nothing.
        let other = ExpertStatistics { counts: vec![1; 8], ..counted("layers.1", [0; 4]) };
        for statistics in [&[][..], &statistics[..1], &[other], &[counted("layers.1", [0; 4])]] {
            assert_eq!(on_gpu(3, statistics), (vec![0, 1, 2], 0.75, false));
        }
    }

    /// The experts' work is divided by the share of the selections, and the other work of a layer stays.
    #[test]
    fn costs_follow_the_selections() {
        let counts: Vec<_> = (0..4).map(|layer| counted(&format!("layers.{layer}"), [10, 60, 10, 20])).collect();
        let [whole, divided] = [None, Some(ExpertsOnGpu { layers: 4, experts: 1, statistics: &counts })].map(analysed);
        let share = divided.gpu_experts.as_ref().unwrap().share;
        assert!((share - 0.6).abs() < 1e-9);
        let scenario = Scenario {
            batch: 1,
            context: 128,
            prompt: 16,
            new_tokens: 16,
            prefill_chunk: 128,
            threads: 2,
            divides_prompts: true,
        };
        let [whole, divided] =
            [whole, divided].map(|a| (blocks(&a.graph, &a.segmentation, &a.states, &a.inputs, scenario), a));
        let of = |(blocks, _): &(Vec<hpp_partition::BlockSpec>, Analysis), label: &str| {
            blocks.iter().find(|block| block.label == label).unwrap().clone()
        };
        let [before, after] = [&whole, &divided].map(|found| of(found, "layers.2.experts"));
        let close = |a: u64, b: f64| assert!((a as f64 - b).abs() < 0.02 * b, "{a} and {b}");
        close(after.decode.flops, before.decode.flops as f64 * 0.4);
        close(after.prefill.flops, before.prefill.flops as f64 * 0.4);
        let [before, after] = [&whole, &divided].map(|found| of(found, "layers.2"));
        assert!(after.decode.flops > before.decode.flops && after.decode.bytes > before.decode.bytes);
        // The GPU computes as many of its experts as a token can select: one, half of what a token selects.
        let on_gpu = (after.decode.flops - before.decode.flops) as f64;
        let whole_experts = of(&whole, "layers.2.experts").decode.flops as f64;
        assert!((on_gpu / (whole_experts / 2.0) - 1.0).abs() < 0.05, "{on_gpu} of {whole_experts}");
        assert!(divided.1.has_gpu_experts(divided.0.iter().position(|block| block.label == "layers.2").unwrap()));
        assert!((0..whole.0.len()).all(|block| !whole.1.has_gpu_experts(block)));
    }
}
