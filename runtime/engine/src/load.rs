//! Loading: from a plan and a directory to an engine, with everything checked that can be checked before the first token.

use crate::area::Areas;
use crate::boundary::Boundary;
use crate::cancel::CancelHandle;
use crate::engine::{Engine, Taps};
use crate::error::{BackendError, EngineError};
use crate::feed::Feed;
use crate::keeping::Keeping;
use crate::meter::Meter;
use crate::options::{EngineOptions, Verify};
use crate::port::{Backend, Fallback, MemoryId, Port, Prepared, Session, SessionSpec};
use crate::reporter::Reporter;
use crate::shape::Vocabulary;
use crate::slots::Slots;
use crate::stage::{self, Entrance, Exit, From, Names, Stage, To};
use crate::state::StateLayout;
use crate::supply::Supply;
use crate::telemetry::{Phase, StageTelemetry};
use crate::visit::Visits;
use hpp_schema::{DeviceKind, Form, Partition, Plan, Provider, Residency, Severity};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// Where weights laid out anew lie, beside the plan.
const PREPARED: &str = "prepared";

pub(crate) fn load<B: Backend>(
    plan: &Plan,
    dir: &Path,
    backend: &B,
    options: EngineOptions,
    reporter: &dyn Reporter,
) -> Result<Engine<B>, EngineError> {
    let started = backend.now();
    check_plan(plan, reporter)?;
    let context = context(plan, &options)?;
    let mut watch = crate::files::check(plan, dir, options.verify, reporter)?;
    backend.name_faults(&watch.in_use().collect::<Vec<_>>());
    let control = backend.control().map_err(|source| memory("the means to stop runs", source))?;
    let cancel = options.cancel.clone().unwrap_or_default();
    let attached = cancel.attach(control.clone());

    let names = Names::of(plan);
    let keep = Keeping::new(plan, backend, options.weights, reporter)?;
    let areas = Areas::new(backend.clone());
    let loader = Loader { keep, plan, dir, backend, control: &control, options: &options, cancel: &cancel, reporter };
    let Loaded { stages, sessions, telemetry, by_phase } = loader.stages(&names)?;
    backend.finish_loading();
    sessions.iter().filter_map(Session::mapped).try_for_each(|path| watch.add_mapped(path))?;
    let vocabulary = Vocabulary::of(plan);
    let layouts = layouts(plan, &vocabulary, &stages, &by_phase[Phase::Decode as usize], context)?;
    let steps = [&plan.schedule.prefill, &plan.schedule.decode];
    let acts = |phase: Phase| stage::acts(plan, &names, &stages, &by_phase[phase as usize], steps[phase as usize]);
    let acts = [acts(Phase::Prefill), acts(Phase::Decode)];
    let may_hold = keep.for_devices(plan, backend.memory_use().resident);
    let slots = Slots::new(&areas, plan, dir, &stages, [&acts[0], &acts[1]], (&options, may_hold), reporter)?;
    let mut engine = Engine {
        feeds: feeds(plan, &areas, &stages, context)?,
        boundaries: boundaries(plan, &names, &vocabulary),
        visits: Visits::new(&areas, &layouts, &stages)?,
        layouts,
        logits: logits(&stages),
        reading: Supply::default(),
        slots,
        meter: Meter::new(devices(&stages), backend.now().saturating_sub(started), telemetry),
        acts,
        by_phase,
        plan: plan.clone(),
        areas,
        control,
        cancel,
        _attached: attached,
        stages,
        sessions,
        context,
        taps: Taps::default(),
        scratch: Vec::new(),
        watch,
    };
    engine.settle(keep, reporter)?;
    engine.wait_for_devices()?;
    engine.watch.loaded()?;
    engine.bring_ahead()?;
    engine.meter.telemetry.load = backend.now().saturating_sub(started);
    Ok(engine)
}

fn check_plan(plan: &Plan, reporter: &dyn Reporter) -> Result<(), EngineError> {
    let (errors, warnings): (Vec<_>, Vec<_>) =
        plan.check().into_iter().partition(|finding| finding.severity == Severity::Error);
    warnings.iter().for_each(|finding| reporter.warning(&format!("the plan: {finding}")));
    if errors.is_empty() { Ok(()) } else { Err(EngineError::Plan { findings: errors }) }
}

