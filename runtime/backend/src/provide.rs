//! Providers: trying a partition's in order, and making a session with the first that is to be had.

#![allow(clippy::result_large_err, reason = "ort's builder comes back in its errors")]

use crate::environment::Runtime;
use crate::peek;
use crate::raw::assignment::{Assigned, assigned};
use crate::raw::failed;
use crate::raw::run::OrtControl;
use hpp_engine::port::{Fallback, SessionSpec};
use hpp_engine::{BackendError, Reporter};
use hpp_schema::{DeviceKind, Provider};
use ort::device::Device;
use ort::memory::DeviceType;
use ort::session::Session;
use ort::session::builder::{AutoDevicePolicy, SessionBuilder};
use std::collections::BTreeSet;

/// A session with the provider and processor it got, and those that were not to be had.
pub(crate) struct Provided {
    pub session: Session,
    pub provider: Provider,
    pub processor: String,
    pub refused: Vec<(Provider, String)>,
}

/// Tries the partition's providers in order. A partition planned for a GPU may end on the host, if that is not refused.
pub(crate) fn provide(
    runtime: &Runtime,
    spec: &SessionSpec<'_>,
    control: &OrtControl,
    reporter: &dyn Reporter,
) -> Result<Provided, BackendError> {
    let wants_gpu = spec.device.kind == DeviceKind::Gpu;
    let mut order = spec.providers.to_vec();
    if !order.contains(&Provider::Cpu) {
        order.push(Provider::Cpu);
    }
    let mut refused = Vec::new();
    for provider in order {
        if provider == Provider::Cpu && wants_gpu && spec.fallback == Fallback::Refuse {
            break;
        }
        match attempt(runtime, spec, provider, control, reporter) {
            Ok((session, processor)) => return Ok(Provided { session, provider, processor, refused }),
            Err(BackendError::Stopped) => return Err(BackendError::Stopped),
            // What the host cannot do is no matter of providers: say it as it is.
            Err(error) if provider == Provider::Cpu => return Err(error),
            Err(error) => refused.push((provider, error.to_string())),
        }
    }
    let reasons = refused.iter().map(|(provider, reason)| format!("{}: {reason}", name(*provider))).collect();
    Err(BackendError::NoProvider { reasons })
}

fn attempt(
    runtime: &Runtime,
    spec: &SessionSpec<'_>,
    provider: Provider,
    control: &OrtControl,
    reporter: &dyn Reporter,
) -> Result<(Session, String), BackendError> {
    match provider {
        Provider::Cpu => Ok((commit(on_host(runtime, spec)?, spec, control)?, host_name(runtime))),
        Provider::Cuda | Provider::Webgpu => {
            let device = find_device(runtime, provider, &spec.device.name)?;
            runtime.log.take_kept_on_host();
            let session = commit(on_device(runtime, spec, device)?, spec, control)?;
            prove(&session, spec, provider, &runtime.log.take_kept_on_host(), reporter)?;
            let device = find_device(runtime, provider, &spec.device.name)?;
            Ok((session, describe(&device)))
        }
    }
}

/// Options every session has.
fn builder(runtime: &Runtime, spec: &SessionSpec<'_>) -> Result<SessionBuilder, BackendError> {
    let prepare = || format!("prepare a session for {}", spec.partition);
    let folder = spec.weights_dir.to_string_lossy();
    // Left to itself, `ort` lets ONNX Runtime pick a device.
    Session::builder(&runtime.environment)
        .map_err(failed(prepare()))?
        .with_auto_device(AutoDevicePolicy::PreferCPU)
        .and_then(|builder| builder.with_config_entry("session.model_external_initializers_file_folder_path", folder))
        .and_then(|builder| builder.with_env_allocators())
        // Patterns are kept for every combination of input shapes, and a growing mask makes a new one for each token.
        .and_then(|builder| builder.with_memory_pattern(false))
        .map_err(failed(prepare()))
}

fn on_host(runtime: &Runtime, spec: &SessionSpec<'_>) -> Result<SessionBuilder, BackendError> {
    let arena = ort::ep::CPU::default().with_arena_allocator(true).build();
    let packed = peek::gains_from_packing(spec.model);
    builder(runtime, spec)?
        .with_execution_providers([arena])
        .and_then(|builder| builder.with_prepacking(packed))
        .map_err(failed(format!("prepare a session for {} on the host", spec.partition)))
}

