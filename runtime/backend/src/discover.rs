//! Searches for the ONNX Runtime library in a fixed order of places, and reports why each candidate was rejected.

mod elf;
pub(crate) mod plugins;
mod python;

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};

/// The oldest version of ONNX Runtime that works, as (major, minor).
pub const OLDEST: (u32, u32) = (1, ort::MINOR_VERSION);

/// A place to search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LibraryOrigin {
    /// `--ort-lib`.
    Argument,
    /// `ORT_DYLIB_PATH`.
    Variable,
    /// The package that the running Python imports, if this is one.
    Package,
    /// The active virtual environment.
    VirtualEnv,
    /// The Python environment in whose `bin` this program lies.
    Environment,
    /// The package that `python3` imports.
    Python,
    /// The project's `.deps`, in the directory of the program or the working directory, or above one of them.
    Project,
    /// The search path of the system's loader.
    System,
}

impl fmt::Display for LibraryOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LibraryOrigin::Argument => "--ort-lib",
            LibraryOrigin::Variable => "ORT_DYLIB_PATH",
            LibraryOrigin::Package => "the package onnxruntime of this Python",
            LibraryOrigin::VirtualEnv => "the active virtual environment",
            LibraryOrigin::Environment => "the Python environment of this program",
            LibraryOrigin::Python => "python3",
            LibraryOrigin::Project => "the project's .deps folder",
            LibraryOrigin::System => "the system's library path",
        })
    }
}

/// A place that was searched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TriedLibrary {
    /// The place.
    pub origin: LibraryOrigin,
    /// The candidate; `None` if the place has none.
    pub path: Option<PathBuf>,
    /// Why it was rejected; `None` for the chosen library.
    pub problem: Option<String>,
}

impl fmt::Display for TriedLibrary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.origin)?;
        if let Some(path) = &self.path {
            write!(f, ": {}", path.display())?;
        }
        write!(f, ": {}", self.problem.as_deref().unwrap_or("taken"))
    }
}

/// No usable library was found.
#[derive(Debug, thiserror::Error)]
#[error("ONNX Runtime {}.{} or newer was not found:\n  {}", OLDEST.0, OLDEST.1, .tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n  "))]
pub struct LibraryNotFound {
    /// All places searched, in order.
    pub tried: Vec<TriedLibrary>,
}

impl LibraryNotFound {
    /// The next step for a person.
    pub fn hint(&self) -> &'static str {
        "run `pip install onnxruntime`, or name the library with --ort-lib or ORT_DYLIB_PATH"
    }
}

/// The chosen library.
#[derive(Clone, Debug)]
pub struct FoundLibrary {
    /// Its file, or a bare name for the system's loader.
    pub path: PathBuf,
    /// All places searched, the chosen one last.
    pub tried: Vec<TriedLibrary>,
}

/// The user's settings for the search.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LibrarySearch {
    /// `--ort-lib`.
    pub argument: Option<PathBuf>,
    /// `ORT_DYLIB_PATH`.
    pub variable: Option<PathBuf>,
    /// The folder of the package `onnxruntime` of the Python that runs this code.
    pub package: Option<PathBuf>,
    /// `VIRTUAL_ENV`.
    pub virtual_env: Option<PathBuf>,
}

impl LibrarySearch {
    /// Settings from the environment variables and `--ort-lib`, outside Python.
    pub fn from_environment(argument: Option<&Path>) -> Self {
        LibrarySearch {
            argument: argument.map(Path::to_owned),
            variable: variable("ORT_DYLIB_PATH"),
            package: None,
            virtual_env: variable("VIRTUAL_ENV"),
        }
    }

    /// Searches all places in order and returns the first library that `load` accepts. `load` returns why it rejects a file. A library
    /// that the user named ends the search even if it is rejected: another one would be a surprise.
    pub fn find(&self, mut load: impl FnMut(&Path) -> Result<(), String>) -> Result<FoundLibrary, LibraryNotFound> {
        let mut tried = Vec::new();
        for origin in ORDER {
            let path = match self.candidate(origin) {
                Ok(None) => continue,
                Ok(Some(path)) => path,
                Err(problem) => {
                    tracing::debug!(%origin, problem, "no ONNX Runtime there");
                    tried.push(TriedLibrary { origin, path: None, problem: Some(problem) });
                    continue;
                }
            };
            let problem = examine(&path, origin).and_then(|()| load(&path)).err();
            tracing::debug!(%origin, path = %path.display(), problem, "ONNX Runtime looked for");
            let is_loaded = problem.is_none();
            tried.push(TriedLibrary { origin, path: Some(path.clone()), problem });
            if is_loaded {
                return Ok(FoundLibrary { path, tried });
            }
            if matches!(origin, LibraryOrigin::Argument | LibraryOrigin::Variable) {
                break;
            }
        }
        Err(LibraryNotFound { tried })
    }

