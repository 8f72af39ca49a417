//! What a cached plan was made from: the model's files, hpp-split, its flags and the machine. Decides when a plan is made again.

use super::cache::CacheError;
use hpp_schema::sample_ranges;
use std::ffi::OsString;
use std::fs::{self, File, Metadata};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Graphs up to this size are hashed whole, which takes a fraction of a second; of larger ones, samples are.
const HASH_WHOLE: u64 = 64 << 20;

/// Names of the settings and text files beside a model that a plan depends on.
const SETTINGS: [&str; 6] =
    ["config.json", "generation_config.json", "genai_config.json", "tokenizer", "special_tokens_map", "chat_template"];

/// The name of a plan in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// The model's name, for people.
    name: String,
    /// Hash of the model's path, the flags and the machine: what stays when the model or hpp-split change.
    key: String,
    /// Hash of the contents: files, sizes, times, the graph, hpp-split.
    version: String,
}

impl Identity {
    /// Looks at the model and at the `planner`'s executable.
    pub fn of(model: &Path, planner: &Path, flags: &[OsString]) -> Result<Self, CacheError> {
        let failed = |source| CacheError::Model { path: model.to_owned(), source };
        let canonical = fs::canonicalize(model).map_err(failed)?;
        let mut key = blake3::Hasher::new();
        key.update(canonical.as_os_str().as_encoded_bytes());
        for flag in flags {
            key.update(b"\0").update(flag.as_encoded_bytes());
        }
        key.update(b"\0").update(machine().as_bytes());
        let mut version = blake3::Hasher::new();
        note(&mut version, planner).map_err(failed)?;
        for file in files(&canonical).map_err(failed)? {
            note(&mut version, &file).map_err(failed)?;
            if file.extension().is_some_and(|extension| extension == "onnx") {
                contents(&mut version, &file).map_err(failed)?;
            }
        }
        let name = canonical.file_stem().filter(|_| canonical.is_file()).or(canonical.file_name());
        let is_plain = |letter: &char| letter.is_ascii_alphanumeric() || matches!(letter, '-' | '_' | '.');
        let name: String = name.unwrap_or_default().to_string_lossy().chars().filter(is_plain).take(40).collect();
        let hex = |hasher: blake3::Hasher, digits: usize| hasher.finalize().to_hex()[..digits].to_owned();
        let name = name.trim_start_matches('.');
        let name = if name.is_empty() { "model" } else { name }.to_owned();
        Ok(Self { name, key: hex(key, 12), version: hex(version, 8) })
    }

    /// The directory's name in the cache.
    pub fn directory(&self) -> String {
        format!("{}{}", self.any_version(), self.version)
    }

    /// What the names of all versions of this plan begin with.
    pub fn any_version(&self) -> String {
        format!("{}-{}-", self.name, self.key)
    }
}

/// The files a plan of this model depends on, as far as their names tell. Other weight files (torch.onnx may name them after
/// tensors) are compared with the plan's records at each start.
fn files(model: &Path) -> io::Result<Vec<PathBuf>> {
    let (dir, only) = if model.is_dir() { (model, None) } else { (model.parent().unwrap_or(model), Some(model)) };
    let mut files = Vec::new();
    for dir in [dir.to_owned(), dir.join("onnx")] {
        let entries = match fs::read_dir(&dir) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => continue,
            Err(error) => return Err(error),
        };
        for entry in entries {
            let path = entry?.path();
            let other_model = only.is_some_and(|only| path != only && path.extension() == only.extension());
            if path.is_file() && !other_model && is_of_a_model(&path) {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn is_of_a_model(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let weights = ["data", "bin", "weight", "weights", "pb"].iter().any(|end| name.ends_with(&format!(".{end}")));
    !name.starts_with('.')
        && (name.contains(".onnx") || weights || SETTINGS.iter().any(|start| name.starts_with(start)))
}

/// Adds a file's path, size and time of change.
fn note(hasher: &mut blake3::Hasher, file: &Path) -> io::Result<()> {
    let about = fs::metadata(file)?;
    hasher.update(file.as_os_str().as_encoded_bytes());
    hasher.update(&about.len().to_le_bytes()).update(&changed(&about).to_le_bytes());
    Ok(())
}

/// When a file was changed, in nanoseconds; 0 where the system does not tell.
fn changed(about: &Metadata) -> u128 {
    about.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).map_or(0, |time| time.as_nanos())
}

/// Adds a file's bytes, or samples of them.
fn contents(hasher: &mut blake3::Hasher, path: &Path) -> io::Result<()> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let ranges = if length <= HASH_WHOLE { vec![(0, length)] } else { sample_ranges(length) };
    for (offset, size) in ranges {
        file.seek(SeekFrom::Start(offset))?;
        let mut bytes = Vec::new();
        (&mut file).take(size).read_to_end(&mut bytes)?;
        hasher.update(&bytes);
    }
    Ok(())
}

/// This machine, so that a cache on a shared disk serves several: processor, cores, memory in GiB, NVIDIA cards.
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

    fn identity(model: &Path, flags: &[&str]) -> Identity {
        let flags: Vec<OsString> = flags.iter().map(OsString::from).collect();
        Identity::of(model, &std::env::current_exe().unwrap(), &flags).unwrap()
    }

    #[test]
    fn what_a_plan_depends_on_changes_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("my model");
        fs::create_dir(&model).unwrap();
        let write = |name: &str, bytes: &[u8]| fs::write(model.join(name), bytes).unwrap();
        write("model.onnx", b"graph");
        let first = identity(&model, &[]);
        assert!(first.directory().starts_with("mymodel-"), "{}", first.directory());
        assert_eq!(identity(&model.join("."), &[]), first, "another way to write the path");
        write("notes.txt", b"not of the model");
        assert_eq!(identity(&model, &[]), first);
        assert_ne!(identity(&model, &["--ram", "1G"]).key, first.key);

        // The same size and time, another graph.
        let time = fs::metadata(model.join("model.onnx")).unwrap().modified().unwrap();
        write("model.onnx", b"hparg");
        File::options().write(true).open(model.join("model.onnx")).unwrap().set_modified(time).unwrap();
        let other = identity(&model, &[]);
        assert_eq!((&other.key, other.version != first.version), (&first.key, true));
        // A tokenizer that was not there, and weights that were written again.
        for name in ["tokenizer.json", "model.onnx.data", "weights.bin"] {
            let before = identity(&model, &[]);
            write(name, b"x");
            let after = identity(&model, &[]);
            assert_eq!((&after.key, after.version != before.version), (&before.key, true), "{name}");
        }
        assert_ne!(identity(&model.join("model.onnx"), &[]).key, first.key);
    }
}
