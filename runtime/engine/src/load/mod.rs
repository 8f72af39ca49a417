//! Loading: turns a plan and a directory into an engine, and checks everything that can be checked before the first token.

mod files;
mod lock;
mod sessions;

use crate::buffers::{
    Boundaries, BoundaryLayout, BufferPool, InputBuffers, Lane, StateArena, StateLayout, StateStaging,
};
use crate::error::{BackendError, EngineError};
use crate::ids::{BoundaryId, Id, IndexVec, InputId, StageId, StateId};
use crate::options::{EngineOptions, RowBatching};
use crate::port::{Backend, MemoryId, Session};
use crate::program::{
    InputSource, NameResolver, OutputSink, Program, Route, Stage, SymbolTable, resolve_schedule, share_buffers,
};
use crate::reporter::Reporter;
use crate::runtime::{FreedMemory, Runtime, Taps};
use crate::telemetry::{PerPhase, Recorder};
use crate::weights::budget::{HostMemoryBudget, HostMemoryInUse, is_on_host};
use crate::weights::locked::LockedWeights;
use crate::weights::{DeviceTier, DeviceTierConfig, DiskTier, WeightStore};
use hpp_schema::{DType, InputRole, ModelKind, Plan, Severity, StateUpdate, error_line};
use lock::lock_weights;
use sessions::{LoadedSessions, SessionLoader};
use std::collections::BTreeMap;
use std::path::Path;
use tracing::info;

pub(crate) fn load<B: Backend>(
    plan: &Plan,
    dir: &Path,
    backend: &B,
    options: EngineOptions,
    reporter: &dyn Reporter,
) -> Result<(Program, Runtime<B>), EngineError> {
    let started = backend.now();
    check_plan(plan, reporter)?;
    let context = context(plan, &options, reporter)?;
    let mut watch = files::check(plan, dir, options.verify, reporter)?;
    backend.name_mapped_files(&watch.in_use().collect::<Vec<_>>());
    let control = backend.control().map_err(|source| memory_error("the control that stops runs", source))?;
    let cancel = options.cancel.clone().unwrap_or_default();
    let attached = cancel.attach(control.clone());

    let names = NameResolver::new(plan);
    let budget = HostMemoryBudget::new(plan, backend, &options, reporter)?;
    let loader = SessionLoader {
        plan,
        dir,
        backend,
        budget,
        control: &control,
        options: &options,
        cancel: &cancel,
        reporter,
        names: &names,
    };
    let LoadedSessions { stages, sessions, pagers, telemetry, route } = loader.load()?;
    backend.finish_loading();
    sessions.iter().filter_map(Session::mapped_file).try_for_each(|path| watch.add_mapped(path))?;

    let symbols = SymbolTable::new(plan);
    let state_dir = options.state_dir.clone().unwrap_or_else(|| dir.to_owned());
    let pool = BufferPool::new(backend.clone()).with_state_dir(state_dir.clone());
    let program = program(plan, &names, &symbols, stages, &route, context)?;
    if program.state_window() > 0 && backend.is_in_memory(&state_dir) {
        reporter.warning(&format!(
            "{} is in memory, so KV caches in it take as much memory as without --kv disk; --state-dir names another directory",
            state_dir.display()
        ));
    }
    let lane = lane(&program, &names, &symbols, &pool)?;

    let in_use = HostMemoryInUse::of(&program, &lane, backend);
    let budget = budget.fit_sequences(plan, &vec![false; plan.partitions.len()], in_use);
    let host_memory = budget.for_devices(plan, in_use);
    let config = DeviceTierConfig { plan, dir, stages: &program.stages, options: &options, host_memory, reporter };
    let weights =
        WeightStore { device: DeviceTier::load(&pool, &config)?, disk: DiskTier::new(pagers, &program.stages) };
    let staging = StateStaging::new(&pool, &program, &route)?;
    let load_time = backend.now().saturating_sub(started);
    let recorder = Recorder::new(device_names(&program.stages), load_time, telemetry);
    let mut runtime = Runtime {
        pool,
        sessions,
        lanes: vec![lane],
        staging,
        arena: None,
        weights,
        route,
        recorder,
        taps: Taps::default(),
        max_sequences: budget.sequences(),
        is_memory_limited: budget.is_limited(),
        freed_memory: FreedMemory::of(plan, budget.is_limited()),
        locked: LockedWeights::default(),
        locked_now: 0,
        longest_item: 0,
        item_order: Vec::new(),
        scratch: Vec::new(),
        watch,
        control,
        cancel,
        _attached: attached,
    };
    // A single row is useful too: it serves one sequence after the other with memory that the system has already allocated.
    let has_rows = states_have_rows(&program, &symbols, options.row_batching);
    make_ready(&program, &mut runtime, budget, has_rows, reporter)?;
    let load = backend.now().saturating_sub(started);
    runtime.recorder.telemetry.load = load;
    runtime.recorder.telemetry.state_window = program.state_window();
    let resident = runtime.pool.backend.memory_use().resident;
    info!(stages = program.stages.iter().count(), context, resident, ms = load.as_millis(), "plan loaded");
    Ok((program, runtime))
}

