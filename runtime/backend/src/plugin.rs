//! The registry of providers: where the library of each is, and whether it is usable. Each is found and registered on first use, because
//! opening one can take longer than loading a small model.

use crate::discover;
use crate::discover::plugins;
use crate::raw::library;
use hpp_schema::{Provider, ProviderFacts, ProviderLibrary};
use ort::environment::Environment;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where to search, and the providers found so far.
pub(crate) struct Plugins {
    library: PathBuf,
    /// Libraries that the user named.
    named: Mutex<BTreeMap<Provider, PathBuf>>,
    found: Mutex<BTreeMap<Provider, Arc<Plugin>>>,
}

/// What the search for a provider has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Plugin {
    /// Its own library; `None` for one that is in ONNX Runtime's, or was not found.
    pub path: Option<PathBuf>,
    /// ONNX Runtime's name for it, if it is known or the library offers a device.
    pub ort_name: Option<String>,
    /// Why it cannot be used; `None` if it can.
    pub problem: Option<String>,
    /// Whether the user named its library.
    pub is_named: bool,
}

impl Plugins {
    /// Searches at the paths that the user named, then in ONNX Runtime's own library and beside it.
    pub fn new(library: &Path, named: BTreeMap<Provider, PathBuf>) -> Self {
        Plugins { library: library.to_owned(), named: Mutex::new(named), found: Mutex::default() }
    }

    /// Adds libraries that the user names later. An error if another library of the provider is registered already, because ONNX Runtime
    /// keeps that one.
    pub fn name(&self, libraries: &BTreeMap<Provider, PathBuf>) -> Result<(), String> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        for (provider, path) in libraries {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            match found.get(provider).map(Arc::as_ref) {
                Some(plugin) if plugin.path.as_ref() == Some(&path) => {}
                Some(Plugin { problem: None, path: Some(other), .. }) => {
                    return Err(format!(
                        "all models of a process share their providers, and {} is {} here, not {}",
                        provider.id(),
                        other.display(),
                        path.display()
                    ));
                }
                _ => drop(found.remove(provider)),
            }
            self.named().insert(*provider, path);
        }
        Ok(())
    }

    fn named(&self) -> MutexGuard<'_, BTreeMap<Provider, PathBuf>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A provider, with its library registered.
    pub fn get(&self, environment: &Environment, provider: Provider) -> Arc<Plugin> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(plugin) = found.get(&provider) {
            return Arc::clone(plugin);
        }
        let plugin = Arc::new(self.find(environment, provider));
        tracing::info!(provider = provider.id(), library = ?plugin.path, ort = plugin.ort_name, problem = plugin.problem, "provider looked for");
        found.insert(provider, Arc::clone(&plugin));
        plugin
    }

    /// Providers that are not in the table: those that the user named, and those in the Python environment of ONNX Runtime.
    pub fn others(&self) -> Vec<Provider> {
        let mut all: Vec<Provider> = self.named().keys().copied().collect();
        all.extend(plugins::installed(&self.library));
        all.retain(|provider| provider.facts().provider.is_none());
        all.sort_unstable();
        all.dedup();
        all
    }

    fn find(&self, environment: &Environment, provider: Provider) -> Plugin {
        let facts = provider.facts();
        let named = self.named().get(&provider).cloned();
        if let Some(path) = named {
            return Plugin { is_named: true, ..register(environment, provider, path) };
        }
        let beside = |name: &str| discover::beside(&self.library, name);
        match facts.library {
            ProviderLibrary::BuiltIn if is_built_in(facts) => built_in(facts),
            ProviderLibrary::BuiltIn => absent(facts, "ONNX Runtime's library was built without it"),
            ProviderLibrary::Beside(name) => match (beside(name), beside("onnxruntime_providers_shared")) {
                (None, _) => absent(facts, NOT_INSTALLED),
                // The provider's library finds ONNX Runtime through the shared one; if that is missing, opening the provider's library
                // crashes.
                (path, None) => {
                    let problem = "libonnxruntime_providers_shared is missing beside it".to_owned();
                    Plugin { path, problem: Some(problem), ..built_in(facts) }
                }
                (Some(path), Some(_)) => register(environment, provider, path),
            },
            ProviderLibrary::Package { folder, library } => match plugins::in_package(&self.library, folder, library) {
                Some(path) => register(environment, provider, path),
                None => absent(facts, NOT_INSTALLED),
            },
            ProviderLibrary::Named => match plugins::of_name(&self.library, provider) {
                Ok(path) => register(environment, provider, path),
                Err(problem) => absent(facts, &problem),
            },
        }
    }
}

