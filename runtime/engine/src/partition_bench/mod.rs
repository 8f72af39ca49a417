//! Times one partition alone, under exactly one provider, on synthetic inputs, run by run.
//!
//! The session is created like those of a plan, bound in the same memories and run on the same threads, so that the measured times are
//! those of a pass. Between two runs a [`CacheFlusher`] reads other memory: in a pass, the rest of the model evicts a partition's weights
//! from the caches.

mod bind;
mod fill;
mod flush;

pub use flush::CacheFlusher;

use crate::error::{BackendError, EngineError};
use crate::port::{Backend, Fallback, Loaded, SessionSpec, WeightResidency};
use crate::reporter::Reporter;
use bind::Bound;
use hpp_schema::probe::{Case, PartitionProbe};
use hpp_schema::{Device, DeviceKind, HostKernels, Provider};
use std::path::Path;
use std::time::Duration;

/// A partition that is loaded to be timed.
pub struct PartitionBench<B: Backend> {
    backend: B,
    control: B::Control,
    loaded: Loaded<B::Session, B::WeightPager>,
    name: String,
    load: Duration,
}

/// Runs of one case, each timed to the completion of its outputs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunTimes {
    /// The runs that count, in order.
    pub times: Vec<Duration>,
}

impl<B: Backend> PartitionBench<B> {
    /// Loads the partition under the requested provider; an error if the provider cannot run all of it.
    pub fn load(backend: &B, probe: &PartitionProbe, reporter: &dyn Reporter) -> Result<Self, EngineError> {
        backend.trim_memory().map_err(|source| about("what the partition before held", source))?;
        let started = backend.now();
        let name = probe.file.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let control = backend.control().map_err(|source| about("the means to stop runs", source))?;
        let spec = Spec {
            name: &name,
            file: &probe.file,
            host_kernels: &probe.host_kernels,
            weights_dir: &probe.weights_dir,
            weight_bytes: probe.weight_bytes,
        };
        let loaded = spec.load(backend, probe.provider, &control, reporter)?;
        backend.finish_loading();
        let load = backend.now().saturating_sub(started);
        Ok(PartitionBench { backend: backend.clone(), control, loaded, name, load })
    }

    /// The processor it computes on, in the backend's words.
    pub fn processor(&self) -> &str {
        &self.loaded.processor
    }

    /// Time to load it.
    pub fn load_time(&self) -> Duration {
        self.load
    }

    /// Runs a case: `warmup` runs that do not count, then runs that do, as many as the budget allows. With a flusher, other
    /// memory is read before each.
    pub fn case(&mut self, case: &Case, mut flusher: Option<&mut CacheFlusher<B>>) -> Result<RunTimes, EngineError> {
        // Before this case reserves memory: the memory of the previous case would count as its own.
        self.backend.trim_memory().map_err(|source| about("what the case before held", source))?;
        if let Some(flusher) = &mut flusher {
            flusher.make_room(case.evict_bytes)?;
        }
        let mut bound = Bound::new(&self.backend, &self.loaded.session, case)?;
        let mut run = |session: &mut B::Session| {
            if let Some(flusher) = &mut flusher {
                flusher.flush(case.evict_bytes)?;
            }
            let failed = |source| run_failed(&self.name, "running", source);
            bound.run(&self.backend, session, &self.control).map_err(failed)
        };
        for _ in 0..case.warmup {
            run(&mut self.loaded.session)?;
        }
        let mut times = Vec::new();
        let started = self.backend.now();
        let budget = Duration::try_from_secs_f64(case.budget_ms / 1e3).unwrap_or(Duration::MAX);
        let (fewest, most) = (case.min_runs.max(1), case.max_runs.max(case.min_runs).max(1));
        while times.len() < most as usize {
            let spent = self.backend.now().saturating_sub(started) >= budget;
            if spent && times.len() >= fewest as usize {
                break;
            }
            times.push(run(&mut self.loaded.session)?);
        }
        Ok(RunTimes { times })
    }
}

/// The settings of a session without a plan.
struct Spec<'a> {
    name: &'a str,
    file: &'a Path,
    host_kernels: &'a HostKernels,
    weights_dir: &'a Path,
    weight_bytes: u64,
}

impl Spec<'_> {
    fn load<B: Backend>(
        &self,
        backend: &B,
        provider: Provider,
        control: &B::Control,
        reporter: &dyn Reporter,
    ) -> Result<Loaded<B::Session, B::WeightPager>, EngineError> {
        let device = match provider.uses_host_memory() {
            true => Device::new("cpu", DeviceKind::Cpu),
            false => Device::new("gpu0", DeviceKind::Gpu),
        };
        let spec = SessionSpec {
            partition: self.name,
            file: self.file,
            host_kernels: self.host_kernels,
            weight_bytes: self.weight_bytes,
            weights_dir: self.weights_dir,
            device: &device,
            providers: &[provider],
            fallback: Fallback::Refuse,
            residency: WeightResidency::InMemory,
            locks_weights: false,
            experts: None,
            weights_are_inputs: false,
            has_host_file: false,
            prepared: None,
            compress_permille: None,
        };
        let (partition, file) = (self.name.to_owned(), self.file.to_owned());
        backend.load(&spec, control, reporter).map_err(|source| EngineError::Load { partition, file, source })
    }
}

fn about(what: &str, source: BackendError) -> EngineError {
    EngineError::Memory { what: what.to_owned(), source }
}

fn run_failed(partition: &str, doing: &str, source: BackendError) -> EngineError {
    EngineError::Run { partition: partition.to_owned(), doing: doing.to_owned(), source }
}

/// A port by name.
fn find(ports: &[crate::port::Port], name: &str) -> Option<usize> {
    ports.iter().position(|port| port.name == name)
}