    /// The candidate of one place; `None` if the setting for the place is absent.
    fn candidate(&self, origin: LibraryOrigin) -> Result<Option<PathBuf>, String> {
        match origin {
            LibraryOrigin::Argument => Ok(self.argument.clone()),
            LibraryOrigin::Variable => Ok(self.variable.clone()),
            LibraryOrigin::Package => self.package.as_deref().map(python::library_in_package_folder).transpose(),
            LibraryOrigin::VirtualEnv => self.virtual_env.as_deref().map(virtual_env).transpose(),
            LibraryOrigin::Environment => Ok(own_environment()),
            LibraryOrigin::Python => python::package_folder_library().map(Some),
            LibraryOrigin::Project => project().map(Some),
            LibraryOrigin::System => Ok(Some(PathBuf::from(library_name()))),
        }
    }
}

const ORDER: [LibraryOrigin; 8] = [
    LibraryOrigin::Argument,
    LibraryOrigin::Variable,
    LibraryOrigin::Package,
    LibraryOrigin::VirtualEnv,
    LibraryOrigin::Environment,
    LibraryOrigin::Python,
    LibraryOrigin::Project,
    LibraryOrigin::System,
];

fn variable(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

fn virtual_env(folder: &Path) -> Result<PathBuf, String> {
    python::library_in_environment(folder).ok_or_else(|| format!("{} has no package onnxruntime", folder.display()))
}

/// The library in the environment whose `bin` (`Scripts` on Windows) holds this program, as `pip install` puts it there.
fn own_environment() -> Option<PathBuf> {
    let program = env::current_exe().ok()?;
    let folder = program.parent()?;
    let is_scripts = folder.ends_with("bin") || folder.ends_with("Scripts");
    is_scripts.then(|| folder.parent().and_then(python::library_in_environment)).flatten()
}

/// The library in the folder of a package `onnxruntime`.
///
/// # Errors
/// Why there is none, in words.
pub fn package_library(folder: &Path) -> Result<PathBuf, String> {
    python::library_in_package_folder(folder)
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

/// Rejects files that cannot be loaded, with a clearer message than the loader's.
fn examine(path: &Path, origin: LibraryOrigin) -> Result<(), String> {
    if origin == LibraryOrigin::System {
        return Ok(());
    }
    match path.metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err("there is no such file".into()),
        Err(error) => Err(format!("it cannot be read: {error}")),
        Ok(meta) if meta.is_dir() => Err("it is a directory, not a library".into()),
        Ok(_) => elf::examine(path),
    }
}

/// The library's file name on this system.
fn library_name() -> &'static str {
    match env::consts::OS {
        "windows" => "onnxruntime.dll",
        "macos" | "ios" => "libonnxruntime.dylib",
        _ => "libonnxruntime.so",
    }
}

/// The file of a library that lies in the same folder as ONNX Runtime's library.
pub(crate) fn beside(ort: &Path, library: &str) -> Option<PathBuf> {
    python::file_in(ort.parent()?, &plugins::file_name(library))
}

/// Rejects a file that cannot be a plug-in of this system.
pub(crate) fn examine_plugin(path: &Path) -> Result<(), String> {
    examine(path, LibraryOrigin::Argument)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(path: impl Into<PathBuf>) -> LibrarySearch {
        LibrarySearch { argument: Some(path.into()), ..LibrarySearch::default() }
    }

    #[test]
    fn a_named_library_that_is_missing_ends_the_search() {
        let error = named("no/such/libonnxruntime.so").find(|_| Ok(())).unwrap_err();
        assert_eq!(error.tried.len(), 1);
        assert_eq!(error.tried[0].origin, LibraryOrigin::Argument);
        assert_eq!(error.tried[0].problem.as_deref(), Some("there is no such file"));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_library_for_another_architecture_is_named_as_such() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut header = vec![0x7f, b'E', b'L', b'F', 2, 1, 1, 0];
        header.resize(64, 0);
        // PowerPC, on which this test never runs.
        header[18] = 20;
        std::fs::write(file.path(), header).unwrap();
        let error = named(file.path()).find(|_| Ok(())).unwrap_err();
        let problem = error.tried[0].problem.clone().unwrap();
        assert!(problem.contains("PowerPC"), "{problem}");
    }

    #[test]
    fn the_package_of_the_running_python_comes_before_other_environments() {
        let dir = tempfile::tempdir().unwrap();
        let library = dir.path().join("capi").join(library_name());
        std::fs::create_dir(dir.path().join("capi")).unwrap();
        let search = LibrarySearch { package: Some(dir.path().to_owned()), ..LibrarySearch::default() };
        let missing = search.find(|_| Err("not wanted".into())).unwrap_err();
        assert_eq!(missing.tried[0].origin, LibraryOrigin::Package);
        assert!(missing.tried[0].problem.as_ref().unwrap().contains("holds no library"), "{missing}");
        std::fs::copy(env::current_exe().unwrap(), &library).unwrap();
        assert_eq!(search.find(|_| Ok(())).unwrap().path, library);
    }

    #[test]
    fn a_library_that_is_too_old_is_reported_and_the_search_continues() {
        let error = LibrarySearch::default().find(|_| Err("it is version 1.20".into())).unwrap_err();
        assert_eq!(error.tried.last().map(|tried| tried.origin), Some(LibraryOrigin::System));
        assert!(error.to_string().contains("it is version 1.20"), "{error}");
    }
}
