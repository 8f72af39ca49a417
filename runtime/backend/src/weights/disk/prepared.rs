//! Prepared partitions: weights on disk, beside the plan, in the layout that kernels want.
//!
//! ONNX Runtime writes such a file itself (`session.save_external_prepacked_constant_initializers`) and maps it back without copying.
//! Compressed regions are stored beside it. Preparing takes seconds and several times the disk space of the partition's weights, so each
//! partition is prepared once, in a temporary directory that is renamed into place when it is complete.
//!
//! Invariant: a directory with a matching seal is complete. One process prepares at a time; others wait and then find the result.

use super::align::align;
use super::direct;
use hpp_engine::BackendError;
use hpp_engine::port::Prepared;
use hpp_schema::{ByteSize, FileIdentity};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use tracing::info;

/// The graph.
pub(crate) const MODEL: &str = "model.onnx";
/// Its weights as ONNX Runtime writes them.
pub(crate) const UNALIGNED: &str = "unaligned";
/// Its weights, aligned as their kernels expect.
pub(crate) const WEIGHTS: &str = "model.onnx.data";
/// The file with the hashes and identities of the others, written last.
const SEAL: &str = "seal";
/// The version of the format, part of the key.
const FORMAT: &str = "hpp-prepared-9";
/// Prefix of temporary directories.
const PARTIAL: &str = ".partial-";
/// Bytes of a test write that fails on a full disk; also the buffer size for hashing.
const MIB: usize = 1 << 20;
/// Number of samples of a file that its seal hashes.
const SAMPLES: u64 = 64;
/// The identity of a file that a later write might not change.
const UNKNOWN: &str = "-";
/// Longer than a tick of the clock from which most file systems take mtime and ctime.
const TICK: Duration = Duration::from_millis(25);

/// A directory that is made once and kept for later starts.
pub(super) struct KeptDirectory<'a> {
    /// Where it is.
    pub prepared: &'a Prepared<'a>,
    pub partition: &'a str,
    /// Everything besides the plan's contents that the contents of the directory depend on.
    pub made_for: String,
    /// Its files.
    pub files: &'a [&'a str],
    /// A sentence on the disk space that it takes, for the error message when the disk is full.
    pub takes: String,
}

/// A directory whose files match its seal, with the identities that they had when they were checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sealed {
    pub dir: PathBuf,
    identities: Vec<(PathBuf, String)>,
}

impl Sealed {
    /// An error if a file was written to since it was checked. Files whose identity would not show that are not compared.
    pub fn check(&self) -> io::Result<()> {
        for (path, checked) in self.identities.iter().filter(|(_, checked)| checked != UNKNOWN) {
            if FileIdentity::of(&fs::metadata(path)?).to_string() != *checked {
                let path = path.display();
                let why = format!("{path} was changed while it was loaded; start again, and it is prepared again");
                return Err(io::Error::other(why));
            }
        }
        Ok(())
    }
}

/// Finds a prepared partition or prepares it: `make` writes [`MODEL`] and [`UNALIGNED`] to the directory it is given. `made_for` is
/// everything that the layout depends on beside the plan's contents: the library's version, the processor and the variables that choose
/// kernels. Only regions that then take at most `limit` bytes per 1000 are compressed. Returns the directory.
pub(crate) fn find_or_make(
    prepared: &Prepared<'_>,
    partition: &str,
    made_for: &str,
    limit: u64,
    make: impl FnOnce(&Path) -> Result<(), BackendError>,
) -> Result<Sealed, BackendError> {
    let takes = "Prepared weights take up to two and a half times the space of 4-bit weights, and six times that of 16-bit weights";
    let made_for = format!("{made_for}\n{limit}");
    let files = &[&[MODEL, WEIGHTS], direct::REGION_FILES].concat();
    let wanted = KeptDirectory { prepared, partition, made_for, files, takes: takes.to_owned() };
    let finish = |partial: &Path| {
        let weights = partial.join(WEIGHTS);
        let pieces = align(&partial.join(MODEL), &partial.join(UNALIGNED), &weights)?;
        fs::remove_file(partial.join(UNALIGNED))?;
        direct::compress(partial, WEIGHTS, limit, pieces)
    };
    let make = |partial: &Path| make(partial).and_then(|()| finish(partial).map_err(wanted.failed()));
    wanted.find_or_make(|_| true, make)
}

