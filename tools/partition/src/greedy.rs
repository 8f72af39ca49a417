//! The greedy planner: grow one contiguous run of blocks on the GPUs, hottest neighbour first, while it fits.
//!
//! Hotness is milliseconds saved per byte of device memory. In a dense model it is the same for every layer, so what
//! grows is decided by the ends: the head (large and read whole for each token) pulls the run to the end of the model,
//! and the embedding (a table of which one row is read) stays on the host.

use crate::{Block, Budget, Choice, Mechanisms, NoFit, Phase, Place, Problem, Rates, Where, block_hotness, check};
use std::ops::Range;

/// Milliseconds saved per byte of device memory, with the terms it is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Hotness {
    /// Decode time on the host, milliseconds.
    pub cpu_ms: f64,
    /// Decode time on a device, milliseconds.
    pub gpu_ms: f64,
    /// Weights the device would hold, bytes.
    pub weight_bytes: u64,
    /// State the device would hold, bytes.
    pub kv_bytes: u64,
}

impl Hotness {
    /// `(cpu_ms - gpu_ms) / (weight_bytes + kv_bytes)`.
    pub fn score(&self) -> f64 {
        (self.cpu_ms - self.gpu_ms) / (self.weight_bytes + self.kv_bytes).max(1) as f64
    }
}

/// How much a block gains from a device.
pub fn hotness(block: &Block, rates: &Rates) -> Hotness {
    Hotness {
        cpu_ms: rates.ms(block.decode, Place::Cpu),
        gpu_ms: rates.ms(block.decode, Place::Gpu(0)),
        weight_bytes: block.weights.iter().map(|(_, bytes)| bytes).sum(),
        kv_bytes: block.kv_bytes,
    }
}

/// Places blocks greedily and contiguously. Fails when not even the hottest block fits, or the host cannot hold the rest.
pub fn greedy(blocks: &[Block], budget: &Budget, rates: &Rates) -> Result<Vec<Place>, NoFit> {
    let gain: Vec<f64> = blocks.iter().map(|block| hotness(block, rates).score()).collect();
    let places = grow(blocks, budget, &gain)?;
    check(blocks, &places, budget)?;
    Ok(places)
}

/// The same by a problem's own costs of decoding, host memory apart.
pub(crate) fn grown(problem: &Problem) -> Result<Vec<Choice>, NoFit> {
    let mut gain = vec![0.0; problem.blocks.len()];
    if !problem.gpus.is_empty() {
        gain = block_hotness(problem, 0, Phase::Decode).iter().map(Hotness::score).collect();
    }
    for (block, gain) in gain.iter_mut().enumerate() {
        let choices = problem.choices(block, Mechanisms::ResidentCpu);
        if !(0..problem.gpus.len()).all(|gpu| choices.contains(&Choice::both(Where::Resident(gpu)))) {
            *gain = 0.0;
        }
    }
    let choice = |place: Place| match place {
        Place::Cpu => Choice::both(Where::Cpu),
        Place::Gpu(gpu) => Choice::both(Where::Resident(gpu)),
    };
    Ok(grow(&problem.blocks, &problem.budget, &gain)?.into_iter().map(choice).collect())
}

/// Grows a run from the hottest block that fits. `gain` is each block's hotness.
fn grow(blocks: &[Block], budget: &Budget, gain: &[f64]) -> Result<Vec<Place>, NoFit> {
    if budget.vram.is_empty() {
        return Ok(vec![Place::Cpu; blocks.len()]);
    }
    let devices_only = Budget { ram: None, ..budget.clone() };
    let mut order: Vec<usize> = (0..blocks.len()).filter(|i| gain[*i] > 0.0).collect();
    order.sort_by(|a, b| gain[*b].total_cmp(&gain[*a]).then(b.cmp(a)));
    let mut refusal = None;
    for start in order {
        match fill(blocks, start..start + 1, &devices_only) {
            Ok(places) => return Ok(extend(blocks, start..start + 1, places, &devices_only, gain)),
            Err(no_fit) => refusal = smaller(refusal, no_fit),
        }
    }
    refusal.map_or_else(|| Ok(vec![Place::Cpu; blocks.len()]), Err)
}

fn smaller(a: Option<NoFit>, b: NoFit) -> Option<NoFit> {
    match a {
        Some(a) if a.smallest() <= b.smallest() => Some(a),
        _ => Some(b),
    }
}

