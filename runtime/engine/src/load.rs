//! Loading: from a plan and a directory to an engine, with everything checked that can be checked before the first token.

use crate::area::Areas;
use crate::boundary::Boundary;
use crate::cancel::CancelHandle;
use crate::engine::{Engine, Taps};
use crate::error::{BackendError, EngineError};
use crate::feed::Feed;
use crate::keeping::Keeping;
use crate::meter::Meter;
use crate::options::EngineOptions;
use crate::port::{Backend, MemoryId, Port, Prepared, Session, SessionSpec};
use crate::reading::Reading;
use crate::reporter::Reporter;
use crate::shape::Vocabulary;
use crate::stage::{self, From, Names, Stage, To};
use crate::state::StateLayout;
use crate::telemetry::StageTelemetry;
use crate::visit::Visits;
use hpp_schema::{DeviceKind, Partition, Plan, Severity};
use std::collections::BTreeMap;
use std::path::Path;

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
    crate::files::check(plan, dir, options.verify, reporter)?;
    let control = backend.control().map_err(|source| memory("the means to stop runs", source))?;
    let cancel = options.cancel.clone().unwrap_or_default();
    cancel.attach(control.clone());

    let names = Names::of(plan);
    let keep = Keeping::new(plan, backend, options.weights, reporter)?;
    let loader = Loader { keep, plan, dir, backend, control: &control, options: &options, cancel: &cancel, reporter };
    let (stages, telemetry) = loader.stages(&names)?;
    let devices = devices(plan, &stages);
    let areas = Areas::new(backend.clone());
    let vocabulary = Vocabulary::of(plan);
    let layouts = layouts(plan, &vocabulary, &stages, context)?;
    let decode = stage::acts(plan, &names, &stages, &plan.schedule.decode);
    let mut engine = Engine {
        feeds: feeds(plan, &areas, &stages, context)?,
        boundaries: boundaries(plan, &names, &vocabulary, &stages),
        visits: Visits::new(&areas, &layouts, &stages)?,
        layouts,
        logits: logits(&stages),
        prefill: stage::acts(plan, &names, &stages, &plan.schedule.prefill),
        reading: Reading::new(&stages, &decode, 0),
        decode,
        plan: plan.clone(),
        areas,
        control,
        cancel,
        stages,
        context,
        meter: Meter::new(devices, backend.now().saturating_sub(started), telemetry),
        taps: Taps::default(),
        scratch: Vec::new(),
    };
    engine.settle(keep, reporter)?;
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

