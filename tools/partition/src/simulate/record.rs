//! What is kept of a simulation: nothing while a planner compares placements, every span where someone looks.

use crate::schedule::{Step, What};
use crate::{Place, Problem};
use hpp_schema::{Span, SpanKind};

/// Told of everything that happened, times in milliseconds.
pub(super) trait Record {
    /// A pass begins.
    fn pass(&mut self, _number: u64) {}
    /// A step of the chain.
    fn step(&mut self, _step: &Step, _start: f64, _end: f64) {}
    /// The chain waited for weights of a block streamed to this GPU.
    fn stall(&mut self, _gpu: usize, _start: f64, _end: f64) {}
    /// Weights were copied.
    fn copy(&mut self, _copied: Copied, _start: f64, _end: f64) {}
}

/// Weights of a block on their way to a GPU.
pub(super) struct Copied {
    pub gpu: usize,
    pub block: usize,
    /// Counting all copies to this GPU.
    pub number: u64,
    /// Whether all of them arrived.
    pub whole: bool,
}

/// Keeps nothing.
pub(super) struct Nothing;

impl Record for Nothing {}

/// Keeps spans.
pub(super) struct Spans<'a> {
    pub problem: &'a Problem,
    /// Copies to each GPU in one pass.
    pub copies: Vec<u64>,
    pub pass: u64,
    pub spans: Vec<Span>,
}

impl Spans<'_> {
    pub fn push(&mut self, lane: String, name: String, kind: SpanKind, (start, end): (f64, f64), bytes: Option<u64>) {
        let (start_us, duration_us) = (1e3 * start, 1e3 * (end - start));
        self.spans.push(Span { lane, name, kind, start_us, duration_us, pass: self.pass, bytes });
    }

    fn label(&self, block: usize) -> &str {
        self.problem.blocks.get(block).map_or("", |block| &block.label)
    }

    fn range(&self, step: &Step) -> String {
        let (first, last) = (self.label(step.blocks.start), self.label(step.blocks.end.saturating_sub(1)));
        if first == last { first.to_owned() } else { format!("{first} to {last}") }
    }
}

impl Record for Spans<'_> {
    fn pass(&mut self, number: u64) {
        self.pass = number;
    }

    fn step(&mut self, step: &Step, start: f64, end: f64) {
        let name = self.range(step);
        let (compute, transfer, at) = (SpanKind::Compute, SpanKind::Transfer, (start, end));
        match step.what {
            What::Compute(place) => self.push(place.to_string(), name, compute, at, None),
            What::Streamed(gpu) => self.push(Place::Gpu(gpu).to_string(), name, compute, at, None),
            What::To(gpu, bytes) => self.push(to(gpu), format!("into {name}"), transfer, at, Some(bytes)),
            What::From(gpu, bytes) => self.push(from(gpu), format!("into {name}"), transfer, at, Some(bytes)),
            What::Pass if end > start => self.push("cpu".to_owned(), BETWEEN_PASSES.to_owned(), compute, at, None),
            What::Pass => {}
        }
    }

    fn stall(&mut self, gpu: usize, start: f64, end: f64) {
        if end > start {
            let lane = Place::Gpu(gpu).to_string();
            self.push(lane, "waits for weights".to_owned(), SpanKind::Stall, (start, end), None);
        }
    }

    fn copy(&mut self, copied: Copied, start: f64, end: f64) {
        let (pass, name) = (self.pass, format!("weights of {}", self.label(copied.block)));
        self.pass = copied.number / self.copies[copied.gpu].max(1);
        let bytes = copied.whole.then(|| self.problem.streamed_bytes(copied.block));
        self.push(to(copied.gpu), name, SpanKind::Transfer, (start, end), bytes);
        self.pass = pass;
    }
}

/// What the part of a pass is called that no partition bears.
pub(super) const BETWEEN_PASSES: &str = "between passes";

/// The lane of reads from disk.
pub(super) const DISK: &str = "disk";

/// The lane of copies to a GPU.
pub(super) fn to(gpu: usize) -> String {
    format!("to gpu{gpu}")
}

/// The lane of copies from a GPU.
pub(super) fn from(gpu: usize) -> String {
    format!("from gpu{gpu}")
}
