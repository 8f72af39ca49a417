//! Weights that are read while others compute: which chunk is read when, so that the disk never waits while there is room and
//! no more of them lie in memory than the plan allows.
//!
//! Chunks are read in the order in which passes need them, round and round: behind the last stage of a pass comes the
//! first of the next. A chunk takes its room when its reading begins and gives it back when its stage has run. Room is only
//! ever given back here, so reading only ever begins here too, and the disk is idle only while the window is full.

use crate::engine::Engine;
use crate::error::{BackendError, EngineError};
use crate::meter::{Meter, Read, Took};
use crate::port::{Backend, Session};
use crate::stage::{Act, Stage};
use std::ops::Range;

/// What is read, in order, and how far that has come.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    /// Chunks of all streamed stages in the order of a pass.
    order: Vec<Chunk>,
    /// Positions of each stage's chunks, which follow each other; empty where nothing is read for it.
    of: Vec<Range<usize>>,
    /// Whether anything is read before its stage is about to run.
    ahead: bool,
    /// Most bytes of them in memory at once.
    window: u64,
    /// Bytes whose reading has begun and whose stage has not run since.
    held: u64,
    /// The next to begin, by position in `order`.
    next: usize,
    /// How many before `next`, round and round, are held.
    begun: usize,
}

#[derive(Clone, Copy, Debug)]
struct Chunk {
    stage: usize,
    number: usize,
    bytes: u64,
}

impl Reading {
    /// Reading for these stages in the order of a schedule. A window smaller than the largest stage is made as large
    /// as that; with no window nothing is read ahead.
    pub fn new<B: Backend>(stages: &[Stage<B>], schedule: &[Act], window: u64) -> Self {
        let runs = schedule.iter().filter_map(|act| match act {
            Act::Run(stage) => Some(*stage),
            Act::Copy(_) => None,
        });
        let chunks = |stage: usize| {
            let numbered = stages[stage].session.chunks().iter().enumerate();
            numbered.map(move |(number, bytes)| Chunk { stage, number, bytes: *bytes })
        };
        let order: Vec<Chunk> = runs.flat_map(chunks).collect();
        let of = |stage: usize| {
            let first = order.iter().position(|chunk| chunk.stage == stage).unwrap_or(0);
            first..first + order.iter().filter(|chunk| chunk.stage == stage).count()
        };
        let of: Vec<Range<usize>> = (0..stages.len()).map(of).collect();
        let bytes = |own: &Range<usize>| order[own.clone()].iter().map(|chunk| chunk.bytes).sum::<u64>();
        let largest = of.iter().map(bytes).max().unwrap_or(0);
        Reading { ahead: window > 0, window: window.max(largest), order, of, ..Reading::default() }
    }

    /// Whether weights are read for this stage.
    fn concerns(&self, stage: usize) -> bool {
        !self.of[stage].is_empty()
    }

    /// Makes a stage's weights present: waits for what is being read.
    pub fn arrive<B: Backend>(
        &mut self,
        stages: &mut [Stage<B>],
        stage: usize,
        meter: &mut Meter,
    ) -> Result<(), BackendError> {
        let own = self.of[stage].clone();
        if self.oldest() != own.start {
            self.begin_again(stages, own.start)?;
        }
        while self.begun < own.len() {
            self.begin(stages)?;
        }
        for at in own {
            let Chunk { number, bytes, .. } = self.order[at];
            let took = stages[stage].session.finish(number)?;
            meter.read(&Read { partition: &stages[stage].name, bytes }, took);
        }
        Ok(())
    }

    /// Lets go of a stage's weights and reads on into the room that makes.
    pub fn leave<B: Backend>(&mut self, stages: &mut [Stage<B>], stage: usize) -> Result<(), BackendError> {
        stages[stage].session.release()?;
        let own = self.of[stage].clone();
        self.begun -= own.len();
        self.held -= self.order[own].iter().map(|chunk| chunk.bytes).sum::<u64>();
        self.fill(stages)
    }

    /// Reads on while there is room.
    pub fn fill<B: Backend>(&mut self, stages: &mut [Stage<B>]) -> Result<(), BackendError> {
        while self.ahead && self.begun < self.order.len() && self.held + self.order[self.next].bytes <= self.window {
            self.begin(stages)?;
        }
        Ok(())
    }

    fn begin<B: Backend>(&mut self, stages: &mut [Stage<B>]) -> Result<(), BackendError> {
        let Chunk { stage, number, bytes } = self.order[self.next];
        stages[stage].session.begin(number)?;
        self.held += bytes;
        self.begun += 1;
        self.next = (self.next + 1) % self.order.len();
        Ok(())
    }

    /// A pass did not go to its end: what was read for the rest of it is let go.
    fn begin_again<B: Backend>(&mut self, stages: &mut [Stage<B>], at: usize) -> Result<(), BackendError> {
        let mut held: Vec<usize> = (0..self.begun).map(|ago| self.order[self.before(ago + 1)].stage).collect();
        held.dedup();
        (self.held, self.begun, self.next) = (0, 0, at);
        held.into_iter().try_for_each(|stage| stages[stage].session.release())
    }

    /// Position of the oldest chunk that is held; of the next to begin where none is.
    fn oldest(&self) -> usize {
        self.before(self.begun)
    }

    fn before(&self, ago: usize) -> usize {
        (self.next + self.order.len() - ago) % self.order.len()
    }
}

impl<B: Backend> Engine<B> {
    /// Begins to read what the first pass needs.
    pub(crate) fn read_ahead(&mut self) -> Result<(), EngineError> {
        let Engine { stages, reading, .. } = self;
        reading.fill(stages).map_err(|source| EngineError::Memory { what: "the reading of weights".into(), source })
    }

    /// Waits for a stage's weights where they are read for each pass.
    pub(crate) fn weights_arrive(&mut self, stage: usize) -> Result<(), EngineError> {
        let Engine { stages, reading, meter, areas, .. } = self;
        if !reading.concerns(stage) {
            return Ok(());
        }
        let from = areas.backend.now();
        let arrived = reading.arrive(stages, stage, meter);
        arrived.map_err(|source| stages[stage].failed("having its weights read", source))?;
        meter.stalled(stage, Took { from, to: areas.backend.now() });
        Ok(())
    }

    /// Lets go of what a stage's run has used.
    pub(crate) fn weights_leave(&mut self, stage: usize) -> Result<(), EngineError> {
        let Engine { stages, reading, .. } = self;
        reading.leave(stages, stage).map_err(|source| stages[stage].failed("letting go of its weights", source))
    }
}