/// Adds the better neighbour that fits and gains, until none does.
fn extend(
    blocks: &[Block],
    mut run: Range<usize>,
    mut places: Vec<Place>,
    budget: &Budget,
    gain: &[f64],
) -> Vec<Place> {
    loop {
        let mut wider: Vec<(f64, Range<usize>)> = Vec::new();
        if run.end < blocks.len() {
            wider.push((gain[run.end], run.start..run.end + 1));
        }
        if run.start > 0 {
            wider.push((gain[run.start - 1], run.start - 1..run.end));
        }
        wider.sort_by(|a, b| b.0.total_cmp(&a.0));
        let grown = wider.into_iter().filter(|(gain, _)| *gain > 0.0).find_map(|(_, wide)| {
            let places = fill(blocks, wide.clone(), budget).ok()?;
            Some((wide, places))
        });
        match grown {
            Some((wide, filled)) => (run, places) = (wide, filled),
            None => return places,
        }
    }
}

/// Puts `run` on gpu0 until it is full, then gpu1, and so on; everything else on the host.
fn fill(blocks: &[Block], run: Range<usize>, budget: &Budget) -> Result<Vec<Place>, NoFit> {
    let mut places = vec![Place::Cpu; blocks.len()];
    let mut gpu = 0;
    for i in run {
        places[i] = Place::Gpu(gpu);
        while let Err(no_fit) = check(blocks, &places, budget) {
            gpu += 1;
            if gpu >= budget.vram.len() {
                return Err(no_fit);
            }
            places[i] = Place::Gpu(gpu);
        }
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::tests::dense;
    use proptest::prelude::*;

    fn gpus(places: &[Place]) -> Vec<usize> {
        (0..places.len()).filter(|i| places[*i] != Place::Cpu).collect()
    }

    #[test]
    fn everything_that_gains_goes_to_a_large_gpu() {
        let blocks = dense(6, 1 << 20);
        let budget = Budget { vram: vec![1 << 30], ..Budget::default() };
        let places = greedy(&blocks, &budget, &Rates::ASSUMED).unwrap();
        assert_eq!(gpus(&places), vec![1, 2, 3, 4, 5, 6, 7]);
    }

    #[test]
    fn a_small_gpu_holds_the_head_and_the_last_layers() {
        let blocks = dense(6, 1 << 20);
        let budget = Budget { vram: vec![5 << 20], ..Budget::default() };
        let places = greedy(&blocks, &budget, &Rates::ASSUMED).unwrap();
        assert_eq!(gpus(&places), vec![5, 6, 7]);
    }

    #[test]
    fn a_second_gpu_takes_what_the_first_cannot() {
        let blocks = dense(6, 1 << 20);
        let budget = Budget { vram: vec![4 << 20, 5 << 20], ..Budget::default() };
        let places = greedy(&blocks, &budget, &Rates::ASSUMED).unwrap();
        let text: Vec<String> = places.iter().map(Place::to_string).collect();
        assert_eq!(text.join(" "), "cpu cpu gpu0 gpu0 gpu0 gpu1 gpu1 gpu1");
    }

    #[test]
    fn a_gpu_too_small_for_any_block_is_refused_with_the_budget_that_would_do() {
        let blocks = dense(6, 1 << 20);
        let budget = Budget { vram: vec![1 << 10], ..Budget::default() };
        let error = greedy(&blocks, &budget, &Rates::ASSUMED).unwrap_err();
        let enough = Budget { vram: vec![error.smallest()], ..Budget::default() };
        assert_eq!(gpus(&greedy(&blocks, &enough, &Rates::ASSUMED).unwrap()).len(), 1);
    }

    proptest! {
        #[test]
        fn placements_fit_and_are_one_run(layers in 1u32..12, vram in 1u64..40, second in 0u64..20, margin in 0u64..3) {
            let mib = 1 << 20;
            let blocks = dense(layers, mib);
            let mut budget = Budget { vram: vec![vram * mib / 2], margin: margin * mib, ..Budget::default() };
            if second > 0 { budget.vram.push(second * mib / 2) }
            if let Ok(places) = greedy(&blocks, &budget, &Rates::ASSUMED) {
                prop_assert!(check(&blocks, &places, &budget).is_ok());
                let on = gpus(&places);
                prop_assert!(!on.is_empty());
                prop_assert!(on.windows(2).all(|pair| pair[1] == pair[0] + 1));
            }
        }
    }
}
