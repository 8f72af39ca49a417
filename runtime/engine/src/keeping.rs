//! What of the weights stays in host memory: as much as the plan's budget holds beside everything else, in the plan's proportions.

use crate::engine::Engine;
use crate::error::EngineError;
use crate::options::WeightReads;
use crate::port::{Backend, Keep, Session};
use crate::reporter::Reporter;
use crate::step::{LogitRows, StepInput};
use hpp_schema::memory::{PROCESS, READ_AHEAD};
use hpp_schema::{ByteSize, DeviceKind, Form, InputRole, ModelKind, Partition, Plan, Provider, Residency};

/// Tokens of the pass that shows which weights are used: enough for kernels that treat many rows unlike one.
const TRIAL: usize = 40;

/// How the weights of each partition are kept.
#[derive(Clone, Copy)]
pub(crate) struct Keeping {
    reads: WeightReads,
    /// Host memory to keep to, bytes: the plan's or what this process may use, whichever is less.
    memory: Option<u64>,
    /// Where the weights of partitions are that were planned for a device and run on the host after all.
    stranded: Keep,
}

impl Keeping {
    /// As the plan says. Where the system gives this process less memory than the plan was made for, less is locked; refuses
    /// where even nothing locked would not do.
    pub fn new<B: Backend>(
        plan: &Plan,
        backend: &B,
        reads: WeightReads,
        reporter: &dyn Reporter,
    ) -> Result<Self, EngineError> {
        let from_disk = |partition: &Partition| is_streamed(partition) && is_on_host(plan, &partition.device);
        let streams = reads != WeightReads::ByTheSystem && plan.partitions.iter().any(from_disk);
        let limit = backend.memory_limit();
        let least = plan.budgets.ram.map(|ram| ram.0).into_iter().chain(limit).min();
        let stranded = match least.is_some_and(|least| least < all_on_host(plan)) && reads != WeightReads::ByTheSystem {
            true => Keep::Streamed,
            false => Keep::InMemory,
        };
        let planned = plan.budgets.ram.map(|ram| ram.0).filter(|_| streams);
        let Some((planned, limit)) = planned.zip(limit).filter(|(planned, limit)| limit < planned) else {
            return Ok(Keeping { reads, memory: planned.or(least.filter(|_| stranded == Keep::Streamed)), stranded });
        };
        let locked: u64 = plan.partitions.iter().map(locked).sum();
        let human = |bytes: u64| ByteSize(bytes).human();
        let Some(left) = locked.checked_sub(planned - limit) else {
            return Err(EngineError::TooLittleMemory { planned, limit, needed: planned - locked });
        };
        reporter.warning(&format!(
            "the plan was made for {} of host memory and this process may use {}: about {} of weights stay in memory instead \
             of {}",
            human(planned),
            human(limit),
            human(left),
            human(locked)
        ));
        Ok(Keeping { reads, memory: Some(limit), stranded })
    }

    /// Where a partition's weights are while it does not run.
    pub fn of(&self, plan: &Plan, form: &Form<'_>) -> Keep {
        let by_the_system = self.reads == WeightReads::ByTheSystem;
        match form.residency {
            Residency::Streamed if is_on_host(plan, form.device) && by_the_system => Keep::Mapped { rows: false },
            Residency::Streamed if is_on_host(plan, form.device) => Keep::Streamed,
            Residency::Mapped => Keep::Mapped { rows: !by_the_system },
            // Of use on the host only: what is on its device lies in the memory there.
            Residency::Resident | Residency::Streamed if !is_on_host(plan, form.device) => self.stranded,
            Residency::Resident | Residency::Streamed => Keep::InMemory,
        }
    }

    /// Most bytes of weights on their way that lie in memory at once; 0 where each partition's are read when it is about to run.
    /// `stranded` are partitions planned for a device that are read on the host.
    pub fn window<'a>(&self, plan: &Plan, stranded: impl Iterator<Item = &'a Partition>) -> u64 {
        let host = plan.devices.iter().find(|device| device.kind == DeviceKind::Cpu);
        let largest = stranded.map(|partition| partition.bytes.weights.0).max();
        let unplanned = largest.map_or(0, |largest| largest.saturating_add(READ_AHEAD));
        match self.reads {
            WeightReads::OnTime => 0,
            _ => host.and_then(|host| host.window).map_or(0, |window| window.0).max(unplanned),
        }
    }

    /// Bytes to lock in all, of `planned`: what is left of the memory beside what is in use now, state, activations and weights on
    /// their way. Where the system does not say what is in use, as much as the plan says.
    fn room(&self, plan: &Plan, planned: u64, stranded: &[&Partition], resident: Option<u64>) -> u64 {
        let Some(memory) = self.memory else { return planned };
        let Some(resident) = resident else {
            let less = plan.budgets.ram.map_or(0, |ram| ram.0.saturating_sub(memory));
            return planned.saturating_sub(less);
        };
        let window = self.window(plan, stranded.iter().copied());
        let beside = beside(plan, |device| is_on_host(plan, device) || !stranded.is_empty());
        memory.saturating_sub(resident).saturating_sub(window).saturating_sub(beside)
    }

    /// Bytes of weights streamed to devices that the host may hold, now that it has loaded what it computes with; nothing where
    /// no limit was planned for.
    pub fn for_devices(&self, plan: &Plan, resident: Option<u64>) -> Option<u64> {
        let ram = plan.budgets.ram?.0.min(self.memory.unwrap_or(u64::MAX));
        let locked: u64 = plan.partitions.iter().map(locked).sum();
        let window = self.window(plan, std::iter::empty());
        let beside = beside(plan, |device| is_on_host(plan, device));
        let used = [resident.unwrap_or(0), locked, window, beside];
        Some(used.into_iter().fold(ram, u64::saturating_sub))
    }
}

