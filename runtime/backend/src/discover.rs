//! Finding ONNX Runtime: every place in a fixed order, and for each why it will not do. Loads nothing that is not chosen.

mod elf;
mod python;

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};

/// The oldest ONNX Runtime this build works with.
pub const OLDEST: (u32, u32) = (1, ort::MINOR_VERSION);

/// Where a library was looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `--ort-lib`.
    Argument,
    /// `ORT_DYLIB_PATH`.
    Variable,
    /// The active virtual environment.
    VirtualEnv,
    /// The package `python3` would import.
    Python,
    /// `.deps` of the project, from the program's folder or the current one upwards.
    Project,
    /// Wherever the system's loader looks.
    System,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Origin::Argument => "--ort-lib",
            Origin::Variable => "ORT_DYLIB_PATH",
            Origin::VirtualEnv => "the active virtual environment",
            Origin::Python => "python3",
            Origin::Project => "the project's .deps folder",
            Origin::System => "the system's library path",
        })
    }
}

/// One place that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// Which of the places.
    pub origin: Origin,
    /// The file, where there was a name for one.
    pub path: Option<PathBuf>,
    /// Why it will not do; `None` for the one that was taken.
    pub problem: Option<String>,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.origin)?;
        if let Some(path) = &self.path {
            write!(f, ": {}", path.display())?;
        }
        write!(f, ": {}", self.problem.as_deref().unwrap_or("taken"))
    }
}

/// Nothing usable was found.
#[derive(Debug, thiserror::Error)]
#[error("ONNX Runtime {}.{} or newer was not found:\n  {}", OLDEST.0, OLDEST.1, .tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  "))]
pub struct NotFound {
    /// Everything that was tried, in order.
    pub tried: Vec<Tried>,
}

impl NotFound {
    /// The next step for a person.
    pub fn hint(&self) -> &'static str {
        "run `pip install onnxruntime`, or name the library with --ort-lib or ORT_DYLIB_PATH"
    }
}

/// The library to load, and what was looked at on the way.
#[derive(Clone, Debug)]
pub struct Found {
    /// The file, or a bare name for the system's loader.
    pub path: PathBuf,
    /// Every place looked at, the taken one last.
    pub tried: Vec<Tried>,
}

/// What a person or a shell has said about where to look.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// `--ort-lib`.
    pub argument: Option<PathBuf>,
    /// `ORT_DYLIB_PATH`.
    pub variable: Option<PathBuf>,
    /// `VIRTUAL_ENV`.
    pub virtual_env: Option<PathBuf>,
}

impl Search {
    /// What the environment says, beside an argument.
    pub fn from_environment(argument: Option<&Path>) -> Self {
        Search {
            argument: argument.map(Path::to_owned),
            variable: variable("ORT_DYLIB_PATH"),
            virtual_env: variable("VIRTUAL_ENV"),
        }
    }

    /// Looks in every place in order. `usable` loads a file, or says why not; the first it accepts is taken. What a person
    /// names explicitly and does not work ends the search: taking another silently would be worse.
    pub fn find(&self, mut usable: impl FnMut(&Path) -> Result<(), String>) -> Result<Found, NotFound> {
        let mut tried = Vec::new();
        for origin in ORDER {
            let path = match self.look(origin) {
                Ok(None) => continue,
                Ok(Some(path)) => path,
                Err(problem) => {
                    tracing::debug!(%origin, problem, "no ONNX Runtime there");
                    tried.push(Tried { origin, path: None, problem: Some(problem) });
                    continue;
                }
            };
            let problem = examine(&path, origin).and_then(|()| usable(&path)).err();
            tracing::debug!(%origin, path = %path.display(), problem, "ONNX Runtime looked for");
            let taken = problem.is_none();
            tried.push(Tried { origin, path: Some(path.clone()), problem });
            if taken {
                return Ok(Found { path, tried });
            }
            if matches!(origin, Origin::Argument | Origin::Variable) {
                break;
            }
        }
        Err(NotFound { tried })
    }

    /// One place; `None` where nothing was said about it.
    fn look(&self, origin: Origin) -> Result<Option<PathBuf>, String> {
        match origin {
            Origin::Argument => Ok(self.argument.clone()),
            Origin::Variable => Ok(self.variable.clone()),
            Origin::VirtualEnv => self.virtual_env.as_deref().map(virtual_env).transpose(),
            Origin::Python => python::package_folder_library().map(Some),
            Origin::Project => project().map(Some),
            Origin::System => Ok(Some(PathBuf::from(library_name()))),
        }
    }
}

