//! The one place that names the backend: from settings to a loaded engine over ONNX Runtime.

use crate::cli::{LibraryArgs, RuntimeArgs};
use crate::console::Console;
use crate::error::ExecError;
use hpp_engine::Engine;
use hpp_schema::{DeviceKind, Plan};
use std::path::Path;
use std::sync::Arc;

use hpp_backend::OrtOptions;
pub use hpp_backend::{OrtBackend, memory_limit, needs_packing};

/// ONNX Runtime, found and started.
pub struct Machine {
    backend: OrtBackend,
}

impl Machine {
    /// Finds and starts ONNX Runtime.
    pub fn open(args: &LibraryArgs, console: &Arc<Console>) -> Result<Self, ExecError> {
        Ok(Self { backend: OrtBackend::open(&options(args), Arc::clone(console) as _)? })
    }

    /// The same, to run a plan.
    pub fn open_to_run(args: &RuntimeArgs, console: &Arc<Console>) -> Result<Self, ExecError> {
        let options = OrtOptions { wait_each_run: args.wait_each_run, ..options(&args.library) };
        Ok(Self { backend: OrtBackend::open(&options, Arc::clone(console) as _)? })
    }

    /// What runs partitions here.
    pub fn backend(&self) -> &OrtBackend {
        &self.backend
    }

    /// What is here.
    pub fn devices(&self) -> hpp_backend::Report {
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
        let plan = with_providers(plan, args);
        Ok(Engine::load(&plan, dir, &self.backend, args.engine_options(), console.as_ref())?)
    }
}

/// How ONNX Runtime is set up.
pub fn options(args: &LibraryArgs) -> OrtOptions {
    OrtOptions { library: args.ort_lib.clone(), threads: args.threads.map(usize::from), ..OrtOptions::default() }
}

/// The plan with the providers that were asked for, where it has a choice: on accelerators.
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
