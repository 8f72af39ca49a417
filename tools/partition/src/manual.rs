//! Placement by hand: `--gpu-layers N` and `--assign 'layers.0-11=gpu,head=cpu'`.

use crate::{Block, BlockKind, Place};
use std::str::FromStr;

/// The last `count` layers on gpu0, the rest on the host; more than there are puts every block on gpu0.
pub fn gpu_layers(blocks: &[Block], count: u64) -> Vec<Place> {
    let layers =
        blocks.iter().filter(|block| matches!(block.kind, BlockKind::Layer(_) | BlockKind::Other)).count() as u64;
    if count > layers {
        return vec![Place::Gpu(0); blocks.len()];
    }
    let mut from_the_end = 0;
    let mut places: Vec<Place> = (blocks.iter().rev())
        .map(|block| {
            let layer = matches!(block.kind, BlockKind::Layer(_) | BlockKind::Other);
            from_the_end += u64::from(layer);
            if layer && from_the_end <= count { Place::Gpu(0) } else { Place::Cpu }
        })
        .collect();
    places.reverse();
    places
}

/// A list of `BLOCKS=DEVICE`, later ones winning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Assign(Vec<(String, Place)>);

/// What is wrong with an assignment.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssignError {
    /// Not of the form.
    #[error("cannot read {0:?}: write BLOCKS=DEVICE, such as layers.0-11=gpu, head=cpu or all=gpu1")]
    Form(String),
    /// The device is not one.
    #[error("{0:?} is not a device: write cpu, gpu, gpu0, gpu1, ...")]
    Device(String),
    /// The pattern names no block of this model.
    #[error("no block is called {pattern:?}; this model has {blocks}")]
    NoBlock {
        /// What was asked for.
        pattern: String,
        /// What there is.
        blocks: String,
    },
}

impl FromStr for Assign {
    type Err = AssignError;
    fn from_str(text: &str) -> Result<Self, AssignError> {
        let entry = |part: &str| {
            let (blocks, device) = part.split_once('=').ok_or_else(|| AssignError::Form(part.to_owned()))?;
            let (blocks, device) = (blocks.trim(), device.trim());
            if blocks.is_empty() {
                return Err(AssignError::Form(part.to_owned()));
            }
            let place = match device.strip_prefix("gpu") {
                Some("") => Some(Place::Gpu(0)),
                Some(index) => index.parse().ok().map(Place::Gpu),
                None => (device == "cpu").then_some(Place::Cpu),
            };
            Ok((blocks.to_owned(), place.ok_or_else(|| AssignError::Device(device.to_owned()))?))
        };
        text.split(',').filter(|part| !part.trim().is_empty()).map(entry).collect::<Result<_, _>>().map(Assign)
    }
}

impl Assign {
    /// Moves the blocks this assignment names.
    pub fn apply(&self, blocks: &[Block], places: &mut [Place]) -> Result<(), AssignError> {
        for (pattern, place) in &self.0 {
            let mut found = false;
            for (_, slot) in blocks.iter().zip(places.iter_mut()).filter(|(block, _)| matches(pattern, block)) {
                *slot = *place;
                found = true;
            }
            if !found {
                let blocks = summary(blocks);
                return Err(AssignError::NoBlock { pattern: pattern.clone(), blocks });
            }
        }
        Ok(())
    }

    /// The highest GPU index used, if any.
    pub fn highest_gpu(&self) -> Option<usize> {
        self.0.iter().filter_map(|(_, place)| if let Place::Gpu(i) = place { Some(*i) } else { None }).max()
    }
}

fn matches(pattern: &str, block: &Block) -> bool {
    let by_kind = match block.kind {
        BlockKind::Embedding => matches!(pattern, "embedding" | "embed" | "embed_tokens"),
        BlockKind::Head => matches!(pattern, "head" | "lm_head"),
        BlockKind::Layer(_) | BlockKind::Other => pattern == "layers",
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

fn summary(blocks: &[Block]) -> String {
    let labels: Vec<&str> = blocks.iter().map(|block| block.label.as_str()).collect();
    match labels.as_slice() {
        [first, second, .., last] if labels.len() > 6 => format!("{first}, {second}, ... {last}"),
        _ => labels.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::tests::dense;

    fn text(places: &[Place]) -> String {
        places.iter().map(Place::to_string).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn gpu_layers_counts_from_the_end() {
        let blocks = dense(3, 1000);
        assert_eq!(text(&gpu_layers(&blocks, 0)), "cpu cpu cpu cpu cpu");
        assert_eq!(text(&gpu_layers(&blocks, 2)), "cpu cpu gpu0 gpu0 cpu");
        assert_eq!(text(&gpu_layers(&blocks, 3)), "cpu gpu0 gpu0 gpu0 cpu");
        assert_eq!(text(&gpu_layers(&blocks, 99)), "gpu0 gpu0 gpu0 gpu0 gpu0");
    }

    #[test]
    fn assignments_apply_in_order() {
        let blocks = dense(4, 1000);
        let mut places = vec![Place::Cpu; 6];
        let assign: Assign = "all=gpu, layers.1-2=cpu, lm_head = gpu1".parse().unwrap();
        assign.apply(&blocks, &mut places).unwrap();
        assert_eq!(text(&places), "gpu0 gpu0 cpu cpu gpu0 gpu1");
        assert_eq!(assign.highest_gpu(), Some(1));
    }

    #[test]
    fn mistakes_are_named() {
        let blocks = dense(2, 1000);
        let mut places = vec![Place::Cpu; 4];
        assert!(matches!("layers.0".parse::<Assign>(), Err(AssignError::Form(_))));
        assert!(matches!("=gpu".parse::<Assign>(), Err(AssignError::Form(_))));
        assert!(matches!("all=tpu".parse::<Assign>(), Err(AssignError::Device(_))));
        assert!(matches!("all=gpux".parse::<Assign>(), Err(AssignError::Device(_))));
        let missing = "layers.7=gpu".parse::<Assign>().unwrap().apply(&blocks, &mut places).unwrap_err();
        assert!(missing.to_string().contains("layers.1"), "{missing}");
    }
}
