//! Making slots: a ring for each device that streams, then a slot for each resident stage, in the plan's order. Where the
//! device has less memory than that takes, what no longer fits is streamed instead.

use super::{Place, Ring, Slots, Weights};
use crate::area::{Area, Areas};
use crate::error::{BackendError, EngineError};
use crate::options::{EngineOptions, WeightReads};
use crate::port::{Backend, Dims, Fallback, Hold, MemoryId, WeightSpec};
use crate::reporter::Reporter;
use crate::stage::{Act, From, Stage};
use hpp_schema::{ByteSize, Form, Plan, Residency, WeightInput, in_slot};
use std::path::Path;

/// Slots of a ring that the plan did not ask for.
const FEWEST: u32 = 2;

impl<B: Backend> Slots<B> {
    /// Makes room for all weights that are inputs, and fills what is resident.
    pub fn new(
        areas: &Areas<B>,
        plan: &Plan,
        dir: &Path,
        stages: &[Stage],
        acts: [&[Act]; 2],
        (options, may_hold): (&EngineOptions, Option<u64>),
        reporter: &dyn Reporter,
    ) -> Result<Self, EngineError> {
        let mut slots = Slots { weights: stages.iter().map(|_| None).collect(), rings: vec![], poison: None };
        let ahead = options.weights != WeightReads::OnTime;
        let host = Host::new(plan, stages, options, may_hold);
        for device in &plan.devices {
            let making = Making { areas, plan, dir, stages, device: &device.name, ahead, host, options, reporter };
            making.device(device.ring.map(|ring| ring.slots), &mut slots)?;
        }
        let largest = slots.weights.iter().flatten().flat_map(|weights| &weights.sizes).max().copied();
        if let Some(bytes) = largest.filter(|_| options.poison_slots) {
            let about = |source| EngineError::Memory { what: "poison for slots".into(), source };
            let ones = areas.reserve(MemoryId::HOST, bytes + SLACK).map_err(about)?;
            areas.backend.write(&ones.buffer, 0, &vec![0xff; (bytes + SLACK) as usize]).map_err(about)?;
            slots.poison = Some(ones);
        }
        slots.follow(acts);
        Ok(slots)
    }
}

/// Bytes by which a slot's area may be larger than the largest weight: an empty one has a byte.
const SLACK: u64 = 1;

/// Making the slots of one device.
struct Making<'a, B: Backend> {
    areas: &'a Areas<B>,
    plan: &'a Plan,
    dir: &'a Path,
    stages: &'a [Stage],
    device: &'a str,
    ahead: bool,
    host: Host,
    options: &'a EngineOptions,
    reporter: &'a dyn Reporter,
}

/// What the host may hold of weights that are streamed to devices.
#[derive(Clone, Copy)]
struct Host {
    /// Of each stage's, 0 to 1.
    share: f64,
    /// Whether that is less than all because there is no memory for more: then the system is not to keep them either.
    short: bool,
}

impl Host {
    fn new(plan: &Plan, stages: &[Stage], options: &EngineOptions, may_hold: Option<u64>) -> Self {
        let streamed = stages.iter().filter_map(|stage| form(plan, stage)).filter(|form| streams(form));
        let all = streamed.flat_map(|form| form.weights).filter_map(WeightInput::bytes).fold(0, u64::saturating_add);
        let holds = all.min(may_hold.unwrap_or(u64::MAX));
        let pinned = holds.min(options.pinned.unwrap_or(u64::MAX));
        let share = if all > 0 { pinned as f64 / all as f64 } else { 0.0 };
        Host { share, short: holds < all || plan.devices.iter().any(|device| device.window.is_some()) }
    }
}

fn streams(form: &Form<'_>) -> bool {
    form.residency == Residency::Streamed
}

/// The form in which a stage computes whose weights are inputs: not of one that runs as constants after all.
fn form<'a>(plan: &'a Plan, stage: &Stage) -> Option<Form<'a>> {
    stage.inputs.iter().find(|input| matches!(input.from, From::Weight(_)))?;
    let forms = plan.partitions[stage.partition].forms();
    forms.into_iter().find(|form| form.device == stage.device && !form.weights.is_empty())
}

