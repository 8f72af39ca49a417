//! Creates the session of a partition: tries its providers in order and takes the first that is available.

#![allow(clippy::result_large_err, reason = "ort's builder comes back in its errors")]

use crate::environment::SharedRuntime;
use crate::loading::Loading;
use crate::operators;
use crate::os;
use crate::pages;
use crate::probe;
use crate::provider_devices::{ProviderDevice, describe, find_device, processor};
use crate::raw::assignment::{Assigned, assigned};
use crate::raw::failed;
use crate::raw::run::OrtControl;
use crate::raw::session_memory::HostTensors;
use crate::sigbus;
use crate::weights::disk::{self, ExpertTensors, SessionMappings};
use hpp_engine::port::{Fallback, SessionSpec, WeightResidency};
use hpp_engine::{BackendError, Reporter};
use hpp_schema::{Device, DeviceKind, HostKernels, PROVIDER_FAULTS, Provider, ProviderFault};
use ort::ep::ArenaExtendStrategy;
use ort::session::Session;
use ort::session::builder::{GraphOptimizationLevel, SessionBuilder};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use tracing::info;

/// A session, its provider, and the providers that were unavailable.
pub(crate) struct SessionOfProvider {
    pub created: CreatedSession,
    pub provider: Provider,
    pub refused: Vec<(Provider, String)>,
}

/// A session of one provider.
pub(crate) struct CreatedSession {
    pub session: Session,
    pub processor: String,
    pub weights: SessionMappings,
    /// Whether kernels on the host compute with packed weights.
    pub packs_weights: bool,
    /// Host memory with packed weights.
    pub packed: Vec<Range<usize>>,
}

/// Tries the partition's providers in order. A partition planned for another provider may fall back to the CPU's,
/// unless the options refuse that.
pub(crate) fn create_session(
    runtime: &SharedRuntime,
    spec: &SessionSpec<'_>,
    control: &OrtControl,
    reporter: &dyn Reporter,
    loading: &Loading,
) -> Result<SessionOfProvider, BackendError> {
    let is_fallback = match spec.providers.first() {
        Some(preferred) => *preferred != Provider::CPU,
        None => spec.device.kind == DeviceKind::Gpu,
    };
    let mut order = spec.providers.to_vec();
    if !order.contains(&Provider::CPU) {
        order.push(Provider::CPU);
    }
    let mut refused = Vec::new();
    for provider in order {
        let is_refused = is_fallback && spec.fallback == Fallback::Refuse;
        if provider == Provider::CPU && (is_refused || spec.has_host_file) {
            break;
        }
        match try_provider(runtime, spec, provider, LoadContext { control, reporter, loading }) {
            Ok(created) => return Ok(SessionOfProvider { created, provider, refused }),
            Err(BackendError::Stopped) => return Err(BackendError::Stopped),
            // The CPU provider is always there, so its error is reported unchanged, unless it is the fallback of a GPU and lacks kernels:
            // then the user must know why the GPU is not used.
            Err(error) if provider == Provider::CPU && (refused.is_empty() || !lacks_kernels(&error)) => {
                return Err(error);
            }
            Err(error) => {
                info!(partition = spec.partition, provider = provider.id(), %error, "provider refused");
                refused.push((provider, error.to_string()));
            }
        }
    }
    Err(BackendError::NoProvider { refused })
}

/// Whether ONNX Runtime refused a graph because the provider has no kernel for an operator and its types.
fn lacks_kernels(error: &BackendError) -> bool {
    matches!(error, BackendError::Runtime { cause, .. } if cause.contains("Could not find an implementation"))
}

/// What loading a session uses besides the runtime and the session's description.
#[derive(Clone, Copy)]
struct LoadContext<'a> {
    /// Cancels the load.
    control: &'a OrtControl,
    reporter: &'a dyn Reporter,
    loading: &'a Loading,
}

