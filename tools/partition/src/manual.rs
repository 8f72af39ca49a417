//! Manual placement: `--gpu-layers N`, `--stream N` and `--assign 'layers.0-11=gpu,layers.12=stream,head=cpu'`.

use crate::{BlockRole, BlockSpec, DeviceId, KvHome, Placement, Problem};
use std::str::FromStr;

/// The last `count` layers on the GPUs, the rest on the host; a count above the number of layers puts every block on a GPU. Blocks that the
/// user keeps on the host stay there. Each GPU has a run of the chosen blocks, the first GPU the first run; the runs are as full as possible in
/// proportion to the GPUs' budgets.
pub fn gpu_layers(problem: &Problem, count: u64) -> Vec<DeviceId> {
    let blocks = &problem.blocks;
    let layers = blocks.iter().filter(|block| is_layer(block)).count() as u64;
    let mut from_the_end = 0;
    let mut chosen: Vec<usize> = (0..blocks.len())
        .rev()
        .filter(|at| {
            let block = &blocks[*at];
            from_the_end += u64::from(is_layer(block));
            let is_chosen = count > layers || (is_layer(block) && from_the_end <= count);
            is_chosen && !block.kept_on_host
        })
        .collect();
    chosen.reverse();
    let mut devices = vec![DeviceId::Cpu; blocks.len()];
    for (at, gpu) in chosen.iter().zip(shares(problem, &chosen)) {
        devices[*at] = DeviceId::Gpu(gpu);
    }
    devices
}

/// Bisections that find the share of the GPUs' budgets that blocks fill, to one part in 2^50.
const BISECTIONS: u32 = 50;

/// The GPU of each of these blocks, in order, so that the share of its budget that the fullest GPU uses is as small as possible. Weights that
/// several blocks read count for each of them, and slots for streamed weights do not count.
fn shares(problem: &Problem, chosen: &[usize]) -> Vec<usize> {
    let blocks = || chosen.iter().map(|at| &problem.blocks[*at]);
    let kv_bytes = |block: &BlockSpec| if problem.budget.kv == KvHome::Device { block.kv_bytes } else { 0 };
    let bytes: Vec<f64> = (chosen.iter().zip(blocks()))
        .map(|(at, block)| problem.weight_bytes(*at).saturating_add(kv_bytes(block)) as f64)
        .collect();
    let workspace = blocks().map(|block| block.workspace_bytes).max().unwrap_or(0);
    // Two staging buffers for states that are kept on the host.
    let staged = match problem.budget.kv {
        KvHome::Device => 0,
        KvHome::Host => chosen.iter().map(|at| 2 * problem.staged_state(*at)).max().unwrap_or(0),
    };
    let reserved = workspace.saturating_add(staged).saturating_add(problem.budget.margin);
    let budgets: Vec<f64> =
        problem.budget.vram.iter().map(|vram| vram.saturating_sub(reserved).max(1) as f64).collect();
    if budgets.len() < 2 {
        return vec![0; chosen.len()];
    }
    let filled = |share: f64| {
        let (mut gpu, mut used) = (0, 0.0);
        let next = |bytes: &f64| {
            while gpu < budgets.len() && used + bytes > share * budgets[gpu] {
                (gpu, used) = (gpu + 1, 0.0);
            }
            used += bytes;
            (gpu < budgets.len()).then_some(gpu)
        };
        bytes.iter().map(next).collect::<Option<Vec<usize>>>()
    };
    // The largest GPU alone holds all blocks with `enough` of its budget.
    let largest = budgets.iter().copied().fold(0.0, f64::max);
    let (mut too_little, mut enough) = (0.0, bytes.iter().sum::<f64>() / largest * 1.001);
    for _ in 0..BISECTIONS {
        let middle = f64::midpoint(too_little, enough);
        if filled(middle).is_some() { enough = middle } else { too_little = middle }
    }
    filled(enough).unwrap_or_else(|| vec![0; chosen.len()])
}

/// Changes up to `count` layers from the host to streaming to gpu0; returns their number. They are spread evenly and include the last
/// one, so that copies overlap with the host layers in between.
pub fn stream_layers(blocks: &[BlockSpec], placements: &mut [Placement], count: u64) -> usize {
    let on_host: Vec<usize> =
        (0..blocks.len()).filter(|at| is_layer(&blocks[*at]) && placements[*at] == Placement::Cpu).collect();
    let count = usize::try_from(count).unwrap_or(usize::MAX).min(on_host.len());
    for nth in 1..=count {
        placements[on_host[nth * on_host.len() / count - 1]] = Placement::Streamed(0);
    }
    count
}

