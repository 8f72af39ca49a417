//! Passes of several sequences whose weights stay where they are: devices compute for different sequences at the same time.
//!
//! Follows the runtime: one thread issues all runs and copies. A run on a GPU returns while the GPU computes; a copy waits for the GPUs
//! concerned. Consecutive partitions on different devices are a pipeline: in each turn every partition of it gets the sequence that
//! the partition before it had in the turn before; first boundaries are copied, then the runs of GPUs start, then the host computes.
//! A partition whose state is copied for its runs is never part of a pipeline.

use super::record::SimulationObserver;
use crate::DeviceId;
use crate::schedule::{PartitionSteps, PassSteps, ScheduleStep, StepKind};

/// The thread that issues runs, and the queues of the GPUs.
pub(super) struct QueuedMachine<'a, R: SimulationObserver> {
    /// When the thread goes on, milliseconds.
    now: f64,
    /// When the queue of each GPU will be empty.
    busy_until: Vec<f64>,
    /// Sequences of a pass.
    sequences: u64,
    recorder: &'a mut R,
}

impl<'a, R: SimulationObserver> QueuedMachine<'a, R> {
    /// An idle machine.
    pub fn new(gpus: usize, sequences: u64, recorder: &'a mut R) -> Self {
        QueuedMachine { now: 0.0, busy_until: vec![0.0; gpus], sequences, recorder }
    }

    /// Milliseconds since the start.
    pub fn now(&self) -> f64 {
        self.now
    }

    /// Runs one pass of all sequences, and waits for all GPUs. `steps`: of one sequence.
    pub fn run_pass(&mut self, steps: &PassSteps, pass: u64) {
        self.recorder.pass(pass);
        let mut partitions = &steps.partitions[..];
        while !partitions.is_empty() {
            let (pipeline, rest) = partitions.split_at(pipeline_length(partitions));
            match pipeline {
                [alone] => self.run_alone(alone),
                _ => self.run_pipeline(pipeline),
            }
            partitions = rest;
        }
        self.now = self.busy_until.iter().copied().fold(self.now, f64::max);
        (0..self.sequences).for_each(|_| self.copy(&steps.end));
    }

    /// All sequences through one partition, one after the other.
    fn run_alone(&mut self, partition: &PartitionSteps) {
        (0..self.sequences).for_each(|_| self.copy(&partition.crossing));
        for _ in 0..self.sequences {
            self.copy(&partition.swaps_in);
            self.compute(&partition.compute);
            self.copy(&partition.swaps_out);
        }
    }

    fn run_pipeline(&mut self, pipeline: &[PartitionSteps]) {
        let turns = self.sequences as usize + pipeline.len() - 1;
        for turn in 0..turns {
            let has_turn = |(position, _): &(usize, &PartitionSteps)| {
                turn.checked_sub(*position).is_some_and(|sequence| sequence < self.sequences as usize)
            };
            let active: Vec<&PartitionSteps> =
                pipeline.iter().enumerate().filter(has_turn).map(|(_, partition)| partition).collect();
            active.iter().for_each(|partition| self.copy(&partition.crossing));
            let (on_host, on_gpus): (Vec<_>, Vec<_>) = active.into_iter().partition(|partition| is_on_host(partition));
            on_gpus.into_iter().chain(on_host).for_each(|partition| self.compute(&partition.compute));
        }
    }

    /// One sequence's run: the host computes, or a GPU gets it into its queue.
    fn compute(&mut self, step: &ScheduleStep) {
        match step.kind {
            StepKind::Compute(DeviceId::Gpu(gpu)) | StepKind::Streamed(gpu) => {
                let start = self.busy_until[gpu].max(self.now);
                self.busy_until[gpu] = start + step.ms;
                self.recorder.step(step, start, start + step.ms);
            }
            _ => self.pass_time(step),
        }
    }

    /// Copies of one sequence, one after the other, which wait for the GPUs at both ends; and the overhead of a pass.
    fn copy(&mut self, steps: &[ScheduleStep]) {
        for step in steps {
            if let StepKind::To(gpu, _) | StepKind::From(gpu, _) = step.kind {
                self.now = self.now.max(self.busy_until[gpu]);
            }
        }
        steps.iter().for_each(|step| self.pass_time(step));
    }

    fn pass_time(&mut self, step: &ScheduleStep) {
        self.recorder.step(step, self.now, self.now + step.ms);
        self.now += step.ms;
    }
}

/// Partitions from the first on that are a pipeline.
fn pipeline_length(partitions: &[PartitionSteps]) -> usize {
    let device = |partition: &PartitionSteps| partition.compute.kind;
    let is_alone = |partition: &PartitionSteps| !(partition.swaps_in.is_empty() && partition.swaps_out.is_empty());
    let joins =
        |pair: &&[PartitionSteps]| device(&pair[0]) != device(&pair[1]) && !is_alone(&pair[0]) && !is_alone(&pair[1]);
    1 + partitions.windows(2).take_while(joins).count()
}

fn is_on_host(partition: &PartitionSteps) -> bool {
    partition.compute.kind == StepKind::Compute(DeviceId::Cpu)
}
