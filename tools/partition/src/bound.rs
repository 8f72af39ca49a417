//! Lower bounds on the time of a phase that hold for every schedule: the work of the partition sequence, the work of each link, and
//! the least slowdown by contention between the host and a link or the disk.

use crate::schedule::merges;
use crate::{BlockPlacement, Contention, GpuCosts, Phase, Placement, Problem};

/// The work of a phase, milliseconds without contention.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PhaseWork {
    /// Everything that runs in sequence: computing, crossings, state swaps that are not copied ahead, the overhead of passes. In passes of
    /// several sequences it excludes what GPUs compute, because that may overlap with all else.
    pub sequence: f64,
    /// In passes of several sequences: what each GPU computes.
    pub gpus: Vec<f64>,
    /// The part of the sequence that the host computes.
    pub host: f64,
    /// Copies to each GPU: streamed weights, boundaries and state.
    pub links: Vec<f64>,
}

impl PhaseWork {
    /// The work that a block adds to a phase where the block before it computes at `previous`.
    pub fn of_block(
        problem: &Problem,
        block: usize,
        previous: Option<Placement>,
        placement: BlockPlacement,
        phase: Phase,
    ) -> PhaseWork {
        let none = vec![0.0; problem.gpus.len()];
        let mut work = PhaseWork { links: none.clone(), gpus: none, ..PhaseWork::default() };
        let (place, passes) = (placement.in_phase(phase), problem.passes(phase));
        let mut ms = problem.phase_ms(block, place, phase);
        if !previous.is_some_and(|previous| merges(problem, block, previous, place)) {
            ms += passes as f64 * problem.launch_ms(place);
        }
        match place.gpu().filter(|_| problem.has_pipelines()) {
            Some(gpu) => work.gpus[gpu] += ms,
            None => work.sequence += ms,
        }
        if place == Placement::Cpu {
            work.host += ms;
        }
        for transfer in problem.swap_transfers(block, placement, phase) {
            if !transfer.ahead {
                work.sequence += problem.copy_ms(transfer);
            }
            if let Some(gpu) = transfer.to {
                work.links[gpu] += problem.upload_ms(gpu, transfer.tensors);
            }
        }
        if let Placement::Streamed(gpu) = place {
            work.links[gpu] += passes as f64 * problem.stream_ms(block, gpu);
        }
        if let Some(previous) = previous.filter(|previous| previous.gpu() != place.gpu()) {
            for pass in 0..passes {
                let tensors = problem.boundary(block, phase, pass);
                work.sequence += previous.gpu().map_or(0.0, |gpu| problem.download_ms(gpu, tensors));
                if let Some(gpu) = place.gpu() {
                    work.sequence += problem.upload_ms(gpu, tensors);
                    work.links[gpu] += problem.upload_ms(gpu, tensors);
                }
            }
        }
        work
    }

    /// Adds other work.
    pub fn add(&mut self, other: &PhaseWork) {
        self.sequence += other.sequence;
        self.host += other.host;
        self.links.iter_mut().zip(&other.links).for_each(|(link, more)| *link += more);
        self.gpus.iter_mut().zip(&other.gpus).for_each(|(gpu, more)| *gpu += more);
    }

    /// Lower bound of the time of every schedule of this work, milliseconds.
    pub fn lower_bound(&self, gpus: &[GpuCosts]) -> f64 {
        let with_link = |(link, gpu): (&f64, &GpuCosts)| {
            lower_bound_beside_transfers(self.sequence, self.host, *link, gpu.contention())
        };
        let links = self.links.iter().zip(gpus).map(with_link);
        links.chain(self.gpus.iter().copied()).fold(self.sequence, f64::max)
    }
}

/// Lower bound of the time T of a partition sequence, the part of it that the host computes, and the transfers beside it: copies on one
/// link, or reads from disk. Let O be the time in which the host computes during transfers. In that time the host does O / a of its work
/// and the link or disk O / b of its work, where a and b are the contention factors. So
///
/// - `T >= sequence + O (1 - 1/a)`, because the sequence loses what the host loses;
/// - `T >= transfers + O (1 - 1/b)`, likewise;
/// - `T >= transfers + host - O (1/a + 1/b - 1)`, because the rest of the transfers needs time in which the host does not compute.
///
/// The first two bounds grow with O and the third falls, so the least T is where they meet. It is the time itself if everything is
/// computed on the host and transfers never wait for room: then all of the shorter one happens during the longer one.
pub(crate) fn lower_bound_beside_transfers(sequence: f64, host: f64, transfers: f64, contention: Contention) -> f64 {
    if transfers <= 0.0 {
        return sequence;
    }
    let Contention { compute: a, transfer: b } = contention;
    let gain = 1.0 / a + 1.0 / b - 1.0;
    if gain <= 0.0 {
        return sequence.max(transfers + host);
    }
    // The O at which the third bound meets the first, and the O at which it meets the second.
    let overlap = (b * (transfers + host - sequence)).min(a * host);
    match overlap > 0.0 {
        true => sequence.max(transfers + host - overlap * gain),
        false => sequence.max(transfers),
    }
}
