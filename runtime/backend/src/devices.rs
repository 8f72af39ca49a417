//! What this machine has to run partitions with, for people to read.

use crate::backend::OrtBackend;
use crate::create_session::{devices_of, long_name};
use crate::cuda;
use crate::discover::Tried;
use crate::os;
use crate::raw::library;
use hpp_schema::Provider;
use std::path::PathBuf;

/// Everything found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The ONNX Runtime library.
    pub library: PathBuf,
    /// Its version.
    pub version: String,
    /// Every place looked at for it, the taken one last.
    pub tried: Vec<Tried>,
    /// Physical cores of this machine, or hardware threads where the system does not tell them apart.
    pub cores: usize,
    /// Threads all partitions share.
    pub threads: usize,
    /// This machine's memory: all of it, and what could be had now, where the system tells.
    pub memory: (Option<u64>, Option<u64>),
    /// Providers, in the order a plan prefers them.
    pub providers: Vec<ProviderReport>,
    /// Every provider the library was built with, as it calls them; HPP plans for those in `providers`.
    pub built_in: Vec<String>,
    /// Newest CUDA the NVIDIA driver runs, where there is one.
    pub cuda_driver: Option<String>,
}

/// One provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProviderReport {
    /// Which.
    pub provider: Provider,
    /// As people call it.
    pub name: &'static str,
    /// Where it comes from.
    pub source: ProviderSource,
    /// Its version, where it tells.
    pub version: Option<String>,
    /// What it can use, in its own order: a plan's `gpuN` is number N.
    pub devices: Vec<DeviceReport>,
    /// Why it cannot be used; `None` if it can.
    pub problem: Option<String>,
}

/// Where a provider comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProviderSource {
    /// It is part of the library.
    BuiltIn,
    /// It is a library of its own.
    Plugin(PathBuf),
    /// It was not found.
    Absent,
}

/// One device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceReport {
    /// What a plan calls it.
    pub plan_name: String,
    /// What its maker calls it, as far as anyone tells.
    pub description: String,
    /// Its memory, where the provider or the driver tells.
    pub total: Option<u64>,
    /// What is free of it now.
    pub free: Option<u64>,
}

impl OrtBackend {
    /// Everything this machine offers, and why something it could offer is not usable.
    pub fn devices(&self) -> Report {
        let runtime = &self.runtime;
        let built_in = library::built_in_providers();
        let cuda = cuda::cards();
        let providers = [Provider::Cuda, Provider::Webgpu, Provider::Cpu];
        Report {
            library: runtime.found.path.clone(),
            version: self.version(),
            tried: runtime.found.tried.clone(),
            cores: os::machine_cores(),
            threads: runtime.threads,
            memory: os::machine_memory(),
            providers: providers
                .map(|provider| self.report(provider, cuda.as_ref().map(|(_, cards)| &cards[..])))
                .into(),
            built_in,
            cuda_driver: cuda.map(|(version, _)| version),
        }
    }

    /// Whether a provider has a device here to run on.
    pub fn has_device(&self, provider: Provider) -> bool {
        let plugin = self.runtime.plugins.get(&self.runtime.environment, provider);
        let is_registered = plugin.is_none_or(|plugin| plugin.problem.is_none());
        provider == Provider::Cpu || is_registered && !devices_of(&self.runtime, provider).is_empty()
    }

    /// The library's version: that of the provider it always has.
    fn version(&self) -> String {
        let mut devices = self.runtime.environment.devices();
        let host = devices.find(|device| device.ep().is_ok_and(|ep| ep == long_name(Provider::Cpu)));
        host.and_then(|host| library::version(&host)).unwrap_or_else(|| format!("1.{} or newer", ort::MINOR_VERSION))
    }

    fn report(&self, provider: Provider, cards: Option<&[cuda::Card]>) -> ProviderReport {
        let plugin = self.runtime.plugins.get(&self.runtime.environment, provider);
        let source = match plugin {
            None => ProviderSource::BuiltIn,
            Some(plugin) => plugin.path.clone().map_or(ProviderSource::Absent, ProviderSource::Plugin),
        };
        let devices = match provider {
            Provider::Cpu => vec![self.host()],
            Provider::Cuda => self.accelerators(provider, cards.unwrap_or_default()),
            Provider::Webgpu => self.accelerators(provider, &[]),
        };
        let mut known = self.runtime.environment.devices();
        let own = known.find(|device| device.ep().is_ok_and(|ep| ep == long_name(provider)));
        let version = own.and_then(|device| library::version(&device));
        let problem = plugin.and_then(|plugin| plugin.problem.clone());
        let none = || devices.is_empty().then(|| "it finds no device on this machine".to_owned());
        let problem = problem.or_else(none);
        ProviderReport { provider, name: provider.name(), source, version, devices, problem }
    }

    fn host(&self) -> DeviceReport {
        let (total, free) = os::machine_memory();
        DeviceReport { plan_name: "cpu".into(), description: os::processor_name(), total, free }
    }

    fn accelerators(&self, provider: Provider, cards: &[cuda::Card]) -> Vec<DeviceReport> {
        let devices = devices_of(&self.runtime, provider);
        let report = |(number, device): (usize, &ort::device::Device<'_>)| {
            let card = cards.get(number);
            let hardware = crate::create_session::describe(device);
            DeviceReport {
                plan_name: format!("gpu{number}"),
                description: card.map_or(hardware, |card| card.name.clone()),
                total: card.map(|card| card.total),
                free: card.map(|card| card.free),
            }
        };
        devices.iter().enumerate().map(report).collect()
    }
}

impl ProviderReport {
    /// What ONNX Runtime calls it.
    pub fn long_name(&self) -> &'static str {
        long_name(self.provider)
    }
}
