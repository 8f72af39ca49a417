//! Compressed copies of the weights that kernels take as the model has them (float32 weights): regions of the model's own weight files,
//! stored in fewer bytes beside the plan. Everything else is still read from the model's files.
//!
//! A copy belongs to the bytes that it was made of: it records the identity of each weight file and a hash of the weights in it, and is
//! made again if they differ. Where it cannot be written, weights are read from the model.

use super::align::tensors;
use super::compressed::{COMPRESSED_FILE, REGIONS_FILE, RegionWriter};
use super::prepared::{KeptDirectory, identity};
use hpp_engine::BackendError;
use hpp_engine::port::Prepared;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The file that records what a copy was made of.
const SOURCES: &str = "sources";
/// Bytes hashed at once.
const PIECE: usize = 1 << 20;

/// The weights of a session in one file.
#[derive(Debug, PartialEq, Eq)]
struct Source {
    path: PathBuf,
    /// Its path relative to the directory of weights.
    name: PathBuf,
    /// Offset and length of each weight.
    weights: BTreeSet<(u64, u64)>,
}

/// Finds or makes the compressed copy of the weights of the model file `model`, whose external data lies in `weights_dir`, in a directory
/// that it returns. Regions are compressed that take at most `limit` of 1000 bytes. `begin` is called before a copy is written.
pub(crate) fn find_or_copy(
    prepared: &Prepared<'_>,
    partition: &str,
    [model, weights_dir]: [&Path; 2],
    limit: u64,
    begin: impl FnOnce(),
) -> Result<PathBuf, BackendError> {
    let wanted = KeptDirectory {
        prepared,
        partition,
        made_for: format!("copy\n{limit}"),
        files: &[COMPRESSED_FILE, REGIONS_FILE],
        takes: format!("Compressed weights take at most {} % of the weights", limit.min(1000).div_ceil(10)),
    };
    let sources = sources(model, weights_dir).map_err(wanted.failed())?;
    let write = |partial: &Path| -> io::Result<()> {
        // The record first: a write to a source while it is copied is found by its identity.
        let record = record(&sources)?;
        let mut regions = RegionWriter::create(partial, limit)?;
        for Source { path, name, weights } in &sources {
            weights.iter().try_for_each(|weight| regions.add(path, name, *weight))?;
        }
        regions.finish()?;
        fs::write(partial.join(SOURCES), record)
    };
    let make = |partial: &Path| {
        begin();
        write(partial).map_err(wanted.failed())
    };
    wanted.find_or_make(|dir| is_copy_of(dir, &sources, prepared.verify), make)
}

/// The weights of a model file in files under a directory.
fn sources(model: &Path, weights_dir: &Path) -> io::Result<Vec<Source>> {
    let (root, mut files) = (weights_dir.canonicalize()?, BTreeMap::<PathBuf, BTreeSet<(u64, u64)>>::new());
    for tensor in tensors(&fs::read(model)?)? {
        if let Some(weight) = tensor.stored {
            files.entry(root.join(tensor.location).canonicalize()?).or_default().insert(weight);
        }
    }
    let source = |(path, weights): (PathBuf, BTreeSet<(u64, u64)>)| {
        let name = path.strip_prefix(&root).ok()?.to_owned();
        Some(Source { path, name, weights })
    };
    Ok(files.into_iter().filter_map(source).collect())
}

/// The record of weight files: for each its identity and a hash of the weights.
fn record(sources: &[Source]) -> io::Result<String> {
    let line = |source: &Source| {
        let file = File::open(&source.path)?;
        Ok(format!("{} {}\n", identity(&file)?.replace(' ', "_"), hash(source, &file)?))
    };
    sources.iter().map(line).collect()
}

