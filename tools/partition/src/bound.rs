//! Lower bounds on a phase that hold for every order of things: what the chain and the links must do, and what computing
//! on the host while weights are copied costs at least.

use crate::schedule::merges;
use crate::{Choice, GpuCosts, Phase, Problem, Where};

/// What a phase must do, milliseconds while nothing else goes on.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Work {
    /// Everything on the chain: computing, crossings, visits, what no partition bears.
    pub chain: f64,
    /// The part of it that the host computes.
    pub host: f64,
    /// What goes to each GPU: streamed weights, boundaries and state.
    pub links: Vec<f64>,
}

impl Work {
    /// The work that a block adds to a phase where the block before it computes at `previous`.
    pub fn of_block(problem: &Problem, block: usize, previous: Option<Where>, choice: Choice, phase: Phase) -> Work {
        let mut work = Work { links: vec![0.0; problem.gpus.len()], ..Work::default() };
        let (place, passes) = (choice.of(phase), problem.passes(phase));
        let mut ms = problem.block_ms_in_all(block, place, phase);
        if !previous.is_some_and(|previous| merges(problem, block, previous, place)) {
            ms += passes as f64 * problem.launch_ms(place);
        }
        work.chain += ms;
        if place == Where::Cpu {
            work.host += ms;
        }
        for way in problem.visits(block, choice, phase) {
            work.chain += problem.way_ms(way);
            if let Some(gpu) = way.to {
                work.links[gpu] += problem.upload_ms(gpu, way.tensors);
            }
        }
        if let Where::Streamed(gpu) = place {
            work.links[gpu] += passes as f64 * problem.stream_ms(block, gpu);
        }
        if let Some(previous) = previous.filter(|previous| previous.gpu() != place.gpu()) {
            for pass in 0..passes {
                let tensors = problem.boundary(block, phase, pass);
                work.chain += previous.gpu().map_or(0.0, |gpu| problem.download_ms(gpu, tensors));
                if let Some(gpu) = place.gpu() {
                    work.chain += problem.upload_ms(gpu, tensors);
                    work.links[gpu] += problem.upload_ms(gpu, tensors);
                }
            }
        }
        work
    }

    /// Adds other work.
    pub fn add(&mut self, other: &Work) {
        self.chain += other.chain;
        self.host += other.host;
        self.links.iter_mut().zip(&other.links).for_each(|(link, more)| *link += more);
    }

    /// No schedule does this work in less, milliseconds.
    pub fn least(&self, gpus: &[GpuCosts]) -> f64 {
        let with = |(link, gpu): (&f64, &GpuCosts)| least_with(self.chain, self.host, *link, gpu);
        self.links.iter().zip(gpus).map(with).fold(self.chain, f64::max)
    }
}

/// The least time T for a chain, the host's part of it, and a link. Let the host compute and the link copy at once for a
/// while O. The host then does O / a of its work and the link O / b of its own, a and b being the factors of contention. So
///
/// - `T >= chain + O (1 - 1/a)`, because the chain loses what the host loses;
/// - `T >= link + O (1 - 1/b)`, likewise;
/// - `T >= link + host - O (1/a + 1/b - 1)`, because the rest of the copies needs time in which the host does not compute.
///
/// The first two grow with O and the third falls, so the least T is where they meet.
fn least_with(chain: f64, host: f64, link: f64, gpu: &GpuCosts) -> f64 {
    if link <= 0.0 {
        return chain;
    }
    let (a, b) = (gpu.compute_contention.max(1.0), gpu.link_contention.max(1.0));
    let gain = 1.0 / a + 1.0 / b - 1.0;
    if gain <= 0.0 {
        return chain.max(link + host);
    }
    // Where the third meets the first, and where it meets the second.
    let overlap = (b * (link + host - chain)).min(a * host);
    match overlap > 0.0 {
        true => chain.max(link + host - overlap * gain),
        false => chain.max(link),
    }
}