/// Whether a block counts as a layer: the part of one that the user keeps on the host does not.
fn is_layer(block: &BlockSpec) -> bool {
    matches!(block.kind, BlockRole::Layer(_) | BlockRole::Other) && !block.kept_on_host
}

/// A list of `BLOCKS=DEVICE`; later entries override earlier ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assign(Vec<(String, Placement)>);

impl Assign {
    /// The first entry that names blocks of experts only, and a device other than the CPU.
    pub fn experts_elsewhere(&self) -> Option<&str> {
        let is_elsewhere =
            |(blocks, place): &&(String, Placement)| blocks.ends_with(".experts") && *place != Placement::Cpu;
        self.0.iter().find(is_elsewhere).map(|(blocks, _)| blocks.as_str())
    }
}

/// Why an assignment is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssignError {
    /// Syntax error.
    #[error("cannot read {0:?}: write BLOCKS=DEVICE, such as layers.0-11=gpu, head=cpu or all=gpu1:stream")]
    Syntax(String),
    /// It names no blocks.
    #[error("it is empty: write BLOCKS=DEVICE, such as layers.0-11=gpu, or leave --assign out")]
    Empty,
    /// Unknown device.
    #[error("{0:?} is not a device: write cpu, gpu, gpu0, gpu1, ..., or stream, gpu1:stream, ...")]
    Device(String),
    /// The range is reversed or exceeds the blocks of this model.
    #[error("the range {pattern:?} is not one of this model: {missing}; this model has {blocks}")]
    Range {
        /// The pattern.
        pattern: String,
        /// Why the range is invalid.
        missing: String,
        /// The blocks of the model.
        blocks: String,
    },
    /// The pattern names no block of this model.
    #[error("no block is called {pattern:?}{}; this model has {blocks}", meant(nearest))]
    NoBlock {
        /// The pattern.
        pattern: String,
        /// The block with the most similar name, if one is similar.
        nearest: Option<String>,
        /// The blocks of the model.
        blocks: String,
    },
}

impl FromStr for Assign {
    type Err = AssignError;
    fn from_str(text: &str) -> Result<Self, AssignError> {
        let entry = |part: &str| {
            let (blocks, device) = part.split_once('=').ok_or_else(|| AssignError::Syntax(part.to_owned()))?;
            let (blocks, device) = (blocks.trim(), device.trim());
            if blocks.is_empty() {
                return Err(AssignError::Syntax(part.to_owned()));
            }
            let placement = parse_placement(device).ok_or_else(|| AssignError::Device(device.to_owned()))?;
            Ok((blocks.to_owned(), placement))
        };
        let entries: Vec<_> =
            text.split(',').filter(|part| !part.trim().is_empty()).map(entry).collect::<Result<_, _>>()?;
        if entries.is_empty() { Err(AssignError::Empty) } else { Ok(Assign(entries)) }
    }
}

/// `cpu`, `gpu`, `gpu1`, `stream`, `gpu1:stream`.
fn parse_placement(device: &str) -> Option<Placement> {
    let gpu = |name: &str| match name.strip_prefix("gpu")? {
        "" => Some(0),
        index => index.parse().ok(),
    };
    match device {
        "cpu" => Some(Placement::Cpu),
        "stream" => Some(Placement::Streamed(0)),
        _ => match device.strip_suffix(":stream") {
            Some(name) => gpu(name).map(Placement::Streamed),
            None => gpu(device).map(Placement::Resident),
        },
    }
}

impl Assign {
    /// The placement of each block that this assignment names; `None` for the others.
    pub fn placements(&self, blocks: &[BlockSpec]) -> Result<Vec<Option<Placement>>, AssignError> {
        let mut placements = vec![None; blocks.len()];
        for (pattern, placement) in &self.0 {
            refuse_partial_ranges(pattern, blocks)?;
            let mut found = false;
            for (_, slot) in blocks.iter().zip(&mut placements).filter(|(block, _)| matches(pattern, block)) {
                *slot = Some(*placement);
                found = true;
            }
            if !found {
                let (nearest, blocks) = (nearest(pattern, blocks), summary(blocks));
                return Err(AssignError::NoBlock { pattern: pattern.clone(), nearest, blocks });
            }
        }
        Ok(placements)
    }

    /// The highest GPU index used, if any.
    pub fn highest_gpu(&self) -> Option<usize> {
        self.0.iter().filter_map(|(_, placement)| placement.gpu()).max()
    }

    /// Whether any block is streamed.
    pub fn streams(&self) -> bool {
        self.0.iter().any(|(_, placement)| matches!(placement, Placement::Streamed(_)))
    }
}