fn try_provider(
    runtime: &SharedRuntime,
    spec: &SessionSpec<'_>,
    provider: Provider,
    context: LoadContext<'_>,
) -> Result<CreatedSession, BackendError> {
    let LoadContext { control, reporter, loading } = context;
    let in_memory = |session, processor| CreatedSession {
        session,
        processor,
        weights: SessionMappings::default(),
        packs_weights: false,
        packed: Vec::new(),
    };
    match provider {
        Provider::CPU => {
            if spec.weights_are_inputs && spec.host_kernels.constant_weights {
                return Err(wants_constants(spec));
            }
            if let Some(warning) = float_experts(spec.host_kernels, std::env::var(EXPERT_KERNELS).ok().as_deref()) {
                reporter.warning(&warning);
            }
            if can_come_from_disk(spec, reporter) {
                return from_disk(runtime, spec, context);
            }
            let must_pack = spec.host_kernels.packed;
            let packed = must_pack || has_room_to_pack(spec.weight_bytes);
            info!(
                partition = spec.partition,
                packed,
                must_pack,
                memory_limit = os::memory_limit(),
                "weights in memory"
            );
            let builder = on_host(runtime, spec, packed)?;
            let make = || match spec.locks_weights {
                true => disk::claim_locked(loading, spec.weights_dir, || commit(builder, spec, control)),
                false => disk::claim_unread(loading, spec.weights_dir, || commit(builder, spec, control)),
            };
            if !packed {
                return Ok(in_memory(make()?, host_threads_text(runtime)));
            }
            let (session, packed) = pages::watch(make);
            Ok(CreatedSession { packs_weights: true, packed, ..in_memory(session?, host_threads_text(runtime)) })
        }
        _ => {
            refuse_unsuitable(spec, provider)?;
            let found = find_device(runtime, provider, spec.device)?;
            let description = describe(&found.device);
            runtime.log.take_kept_on_host();
            let (number, ort_name) = (found.number, found.ort_name.clone());
            let session = commit(on_device(runtime, spec, provider, found)?, spec, control)
                .map_err(|error| refused_session(error, &given_options(runtime, spec, provider)))?;
            let check = AssignmentCheck { spec, provider, ort_name: &ort_name };
            check.prove(&session, &runtime.log.take_kept_on_host(), reporter)?;
            if provider.uses_host_memory() && HostTensors::of(&session)?.is_none() {
                let cause =
                    "it takes tensors in the memory of its device, and HPP's table does not say that HPP may use that";
                let doing = format!("run {} on {}", spec.partition, provider.name());
                return Err(BackendError::Runtime { doing, cause: cause.into() });
            }
            if probe::uses_f16(&session) {
                require_f16(runtime, spec.device, provider, number)?;
            }
            Ok(in_memory(session, description))
        }
    }
}

/// The options that the plan and the user gave a provider, as `--ep-option` takes them.
fn given_options(runtime: &SharedRuntime, spec: &SessionSpec<'_>, provider: Provider) -> Vec<String> {
    let of_plan = spec.device.provider_options.get(&provider);
    let mut given: BTreeMap<&String, &String> = of_plan.into_iter().flatten().collect();
    given.extend(runtime.provider_options.get(&provider).into_iter().flatten());
    given.iter().map(|(key, value)| format!("{}.{key}={value}", provider.id())).collect()
}

/// A provider's error at the creation of a session, in one line, with the options that may be its cause. The report names the partition.
fn refused_session(error: BackendError, options: &[String]) -> BackendError {
    let BackendError::Runtime { cause, .. } = error else { return error };
    let doing = match options {
        [] => "create a session".to_owned(),
        _ => format!("create a session with {}", options.join(" ")),
    };
    BackendError::Runtime { doing, cause: without_source_lines(&cause) }
}

/// A message without the lines and prefixes that name source files of ONNX Runtime and OpenVINO.
fn without_source_lines(message: &str) -> String {
    // ONNX Runtime writes a plug-in's error as "file:line function text [ONNXRuntimeError] : number : kind : message".
    let own = message.rsplit_once("[ONNXRuntimeError] : ").and_then(|(_, own)| own.splitn(3, " : ").nth(2));
    let lines = own.unwrap_or(message).lines().map(str::trim);
    let kept: Vec<&str> = lines.filter(|line| !line.is_empty() && !line.starts_with("Exception from ")).collect();
    if kept.is_empty() { message.trim().to_owned() } else { kept.join(" ") }
}