impl<B: Backend> Loader<'_, B> {
    fn stages(&self, names: &Names<'_>) -> Result<(Vec<Stage<B>>, Vec<StageTelemetry>), EngineError> {
        let (mut stages, mut telemetry) = (Vec::new(), Vec::new());
        for (index, partition) in self.plan.partitions.iter().enumerate() {
            if self.cancel.is_cancelled() {
                return Err(EngineError::Cancelled);
            }
            self.reporter.loading(&partition.name, index, self.plan.partitions.len());
            let (session, measured) = self.session(partition)?;
            let (inputs, outputs) = resolve(names, partition, index, session.inputs(), session.outputs())?;
            stages.push(Stage { name: partition.name.clone(), session, inputs, outputs });
            telemetry.push(measured);
        }
        Ok((stages, telemetry))
    }

    fn session(&self, partition: &Partition) -> Result<(B::Session, StageTelemetry), EngineError> {
        let started = self.backend.now();
        let file = self.dir.join(&partition.file);
        let failed = |source| match source {
            BackendError::Stopped => EngineError::Cancelled,
            source => EngineError::Load { partition: partition.name.clone(), file: file.clone(), source },
        };
        let absent =
            || BackendError::Misfit { what: partition.device.clone(), why: "the plan has no such device".into() };
        let device = self.plan.devices.iter().find(|device| device.name == partition.device);
        let spec = SessionSpec {
            partition: &partition.name,
            file: &file,
            model: &self.dir.join(&self.plan.model.source),
            weight_bytes: self.plan.partitions.iter().map(|p| p.bytes.weights.0).fold(0, u64::saturating_add),
            weights_dir: &self.dir.join(&partition.weights_dir),
            device: device.ok_or_else(absent).map_err(failed)?,
            providers: &partition.providers,
            fallback: self.options.fallback,
            keep: self.keep.of(self.plan, partition),
            prepared: Some(Prepared {
                dir: &self.dir.join(PREPARED),
                contents: &crate::files::contents(self.plan, partition),
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
            device: partition.device.clone(),
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

type Resolved = (Vec<(From, MemoryId)>, Vec<To>);

fn resolve(
    names: &Names<'_>,
    partition: &Partition,
    index: usize,
    inputs: &[Port],
    outputs: &[Port],
) -> Result<Resolved, EngineError> {
    let problems = stage::differences(partition, inputs, outputs);
    let mismatch = |problems| EngineError::Mismatch { partition: partition.name.clone(), problems };
    if !problems.is_empty() {
        return Err(mismatch(problems));
    }
    let from = |port: &Port| {
        let from = names.input(partition, &port.name);
        from.map(|from| (from, port.memory))
            .ok_or_else(|| mismatch(vec![format!("nothing provides input {:?}", port.name)]))
    };
    let to = |port: &Port| names.output(partition, index, &port.name).unwrap_or(To::Unknown);
    Ok((inputs.iter().map(from).collect::<Result<_, _>>()?, outputs.iter().map(to).collect()))
}

fn feeds<B: Backend>(
    plan: &Plan,
    areas: &Areas<B>,
    stages: &[Stage<B>],
    context: u64,
) -> Result<Vec<Feed<B>>, EngineError> {
    let mut feeds = plan.model.inputs.iter().map(|input| Feed::new(areas, input)).collect::<Result<Vec<_>, _>>()?;
    for (from, memory) in stages.iter().flat_map(|stage| &stage.inputs) {
        if let From::Feed(number) = from {
            feeds[*number].wanted_in(areas, *memory)?;
        }
    }
    feeds.iter_mut().try_for_each(|feed| feed.reserve(areas, context))?;
    Ok(feeds)
}

fn boundaries<B: Backend>(
    plan: &Plan,
    names: &Names<'_>,
    vocabulary: &Vocabulary,
    stages: &[Stage<B>],
) -> Vec<Boundary<B>> {
    let boundary = |(name, at): &(&str, usize)| {
        let said = plan.partitions[*at].outputs.iter().find(|output| output.name == *name);
        let port = stages[*at].session.outputs().iter().find(|port| port.name == *name);
        let (dtype, shape) =
            said.map_or((hpp_schema::DType::Float32, None), |output| (output.dtype, vocabulary.resolve(&output.shape)));
        Boundary::new(name, dtype, shape, port.map_or(MemoryId::HOST, |port| port.memory))
    };
    names.boundaries.iter().map(boundary).collect()
}

fn layouts<B: Backend>(
    plan: &Plan,
    vocabulary: &Vocabulary,
    stages: &[Stage<B>],
    context: u64,
) -> Result<Vec<StateLayout>, EngineError> {
    let layout = |(number, state): (usize, &hpp_schema::State)| {
        let inputs = stages.iter().flat_map(|stage| &stage.inputs);
        let memory = inputs.filter(|(from, _)| *from == From::State(number)).map(|(_, memory)| *memory).next();
        let memory = memory.unwrap_or(MemoryId::HOST);
        // A state whose device is the host stays there, wherever it is computed on.
        let on_host = plan.devices.iter().any(|device| device.name == state.device && device.kind == DeviceKind::Cpu);
        let home = if on_host { MemoryId::HOST } else { memory };
        StateLayout::new(state, vocabulary, plan.budgets.context, context, home, memory)
    };
    plan.states.iter().enumerate().map(layout).collect()
}

/// The plan's devices by the memory their stages use.
fn devices<B: Backend>(plan: &Plan, stages: &[Stage<B>]) -> BTreeMap<MemoryId, String> {
    let of = |(stage, partition): (&Stage<B>, &Partition)| {
        let ports = stage.session.inputs().iter().chain(stage.session.outputs());
        let elsewhere = ports.map(|port| port.memory).filter(|memory| *memory != MemoryId::HOST);
        elsewhere.map(|memory| (memory, partition.device.clone())).collect::<Vec<_>>()
    };
    stages.iter().zip(&plan.partitions).flat_map(of).collect()
}

/// The boundary that carries the scores: a model has one such output, whatever partition it comes from.
fn logits<B: Backend>(stages: &[Stage<B>]) -> Option<usize> {
    stages.iter().flat_map(|stage| &stage.outputs).find_map(|to| match to {
        To::Logits(number) => Some(*number),
        _ => None,
    })
}

fn memory(what: &str, source: BackendError) -> EngineError {
    EngineError::Memory { what: what.to_owned(), source }
}
