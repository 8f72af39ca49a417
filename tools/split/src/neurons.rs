//! What `--explain` says about neurons that a ReLU switches off. They are read from disk like all others; the report has the numbers that
//! decide whether reading only active ones could pay on this machine.

mod in_memory;

pub use in_memory::NeuronsInMemory;

use crate::amount::{MEASURED, digits};
use crate::partitioning::Partitioning;
use crate::request::PlanningRequest;
use crate::table;
use hpp_graph::{Block, NeuronLayout, ReluProduct, weight_bytes};
use hpp_model::{Analysis, CostSource};
use hpp_partition::{NeuronReads, Placement, ReadCosts};
use hpp_schema::{ByteSize, DType};
use serde::Serialize;

/// The speedup from which dividing every layer and reading rows would be worth it.
const WORTH: f64 = 1.5;

/// Neurons that are off, and what it costs to read them.
#[derive(Debug, Serialize)]
pub struct NeuronReport {
    /// The blocks with such neurons that are read from disk.
    blocks: String,
    /// Their share of what a token reads, memory included, 0 to 1.
    weight_share: f64,
    /// Mean bytes of a neuron.
    row_bytes: u64,
    /// Rate of large reads, 1e9 bytes per second.
    read_gb_per_s: f64,
    /// What a read costs in addition, microseconds.
    request_us: f64,
    /// Mean share of the neurons that a token of the profile's corpus makes active.
    #[serde(skip_serializing_if = "Option::is_none")]
    active: Option<f64>,
    /// How many times as fast a token's reads would be at most, with that activity.
    #[serde(skip_serializing_if = "Option::is_none")]
    at_most: Option<f64>,
    /// The same with no active neuron; absent if nothing would be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    with_none: Option<f64>,
    /// The largest share of active neurons with which they would be 1.5 times as fast.
    #[serde(skip_serializing_if = "Option::is_none")]
    worth_below: Option<f64>,
    /// Why rows cannot be read as the weights are stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    obstacle: Option<&'static str>,
}

/// A block and the matrix whose rows a ReLU switches off.
struct Network<'a> {
    block: &'a Block,
    product: ReluProduct,
}

impl Network<'_> {
    /// Whether `--active-neurons` leaves out inactive neurons of this matrix.
    fn is_left_out(&self, analysis: &Analysis) -> bool {
        let weight = &analysis.graph.value(self.product.weight).name;
        analysis.active_neurons.as_ref().is_some_and(|active| active.reads(weight))
    }
}

impl NeuronReport {
    /// The report on a plan; `None` if it reads no such neurons from disk. Plans that read experts by demand have none: their other weights
    /// stay in memory as far as they can.
    pub fn new(
        request: &PlanningRequest,
        partitioning: &Partitioning,
        analysis: &Analysis,
        source: CostSource<'_>,
    ) -> Option<NeuronReport> {
        let disk = partitioning.disk_streaming(request)?;
        let reads = source.disk_reads()?;
        if disk.holds_all() || disk.expert_cache.is_some() {
            return None;
        }
        let is_read =
            |block: &usize| partitioning.solution.placements[*block].decode == Placement::Cpu && !disk.is_table[*block];
        let blocks: Vec<usize> = (0..analysis.segmentation.blocks.len()).filter(is_read).collect();
        let networks = networks(analysis, &blocks);
        let first = networks.first()?;
        let block_bytes = |block: &usize| weight_bytes(&analysis.graph, &analysis.segmentation.blocks[*block].weights);
        let weights: u64 = blocks.iter().map(block_bytes).sum();
        let total = |of: fn(&ReluProduct) -> u64| networks.iter().map(|network| of(&network.product)).sum::<u64>();
        let (bytes, neurons) = (total(ReluProduct::all_bytes), total(|product| product.neurons));
        let measured = NeuronReads {
            weights: weights as f64,
            neurons: bytes as f64,
            row_bytes: bytes as f64 / neurons as f64,
            locked_share: disk.locked_share,
        };
        let mut labels: Vec<String> = networks.iter().map(|network| network.block.label.clone()).collect();
        labels.dedup();
        let gathered = gathered(&networks, reads, |block| source.active_neurons(block));
        Some(NeuronReport {
            blocks: table::blocks(&labels),
            weight_share: bytes as f64 / weights as f64,
            row_bytes: bytes / neurons,
            read_gb_per_s: reads.bytes_per_ms / 1e6,
            request_us: reads.request_ms * 1e3,
            active: gathered.map(|gathered| gathered.active),
            at_most: gathered.map(|gathered| measured.speedup(gathered.share)),
            with_none: Some(measured.speedup(0.0)).filter(|speedup| speedup.is_finite()),
            worth_below: measured.most_active(reads, WORTH),
            obstacle: obstacle(analysis, &first.product),
        })
    }

    /// The report as text.
    pub fn text(&self) -> String {
        let times = |speedup: f64| digits(speedup, MEASURED);
        let none = self.with_none.map_or("any number of".to_owned(), times);
        let gain = gain(self.active.zip(self.at_most), &none);
        let worth = match self.worth_below {
            Some(active) => format!("; {WORTH} times needs at most {} active", percent(active)),
            None => String::new(),
        };
        let obstacle = self.obstacle.map(|obstacle| format!("; besides, {obstacle}")).unwrap_or_default();
        format!(
            "neurons that a ReLU switches off ({}, {} of the weights) are read from disk like all others: reading only active ones \
             (rows of {}, {} GB/s and {} us for each read) would make a token at most {gain}{worth}{obstacle}",
            self.blocks,
            percent(self.weight_share),
            ByteSize(self.row_bytes).human(),
            digits(self.read_gb_per_s, MEASURED),
            digits(self.request_us, 2)
        )
    }
}