/// Refuses partitions that a provider cannot compute, whatever its operators: weights as inputs, or weights read from disk in each pass.
fn refuse_unsuitable(spec: &SessionSpec<'_>, provider: Provider) -> Result<(), BackendError> {
    let facts = provider.facts();
    let on_host = spec.device.kind == DeviceKind::Cpu;
    let why = if spec.weights_are_inputs && !facts.weights_as_inputs {
        "its weights are inputs, and this provider takes them as constants only"
    } else if on_host && spec.residency != WeightResidency::InMemory {
        "its weights are read from disk, and this provider keeps all of them in memory"
    } else {
        return Ok(());
    };
    Err(BackendError::Runtime { doing: format!("run {} on {}", spec.partition, provider.name()), cause: why.into() })
}

fn wants_constants(spec: &SessionSpec<'_>) -> BackendError {
    BackendError::Runtime {
        doing: format!("run {} on the host", spec.partition),
        cause: "it is planned for a GPU with its weights as inputs, and on the host QMoE wants constants: run it where the GPU \
                is, or plan with --mechanisms resident,cpu,disk"
            .into(),
    }
}

/// Whether weights that do not stay in memory can be read from a file.
fn can_come_from_disk(spec: &SessionSpec<'_>, reporter: &dyn Reporter) -> bool {
    if spec.residency == WeightResidency::InMemory {
        return false;
    }
    if let Some(why) = disk::refusal() {
        if spec.residency == WeightResidency::ReadFromDisk {
            reporter
                .warning(&format!("the weights of {} stay in memory, whatever the plan says: {why}", spec.partition));
        }
        return false;
    }
    match &spec.host_kernels.unsaved {
        None => true,
        Some(operator) => {
            reporter.warning(&format!(
                "the weights of {} stay in memory, whatever the plan says: {operator} packs them in a layout that is not known to \
                 come back from disk as it was",
                spec.partition
            ));
            false
        }
    }
}

/// The most stored bytes per 1000 for which prepared weights are compressed, if the plan states no limit.
const CLEARLY_SHORTER: u64 = 600;

/// The environment variable that, in ONNX Runtime's kernels for experts, overrides the level that a model states.
const EXPERT_KERNELS: &str = "ORT_QMOE_CPU_QNBIT_GEMM";

/// The warning that experts compute in floats, although the model states activations of 8 bits, because the variable [`EXPERT_KERNELS`] has
/// this value.
fn float_experts(kernels: &HostKernels, value: Option<&str>) -> Option<String> {
    let value = value.filter(|value| kernels.integer_experts && matches!(*value, "0" | "fp32"))?;
    Some(format!(
        "{EXPERT_KERNELS}={value} has the experts compute in floats, and this plan is for activations of 8 bits (--int8-activations): \
         they are slower, and answers differ; unset it"
    ))
}

/// Environment variables that choose ONNX Runtime's kernels, such as [`EXPERT_KERNELS`]. Each kernel packs weights in a layout of its own;
/// a kernel that is given weights in another layout packs them again, in memory.
fn kernel_settings() -> String {
    let is_setting = |name: &str| name.starts_with("ORT_") && (name.contains("GEMM") || name.contains("MLAS"));
    let settings: BTreeMap<String, String> = std::env::vars_os()
        .filter_map(|(name, value)| Some((name.into_string().ok()?, value.to_string_lossy().into_owned())))
        .filter(|(name, _)| is_setting(name))
        .collect();
    settings.into_iter().map(|(name, value)| format!("\n{name}={value}")).collect()
}