fn on_device(runtime: &Runtime, spec: &SessionSpec<'_>, device: Device<'_>) -> Result<SessionBuilder, BackendError> {
    builder(runtime, spec)?
        .with_config_entry("session.record_ep_graph_assignment_info", "1")
        .and_then(|builder| builder.with_devices([device], None))
        .map_err(failed(format!("prepare a session for {} on a device", spec.partition)))
}

fn commit(mut builder: SessionBuilder, spec: &SessionSpec<'_>, control: &OrtControl) -> Result<Session, BackendError> {
    let doing = || format!("load {}", spec.file.display());
    let bytes =
        std::fs::read(spec.file).map_err(|error| BackendError::Runtime { doing: doing(), cause: error.to_string() })?;
    control.loading(Some(builder.canceler()));
    let session = builder.commit_from_memory(&bytes);
    control.loading(None);
    session.map_err(|error| match error.code() {
        ort::ErrorCode::ModelLoadCanceled => BackendError::Stopped,
        _ => failed(doing())(error),
    })
}

/// The plan's `gpuN` is the provider's device number N.
fn find_device<'r>(runtime: &'r Runtime, provider: Provider, name: &str) -> Result<Device<'r>, BackendError> {
    let absent = |cause: String| BackendError::Runtime { doing: format!("use {}", self::name(provider)), cause };
    if let Some(problem) =
        runtime.plugins.iter().find(|plugin| plugin.provider == provider).and_then(|p| p.problem.clone())
    {
        return Err(absent(problem));
    }
    let number: usize = name.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0);
    let mut devices = devices_of(runtime, provider);
    let count = devices.len();
    if number < count {
        return Ok(devices.swap_remove(number));
    }
    Err(absent(match count {
        0 => "it finds no device on this machine".into(),
        _ => format!("{name} is asked for, and it finds {count} on this machine"),
    }))
}

/// A provider's accelerators, in its own order.
pub(crate) fn devices_of(runtime: &Runtime, provider: Provider) -> Vec<Device<'_>> {
    let own = |device: &Device<'_>| device.ep().is_ok_and(|ep| ep == long_name(provider));
    runtime.environment.devices().filter(own).filter(|d| d.hardware_device().ty() != DeviceType::CPU).collect()
}

/// Says which nodes the device did not take; with fallback refused, only bookkeeping may be left to the host.
fn prove(
    session: &Session,
    spec: &SessionSpec<'_>,
    provider: Provider,
    on_purpose: &BTreeSet<String>,
    reporter: &dyn Reporter,
) -> Result<(), BackendError> {
    let elsewhere = |node: &Assigned| {
        node.provider != long_name(provider) && !is_bookkeeping(&node.operator) && !on_purpose.contains(&node.name)
    };
    let nodes: Vec<Assigned> = assigned(session)?.into_iter().filter(elsewhere).collect();
    let Some(first) = nodes.first() else { return Ok(()) };
    let mut operators: Vec<&str> = nodes.iter().map(|node| node.operator.as_str()).collect();
    operators.sort_unstable();
    operators.dedup();
    let message = format!(
        "{} leaves {} nodes of {} to {} ({}; first {:?})",
        name(provider),
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

/// A provider as people call it.
pub(crate) fn name(provider: Provider) -> &'static str {
    match provider {
        Provider::Cuda => "CUDA",
        Provider::Webgpu => "WebGPU",
        Provider::Cpu => "CPU",
    }
}

/// A provider as ONNX Runtime calls it.
pub(crate) fn long_name(provider: Provider) -> &'static str {
    match provider {
        Provider::Cuda => "CUDAExecutionProvider",
        Provider::Webgpu => "WebGpuExecutionProvider",
        Provider::Cpu => "CPUExecutionProvider",
    }
}

fn host_name(runtime: &Runtime) -> String {
    format!("{} threads", runtime.threads)
}

/// A device in words.
pub(crate) fn describe(device: &Device<'_>) -> String {
    if let Some(description) = crate::raw::library::description(device) {
        return description;
    }
    let hardware = device.hardware_device();
    let vendor = hardware.vendor().unwrap_or_default();
    format!("{vendor} {:?} {:#06x}", hardware.ty(), hardware.id()).trim().to_owned()
}
