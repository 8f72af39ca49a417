//! Loads engines over ONNX Runtime. The only module that names the backend's type.

use crate::cli::{LibraryArgs, RuntimeArgs};
use crate::console::Console;
use crate::error::ExecError;
use hpp_engine::{Engine, EngineOptions, is_limited_by_disk, with_providers};
use hpp_schema::Plan;
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
        let is_limited_by_disk = is_limited_by_disk(plan, args.engine_options().weights);
        let waiting = if is_limited_by_disk { IdleThreads::Sleep } else { IdleThreads::Spin };
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
        let plan = with_providers(plan, &args.providers());
        let engine = Engine::load(&plan, dir, &self.backend, options, console.as_ref())?;
        console.loading_done(|provider| self.backend.has_device(provider));
        Ok(engine)
    }
}

/// ONNX Runtime's options for these arguments.
pub fn options(args: &LibraryArgs) -> OrtOptions {
    OrtOptions { library: args.ort_lib.clone(), threads: args.threads.map(usize::from), ..OrtOptions::default() }
}
