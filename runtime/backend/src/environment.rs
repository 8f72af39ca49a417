//! The one ONNX Runtime of this process: library, environment, thread pool, log and devices.

use crate::cuda::streams::Streams;
use crate::discover::{self, Found, NotFound, Search};
use crate::log::Log;
use crate::plugin::Plugins;
use crate::raw::device::Turn;
use crate::raw::failed;
use hpp_engine::{BackendError, Reporter};
use hpp_schema::Provider;
use ort::environment::{Environment, GlobalThreadPoolOptions};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// How to set ONNX Runtime up. The first one in a process decides.
#[derive(Clone, Debug, Default)]
pub struct OrtOptions {
    /// The library to load; otherwise it is looked for.
    pub library: Option<PathBuf>,
    /// Threads for all partitions together; otherwise one for each core.
    pub threads: Option<usize>,
    /// Whether idle threads wait for work by spinning.
    pub waiting: Waiting,
    /// The WebGPU plugin; otherwise it is looked for.
    pub webgpu_plugin: Option<PathBuf>,
    /// Waits for a CUDA device after each run, and lets a thread copy weights, instead of ordering both by events on the device.
    pub wait_each_run: bool,
}

/// How idle threads of the pool wait for work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Waiting {
    /// They spin for a moment, then sleep: fastest while one partition follows another.
    #[default]
    Spin,
    /// They sleep at once: kinder to other programs.
    Sleep,
}

/// ONNX Runtime could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// It was not found.
    #[error(transparent)]
    NotFound(#[from] NotFound),
    /// It was found, but something in it failed.
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
            OpenError::Failed { .. } => "name another library with --ort-lib or ORT_DYLIB_PATH",
        }
    }
}

/// What every backend of this process shares.
pub(crate) struct Runtime {
    pub environment: Environment,
    pub found: Found,
    pub threads: usize,
    pub plugins: Plugins,
    /// For devices of providers that want one user at a time.
    one_at_a_time: Turn,
    wait_each_run: bool,
    /// Streams of CUDA devices by number, or why there are none.
    streams: Mutex<BTreeMap<usize, Result<Arc<Streams>, String>>>,
    /// Whether each device computes in 16-bit floating point, as far as it was asked.
    pub f16: Mutex<BTreeMap<(Provider, usize), Option<String>>>,
    pub log: Arc<Log>,
}

impl Runtime {
    /// How users of a provider's devices take turns: WebGPU's record what they do in one list.
    pub fn turn(&self, provider: Provider) -> Turn {
        if provider == Provider::Webgpu { self.one_at_a_time.clone() } else { Turn::default() }
    }
}

impl Runtime {
    /// The streams of a provider's device of this number, where it computes while the host goes on.
    pub fn streams(&self, provider: Provider, number: usize) -> Option<Arc<Streams>> {
        if provider != Provider::Cuda || self.wait_each_run {
            return None;
        }
        let mut all = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let made = all.entry(number).or_insert_with(|| {
            let made = Streams::new(number).map(Arc::new).map_err(|error| error.to_string());
            if let Err(cause) = &made {
                self.log.say(&format!("gpu{number} is waited for after each partition: {cause}"));
            }
            made
        });
        made.as_ref().ok().cloned()
    }
}

static RUNTIME: Mutex<Option<Arc<Runtime>>> = Mutex::new(None);

/// The runtime of this process, set up on the first call.
pub(crate) fn open(options: &OrtOptions, reporter: Arc<dyn Reporter>) -> Result<Arc<Runtime>, OpenError> {
    let mut runtime = RUNTIME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(runtime) = runtime.as_ref() {
        runtime.log.send_to(reporter);
        return Ok(runtime.clone());
    }
    let made = Arc::new(make(options, reporter)?);
    *runtime = Some(made.clone());
    Ok(made)
}

fn make(options: &OrtOptions, reporter: Arc<dyn Reporter>) -> Result<Runtime, OpenError> {
    let mut builder = None;
    let found = Search::from_environment(options.library.as_deref()).find(|path| match ort::init_from(path) {
        Ok(loaded) => {
            builder = Some(loaded);
            Ok(())
        }
        Err(error) => Err(explain(&error)),
    })?;
    let failed_here = |source| OpenError::Failed { library: found.path.clone(), source };
    let builder = builder.ok_or_else(|| NotFound { tried: found.tried.clone() })?;
    let log = Arc::new(Log::new(reporter));
    let threads = options.threads.filter(|threads| *threads > 0).unwrap_or_else(crate::os::cores);
    let environment = environment(builder, threads, options.waiting, &log).map_err(failed_here)?;
    let plugins = Plugins::new(&found.path, options.webgpu_plugin.as_deref());
    tracing::info!(
        library = %found.path.display(),
        build = ort::info(),
        threads,
        waiting = ?options.waiting,
        "ONNX Runtime loaded"
    );
    Ok(Runtime {
        environment,
        found,
        threads,
        plugins,
        one_at_a_time: Turn::needed(),
        wait_each_run: options.wait_each_run,
        streams: Mutex::default(),
        f16: Mutex::default(),
        log,
    })
}

/// The loader's words, shortened to what a person needs.
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
    waiting: Waiting,
    log: &Arc<Log>,
) -> Result<Environment, BackendError> {
    // One pool for all sessions: with a pool each, the idle ones spin against the busy one, and decoding takes twice as long.
    let pool = GlobalThreadPoolOptions::default()
        .with_intra_threads(threads)
        .and_then(|pool| pool.with_inter_threads(1))
        .and_then(|pool| pool.with_spin_control(waiting == Waiting::Spin))
        .map_err(failed("set the thread pool up"))?;
    let log = log.clone();
    let environment = builder
        .with_name("hpp")
        .with_telemetry(false)
        .with_global_thread_pool(pool)
        .with_logger(Arc::new(move |level, _: &str, _: &str, _: &str, message: &str| log.receive(level, message)))
        .build()
        .map_err(failed("set ONNX Runtime up"))?;
    environment.set_log_level(crate::log::wanted_level());
    crate::raw::arena::share(&environment)?;
    Ok(environment)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_library_is_called_old() {
        let error = ort::LoadDynamicError::BadVersion { version_str: "1.22.0".into(), path: "x.so".into() };
        assert_eq!(
            explain(&error),
            format!("it is version 1.22.0, and 1.{} is the oldest that works", ort::MINOR_VERSION)
        );
        let error = ort::LoadDynamicError::MissingApi { path: "x.so".into() };
        assert_eq!(explain(&error), "it is not ONNX Runtime");
    }
}