/// What never changes after loading: the steps of each phase, the layouts of states, the bindings of logits.
fn program(
    plan: &Plan,
    names: &NameResolver<'_>,
    symbols: &SymbolTable,
    stages: IndexVec<StageId, Stage>,
    route: &Route,
    context: u64,
) -> Result<Program, EngineError> {
    let schedules = PerPhase {
        prefill: resolve_schedule(plan, names, &stages, &route.prefill, &plan.schedule.prefill),
        decode: resolve_schedule(plan, names, &stages, &route.decode, &plan.schedule.decode),
    };
    let layouts = state_layouts(plan, symbols, &stages, route, context)?;
    let logits = logits(&stages);
    Ok(Program { plan: plan.clone(), context, stages, schedules, layouts, logits })
}

/// Buffers for the inputs and boundaries of one sequence at a time.
fn lane<B: Backend>(
    program: &Program,
    names: &NameResolver<'_>,
    symbols: &SymbolTable,
    pool: &BufferPool<B>,
) -> Result<Lane<B>, EngineError> {
    let Program { plan, context, stages, schedules, .. } = program;
    let inputs = model_inputs(plan, pool, stages, *context)?;
    let shared = share_buffers(stages, schedules, names.boundaries.iter().count());
    Ok(Lane { inputs, boundaries: boundaries(plan, names, symbols, &shared) })
}

/// Locks weights, reserves the rows of sequences, waits for devices, and starts the first prefetch.
fn make_ready<B: Backend>(
    program: &Program,
    runtime: &mut Runtime<B>,
    budget: HostMemoryBudget,
    has_rows: bool,
    reporter: &dyn Reporter,
) -> Result<(), EngineError> {
    runtime.weights.set_order(&program.run_order(&runtime.route));
    lock_weights(program, runtime, budget, reporter)?;
    if has_rows {
        runtime.arena = state_arena(program, runtime, reporter);
    }
    runtime.synchronize()?;
    runtime.watch.loaded()?;
    runtime.weights.prefetch(&runtime.pool)
}

/// Rows for the states of all sequences; `None` if there is no memory for them at once, or a device's memory cannot be divided. Then each sequence
/// takes memory when it starts, and sequences are computed one after the other.
fn state_arena<B: Backend>(program: &Program, runtime: &Runtime<B>, reporter: &dyn Reporter) -> Option<StateArena<B>> {
    let on_device = program.layouts.iter().any(|layout| layout.memory != MemoryId::HOST);
    let alone = |why: &str| {
        // Rows are on a device only if the user asked for that.
        if on_device {
            reporter.warning(&format!("tokens of several sequences are not rows of one run: {why}"));
        }
        None
    };
    match StateArena::new(&program.layouts, &runtime.pool, runtime.max_sequences) {
        Ok(Some(arena)) => Some(arena),
        Ok(None) => alone("a device's memory cannot be divided into rows"),
        Err(error) => {
            let sequences = runtime.max_sequences;
            alone(&format!(
                "KV caches of {sequences} sequences at once: {}; --max-sequences takes fewer",
                error_line(&error)
            ))
        }
    }
}