fn matches(pattern: &str, block: &BlockSpec) -> bool {
    let by_kind = match block.kind {
        BlockRole::Embedding => matches!(pattern, "embedding" | "embed" | "embed_tokens"),
        BlockRole::Head => matches!(pattern, "head" | "lm_head"),
        BlockRole::Layer(_) | BlockRole::Other => pattern == "layers",
    };
    let in_range = || {
        let (stem, range) = pattern.rsplit_once('.')?;
        let (own_stem, own) = block.label.rsplit_once('.')?;
        let (first, last) = range.split_once('-')?;
        let own: u64 = own.parse().ok()?;
        Some(stem == own_stem && (first.parse().ok()?..=last.parse().ok()?).contains(&own))
    };
    pattern == "all" || pattern == block.label || by_kind || in_range() == Some(true)
}

/// Refuses a range that is only partly in the model: `layers.0-99` of 24 layers is a mistake.
fn refuse_partial_ranges(pattern: &str, blocks: &[BlockSpec]) -> Result<(), AssignError> {
    let numbers = || {
        let (stem, range) = pattern.rsplit_once('.')?;
        let (first, last) = range.split_once('-')?;
        Some((stem, first.parse::<u64>().ok()?, last.parse::<u64>().ok()?))
    };
    let Some((stem, first, last)) = numbers() else { return Ok(()) };
    let is_there = |number: u64| blocks.iter().any(|block| block.label == format!("{stem}.{number}"));
    let missing = match [first, last].into_iter().find(|number| !is_there(*number)) {
        // If no block of the range exists, `NoBlock` reports the whole pattern.
        _ if !blocks.iter().any(|block| matches(pattern, block)) && first <= last => return Ok(()),
        None if first > last => "it ends before it begins".to_owned(),
        None => return Ok(()),
        Some(number) => format!("there is no {stem}.{number}"),
    };
    Err(AssignError::Range { pattern: pattern.to_owned(), missing, blocks: summary(blocks) })
}

/// The block with the most similar name, if it is similar enough.
fn nearest(pattern: &str, blocks: &[BlockSpec]) -> Option<String> {
    const SIMILAR: f64 = 0.8;
    let likeness = |block: &&BlockSpec| strsim::jaro_winkler(pattern, &block.label);
    let nearest = blocks.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)))?;
    (likeness(&nearest) >= SIMILAR).then(|| nearest.label.clone())
}

fn meant(nearest: &Option<String>) -> String {
    nearest.as_ref().map_or(String::new(), |name| format!(" (did you mean {name}?)"))
}

