//! Loads engines over ONNX Runtime. The only module that names the backend's type.

use crate::cli::{LibraryArgs, RuntimeArgs, WeightReadsArg};
use crate::console::Console;
use crate::error::ExecError;
use hpp_engine::{Engine, EngineOptions};
use hpp_schema::{DeviceKind, Partition, PartitionBytes, Plan, Residency};
use std::path::Path;
use std::sync::Arc;

use hpp_backend::{IdleThreads, OrtOptions};
pub use hpp_backend::{OrtBackend, available_memory, memory_limit};

/// ONNX Runtime, found and initialised.
pub struct OnnxRuntime {
    backend: OrtBackend,
}

impl OnnxRuntime {
    /// Finds and initialises ONNX Runtime.
    pub fn open(args: &LibraryArgs, console: &Arc<Console>) -> Result<Self, ExecError> {
        Ok(Self { backend: OrtBackend::open(&options(args), Arc::clone(console) as _)? })
    }

    /// [`open`](Self::open) with the settings that suit a plan.
    pub fn open_for(plan: &Plan, args: &RuntimeArgs, console: &Arc<Console>) -> Result<Self, ExecError> {
        let waiting = thread_waiting(plan, args.weights);
        let options = OrtOptions { wait_each_run: args.wait_each_run, waiting, ..options(&args.library) };
        Ok(Self { backend: OrtBackend::open(&options, Arc::clone(console) as _)? })
    }

    /// The backend that runs partitions.
    pub fn backend(&self) -> &OrtBackend {
        &self.backend
    }

    /// The library, its providers and devices.
    pub fn devices(&self) -> hpp_backend::SystemReport {
        self.backend.devices()
    }

    /// Loads a plan.
    pub fn load(
        &self,
        plan: &Plan,
        dir: &Path,
        args: &RuntimeArgs,
        console: &Arc<Console>,
    ) -> Result<Engine<OrtBackend>, ExecError> {
        self.load_with(args.engine_options(), plan, dir, args, console)
    }

    /// Loads a plan with these options instead of the arguments'.
    pub fn load_with(
        &self,
        options: EngineOptions,
        plan: &Plan,
        dir: &Path,
        args: &RuntimeArgs,
        console: &Arc<Console>,
    ) -> Result<Engine<OrtBackend>, ExecError> {
        let plan = with_providers(plan, args);
        let engine = Engine::load(&plan, dir, &self.backend, options, console.as_ref())?;
        console.loading_done(|provider| self.backend.has_device(provider));
        Ok(engine)
    }
}

/// ONNX Runtime's options for these arguments.
pub fn options(args: &LibraryArgs) -> OrtOptions {
    OrtOptions { library: args.ort_lib.clone(), threads: args.threads.map(usize::from), ..OrtOptions::default() }
}

/// How idle threads of the pool wait while a plan runs.
fn thread_waiting(plan: &Plan, reads: WeightReadsArg) -> IdleThreads {
    let on_host = |name: &str| plan.devices.iter().any(|device| device.name == name && device.kind == DeviceKind::Cpu);
    let computes = |partition: &&Partition| on_host(&partition.device) && partition.residency != Residency::Mapped;
    match reads {
        WeightReadsArg::Ahead | WeightReadsArg::OnTime => {
            waiting_for_bytes(plan.partitions.iter().filter(computes).map(|partition| &partition.bytes))
        }
        WeightReadsArg::Mapped => IdleThreads::Spin,
    }
}

/// Threads sleep if reading from disk limits the speed, because the threads that read and decompress weights need a processor at once,
/// and the disk idles while a spinning thread holds it. Reading limits the speed if a pass reads more than a tenth of the weights:
/// memory delivers them more than ten times as fast as a disk.
fn waiting_for_bytes<'a>(partitions: impl Iterator<Item = &'a PartitionBytes>) -> IdleThreads {
    let (mut total, mut read) = (0_u64, 0_u64);
    for PartitionBytes { weights, locked, .. } in partitions {
        total = total.saturating_add(weights.0);
        read = read.saturating_add(locked.map_or(0, |locked| weights.0.saturating_sub(locked.0)));
    }
    if read > total / 10 { IdleThreads::Sleep } else { IdleThreads::Spin }
}

/// The plan with the providers of `--providers` for its partitions on GPUs.
fn with_providers(plan: &Plan, args: &RuntimeArgs) -> Plan {
    let mut plan = plan.clone();
    let providers = args.providers();
    if !providers.is_empty() {
        let is_gpu = |name: &str| plan.devices.iter().any(|d| d.name == name && d.kind == DeviceKind::Gpu);
        let on_gpu: Vec<bool> = plan.partitions.iter().map(|p| is_gpu(&p.device)).collect();
        for (partition, _) in plan.partitions.iter_mut().zip(on_gpu).filter(|(_, on_gpu)| *on_gpu) {
            partition.providers.clone_from(&providers);
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::ByteSize;

    #[test]
    fn idle_threads_sleep_if_more_than_a_tenth_of_the_weights_is_read_from_disk() {
        let bytes = |weights, locked: Option<u64>| {
            let locked = locked.map(ByteSize);
            PartitionBytes { weights: ByteSize(weights), locked, ..PartitionBytes::default() }
        };
        let waiting = |partitions: &[PartitionBytes]| waiting_for_bytes(partitions.iter());
        assert_eq!(waiting(&[bytes(100, None), bytes(50, None)]), IdleThreads::Spin);
        assert_eq!(waiting(&[bytes(100, Some(90)), bytes(50, Some(45))]), IdleThreads::Spin);
        assert_eq!(waiting(&[bytes(100, Some(90)), bytes(50, Some(44))]), IdleThreads::Sleep);
        assert_eq!(waiting(&[bytes(900, None), bytes(110, Some(0))]), IdleThreads::Sleep);
        assert_eq!(waiting(&[]), IdleThreads::Spin);
    }
}
