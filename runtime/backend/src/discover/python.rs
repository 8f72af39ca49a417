//! Finds libraries inside Python packages: of a given environment, and of the `python3` in PATH.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The timeout of a `python3` call.
const TIMEOUT: Duration = Duration::from_secs(10);

/// ONNX Runtime in an environment's site-packages.
pub(super) fn library_in_environment(environment: &Path) -> Option<PathBuf> {
    site_packages(environment).iter().find_map(|folder| library_in_package(&folder.join("onnxruntime")))
}

/// The package directories of an environment: `lib/python3.N/site-packages`, or `Lib/site-packages` on Windows.
fn site_packages(environment: &Path) -> Vec<PathBuf> {
    let mut folders = vec![environment.join("Lib").join("site-packages")];
    for lib in ["lib", "lib64"] {
        let entries = std::fs::read_dir(environment.join(lib)).into_iter().flatten().flatten();
        let mut pythons: Vec<_> = entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("python3"))
            .map(|entry| entry.path().join("site-packages"))
            .collect();
        pythons.sort();
        folders.extend(pythons);
    }
    folders
}

/// [`library_in_package`], or why there is none.
pub(super) fn library_in_package_folder(folder: &Path) -> Result<PathBuf, String> {
    library_in_package(folder).ok_or_else(|| format!("its package in {} holds no library", folder.display()))
}

fn library_in_package(package: &Path) -> Option<PathBuf> {
    let (prefix, suffix) = (std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    file_in(&package.join("capi"), &format!("{prefix}onnxruntime{suffix}"))
}

/// The file of that name, else the last of that name with a version suffix.
pub(super) fn file_in(folder: &Path, name: &str) -> Option<PathBuf> {
    let exact = folder.join(name);
    if exact.is_file() {
        return Some(exact);
    }
    // The version follows `.so` and precedes `.dylib`: libonnxruntime.so.1.31.1, libonnxruntime.1.31.1.dylib.
    let (stem, suffix) = name.split_once('.')?;
    let mut versions: Vec<_> = std::fs::read_dir(folder)
        .ok()?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let inner = file.strip_prefix(stem).and_then(|rest| rest.strip_prefix('.'));
            inner.is_some_and(|rest| rest.starts_with(&format!("{suffix}.")) || rest.ends_with(&format!(".{suffix}")))
        })
        .collect();
    versions.sort();
    versions.pop()
}

/// ONNX Runtime in the package that `python3` would import; Python locates the package without importing it.
pub(super) fn package_folder_library() -> Result<PathBuf, String> {
    const ASK: &str = "import importlib.util as u; s = u.find_spec('onnxruntime'); \
                       print(s.submodule_search_locations[0] if s and s.submodule_search_locations else '')";
    let program = if cfg!(windows) { "python" } else { "python3" };
    let answer = ask(program, &["-c", ASK])?;
    let folder = answer.trim();
    if folder.is_empty() {
        return Err("it has no package onnxruntime".into());
    }
    library_in_package_folder(Path::new(folder))
}

/// The standard output of a program; an error if it fails or exceeds [`TIMEOUT`].
fn ask(program: &str, arguments: &[&str]) -> Result<String, String> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("{program} cannot be run: {error}"))?;
    let started = Instant::now();
    while started.elapsed() < TIMEOUT {
        match child.try_wait() {
            Ok(Some(status)) if status.success() => {
                let output = child.wait_with_output().map_err(|error| format!("{program} cannot be read: {error}"))?;
                return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
            }
            Ok(Some(status)) => return Err(format!("{program} failed: {status}")),
            Ok(None) => std::thread::sleep(Duration::from_millis(5)),
            Err(error) => return Err(format!("{program} cannot be waited for: {error}")),
        }
    }
    let _ = child.kill();
    let _ = child.wait();
    Err(format!("{program} did not answer"))
}
