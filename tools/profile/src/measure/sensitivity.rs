//! Measures how much the logits change when the weights of one block are rounded, for each block.

use super::ProfilingRun;
use crate::effort::Effort;
use crate::error::ProfileError;
use crate::sensitivity::{Rounded, Variants};
use hpp_schema::Sensitivity;
use hpp_schema::probe::{CompareProbe, Prompt, Reply, Request};
use std::path::Path;

/// Bits to round weights to.
const BITS: [u32; 2] = [8, 4];
/// Prompts whose logits are compared, and the number of last positions of each prompt.
const PROMPTS: usize = 4;
const POSITIONS: [u64; 2] = [32, 128];
/// Expected seconds of one comparison.
const SECONDS: f64 = 3.0;

impl ProfilingRun<'_> {
    /// Number of prompts of the corpus to compare with.
    pub const SENSITIVITY_PROMPTS: usize = PROMPTS;

    /// Expected seconds of the remaining comparisons.
    pub fn sensitivity_seconds(&self) -> f64 {
        self.remaining_comparisons().len() as f64 * SECONDS
    }

    /// Blocks and bits that have neither a result nor a recorded failure.
    fn remaining_comparisons(&self) -> Vec<(usize, u32)> {
        let blocks = self.profile.model.blocks.iter().enumerate();
        let all = blocks.flat_map(|(at, block)| BITS.map(|bits| (at, &block.label, bits)));
        let known = |label: &str, bits| self.profile.sensitivity.iter().any(|s| s.block == label && s.bits == bits);
        all.filter(|(_, label, bits)| !known(label, *bits)).map(|(at, _, bits)| (at, bits)).collect()
    }

    /// Runs the remaining comparisons.
    pub fn sensitivity(&mut self, prompts: &[Prompt]) -> Result<(), ProfileError> {
        let left = self.remaining_comparisons();
        if left.is_empty() {
            return Ok(());
        }
        let dir = self.stage_dir()?;
        let analysis = self.analysis;
        let variants = Variants::begin(analysis, dir.path())?;
        for (block, bits) in left {
            let label = self.profile.model.blocks[block].label.clone();
            self.progress.begin(&format!("{label} rounded to {bits} bits"));
            let mut found =
                Sensitivity { block: label, bits, positions: 0, kl: None, top1_changed: None, failure: None };
            match variants.round(block, bits)? {
                Rounded::Refused(why) => found.failure = Some(why),
                Rounded::Plan(variant) => {
                    if let Err(why) = self.compare(variants.reference(), variant.plan(), prompts, &mut found)? {
                        self.progress.warn(&format!("{} rounded to {bits} bits: {why}", found.block));
                        found.failure = Some(why);
                    }
                }
            }
            self.profile.sensitivity.push(found);
            self.save()?;
            self.progress.end(SECONDS);
        }
        self.prober.restart();
        Ok(())
    }

    fn compare(
        &mut self,
        reference: &Path,
        other: &Path,
        prompts: &[Prompt],
        found: &mut Sensitivity,
    ) -> Result<Result<(), String>, ProfileError> {
        let request = Request::Compare(CompareProbe {
            reference: reference.to_owned(),
            other: other.to_owned(),
            prompts: prompts.to_vec(),
            positions: POSITIONS[usize::from(self.effort == Effort::Thorough)],
        });
        let mut compared = Err("hpp-exec did not compare anything".to_owned());
        let failure = self.request(&request, |measure, reply| {
            match reply {
                Reply::Compared { positions, kl, top1_changed } => {
                    let good = kl.is_finite() && (0.0..=1.0).contains(&top1_changed) && positions > 0;
                    compared = if good { Ok((positions, kl, top1_changed)) } else { Err(nonsense(kl, top1_changed)) };
                }
                Reply::PromptFailed { line, reason } => {
                    measure.note(format!("line {line} of the corpus was not compared: {reason}"));
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(failure.map_or(compared, Err).map(|(positions, kl, top1_changed)| {
            // Rounding of sums may leave a divergence a hair below zero.
            (found.positions, found.kl, found.top1_changed) = (positions, Some(kl.max(0.0)), Some(top1_changed));
        }))
    }
}

fn nonsense(kl: f64, top1_changed: f64) -> String {
    format!("a divergence of {kl} with {top1_changed} of the best tokens changed cannot have been measured")
}
