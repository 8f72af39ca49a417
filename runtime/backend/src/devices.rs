//! Reports the library, providers and devices of this machine, for `hpp-exec devices`.

use crate::backend::OrtBackend;
use crate::cuda;
use crate::discover::TriedLibrary;
use crate::os;
use crate::provider_devices::{describe, devices_of, find_device, kind_name};
use crate::raw::library;
use hpp_schema::{Device, Evidence, PROVIDER_FACTS, Provider};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The library, providers and devices of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SystemReport {
    /// The ONNX Runtime library.
    pub library: PathBuf,
    /// Its version.
    pub version: String,
    /// All places searched for the library, the chosen one last.
    pub tried: Vec<TriedLibrary>,
    /// Physical cores of this machine, or hardware threads if the system does not report cores.
    pub cores: usize,
    /// Threads shared by all partitions.
    pub threads: usize,
    /// This machine's memory in bytes, total and available, where the system reports it.
    pub memory: (Option<u64>, Option<u64>),
    /// The providers of the table, then those that are installed or named beside them.
    pub providers: Vec<ProviderReport>,
    /// ONNX Runtime's names of all providers that the library was built with; HPP plans for those in `providers`.
    pub built_in: Vec<String>,
    /// The newest CUDA version that the NVIDIA driver runs, if there is a driver.
    pub cuda_driver: Option<String>,
}

/// One provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderReport {
    /// The provider.
    pub provider: Provider,
    /// ONNX Runtime's name for it, if known.
    pub ort_name: Option<String>,
    /// How far its use was tested.
    pub evidence: Evidence,
    /// The library that contains it.
    pub source: ProviderSource,
    /// Its version, if it reports one.
    pub version: Option<String>,
    /// Its devices in its own order: a plan's `gpuN` is number N.
    pub devices: Vec<DeviceReport>,
    /// Why it cannot be used; `None` if it can.
    pub problem: Option<String>,
}

/// The library that contains a provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProviderSource {
    /// The ONNX Runtime library.
    BuiltIn,
    /// A library of its own.
    Plugin(PathBuf),
    /// It was not found.
    Absent,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    /// Its name in plans.
    pub plan_name: String,
    /// `CPU`, `GPU` or `NPU`.
    pub kind: &'static str,
    /// The name of its vendor, if known.
    pub vendor: Option<String>,
    /// The vendor's name for it, if the driver reports one.
    pub description: String,
    /// Its memory in bytes, if the provider or the driver reports it.
    pub total: Option<u64>,
    /// The free part of it.
    pub free: Option<u64>,
}

impl OrtBackend {
    /// The providers and devices of this machine, and why others cannot be used.
    pub fn devices(&self) -> SystemReport {
        let runtime = &self.runtime;
        let built_in = library::built_in_providers();
        let cuda = cuda::cards();
        let providers: Vec<Provider> = PROVIDER_FACTS.iter().filter_map(|facts| facts.provider).collect();
        let others = runtime.plugins.others();
        SystemReport {
            library: runtime.found.path.clone(),
            version: self.version(),
            tried: runtime.found.tried.clone(),
            cores: os::machine_cores(),
            threads: runtime.threads,
            memory: os::machine_memory(),
            providers: providers
                .into_iter()
                .chain(others)
                .map(|provider| self.report(provider, cuda.as_ref().map_or(&[], |(_, cards)| &cards[..])))
                .collect(),
            built_in,
            cuda_driver: cuda.map(|(version, _)| version),
        }
    }

    /// Whether a provider has a usable device on this machine, or its library was named by the user, who then wants to know why it has
    /// none.
    pub fn has_device(&self, provider: Provider) -> bool {
        let plugin = self.runtime.plugins.get(&self.runtime.environment, provider);
        let has_device = || plugin.problem.is_none() && !devices_of(&self.runtime, provider).is_empty();
        provider == Provider::CPU || plugin.is_named || has_device()
    }

    /// Whether a provider can use this device of a plan here.
    pub fn finds_device(&self, provider: Provider, device: &Device) -> bool {
        provider == Provider::CPU || find_device(&self.runtime, provider, device).is_ok()
    }

    /// The ONNX Runtime library, and the threads that all partitions share.
    pub fn library(&self) -> (&Path, usize) {
        (&self.runtime.found.path, self.runtime.threads)
    }

