//! Searches for plug-in providers: in the Python packages beside ONNX Runtime, and as the user names them.

use super::python;
use hpp_schema::{PROVIDER_FACTS, Provider, ProviderArgError, ProviderLibrary, ProviderLibraryArg};
use std::collections::BTreeMap;
use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The variable that names libraries of providers: `NAME=PATH`, several separated as in `PATH`.
pub(crate) const VARIABLE: &str = "HPP_EP_LIBS";
/// The names of Python packages of plug-in providers start with this.
const PACKAGE: &str = "onnxruntime_ep_";

/// Libraries named in the environment, or what is wrong with the variable.
pub(crate) fn named_in_environment() -> Result<BTreeMap<Provider, PathBuf>, String> {
    let mut named = BTreeMap::new();
    if let Some(path) = super::variable("HPP_WEBGPU_PLUGIN") {
        named.insert(Provider::WEBGPU, path);
    }
    let list = env::var_os(VARIABLE).unwrap_or_default();
    for entry in env::split_paths(&list).filter(|entry| !entry.as_os_str().is_empty()) {
        let read = |why: ProviderArgError| format!("{VARIABLE}: {why}");
        let library: ProviderLibraryArg = entry.to_string_lossy().parse().map_err(read)?;
        named.insert(library.provider, library.path);
    }
    Ok(named)
}

/// A library in a package beside ONNX Runtime.
pub(crate) fn in_package(ort: &Path, folder: &str, library: &str) -> Option<PathBuf> {
    python::file_in(&packages(ort)?.join(folder), &file_name(library))
}

/// The only library in the package of a provider that is not in the table.
pub(crate) fn of_name(ort: &Path, provider: Provider) -> Result<PathBuf, String> {
    let folder = format!("{PACKAGE}{}", provider.id().replace('-', "_"));
    let Some(dir) = packages(ort).map(|packages| packages.join(&folder)).filter(|dir| dir.is_dir()) else {
        return Err(format!(
            "it is none of the providers that HPP knows, and there is no Python package {folder} beside ONNX Runtime: name its library \
             with --ep-lib {}=PATH or {VARIABLE}",
            provider.id()
        ));
    };
    let mut libraries = libraries_in(&dir);
    match (libraries.pop(), libraries.is_empty()) {
        (Some(only), true) => Ok(only),
        (None, _) => Err(format!("{} has no library of a provider", dir.display())),
        _ => Err(format!("{} has several libraries: name one with --ep-lib", dir.display())),
    }
}

/// Providers with a package of their own beside ONNX Runtime.
pub(crate) fn installed(ort: &Path) -> Vec<Provider> {
    let folders = packages(ort).and_then(|packages| packages.read_dir().ok());
    let names = folders.into_iter().flatten().flatten().filter_map(|entry| {
        let name = entry.file_name();
        let provider = name.to_str()?.strip_prefix(PACKAGE)?.replace('_', "-").parse::<Provider>().ok()?;
        (!libraries_in(&entry.path()).is_empty()).then_some(provider)
    });
    let is_known = |folder: &Provider| {
        let folder = format!("{PACKAGE}{}", folder.id().replace('-', "_"));
        PROVIDER_FACTS
            .iter()
            .any(|facts| matches!(facts.library, ProviderLibrary::Package { folder: known, .. } if known == folder))
    };
    names.filter(|name| !is_known(name)).collect()
}

/// Libraries of providers in a folder, without files whose name ends with a version.
fn libraries_in(dir: &Path) -> Vec<PathBuf> {
    let files = dir.read_dir().into_iter().flatten().flatten().map(|entry| entry.path());
    let is_library = |path: &PathBuf| {
        let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
        let stem = name.strip_prefix(env::consts::DLL_PREFIX).unwrap_or_default();
        stem.starts_with("onnxruntime_providers_") && name.ends_with(env::consts::DLL_SUFFIX)
    };
    let mut found: Vec<PathBuf> = files.filter(is_library).collect();
    found.sort_unstable();
    found
}

/// The folder of Python packages in which ONNX Runtime's own lies.
fn packages(ort: &Path) -> Option<&Path> {
    ort.parent()?.parent()?.parent()
}

/// A library's file name on this system.
pub(crate) fn file_name(library: &str) -> String {
    format!("{}{library}{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn packages_of_plug_ins_are_found_beside_onnxruntime() {
        let site = tempfile::tempdir().unwrap();
        let ort = site.path().join("onnxruntime").join("capi").join("libonnxruntime.so");
        let add = |folder: &str, library: &str| {
            let dir = site.path().join(folder);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join(file_name(library)), b"").unwrap();
        };
        add("onnxruntime_ep_big_npu", "onnxruntime_providers_big");
        add("onnxruntime_ep_openvino", "onnxruntime_providers_openvino_plugin");
        add("onnxruntime_ep_two", "onnxruntime_providers_a");
        add("onnxruntime_ep_two", "onnxruntime_providers_b");
        fs::create_dir_all(site.path().join("onnxruntime_ep_empty")).unwrap();
        let npu: Provider = "big-npu".parse().unwrap();
        let mut names = installed(&ort);
        names.sort_unstable();
        assert_eq!(names, [npu, "two".parse().unwrap()], "those of the table have rows of their own");
        assert!(of_name(&ort, npu).unwrap().ends_with(file_name("onnxruntime_providers_big")));
        assert!(of_name(&ort, "two".parse().unwrap()).unwrap_err().contains("several"));
        assert!(of_name(&ort, "absent".parse().unwrap()).unwrap_err().contains("--ep-lib absent=PATH"));
        assert!(in_package(&ort, "onnxruntime_ep_openvino", "onnxruntime_providers_openvino_plugin").is_some());
    }
}
