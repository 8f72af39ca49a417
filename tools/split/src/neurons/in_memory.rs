//! What `--explain` says about neurons that a ReLU switches off and whose weights are in memory. Without `--active-neurons` they are computed
//! like all others; the report says what leaving inactive ones out could gain.

use super::{Network, gain, gathered, networks, percent};
use crate::amount::{MEASURED, digits};
use crate::partitioning::Partitioning;
use crate::request::PlanningRequest;
use crate::table;
use hpp_graph::{NeuronLayout, ReluProduct, weight_bytes};
use hpp_model::{Analysis, CostSource};
use hpp_partition::{NeuronReads, Phase, Placement, ReadCosts};
use serde::Serialize;

/// Reads from memory cost nothing per request, so reading a share of the neurons takes that share of the time.
const MEMORY: ReadCosts = ReadCosts { bytes_per_ms: 1.0, request_ms: 0.0 };

/// Neurons that are off in host memory and on GPUs.
#[derive(Debug, Serialize)]
pub struct NeuronsInMemory {
    #[serde(skip_serializing_if = "Option::is_none")]
    host: Option<OnHost>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gpu: Option<OnGpu>,
}

/// Neurons that the CPU computes, none of whose weights are read from disk.
#[derive(Debug, Serialize)]
struct OnHost {
    /// The blocks with such neurons.
    blocks: String,
    /// Their share of what a token reads of the host's weights, 0 to 1.
    weight_share: f64,
    /// Mean share of the neurons that a token of the profile's corpus makes active.
    #[serde(skip_serializing_if = "Option::is_none")]
    active: Option<f64>,
    /// How many times as fast the host would be at most, with that activity.
    #[serde(skip_serializing_if = "Option::is_none")]
    at_most: Option<f64>,
    /// The same bound with no active neuron.
    with_none: f64,
    /// Whether inactive neurons are left out.
    handling: Handling,
}

/// What the plan does with inactive neurons on the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Handling {
    /// They are left out, with `--active-neurons`.
    LeftOut,
    /// They are computed, and `--active-neurons` would leave them out.
    Computed,
    /// They are computed, and cannot be left out, because they share quantization blocks with others.
    Quantized,
}

/// Neurons that GPUs compute.
#[derive(Debug, Serialize)]
struct OnGpu {
    /// The blocks with such neurons.
    blocks: String,
    /// Upper bound of the speedup of a token if GPUs and host shared each layer by neurons instead of dividing the model by layers, with
    /// equally active neurons on both; absent if the host has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    divided: Option<f64>,
}

impl NeuronsInMemory {
    /// The report on a plan; `None` if it has no such neurons but those that are read from disk.
    pub fn new(
        request: &PlanningRequest,
        partitioning: &Partitioning,
        analysis: &Analysis,
        source: CostSource<'_>,
    ) -> Option<NeuronsInMemory> {
        let problem = partitioning.single_problem(request);
        let placements = &partitioning.solution.placements;
        let (host, gpu): (Vec<usize>, Vec<usize>) = (0..problem.blocks.len())
            .filter(|block| !problem.is_lookup_table(*block))
            .partition(|block| placements[*block].decode == Placement::Cpu);
        let is_read = partitioning.disk_streaming(request).is_some_and(|disk| !disk.holds_all());
        let [mut on_host, on_gpu] = [&host, &gpu].map(|blocks| networks(analysis, blocks));
        if on_host.iter().any(|network| network.is_left_out(analysis)) {
            on_host.retain(|network| network.is_left_out(analysis));
        }
        let divided = || {
            let is_relu = |networks: &[Network<'_>], block: usize| {
                networks.iter().any(|network| network.block.label == problem.blocks[block].label)
            };
            let ms = |blocks: &[usize], networks: &[Network<'_>]| -> f64 {
                let with_relu = blocks.iter().filter(|block| is_relu(networks, **block));
                with_relu.map(|block| problem.phase_ms(*block, placements[*block].decode, Phase::Decode)).sum()
            };
            let hidden = ms(&host, &on_host).min(ms(&gpu, &on_gpu));
            let all = partitioning.solution.decode_ms;
            (hidden > 0.0 && hidden < all).then_some(all / (all - hidden))
        };
        let report = NeuronsInMemory {
            gpu: (!on_gpu.is_empty()).then(|| OnGpu { blocks: labels(&on_gpu), divided: divided() }),
            host: OnHost::new(analysis, &host, &on_host, source).filter(|_| !is_read),
        };
        (report.host.is_some() || report.gpu.is_some()).then_some(report)
    }

