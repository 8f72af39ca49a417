//! Collects statistics of one text from the tapped tensors of its passes.

use super::experts::Experts;
use super::hidden::{Influence, Moments};
use super::layers::{Entropy, Neurons};
use super::rows::{Rows, wrong};
use hpp_engine::{EngineError, HostTensor, NamedTensors};
use hpp_schema::Statistics;
use hpp_schema::probe::{Tap, TapKind};

/// The hidden state at the end of a block.
struct BoundaryTap {
    block: String,
    /// Tensors whose sum is the hidden state.
    taps: Vec<String>,
    moments: Moments,
    influence: Influence,
    /// Whether the previous tapped block is the one before it in the model, so that its hidden state is this block's input.
    follows: bool,
}

/// A tensor inside a block.
struct LayerTap {
    block: String,
    tap: String,
    counter: TapCounter,
}

/// What a tapped tensor of a layer holds, and the counts made from it.
enum TapCounter {
    /// Router scores; the best `top_k` are selected.
    Scores {
        top_k: u32,
        selected: Experts,
    },
    /// Indices of the selected experts. The layer has `experts` in all.
    Indices {
        experts: u32,
        selected: Experts,
    },
    Neurons(Neurons),
    Attention(Entropy),
}

/// The statistics of one text.
pub(super) struct Collector {
    boundaries: Vec<BoundaryTap>,
    layers: Vec<LayerTap>,
    tokens: u64,
    previous: Rows,
    rows: Rows,
    addend: Rows,
}

impl Collector {
    /// For these taps of a model with these blocks, both in execution order.
    pub fn new(taps: &[Tap], blocks: &[String]) -> Self {
        let mut boundaries: Vec<BoundaryTap> = Vec::new();
        let mut layers = Vec::new();
        for tap in taps {
            let counter = match tap.kind {
                TapKind::Boundary => {
                    add_boundary(&mut boundaries, tap, blocks);
                    continue;
                }
                TapKind::RouterScores { top_k } => TapCounter::Scores { top_k, selected: Experts::default() },
                TapKind::RoutedExperts { experts } => TapCounter::Indices { experts, selected: Experts::default() },
                TapKind::Neurons => TapCounter::Neurons(Neurons::default()),
                TapKind::Attention => TapCounter::Attention(Entropy::default()),
            };
            layers.push(LayerTap { block: tap.block.clone(), tap: tap.name.clone(), counter });
        }
        let (previous, rows, addend) = Default::default();
        Collector { boundaries, layers, tokens: 0, previous, rows, addend }
    }

    /// Adds the tapped tensors of a pass with this many new tokens.
    pub fn add_pass(&mut self, taps: &NamedTensors, tokens: usize) -> Result<(), EngineError> {
        self.tokens += tokens as u64;
        let Collector { boundaries, layers, previous, rows, addend, .. } = self;
        for boundary in boundaries {
            std::mem::swap(previous, rows);
            boundary.read(taps, tokens, rows, addend)?;
            boundary.moments.add(&rows.values);
            if boundary.follows && previous.width == rows.width {
                previous.iter().zip(rows.iter()).for_each(|(a, b)| boundary.influence.add(a, b));
            }
        }
        layers.iter_mut().try_for_each(|layer| layer.count(taps, tokens, rows))
    }

    /// The record for a profile; empty if there was no token.
    pub fn statistics(self) -> Statistics {
        let mut all = Statistics::default();
        if self.tokens == 0 {
            return all;
        }
        all.prompts = 1;
        for b in &self.boundaries {
            all.boundaries.push(b.moments.statistics(&b.block));
            if b.follows {
                all.influence.push(b.influence.statistics(&b.block));
            }
        }
        for LayerTap { block, counter, .. } in self.layers {
            match counter {
                TapCounter::Scores { selected, .. } | TapCounter::Indices { selected, .. } => {
                    all.experts.push(selected.statistics(&block));
                }
                TapCounter::Neurons(neurons) => all.neurons.push(neurons.statistics(&block)),
                TapCounter::Attention(entropy) => all.attention.push(entropy.statistics(&block)),
            }
        }
        all
    }
}

/// Adds a tap to the boundary of its block, or adds a boundary.
fn add_boundary(boundaries: &mut Vec<BoundaryTap>, tap: &Tap, blocks: &[String]) {
    let position = |block: &str| blocks.iter().position(|other| other == block);
    let last = boundaries.last_mut();
    let previous = last.as_ref().and_then(|last| position(&last.block));
    match last {
        Some(last) if last.block == tap.block => last.taps.push(tap.name.clone()),
        _ => boundaries.push(BoundaryTap {
            block: tap.block.clone(),
            taps: vec![tap.name.clone()],
            moments: Moments::default(),
            influence: Influence::default(),
            follows: previous.is_some_and(|previous| position(&tap.block) == Some(previous + 1)),
        }),
    }
}

impl BoundaryTap {
    /// Reads the hidden state of the last `tokens` tokens into `rows`.
    fn read(&self, taps: &NamedTensors, tokens: usize, rows: &mut Rows, addend: &mut Rows) -> Result<(), EngineError> {
        for (number, tap) in self.taps.iter().enumerate() {
            let tensor = tapped(taps, tap)?;
            if number == 0 {
                rows.read(tap, tensor, tokens)?;
            } else {
                addend.read(tap, tensor, tokens)?;
                rows.add(tap, addend)?;
            }
        }
        Ok(())
    }
}