impl KeptDirectory<'_> {
    fn error(&self, cause: String) -> BackendError {
        let what = format!("the weights of {} in {}", self.partition, self.prepared.dir.display());
        BackendError::Preparation { what, cause }
    }

    /// Turns an I/O error into the error of making the directory.
    pub fn failed(&self) -> impl Fn(io::Error) -> BackendError {
        |error| self.error(with_advice(&error))
    }

    /// Returns the directory; `make` fills it if it does not exist, if it is not whole or if it no longer `is_current`.
    pub fn find_or_make(
        &self,
        is_current: impl Fn(&Path) -> bool,
        make: impl FnOnce(&Path) -> Result<(), BackendError>,
    ) -> Result<Sealed, BackendError> {
        let KeptDirectory { prepared, partition, made_for, files, .. } = self;
        let key = blake3::hash(format!("{FORMAT}\n{made_for}\n{}", prepared.contents).as_bytes()).to_hex();
        let dir = prepared.dir.join(format!("{partition}-{}", &key[..16]));
        let usable = || checked(&dir, files, prepared.verify).filter(|_| is_current(&dir));
        if let Some(sealed) = usable() {
            info!(partition, path = %dir.display(), "prepared weights found");
            return Ok(sealed);
        }
        let failed = self.failed();
        fs::create_dir_all(prepared.dir).map_err(&failed)?;
        let lock = File::create(prepared.dir.join("lock")).map_err(&failed)?;
        lock.lock().map_err(&failed)?;
        if let Some(sealed) = usable() {
            return Ok(sealed);
        }
        // With the lock held, an incomplete directory was left by a process that was killed.
        remove_dirs(prepared.dir, |name| name.starts_with(PARTIAL) || name.starts_with(&format!("{partition}-")))
            .map_err(&failed)?;
        let started = Instant::now();
        let partial = prepared.dir.join(format!("{PARTIAL}{partition}"));
        fs::create_dir(&partial).map_err(&failed)?;
        let finish = || seal(&partial, files, &dir).and_then(|()| fs::rename(&partial, &dir));
        let made = make(&partial).and_then(|()| finish().map_err(&failed));
        if let Err(error) = made {
            let full = disk_full_message(&partial, &self.takes)
                .or_else(|| refused_write_message(&error, &partial, &self.takes));
            drop(fs::remove_dir_all(&partial));
            return Err(full.map_or(error, |cause| self.error(cause)));
        }
        info!(partition, path = %dir.display(), ms = started.elapsed().as_millis(), "prepared weights made");
        let changed = || failed(io::Error::other("its files were changed while they were written"));
        checked(&dir, files, false).ok_or_else(changed)
    }
}

/// The error, with advice where the plan's directory cannot be written to or the size of files is limited.
fn with_advice(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => format!(
            "{error}. The first run writes prepared weights beside the plan: run the plan once as a user who may write there, or \
             make the plan elsewhere (hpp-split --out)"
        ),
        io::ErrorKind::FileTooLarge => {
            format!("{error}. There is a limit on the size of files: raise it (`ulimit -f`)")
        }
        _ => error.to_string(),
    }
}

/// A message if the disk is full; ONNX Runtime's error does not give the cause.
fn disk_full_message(partial: &Path, takes: &str) -> Option<String> {
    let error = fs::write(partial.join("more"), vec![1; MIB]).err()?;
    let kinds = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded, io::ErrorKind::FileTooLarge];
    if !kinds.contains(&error.kind()) {
        return None;
    }
    Some(no_room_message(&error.to_string(), partial, takes))
}

/// A message if ONNX Runtime could not write a file and the disk has room for a short one: the file was longer than the rest of the disk, or
/// than a limit allows.
fn refused_write_message(error: &BackendError, partial: &Path, takes: &str) -> Option<String> {
    let BackendError::Runtime { cause, .. } = error else { return None };
    let why = || format!("{} (there is no room, or a limit on the size of files)", cause.trim_end());
    cause.contains("Failed to write").then(|| no_room_message(&why(), partial, takes))
}

/// Why something could not be written, and what to do.
fn no_room_message(why: &str, partial: &Path, takes: &str) -> String {
    let free = free_space(partial).map_or(String::new(), |free| format!("; {} are free there", ByteSize(free).human()));
    format!(
        "{why}{free}. {takes}: make room (or raise `ulimit -f`), or put the plan on another disk (hpp-split --out; --cache if you gave a model)"
    )
}

