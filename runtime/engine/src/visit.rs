//! Visits: states that lie in one memory and are computed on in another. Before a run they are copied to a desk there,
//! after it back home.
//!
//! Where a state is computed on away from home in both phases, stages take turns at the desks, so the computing memory holds
//! one stage's states at a time. Where that is so in one phase only, each state has a desk of its own: it moves there and back
//! once for all passes of a prompt.

use crate::area::{Area, Areas, Key, about, size_of};
use crate::error::EngineError;
use crate::feed::copy;
use crate::meter::{Meter, Moved, Took};
use crate::port::{Backend, MemoryId};
use crate::stage::Stage;
use crate::state::StateLayout;
use hpp_schema::StateUpdate;
use std::collections::BTreeMap;

/// Desks, and which of them each state uses.
pub(crate) struct Visits<B: Backend> {
    /// By stage and state number.
    seats: BTreeMap<(usize, usize), Seat>,
    desks: Vec<Area<B>>,
}

/// The desks of a state's past and its present, one and the same for a state updated in place.
#[derive(Clone, Copy, Debug)]
struct Seat {
    past: usize,
    present: usize,
    /// Whether nobody else sits there.
    own: bool,
}

/// A desk to be made.
struct Desk {
    memory: MemoryId,
    bytes: u64,
    /// For one state only.
    own: bool,
}

/// When a state comes to a stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrives {
    /// Whether this is the first of the passes that take an input in.
    pub first: bool,
    /// Tokens it holds.
    pub past: u64,
}

/// When a state leaves a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leaves {
    AfterTheRun,
    AfterTheLastPass,
}

impl<B: Backend> Visits<B> {
    /// Reserves desks for the states that need them.
    pub fn new(areas: &Areas<B>, layouts: &[StateLayout], stages: &[Stage]) -> Result<Self, EngineError> {
        let mut seats = BTreeMap::new();
        let mut sizes: Vec<Desk> = Vec::new();
        for (at, stage) in stages.iter().enumerate() {
            let mut taken = Vec::new();
            for (number, memory) in visitors(stage, layouts) {
                let layout = &layouts[number];
                let bytes = size_of(&layout.past, layout.dtype, &layout.full)?;
                let in_place = matches!(layout.update, StateUpdate::InPlace { .. });
                // Appended states change their shape from pass to pass, and take turns; they cannot stay at a desk.
                let own = in_place && stages.iter().any(|other| other.memory_of_state(number) == Some(layout.memory));
                let mut sit = || sit(&mut sizes, &mut taken, Desk { memory, bytes, own });
                let past = sit();
                let present = if in_place { past } else { sit() };
                seats.insert((at, number), Seat { past, present, own });
            }
        }
        let desk = |desk: &Desk| areas.reserve(desk.memory, desk.bytes).map_err(about("visiting state"));
        Ok(Visits { seats, desks: sizes.iter().map(desk).collect::<Result<_, _>>()? })
    }

    /// The past of a state where a stage computes on it: its own area, or a copy of it on its desk.
    pub fn past<'a>(
        &'a self,
        areas: &Areas<B>,
        at: (usize, usize),
        layout: &StateLayout,
        (home, key): (&'a Area<B>, Key),
        arrives: Arrives,
        meter: &mut Meter,
    ) -> Result<(&'a Area<B>, Key), EngineError> {
        let Some(seat) = self.seats.get(&at) else { return Ok((home, key)) };
        let desk = &self.desks[seat.past];
        // Of a buffer without tokens nothing is read, and what stayed at its desk is there.
        if !seat.own || arrives.first && arrives.past > 0 {
            travel(areas, layout, home, desk, &key, meter)?;
        }
        Ok((desk, Key { serial: desk.serial, dims: key.dims }))
    }

    /// Where a stage's run leaves the present of a state: its own area, or its desk.
    pub fn present<'a>(&'a self, at: (usize, usize), (home, key): (&'a Area<B>, Key)) -> (&'a Area<B>, Key) {
        let Some(seat) = self.seats.get(&at) else { return (home, key) };
        let desk = &self.desks[seat.present];
        (desk, Key { serial: desk.serial, dims: key.dims })
    }

    /// Takes the present of a state home: from a desk that others wait for after the run, from one of its own when all passes of
    /// an input are over.
    pub fn leave(
        &self,
        areas: &Areas<B>,
        at: (usize, usize),
        layout: &StateLayout,
        (home, key): (&Area<B>, Key),
        leaves: Leaves,
        meter: &mut Meter,
    ) -> Result<(), EngineError> {
        match self.seats.get(&at) {
            Some(seat) if seat.own == (leaves == Leaves::AfterTheLastPass) => {
                travel(areas, layout, &self.desks[seat.present], home, &key, meter)
            }
            _ => Ok(()),
        }
    }

    /// Whether any state has a desk of its own.
    pub fn any_own(&self) -> bool {
        self.seats.values().any(|seat| seat.own)
    }
}

/// States of a stage that lie elsewhere, each once, and the memory they are wanted in.
fn visitors<'a>(stage: &'a Stage, layouts: &'a [StateLayout]) -> impl Iterator<Item = (usize, MemoryId)> + 'a {
    let wanted = |number| Some((number, stage.memory_of_state(number)?));
    stage.states().filter_map(wanted).filter(|(number, memory)| layouts[*number].memory != *memory)
}

/// The first shared desk of this memory that the stage has not taken, made large enough; a new one if all are taken, and for a state
/// that shares none.
fn sit(desks: &mut Vec<Desk>, taken: &mut Vec<usize>, wanted: Desk) -> usize {
    let fits = |desk: &Desk| desk.memory == wanted.memory && !desk.own && !wanted.own;
    let free = (0..desks.len()).find(|at| fits(&desks[*at]) && !taken.contains(at));
    let at = free.unwrap_or(desks.len());
    match desks.get_mut(at) {
        Some(desk) => desk.bytes = desk.bytes.max(wanted.bytes),
        None => desks.push(wanted),
    }
    taken.push(at);
    at
}

fn travel<B: Backend>(
    areas: &Areas<B>,
    layout: &StateLayout,
    from: &Area<B>,
    to: &Area<B>,
    key: &Key,
    meter: &mut Meter,
) -> Result<(), EngineError> {
    let started = areas.now_between(from.memory, to.memory, meter).map_err(about(&layout.past))?;
    copy(areas, from, to, layout.dtype, &key.dims).map_err(about(&layout.past))?;
    let bytes = size_of(&layout.past, layout.dtype, &key.dims)?;
    let moved = Moved { name: &layout.past, from: from.memory, to: to.memory, bytes };
    meter.moved(&moved, Took { from: started, to: areas.backend.now() });
    Ok(())
}