impl LayerTap {
    fn count(&mut self, taps: &NamedTensors, tokens: usize, rows: &mut Rows) -> Result<(), EngineError> {
        let (name, tensor) = (&self.tap, tapped(taps, &self.tap)?);
        match &mut self.counter {
            TapCounter::Scores { top_k, selected } => {
                rows.read(name, tensor, tokens)?;
                selected.add_scores(name, rows.iter(), rows.width, *top_k as usize)
            }
            TapCounter::Indices { experts, selected } => selected.add_indices(name, tensor, tokens, *experts as usize),
            TapCounter::Neurons(neurons) => {
                rows.read(name, tensor, tokens)?;
                rows.iter().for_each(|row| neurons.add(row));
                Ok(())
            }
            TapCounter::Attention(entropy) => {
                rows.read_all(name, tensor)?;
                entropy.add(name, tensor, &rows.values, tokens)
            }
        }
    }
}

fn tapped<'a>(taps: &'a NamedTensors, name: &str) -> Result<&'a HostTensor, EngineError> {
    taps.get(name).ok_or_else(|| wrong(name, "the pass has no such tap".into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tap(name: &str, block: &str, kind: TapKind) -> Tap {
        Tap { name: name.into(), block: block.into(), kind }
    }

    fn blocks(labels: &[&str]) -> Vec<String> {
        labels.iter().map(|label| (*label).to_owned()).collect()
    }

    fn named(tensors: &[(&str, &[u64], &[f32])]) -> NamedTensors {
        let tensor =
            |(name, shape, values): &(&str, &[u64], &[f32])| ((*name).to_owned(), HostTensor::from_f32(shape, values));
        tensors.iter().map(tensor).collect()
    }

    #[test]
    fn the_hidden_state_is_the_sum_of_a_blocks_tensors() {
        let taps = [
            tap("e", "embedding", TapKind::Boundary),
            tap("r", "layers.0", TapKind::Boundary),
            tap("m", "layers.0", TapKind::Boundary),
        ];
        let mut collector = Collector::new(&taps, &blocks(&["embedding", "layers.0", "head"]));
        let shape: &[u64] = &[1, 2, 2];
        collector
            .add_pass(
                &named(&[("e", shape, &[1., 0., 1., 0.]), ("r", shape, &[1., 0., 0., 3.]), ("m", shape, &[0.; 4])]),
                2,
            )
            .unwrap();
        collector
            .add_pass(
                &named(&[("e", &[1, 1, 2], &[0., 1.]), ("r", &[1, 1, 2], &[1., 0.]), ("m", &[1, 1, 2], &[-1., -1.])]),
                1,
            )
            .unwrap();
        let s = collector.statistics();
        assert_eq!((s.prompts, s.boundaries.len(), s.influence.len()), (1, 2, 1));
        assert_eq!((s.boundaries[1].elements, s.boundaries[1].max_abs, s.boundaries[1].mean_abs), (6, 3.0, 5.0 / 6.0));
        assert_eq!((s.influence[0].block.as_str(), s.influence[0].tokens, s.influence[0].mean), ("layers.0", 3, 1.0));
    }

    #[test]
    fn influence_needs_the_previous_boundary() {
        let taps = [tap("a", "embedding", TapKind::Boundary), tap("c", "layers.1", TapKind::Boundary)];
        let mut collector = Collector::new(&taps, &blocks(&["embedding", "layers.0", "layers.1"]));
        collector.add_pass(&named(&[("a", &[1, 2], &[1., 0.]), ("c", &[1, 2], &[1., 0.])]), 1).unwrap();
        assert!(collector.statistics().influence.is_empty());
    }

    #[test]
    fn recomputed_tokens_are_counted_once() {
        let taps = [
            tap("n", "layers.0", TapKind::Neurons),
            tap("s", "layers.0", TapKind::RouterScores { top_k: 1 }),
            tap("b", "layers.0", TapKind::Boundary),
        ];
        let mut collector = Collector::new(&taps, &blocks(&["layers.0"]));
        for total in 1..=3u64 {
            let n = total as usize;
            let numbers: Vec<f32> = (0..2 * n).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
            let shape = [1, total, 2];
            let tensors = [("n", &shape[..], &numbers[..]), ("s", &shape[1..], &numbers), ("b", &shape, &numbers)];
            collector.add_pass(&named(&tensors), 1).unwrap();
        }
        let s = collector.statistics();
        assert_eq!((s.neurons[0].tokens, &s.neurons[0].active[..]), (3, &[3, 0][..]));
        assert_eq!((s.experts[0].tokens, &s.experts[0].counts[..]), (3, &[3, 0][..]));
        assert_eq!(s.boundaries[0].elements, 6);
    }

    #[test]
    fn without_tokens_there_are_no_statistics() {
        let taps = [tap("n", "layers.0", TapKind::Neurons)];
        assert_eq!(Collector::new(&taps, &[]).statistics(), Statistics::default());
        assert!(
            Collector::new(&taps, &[])
                .add_pass(&NamedTensors::new(), 1)
                .unwrap_err()
                .to_string()
                .contains("no such tap")
        );
    }
}