/// Free bytes of the file system of a directory; asked for on Linux only.
#[cfg(target_os = "linux")]
fn free_space(folder: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(folder).ok()?;
    Some(found.f_bavail * found.f_frsize)
}

#[cfg(not(target_os = "linux"))]
fn free_space(_: &Path) -> Option<u64> {
    None
}

/// Removes the subdirectories whose names match.
fn remove_dirs(dir: &Path, matches: impl Fn(&str) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(&matches) && entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// The first line of a seal: the directory's name, which contains the key. A directory that was renamed to another's name does not match.
fn title(dir: &Path) -> String {
    format!("{}\n", dir.file_name().unwrap_or_default().to_string_lossy())
}

/// Syncs all files to disk, then writes the seal for the final directory `dir`, and drops the files from the page cache.
fn seal(partial: &Path, files: &[&str], dir: &Path) -> io::Result<()> {
    let lines = files.iter().map(|name| {
        // Windows syncs only files that are open for writing.
        let mut file = File::options().read(true).write(true).open(partial.join(name))?;
        file.sync_all()?;
        let found = identity(&file)?;
        let line = format!("{}{}{found}\n", describe(&mut file, name)?, hash(&mut file)?);
        crate::os::drop_cached(&file, 0, 0);
        Ok(line)
    });
    let lines: Vec<String> = lines.collect::<io::Result<_>>()?;
    fs::write(partial.join(SEAL), title(dir) + &lines.concat())
}

/// Waits until a later write is sure to change a file's identity, and returns it; [`UNKNOWN`] if the file system's clock is too coarse for
/// that.
pub(super) fn identity(file: &File) -> io::Result<String> {
    for _ in 0..2 {
        let found = FileIdentity::of(&file.metadata()?);
        if found.is_settled(SystemTime::now()) {
            return Ok(found.to_string());
        }
        std::thread::sleep(TICK);
    }
    Ok(UNKNOWN.to_owned())
}

/// A directory, if its files match its seal. Hashes samples, and whole files on request (`every_byte`) or if a file's identity differs
/// from the sealed one, because it was written to or copied.
fn checked(dir: &Path, files: &[&str], every_byte: bool) -> Option<Sealed> {
    let found = || -> io::Result<Option<Sealed>> {
        let sealed = fs::read_to_string(dir.join(SEAL))?;
        let mut sealed = sealed.lines();
        if sealed.next() != Some(title(dir).trim_end()) {
            return Ok(None);
        }
        let (mut new_seal, mut has_changed, mut identities) = (title(dir), false, Vec::new());
        for name in files {
            let mut file = File::open(dir.join(name))?;
            let (found, description) = (identity(&file)?, describe(&mut file, name)?);
            let (same, sealed_hash) = (sealed.next() == Some(description.trim_end()), sealed.next());
            let is_known = sealed.next() == Some(found.as_str()) && found != UNKNOWN;
            let Some(sealed_hash) = sealed_hash.filter(|_| same) else { return Ok(None) };
            let is_hashed = every_byte || !is_known;
            if is_hashed && sealed_hash != hash(&mut file)?.trim_end() {
                return Ok(None);
            }
            // Reading samples fills the page cache, because the system reads ahead, but weights are read past the page cache.
            crate::os::drop_cached(&file, 0, 0);
            has_changed |= !is_known;
            new_seal += &format!("{description}{sealed_hash}\n{found}\n");
            identities.push((dir.join(name), found));
        }
        if has_changed {
            replace_seal(dir, &new_seal);
        }
        Ok(Some(Sealed { dir: dir.to_owned(), identities }))
    };
    found().ok().flatten()
}

/// Replaces the seal atomically. If that fails, the next start hashes the whole files again.
fn replace_seal(dir: &Path, seal: &str) {
    let partial = dir.join(format!("{PARTIAL}{SEAL}-{}", std::process::id()));
    let written = fs::write(&partial, seal).and_then(|()| fs::rename(&partial, dir.join(SEAL)));
    if written.is_err() {
        drop(fs::remove_file(&partial));
    }
}

/// The hash of a whole file, as a line.
fn hash(file: &mut File) -> io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; MIB];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(format!("{}\n", hasher.finalize().to_hex())),
            size => hasher.update(&buffer[..size]),
        };
    }
}