impl<B: Backend> Making<'_, B> {
    fn device(&self, planned: Option<u32>, slots: &mut Slots<B>) -> Result<(), EngineError> {
        let mut memories = Vec::new();
        self.pin();
        for (number, stage) in self.stages.iter().enumerate().filter(|(_, stage)| stage.device == self.device) {
            let Some(form) = self.form(stage).filter(|form| !form.weights.is_empty()) else { continue };
            let weights = self.weights(stage, &form)?;
            memories.push(weights.memory);
            slots.weights[number] = Some(weights);
        }
        // One, but where some sessions are on the host because the device's provider does not have them.
        memories.sort_unstable();
        memories.dedup();
        memories.into_iter().try_for_each(|memory| self.memory(memory, planned, slots))
    }

    /// Pins memory for all that is streamed, or as much as may be and can be had.
    fn pin(&self) {
        let pinned = |stage: &&Stage| self.hold(stage).pinned > 0;
        let streamed: Vec<&Stage> =
            self.stages.iter().filter(|stage| stage.device == self.device).filter(pinned).collect();
        let Some(memory) = streamed.first().map(|stage| memory_of(stage)).filter(|memory| *memory != MemoryId::HOST)
        else {
            return;
        };
        let wanted = streamed.iter().map(|stage| self.hold(stage).pinned).fold(0, u64::saturating_add);
        let got = self.areas.backend.pin(memory, wanted);
        // Nothing at all: a provider that cannot pin.
        if got < wanted && (got > 0 || self.options.pinned.is_some()) {
            self.reporter.warning(&format!(
                "{} of host memory could be pinned for {}, of {}: the other weights are read and copied through a small part of it",
                ByteSize(got).human(),
                self.device,
                ByteSize(wanted).human()
            ));
        }
    }

    /// Where the host holds a stage's weights: those that stay on their device are copied once, of the others an equal share of
    /// each stage's is pinned.
    fn hold(&self, stage: &Stage) -> Hold {
        let streamed = self.form(stage).filter(streams);
        let bytes = streamed.iter().flat_map(|form| form.weights).filter_map(WeightInput::bytes);
        let bytes = bytes.fold(0, u64::saturating_add);
        Hold { pinned: (self.host.share * bytes as f64) as u64, forget: self.host.short }
    }

    /// Slots in one memory: a ring for what is streamed, then one for each stage that stays.
    fn memory(&self, memory: MemoryId, planned: Option<u32>, slots: &mut Slots<B>) -> Result<(), EngineError> {
        let (mut resident, mut streamed) = (Vec::new(), Vec::new());
        for (number, stage) in self.stages.iter().enumerate().filter(|(_, stage)| stage.device == self.device) {
            if slots.weights[number].as_ref().is_some_and(|weights| weights.memory == memory) {
                let is_streamed = self.form(stage).is_some_and(|form| streams(&form));
                if is_streamed { streamed.push(number) } else { resident.push(number) }
            }
        }
        let sizes = self.plan.slot(self.device);
        let mut ring = match streamed.is_empty() {
            true => None,
            false => Some(self.ring(&sizes, memory, planned.unwrap_or(FEWEST))?),
        };
        let mut own: Vec<(usize, Vec<Area<B>>)> = Vec::new();
        let mut left = resident.iter();
        for number in left.by_ref() {
            match self.own(slots, *number) {
                Ok(slot) => own.push((*number, slot)),
                Err(error) => {
                    // The first that found no room, and all behind it; and before it as many as a ring takes if there is none.
                    let mut moved: Vec<usize> = std::iter::once(*number).chain(left.by_ref().copied()).collect();
                    if ring.is_none() {
                        ring = Some(self.ring_instead_of(&sizes, memory, &mut own, &mut moved, &error)?);
                    }
                    self.say(&moved, resident.len(), error)?;
                    streamed.extend(moved);
                    break;
                }
            }
        }
        for (number, slot) in own {
            self.fill(slots, number, slot)?;
        }
        if let Some(ring) = ring {
            streamed.iter().for_each(|stage| place(slots, *stage, Place::Ring(slots.rings.len())));
            slots.rings.push(ring);
        }
        Ok(())
    }

    fn form(&self, stage: &Stage) -> Option<Form<'_>> {
        form(self.plan, stage)
    }

    fn weights(&self, stage: &Stage, form: &Form<'_>) -> Result<Weights<B>, EngineError> {
        let dir = self.dir.join(&self.plan.partitions[stage.partition].weights_dir);
        let bytes = |at: usize| form.weights[at].bytes().unwrap_or(u64::MAX);
        let spec = |at: usize| WeightSpec {
            file: dir.join(&form.weights[at].file),
            offset: form.weights[at].offset,
            bytes: bytes(at),
        };
        let specs: Vec<WeightSpec> = (0..form.weights.len()).map(spec).collect();
        let memory = memory_of(stage);
        let source = self.areas.backend.source(&specs, memory, self.hold(stage));
        let source = source.map_err(|source| stage.failed("being given its weights", source))?;
        let order = in_slot(form.weights);
        let area = |at: usize| order.iter().position(|other| *other == at).unwrap_or(0);
        let pieces = (0..form.weights.len()).map(|at| (Dims::from_slice(&form.weights[at].shape), area(at)));
        Ok(Weights {
            source,
            pieces: pieces.collect(),
            sizes: order.iter().map(|at| bytes(*at)).collect(),
            bytes: specs.iter().map(|spec| spec.bytes).fold(0, u64::saturating_add),
            memory,
            place: Place::Own(vec![]),
        })
    }

    /// A ring of as many slots as asked for, or of the most that there is room for.
    fn ring(&self, sizes: &[u64], memory: MemoryId, slots: u32) -> Result<Ring<B>, EngineError> {
        let mut made = Vec::new();
        for number in 0..slots {
            match reserve(self.areas, sizes, memory) {
                Ok(slot) => made.push(slot),
                Err(error) if number == 0 || self.options.fallback == Fallback::Refuse => return Err(self.full(error)),
                Err(error) => {
                    let what = format!("{} has room for {number} slots of {slots}: {error}", self.device);
                    self.reporter.warning(&what);
                    break;
                }
            }
        }
        Ok(Ring::new(memory, made, self.ahead))
    }

    /// A ring in the place of the last resident slots.
    fn ring_instead_of(
        &self,
        sizes: &[u64],
        memory: MemoryId,
        own: &mut Vec<(usize, Vec<Area<B>>)>,
        moved: &mut Vec<usize>,
        error: &BackendError,
    ) -> Result<Ring<B>, EngineError> {
        let mut slots = Vec::new();
        while slots.len() < FEWEST as usize {
            match (reserve(self.areas, sizes, memory), own.pop()) {
                (Ok(slot), last) => {
                    slots.push(slot);
                    own.extend(last);
                }
                (Err(_), Some((last, _))) => moved.insert(0, last),
                (Err(_), None) if !slots.is_empty() => break,
                (Err(_), None) => return Err(self.full(error.clone())),
            }
        }
        Ok(Ring::new(memory, slots, self.ahead))
    }

    fn own(&self, slots: &Slots<B>, stage: usize) -> Result<Vec<Area<B>>, BackendError> {
        slots.weights[stage].as_ref().map_or(Ok(vec![]), |weights| reserve(self.areas, &weights.sizes, weights.memory))
    }

    /// Fills a slot that stays.
    fn fill(&self, slots: &mut Slots<B>, stage: usize, slot: Vec<Area<B>>) -> Result<(), EngineError> {
        let Some(weights) = &slots.weights[stage] else { return Ok(()) };
        let filled = weights.upload(self.areas, &slot).and_then(|upload| self.areas.backend.arrive(upload));
        filled.map_err(|source| self.stages[stage].failed("having its weights copied", source))?;
        place(slots, stage, Place::Own(slot));
        Ok(())
    }

    /// Says what is streamed instead of staying, or refuses that.
    fn say(&self, moved: &[usize], of: usize, error: BackendError) -> Result<(), EngineError> {
        if self.options.fallback == Fallback::Refuse {
            return Err(self.full(error));
        }
        let names: Vec<&str> = moved.iter().map(|stage| &*self.stages[*stage].name).collect();
        self.reporter.warning(&format!(
            "{} has less memory than planned: {} of {of} resident partitions are streamed instead ({})",
            self.device,
            moved.len(),
            crate::reporter::listed(&names)
        ));
        Ok(())
    }

    fn full(&self, source: BackendError) -> EngineError {
        EngineError::Memory { what: format!("the weights on {}", self.device), source }
    }
}

/// The memory a stage wants its weights in.
fn memory_of(stage: &Stage) -> MemoryId {
    let weight = stage.inputs.iter().find(|input| matches!(input.from, From::Weight(_)));
    weight.map_or(MemoryId::HOST, |input| input.port.memory)
}

fn place<B: Backend>(slots: &mut Slots<B>, stage: usize, place: Place<B>) {
    if let Some(weights) = &mut slots.weights[stage] {
        weights.place = place;
    }
}

/// A slot.
pub(super) fn reserve<B: Backend>(
    areas: &Areas<B>,
    sizes: &[u64],
    memory: MemoryId,
) -> Result<Vec<Area<B>>, BackendError> {
    sizes.iter().map(|bytes| areas.reserve(memory, *bytes)).collect()
}

/// Bytes of a slot, for people.
pub(super) fn human(sizes: &[u64]) -> String {
    ByteSize(sizes.iter().copied().fold(0, u64::saturating_add)).human()
}
