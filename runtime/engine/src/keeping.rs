//! What of the weights stays in host memory: as much as the plan's budget holds beside everything else, in the plan's proportions.

use crate::engine::Engine;
use crate::error::EngineError;
use crate::options::WeightReads;
use crate::port::{Backend, Keep, Session};
use crate::reporter::Reporter;
use crate::step::{LogitRows, StepInput};
use hpp_schema::{ByteSize, DeviceKind, Form, InputRole, ModelKind, Partition, Plan, Residency};

/// Tokens of the pass that shows which weights are used: enough for kernels that treat many rows unlike one.
const TRIAL: usize = 40;

/// How the weights of each partition are kept.
#[derive(Clone, Copy)]
pub(crate) struct Keeping {
    reads: WeightReads,
    /// Host memory to keep to, bytes: the plan's or what this process may use, whichever is less.
    memory: Option<u64>,
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
        let planned = plan.budgets.ram.map(|ram| ram.0).filter(|_| streams);
        let Some((planned, limit)) = planned.zip(backend.memory_limit()).filter(|(planned, limit)| limit < planned)
        else {
            return Ok(Keeping { reads, memory: planned });
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
        Ok(Keeping { reads, memory: Some(limit) })
    }

    /// Where a partition's weights are while it does not run.
    pub fn of(&self, plan: &Plan, form: &Form<'_>) -> Keep {
        let by_the_system = self.reads == WeightReads::ByTheSystem;
        match form.residency {
            Residency::Streamed if is_on_host(plan, form.device) && by_the_system => Keep::Mapped { rows: false },
            Residency::Streamed if is_on_host(plan, form.device) => Keep::Streamed,
            Residency::Mapped => Keep::Mapped { rows: !by_the_system },
            Residency::Resident | Residency::Streamed => Keep::InMemory,
        }
    }

    /// Most bytes of weights on their way that lie in memory at once; 0 where each partition's are read when it is about to run.
    pub fn window(&self, plan: &Plan) -> u64 {
        let host = plan.devices.iter().find(|device| device.kind == DeviceKind::Cpu);
        match self.reads {
            WeightReads::OnTime => 0,
            _ => host.and_then(|host| host.window).map_or(0, |window| window.0),
        }
    }

    /// Bytes to lock in all: what is left of the memory beside what is in use now, state, activations and weights on their way.
    /// Where the system does not say what is in use, as much as the plan says.
    fn room(&self, plan: &Plan, resident: Option<u64>) -> u64 {
        let planned: u64 = plan.partitions.iter().map(locked).sum();
        let Some(memory) = self.memory else { return planned };
        let Some(resident) = resident else {
            let less = plan.budgets.ram.map_or(0, |ram| ram.0.saturating_sub(memory));
            return planned.saturating_sub(less);
        };
        let on_host = plan.partitions.iter().filter(|partition| is_on_host(plan, &partition.device));
        let kv: u64 = plan.states.iter().filter(|state| state.device == "cpu").map(|state| state.bytes.0).sum();
        let workspace = on_host.map(|partition| partition.bytes.workspace.0).max().unwrap_or(0);
        [resident, self.window(plan), kv.saturating_mul(plan.budgets.batch), workspace]
            .into_iter()
            .fold(memory, u64::saturating_sub)
    }
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
        let room = keeping.room(&self.plan, resident);
        let planned: u64 = self.plan.partitions.iter().map(locked).sum();
        let share = if planned > 0 { room as f64 / planned as f64 } else { 0.0 };
        let locked: Vec<u64> = self.plan.partitions.iter().map(|p| (share * locked(p) as f64) as u64).collect();
        for stage in &self.stages {
            let settled = self.sessions[stage.session].settle(locked[stage.partition]);
            let warning = settled.map_err(|source| stage.failed("having its weights locked", source))?;
            warning.iter().for_each(|warning| reporter.warning(warning));
        }
        let schedules = [&self.acts[0][..], &self.acts[1][..]];
        self.reading = crate::reading::supply(&self.stages, &self.sessions, schedules, keeping.window(&self.plan));
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