/// The matrices of these blocks whose rows a ReLU switches off.
fn networks<'a>(analysis: &'a Analysis, blocks: &[usize]) -> Vec<Network<'a>> {
    let of_block = |block: &usize| {
        let block = &analysis.segmentation.blocks[*block];
        ReluProduct::of(&analysis.graph, block).into_iter().map(move |product| Network { block, product })
    };
    blocks.iter().flat_map(of_block).collect()
}

/// The share of neurons that a token of a profile's corpus makes active, and the time of reading only those over the time
/// of reading all, 0 to 1.
#[derive(Clone, Copy)]
struct Gathered {
    active: f64,
    share: f64,
}

/// `None` unless all networks were observed.
fn gathered(networks: &[Network<'_>], reads: ReadCosts, active: impl Fn(&str) -> Option<f64>) -> Option<Gathered> {
    let (mut all, mut sum) = (0.0, Gathered { active: 0.0, share: 0.0 });
    for Network { block, product } in networks {
        let active = active(&block.label)?;
        let bytes = product.all_bytes() as f64;
        all += bytes;
        sum.active += bytes * active;
        sum.share += bytes * reads.gathered_share(product.row_bytes() as f64, active);
    }
    Some(Gathered { active: sum.active / all, share: sum.share / all })
}

/// Why the rows of a matrix cannot be read one by one as kernels want it. `--active-neurons` stores all matrices that are not quantized so that
/// they could be.
fn obstacle(analysis: &Analysis, product: &ReluProduct) -> Option<&'static str> {
    let is_float32 = analysis.graph.value(product.weight).dtype == Some(DType::Float32);
    match product.layout {
        NeuronLayout::Quantized => Some("their numbers are quantized together with those of others"),
        _ if analysis.active_neurons.is_some() => None,
        NeuronLayout::Columns => Some("the model stores them as columns, whose numbers do not lie side by side"),
        NeuronLayout::Rows if !is_float32 => {
            Some("the CPU computes with a packed copy in 32 bits, in which they are not rows")
        }
        NeuronLayout::Rows if product.gated.is_some() => {
            Some("one of the two matrices is stored as columns, whose numbers do not lie side by side")
        }
        NeuronLayout::Rows => None,
    }
}

/// Text on the largest speedup of leaving out inactive neurons: with the active share that a profile found, if there is one, and with
/// `none` active.
fn gain(profiled: Option<(f64, f64)>, none: &str) -> String {
    match profiled {
        Some((active, at_most)) => {
            let (times, active) = (digits(at_most, MEASURED), percent(active));
            format!("{times} times as fast with {active} active (profile), {none} times with none")
        }
        None => format!("{none} times as fast with none active (a profile with a corpus says how many are)"),
    }
}

/// A share as percent; one decimal below 10 %.
fn percent(share: f64) -> String {
    let percent = 100.0 * share;
    format!("{percent:.*} %", usize::from(percent < 10.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_graph::{BlockKind, ClassId, NodeId, ValueId};

    fn block(label: &str) -> Block {
        let kind = BlockKind::Layer(0);
        let (nodes, states, weights) = (vec![], vec![], vec![]);
        Block { label: label.into(), kind, nodes, states, weights, class: ClassId(0), is_experts: false, shard: None }
    }

    #[test]
    fn activity_is_the_mean_over_bytes_and_unknown_if_one_layer_was_not_observed() {
        let blocks = [block("layers.0"), block("layers.1")];
        let product = |bytes| ReluProduct {
            node: NodeId(0),
            weight: ValueId(0),
            neurons: 10,
            bytes,
            gated: None,
            layout: NeuronLayout::Rows,
        };
        let networks = [
            Network { block: &blocks[0], product: product(1000) },
            Network { block: &blocks[1], product: product(3000) },
        ];
        let reads = ReadCosts { bytes_per_ms: 1000.0, request_ms: 0.0 };
        let of = |label: &str| Some(if label == "layers.0" { 0.4 } else { 0.2 });
        let found = gathered(&networks, reads, of).unwrap();
        assert!((found.active - 0.25).abs() < 1e-12 && (found.share - 0.25).abs() < 1e-12);
        assert!(gathered(&networks, reads, |label| of(label).filter(|_| label == "layers.0")).is_none());
        // A request as long as a row of the smaller matrix: gaps are read over.
        let slow = gathered(&networks, ReadCosts { request_ms: 0.1, ..reads }, of).unwrap();
        assert!(slow.share > found.share + 0.05, "{}", slow.share);
    }

    #[test]
    fn the_text_has_the_numbers_that_decide() {
        let report = NeuronReport {
            blocks: "layers.0-3".into(),
            weight_share: 0.331,
            row_bytes: 8192,
            read_gb_per_s: 3.3,
            request_us: 6.0,
            active: Some(0.168),
            at_most: Some(1.311),
            with_none: Some(1.8),
            worth_below: Some(0.083),
            obstacle: Some("they lie apart"),
        };
        let text = report.text();
        for words in [
            "layers.0-3, 33 % of the weights",
            "rows of 8 KiB, 3.30 GB/s and 6.0 us",
            "at most 1.31 times as fast with 17 % active (profile), 1.80 times with none",
            "1.5 times needs at most 8.3 % active; besides, they lie apart",
        ] {
            assert!(text.contains(words), "{words:?} is not in {text}");
        }
        let unknown =
            NeuronReport { active: None, at_most: None, worth_below: None, with_none: Some(1.4), ..report }.text();
        assert!(
            unknown.contains("at most 1.40 times as fast with none active (a profile") && !unknown.contains("needs"),
            "{unknown}"
        );
    }
}
