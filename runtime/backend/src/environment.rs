//! The ONNX Runtime of this process: library, environment, thread pool, log and devices. Initialised once.

use crate::cuda::streams::Streams;
use crate::discover::plugins;
use crate::discover::{self, FoundLibrary, LibraryNotFound, LibrarySearch};
use crate::log::Log;
use crate::plugin::Plugins;
use crate::raw::failed;
use crate::raw::lock::DeviceLock;
use hpp_engine::{BackendError, Reporter};
use hpp_schema::{Provider, ProviderOptions};
use ort::environment::{Environment, GlobalThreadPoolOptions};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

/// How to initialise ONNX Runtime. The options of the first backend of a process apply to all; later ones may add libraries of providers.
#[derive(Clone, Debug, Default)]
pub struct OrtOptions {
    /// The library to load; `None` searches for it ([`LibrarySearch`]).
    pub library: Option<PathBuf>,
    /// The folder of the package `onnxruntime` of the Python that runs this code, which is searched before other environments.
    pub package: Option<PathBuf>,
    /// Threads shared by all partitions; `None` for one per core.
    pub threads: Option<usize>,
    /// How idle threads wait for work.
    pub waiting: IdleThreads,
    /// Libraries of providers, which come before those of the environment variables and those that are installed.
    pub provider_libraries: BTreeMap<Provider, PathBuf>,
    /// Where OpenVINO keeps compiled models; `None` for nowhere. Nothing here bounds the directory.
    pub compiled_models: Option<PathBuf>,
    /// Options of providers, which replace those of plans.
    pub provider_options: BTreeMap<Provider, ProviderOptions>,
    /// Waits for a CUDA device after each run and copies weights on a thread, instead of ordering runs and copies by events.
    pub wait_each_run: bool,
}

/// How idle threads of the pool wait for work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IdleThreads {
    /// They spin for a moment, then sleep: fastest while partitions run one after the other.
    #[default]
    Spin,
    /// They sleep at once, which leaves the cores to other programs.
    Sleep,
}

/// ONNX Runtime could not be initialised.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No usable library was found.
    #[error(transparent)]
    NotFound(#[from] LibraryNotFound),
    /// An environment variable is not understood.
    #[error("{cause}")]
    Setting {
        /// Which, and why.
        cause: String,
    },
    /// A provider has another library in this process already.
    #[error("{cause}")]
    SharedProvider {
        /// Which.
        cause: String,
    },
    /// ONNX Runtime is another library in this process already.
    #[error(
        "all models of a process share ONNX Runtime, which is {} here, not {}",
        .used.display(), .asked.display()
    )]
    SharedLibrary {
        /// The library of this process.
        used: PathBuf,
        /// The library that was named.
        asked: PathBuf,
    },
    /// The library was found, but its initialisation failed.
    #[error("ONNX Runtime from {} cannot be used", .library.display())]
    Failed {
        /// The library.
        library: PathBuf,
        /// Why.
        source: BackendError,
    },
}

impl OpenError {
    /// The next step for a person.
    pub fn hint(&self) -> &'static str {
        match self {
            OpenError::NotFound(error) => error.hint(),
            OpenError::Setting { .. } => "set it to NAME=PATH, several separated as in PATH, or unset it",
            OpenError::SharedProvider { .. } | OpenError::SharedLibrary { .. } => {
                "start another process for the other library"
            }
            OpenError::Failed { .. } => "name another library with --ort-lib or ORT_DYLIB_PATH",
        }
    }
}

/// The state that all backends of this process share.
pub(crate) struct SharedRuntime {
    pub environment: Environment,
    pub found: FoundLibrary,
    pub threads: usize,
    pub plugins: Plugins,
    /// See [`OrtOptions`].
    pub provider_options: BTreeMap<Provider, ProviderOptions>,
    /// See [`OrtOptions`].
    pub compiled_models: Option<PathBuf>,
    /// See [`device_lock`](Self::device_lock).
    device_locks: Mutex<BTreeMap<Provider, DeviceLock>>,
    wait_each_run: bool,
    /// Streams of CUDA devices by number, or why there are none.
    streams: Mutex<BTreeMap<usize, Result<Arc<Streams>, String>>>,
    /// Why a device does not compute in 16-bit floating point, `None` if it does; only devices that were tested have an entry.
    pub f16: Mutex<BTreeMap<(Provider, usize), Option<String>>>,
    /// Set once a compressed copy of weights could not be written.
    pub is_copying_refused: AtomicBool,
    pub log: Arc<Log>,
}

impl SharedRuntime {
    /// The lock for a provider's devices: exclusive for WebGPU, which records the commands of all threads in one list, and for providers
    /// of which nothing is known.
    pub fn device_lock(&self, provider: Provider) -> DeviceLock {
        if !provider.facts().exclusive {
            return DeviceLock::default();
        }
        let mut locks = self.device_locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.entry(provider).or_insert_with(DeviceLock::exclusive).clone()
    }

    /// The streams of a device, if the provider's runs are asynchronous. Created on first use.
    pub fn streams(&self, provider: Provider, number: usize) -> Option<Arc<Streams>> {
        if !provider.facts().user_streams || self.wait_each_run {
            return None;
        }
        let mut all = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let made = all.entry(number).or_insert_with(|| {
            let made = Streams::new(number).map(Arc::new).map_err(|error| error.to_string());
            if let Err(cause) = &made {
                self.log.warn(&format!(
                    "gpu{number}: each partition waits for the device, because it has no streams: {cause}"
                ));
            }
            made
        });
        made.as_ref().ok().cloned()
    }
}

static RUNTIME: Mutex<Option<Arc<SharedRuntime>>> = Mutex::new(None);