/// Makes a session on the host with all weights mapped from files. If kernels want another layout of weights, or constants that ONNX
/// Runtime computes from them, the file is a prepared one that has these.
fn from_disk(
    runtime: &SharedRuntime,
    spec: &SessionSpec<'_>,
    LoadContext { control, reporter, loading }: LoadContext<'_>,
) -> Result<CreatedSession, BackendError> {
    // ONNX Runtime does not pack tables from which a token reads one row.
    let is_table = spec.residency == WeightResidency::Mapped { sparse_rows: true };
    let wants_packed = !is_table && spec.host_kernels.packed;
    let prepared = spec.prepared.filter(|_| wants_packed || spec.host_kernels.folded);
    let packs_weights = wants_packed && prepared.is_some();
    info!(partition = spec.partition, is_table, prepared = prepared.is_some(), residency = ?spec.residency, "weights on disk");
    let (file, dir, sealed) = match &prepared {
        Some(prepared) => {
            let machine = format!("{}\n{}\n{}", ort::info(), os::processor_name(), os::processor_features());
            let made_for = machine + &kernel_settings();
            let make = |dir: &Path| {
                reporter.preparing(spec.partition, prepared.dir);
                if !(packs_weights && spec.host_kernels.widened) {
                    return save(runtime, spec, Saving::optimized(packs_weights), dir, control);
                }
                save(runtime, spec, Saving::WIDENED, dir, control)?;
                let (model, weights) = (dir.join(Saving::WIDENED.model), dir.join(Saving::WIDENED.weights));
                let widened = SessionSpec { file: &model, weights_dir: dir, ..*spec };
                save(runtime, &widened, Saving::PACKED_AS_IS, dir, control)?;
                [model, weights].iter().try_for_each(std::fs::remove_file).map_err(|error| BackendError::Runtime {
                    doing: format!("remove the widened weights of {} from {}", spec.partition, dir.display()),
                    cause: error.to_string(),
                })
            };
            let limit = if is_table || !disk::reads_directly() {
                0
            } else {
                spec.compress_permille.map_or(CLEARLY_SHORTER, u64::from)
            };
            let sealed = disk::find_or_make(prepared, spec.partition, &made_for, limit, make)?;
            let dir = sealed.dir.clone();
            sigbus::register(&[dir.join(disk::WEIGHTS)]);
            (dir.join(disk::MODEL), dir, Some(sealed))
        }
        None => (spec.file.to_owned(), spec.weights_dir.to_owned(), None),
    };
    let own = SessionSpec { file: &file, weights_dir: &dir, ..*spec };
    let builder = on_host(runtime, &own, packs_weights)?;
    let builder = if prepared.is_some() { without_optimization(builder, spec)? } else { builder };
    let (session, mappings) =
        disk::claim(loading, &dir, || commit(builder, &own, control)).map_err(|error| match (&prepared, error) {
            (Some(_), BackendError::Runtime { doing, cause }) => {
                BackendError::Runtime { doing, cause: with_removal_hint(&cause, &dir) }
            }
            (_, error) => error,
        })?;
    let (mappings, experts) = (disk::locate(mappings, &file), experts_in(spec, &file, &dir)?);
    let compressed = match prepared {
        Some(_) => Some(dir.clone()),
        None => compressed_copy(runtime, spec, reporter),
    };
    let weights = SessionMappings { residency: spec.residency, mappings, dir, sealed, compressed, experts };
    Ok(CreatedSession { session, processor: host_threads_text(runtime), weights, packs_weights, packed: Vec::new() })
}

/// The directory of the compressed copy of weights that kernels take as the model has them, if the plan wants one. A copy only saves
/// reading: if it cannot be written, the weights are read as they are, and later partitions do not try again.
fn compressed_copy(runtime: &SharedRuntime, spec: &SessionSpec<'_>, reporter: &dyn Reporter) -> Option<PathBuf> {
    let is_read = spec.residency == WeightResidency::ReadFromDisk && disk::reads_directly();
    let (prepared, limit) =
        spec.prepared.zip(spec.compress_permille.map(u64::from)).filter(|(_, limit)| is_read && *limit > 0)?;
    if runtime.is_copying_refused.load(Ordering::Relaxed) {
        return None;
    }
    let begin = || reporter.preparing(spec.partition, prepared.dir);
    match disk::find_or_copy(&prepared, spec.partition, [spec.file, spec.weights_dir], limit, begin) {
        Ok(dir) => Some(dir),
        Err(error) => {
            runtime.is_copying_refused.store(true, Ordering::Relaxed);
            reporter.warning(&format!(
                "weights are read uncompressed, which takes longer: {error}. hpp-split --compress never plans for that"
            ));
            None
        }
    }
}

/// Finds the weights of the experts that runs read by demand.
fn experts_in(spec: &SessionSpec<'_>, file: &Path, dir: &Path) -> Result<ExpertTensors, BackendError> {
    let Some(weights) = spec.experts.filter(|_| spec.residency == WeightResidency::ReadFromDisk) else {
        return Ok(ExpertTensors::default());
    };
    ExpertTensors::find(file, dir, weights).map_err(|error| BackendError::Runtime {
        doing: format!("find the experts of {}", spec.partition),
        cause: error.to_string(),
    })
}