fn context(plan: &Plan, options: &EngineOptions) -> Result<u64, EngineError> {
    let context = options.context.unwrap_or(plan.budgets.context);
    match plan.model.context_length {
        _ if context == 0 => Err(EngineError::Context { asked: 0, why: "it must hold a token".into() }),
        Some(most) if context > most => {
            Err(EngineError::Context { asked: context, why: format!("the model was built for {most}") })
        }
        _ => Ok(context),
    }
}

/// What loading a partition needs to know.
struct Loader<'a, B: Backend> {
    keep: Keeping,
    plan: &'a Plan,
    dir: &'a Path,
    backend: &'a B,
    control: &'a B::Control,
    options: &'a EngineOptions,
    cancel: &'a CancelHandle,
    reporter: &'a dyn Reporter,
}

/// What loading a plan's partitions gives.
struct Loaded<B: Backend> {
    stages: Vec<Stage>,
    sessions: Vec<B::Session>,
    telemetry: Vec<StageTelemetry>,
    /// For each phase the stage of each partition.
    by_phase: [Vec<usize>; 2],
}

/// What a session was made for: stages whose weights are inputs share it, and so do two forms of a partition with one file.
struct Shared<'a> {
    file: &'a str,
    device: &'a str,
    partition: usize,
    session: usize,
    stage: usize,
    measured: StageTelemetry,
}

/// Providers of the host.
const HOST: &[Provider] = &[Provider::Cpu];

impl<'a, B: Backend> Loader<'a, B> {
    fn stages(&self, names: &Names<'_>) -> Result<Loaded<B>, EngineError> {
        let mut loaded = Loaded { stages: vec![], sessions: vec![], telemetry: vec![], by_phase: [vec![], vec![]] };
        let mut shared: Vec<Shared<'a>> = Vec::new();
        for (index, partition) in self.plan.partitions.iter().enumerate() {
            if self.cancel.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            self.reporter.loading(&partition.name, index, self.plan.partitions.len());
            let mut own = Vec::with_capacity(2);
            for form in partition.forms() {
                own.push(self.stage(names, (index, partition), form, &mut loaded, &mut shared)?);
            }
            loaded.by_phase[Phase::Decode as usize].push(own[0]);
            loaded.by_phase[Phase::Prefill as usize].push(own[own.len() - 1]);
        }
        Ok(loaded)
    }

    /// The stage of a partition in one form: a new one, or one that its other form has already. Where weights are inputs and the
    /// device is not to be had, the file for the host takes their place.
    fn stage(
        &self,
        names: &Names<'_>,
        (index, partition): (usize, &'a Partition),
        form: Form<'a>,
        loaded: &mut Loaded<B>,
        shared: &mut Vec<Shared<'a>>,
    ) -> Result<usize, EngineError> {
        let is_shared = !form.weights.is_empty();
        let there = |known: &&Shared<'_>| {
            let same = known.file == form.file && known.device == form.device;
            if is_shared { same } else { known.file == form.file && known.partition == index }
        };
        let known = shared.iter().find(there).map(|known| (known.session, known.stage, known.measured.clone()));
        let (session, measured) = match known {
            Some((_, stage, _)) if !is_shared => return Ok(stage),
            Some((session, _, measured)) => {
                (session, StageTelemetry { partition: partition.name.clone(), load: Duration::ZERO, ..measured })
            }
            None => match self.session(partition, &form) {
                Ok((session, measured)) => {
                    loaded.sessions.push(session);
                    (loaded.sessions.len() - 1, measured)
                }
                Err(EngineError::Load { source: BackendError::NoProvider { refused }, .. })
                    if self.may_run_on_host(&form) =>
                {
                    return self.on_host((index, partition), form, refused, names, loaded, shared);
                }
                Err(error) => return Err(error),
            },
        };
        let stage = loaded.stages.len();
        shared.push(Shared {
            file: form.file,
            device: form.device,
            partition: index,
            session,
            stage,
            measured: measured.clone(),
        });
        loaded.stages.push(resolve(names, partition, (index, session), &form, &loaded.sessions[session])?);
        loaded.telemetry.push(measured);
        Ok(stage)
    }

