//! Weights that are read from disk while others compute, so that the disk never waits while there is room and no more of them
//! lie in memory than the plan allows.

use crate::engine::Engine;
use crate::error::{BackendError, EngineError};
use crate::meter::{Awaited, Began, Meter, Read, Time, Took};
use crate::port::{Backend, Session};
use crate::stage::{Act, Stage};
use crate::supply::{Chunk, Supply};
use crate::telemetry::Phase;

/// The chunks that sessions read for these schedules, prefill's and decoding's, with room for `window` bytes; with no window
/// nothing is read ahead.
pub(crate) fn supply<S: Session>(stages: &[Stage], sessions: &[S], schedules: [&[Act]; 2], window: u64) -> Supply {
    let chunks = |act: &Act| -> Vec<Chunk> {
        let Act::Run(stage) = *act else { return vec![] };
        let bytes = sessions[stages[stage].session].chunks().iter().enumerate();
        bytes.map(|(number, bytes)| Chunk { stage, number, room: bytes.held }).collect()
    };
    Supply::new(schedules.map(|acts| acts.iter().flat_map(chunks).collect()), window, window > 0)
}

impl<B: Backend> Engine<B> {
    /// Begins to bring what the first pass needs.
    pub(crate) fn bring_ahead(&mut self) -> Result<(), EngineError> {
        let about = |source| EngineError::Memory { what: "the reading of weights".into(), source };
        read_on(&mut self.reading, &self.stages, &mut self.sessions).map_err(about)?;
        let about = |source| EngineError::Memory { what: "the copying of weights".into(), source };
        self.slots.fill(&self.areas).map_err(about)
    }

    /// Sees to it that the weights of a stage that is about to run are there or on their way.
    pub(crate) fn weights_come(&mut self, stage: usize, phase: Phase) -> Result<(), EngineError> {
        let Engine { stages, sessions, reading, areas, slots, meter, .. } = self;
        if reading.concerns(stage) {
            let come = come(reading, stages, sessions, stage, phase);
            return come.map_err(|source| stages[stage].failed("having its weights read", source));
        }
        slots
            .come(areas, stage, phase, meter)
            .map_err(|source| stages[stage].failed("having its weights copied", source))
    }

    /// Sees to it that the stage's run finds them.
    pub(crate) fn weights_arrive(&mut self, stage: usize) -> Result<(), EngineError> {
        let Engine { stages, sessions, reading, meter, areas, slots, .. } = self;
        let from = areas.backend.now();
        let at = &stages[stage];
        let (awaited, by_device) = if reading.concerns(stage) {
            let arrived = arrive(&mut sessions[at.session], &at.name, meter);
            arrived.map_err(|source| at.failed("having its weights read", source))?;
            (Awaited::Disk, None)
        } else if slots.is_streamed(stage) {
            let arrived = slots.arrive(areas, stage, meter);
            (Awaited::Slot, arrived.map_err(|source| at.failed("having its weights copied", source))?)
        } else {
            return Ok(());
        };
        let time = by_device.map_or_else(|| Time::Known(Took { from, to: areas.backend.now() }), Time::Later);
        meter.began(Began::Stall { stage, awaited }, time);
        Ok(())
    }

    /// Lets go of what a stage's run has used, and brings on into the room that makes.
    pub(crate) fn weights_leave(&mut self, stage: usize) -> Result<(), EngineError> {
        let Engine { stages, sessions, reading, slots, areas, .. } = self;
        // Also where nothing is read for it: a session may let go of what a run has touched of mapped weights, and while they
        // are tried it looks at what that was.
        let left = sessions[stages[stage].session].release().and_then(|()| {
            if !reading.concerns(stage) {
                return slots.leave(areas, stage);
            }
            reading.left(stage);
            read_on(reading, stages, sessions)
        });
        left.map_err(|source| stages[stage].failed("letting go of its weights", source))
    }

    /// A pass begins, behind which comes another of phase `then`.
    pub(crate) fn passing(&mut self, then: Phase) -> Result<(), EngineError> {
        self.reading.passing(then);
        self.slots.passing(then);
        self.bring_ahead()
    }
}

fn come<S: Session>(
    reading: &mut Supply,
    stages: &[Stage],
    sessions: &mut [S],
    stage: usize,
    phase: Phase,
) -> Result<(), BackendError> {
    if !reading.is_due(stage) {
        // A pass did not go to its end, or goes another way: what was read for the rest of it is let go.
        let held = reading.begin_again(phase, stage);
        held.into_iter().try_for_each(|held| sessions[stages[held].session].release())?;
    }
    for _ in 0..reading.lacks(phase, stage) {
        if let Some(chunk) = reading.next_now() {
            sessions[stages[chunk.stage].session].begin(chunk.number)?;
        }
    }
    Ok(())
}

fn arrive<S: Session>(session: &mut S, partition: &str, meter: &mut Meter) -> Result<(), BackendError> {
    for chunk in 0..session.chunks().len() {
        let bytes = session.chunks()[chunk].read;
        let took = session.finish(chunk)?;
        meter.read(&Read { partition, bytes }, took);
    }
    Ok(())
}

fn read_on<S: Session>(reading: &mut Supply, stages: &[Stage], sessions: &mut [S]) -> Result<(), BackendError> {
    while let Some(chunk) = reading.next_in_room() {
        sessions[stages[chunk.stage].session].begin(chunk.number)?;
    }
    Ok(())
}
