//! Second moments of the inputs of matrix products, in a file that an observer wrote while the model ran prompts.

use super::compensate::Factor;
use hpp_io::WorkDir;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::sync::Arc;

/// Damping, as a share of the mean square of a matrix's inputs: added to the square of each input, because few positions do not determine an
/// inverse.
const DAMPING: f64 = 0.1;

/// Second moments of the inputs of weights. The inputs `X` `[positions, depth]` of a weight are divided into spans of `span` neighbours (the last
/// may be shorter). The file has the sums of products `[span, span]` of each span, as little-endian float64.
#[derive(Debug)]
pub struct InputMoments {
    /// The file.
    pub path: PathBuf,
    /// Inputs of a span: a multiple of the block size.
    pub span: usize,
    /// For each weight, the position of its first span in the file.
    pub offsets: BTreeMap<String, u64>,
    /// Number of positions that were summed.
    pub positions: u64,
    /// The directory of the file, removed after the last use.
    pub dir: WorkDir,
}

impl PartialEq for InputMoments {
    fn eq(&self, other: &Self) -> bool {
        (&self.path, self.span, &self.offsets) == (&other.path, other.span, &other.offsets)
    }
}

impl Eq for InputMoments {}

/// Bytes of the second moments of `depth` inputs.
pub fn moment_bytes(depth: u64, span: u64) -> u64 {
    let rest = depth % span.max(1);
    8 * ((depth - rest) * span + rest * rest)
}

/// The moments of one weight's inputs.
#[derive(Clone, Debug)]
pub(super) struct WeightMoments {
    moments: Arc<InputMoments>,
    offset: u64,
}

impl WeightMoments {
    /// The moments for a weight. `None` if its inputs were not observed.
    pub fn of(moments: &Arc<InputMoments>, weight: &str) -> Option<Self> {
        let offset = *moments.offsets.get(weight)?;
        Some(WeightMoments { moments: Arc::clone(moments), offset })
    }

    /// Inputs of a span.
    pub fn span(&self) -> usize {
        self.moments.span
    }

    /// A factor for each span of `depth` inputs.
    pub fn factors(&self, depth: usize) -> io::Result<Vec<Factor>> {
        let mut file = File::open(&self.moments.path)?;
        file.seek(SeekFrom::Start(self.offset))?;
        let starts: Vec<usize> = (0..depth).step_by(self.span()).collect();
        let lengths = starts.into_iter().map(|start| self.span().min(depth - start));
        let mut read = |length: usize| -> io::Result<(usize, Vec<f64>)> {
            let mut bytes = vec![0; length * length * 8];
            file.read_exact(&mut bytes)?;
            Ok((length, bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()))
        };
        let spans: Vec<(usize, Vec<f64>)> = lengths.map(&mut read).collect::<io::Result<_>>()?;
        let squares: f64 = spans.iter().map(|(length, moments)| moments.iter().step_by(length + 1).sum::<f64>()).sum();
        let mean = squares / depth.max(1) as f64;
        // Inputs that were always zero carry no information: with any damping, rounding is then plain.
        let damping = if mean > 0.0 { DAMPING * mean } else { 1.0 };
        let factor = |(length, moments): &(usize, Vec<f64>)| Factor::new(moments, *length, damping);
        let factors: Option<Vec<Factor>> = spans.par_iter().map(factor).collect();
        // Moments that are not finite carry none either: then rounding is plain.
        Ok(factors.unwrap_or_else(|| spans.iter().map(|(length, _)| Factor::uncompensated(*length)).collect()))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Moments of a weight "w" of `depth` inputs.
    pub fn moments(depth: usize, span: usize, value: impl Fn(usize, usize) -> f64) -> Arc<InputMoments> {
        let dir = WorkDir::new(&std::env::temp_dir(), ".hpp-moments-test-").unwrap();
        let mut bytes = Vec::new();
        for start in (0..depth).step_by(span) {
            let of_span = start..(start + span).min(depth);
            let pairs = of_span.clone().flat_map(|i| of_span.clone().map(move |j| (i, j)));
            bytes.extend(pairs.flat_map(|(i, j)| value(i, j).to_le_bytes()));
        }
        assert_eq!(bytes.len() as u64, moment_bytes(depth as u64, span as u64));
        let path = dir.path().join("moments");
        std::fs::write(&path, bytes).unwrap();
        Arc::new(InputMoments { path, span, offsets: [("w".to_owned(), 0)].into(), positions: 1, dir })
    }

    #[test]
    fn each_span_has_a_factor_and_bad_moments_compensate_nothing() {
        let of = |value: f64| {
            let all = moments(70, 32, |i, j| if i == j { 2.0 * value } else { value });
            WeightMoments::of(&all, "w").unwrap().factors(70).unwrap()
        };
        assert_eq!(of(1.0).len(), 3);
        assert!(of(f64::NAN) == of(0.0) && of(1.0) != of(0.0));
        assert!(WeightMoments::of(&moments(4, 4, |_, _| 1.0), "other").is_none());
    }
}
