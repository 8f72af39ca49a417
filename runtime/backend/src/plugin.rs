//! Providers in libraries of their own. Each is found and registered on first use, because opening one can take longer than loading a small
//! model.

use crate::discover;
use hpp_schema::Provider;
use ort::environment::Environment;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Where to search, and the providers found so far.
pub(crate) struct Plugins {
    library: PathBuf,
    webgpu_named: Option<PathBuf>,
    cuda: OnceLock<Plugin>,
    webgpu: OnceLock<Plugin>,
}

/// A provider in a library of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plugin {
    pub path: Option<PathBuf>,
    /// Why it cannot be used; `None` if it can.
    pub problem: Option<String>,
}

impl Plugins {
    /// Searches beside `library`; the WebGPU plugin first at the path that the user named.
    pub fn new(library: &Path, webgpu_named: Option<&Path>) -> Self {
        let (library, webgpu_named) = (library.to_owned(), webgpu_named.map(Path::to_owned));
        Plugins { library, webgpu_named, cuda: OnceLock::new(), webgpu: OnceLock::new() }
    }

    /// A provider's library, registered; `None` for the CPU provider, which needs none.
    pub fn get(&self, environment: &Environment, provider: Provider) -> Option<&Plugin> {
        match provider {
            Provider::Cpu => None,
            Provider::Cuda => Some(self.cuda.get_or_init(|| logged(provider, self.register_cuda(environment)))),
            Provider::Webgpu => Some(self.webgpu.get_or_init(|| logged(provider, self.register_webgpu(environment)))),
        }
    }

    /// The CUDA library finds ONNX Runtime through a small library beside it; if that is missing, opening it crashes.
    fn register_cuda(&self, environment: &Environment) -> Plugin {
        let Some(path) = discover::cuda_library(&self.library) else { return absent("onnxruntime-gpu") };
        match discover::shared_library(&self.library) {
            Some(_) => register(environment, "hpp.cuda", path),
            None => {
                let problem = "libonnxruntime_providers_shared is missing beside it".to_owned();
                Plugin { path: Some(path), problem: Some(problem) }
            }
        }
    }

    fn register_webgpu(&self, environment: &Environment) -> Plugin {
        match discover::webgpu_plugin(self.webgpu_named.as_deref(), &self.library) {
            Some(path) => register(environment, "hpp.webgpu", path),
            None => absent("onnxruntime-ep-webgpu"),
        }
    }
}

fn logged(provider: Provider, plugin: Plugin) -> Plugin {
    tracing::info!(provider = provider.name(), library = ?plugin.path, problem = plugin.problem, "provider's library");
    plugin
}

fn absent(package: &str) -> Plugin {
    let problem =
        format!("its library is not installed beside ONNX Runtime (the Python package {package} contains it)");
    Plugin { path: None, problem: Some(problem) }
}

fn register(environment: &Environment, name: &str, path: PathBuf) -> Plugin {
    let problem = environment.register_ep_library(name, &path).err().map(|error| error.message().trim().to_owned());
    Plugin { path: Some(path), problem }
}
