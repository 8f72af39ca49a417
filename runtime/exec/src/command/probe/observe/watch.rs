//! From what a pass left in the taps to what is counted: one watch for each text.

use super::experts::Experts;
use super::hidden::{Influence, Moments};
use super::layers::{Entropy, Neurons};
use super::rows::{Rows, wrong};
use hpp_engine::{EngineError, HostTensor, NamedTensors};
use hpp_schema::Statistics;
use hpp_schema::probe::{Tap, TapKind};

/// The hidden state where a block ends.
struct Boundary {
    block: String,
    /// Tensors whose sum it is.
    taps: Vec<String>,
    moments: Moments,
    influence: Influence,
    /// The block before it in the model is watched too, so that there is an input to compare with.
    follows: bool,
}

/// A tensor inside a block.
struct Inside {
    block: String,
    tap: String,
    counts: Counts,
}

enum Counts {
    Scores(u32, Experts),
    Indices(u32, Experts),
    Neurons(Neurons),
    Attention(Entropy),
}

/// Everything counted of one text.
pub(super) struct Watch {
    boundaries: Vec<Boundary>,
    inside: Vec<Inside>,
    tokens: u64,
    before: Rows,
    rows: Rows,
    addend: Rows,
}

impl Watch {
    /// Over these taps of a model with these blocks, both in execution order.
    pub fn new(taps: &[Tap], blocks: &[String]) -> Self {
        let mut boundaries: Vec<Boundary> = Vec::new();
        let mut inside = Vec::new();
        for tap in taps {
            let counts = match tap.kind {
                TapKind::Boundary => {
                    join(&mut boundaries, tap, blocks);
                    continue;
                }
                TapKind::RouterScores { top_k } => Counts::Scores(top_k, Experts::default()),
                TapKind::RoutedExperts { experts } => Counts::Indices(experts, Experts::default()),
                TapKind::Neurons => Counts::Neurons(Neurons::default()),
                TapKind::Attention => Counts::Attention(Entropy::default()),
            };
            inside.push(Inside { block: tap.block.clone(), tap: tap.name.clone(), counts });
        }
        let (before, rows, addend) = Default::default();
        Watch { boundaries, inside, tokens: 0, before, rows, addend }
    }

    /// Counts what a pass with this many new tokens left.
    pub fn pass(&mut self, left: &NamedTensors, tokens: usize) -> Result<(), EngineError> {
        self.tokens += tokens as u64;
        let Watch { boundaries, inside, before, rows, addend, .. } = self;
        for boundary in boundaries {
            std::mem::swap(before, rows);
            boundary.read(left, tokens, rows, addend)?;
            boundary.moments.add(&rows.values);
            if boundary.follows && before.width == rows.width {
                before.iter().zip(rows.iter()).for_each(|(a, b)| boundary.influence.add(a, b));
            }
        }
        inside.iter_mut().try_for_each(|inside| inside.count(left, tokens, rows))
    }

    /// As a profile records it; nothing at all where no token was seen.
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
        for Inside { block, counts, .. } in self.inside {
            match counts {
                Counts::Scores(_, experts) | Counts::Indices(_, experts) => {
                    all.experts.push(experts.statistics(&block));
                }
                Counts::Neurons(neurons) => all.neurons.push(neurons.statistics(&block)),
                Counts::Attention(entropy) => all.attention.push(entropy.statistics(&block)),
            }
        }
        all
    }
}

/// Adds a tap to the boundary of its block, or begins one.
fn join(boundaries: &mut Vec<Boundary>, tap: &Tap, blocks: &[String]) {
    let at = |block: &str| blocks.iter().position(|other| other == block);
    let last = boundaries.last_mut();
    let before = last.as_ref().and_then(|last| at(&last.block));
    match last {
        Some(last) if last.block == tap.block => last.taps.push(tap.name.clone()),
        _ => boundaries.push(Boundary {
            block: tap.block.clone(),
            taps: vec![tap.name.clone()],
            moments: Moments::default(),
            influence: Influence::default(),
            follows: before.is_some_and(|before| at(&tap.block) == Some(before + 1)),
        }),
    }
}

impl Boundary {
    fn read(&self, left: &NamedTensors, tokens: usize, rows: &mut Rows, addend: &mut Rows) -> Result<(), EngineError> {
        for (at, tap) in self.taps.iter().enumerate() {
            let tensor = tapped(left, tap)?;
            if at == 0 {
                rows.read(tap, tensor, tokens)?;
            } else {
                addend.read(tap, tensor, tokens)?;
                rows.add(tap, addend)?;
            }
        }
        Ok(())
    }
}