const NOT_INSTALLED: &str = "its library is not installed beside ONNX Runtime";

fn is_built_in(facts: &ProviderFacts) -> bool {
    library::built_in_providers().iter().any(|name| Some(name.as_str()) == facts.ort_name)
}

fn built_in(facts: &ProviderFacts) -> Plugin {
    Plugin { path: None, ort_name: facts.ort_name.map(str::to_owned), problem: None, is_named: false }
}

fn absent(facts: &ProviderFacts, problem: &str) -> Plugin {
    let problem = match facts.package {
        Some(package) => format!("{problem} (the Python package {package} contains it)"),
        None => problem.to_owned(),
    };
    Plugin { problem: Some(problem), ..built_in(facts) }
}

/// Registers a library. A provider that is not in the table has the name that the library's devices bear.
fn register(environment: &Environment, provider: Provider, path: PathBuf) -> Plugin {
    // ONNX Runtime takes a relative path as relative to its own library.
    let path = std::path::absolute(&path).unwrap_or(path);
    let known = provider.facts().ort_name.map(str::to_owned);
    let registered = discover::examine_plugin(&path).and_then(|()| {
        let name = format!("hpp.{}", provider.id());
        environment.register_ep_library(name, &path).map_err(|error| explain(error.message()))
    });
    let offered = || library::provider_of_library(environment, &path);
    let ort_name = known.or_else(|| registered.is_ok().then(offered).flatten());
    Plugin { path: Some(path), ort_name, problem: registered.err(), is_named: false }
}

/// The loader's message with what it means.
fn explain(message: &str) -> String {
    let message = message.trim();
    let meaning = match message {
        text if text.contains("CreateEpFactories") && text.contains("symbol") => {
            "it is not a plug-in provider of ONNX Runtime"
        }
        text if text.contains("API version") || text.contains("ORT version") || text.contains("ORT_API_VERSION") => {
            "it was built for another version of ONNX Runtime"
        }
        text if text.contains("Failed to load library") => "the system cannot load it",
        _ => return message.to_owned(),
    };
    format!("{meaning}: {message}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A test has no environment with which libraries are registered, so it puts the result of a search there itself.
    #[test]
    fn a_library_that_is_named_later_replaces_none_that_is_registered() {
        let npu: Provider = "npu".parse().unwrap();
        let named = |path: &str| BTreeMap::from([(npu, PathBuf::from(path))]);
        let plugins = Plugins::new(Path::new("/lib/libonnxruntime.so"), BTreeMap::new());
        let find = |path: Option<&str>, problem: Option<&str>| {
            let plugin =
                Plugin { path: path.map(PathBuf::from), problem: problem.map(str::to_owned), ..built_in(npu.facts()) };
            plugins.found.lock().unwrap().insert(npu, Arc::new(plugin));
        };
        find(None, Some("not installed"));
        plugins.name(&named("/opt/a.so")).unwrap();
        assert!(plugins.found.lock().unwrap().is_empty(), "it is looked for again");
        assert_eq!(plugins.others(), [npu]);
        find(Some("/opt/a.so"), None);
        plugins.name(&named("/opt/a.so")).unwrap();
        let refused = plugins.name(&named("/opt/b.so")).unwrap_err();
        assert!(refused.contains("npu is /opt/a.so here, not /opt/b.so"), "{refused}");
    }

    #[test]
    fn the_meaning_comes_before_the_loaders_message() {
        let symbol = "Failed to get symbol CreateEpFactories with error: x.so: undefined symbol: CreateEpFactories";
        assert_eq!(explain(symbol), format!("it is not a plug-in provider of ONNX Runtime: {symbol}"));
        let version = "The requested API version [99] is not available";
        assert!(explain(version).starts_with("it was built for another version of ONNX Runtime: The requested"));
        assert_eq!(explain("no such GPU"), "no such GPU");
    }
}