    fn may_run_on_host(&self, form: &Form<'_>) -> bool {
        form.host_file.is_some() && self.options.fallback == Fallback::Report
    }

    /// A form whose device is not to be had, as constants on the host.
    fn on_host(
        &self,
        (index, partition): (usize, &'a Partition),
        form: Form<'a>,
        refused: Vec<(Provider, String)>,
        names: &Names<'_>,
        loaded: &mut Loaded<B>,
        shared: &mut Vec<Shared<'a>>,
    ) -> Result<usize, EngineError> {
        for (wanted, reason) in &refused {
            self.reporter.fallback(&partition.name, *wanted, Provider::Cpu, reason);
        }
        let file = form.host_file.unwrap_or(form.file);
        let own = Form { file, residency: Residency::Resident, providers: HOST, weights: &[], host_file: None, ..form };
        let stage = self.stage(names, (index, partition), own, loaded, shared)?;
        loaded.telemetry[stage].refused.extend(refused);
        Ok(stage)
    }

    fn session(&self, partition: &Partition, form: &Form<'_>) -> Result<(B::Session, StageTelemetry), EngineError> {
        let started = self.backend.now();
        let file = self.dir.join(form.file);
        let failed = |source| match source {
            BackendError::Stopped => EngineError::Cancelled,
            source => EngineError::Load { partition: partition.name.clone(), file: file.clone(), source },
        };
        let absent =
            || BackendError::Misfit { what: form.device.to_owned(), why: "the plan has no such device".into() };
        let device = self.plan.devices.iter().find(|device| device.name == form.device);
        let spec = SessionSpec {
            partition: &partition.name,
            file: &file,
            model: &self.dir.join(&self.plan.model.source),
            weight_bytes: self.plan.partitions.iter().map(|p| p.bytes.weights.0).fold(0, u64::saturating_add),
            weights_dir: &self.dir.join(&partition.weights_dir),
            device: device.ok_or_else(absent).map_err(failed)?,
            providers: form.providers,
            fallback: self.options.fallback,
            keep: self.keep.of(self.plan, form),
            weights_are_inputs: !form.weights.is_empty(),
            has_host_file: form.host_file.is_some() && !self.options.slots_on_host,
            prepared: Some(Prepared {
                dir: &self.dir.join(PREPARED),
                contents: &crate::files::contents(self.plan, form.file),
                verify: self.options.verify == Verify::Full,
            }),
        };
        let loaded = self.backend.load(&spec, self.control, self.reporter).map_err(failed)?;
        for (wanted, reason) in &loaded.refused {
            self.reporter.fallback(&partition.name, *wanted, loaded.provider, reason);
        }
        let load = self.backend.now().saturating_sub(started);
        self.reporter.loaded(&partition.name, loaded.provider, &loaded.processor, load.as_secs_f64() * 1e3);
        let measured = StageTelemetry {
            partition: partition.name.clone(),
            device: form.device.to_owned(),
            provider: loaded.provider,
            processor: loaded.processor,
            refused: loaded.refused,
            load,
            prefill: Default::default(),
            decode: Default::default(),
        };
        Ok((loaded.session, measured))
    }
}

/// A stage with every input and output resolved.
fn resolve<S: Session>(
    names: &Names<'_>,
    partition: &Partition,
    (index, session): (usize, usize),
    form: &Form<'_>,
    ports: &S,
) -> Result<Stage, EngineError> {
    let mismatch = |problems| EngineError::Mismatch { partition: partition.name.clone(), problems };
    let (inputs, outputs) = crate::ports::named(partition, form, ports.inputs(), ports.outputs()).map_err(mismatch)?;
    // Weights come behind everything else.
    let weights_from = inputs.len() - form.weights.len();
    let entrance = |(at, port): (usize, Port)| {
        let from = match at.checked_sub(weights_from).filter(|_| !form.weights.is_empty()) {
            Some(weight) => Some(From::Weight(weight)),
            None => names.input(partition, &port.name),
        };
        let unfed = || mismatch(vec![format!("nothing provides input {:?}", port.name)]);
        Ok(Entrance { from: from.ok_or_else(unfed)?, port })
    };
    let exit = |port: Port| Exit { to: names.output(partition, index, &port.name).unwrap_or(To::Unknown), port };
    Ok(Stage {
        name: partition.name.clone(),
        partition: index,
        device: form.device.to_owned(),
        session,
        inputs: inputs.into_iter().enumerate().map(entrance).collect::<Result<_, _>>()?,
        outputs: outputs.into_iter().map(exit).collect(),
    })
}

fn feeds<B: Backend>(
    plan: &Plan,
    areas: &Areas<B>,
    stages: &[Stage],
    context: u64,
) -> Result<Vec<Feed<B>>, EngineError> {
    let mut feeds = plan.model.inputs.iter().map(|input| Feed::new(areas, input)).collect::<Result<Vec<_>, _>>()?;
    for entrance in stages.iter().flat_map(|stage| &stage.inputs) {
        if let From::Feed(number) = entrance.from {
            feeds[number].wanted_in(areas, entrance.port.memory)?;
        }
    }
    feeds.iter_mut().try_for_each(|feed| feed.reserve(areas, context))?;
    Ok(feeds)
}

fn boundaries<B: Backend>(plan: &Plan, names: &Names<'_>, vocabulary: &Vocabulary) -> Vec<Boundary<B>> {
    let boundary = |(name, at): &(&str, usize)| {
        let said = plan.partitions[*at].outputs.iter().find(|output| output.name == *name);
        let (dtype, shape) =
            said.map_or((hpp_schema::DType::Float32, None), |output| (output.dtype, vocabulary.resolve(&output.shape)));
        Boundary::new(name, dtype, shape)
    };
    names.boundaries.iter().map(boundary).collect()
}

/// `decoding` are the stages of the plan's partitions while decoding: state lies where they compute, or on the host.
fn layouts(
    plan: &Plan,
    vocabulary: &Vocabulary,
    stages: &[Stage],
    decoding: &[usize],
    context: u64,
) -> Result<Vec<StateLayout>, EngineError> {
    let layout = |(number, state): (usize, &hpp_schema::State)| {
        let memory = decoding.iter().find_map(|stage| stages[*stage].memory_of_state(number));
        // A state whose device is the host stays there, wherever it is computed on.
        let on_host = plan.devices.iter().any(|device| device.name == state.device && device.kind == DeviceKind::Cpu);
        let home = memory.filter(|_| !on_host).unwrap_or(MemoryId::HOST);
        let visits = stages.iter().filter_map(|stage| stage.memory_of_state(number)).any(|memory| memory != home);
        Ok(StateLayout::new(state, vocabulary, plan.budgets.context, context, home)?.visiting(state, visits))
    };
    plan.states.iter().enumerate().map(layout).collect()
}

/// The plan's devices by the memory their stages use.
fn devices(stages: &[Stage]) -> BTreeMap<MemoryId, String> {
    let of = |stage: &Stage| {
        let (inputs, outputs) = (stage.inputs.iter().map(|i| &i.port), stage.outputs.iter().map(|o| &o.port));
        let elsewhere = inputs.chain(outputs).map(|port| port.memory).filter(|memory| *memory != MemoryId::HOST);
        elsewhere.map(|memory| (memory, stage.device.clone())).collect::<Vec<_>>()
    };
    stages.iter().flat_map(of).collect()
}

/// The boundary that carries the scores: a model has one such output, whatever partition it comes from.
fn logits(stages: &[Stage]) -> Option<usize> {
    stages.iter().flat_map(|stage| &stage.outputs).find_map(|exit| match exit.to {
        To::Logits(number) => Some(number),
        _ => None,
    })
}

fn memory(what: &str, source: BackendError) -> EngineError {
    EngineError::Memory { what: what.to_owned(), source }
}
