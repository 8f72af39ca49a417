//! Loads engines over ONNX Runtime. The only module that names the backend's type.

use crate::cli::{LibraryArgs, RuntimeArgs};
use crate::console::{Console, Level};
use crate::error::ExecError;
use crate::planning::compiled_models;
use hpp_engine::{
    Engine, EngineOptions, is_limited_by_disk, untried, with_providers, without_effect, without_missing_gpus,
};
use hpp_schema::{Device, Plan, Provider, provider_libraries, provider_options};
use std::path::Path;
use std::sync::Arc;

use hpp_backend::{IdleThreads, OrtOptions};
pub use hpp_backend::{OrtBackend, allowed_memory, available_memory, memory_limit, resident_memory};

/// ONNX Runtime, found and initialised.
pub struct OnnxRuntime {
    backend: OrtBackend,
}

impl OnnxRuntime {
    /// Finds and initialises ONNX Runtime.
    pub fn open(args: &LibraryArgs, console: &Arc<Console>) -> Result<Self, ExecError> {
        Self::open_with(args, &options(args), console)
    }

    fn open_with(args: &LibraryArgs, options: &OrtOptions, console: &Arc<Console>) -> Result<Self, ExecError> {
        if let Some(warning) = too_many_threads(args.threads) {
            console.warn(&warning);
        }
        Ok(Self { backend: OrtBackend::open(options, Arc::clone(console) as _)? })
    }

    /// [`open`](Self::open) with the library settings for a plan: whether idle threads spin or sleep, and the directory of compiled models.
    pub fn open_for(plan: &Plan, args: &RuntimeArgs, console: &Arc<Console>) -> Result<Self, ExecError> {
        let is_limited_by_disk = is_limited_by_disk(plan, args.engine_options().weights);
        let waiting = if is_limited_by_disk { IdleThreads::Sleep } else { IdleThreads::Spin };
        let tries_openvino =
            !plan.is_unsplit() && untried(&with_providers(plan, &args.providers), [Provider::OPENVINO]).is_none();
        let compiled_models = if tries_openvino { compiled_models(&args.planning)? } else { None };
        let options =
            OrtOptions { wait_each_run: args.wait_each_run, waiting, compiled_models, ..options(&args.library) };
        Self::open_with(&args.library, &options, console)?.check_providers(plan, args, console)
    }

    /// Refuses providers that do not exist here. If no partition would try a provider that was named or given options, warns; with --strict, refuses.
    fn check_providers(self, plan: &Plan, args: &RuntimeArgs, console: &Console) -> Result<Self, ExecError> {
        let with_options = args.library.ep_option.iter().map(|option| option.provider);
        let mut named = args.providers.iter().copied().chain(with_options.clone());
        if let Some(message) = named.find_map(|provider| self.backend.unknown_provider(provider)) {
            let hint = "hpp-exec devices lists what is here; --ep-lib NAME=PATH names the library of another provider"
                .to_owned();
            return Err(ExecError::Usage { message, hint });
        }
        let changed = with_providers(plan, &args.providers);
        let libraries = args.library.ep_lib.iter().map(|library| library.provider);
        let unused_option = untried(&changed, with_options)
            .map(|unused| ("--ep-option", unused))
            .or_else(|| untried(&changed, libraries).map(|unused| ("--ep-lib", unused)));
        let unused = if let Some(why) = without_effect(plan, &args.providers) {
            (
                format!("--providers: {why}"),
                "make a plan for a GPU with hpp-split --vram, or leave the option out".to_owned(),
            )
        } else if let Some((option, unused)) = unused_option {
            let message = format!("{option}: no partition of this plan tries the provider {:?}", unused.id());
            (message, format!("add --providers {},cpu, or leave the option out", unused.id()))
        } else {
            return Ok(self);
        };
        let (message, hint) = unused;
        if args.strict {
            return Err(ExecError::Usage { message, hint });
        }
        console.warn(&format!("{message}: {hint}"));
        Ok(self)
    }

    /// The backend that runs partitions.
    pub fn backend(&self) -> &OrtBackend {
        &self.backend
    }

    /// A plan as it runs on this machine: with the arguments' providers and context, and on the host where a GPU is missing.
    pub fn plan_on_this_machine(&self, plan: &Plan, args: &RuntimeArgs) -> Plan {
        let finds = |provider: Provider, device: &Device| self.backend.finds_device(provider, device);
        let here = without_missing_gpus(&with_providers(plan, &args.providers), finds);
        match args.context {
            Some(context) => here.for_context(context),
            None => here,
        }
    }

    /// [`plan_on_this_machine`](Self::plan_on_this_machine) if ONNX Runtime is not open for the plan. Prints nothing and does not touch the cache of compiled models.
    pub fn open_and_plan_on_this_machine(plan: &Plan, args: &RuntimeArgs) -> Result<Plan, ExecError> {
        Ok(Self::open(&args.library, &Console::new(Level::Quiet))?.plan_on_this_machine(plan, args))
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
        let plan = with_providers(plan, &args.providers);
        let engine = Engine::load(&plan, dir, &self.backend, options, console.as_ref())?;
        console.loading_done(|provider| self.backend.has_device(provider));
        Ok(engine)
    }
}

/// A warning if there are more threads than processors: each pass waits for the slowest thread.
fn too_many_threads(threads: Option<u16>) -> Option<String> {
    let processors = std::thread::available_parallelism().ok()?.get();
    let threads = usize::from(threads?);
    (threads > processors).then(|| {
        format!(
            "{threads} threads on {processors} processors are slower than {processors}, and make loading and Ctrl-C slow; leave --threads \
             out for one for each core"
        )
    })
}

/// ONNX Runtime's options for these arguments.
pub fn options(args: &LibraryArgs) -> OrtOptions {
    OrtOptions {
        library: args.ort_lib.clone(),
        threads: args.threads.map(usize::from),
        provider_libraries: provider_libraries(&args.ep_lib),
        provider_options: provider_options(&args.ep_option),
        ..OrtOptions::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_threads_than_processors_are_warned_of() {
        assert_eq!([too_many_threads(None), too_many_threads(Some(1))], [None, None]);
        assert!(too_many_threads(Some(u16::MAX)).unwrap().contains("65535 threads on"));
    }
}
