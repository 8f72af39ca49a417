//! Compressed copies of the weights that kernels take as the model has them (float32 weights): regions of the model's own weight files,
//! stored in fewer bytes beside the plan. Everything else is still read from the model's files.
//!
//! A copy is valid for the bytes that it was made of. It records the identity of each weight file and a hash of what was compressed of that
//! file, and is made again if the hash no longer matches.

use super::super::align::tensors;
use super::super::prepared::{KeptDirectory, identity};
use super::compressed::{COMPRESSED_FILE, Compressed, CompressedRegion, REGIONS_FILE, RegionWriter};
use hpp_engine::BackendError;
use hpp_engine::port::Prepared;
use hpp_schema::FileIdentity;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// The file that records what a copy was made of: for each weight file its identity, a hash and its name.
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

/// Finds or makes the compressed copy of the weights of the model file `model`, whose external data lies in `weights_dir`. Returns the
/// directory of the copy. Only regions that then take at most `limit` bytes per 1000 are compressed. `begin` is called before a copy is
/// written.
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
    let write = |partial: &Path| -> io::Result<()> {
        let sources = sources(model, weights_dir)?;
        let before = identities(&sources)?;
        let mut regions = RegionWriter::create(partial, limit)?;
        for Source { path, name, weights } in &sources {
            weights.iter().try_for_each(|weight| regions.add(path, name, *weight))?;
        }
        regions.finish()?;
        fs::write(partial.join(SOURCES), record(&Compressed::open(partial, weights_dir)?)?)?;
        // If no file has changed, the bytes that were compressed are those that were hashed afterwards.
        match identities(&sources)? == before {
            true => Ok(()),
            false => Err(io::Error::other("the weights were changed while they were compressed")),
        }
    };
    let make = |partial: &Path| {
        begin();
        write(partial).map_err(wanted.failed())
    };
    wanted.find_or_make(|dir| is_current(dir, weights_dir, prepared.verify), make).map(|sealed| sealed.dir)
}

/// The weights of a model file that are stored in files under `weights_dir`.
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

fn identities(sources: &[Source]) -> io::Result<Vec<FileIdentity>> {
    sources.iter().map(|source| Ok(FileIdentity::of(&fs::metadata(&source.path)?))).collect()
}

/// The regions of each file, in order.
fn by_file(compressed: &Compressed) -> impl Iterator<Item = &[CompressedRegion]> {
    compressed.regions.chunk_by(|a, b| a.file == b.file)
}

/// The record of the weight files of regions.
fn record(compressed: &Compressed) -> io::Result<String> {
    let line = |regions: &[CompressedRegion]| {
        let file = File::open(&regions[0].file)?;
        Ok(format!("{} {}\n", known_as(&file)?, hash(regions, &file)?))
    };
    by_file(compressed).map(line).collect()
}

/// The identity of a file as one word.
fn known_as(file: &File) -> io::Result<String> {
    Ok(identity(file)?.replace(' ', ":"))
}

/// The hash of regions of a file; the file may end within the last region.
fn hash(regions: &[CompressedRegion], file: &File) -> io::Result<String> {
    let (mut hasher, mut buffer) = (blake3::Hasher::new(), vec![0; PIECE]);
    for CompressedRegion { offset, length, .. } in regions {
        let mut done = 0;
        while done < *length {
            let size = PIECE.min(length - done);
            match file.read_at(&mut buffer[..size], offset + done as u64)? {
                0 => break,
                read => {
                    hasher.update(&buffer[..read]);
                    done += read;
                }
            }
        }
        crate::os::drop_cached(file, *offset, *length as u64);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Whether a copy is of the bytes that its weight files have now: all files have the recorded identities, or else the recorded hashes. With
/// `verify` only the hashes count.
fn is_current(dir: &Path, weights_dir: &Path, verify: bool) -> bool {
    let found = || -> io::Result<bool> {
        let (recorded, compressed) = (fs::read_to_string(dir.join(SOURCES))?, Compressed::open(dir, weights_dir)?);
        let lines: Vec<(&str, &str)> = recorded.lines().filter_map(|line| line.split_once(' ')).collect();
        if lines.len() != by_file(&compressed).count() {
            return Ok(false);
        }
        let mut are_known = !verify;
        for (regions, (known, _)) in by_file(&compressed).zip(&lines) {
            let now = known_as(&File::open(&regions[0].file)?)?;
            are_known = are_known && now != "-" && now == *known;
        }
        if are_known {
            return Ok(true);
        }
        let now = record(&compressed)?;
        let is_same = now
            .lines()
            .filter_map(|line| line.split_once(' '))
            .map(|(_, hash)| hash)
            .eq(lines.iter().map(|(_, hash)| *hash));
        if is_same && now != recorded {
            // If that fails, the next start hashes them again.
            drop(fs::write(dir.join(SOURCES), now));
        }
        Ok(is_same)
    };
    found().unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::super::super::align::tests::refers_to;
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
        assert_eq!(regions[0].file, dir.path().join("weights").canonicalize().unwrap());
        // The file is touched, but has the same bytes: they are hashed once, and the new identity is recorded.
        let weights = dir.path().join("weights");
        let touch = || File::options().write(true).open(&weights).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        touch();
        let record = || fs::read_to_string(found.join(SOURCES)).unwrap();
        let before = record();
        assert_eq!((find(820), made.get()), (found.clone(), 1));
        assert_ne!(record(), before);
        // Another byte.
        bytes[6] ^= 1;
        fs::write(&weights, &bytes).unwrap();
        find(820);
        assert_eq!(made.get(), 2);
        // Another limit; nothing is that short.
        let none = find(100);
        assert_eq!((made.get(), Compressed::open(&none, dir.path()).unwrap().regions.len()), (3, 0));
        assert_eq!((find(100), made.get()), (none, 3));
        assert!(!found.exists());
        // A damaged or missing part of the copy.
        find(820);
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
    fn a_change_that_keeps_the_times_is_found_where_every_byte_is_verified() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = write_model(dir.path());
        let kept = dir.path().join("prepared");
        let find = |verify| {
            let (mut made, prepared) = (false, Prepared { dir: &kept, contents: "a", verify });
            let model = dir.path().join("model.onnx");
            let found = find_or_copy(&prepared, "cpu_0", [&model, dir.path()], 820, || made = true).unwrap();
            (made, found)
        };
        let (made, found) = find(false);
        assert!(made && !find(true).0);
        // As if the file system's clock had not moved: the record has the identity of the changed file.
        bytes[6] ^= 1;
        fs::write(dir.path().join("weights"), &bytes).unwrap();
        let record = fs::read_to_string(found.join(SOURCES)).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(50));
        let now = known_as(&File::open(dir.path().join("weights")).unwrap()).unwrap();
        fs::write(found.join(SOURCES), format!("{now} {}", record.split_once(' ').unwrap().1)).unwrap();
        assert_eq!([find(false).0, find(true).0, find(true).0], [false, true, false]);
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
