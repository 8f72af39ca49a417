//! The simulated machine: one chain of steps, and for each GPU one engine that copies weights into a ring of slots.
//!
//! Time moves from event to event. Between two events everything runs at a constant rate: a step on the host at
//! `1 / compute_contention` while weights are being copied, a copy at `1 / link_contention` while the host computes, a
//! copy not at all while a boundary or state goes the same way (weights are copied in pieces, so it goes ahead).

use super::record::{Copied, Record};
use crate::schedule::{Copies, Step, What};
use crate::{Place, Problem};

/// Parts of a copy smaller than this are rounding.
const NOTHING: f64 = 1e-12;

/// What copies weights to one GPU.
#[derive(Clone, Debug)]
struct Lane {
    copies: Copies,
    slots: u64,
    /// Copies there will be in all; without end in decoding.
    most: u64,
    /// Counts of copies begun and done, and of slots freed.
    begun: u64,
    done: u64,
    freed: u64,
    /// What is left of the copy that is under way, milliseconds, and when it began.
    left: f64,
    since: f64,
    compute_contention: f64,
    link_contention: f64,
}

impl Lane {
    fn busy(&self) -> bool {
        self.begun > self.done
    }

    /// The block whose copy is under way.
    fn block(&self) -> usize {
        self.copies[(self.done % self.copies.len() as u64) as usize].0
    }

    fn begin(&mut self, now: f64) {
        let wanted = !self.copies.is_empty() && self.begun < self.most;
        if wanted && !self.busy() && self.begun - self.freed < self.slots {
            self.left = self.copies[(self.begun % self.copies.len() as u64) as usize].1;
            self.since = now;
            self.begun += 1;
        }
    }
}

/// What the chain does while time passes.
#[derive(Clone, Copy)]
enum Chain {
    Host,
    Elsewhere,
    /// Nothing, until a copy to this GPU is done.
    Waits,
    /// Uses the way to this GPU.
    Goes(usize),
}

/// The machine at some time.
pub(super) struct Engine<'a, R: Record> {
    now: f64,
    lanes: Vec<Lane>,
    record: &'a mut R,
}

/// Where the copies stand between two passes: for each GPU, how far they are ahead, and what is left of one under way.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Standing(Vec<(u64, f64)>);

impl Standing {
    /// Whether the same will follow.
    pub fn is_like(&self, other: &Standing, tolerance: f64) -> bool {
        let pairs = self.0.iter().zip(&other.0);
        pairs.into_iter().all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() <= tolerance)
    }
}

impl<'a, R: Record> Engine<'a, R> {
    /// A cold machine. `passes` is how often the copies are wanted; `None` is without end.
    pub fn new(problem: &Problem, copies: Vec<Copies>, slots: &[u32], passes: Option<u64>, record: &'a mut R) -> Self {
        let lane = |(gpu, copies): (usize, Copies)| Lane {
            most: passes.map_or(u64::MAX, |passes| passes * copies.len() as u64),
            // The same weights are not held twice.
            slots: u64::from(slots[gpu]).min(copies.len() as u64),
            copies,
            begun: 0,
            done: 0,
            freed: 0,
            left: 0.0,
            since: 0.0,
            compute_contention: problem.gpus[gpu].compute_contention.max(1.0),
            link_contention: problem.gpus[gpu].link_contention.max(1.0),
        };
        Engine { now: 0.0, lanes: copies.into_iter().enumerate().map(lane).collect(), record }
    }

    /// Milliseconds since the start.
    pub fn now(&self) -> f64 {
        self.now
    }

    pub fn standing(&self) -> Standing {
        Standing(self.lanes.iter().map(|l| (l.begun - l.freed, if l.busy() { l.left } else { 0.0 })).collect())
    }

    /// Takes the steps of one pass; false when one of them waits for ever.
    pub fn take(&mut self, steps: &[Step], pass: u64) -> bool {
        self.record.pass(pass);
        steps.iter().all(|step| self.step(step))
    }

    /// Tells of the copies that are under way.
    pub fn tell_unfinished(&mut self) {
        for (gpu, lane) in self.lanes.iter().enumerate().filter(|(_, lane)| lane.busy()) {
            self.record.copy(
                Copied { gpu, block: lane.block(), number: lane.done, whole: false },
                lane.since,
                self.now,
            );
        }
    }

    /// Lets time pass in which nothing happens.
    pub fn skip_to(&mut self, now: f64) {
        self.now = now;
    }

    fn step(&mut self, step: &Step) -> bool {
        if let What::Streamed(gpu) = step.what
            && !self.wait(gpu)
        {
            return false;
        }
        let start = self.now;
        let chain = match step.what {
            What::Compute(Place::Cpu) => Chain::Host,
            What::To(gpu, _) => Chain::Goes(gpu),
            _ => Chain::Elsewhere,
        };
        let mut left = step.ms;
        while left > 0.0 {
            let rate = self.chain_rate(chain);
            let most = left / rate;
            let passed = self.advance(chain, most);
            left = if passed >= most { 0.0 } else { left - passed * rate };
            if !self.now.is_finite() {
                return false;
            }
        }
        if let What::Streamed(gpu) = step.what {
            self.lanes[gpu].freed += 1;
        }
        self.record.step(step, start, self.now);
        true
    }

    fn wait(&mut self, gpu: usize) -> bool {
        let start = self.now;
        while self.lanes[gpu].done <= self.lanes[gpu].freed {
            self.advance(Chain::Waits, f64::INFINITY);
            if !self.now.is_finite() {
                return false;
            }
        }
        self.record.stall(gpu, start, self.now);
        true
    }

    fn chain_rate(&mut self, chain: Chain) -> f64 {
        self.begin();
        match chain {
            Chain::Host => {
                let slow = self.lanes.iter().filter(|lane| lane.busy()).map(|lane| lane.compute_contention);
                1.0 / slow.fold(1.0, f64::max)
            }
            _ => 1.0,
        }
    }

    fn begin(&mut self) {
        let now = self.now;
        self.lanes.iter_mut().for_each(|lane| lane.begin(now));
    }

    /// Lets time pass until a copy is done, at most `most` milliseconds; says how many passed.
    fn advance(&mut self, chain: Chain, most: f64) -> f64 {
        self.begin();
        let rate = |(gpu, lane): (usize, &Lane)| match chain {
            _ if !lane.busy() => 0.0,
            Chain::Goes(other) if other == gpu => 0.0,
            Chain::Host => 1.0 / lane.link_contention,
            _ => 1.0,
        };
        let until = |(gpu, lane)| {
            let rate = rate((gpu, lane));
            if rate > 0.0 { lane.left / rate } else { f64::INFINITY }
        };
        let next = self.lanes.iter().enumerate().map(until).fold(f64::INFINITY, f64::min);
        let passed = next.min(most);
        let moved: Vec<f64> = self.lanes.iter().enumerate().map(|at| passed * rate(at)).collect();
        self.now += passed;
        for (gpu, moved) in moved.into_iter().enumerate() {
            let lane = &mut self.lanes[gpu];
            if lane.busy() && moved > 0.0 || lane.busy() && lane.left <= NOTHING {
                lane.left -= moved;
                if lane.left <= NOTHING * self.now.max(1.0) {
                    let copied = Copied { gpu, block: lane.block(), number: lane.done, whole: true };
                    self.record.copy(copied, lane.since, self.now);
                    lane.done += 1;
                    lane.left = 0.0;
                }
            }
        }
        passed
    }
}