    /// The report as text, a line for each place.
    pub fn text(&self) -> String {
        let lines = self.host.iter().map(OnHost::text).chain(self.gpu.iter().map(OnGpu::text));
        lines.collect::<Vec<_>>().join("\n")
    }
}

impl OnHost {
    fn new(analysis: &Analysis, blocks: &[usize], networks: &[Network<'_>], source: CostSource<'_>) -> Option<OnHost> {
        let first = networks.first()?;
        let bytes = |block: &usize| weight_bytes(&analysis.graph, &analysis.segmentation.blocks[*block].weights);
        let weights = blocks.iter().map(bytes).sum::<u64>() as f64;
        let total = |of: fn(&ReluProduct) -> u64| networks.iter().map(|network| of(&network.product)).sum::<u64>();
        let (neurons, count) = (total(ReluProduct::all_bytes) as f64, total(|product| product.neurons) as f64);
        let reads = NeuronReads { weights, neurons, row_bytes: neurons / count, locked_share: 0.0 };
        let active = gathered(networks, MEMORY, |block| source.active_neurons(block)).map(|gathered| gathered.active);
        Some(OnHost {
            blocks: labels(networks),
            weight_share: neurons / weights,
            active,
            at_most: active.map(|active| reads.speedup(active)),
            with_none: reads.speedup(0.0),
            handling: match first.product.layout {
                NeuronLayout::Quantized => Handling::Quantized,
                _ if first.is_left_out(analysis) => Handling::LeftOut,
                _ => Handling::Computed,
            },
        })
    }

    fn text(&self) -> String {
        let gain = gain(self.active.zip(self.at_most), &digits(self.with_none, MEASURED));
        let what = match self.handling {
            Handling::LeftOut => "left out (--active-neurons), which makes the host",
            Handling::Computed => {
                "computed like all others: --active-neurons leaves inactive ones out, which would make the host"
            }
            Handling::Quantized => {
                "computed like all others: their numbers are quantized together with those of others, so --active-neurons does not leave them out; \
                 that would make the host"
            }
        };
        format!(
            "neurons that a ReLU switches off ({}, {} of the weights that the host reads for a token) are in memory and {what} at most {gain}, \
             if its time is in proportion to the bytes that it reads (docs/BENCHMARKS.md)",
            self.blocks,
            percent(self.weight_share)
        )
    }
}

impl OnGpu {
    fn text(&self) -> String {
        let gain = match self.divided {
            Some(times) => format!(
                "where all are active about as often, this would make a token at most {} times as fast, less two exchanges in each layer",
                digits(times, MEASURED)
            ),
            None => "no layer with a ReLU is left to the host, so there is nothing to gain".to_owned(),
        };
        format!(
            "neurons that a ReLU switches off ({}) are on a GPU and computed like all others: dividing neurons between GPU and host by their \
             activity is not built; {gain} (docs/PLANNING.md)",
            self.blocks
        )
    }
}

/// The blocks of these networks.
fn labels(networks: &[Network<'_>]) -> String {
    let mut labels: Vec<String> = networks.iter().map(|network| network.block.label.clone()).collect();
    labels.dedup();
    table::blocks(&labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_has_the_numbers_that_decide() {
        let host = OnHost {
            blocks: "layers.0-1".into(),
            weight_share: 0.33,
            active: Some(0.17),
            at_most: Some(1.377),
            with_none: 1.49,
            handling: Handling::Computed,
        };
        let text = host.text();
        for words in [
            "(layers.0-1, 33 % of",
            "computed like all others: --active-neurons leaves inactive ones out, which would make the host",
            "at most 1.38 times as fast with 17 % active (profile), 1.49 times with none",
        ] {
            assert!(text.contains(words), "{words:?} is not in {text}");
        }
        let with = OnHost { handling: Handling::LeftOut, blocks: String::new(), ..host };
        assert!(with.text().contains("are in memory and left out (--active-neurons), which makes"), "{}", with.text());
        let cannot = OnHost { handling: Handling::Quantized, blocks: String::new(), ..with };
        assert!(cannot.text().contains("so --active-neurons does not leave them out"), "{}", cannot.text());
        let text = OnHost { active: None, at_most: None, ..cannot }.text();
        assert!(text.contains("at most 1.49 times as fast with none active (a profile"), "{text}");
        let divided = OnGpu { blocks: "layers.2-3".into(), divided: Some(1.087) };
        assert!(divided.text().contains("at most 1.09 times as fast, less two exchanges"), "{}", divided.text());
        let whole = OnGpu { divided: None, ..divided }.text();
        assert!(whole.contains("nothing to gain (docs/PLANNING.md)"), "{whole}");
    }
}
