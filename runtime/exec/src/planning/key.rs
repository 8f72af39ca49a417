//! The cache key of a plan: a hash of what the plan was made from, that is, the model's files, hpp-split, its options and the machine.

use super::error::PlanningError;
use hpp_schema::sample_ranges;
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Graph files up to this size are hashed completely, which takes a fraction of a second; of larger ones, samples are hashed.
const MAX_FULL_HASH: u64 = 64 << 20;

/// Starts of the names of settings and text files beside a model that a plan depends on.
const SETTINGS_FILES: [&str; 6] =
    ["config.json", "generation_config.json", "genai_config.json", "tokenizer", "special_tokens_map", "chat_template"];

/// The key of a plan in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CacheKey {
    /// The model's name.
    name: String,
    /// Hash of the model's path, the options and the machine. It stays the same if the model's files or hpp-split change.
    request: String,
    /// Hash of the model's files and hpp-split: names, sizes and times, and the contents of graphs.
    version: String,
}

impl CacheKey {
    /// Reads the metadata of the model's files and of the `planner` executable, and the graphs.
    pub fn new(model: &Path, planner: &Path, flags: &[OsString]) -> Result<Self, PlanningError> {
        let failed = |source| PlanningError::Model { path: model.to_owned(), source };
        let canonical = fs::canonicalize(model).map_err(failed)?;
        let mut request = blake3::Hasher::new();
        request.update(canonical.as_os_str().as_encoded_bytes());
        for flag in flags {
            request.update(b"\0").update(flag.as_encoded_bytes());
        }
        request.update(b"\0").update(machine().as_bytes());
        let mut version = blake3::Hasher::new();
        add_metadata(&mut version, planner).map_err(failed)?;
        for file in model_files(&canonical).map_err(failed)? {
            add_metadata(&mut version, &file).map_err(failed)?;
            if file.extension().is_some_and(|extension| extension == "onnx") {
                add_contents(&mut version, &file).map_err(failed)?;
            }
        }
        let name = canonical.file_stem().filter(|_| canonical.is_file()).or(canonical.file_name());
        let is_plain = |letter: &char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
        let name: String = name.unwrap_or_default().to_string_lossy().chars().filter(is_plain).take(40).collect();
        let hex = |hasher: blake3::Hasher, digits: usize| hasher.finalize().to_hex()[..digits].to_owned();
        let name = name.trim_start_matches('.');
        let name = if name.is_empty() { "model" } else { name }.to_owned();
        Ok(Self { name, request: hex(request, 12), version: hex(version, 8) })
    }

    /// The directory's name in the cache.
    pub fn directory(&self) -> String {
        format!("{}{}", self.prefix(), self.version)
    }

    /// The prefix of the directory names of all versions of this plan.
    pub fn prefix(&self) -> String {
        format!("{}-{}-", self.name, self.request)
    }
}

