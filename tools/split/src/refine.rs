//! `--refine N`: runs N tokens of the best few plans here, feeds the measured times back into the costs, and goes on until
//! the plan that is then expected to be best has been measured. The fastest of those measured is kept.

mod bench;
mod feedback;

use crate::cli::SplitArgs;
use crate::error::SplitError;
use crate::place::{Placement, no_fit};
use crate::predict::{Expected, round};
use crate::request::Request;
use crate::split::{Draft, draft};
use bench::{Bench, Measured};
pub use bench::{EXEC, exec};
use feedback::Feedback;
use hpp_model::Analysis;
use hpp_partition::{Choice, best, plan};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Plans measured before any time is fed back.
const FIRST: usize = 3;
/// Plans measured in all.
const MOST: usize = 10;

/// Why plans could not be run here.
#[derive(Debug, thiserror::Error)]
pub enum RefineError {
    /// There is no hpp-exec to run them.
    #[error("cannot find hpp-exec: {} is not there", .0.display())]
    NoExec(PathBuf),
    /// It could not be started or waited for.
    #[error("cannot run {}", path.display())]
    Run {
        /// The program.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It refused a plan.
    #[error("hpp-exec could not run the plan: {0}")]
    Failed(String),
    /// Its answer could not be understood.
    #[error("hpp-exec answered something else than a measurement: {0}")]
    Answer(String),
    /// A person stopped it.
    #[error("interrupted; nothing was written")]
    Interrupted,
}

impl RefineError {
    /// What a person can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            RefineError::NoExec(_) => Some("install hpp-exec beside hpp-split, or name it in HPP_EXEC"),
            RefineError::Failed(_) => Some("hpp-exec says why above; without --refine the plan is written unmeasured"),
            _ => None,
        }
    }
}

/// A plan that was run.
#[derive(Clone, Debug, Serialize)]
pub struct Tried {
    /// Blocks and their devices, as the table says them.
    pub placement: String,
    /// Whether it is the one that was kept.
    pub kept: bool,
    /// Milliseconds a token, before and after it was run.
    pub decode_ms: [f64; 2],
    /// Milliseconds to the first token, before and after it was run.
    pub time_to_first_token_ms: [f64; 2],
}

/// The fastest of the plans that were run, and all of them. What is expected of it is what it took; the request's costs are as
/// measured afterwards.
pub fn refine(
    request: &mut Request,
    args: &SplitArgs,
    analysis: &Analysis,
    tokens: u64,
    target: &Path,
) -> Result<(Placement, Vec<Tried>), SplitError> {
    let bench = Bench::new(request, tokens, target)?;
    let mut runs = Runs { args, analysis, bench, done: Vec::new() };
    let mut feedback = Feedback::default();
    let mut waiting = best(&request.problem, &request.options, FIRST).map_err(no_fit(request))?;
    waiting.reverse();
    while runs.done.len() < MOST {
        let next = match waiting.pop() {
            Some(solution) => solution,
            None => plan(&request.problem, &request.options).map_err(no_fit(request))?,
        };
        if runs.knows(&next.choices) {
            if waiting.is_empty() {
                break;
            }
            continue;
        }
        let placement = Placement::new(request, args.partitions, next, false);
        let (run, measured) = runs.measure(request, placement)?;
        feedback.learn(&mut request.problem, &run, &measured);
    }
    runs.fastest(request)
}

/// Plans that were run so far.
struct Runs<'a> {
    args: &'a SplitArgs,
    analysis: &'a Analysis,
    bench: Bench,
    done: Vec<(Placement, Expected, Measured)>,
}

impl Runs<'_> {
    fn knows(&self, choices: &[Choice]) -> bool {
        self.done.iter().any(|(placement, ..)| placement.solution.choices == choices)
    }

    fn measure(&mut self, request: &Request, placement: Placement) -> Result<(Placement, Measured), SplitError> {
        let Draft { placement, parts, plan } = draft(request, self.analysis, placement, String::new())?;
        let expected = Expected::of(&placement.solution);
        eprintln!("running plan {}: {}", self.done.len() + 1, describe(request, &placement));
        let measured = self.bench.run(self.args, self.analysis, &parts, plan)?;
        self.done.push((placement.clone(), expected, measured.clone()));
        Ok((placement, measured))
    }

    fn fastest(self, request: &Request) -> Result<(Placement, Vec<Tried>), SplitError> {
        let objective =
            |measured: &Measured| measured.expected().objective_ms(request.options.objective, request.load.new_tokens);
        let key = |at: &usize| objective(&self.done[*at].2);
        let kept = (0..self.done.len()).min_by(|a, b| key(a).total_cmp(&key(b))).unwrap_or(0);
        let tried = self.done.iter().enumerate().map(|(at, (placement, expected, measured))| Tried {
            placement: describe(request, placement),
            kept: at == kept,
            decode_ms: [round(expected.decode_ms), round(measured.decode_ms)],
            time_to_first_token_ms: [round(expected.prefill_ms), round(measured.prefill_ms)],
        });
        let tried = tried.collect();
        let run = self.done.into_iter().nth(kept);
        let (placement, _, measured) = run.ok_or_else(|| RefineError::Failed("no plan was run".to_owned()))?;
        Ok((placement.expecting(request, measured.expected()), tried))
    }
}

/// `cpu: embedding, layers.0-1; gpu0: layers.2-3, head`.
fn describe(request: &Request, placement: &Placement) -> String {
    let piece = |piece: &hpp_model::Piece| {
        let blocks = request.problem.blocks[piece.blocks.clone()].iter().map(|block| block.label.clone());
        format!("{}: {}", piece.choice.decode, crate::table::blocks(&blocks.collect::<Vec<_>>()))
    };
    placement.pieces.iter().map(piece).collect::<Vec<_>>().join("; ")
}
