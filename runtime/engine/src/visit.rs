//! Visits: states that lie in one memory and are computed on in another. Before a run they are copied to a desk there,
//! after it back home. Stages take turns at the desks, so the computing memory holds one stage's states at a time.

use crate::area::{Area, Areas, Key, about, size_of};
use crate::error::EngineError;
use crate::feed::copy;
use crate::meter::{Meter, Moved, Took};
use crate::port::{Backend, MemoryId};
use crate::stage::{From, Stage};
use crate::state::StateLayout;
use hpp_schema::StateUpdate;

/// Desks, and which of them each state uses.
pub(crate) struct Visits<B: Backend> {
    /// By state number: the desks of its past and its present, one and the same for a state updated in place.
    seats: Vec<Option<(usize, usize)>>,
    desks: Vec<Area<B>>,
}

impl<B: Backend> Visits<B> {
    /// Reserves desks for the states that need them: as many as the stage with the most uses, each for the largest.
    pub fn new(areas: &Areas<B>, layouts: &[StateLayout], stages: &[Stage<B>]) -> Result<Self, EngineError> {
        let mut seats = vec![None; layouts.len()];
        let mut sizes: Vec<(MemoryId, u64)> = Vec::new();
        for stage in stages {
            let mut taken = Vec::new();
            for number in visitors(stage, layouts) {
                let layout = &layouts[number];
                let bytes = size_of(&layout.past, layout.dtype, &layout.full)?;
                let mut sit = || sit(&mut sizes, &mut taken, layout.computed_in, bytes);
                let past = sit();
                let in_place = matches!(layout.update, StateUpdate::InPlace { .. });
                seats[number] = Some((past, if in_place { past } else { sit() }));
            }
        }
        let desk = |(memory, bytes): &(MemoryId, u64)| areas.reserve(*memory, *bytes).map_err(about("visiting state"));
        Ok(Visits { seats, desks: sizes.iter().map(desk).collect::<Result<_, _>>()? })
    }

    /// The past of a state where it is computed on: its own area, or a copy of it on its desk.
    pub fn past<'a>(
        &'a self,
        areas: &Areas<B>,
        number: usize,
        layout: &StateLayout,
        (home, key): (&'a Area<B>, Key),
        meter: &mut Meter,
    ) -> Result<(&'a Area<B>, Key), EngineError> {
        let Some((past, _)) = self.seats[number] else { return Ok((home, key)) };
        let desk = &self.desks[past];
        travel(areas, layout, home, desk, &key, meter)?;
        Ok((desk, Key { serial: desk.serial, dims: key.dims }))
    }

    /// Where a run leaves the present of a state: its own area, or its desk.
    pub fn present<'a>(&'a self, number: usize, (home, key): (&'a Area<B>, Key)) -> (&'a Area<B>, Key) {
        let Some((_, present)) = self.seats[number] else { return (home, key) };
        let desk = &self.desks[present];
        (desk, Key { serial: desk.serial, dims: key.dims })
    }

    /// Takes the present of a state home after a run.
    pub fn leave(
        &self,
        areas: &Areas<B>,
        number: usize,
        layout: &StateLayout,
        (home, key): (&Area<B>, Key),
        meter: &mut Meter,
    ) -> Result<(), EngineError> {
        match self.seats[number] {
            Some((_, present)) => travel(areas, layout, &self.desks[present], home, &key, meter),
            None => Ok(()),
        }
    }
}

/// States of a stage that lie elsewhere, each once.
fn visitors<'a, B: Backend>(stage: &'a Stage<B>, layouts: &'a [StateLayout]) -> impl Iterator<Item = usize> + 'a {
    stage.inputs.iter().filter_map(|(from, _)| match from {
        From::State(number) if layouts[*number].memory != layouts[*number].computed_in => Some(*number),
        _ => None,
    })
}

/// The first desk of this memory that the stage has not taken, made large enough; a new one if all are taken.
fn sit(sizes: &mut Vec<(MemoryId, u64)>, taken: &mut Vec<usize>, memory: MemoryId, bytes: u64) -> usize {
    let free = (0..sizes.len()).find(|at| sizes[*at].0 == memory && !taken.contains(at));
    let at = free.unwrap_or_else(|| {
        sizes.push((memory, 0));
        sizes.len() - 1
    });
    sizes[at].1 = sizes[at].1.max(bytes);
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
    let started = areas.backend.now();
    copy(areas, from, to, layout.dtype, &key.dims).map_err(about(&layout.past))?;
    let bytes = size_of(&layout.past, layout.dtype, &key.dims)?;
    let moved = Moved { name: &layout.past, from: from.memory, to: to.memory, bytes };
    meter.moved(&moved, Took { from: started, to: areas.backend.now() });
    Ok(())
}