/// The files that a plan of this model depends on, chosen by name. Weight files may have other names (torch.onnx may name them after tensors); those
/// are compared with the plan's records at each start.
fn model_files(model: &Path) -> io::Result<Vec<PathBuf>> {
    let (dir, only) = if model.is_dir() { (model, None) } else { (model.parent().unwrap_or(model), Some(model)) };
    // The graphs may be in `onnx/`, below the configuration.
    let above = dir.parent().filter(|_| dir.ends_with("onnx")).map(Path::to_owned);
    let mut files = Vec::new();
    for dir in [dir.to_owned(), dir.join("onnx")].into_iter().chain(above) {
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => continue,
            Err(error) => return Err(error),
        };
        for entry in entries {
            let path = entry?.path();
            let other_model = only.is_some_and(|only| path != only && path.extension() == only.extension());
            if path.is_file() && !other_model && is_model_file(&path) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn is_model_file(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let weights = ["data", "bin", "weight", "weights", "pb"].iter().any(|end| name.ends_with(&format!(".{end}")));
    !name.starts_with('.')
        && (name.contains(".onnx") || weights || SETTINGS_FILES.iter().any(|start| name.starts_with(start)))
}

/// Adds a file's path, size and modification time.
fn add_metadata(hasher: &mut blake3::Hasher, file: &Path) -> io::Result<()> {
    let metadata = fs::metadata(file)?;
    hasher.update(file.as_os_str().as_encoded_bytes());
    hasher.update(&metadata.len().to_le_bytes()).update(&modified_nanos(&metadata).to_le_bytes());
    Ok(())
}

/// A file's modification time in nanoseconds; 0 if the system does not report it.
fn modified_nanos(metadata: &Metadata) -> u128 {
    metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |time| time.as_nanos())
}

/// Adds a file's contents, or samples of a large file.
fn add_contents(hasher: &mut blake3::Hasher, path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let ranges = if length <= MAX_FULL_HASH { vec![(0, length)] } else { sample_ranges(length) };
    for (offset, size) in ranges {
        file.seek(SeekFrom::Start(offset))?;
        let mut bytes = Vec::new();
        (&mut file).take(size).read_to_end(&mut bytes)?;
        hasher.update(&bytes);
    }
    Ok(())
}

/// Describes this machine, so that several machines can share a cache directory: processor, cores, memory in GiB, NVIDIA cards.
fn machine() -> String {
    let memory = hpp_backend::machine_memory().0.unwrap_or(0) >> 30;
    let cards = fs::read_dir("/proc/driver/nvidia/gpus").into_iter().flatten().flatten();
    let mut cards: Vec<String> = cards.map(|card| card.file_name().to_string_lossy().into_owned()).collect();
    cards.sort();
    let (processor, cores) = (hpp_backend::processor_name(), hpp_backend::machine_cores());
    format!("{processor} {cores} {memory} {cards:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(model: &Path, flags: &[&str]) -> CacheKey {
        let flags: Vec<OsString> = flags.iter().map(OsString::from).collect();
        CacheKey::new(model, &std::env::current_exe().unwrap(), &flags).unwrap()
    }

    #[test]
    fn the_key_changes_with_what_the_plan_depends_on() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("my model");
        fs::create_dir(&model).unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(model.join(name), bytes).unwrap();
        write("model.onnx", b"graph");
        let first = key(&model, &[]);
        assert!(first.directory().starts_with("mymodel-"), "{}", first.directory());
        assert_eq!(key(&model.join("."), &[]), first, "another spelling of the path");
        write("notes.txt", b"not a file of the model");
        assert_eq!(key(&model, &[]), first);
        assert_ne!(key(&model, &["--ram", "1G"]).request, first.request);

        // Another graph in a file of the same size and modification time.
        let time = fs::metadata(model.join("model.onnx")).unwrap().modified().unwrap();
        write("model.onnx", b"hparg");
        File::options().write(true).open(model.join("model.onnx")).unwrap().set_modified(time).unwrap();
        let other = key(&model, &[]);
        assert_eq!((&other.request, other.version != first.version), (&first.request, true));
        // New files: a tokenizer and weights.
        for name in ["tokenizer.json", "model.onnx.data", "weights.bin"] {
            let before = key(&model, &[]);
            write(name, b"x");
            let after = key(&model, &[]);
            assert_eq!((&after.request, after.version != before.version), (&before.request, true), "{name}");
        }
        assert_ne!(key(&model.join("model.onnx"), &[]).request, first.request);
        // A graph below its configuration.
        let onnx = model.join("onnx");
        fs::create_dir(&onnx).unwrap();
        write("onnx/model.onnx", b"graph");
        for given in [&model, &onnx, &onnx.join("model.onnx")] {
            let before = key(given, &[]);
            fs::write(model.join("generation_config.json"), given.as_os_str().as_encoded_bytes()).unwrap();
            assert_ne!(key(given, &[]).version, before.version, "{}", given.display());
        }
    }
}
