//! The engine: a plan, loaded. It obeys the plan's schedule and makes no choices of its own.

use crate::area::{Area, Areas};
use crate::boundary::Boundary;
use crate::cancel::{Attached, CancelHandle};
use crate::error::EngineError;
use crate::feed::Feed;
use crate::meter::Meter;
use crate::options::EngineOptions;
use crate::port::Backend;
use crate::reporter::Reporter;
use crate::sequence::{History, Sequence};
use crate::slots::Slots;
use crate::stage::{Act, Bound, Stage};
use crate::state::{StateLayout, Store};
use crate::supply::Supply;
use crate::telemetry::{PassTelemetry, Telemetry};
use crate::tensor::HostTensor;
use crate::visit::Visits;
use crate::watch::Watch;
use hpp_schema::{ModelKind, Plan, Timeline};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// A plan, loaded and ready. Lives on the thread that made it.
pub struct Engine<B: Backend> {
    pub(crate) plan: Plan,
    pub(crate) areas: Areas<B>,
    pub(crate) control: B::Control,
    pub(crate) cancel: CancelHandle,
    /// Keeps `control` within the reach of `cancel`.
    pub(crate) _attached: Attached,
    pub(crate) stages: Vec<Stage>,
    pub(crate) sessions: Vec<B::Session>,
    /// For each phase the stage of each partition.
    pub(crate) by_phase: [Vec<usize>; 2],
    pub(crate) feeds: Vec<Feed<B>>,
    pub(crate) boundaries: Vec<Boundary<B>>,
    pub(crate) layouts: Vec<StateLayout>,
    pub(crate) visits: Visits<B>,
    /// Number of the boundary that carries the next-token scores.
    pub(crate) logits: Option<usize>,
    /// What each phase does, in order.
    pub(crate) acts: [Vec<Act>; 2],
    pub(crate) context: u64,
    /// What is read from disk.
    pub(crate) reading: Supply,
    /// Weights that are inputs of sessions.
    pub(crate) slots: Slots<B>,
    pub(crate) meter: Meter,
    pub(crate) taps: Taps,
    /// Bytes on their way from a device to the caller.
    pub(crate) scratch: Vec<u8>,
    /// Files that must not be written to.
    pub(crate) watch: Watch,
}

/// Outputs asked to be read back after each pass.
#[derive(Debug, Default)]
pub(crate) struct Taps {
    /// Counts the times the set changed.
    pub version: u64,
    pub wanted: BTreeSet<usize>,
    pub read: BTreeMap<String, HostTensor>,
}

impl<B: Backend> Engine<B> {
    /// Checks a plan and its files, loads its partitions, and is then ready to run.
    ///
    /// `dir` is the directory the plan lies in.
    pub fn load(
        plan: &Plan,
        dir: &Path,
        backend: &B,
        options: EngineOptions,
        reporter: &dyn Reporter,
    ) -> Result<Self, EngineError> {
        crate::load::load(plan, dir, backend, options, reporter)
    }

    /// Starts a new text.
    pub fn new_sequence(&mut self) -> Result<Sequence<B>, EngineError> {
        let stores =
            self.layouts.iter().map(|layout| Store::new(layout, &self.areas)).collect::<Result<Vec<_>, _>>()?;
        let limit = self.layouts.iter().map(|layout| layout.limit(self.context)).min().unwrap_or(self.context);
        let bound = self.bindings()?;
        self.meter.telemetry.state_bytes += stores.iter().map(Store::bytes).sum::<u64>();
        let (taps, history) = (self.taps.version, History::default());
        Ok(Sequence { length: 0, limit, stores, bound, taps, history, interrupted: false })
    }

    /// Empty bindings, one for each stage.
    pub(crate) fn bindings(&self) -> Result<Vec<Bound<B>>, EngineError> {
        let bind = |stage: &Stage| {
            Bound::new(stage, &self.sessions[stage.session]).map_err(|source| stage.failed("being bound", source))
        };
        self.stages.iter().map(bind).collect()
    }

    /// Gives a sequence a state that the model only reads, such as the keys and values of an encoder's output.
    pub fn give_state(
        &mut self,
        sequence: &mut Sequence<B>,
        past: &str,
        tensor: &HostTensor,
    ) -> Result<(), EngineError> {
        let at = self.layouts.iter().position(|layout| layout.past == past).ok_or_else(|| EngineError::WrongInput {
            name: past.to_owned(),
            why: "the plan has no such state".into(),
        })?;
        sequence.stores[at].give(&self.layouts[at], &self.areas, tensor)
    }

    /// Asks for outputs of partitions to be read back after each pass; replaces what was asked before. Names that no
    /// partition has are an error.
    pub fn set_taps<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) -> Result<(), EngineError> {
        let number = |name: &str| {
            self.boundaries
                .iter()
                .position(|boundary| boundary.name == name)
                .ok_or_else(|| EngineError::WrongOutput { name: name.to_owned(), why: "no partition has it".into() })
        };
        self.taps.wanted = names.into_iter().map(number).collect::<Result<_, _>>()?;
        self.taps.read.clear();
        self.taps.version += 1;
        Ok(())
    }

    /// What the last pass left in the outputs that [`set_taps`](Self::set_taps) asked for.
    pub fn taps(&self) -> &BTreeMap<String, HostTensor> {
        &self.taps.read
    }

    /// Stops this engine from any thread.
    pub fn cancel_handle(&self) -> CancelHandle {
        self.cancel.clone()
    }

    /// The plan it obeys.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Most tokens one sequence can have.
    pub fn context(&self) -> u64 {
        self.context
    }

    /// Whether each step computes the whole sequence again, because the model keeps no state.
    pub fn recomputes(&self) -> bool {
        self.plan.model.kind == ModelKind::DecoderWithoutCache
    }

    /// Times, counts, bytes and memory so far.
    pub fn telemetry(&self) -> Telemetry {
        Telemetry { memory: self.areas.backend.memory_use(), ..self.meter.telemetry.clone() }
    }

    /// The last pass, taken apart.
    pub fn last_pass(&self) -> &PassTelemetry {
        &self.meter.pass
    }

    /// Forgets the times and counts of passes so far, for instance after a warm-up.
    pub fn reset_telemetry(&mut self) {
        self.meter.telemetry.reset_passes();
    }

    /// Begins to record what happens when, and forgets what was recorded before; or stops recording. It is off at first:
    /// recording allocates for each run of a stage and each copy.
    pub fn record_timeline(&mut self, on: bool) {
        self.meter.record(on.then(|| self.areas.backend.now()));
    }

    /// What happened since recording began: a lane for each device (`gpu0`, or `gpu0 on the CPU` for its
    /// stages that run there), for each way between memories and for whole passes.
    pub fn timeline(&self) -> Timeline {
        self.meter.timeline()
    }

    /// A pass is over when its devices are, and then it is known how long each thing took them.
    pub(crate) fn wait_for_devices(&mut self) -> Result<(), EngineError> {
        let Engine { areas, meter, .. } = self;
        let waited = areas.backend.wait_for_all(&mut |ticket, took| meter.told(ticket, took));
        waited.map_err(|source| EngineError::Device { source })
    }

    pub(crate) fn check_cancelled(&self) -> Result<(), EngineError> {
        if self.cancel.is_cancelled() { Err(EngineError::Cancelled) } else { Ok(()) }
    }
}

/// Whether an area still is what a key says.
pub(crate) fn same<B: Backend>(key: &Option<crate::area::Key>, area: &Area<B>, dims: &[u64]) -> bool {
    key.as_ref().is_some_and(|key| key.serial == area.serial && key.dims.as_slice() == dims)
}