    /// What decides, beside the plan, the bits of the results of a plan that runs on these providers: the library, the threads that share
    /// the work, the processor, the providers' versions and options.
    pub fn results_depend_on(&self, providers: impl Iterator<Item = Provider>) -> String {
        let (library, threads) = (ort::info(), self.runtime.threads);
        let host = format!("{library}, {threads} threads, {}, {}", os::processor_name(), os::processor_features());
        let plugins: BTreeSet<Provider> = providers.filter(|provider| *provider != Provider::CPU).collect();
        plugins.into_iter().fold(host, |text, provider| {
            let version = self.provider_version(provider);
            format!("{text}; {provider:?} {version:?} {:?}", self.runtime.provider_options.get(&provider))
        })
    }

    /// Why a provider that the user named does not exist here: it is neither in HPP's table, nor named with a library, nor installed.
    /// `None` if it exists, which does not mean that it finds a device.
    pub fn unknown_provider(&self, provider: Provider) -> Option<String> {
        let plugins = &self.runtime.plugins;
        if provider.facts().provider.is_some() || plugins.others().contains(&provider) {
            return None;
        }
        let known = PROVIDER_FACTS.iter().filter_map(|facts| facts.provider).chain(plugins.others());
        let names: Vec<String> = known.map(|known| known.id().to_owned()).collect();
        Some(format!("there is no provider {:?}; there are {}", provider.id(), names.join(", ")))
    }

    fn provider_version(&self, provider: Provider) -> Option<String> {
        let plugin = self.runtime.plugins.get(&self.runtime.environment, provider);
        let mut known = self.runtime.environment.devices();
        let own = known.find(|device| device.ep().is_ok_and(|ep| Some(ep) == plugin.ort_name.as_deref()));
        own.and_then(|device| library::version(&device))
    }

    /// The library's version: that of the CPU provider, which it always contains.
    fn version(&self) -> String {
        self.provider_version(Provider::CPU).unwrap_or_else(|| format!("1.{} or newer", ort::MINOR_VERSION))
    }

    fn report(&self, provider: Provider, cards: &[cuda::Card]) -> ProviderReport {
        let plugin = self.runtime.plugins.get(&self.runtime.environment, provider);
        let source = match (&plugin.path, &plugin.problem) {
            (Some(path), _) => ProviderSource::Plugin(path.clone()),
            (None, None) => ProviderSource::BuiltIn,
            (None, Some(_)) => ProviderSource::Absent,
        };
        let devices = match provider {
            Provider::CPU => vec![self.host()],
            Provider::CUDA => self.accelerators(provider, cards),
            _ => self.accelerators(provider, &[]),
        };
        let version = self.provider_version(provider);
        let none = || devices.is_empty().then(|| "it finds no device on this machine".to_owned());
        let problem = plugin.problem.clone().or_else(none);
        let (ort_name, evidence) = (plugin.ort_name.clone(), provider.facts().evidence);
        ProviderReport { provider, ort_name, evidence, source, version, devices, problem }
    }

    fn host(&self) -> DeviceReport {
        let (total, free) = os::machine_memory();
        let mut known = self.runtime.environment.devices();
        let own = known.find(|device| device.ep().is_ok_and(|ep| Some(ep) == Provider::CPU.facts().ort_name));
        let vendor = own.and_then(|device| vendor(&device));
        DeviceReport { plan_name: "cpu".into(), kind: "CPU", vendor, description: os::processor_name(), total, free }
    }

    fn accelerators(&self, provider: Provider, cards: &[cuda::Card]) -> Vec<DeviceReport> {
        let devices = devices_of(&self.runtime, provider);
        let report = |(number, device): (usize, &ort::device::Device<'_>)| {
            let (card, kind) = (cards.get(number), kind_name(device));
            // A provider that computes on the processor shares the host's memory.
            let (total, free) = match (card, kind) {
                (Some(card), _) => (Some(card.total), Some(card.free)),
                (None, "CPU") => os::machine_memory(),
                (None, _) => (None, None),
            };
            DeviceReport {
                plan_name: if kind == "CPU" { "cpu".to_owned() } else { format!("gpu{number}") },
                kind,
                vendor: vendor(device),
                description: card.map_or_else(|| describe(device), |card| card.name.clone()),
                total,
                free,
            }
        };
        devices.iter().enumerate().map(report).collect()
    }
}

impl ProviderReport {
    /// Its name in messages.
    pub fn name(&self) -> &str {
        self.provider.name()
    }
}

fn vendor(device: &ort::device::Device<'_>) -> Option<String> {
    device.hardware_device().vendor().ok().filter(|vendor| !vendor.is_empty()).map(str::to_owned)
}
