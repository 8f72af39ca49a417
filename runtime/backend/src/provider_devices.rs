//! The devices of providers: which of them a plan's device is, and the options its sessions get.

use crate::environment::SharedRuntime;
use crate::openvino;
use crate::raw::library;
use hpp_engine::BackendError;
use hpp_schema::{Device as PlanDevice, DeviceKind, Provider, ProviderOptions, TensorMemory};
use ort::device::Device;
use ort::memory::DeviceType;

/// The options that choose a device instead of being passed to the provider.
const DEVICE_OPTIONS: [&str; 2] = ["device_type", "device"];

/// `ort` has room for this many characters of a provider's name.
const LONGEST_ORT_NAME: usize = 120;

/// A device of a provider.
pub(crate) struct ProviderDevice<'r> {
    /// Its number among those of the provider.
    pub number: usize,
    /// ONNX Runtime's device.
    pub device: Device<'r>,
    /// ONNX Runtime's name of the provider.
    pub ort_name: String,
    /// Options for sessions on it.
    pub options: ProviderOptions,
}

impl ProviderDevice<'_> {
    /// The options as `ort` takes them: with the provider's name before each key.
    pub fn prefixed_options(&self) -> Vec<(String, String)> {
        self.options.iter().map(|(key, value)| (format!("{}.{key}", self.ort_name), value.clone())).collect()
    }
}

/// The device of a provider for which a plan's device stands: `gpuN` for number N, the host for the first that computes on the CPU.
pub(crate) fn find_device<'r>(
    runtime: &'r SharedRuntime,
    provider: Provider,
    wanted: &PlanDevice,
) -> Result<ProviderDevice<'r>, BackendError> {
    let absent = |cause: String| BackendError::Runtime { doing: format!("use {}", provider.name()), cause };
    let plugin = runtime.plugins.get(&runtime.environment, provider);
    if let Some(problem) = plugin.problem.clone() {
        return Err(absent(problem));
    }
    let mut options = options_for(runtime, provider, wanted);
    let mut devices = devices_of(runtime, provider);
    if wanted.kind == DeviceKind::Cpu {
        devices.sort_by_key(|device| device.hardware_device().ty() != DeviceType::CPU);
    }
    let all = listed(&devices);
    if let Some(kind) = take_device_option(provider, &mut options) {
        devices.retain(|device| is_of_kind(device, &kind));
        if devices.is_empty() {
            return Err(absent(format!("it has no device of type {kind} here; it has {all}")));
        }
    }
    let number: usize = wanted.name.trim_start_matches(|c: char| !c.is_ascii_digit()).parse().unwrap_or(0);
    let count = devices.len();
    if number >= count {
        return Err(absent(match count {
            0 => "it finds no device on this machine".into(),
            _ => format!("the plan uses {}, and it finds {count} on this machine", wanted.name),
        }));
    }
    let device = devices.swap_remove(number);
    let only_on = provider.facts().only_on.filter(|word| !describe(&device).contains(word));
    if let Some(word) = only_on {
        return Err(absent(format!("it is used on {word} cards only, and this is {}", describe(&device))));
    }
    if provider == Provider::OPENVINO {
        openvino::complete(&mut options, kind_name(&device), runtime.threads, runtime.compiled_models.as_deref())
            .map_err(absent)?;
    }
    let ort_name = device.ep().unwrap_or_default().to_owned();
    if ort_name.len() > LONGEST_ORT_NAME {
        return Err(absent(format!("ONNX Runtime's name for it has more than {LONGEST_ORT_NAME} characters")));
    }
    Ok(ProviderDevice { number, device, ort_name, options })
}

/// The processor as the device of ONNX Runtime's own CPU provider. Each session on the host names this device. Otherwise `ort` would set a
/// policy, and every policy, even the one that prefers the CPU, takes a registered plug-in that offers the processor before ONNX Runtime's
/// own provider.
pub(crate) fn processor(runtime: &SharedRuntime) -> Result<Device<'_>, BackendError> {
    let own = Provider::CPU.facts().ort_name;
    let found = runtime.environment.devices().find(|device| device.ep().ok() == own);
    found.ok_or_else(|| BackendError::Runtime {
        doing: "use the processor".into(),
        cause: format!("ONNX Runtime lists no device of {}", own.unwrap_or_default()),
    })
}

/// Defaults of the table, replaced by the plan's options, replaced by the user's.
fn options_for(runtime: &SharedRuntime, provider: Provider, device: &PlanDevice) -> ProviderOptions {
    let defaults = provider.facts().default_options.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    let mut options: ProviderOptions = defaults.collect();
    for more in [device.provider_options.get(&provider), runtime.provider_options.get(&provider)].into_iter().flatten()
    {
        options.extend(more.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
    options
}

/// Removes the option that chooses a device, and returns it. Built-in providers have an option of the same name, which stays.
fn take_device_option(provider: Provider, options: &mut ProviderOptions) -> Option<String> {
    if !provider.facts().takes_options {
        return None;
    }
    DEVICE_OPTIONS.iter().filter_map(|key| options.remove(*key)).next()
}

/// A provider's devices, in its own order; accelerators before processors. Providers with memory of their own have accelerators only.
pub(crate) fn devices_of(runtime: &SharedRuntime, provider: Provider) -> Vec<Device<'_>> {
    let plugin = runtime.plugins.get(&runtime.environment, provider);
    let Some(name) = plugin.ort_name.as_deref() else { return vec![] };
    let takes_processors = provider.facts().tensors == TensorMemory::Host;
    let is_processor = |device: &Device<'_>| device.hardware_device().ty() == DeviceType::CPU;
    let mut devices: Vec<Device<'_>> = runtime
        .environment
        .devices()
        .filter(|device| device.ep().is_ok_and(|ep| ep == name))
        .filter(|device| takes_processors || !is_processor(device))
        .collect();
    devices.sort_by_key(is_processor);
    devices
}

/// `CPU`, `GPU` or `NPU`.
pub(crate) fn kind_name(device: &Device<'_>) -> &'static str {
    match device.hardware_device().ty() {
        DeviceType::CPU => "CPU",
        DeviceType::GPU => "GPU",
        DeviceType::NPU => "NPU",
        _ => "other",
    }
}

/// Whether a device is of a type (`GPU`), or is the one that OpenVINO calls so (`GPU.1`).
fn is_of_kind(device: &Device<'_>, wanted: &str) -> bool {
    let own = library::ep_metadata(device, c"ov_device");
    kind_name(device).eq_ignore_ascii_case(wanted) || own.is_some_and(|own| own.eq_ignore_ascii_case(wanted))
}

fn listed(devices: &[Device<'_>]) -> String {
    let names: Vec<String> =
        devices.iter().map(|device| format!("{} ({})", kind_name(device), describe(device))).collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

/// The description of a device.
pub(crate) fn describe(device: &Device<'_>) -> String {
    if let Some(description) =
        library::description(device).or_else(|| library::ep_metadata(device, c"FULL_DEVICE_NAME"))
    {
        return description;
    }
    let hardware = device.hardware_device();
    let vendor = hardware.vendor().unwrap_or_default();
    format!("{vendor} {:?} {:#06x}", hardware.ty(), hardware.id()).trim().to_owned()
}
