//! Names are not empty, unique and not reserved, and references resolve.

use super::Findings;
use crate::{Device, DeviceKind, PLAN_VERSION, Plan, Provider};
use std::collections::BTreeSet;

pub(super) fn check(plan: &Plan, found: &mut Findings) {
    found.require(
        plan.hpp_plan == PLAN_VERSION,
        "hpp_plan",
        format!("this build reads version {PLAN_VERSION}, not {}", plan.hpp_plan),
    );
    found.require(!plan.partitions.is_empty(), "partitions", "the list is empty");
    unique(found, "model.inputs", plan.model.inputs.iter().map(|input| &input.name));
    unique(found, "model.outputs", plan.model.outputs.iter().map(|output| &output.name));
    unique(found, "devices", plan.devices.iter().map(|device| &device.name));
    unique(found, "partitions", plan.partitions.iter().map(|partition| &partition.name));
    unique(found, "files", plan.files.iter().map(|file| &file.path));
    for (at, partition) in plan.partitions.iter().enumerate() {
        let place = format!("partitions[{at}]");
        unique(found, &format!("{place}.inputs"), partition.inputs.iter().map(|input| &input.name));
        unique(found, &format!("{place}.outputs"), partition.outputs.iter().map(|output| &output.name));
        let reserved = matches!(partition.name.as_str(), "model" | "state");
        found.require(!reserved, &place, format!("the partition name {:?} is reserved", partition.name));
        for (variant, field) in partition.variants().zip(["", ".prefill"]) {
            providers(found, &format!("{place}{field}"), variant.providers, device(plan, variant.device));
        }
        found.require(
            device(plan, &partition.device).is_some(),
            format!("{place}.device"),
            format!("the plan has no device {:?}", partition.device),
        );
    }
    for (at, device) in plan.devices.iter().enumerate() {
        provider_options(found, &format!("devices[{at}].provider_options"), plan, device);
    }
    for (at, buffer) in plan.buffers.iter().enumerate() {
        let place = format!("buffers[{at}]");
        let is_output =
            plan.partitions.iter().flat_map(|partition| &partition.outputs).any(|output| output.name == buffer.value);
        found.require(is_output, &place, format!("no partition has an output {:?}", buffer.value));
        let known = device(plan, &buffer.device).is_some();
        found.require(known, &place, format!("the plan has no device {:?}", buffer.device));
    }
}

fn unique<'a>(found: &mut Findings, place: &str, names: impl Iterator<Item = &'a String>) {
    let mut seen = BTreeSet::new();
    for (at, name) in names.enumerate() {
        found.require(!name.is_empty(), format!("{place}[{at}]"), "the name is empty");
        found.require(seen.insert(name), format!("{place}[{at}]"), format!("{name:?} occurs twice"));
    }
}

fn providers(found: &mut Findings, place: &str, providers: &[Provider], device: Option<&Device>) {
    let place = format!("{place}.providers");
    found.require(!providers.is_empty(), &place, "the list is empty");
    let distinct: BTreeSet<_> = providers.iter().collect();
    found.require(distinct.len() == providers.len(), &place, "one occurs twice");
    let on_host = device.is_some_and(|device| device.kind == DeviceKind::Cpu);
    let needs_device = providers.iter().find(|provider| !provider.uses_host_memory());
    if let Some(provider) = needs_device.filter(|_| on_host) {
        let why =
            format!("a partition on the host can only use providers of host memory, and {} has its own", provider.id());
        found.require(false, &place, why);
    }
}

/// Maximum options of a provider, and maximum bytes of a key or a value.
const MOST_OPTIONS: usize = 64;
const LONGEST_OPTION: usize = 4096;

/// Checks that options belong to a provider of the device's partitions and name no file. A plan is not trusted, and a provider would load or write
/// the file that an option names.
fn provider_options(found: &mut Findings, place: &str, plan: &Plan, device: &Device) {
    let variants =
        || plan.partitions.iter().flat_map(|partition| partition.variants()).filter(|v| v.device == device.name);
    for (provider, options) in &device.provider_options {
        let place = format!("{place}.{}", provider.id());
        let is_used = variants().any(|variant| variant.providers.contains(provider));
        found.require(is_used, &place, format!("no partition of {} uses this provider", device.name));
        found.require(options.len() <= MOST_OPTIONS, &place, format!("more than {MOST_OPTIONS} options"));
        for (key, value) in options.iter().take(MOST_OPTIONS) {
            let place = format!("{place}.{key:?}");
            let fits = !key.is_empty() && key.len() <= LONGEST_OPTION && value.len() <= LONGEST_OPTION;
            found.require(
                fits,
                &place,
                format!("a key is not empty, and neither key nor value exceeds {LONGEST_OPTION} bytes"),
            );
            let why =
                "a plan may not name files for a provider: leave it out, and give it to hpp-exec with --ep-option";
            found.require(!names_a_file(key, value), &place, why);
            found.require(!key.contains('\0') && !value.contains('\0'), &place, "it contains NUL");
        }
    }
}

/// Whether an option may name a file or a directory, which the provider would read, load or write.
pub fn names_a_file(key: &str, value: &str) -> bool {
    let both = format!("{key}\n{value}").to_ascii_lowercase();
    ["/", "\\", "path", "dir", "file", "lib", "plugin", ".so", ".dll", ".json", ".xml"]
        .iter()
        .any(|word| both.contains(word))
}

/// The device with this name.
pub(super) fn device<'a>(plan: &'a Plan, name: &str) -> Option<&'a Device> {
    plan.devices.iter().find(|device| device.name == name)
}
