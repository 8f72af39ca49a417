//! Recorders of a simulation: one records nothing, while the planner compares placements; one keeps every span, for timelines.

use crate::schedule::{ScheduleStep, StepKind};
use crate::{DeviceId, Problem};
use hpp_schema::{Span, SpanKind};

/// Receives the events of a simulation, with times in milliseconds.
pub(super) trait SimulationObserver {
    /// A pass starts.
    fn pass(&mut self, _number: u64) {}
    /// A step of the partition sequence ended.
    fn step(&mut self, _step: &ScheduleStep, _start: f64, _end: f64) {}
    /// The partition sequence waited for the weights of a block that is streamed to this GPU.
    fn stall(&mut self, _gpu: usize, _start: f64, _end: f64) {}
    /// A copy of weights ended.
    fn copy(&mut self, _copy: SimulatedCopy, _start: f64, _end: f64) {}
}

/// A copy of a block's weights to a GPU.
pub(super) struct SimulatedCopy {
    pub gpu: usize,
    pub block: usize,
    /// Position of the copy among all copies to this GPU.
    pub number: u64,
    pub is_complete: bool,
}

/// Records nothing.
pub(super) struct NoRecorder;

impl SimulationObserver for NoRecorder {}

/// Records spans.
pub(super) struct SpanRecorder<'a> {
    pub problem: &'a Problem,
    /// Number of copies to each GPU in one pass.
    pub copies: Vec<u64>,
    pub pass: u64,
    pub spans: Vec<Span>,
}

impl SpanRecorder<'_> {
    pub fn push(&mut self, lane: String, name: String, kind: SpanKind, (start, end): (f64, f64), bytes: Option<u64>) {
        let (start_us, duration_us) = (1e3 * start, 1e3 * (end - start));
        self.spans.push(Span { lane, name, kind, start_us, duration_us, pass: self.pass, bytes, item: None });
    }

    fn label(&self, block: usize) -> &str {
        self.problem.blocks.get(block).map_or("", |block| &block.label)
    }

    /// The blocks of a step: `layers.0 to layers.3`.
    fn range(&self, step: &ScheduleStep) -> String {
        let (first, last) = (self.label(step.blocks.start), self.label(step.blocks.end.saturating_sub(1)));
        if first == last { first.to_owned() } else { format!("{first} to {last}") }
    }
}

impl SimulationObserver for SpanRecorder<'_> {
    fn pass(&mut self, number: u64) {
        self.pass = number;
    }

    fn step(&mut self, step: &ScheduleStep, start: f64, end: f64) {
        let name = self.range(step);
        let (compute, transfer, at) = (SpanKind::Compute, SpanKind::Transfer, (start, end));
        match step.kind {
            StepKind::Compute(place) => self.push(place.to_string(), name, compute, at, None),
            StepKind::Streamed(gpu) => self.push(DeviceId::Gpu(gpu).to_string(), name, compute, at, None),
            StepKind::Ahead(gpu, bytes) => {
                self.push(lane_to(gpu), format!("states of {name}"), transfer, at, Some(bytes));
            }
            StepKind::To(gpu, bytes) => self.push(lane_to(gpu), format!("into {name}"), transfer, at, Some(bytes)),
            StepKind::From(gpu, bytes) => self.push(lane_from(gpu), format!("into {name}"), transfer, at, Some(bytes)),
            StepKind::Pass if end > start => self.push("cpu".to_owned(), BETWEEN_PASSES.to_owned(), compute, at, None),
            StepKind::Pass => {}
        }
    }

    fn stall(&mut self, gpu: usize, start: f64, end: f64) {
        if end > start {
            let lane = DeviceId::Gpu(gpu).to_string();
            self.push(lane, "waits for weights".to_owned(), SpanKind::Stall, (start, end), None);
        }
    }

    fn copy(&mut self, copy: SimulatedCopy, start: f64, end: f64) {
        let (pass, name) = (self.pass, format!("weights of {}", self.label(copy.block)));
        self.pass = copy.number / self.copies[copy.gpu].max(1);
        let bytes = copy.is_complete.then(|| self.problem.streamed_bytes(copy.block));
        self.push(lane_to(copy.gpu), name, SpanKind::Transfer, (start, end), bytes);
        self.pass = pass;
    }
}

/// Name of the span of a pass's overhead outside its partitions.
pub(super) const BETWEEN_PASSES: &str = "between passes";

/// The lane of reads from disk.
pub(super) const DISK: &str = "disk";

/// The lane of copies to a GPU.
pub(super) fn lane_to(gpu: usize) -> String {
    format!("to gpu{gpu}")
}

/// The lane of copies from a GPU.
pub(super) fn lane_from(gpu: usize) -> String {
    format!("from gpu{gpu}")
}