/// A file's name, length and hash of evenly spaced samples, as a line.
fn describe(file: &mut File, name: &str) -> io::Result<String> {
    let length = file.metadata()?.len();
    let mut hasher = blake3::Hasher::new();
    let mut sample = [0; 4096];
    let last = length.saturating_sub(sample.len() as u64);
    for at in 0..SAMPLES {
        file.seek(SeekFrom::Start(last / (SAMPLES - 1) * at))?;
        let read = file.read(&mut sample)?;
        hasher.update(&sample[..read]);
    }
    Ok(format!("{name} {length} {}\n", hasher.finalize().to_hex()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    fn find_or_make(
        prepared: &Prepared<'_>,
        partition: &str,
        made_for: &str,
        limit: u64,
        make: impl FnOnce(&Path) -> Result<(), BackendError>,
    ) -> Result<PathBuf, BackendError> {
        super::find_or_make(prepared, partition, made_for, limit, make).map(|sealed| sealed.dir)
    }

    #[test]
    fn a_change_after_the_check_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let prepared = Prepared { dir: dir.path(), contents: "a", verify: false };
        let make = |partial: &Path| write(partial, &[7; 100_000]);
        super::find_or_make(&prepared, "cpu_0", "x", 0, make).unwrap();
        let found = super::find_or_make(&prepared, "cpu_0", "x", 0, stopped).unwrap();
        found.check().unwrap();
        fs::write(found.dir.join(WEIGHTS), [8; 100_000]).unwrap();
        let error = found.check().unwrap_err().to_string();
        assert!(error.contains("model.onnx.data was changed while it was loaded"), "{error}");
    }

    fn write(dir: &Path, weights: &[u8]) -> Result<(), BackendError> {
        // A model with one weight, which is the whole file.
        fs::write(dir.join(MODEL), super::super::align::tests::refers_to(UNALIGNED, weights.len())).unwrap();
        fs::write(dir.join(UNALIGNED), weights).unwrap();
        Ok(())
    }

    fn stopped(_: &Path) -> Result<(), BackendError> {
        Err(BackendError::Stopped)
    }

    #[test]
    fn a_partition_is_prepared_once_and_again_after_any_change() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("prepared");
        let made = Cell::new(0);
        let find = |contents: &str, made_for: &str| {
            let make = |partial: &Path| {
                made.set(made.get() + 1);
                write(partial, &[7; 100_000])
            };
            find_or_make(&Prepared { dir: &dir, contents, verify: false }, "cpu_0", made_for, 1000, make).unwrap()
        };
        let found = find("a", "x");
        assert_eq!(find("a", "x"), found);
        assert_eq!(made.get(), 1);
        // With other weights or another library version the old directory is removed.
        let other = find("b", "x");
        assert_ne!(other, found);
        assert!(!found.exists());
        find("b", "y");
        assert_eq!(made.get(), 3);
        // The file is truncated.
        let found = find("b", "y");
        fs::write(found.join(WEIGHTS), [7; 50]).unwrap();
        find("b", "y");
        assert_eq!(made.get(), 4);
        // A byte within a sample changes.
        let mut bytes = fs::read(found.join(WEIGHTS)).unwrap();
        bytes[0] = 8;
        fs::write(found.join(WEIGHTS), bytes).unwrap();
        find("b", "y");
        assert_eq!(made.get(), 5);
        #[cfg(target_os = "linux")]
        {
            // The compressed regions change.
            let found = find("b", "y");
            fs::write(found.join(direct::REGION_FILES[0]), "x").unwrap();
            find("b", "y");
            assert_eq!(made.get(), 6);
        }
        // A byte between two samples changes: the new mtime causes a full hash.
        let found = find("b", "y");
        let mut bytes = vec![7; 1 << 20];
        find_or_make(&Prepared { dir: &dir, contents: "c", verify: false }, "cpu_0", "y", 1000, |partial| {
            write(partial, &bytes)
        })
        .unwrap();
        assert!(!found.exists());
        let again = |verify| {
            let mut made = false;
            let make = |partial: &Path| {
                made = true;
                write(partial, &[7; 1 << 20])
            };
            let found = find_or_make(&Prepared { dir: &dir, contents: "c", verify }, "cpu_0", "y", 1000, make).unwrap();
            (made, found)
        };
        let found = again(true).1;
        bytes[5000] = 8;
        fs::write(found.join(WEIGHTS), &bytes).unwrap();
        assert_eq!([again(false).0, again(true).0, again(true).0], [true, false, false]);
        // Also if mtime is reset, because ctime is not, where files have one.
        let mut file = File::options().write(true).open(found.join(WEIGHTS)).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        file.seek(SeekFrom::Start(5000)).unwrap();
        io::Write::write_all(&mut file, &[8]).unwrap();
        file.set_modified(modified).unwrap();
        assert!(again(cfg!(not(unix))).0);
        // A file that was only touched is hashed and the new identity sealed.
        let seal = || fs::read_to_string(found.join(SEAL)).unwrap();
        let before = seal();
        File::options().write(true).open(found.join(WEIGHTS)).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert!(!again(false).0);
        assert_ne!(seal(), before);
        assert_eq!(fs::read_dir(&found).unwrap().count(), 2 + direct::REGION_FILES.len() + 1, "there are other files");
    }

    #[test]
    fn swapped_directories_are_prepared_again() {
        let dir = tempfile::tempdir().unwrap();
        let prepared = Prepared { dir: dir.path(), contents: "a", verify: false };
        let made = Cell::new(0);
        let find = |partition: &str, byte: u8| {
            find_or_make(&prepared, partition, "x", 1000, |partial| {
                made.set(made.get() + 1);
                write(partial, &[byte; 100])
            })
            .unwrap()
        };
        let (first, second) = (find("cpu_0", 1), find("cpu_1", 2));
        let aside = dir.path().join("aside");
        fs::rename(&first, &aside).unwrap();
        fs::rename(&second, &first).unwrap();
        fs::rename(&aside, &second).unwrap();
        assert_eq!([find("cpu_0", 1), find("cpu_1", 2)], [first.clone(), second.clone()]);
        assert_eq!(made.get(), 4);
        assert_eq!([find("cpu_0", 1), find("cpu_1", 2)], [first, second]);
        assert_eq!(made.get(), 4);
    }

    #[test]
    fn failed_and_killed_preparations_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let prepared = Prepared { dir: dir.path(), contents: "a", verify: false };
        find_or_make(&prepared, "cpu_0", "x", 1000, stopped).unwrap_err();
        let names = || -> Vec<String> {
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        assert_eq!(names(), ["lock"]);
        // The directory of a killed process.
        let partial = dir.path().join(format!("{PARTIAL}cpu_7"));
        fs::create_dir(&partial).unwrap();
        fs::write(partial.join(WEIGHTS), b"half").unwrap();
        let found = find_or_make(&prepared, "cpu_0", "x", 1000, |partial| write(partial, b"weights")).unwrap();
        assert!(!partial.exists());
        // A directory without a seal is incomplete.
        fs::remove_file(found.join(SEAL)).unwrap();
        find_or_make(&prepared, "cpu_0", "x", 1000, stopped).unwrap_err();
    }

    #[test]
    fn a_write_that_the_library_could_not_do_is_an_error_with_advice() {
        let dir = tempfile::tempdir().unwrap();
        let prepared = Prepared { dir: dir.path(), contents: "a", verify: false };
        let refused = |_: &Path| {
            let cause = "Failed to write pre-packed blobs to external file".to_owned();
            Err(BackendError::Runtime { doing: "load cpu_0.onnx".to_owned(), cause })
        };
        let error = find_or_make(&prepared, "cpu_0", "x", 1000, refused).unwrap_err().to_string();
        let free = if cfg!(target_os = "linux") { "are free there" } else { "make room" };
        let advice = [free, "up to two and a half times the space of 4-bit", "make room", "`ulimit -f`"];
        for words in ["prepare the weights of cpu_0", "pre-packed"].iter().chain(&advice) {
            assert!(error.contains(words), "{words:?} is not in: {error}");
        }
    }

    #[test]
    fn concurrent_preparations_prepare_once() {
        let dir = tempfile::tempdir().unwrap();
        let made = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let prepared = Prepared { dir: dir.path(), contents: "a", verify: false };
                    find_or_make(&prepared, "cpu_0", "x", 1000, |partial| {
                        made.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        std::thread::sleep(std::time::Duration::from_millis(50));
                        write(partial, b"weights")
                    })
                    .unwrap();
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }
}