/// The runtime of this process, initialised on the first call.
pub(crate) fn open(options: &OrtOptions, reporter: Arc<dyn Reporter>) -> Result<Arc<SharedRuntime>, OpenError> {
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = runtime.as_ref() {
        check_shared(&runtime.found.path, options.library.as_deref())?;
        runtime.log.send_to(reporter);
        runtime.plugins.name(&options.provider_libraries).map_err(|cause| OpenError::SharedProvider { cause })?;
        return Ok(runtime.clone());
    }
    let made = Arc::new(make(options, reporter)?);
    *runtime = Some(made.clone());
    Ok(made)
}

/// Refuses a named library if the process runs another one.
fn check_shared(used: &Path, asked: Option<&Path>) -> Result<(), OpenError> {
    let is_same = |asked: &Path| asked.canonicalize().ok() == used.canonicalize().ok();
    match asked {
        Some(asked) if !is_same(asked) => {
            Err(OpenError::SharedLibrary { used: used.to_owned(), asked: asked.to_owned() })
        }
        _ => Ok(()),
    }
}

fn make(options: &OrtOptions, reporter: Arc<dyn Reporter>) -> Result<SharedRuntime, OpenError> {
    let mut builder = None;
    let search = LibrarySearch::from_environment(options.library.as_deref());
    let search = LibrarySearch { package: options.package.clone(), ..search };
    let found = search.find(|path| match ort::init_from(path) {
        Ok(loaded) => {
            builder = Some(loaded);
            Ok(())
        }
        Err(error) => Err(explain(&error)),
    })?;
    let failed_here = |source| OpenError::Failed { library: found.path.clone(), source };
    let builder = builder.ok_or_else(|| LibraryNotFound { tried: found.tried.clone() })?;
    let log = Arc::new(Log::new(reporter));
    let threads = options.threads.filter(|threads| *threads > 0).unwrap_or_else(crate::os::cores);
    let environment = environment(builder, threads, options.waiting, &log).map_err(failed_here)?;
    let in_environment = plugins::named_in_environment().map_err(|cause| OpenError::Setting { cause })?;
    let named = in_environment.into_iter().chain(options.provider_libraries.clone()).collect();
    let plugins = Plugins::new(&found.path, named);
    tracing::info!(
        library = %found.path.display(),
        build = ort::info(),
        threads,
        waiting = ?options.waiting,
        "ONNX Runtime loaded"
    );
    Ok(SharedRuntime {
        environment,
        found,
        threads,
        plugins,
        provider_options: options.provider_options.clone(),
        compiled_models: options.compiled_models.clone(),
        device_locks: Mutex::default(),
        wait_each_run: options.wait_each_run,
        streams: Mutex::default(),
        f16: Mutex::default(),
        is_copying_refused: AtomicBool::new(false),
        log,
    })
}

/// The loader's error in a short sentence.
fn explain(error: &ort::LoadDynamicError) -> String {
    match error {
        ort::LoadDynamicError::BadVersion { version_str, .. } => {
            format!(
                "it is version {version_str}, and {}.{} is the oldest that works",
                discover::OLDEST.0,
                discover::OLDEST.1
            )
        }
        ort::LoadDynamicError::MissingApi { .. } => "it is not ONNX Runtime".into(),
        ort::LoadDynamicError::InvalidVersionString => "its version cannot be read".into(),
        ort::LoadDynamicError::Dlopen { error, .. } => {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            cause.unwrap_or_else(|| error.to_string())
        }
    }
}

fn environment(
    builder: ort::environment::EnvironmentBuilder,
    threads: usize,
    waiting: IdleThreads,
    log: &Arc<Log>,
) -> Result<Environment, BackendError> {
    crate::os::map_large_blocks();
    // One pool for all sessions: with a pool per session, idle pools spin against the busy one, and decoding takes twice as long.
    let pool = GlobalThreadPoolOptions::default()
        .with_intra_threads(threads)
        .and_then(|pool| pool.with_inter_threads(1))
        .and_then(|pool| pool.with_spin_control(waiting == IdleThreads::Spin))
        .map_err(failed("create the thread pool"))?;
    let log = log.clone();
    let environment = builder
        .with_name("hpp")
        .with_telemetry(false)
        .with_global_thread_pool(pool)
        .with_logger(Arc::new(move |level, _: &str, _: &str, _: &str, message: &str| log.receive(level, message)))
        .build()
        .map_err(failed("initialise ONNX Runtime"))?;
    environment.set_log_level(crate::log::wanted_level());
    crate::raw::arena::share(&environment)?;
    Ok(environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_errors_name_the_version_or_the_cause() {
        let error = ort::LoadDynamicError::BadVersion { version_str: "1.22.0".into(), path: "x.so".into() };
        assert_eq!(
            explain(&error),
            format!("it is version 1.22.0, and 1.{} is the oldest that works", ort::MINOR_VERSION)
        );
        let error = ort::LoadDynamicError::MissingApi { path: "x.so".into() };
        assert_eq!(explain(&error), "it is not ONNX Runtime");
    }
    #[test]
    fn another_library_than_that_of_the_process_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let (used, other) = (dir.path().join("used.so"), dir.path().join("other.so"));
        std::fs::write(&used, "").unwrap();
        std::fs::write(&other, "").unwrap();
        assert!(check_shared(&used, None).is_ok());
        assert!(check_shared(&used, Some(&dir.path().join(".").join("used.so"))).is_ok());
        let error = check_shared(&used, Some(&other)).unwrap_err();
        assert!(error.to_string().contains("other.so") && error.hint().contains("another process"), "{error}");
    }
}