fn check_plan(plan: &Plan, reporter: &dyn Reporter) -> Result<(), EngineError> {
    let (errors, warnings): (Vec<_>, Vec<_>) =
        plan.check().into_iter().partition(|finding| finding.severity == Severity::Error);
    warnings.iter().for_each(|finding| reporter.warning(&format!("the plan: {finding}")));
    if errors.is_empty() { Ok(()) } else { Err(EngineError::Plan { findings: errors }) }
}

fn context(plan: &Plan, options: &EngineOptions, reporter: &dyn Reporter) -> Result<u64, EngineError> {
    let context = options.context.unwrap_or(plan.budgets.context);
    match plan.model.context_length {
        _ if context == 0 => return Err(EngineError::Context { asked: 0, why: "it must hold a token".into() }),
        Some(most) if context > most => {
            let usable = plan.model.longest_context().unwrap_or(most);
            let tables = match usable < most {
                true => format!(", and the plan's tables have {usable} positions"),
                false => String::new(),
            };
            return Err(EngineError::Context {
                asked: context,
                why: format!("the model was built for {most}{tables}; give -c {usable} or less"),
            });
        }
        _ => {}
    }
    if let Some(most) = plan.model.positions.filter(|most| context > *most) {
        let why = format!("the plan's tables have {most} positions; hpp-split --context {context} plans for more");
        return Err(EngineError::Context { asked: context, why });
    }
    if let Some(change) = plan.model.tables_change_after.filter(|change| context > *change) {
        reporter.warning(&format!(
            "beyond {change} tokens this model uses other tables of rotary embeddings, for all tokens of a pass: a longer prompt in several \
             passes, or a conversation that grows beyond them, gets other answers than in one pass; -c {change} avoids that"
        ));
    }
    if let Some(ram) = plan.budgets.ram.filter(|_| context > plan.budgets.context) {
        let planned = plan.budgets.context;
        reporter.warning(&format!(
            "the plan's {} of host memory are for {planned} tokens of context; {context} may need more (hpp-split --context {context} \
             plans for them)",
            ram.human()
        ));
    }
    Ok(context)
}

fn model_inputs<B: Backend>(
    plan: &Plan,
    pool: &BufferPool<B>,
    stages: &IndexVec<StageId, Stage>,
    context: u64,
) -> Result<IndexVec<InputId, InputBuffers<B>>, EngineError> {
    let inputs = plan.model.inputs.iter().map(|input| InputBuffers::new(pool, input));
    let mut inputs = inputs.collect::<Result<IndexVec<_, _>, _>>()?;
    for stage_input in stages.iter().flat_map(|stage| &stage.inputs) {
        if let InputSource::ModelInput(input) = stage_input.source {
            inputs[input].add_memory(pool, stage_input.port.memory)?;
        }
    }
    inputs.iter_mut().try_for_each(|input| input.reserve(pool, context))?;
    Ok(inputs)
}

fn boundaries<B: Backend>(
    plan: &Plan,
    names: &NameResolver<'_>,
    symbols: &SymbolTable,
    buffers: &IndexVec<BoundaryId, usize>,
) -> Boundaries<B> {
    Boundaries::new(names.boundaries.entries().map(|(id, boundary)| {
        let producer = &plan.partitions[boundary.producer.index()];
        let output = producer.outputs.iter().find(|output| output.name == boundary.name);
        BoundaryLayout {
            name: boundary.name.to_owned(),
            dtype: output.map_or(DType::Float32, |output| output.dtype),
            shape: output.and_then(|output| symbols.resolve(&output.shape)),
            buffers: buffers[id],
        }
    }))
}

