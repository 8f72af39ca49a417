//! Reports the library, providers and devices of this machine, for `hpp-exec devices`.

use crate::backend::OrtBackend;
use crate::create_session::{devices_of, long_name};
use crate::cuda;
use crate::discover::TriedLibrary;
use crate::os;
use crate::raw::library;
use hpp_schema::Provider;
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
    /// Providers in a plan's order of preference.
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
    /// Its common name.
    pub name: &'static str,
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
        let providers = [Provider::Cuda, Provider::Webgpu, Provider::Cpu];
        SystemReport {
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

    /// Whether a provider has a usable device on this machine.
    pub fn has_device(&self, provider: Provider) -> bool {
        let plugin = self.runtime.plugins.get(&self.runtime.environment, provider);
        let is_registered = plugin.is_none_or(|plugin| plugin.problem.is_none());
        provider == Provider::Cpu || is_registered && !devices_of(&self.runtime, provider).is_empty()
    }

    /// The ONNX Runtime library, and the threads that all partitions share.
    pub fn library(&self) -> (&Path, usize) {
        (&self.runtime.found.path, self.runtime.threads)
    }

    /// What decides the bits of a plan's results beside the plan: the library, the threads that share the work, the processor.
    pub fn results_depend_on(&self) -> String {
        let (library, threads) = (ort::info(), self.runtime.threads);
        format!("{library}, {threads} threads, {}, {}", os::processor_name(), os::processor_features())
    }

    /// The library's version: that of the CPU provider, which it always contains.
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
    /// ONNX Runtime's name for it.
    pub fn long_name(&self) -> &'static str {
        long_name(self.provider)
    }
}
