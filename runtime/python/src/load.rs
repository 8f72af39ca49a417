//! Loads a plan on the thread that will run it.

use crate::failure::Failure;
use crate::warnings::Warnings;
use hpp_backend::{IdleThreads, OrtBackend, OrtOptions, available_memory};
use hpp_engine::{
    CancelHandle, Engine, EngineOptions, Fallback, Reporter, host_memory_warning, is_limited_by_disk, untried,
    with_provider_options, with_providers, without_effect, without_missing_gpus,
};
use hpp_generate::{ModelInputs, PlanFile, SingleSequence};
use hpp_schema::{Plan, Provider, ProviderOptions};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// How to load a plan.
pub struct LoadSettings {
    /// The library to use.
    pub library: Option<PathBuf>,
    /// The folder of this Python's package `onnxruntime`.
    pub package: Option<PathBuf>,
    /// Threads that all partitions share.
    pub threads: Option<usize>,
    /// Providers for partitions, instead of the plan's.
    pub providers: Vec<Provider>,
    /// Libraries of providers.
    pub provider_libraries: BTreeMap<Provider, PathBuf>,
    /// Options of providers, which replace the plan's.
    pub provider_options: BTreeMap<Provider, ProviderOptions>,
    /// The engine's options.
    pub engine: EngineOptions,
}

/// What Python may know of a loaded engine.
#[derive(Clone, Debug)]
pub struct Loaded {
    /// The ONNX Runtime library.
    pub library: PathBuf,
    /// Threads that all partitions share.
    pub threads: usize,
    /// Tokens of a sequence, prompt and answer together.
    pub context: u64,
    /// How long the partitions took to load.
    pub time: Duration,
}

/// Loads a plan and makes an empty sequence on its engine. `cancel` ends the load.
pub fn load(
    plan: &PlanFile,
    settings: LoadSettings,
    cancel: CancelHandle,
    warnings: &Arc<Warnings>,
) -> Result<(SingleSequence<OrtBackend>, Loaded), Failure> {
    let backend = open_backend(plan, &settings, warnings)?;
    let mut named = settings.providers.iter().chain(settings.provider_options.keys());
    if let Some(message) = named.find_map(|provider| backend.unknown_provider(*provider)) {
        return Err(Failure::of(message, "ep_lib={NAME: PATH} names the library of another provider"));
    }
    let (library, threads) = backend.library();
    if settings.threads.is_some_and(|asked| asked != threads) {
        warnings.add(format!(
            "all models of a process share {threads} threads, as the first of them asked for; start another process for another number"
        ));
    }
    let options = EngineOptions { cancel: Some(cancel), ..settings.engine };
    let changed = with_providers(&plan.plan, &settings.providers);
    let here = without_missing_gpus(&changed, |provider, device| backend.finds_device(provider, device));
    if let Some(warning) = host_memory_warning(&here, available_memory()) {
        warnings.add(warning);
    }
    if let Some((message, hint)) = unused(&plan.plan, &settings.providers, &settings.provider_options) {
        if options.fallback == Fallback::Refuse {
            return Err(Failure::of(message, &hint));
        }
        warnings.add(format!("{message}: {hint}"));
    }
    let changed = with_provider_options(changed, &settings.provider_options);
    let reporter: &dyn Reporter = warnings.as_ref();
    let engine = Engine::load(&changed, &plan.dir, &backend, options, reporter)?;
    warnings.loading_done(|provider| backend.has_device(provider));
    if engine.recomputes() {
        warnings.add("this model keeps no state: every token computes the whole text again");
    }
    let loaded =
        Loaded { library: library.to_owned(), threads, context: engine.context(), time: engine.telemetry().load };
    Ok((SingleSequence::new(engine, ModelInputs::default()), loaded))
}

/// A choice of providers, or options of one, that has no effect on a plan, and what to do instead.
fn unused(
    plan: &Plan,
    providers: &[Provider],
    options: &BTreeMap<Provider, ProviderOptions>,
) -> Option<(String, String)> {
    if let Some(why) = without_effect(plan, providers) {
        let hint = "make a plan for a GPU with hpp.split(vram=...), or leave providers out";
        return Some((format!("providers: {why}"), hint.to_owned()));
    }
    let unused = untried(&with_providers(plan, providers), options.keys().copied())?;
    let message = format!("ep_option: no partition of this plan tries the provider {:?}", unused.id());
    Some((message, format!("add providers=[{:?}, \"cpu\"], or leave the option out", unused.id())))
}

fn open_backend(plan: &PlanFile, settings: &LoadSettings, warnings: &Arc<Warnings>) -> Result<OrtBackend, Failure> {
    let is_limited_by_disk = is_limited_by_disk(&plan.plan, settings.engine.weights);
    let options = OrtOptions {
        library: settings.library.clone(),
        package: settings.package.clone(),
        threads: settings.threads,
        provider_libraries: settings.provider_libraries.clone(),
        waiting: if is_limited_by_disk { IdleThreads::Sleep } else { IdleThreads::Spin },
        ..OrtOptions::default()
    };
    Ok(OrtBackend::open(&options, Arc::clone(warnings) as _)?)
}