/// Why prepared weights cannot be used, and what to do.
fn with_removal_hint(cause: &str, dir: &Path) -> String {
    format!(
        "{cause} (these weights were prepared by an earlier start: remove {} and they are prepared again)",
        dir.display()
    )
}

/// What [`save`] writes, and how.
#[derive(Clone, Copy)]
struct Saving {
    /// The names of its files.
    model: &'static str,
    weights: &'static str,
    /// Whether weights are packed as kernels want them.
    packed: bool,
    /// Whether ONNX Runtime optimizes the graph first.
    optimizes: bool,
}

impl Saving {
    /// 16-bit weights are saved twice, first widened and then packed. A single session would have all of them in memory widened and packed.
    const WIDENED: Saving =
        Saving { model: "widened.onnx", weights: "widened.onnx.data", packed: false, optimizes: true };

    /// A graph that was saved before, with packed weights.
    const PACKED_AS_IS: Saving =
        Saving { model: disk::MODEL, weights: disk::UNALIGNED, packed: true, optimizes: false };

    const fn optimized(packed: bool) -> Saving {
        Saving { packed, optimizes: true, ..Saving::PACKED_AS_IS }
    }
}

/// Has a session run a saved graph as it is. It was optimized before it was saved. A second time, ONNX Runtime fuses operators between which
/// the first time has removed casts, and then numbers are rounded otherwise than in a session that has all weights in memory.
fn without_optimization(builder: SessionBuilder, spec: &SessionSpec<'_>) -> Result<SessionBuilder, BackendError> {
    let doing = format!("load the prepared weights of {}", spec.partition);
    builder.with_optimization_level(GraphOptimizationLevel::Disable).map_err(failed(doing))
}