const ORDER: [Origin; 6] =
    [Origin::Argument, Origin::Variable, Origin::VirtualEnv, Origin::Python, Origin::Project, Origin::System];

fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn virtual_env(folder: &Path) -> Result<PathBuf, String> {
    python::library_in_environment(folder).ok_or_else(|| format!("{} has no package onnxruntime", folder.display()))
}

fn project() -> Result<PathBuf, String> {
    let from_program = env::current_exe().ok().and_then(|path| path.canonicalize().ok());
    let starts = [from_program, env::current_dir().ok()];
    let folders = starts.iter().flatten().flat_map(|path| path.ancestors());
    for folder in folders {
        let venv = folder.join(".deps").join("venv");
        if let Some(path) = venv.is_dir().then(|| python::library_in_environment(&venv)).flatten() {
            return Ok(path);
        }
    }
    Err("no .deps/venv with the package onnxruntime from here upwards".into())
}

/// Rejects what cannot work before the loader is asked, with better words than its own.
fn examine(path: &Path, origin: Origin) -> Result<(), String> {
    if origin == Origin::System {
        return Ok(());
    }
    match path.metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err("there is no such file".into()),
        Err(error) => Err(format!("it cannot be read: {error}")),
        Ok(meta) if meta.is_dir() => Err("it is a directory, not a library".into()),
        Ok(_) => elf::examine(path),
    }
}

/// What the system calls the library.
fn library_name() -> &'static str {
    match env::consts::OS {
        "windows" => "onnxruntime.dll",
        "macos" | "ios" => "libonnxruntime.dylib",
        _ => "libonnxruntime.so",
    }
}

/// The WebGPU plugin: what is named, or the package beside ONNX Runtime.
pub(crate) fn webgpu_plugin(named: Option<&Path>, library: &Path) -> Option<PathBuf> {
    if let Some(path) = named.map(Path::to_owned).or_else(|| variable("HPP_WEBGPU_PLUGIN")) {
        return Some(path);
    }
    let packages = library.parent()?.parent()?.parent()?;
    python::file_in(&packages.join("onnxruntime_ep_webgpu"), &plugin_name("webgpu"))
}

/// The CUDA provider beside ONNX Runtime, as the package onnxruntime-gpu has it.
pub(crate) fn cuda_library(library: &Path) -> Option<PathBuf> {
    python::file_in(library.parent()?, &plugin_name("cuda"))
}

/// The library through which providers in libraries of their own find ONNX Runtime.
pub(crate) fn shared_library(library: &Path) -> Option<PathBuf> {
    python::file_in(library.parent()?, &plugin_name("shared"))
}

fn plugin_name(provider: &str) -> String {
    format!("{}onnxruntime_providers_{provider}{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(path: impl Into<PathBuf>) -> Search {
        Search { argument: Some(path.into()), ..Search::default() }
    }

    #[test]
    fn what_is_named_and_missing_ends_the_search() {
        let error = named("no/such/libonnxruntime.so").find(|_| Ok(())).unwrap_err();
        assert_eq!(error.tried.len(), 1);
        assert_eq!(error.tried[0].origin, Origin::Argument);
        assert_eq!(error.tried[0].problem.as_deref(), Some("there is no such file"));
    }

    #[test]
    fn another_machines_library_is_named_as_such() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut header = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0];
        header.resize(64, 0);
        // A machine neither this test nor anyone here runs on: PowerPC.
        header[18] = 20;
        std::fs::write(file.path(), header).unwrap();
        let error = named(file.path()).find(|_| Ok(())).unwrap_err();
        let problem = error.tried[0].problem.clone().unwrap();
        if cfg!(target_os = "linux") {
            assert!(problem.contains("PowerPC"), "{problem}");
        }
    }

    #[test]
    fn too_old_is_said_and_the_search_goes_on_from_places_nobody_named() {
        let mut seen = Vec::new();
        let result = Search::default().find(|path| {
            seen.push(path.to_owned());
            Err("it is version 1.20".into())
        });
        let error = result.unwrap_err();
        assert_eq!(error.tried.last().map(|tried| tried.origin), Some(Origin::System));
        assert!(error.to_string().contains("it is version 1.20"), "{error}");
    }
}