/// The hash of the weights in a file. Bytes past its end count as zeros.
fn hash(source: &Source, file: &File) -> io::Result<String> {
    let (mut hasher, mut buffer) = (blake3::Hasher::new(), vec![0; PIECE]);
    hasher.update(source.name.as_os_str().as_encoded_bytes());
    for (offset, length) in &source.weights {
        hasher.update(&offset.to_le_bytes()).update(&length.to_le_bytes());
        let mut done = 0;
        while done < *length {
            let size = PIECE.min(usize::try_from(length - done).unwrap_or(PIECE));
            match file.read_at(&mut buffer[..size], offset + done)? {
                0 => break,
                read => {
                    hasher.update(&buffer[..read]);
                    done += read as u64;
                }
            }
        }
        crate::os::drop_cached(file, *offset, *length);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Whether a copy was made of the weights that these files have now: those of the same identity, or of the same hash (of every byte if
/// `verify`).
fn is_copy_of(dir: &Path, sources: &[Source], verify: bool) -> bool {
    let found = || -> io::Result<bool> {
        let recorded = fs::read_to_string(dir.join(SOURCES))?;
        let is_known = |source: &Source, line: &str| -> io::Result<bool> {
            let now = identity(&File::open(&source.path)?)?.replace(' ', "_");
            Ok(now != "-" && line.split(' ').next() == Some(&now))
        };
        let mut known = recorded.lines().count() == sources.len() && !verify;
        for (source, line) in sources.iter().zip(recorded.lines()) {
            known = known && is_known(source, line)?;
        }
        if known {
            return Ok(true);
        }
        let now = record(sources)?;
        let hashes = |text: &str| -> Vec<String> {
            text.lines().map(|line| line.split(' ').next_back().unwrap_or_default().to_owned()).collect()
        };
        let is_same = hashes(&now) == hashes(&recorded);
        if is_same {
            // If that fails, the next start hashes them again.
            drop(fs::write(dir.join(SOURCES), now));
        }
        Ok(is_same)
    };
    found().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::super::align::tests::refers_to;
    use super::super::compressed::Compressed;
    use super::*;
    use std::cell::Cell;

    /// Writes a model with one weight of bfloat16 precision. Returns the bytes of the weight.
    fn write_model(dir: &Path) -> Vec<u8> {
        let numbers = (0..1 << 18).map(|at: u32| [0, 0, (at * 7 % 251) as u8, 0x3c + (at % 3) as u8]);
        let bytes = numbers.collect::<Vec<_>>().as_flattened().to_vec();
        fs::write(dir.join("model.onnx"), refers_to("weights", bytes.len())).unwrap();
        fs::write(dir.join("weights"), &bytes).unwrap();
        bytes
    }

    #[test]
    fn a_copy_is_made_once_and_again_after_any_change_of_its_sources() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = write_model(dir.path());
        let (model, kept) = (dir.path().join("model.onnx"), dir.path().join("prepared"));
        let made = Cell::new(0);
        let find = |limit| {
            let prepared = Prepared { dir: &kept, contents: "a", verify: false };
            let begin = || made.set(made.get() + 1);
            find_or_copy(&prepared, "cpu_0", [&model, dir.path()], limit, begin).unwrap()
        };
        let found = find(820);
        assert_eq!((find(820), made.get()), (found.clone(), 1));
        let compressed = Compressed::open(&found, dir.path()).unwrap();
        let (regions, size) = (compressed.regions, fs::metadata(&compressed.stored).unwrap().len());
        assert_eq!((regions.len(), regions[0].length), (1, bytes.len()));
        assert!(size < bytes.len() as u64 * 36 / 100, "{size}");
        assert!(regions[0].file.is_absolute() && regions[0].file.ends_with("weights"));
        // Touched, but the same bytes: hashed once, and the new identity recorded.
        let weights = dir.path().join("weights");
        let touch = || File::options().write(true).open(&weights).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        touch();
        let record = || fs::read_to_string(found.join(SOURCES)).unwrap();
        let before = record();
        assert_eq!((find(820), made.get()), (found.clone(), 1));
        assert_ne!(record(), before);
        // Another byte.
        bytes[5] ^= 1;
        fs::write(&weights, &bytes).unwrap();
        find(820);
        assert_eq!(made.get(), 2);
        // Another limit; nothing is that short.
        let none = find(100);
        assert_eq!((made.get(), Compressed::open(&none, dir.path()).unwrap().regions.len()), (3, 0));
        assert!(!found.exists());
        // A damaged or missing part of the copy.
        let found = find(820);
        for name in [COMPRESSED_FILE, REGIONS_FILE, SOURCES] {
            let before = made.get();
            fs::write(found.join(name), "x").unwrap();
            find(820);
            assert_eq!(made.get(), before + 1, "{name}");
            fs::remove_file(found.join(name)).unwrap();
            find(820);
            assert_eq!(made.get(), before + 2, "{name}");
        }
    }

    #[test]
    fn weights_elsewhere_are_not_copied() {
        let [dir, elsewhere] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        write_model(elsewhere.path());
        std::os::unix::fs::symlink(elsewhere.path().join("weights"), dir.path().join("weights")).unwrap();
        assert_eq!(sources(&elsewhere.path().join("model.onnx"), dir.path()).unwrap(), []);
        let model = elsewhere.path().join("model.onnx");
        assert_eq!(sources(&model, elsewhere.path()).unwrap()[0].name, Path::new("weights"));
    }
}