/// Creates a session that writes its graph and its weights to a directory.
fn save(
    runtime: &SharedRuntime,
    spec: &SessionSpec<'_>,
    Saving { model, weights, packed, optimizes }: Saving,
    dir: &Path,
    control: &OrtControl,
) -> Result<(), BackendError> {
    let saved_packed = if packed { "1" } else { "0" };
    let builder = on_host(runtime, spec, packed)?;
    let builder = if optimizes { builder } else { without_optimization(builder, spec)? };
    let builder = builder
        .with_optimized_model_path(dir.join(model))
        .and_then(|b| b.with_config_entry("session.save_external_prepacked_constant_initializers", saved_packed))
        .and_then(|b| b.with_config_entry("session.optimized_model_external_initializers_file_name", weights))
        .and_then(|b| b.with_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024"))
        .map_err(failed(format!("prepare the weights of {}", spec.partition)))?;
    let session = commit(builder, spec, control)?;
    let read = disk::mapped_under(spec.weights_dir).unwrap_or_default();
    drop(session);
    // From now on these weights are read from the file that was written.
    disk::drop_page_cache(&read);
    Ok(())
}

/// The options of every session.
fn builder(runtime: &SharedRuntime, spec: &SessionSpec<'_>) -> Result<SessionBuilder, BackendError> {
    let prepare = || format!("prepare a session for {}", spec.partition);
    let folder = spec.weights_dir.to_string_lossy();
    Session::builder(&runtime.environment)
        .map_err(failed(prepare()))?
        .with_config_entry("session.model_external_initializers_file_folder_path", folder)
        // ONNX Runtime keeps a pattern for every combination of input shapes, and a growing mask makes a new combination with each token.
        .and_then(|builder| builder.with_memory_pattern(false))
        .map_err(failed(prepare()))
}

fn on_host(runtime: &SharedRuntime, spec: &SessionSpec<'_>, packed: bool) -> Result<SessionBuilder, BackendError> {
    let preparing = || format!("prepare a session for {} on the host", spec.partition);
    let arena = ort::ep::CPU::default().with_arena_allocator(true).build();
    let operators = operators::domain().map_err(failed(preparing()))?;
    builder(runtime, spec)?
        .with_devices([processor(runtime)?], None)
        .and_then(|builder| builder.with_execution_providers([arena]))
        // On a device this would replace the provider's own arena by the bare allocator that came with its library.
        .and_then(|builder| builder.with_env_allocators())
        .and_then(|builder| builder.with_prepacking(packed))
        .and_then(|builder| builder.with_operators(operators))
        .map_err(failed(preparing()))
}

/// Whether a packed copy of all weights takes at most half of the memory that this process may use; true if the system does not
/// report a limit.
fn has_room_to_pack(weight_bytes: u64) -> bool {
    os::memory_limit().is_none_or(|limit| weight_bytes <= limit / 2)
}

fn on_device(
    runtime: &SharedRuntime,
    spec: &SessionSpec<'_>,
    provider: Provider,
    found: ProviderDevice<'_>,
) -> Result<SessionBuilder, BackendError> {
    let prepared = builder(runtime, spec)?.with_config_entry("session.record_ep_graph_assignment_info", "1");
    let number = found.number;
    let prepared = match provider {
        // The library is also registered as a plugin, for its memory and copies; sessions use the built-in CUDA provider.
        Provider::CUDA => prepared.and_then(|builder| {
            let cuda = ort::ep::CUDA::default()
                .with_device_id(i32::try_from(number).unwrap_or(i32::MAX))
                .with_arena_extend_strategy(ArenaExtendStrategy::SameAsRequested)
                // Otherwise float32 matrices are multiplied with 10 bits of mantissa, and a token may differ from the host's.
                .with_tf32(false);
            let cuda = match runtime.streams(provider, number) {
                // SAFETY: the stream is one of this device and is never destroyed.
                Some(streams) => unsafe { cuda.with_compute_stream(streams.compute()) },
                None => cuda,
            };
            builder.with_execution_providers([cuda.build().error_on_failure()])
        }),
        _ => prepared.and_then(|builder| {
            let options = found.prefixed_options();
            info!(partition = spec.partition, provider = provider.id(), ?options, "session on a device");
            builder.with_devices([found.device], Some(&options))
        }),
    };
    prepared.map_err(failed(format!("prepare a session for {} on {}", spec.partition, provider.name())))
}

/// Refuses a device that does not compute in 16-bit floating point; tests each device once.
fn require_f16(
    runtime: &SharedRuntime,
    device: &Device,
    provider: Provider,
    number: usize,
) -> Result<(), BackendError> {
    let mut answers = runtime.f16.lock().unwrap_or_else(PoisonError::into_inner);
    let test = || probe::computes_in_f16(runtime, find_device(runtime, provider, device)?.device);
    let ask = || test().err().map(|error| error.to_string());
    match answers.entry((provider, number)).or_insert_with(ask) {
        None => Ok(()),
        Some(cause) => Err(BackendError::Runtime { doing: format!("use {}", provider.name()), cause: cause.clone() }),
    }
}

fn commit(mut builder: SessionBuilder, spec: &SessionSpec<'_>, control: &OrtControl) -> Result<Session, BackendError> {
    let doing = || format!("load {}", spec.file.display());
    let unreadable = |error: std::io::Error| BackendError::Runtime { doing: doing(), cause: error.to_string() };
    // A model file beside its weights may hold weights itself and be large. Other model files are graphs alone, and are read here.
    let beside =
        spec.file.parent().and_then(|folder| folder.canonicalize().ok()) == spec.weights_dir.canonicalize().ok();
    let bytes = if beside { None } else { Some(std::fs::read(spec.file).map_err(unreadable)?) };
    control.loading(Some(builder.canceler()));
    let session = match &bytes {
        Some(bytes) => builder.commit_from_memory(bytes),
        None => builder.commit_from_file(spec.file),
    };
    control.loading(None);
    session.map_err(|error| match error.code() {
        ort::ErrorCode::ModelLoadCanceled => BackendError::Stopped,
        _ => failed(doing())(error),
    })
}

/// The check that the nodes of a session were assigned to the provider for which it was made.
struct AssignmentCheck<'a> {
    spec: &'a SessionSpec<'a>,
    provider: Provider,
    ort_name: &'a str,
}