fn summary(blocks: &[BlockSpec]) -> String {
    let labels: Vec<&str> = blocks.iter().map(|block| block.label.as_str()).collect();
    match labels.as_slice() {
        [first, second, .., last] if labels.len() > 6 => format!("{first}, {second}, ... {last}"),
        _ => labels.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Budget;
    use crate::cost::tests::{dense, problem};

    fn text<P: ToString>(placements: &[P]) -> String {
        placements.iter().map(P::to_string).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn gpu_layers_counts_from_the_end() {
        let problem = problem(dense(3, 1000), Budget { vram: vec![1 << 20], ..Budget::default() });
        assert_eq!(text(&gpu_layers(&problem, 0)), "cpu cpu cpu cpu cpu");
        assert_eq!(text(&gpu_layers(&problem, 2)), "cpu cpu gpu0 gpu0 cpu");
        assert_eq!(text(&gpu_layers(&problem, 3)), "cpu gpu0 gpu0 gpu0 cpu");
        assert_eq!(text(&gpu_layers(&problem, 99)), "gpu0 gpu0 gpu0 gpu0 gpu0");
    }

    #[test]
    fn gpu_layers_fills_several_gpus_in_proportion_to_their_budgets() {
        // Six layers of 1000 bytes of weights and 250 of state; embedding and head have 2000 bytes each.
        let placed = |count, vram: &[u64]| {
            let budget = Budget { vram: vram.to_vec(), margin: 100, ..Budget::default() };
            text(&gpu_layers(&problem(dense(6, 1000), budget), count)).replace("gpu", "")
        };
        assert_eq!(placed(6, &[20_000, 20_000]), "cpu 0 0 0 1 1 1 cpu");
        assert_eq!(placed(6, &[20_000, 10_000]), "cpu 0 0 0 0 1 1 cpu");
        assert_eq!(placed(6, &[10_000, 20_000, 10_000]), "cpu 0 1 1 1 1 2 cpu");
        assert_eq!(placed(2, &[20_000, 20_000]), "cpu cpu cpu cpu cpu 0 1 cpu");
        assert_eq!(placed(99, &[u64::MAX, u64::MAX]), "0 0 0 0 1 1 1 1");
        // A GPU whose budget is less than its margin gets nothing.
        assert_eq!(placed(6, &[50, 20_000]), "cpu 1 1 1 1 1 1 cpu");
        // 3950 bytes beside margin and workspace hold three layers, and 2700 bytes hold two: five fit only so.
        assert_eq!(placed(5, &[2_900, 4_150]), "cpu cpu 0 0 1 1 1 cpu");
    }

    #[test]
    fn what_the_user_keeps_on_the_host_counts_as_no_layer() {
        let mut blocks = dense(3, 1000);
        blocks[2].kept_on_host = true;
        let problem = problem(blocks.clone(), Budget { vram: vec![1 << 20], ..Budget::default() });
        assert_eq!(text(&gpu_layers(&problem, 2)), "cpu gpu0 cpu gpu0 cpu");
        assert_eq!(text(&gpu_layers(&problem, 99)), "gpu0 gpu0 cpu gpu0 gpu0");
        let mut placements = vec![Placement::Cpu; 5];
        assert_eq!(stream_layers(&blocks, &mut placements, 9), 2);
        assert_eq!(text(&placements), "cpu streamed to gpu0 cpu streamed to gpu0 cpu");
    }

    /// The streamed layers of six, of which the last `resident` stay on the GPU.
    fn streamed(count: u64, resident: usize) -> (usize, Vec<usize>) {
        let blocks = dense(6, 1000);
        let mut placements = vec![Placement::Cpu; 8];
        placements[7 - resident..7].fill(Placement::Resident(0));
        let streamed = stream_layers(&blocks, &mut placements, count);
        (streamed, (0..8).filter(|at| placements[*at] == Placement::Streamed(0)).map(|at| at - 1).collect())
    }

    #[test]
    fn streamed_layers_are_spread_among_those_of_the_host() {
        assert_eq!(streamed(0, 0), (0, vec![]));
        assert_eq!(streamed(1, 0), (1, vec![5]));
        assert_eq!(streamed(2, 0), (2, vec![2, 5]));
        assert_eq!(streamed(3, 0), (3, vec![1, 3, 5]));
        assert_eq!(streamed(4, 0), (4, vec![0, 2, 3, 5]));
        assert_eq!(streamed(2, 2), (2, vec![1, 3]));
        assert_eq!(streamed(u64::MAX, 0), (6, (0..6).collect()));
        assert_eq!(streamed(3, 6), (0, vec![]));
    }

    #[test]
    fn assignments_apply_in_order() {
        let blocks = dense(4, 1000);
        let placements = |text: &str| text.parse::<Assign>().unwrap().placements(&blocks).unwrap();
        let all_placements = |text: &str| placements(text).into_iter().map(Option::unwrap).collect::<Vec<_>>();
        assert_eq!(text(&all_placements("all=gpu, layers.1-2=cpu, lm_head = gpu1")), "gpu0 gpu0 cpu cpu gpu0 gpu1");
        let streamed = "all=cpu,layers.1=stream,layers.2=gpu:stream,head=gpu1:stream";
        assert_eq!(text(&all_placements(streamed)), "cpu cpu streamed to gpu0 streamed to gpu0 cpu streamed to gpu1");
        assert_eq!(placements("layers.0=cpu")[..3], [None, Some(Placement::Cpu), None]);
        let assign: Assign = "all=gpu,head=gpu2:stream".parse().unwrap();
        assert_eq!((assign.highest_gpu(), assign.streams()), (Some(2), true));
        assert!(!"all=gpu".parse::<Assign>().unwrap().streams());
    }

    #[test]
    fn mistakes_are_named() {
        let blocks = dense(2, 1000);
        assert!(matches!("layers.0".parse::<Assign>(), Err(AssignError::Syntax(_))));
        assert!(matches!("=gpu".parse::<Assign>(), Err(AssignError::Syntax(_))));
        for device in ["tpu", "gpux", "cpu:stream", "gpu0:streams", "streamed"] {
            assert!(matches!(format!("all={device}").parse::<Assign>(), Err(AssignError::Device(_))), "{device}");
        }
        let refused = |text: &str| text.parse::<Assign>().unwrap().placements(&blocks).unwrap_err().to_string();
        assert!(refused("layers.7=gpu").contains("layers.1"));
        assert!(refused("layer.1=gpu").contains("did you mean layers.1?"));
        assert!(!refused("xyz=gpu").contains("did you mean"));
        assert!(refused("layers.0-99=gpu").contains("there is no layers.99"));
        assert!(refused("layers.1-0=gpu").contains("ends before it begins"));
        assert!(refused("layers.7-9=gpu").contains("layers.1"));
        assert!("layers.0-1=gpu".parse::<Assign>().unwrap().placements(&blocks).is_ok());
    }
}