/// State and activations of the devices that count, bytes.
fn beside(plan: &Plan, counts: impl Fn(&str) -> bool) -> u64 {
    let states = plan.states.iter().filter(|state| counts(&state.device)).map(|state| state.bytes.0);
    let kv = states.fold(0, u64::saturating_add).saturating_mul(plan.budgets.batch);
    let here = plan.partitions.iter().filter(|partition| counts(&partition.device));
    kv.saturating_add(here.map(|partition| partition.bytes.workspace.0).max().unwrap_or(0))
}

/// Bytes of host memory that all of a plan would take there, its weights as kernels pack them: up to a fifth more.
fn all_on_host(plan: &Plan) -> u64 {
    let weights = plan.partitions.iter().map(|partition| partition.bytes.weights.0).fold(0, u64::saturating_add);
    weights.saturating_add(weights / 5).saturating_add(beside(plan, |_| true)).saturating_add(PROCESS)
}

impl<B: Backend> Engine<B> {
    /// Decides what of streamed weights stays in memory, and begins to read the rest.
    pub(crate) fn settle(&mut self, keeping: Keeping, reporter: &dyn Reporter) -> Result<(), EngineError> {
        if !self.plan.partitions.iter().any(|partition| keeping.of(&self.plan, &partition.form()) == Keep::Streamed) {
            return Ok(());
        }
        if self.sessions.iter().any(Session::wants_trial) {
            self.try_out()?;
        }
        let resident = self.areas.backend.memory_use().resident;
        let stranded: Vec<bool> = self.stranded(keeping).collect();
        let partitions = &self.plan.partitions;
        let read: Vec<&Partition> = partitions.iter().zip(&stranded).filter(|(_, s)| **s).map(|(p, _)| p).collect();
        let wanted = |at: usize| if stranded[at] { partitions[at].bytes.weights.0 } else { locked(&partitions[at]) };
        let planned = (0..partitions.len()).map(wanted).fold(0, u64::saturating_add);
        let room = keeping.room(&self.plan, planned, &read, resident);
        let share = if planned > 0 { room as f64 / planned as f64 } else { 0.0 };
        for stage in &self.stages {
            let locked = (share * wanted(stage.partition) as f64) as u64;
            let settled = self.sessions[stage.session].settle(locked);
            let warning = settled.map_err(|source| stage.failed("having its weights locked", source))?;
            warning.iter().for_each(|warning| reporter.warning(warning));
        }
        let window = keeping.window(&self.plan, read.into_iter());
        let schedules = [&self.acts[0][..], &self.acts[1][..]];
        self.reading = crate::reading::supply(&self.stages, &self.sessions, schedules, window);
        self.bring_ahead()?;
        let used = self.areas.backend.memory_use().resident;
        if let Some((memory, used)) = keeping.memory.zip(used).filter(|(memory, used)| used > memory) {
            reporter.warning(&format!(
                "{} of host memory are in use after loading, and the plan was made for {}",
                ByteSize(used).human(),
                ByteSize(memory).human()
            ));
        }
        Ok(())
    }

    /// Whether each partition is read from disk on the host, planned for a device that is not to be had.
    fn stranded(&self, keeping: Keeping) -> impl Iterator<Item = bool> {
        let on_host = |at: usize| {
            let measured = self.meter.telemetry.stages.iter().zip(&self.stages);
            let mut own = measured.filter(move |(_, stage)| stage.partition == at);
            own.any(|(measured, stage)| measured.provider == Provider::Cpu && !is_on_host(&self.plan, &stage.device))
        };
        (0..self.plan.partitions.len()).map(move |at| keeping.stranded == Keep::Streamed && on_host(at))
    }

    /// One pass of several tokens and one of one, on made-up tokens, so that sessions see which of their weights are used. A
    /// model that wants more than tokens is not tried: then all weights count as used.
    fn try_out(&mut self) -> Result<(), EngineError> {
        let made_up = |role: InputRole| role == InputRole::Free || role == InputRole::Embeddings;
        let room = usize::try_from(self.context).unwrap_or(usize::MAX).saturating_sub(1);
        let is_decoder = self.plan.model.kind == ModelKind::Decoder;
        if !is_decoder || room == 0 || self.plan.model.inputs.iter().any(|input| made_up(input.role)) {
            return Ok(());
        }
        let mut sequence = self.new_sequence()?;
        self.step(&mut sequence, StepInput::Tokens(&vec![0; TRIAL.min(room)]), LogitRows::Last)?;
        self.step(&mut sequence, StepInput::Tokens(&[0]), LogitRows::Last)?;
        let state = self.meter.telemetry.state_bytes;
        self.reset_telemetry();
        self.meter.telemetry.state_bytes = state.saturating_sub(sequence.state_bytes());
        Ok(())
    }
}

/// Bytes of a partition's weights that the plan keeps in memory of those it streams.
fn locked(partition: &Partition) -> u64 {
    partition.bytes.locked.filter(|_| is_streamed(partition)).map_or(0, |locked| locked.0)
}

fn is_streamed(partition: &Partition) -> bool {
    partition.residency == Residency::Streamed
}

fn is_on_host(plan: &Plan, name: &str) -> bool {
    plan.devices.iter().any(|device| device.name == name && device.kind == DeviceKind::Cpu)
}