/// States lie where decode computes on them, or on the host where the plan says so.
fn state_layouts(
    plan: &Plan,
    symbols: &SymbolTable,
    stages: &IndexVec<StageId, Stage>,
    route: &Route,
    context: u64,
) -> Result<IndexVec<StateId, StateLayout>, EngineError> {
    let layout = |(index, state): (usize, &hpp_schema::State)| {
        let id = StateId::new(index);
        let computed_in = route.decode.iter().find_map(|stage| stages[*stage].memory_of_state(id));
        let memory = computed_in.filter(|_| !is_on_host(plan, &state.device)).unwrap_or(MemoryId::HOST);
        let is_staged = stages.iter().filter_map(|stage| stage.memory_of_state(id)).any(|other| other != memory);
        let layout = StateLayout::new(state, symbols, plan.budgets.context, context, memory)?;
        Ok(layout.kept_on_disk(state.on_disk).staged(state, is_staged))
    };
    plan.states.iter().enumerate().map(layout).collect()
}

/// Whether states of sequences are rows of one buffer, so that the tokens of several sequences can be rows of one run. For that, states must be
/// updated in place for the whole context, and it must be possible to fill every model input for rows of different lengths. States on a device
/// count only with [`RowBatching::On`]: devices compute several rows with other kernels than one row, so that bits never agree, and rows on a
/// device take memory at once.
fn states_have_rows(program: &Program, symbols: &SymbolTable, batching: RowBatching) -> bool {
    let Program { plan, layouts, context, .. } = program;
    let is_wanted = |layout: &StateLayout| batching == RowBatching::On || layout.memory == MemoryId::HOST;
    let is_row = |(layout, state): (&StateLayout, &hpp_schema::State)| {
        let whole = matches!(layout.update, StateUpdate::InPlace { capacity, .. } if capacity == *context);
        let is_batch = state.shape.first().is_some_and(|dim| symbols.is_batch(dim));
        whole && is_batch && !layout.partial && !layout.on_disk && is_wanted(layout)
    };
    let has_rows = |input: &hpp_schema::ModelInput| match input.role {
        InputRole::TokenIds | InputRole::AttentionMask => input.shape.len() == 2,
        InputRole::PositionIds => input.shape.len() > 1,
        InputRole::LogitPositions | InputRole::TokenTypeIds => true,
        InputRole::PastLengths | InputRole::TotalLengths | InputRole::Embeddings => false,
        // Only the source model has these.
        InputRole::UseCacheBranch | InputRole::Zeros => true,
        InputRole::Free => false,
    };
    let has_mask = plan.model.inputs.iter().any(|input| input.role == InputRole::AttentionMask);
    plan.model.kind == ModelKind::Decoder
        && has_mask
        && !plan.states.is_empty()
        // A run has one set of tables for all its rows.
        && plan.model.tables_change_after.is_none_or(|change| *context <= change)
        && layouts.iter().zip(&plan.states).all(is_row)
        && plan.model.inputs.iter().all(has_rows)
}

/// The plan's devices by the memory that their stages use.
fn device_names(stages: &IndexVec<StageId, Stage>) -> BTreeMap<MemoryId, String> {
    let mut names = BTreeMap::new();
    for stage in stages.iter() {
        let inputs = stage.inputs.iter().map(|input| input.port.memory);
        let memories = inputs.chain(stage.outputs.iter().map(|output| output.port.memory));
        names.extend(memories.filter(|memory| *memory != MemoryId::HOST).map(|memory| (memory, stage.device.clone())));
    }
    names
}

/// The boundary that holds the logits: one output of the model, whichever partition produces it.
fn logits(stages: &IndexVec<StageId, Stage>) -> Option<BoundaryId> {
    stages.iter().flat_map(|stage| &stage.outputs).find_map(|output| match output.sink {
        OutputSink::Logits(boundary) => Some(boundary),
        _ => None,
    })
}

fn memory_error(what: &str, source: BackendError) -> EngineError {
    EngineError::Memory { what: what.to_owned(), source }
}