impl AssignmentCheck<'_> {
    /// Reports the nodes that the device did not take; if fallback is refused, only shape bookkeeping may run on the host. A provider
    /// that takes no node is refused.
    fn prove(
        &self,
        session: &Session,
        on_purpose: &BTreeSet<String>,
        reporter: &dyn Reporter,
    ) -> Result<(), BackendError> {
        let (spec, name) = (self.spec, self.provider.name());
        let is_left_to_another = |node: &Assigned| {
            node.provider != self.ort_name && !is_bookkeeping(&node.operator) && !on_purpose.contains(&node.name)
        };
        let nodes = assigned(session)?;
        if !nodes.is_empty() && nodes.iter().all(|node| node.provider != self.ort_name) {
            let cause = format!("it takes none of its {} nodes", nodes.len());
            return Err(BackendError::Runtime { doing: format!("run {} on {name}", spec.partition), cause });
        }
        if let Some(warning) = self.fault(&nodes) {
            reporter.warning(&warning);
        }
        let nodes: Vec<Assigned> = nodes.into_iter().filter(is_left_to_another).collect();
        let Some(first) = nodes.first() else { return Ok(()) };
        let mut operators: Vec<&str> = nodes.iter().map(|node| node.operator.as_str()).collect();
        operators.sort_unstable();
        operators.dedup();
        let message = format!(
            "{name} leaves {} nodes of {} to {} ({}; first {:?})",
            nodes.len(),
            spec.partition,
            first.provider,
            operators.join(", "),
            first.name
        );
        match spec.fallback {
            Fallback::Refuse => {
                Err(BackendError::Runtime { doing: format!("keep {} on its device", spec.partition), cause: message })
            }
            Fallback::Report => {
                reporter.warning(&message);
                Ok(())
            }
        }
    }

    /// The warning about a provider that runs an operator which it is known to compute wrongly.
    fn fault(&self, nodes: &[Assigned]) -> Option<String> {
        let taken = |fault: &&ProviderFault| {
            let is_there = |node: &Assigned| node.operator == fault.operator && node.provider == self.ort_name;
            fault.provider == self.provider && nodes.iter().any(is_there)
        };
        let fault = PROVIDER_FAULTS.iter().find(taken)?;
        let (name, operator, what) = (self.provider.name(), fault.operator, fault.what);
        Some(format!("do not trust the answer: {name} computes {operator} of {} and {what}", self.spec.partition))
    }
}

/// Operators on shapes, indices and masks that providers leave to the host on purpose.
fn is_bookkeeping(operator: &str) -> bool {
    const OPERATORS: [&str; 24] = [
        "Cast",
        "Concat",
        "Constant",
        "ConstantOfShape",
        "Equal",
        "Expand",
        "Gather",
        "Greater",
        "GreaterOrEqual",
        "Identity",
        "If",
        "Less",
        "LessOrEqual",
        "Not",
        "Range",
        "ReduceMax",
        "ReduceSum",
        "Reshape",
        "Shape",
        "Slice",
        "Squeeze",
        "Sub",
        "Unsqueeze",
        "Where",
    ];
    OPERATORS.contains(&operator)
}

fn host_threads_text(runtime: &SharedRuntime) -> String {
    format!("{} threads", runtime.threads)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experts_that_compute_in_floats_against_the_plan_are_warned_of() {
        let integers = HostKernels { integer_experts: true, ..HostKernels::default() };
        for value in ["0", "fp32"] {
            assert!(
                float_experts(&integers, Some(value)).is_some_and(|warning| warning.contains(&format!("={value} ")))
            );
            assert_eq!(float_experts(&HostKernels::default(), Some(value)), None, "as the model states");
        }
        assert_eq!((float_experts(&integers, Some("int8")), float_experts(&integers, None)), (None, None));
    }

    #[test]
    fn a_refused_session_is_one_line_with_its_options() {
        let refused = |cause: &str, options: &[&str]| {
            let error = BackendError::Runtime { doing: "load a.onnx".into(), cause: cause.into() };
            let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
            refused_session(error, &options).to_string()
        };
        let thrown = "Exception from src/core.cpp:117:\nException from src/plugin.cpp:54:\nno such property: A\n\n";
        let said = "cannot create a session with openvino.A=1 openvino.B=2: no such property: A";
        assert_eq!(refused(thrown, &["openvino.A=1", "openvino.B=2"]), said);
        let status = "/src/x.cc:71 void f() Error: [ONNXRuntimeError] : 2 : INVALID_ARGUMENT : bad JSON : column 2\n";
        assert_eq!(refused(status, &[]), "cannot create a session: bad JSON : column 2");
        assert_eq!(refused("Exception from a.cpp:1:", &[]), "cannot create a session: Exception from a.cpp:1:");
    }
}