impl Inside {
    fn count(&mut self, left: &NamedTensors, tokens: usize, rows: &mut Rows) -> Result<(), EngineError> {
        let (name, tensor) = (&self.tap, tapped(left, &self.tap)?);
        match &mut self.counts {
            Counts::Scores(top_k, experts) => {
                rows.read(name, tensor, tokens)?;
                experts.add_scores(name, rows.iter(), rows.width, *top_k as usize)
            }
            Counts::Indices(experts, counts) => counts.add_indices(name, tensor, tokens, *experts as usize),
            Counts::Neurons(neurons) => {
                rows.read(name, tensor, tokens)?;
                rows.iter().for_each(|row| neurons.add(row));
                Ok(())
            }
            Counts::Attention(entropy) => {
                rows.read_all(name, tensor)?;
                entropy.add(name, tensor, &rows.values, tokens)
            }
        }
    }
}

fn tapped<'a>(left: &'a NamedTensors, name: &str) -> Result<&'a HostTensor, EngineError> {
    left.get(name).ok_or_else(|| wrong(name, "the pass left nothing there".into()))
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

    fn left(tensors: &[(&str, &[u64], &[f32])]) -> NamedTensors {
        let tensor =
            |(name, shape, values): &(&str, &[u64], &[f32])| ((*name).to_owned(), HostTensor::from_f32(shape, values));
        tensors.iter().map(tensor).collect()
    }

    #[test]
    fn two_tensors_carry_one_hidden_state() {
        let taps = [
            tap("e", "embedding", TapKind::Boundary),
            tap("r", "layers.0", TapKind::Boundary),
            tap("m", "layers.0", TapKind::Boundary),
        ];
        let mut watch = Watch::new(&taps, &blocks(&["embedding", "layers.0", "head"]));
        let shape: &[u64] = &[1, 2, 2];
        watch
            .pass(&left(&[("e", shape, &[1., 0., 1., 0.]), ("r", shape, &[1., 0., 0., 3.]), ("m", shape, &[0.; 4])]), 2)
            .unwrap();
        watch
            .pass(
                &left(&[("e", &[1, 1, 2], &[0., 1.]), ("r", &[1, 1, 2], &[1., 0.]), ("m", &[1, 1, 2], &[-1., -1.])]),
                1,
            )
            .unwrap();
        let s = watch.statistics();
        assert_eq!((s.prompts, s.boundaries.len(), s.influence.len()), (1, 2, 1));
        assert_eq!((s.boundaries[1].elements, s.boundaries[1].max_abs, s.boundaries[1].mean_abs), (6, 3.0, 5.0 / 6.0));
        assert_eq!((s.influence[0].block.as_str(), s.influence[0].tokens, s.influence[0].mean), ("layers.0", 3, 1.0));
    }

    #[test]
    fn influence_needs_the_boundary_just_before() {
        let taps = [tap("a", "embedding", TapKind::Boundary), tap("c", "layers.1", TapKind::Boundary)];
        let mut watch = Watch::new(&taps, &blocks(&["embedding", "layers.0", "layers.1"]));
        watch.pass(&left(&[("a", &[1, 2], &[1., 0.]), ("c", &[1, 2], &[1., 0.])]), 1).unwrap();
        assert!(watch.statistics().influence.is_empty());
    }

    #[test]
    fn a_model_that_computes_everything_again_is_counted_once() {
        let taps = [
            tap("n", "layers.0", TapKind::Neurons),
            tap("s", "layers.0", TapKind::RouterScores { top_k: 1 }),
            tap("b", "layers.0", TapKind::Boundary),
        ];
        let mut watch = Watch::new(&taps, &blocks(&["layers.0"]));
        for total in 1..=3u64 {
            let n = total as usize;
            let numbers: Vec<f32> = (0..2 * n).map(|i| if i % 2 == 0 { 1.0 } else { -1.0 }).collect();
            let shape = [1, total, 2];
            let tensors = [("n", &shape[..], &numbers[..]), ("s", &shape[1..], &numbers), ("b", &shape, &numbers)];
            watch.pass(&left(&tensors), 1).unwrap();
        }
        let s = watch.statistics();
        assert_eq!((s.neurons[0].tokens, &s.neurons[0].active[..]), (3, &[3, 0][..]));
        assert_eq!((s.experts[0].tokens, &s.experts[0].counts[..]), (3, &[3, 0][..]));
        assert_eq!(s.boundaries[0].elements, 6);
    }

    #[test]
    fn nothing_seen_is_nothing_said() {
        let taps = [tap("n", "layers.0", TapKind::Neurons)];
        assert_eq!(Watch::new(&taps, &[]).statistics(), Statistics::default());
        assert!(Watch::new(&taps, &[]).pass(&NamedTensors::new(), 1).unwrap_err().to_string().contains("left nothing"));
    }
}
