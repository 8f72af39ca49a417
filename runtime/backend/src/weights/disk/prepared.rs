//! Partitions with their weights laid out as kernels want them, on disk beside the plan.
//!
//! ONNX Runtime writes such a file itself (`session.save_external_prepacked_constant_initializers`) and maps it back without
//! copying. Beside it is what of it is stored densely. Making one takes seconds and as much disk as the partition's weights twice, so each is made once, aside, and moved
//! into place when it is whole: a directory that has its seal is complete, whatever happened meanwhile. One process makes them
//! at a time; others wait and then find them made.

use super::align::align;
use super::compressed;
use hpp_engine::BackendError;
use hpp_engine::port::Prepared;
use hpp_schema::{ByteSize, FileIdentity};
use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};
use tracing::info;

/// The graph.
pub(crate) const MODEL: &str = "model.onnx";
/// Its weights as ONNX Runtime writes them.
pub(crate) const UNALIGNED: &str = "unaligned";
/// Its weights, each at an address its kernel expects.
pub(crate) const WEIGHTS: &str = "model.onnx.data";
/// What is made from others' weights.
const FILES: [&str; 4] = [MODEL, WEIGHTS, compressed::COMPRESSED_FILE, compressed::REGIONS_FILE];
/// What they must be: written last.
const SEAL: &str = "seal";
/// Changes when what is written changes.
const FORMAT: &str = "hpp-prepared-7";
/// Directories not yet whole begin so.
const PARTIAL: &str = ".partial-";
/// Bytes that can be written where a disk is not full.
const MORE: usize = 1 << 20;
/// Samples of a file that its seal has.
const SAMPLES: u64 = 64;
/// Longer than a step of the clock from which most file systems take times.
const TICK: Duration = Duration::from_millis(25);

/// Finds a prepared partition, or has it made by `make` in the directory it is given. `made_for` is everything beside the
/// plan's contents that the layout depends on: the library's version, the processor.
pub(crate) fn find_or_make(
    prepared: &Prepared<'_>,
    partition: &str,
    made_for: &str,
    make: impl FnOnce(&Path) -> Result<(), BackendError>,
) -> Result<PathBuf, BackendError> {
    let key = blake3::hash(format!("{FORMAT}\n{made_for}\n{}", prepared.contents).as_bytes()).to_hex();
    let place = prepared.dir.join(format!("{partition}-{}", &key[..16]));
    if is_whole(&place, prepared.verify) {
        info!(partition, path = %place.display(), "prepared weights found");
        return Ok(place);
    }
    let failed = |doing: String| move |error: io::Error| BackendError::Runtime { doing, cause: error.to_string() };
    let preparing = || format!("prepare the weights of {partition} in {}", prepared.dir.display());
    fs::create_dir_all(prepared.dir).map_err(failed(preparing()))?;
    let lock = File::create(prepared.dir.join("lock")).map_err(failed(preparing()))?;
    lock.lock().map_err(failed(preparing()))?;
    if is_whole(&place, prepared.verify) {
        return Ok(place);
    }
    // With the lock held, whatever is not whole was left by a process that is gone.
    sweep(prepared.dir, |name| name.starts_with(PARTIAL) || name.starts_with(&format!("{partition}-")))
        .map_err(failed(preparing()))?;
    let started = Instant::now();
    let partial = prepared.dir.join(format!("{PARTIAL}{partition}"));
    fs::create_dir(&partial).map_err(failed(preparing()))?;
    let finish = || {
        let pieces = align(&partial.join(MODEL), &partial.join(UNALIGNED), &partial.join(WEIGHTS))?;
        fs::remove_file(partial.join(UNALIGNED))?;
        compressed::make(&partial.join(WEIGHTS), &pieces, &partial)?;
        seal(&partial, &place)?;
        fs::rename(&partial, &place)
    };
    let made = make(&partial).and_then(|()| finish().map_err(failed(preparing())));
    if let Err(error) = made {
        let full = no_room(&partial);
        drop(fs::remove_dir_all(&partial));
        return Err(full.map_or(error, |cause| BackendError::Runtime { doing: preparing(), cause }));
    }
    info!(partition, path = %place.display(), ms = started.elapsed().as_millis(), "prepared weights made");
    Ok(place)
}

/// Why no more can be written there, where that is so: ONNX Runtime says only that it could not.
fn no_room(partial: &Path) -> Option<String> {
    let error = fs::write(partial.join("more"), vec![1; MORE]).err()?;
    let free = free_space(partial).map_or(String::new(), |free| format!("; {} are free there", ByteSize(free).human()));
    Some(format!(
        "{error}{free}. Weights laid out anew take about as much as the model's own files: make room, or put the plan on another \
         disk (hpp-split --out)"
    ))
}

/// Bytes that may still be written on the disk that holds a folder.
fn free_space(folder: &Path) -> Option<u64> {
    let path = CString::new(folder.as_os_str().as_bytes()).ok()?;
    let mut found = std::mem::MaybeUninit::<libc::statvfs>::zeroed();
    // SAFETY: a path that ends with a zero, and room for the answer, of which all zeros are a valid one.
    let found = unsafe { (libc::statvfs(path.as_ptr(), found.as_mut_ptr()) == 0).then(|| found.assume_init()) }?;
    Some(found.f_bavail * found.f_frsize)
}

/// Removes directories whose names are so.
fn sweep(dir: &Path, is_so: impl Fn(&str) -> bool) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(&is_so) && entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
}

/// The first line of a seal: the directory's name, which says what it was made for. One that was moved to the place of another is not
/// what belongs there.
fn title(place: &Path) -> String {
    format!("{}\n", place.file_name().unwrap_or_default().to_string_lossy())
}

/// Writes everything to the disk, then the seal for the place where it will lie, and does not keep in memory what was written.
fn seal(partial: &Path, place: &Path) -> io::Result<()> {
    let lines = FILES.map(|name| {
        let mut file = File::open(partial.join(name))?;
        file.sync_all()?;
        let found = identity(&file)?;
        let line = format!("{}{}{found}\n", describe(&mut file, name)?, whole(&mut file)?);
        crate::os::forget(&file, 0, 0);
        Ok(line)
    });
    let lines: Vec<String> = lines.into_iter().collect::<io::Result<_>>()?;
    fs::write(partial.join(SEAL), title(place) + &lines.concat())
}

/// The identity of a file, once a later write is sure to change it; `-` if the file system's clock is too coarse to wait for that.
fn identity(file: &File) -> io::Result<String> {
    for _ in 0..2 {
        let found = FileIdentity::of(&file.metadata()?);
        if found.is_settled(SystemTime::now()) {
            return Ok(found.to_string());
        }
        std::thread::sleep(TICK);
    }
    Ok("-".to_owned())
}

/// Whether a directory's files equal its seal. Hashes samples, and whole files on request or if a file's identity is not the sealed one
/// because somebody wrote to the file or copied it.
fn is_whole(place: &Path, every_byte: bool) -> bool {
    let found = || -> io::Result<bool> {
        let sealed = fs::read_to_string(place.join(SEAL))?;
        let mut sealed = sealed.lines();
        if sealed.next() != Some(title(place).trim_end()) {
            return Ok(false);
        }
        let (mut now, mut has_news) = (title(place), false);
        for name in FILES {
            let mut file = File::open(place.join(name))?;
            let (found, description) = (identity(&file)?, describe(&mut file, name)?);
            let (same, hash) = (sealed.next() == Some(description.trim_end()), sealed.next());
            let is_known = sealed.next() == Some(found.as_str()) && found != "-";
            let Some(hash) = hash.filter(|_| same) else { return Ok(false) };
            if every_byte || !is_known {
                if hash != whole(&mut file)?.trim_end() {
                    return Ok(false);
                }
                crate::os::forget(&file, 0, 0);
            }
            has_news |= !is_known;
            now += &format!("{description}{hash}\n{found}\n");
        }
        if has_news {
            note(place, &now);
        }
        Ok(true)
    };
    found().unwrap_or(false)
}

/// Replaces the seal atomically. If that fails, the next start hashes the whole files again.
fn note(place: &Path, seal: &str) {
    let partial = place.join(format!("{PARTIAL}{SEAL}-{}", std::process::id()));
    let written = fs::write(&partial, seal).and_then(|()| fs::rename(&partial, place.join(SEAL)));
    if written.is_err() {
        drop(fs::remove_file(&partial));
    }
}

/// A hash of all of a file.
fn whole(file: &mut File) -> io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; MORE];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(format!("{}\n", hasher.finalize().to_hex())),
            size => hasher.update(&buffer[..size]),
        };
    }
}

/// A file's name, length and a hash of evenly spaced samples.
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

    fn write(place: &Path, weights: &[u8]) -> Result<(), BackendError> {
        // A model without any weights but one: `weights` from their beginning.
        fs::write(place.join(MODEL), super::super::align::tests::refers_to(UNALIGNED, weights.len())).unwrap();
        fs::write(place.join(UNALIGNED), weights).unwrap();
        Ok(())
    }

    fn stopped(_: &Path) -> Result<(), BackendError> {
        Err(BackendError::Stopped)
    }

    #[test]
    fn each_is_made_once_and_again_when_anything_changes() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().join("prepared");
        let made = Cell::new(0);
        let find = |contents: &str, made_for: &str| {
            let make = |place: &Path| {
                made.set(made.get() + 1);
                write(place, &[7; 100_000])
            };
            find_or_make(&Prepared { dir: &dir, contents, verify: false }, "cpu_0", made_for, make).unwrap()
        };
        let place = find("a", "x");
        assert_eq!(find("a", "x"), place);
        assert_eq!(made.get(), 1);
        // Other weights, another library: the old ones are of no use any more.
        let other = find("b", "x");
        assert_ne!(other, place);
        assert!(!place.exists());
        find("b", "y");
        assert_eq!(made.get(), 3);
        // Somebody cuts the file short.
        let place = find("b", "y");
        fs::write(place.join(WEIGHTS), [7; 50]).unwrap();
        find("b", "y");
        assert_eq!(made.get(), 4);
        // Somebody writes to it: a sample shows it.
        let mut bytes = fs::read(place.join(WEIGHTS)).unwrap();
        bytes[0] = 8;
        fs::write(place.join(WEIGHTS), bytes).unwrap();
        find("b", "y");
        assert_eq!(made.get(), 5);
        // Somebody writes to what is stored densely.
        let place = find("b", "y");
        fs::write(place.join(compressed::COMPRESSED_FILE), "x").unwrap();
        find("b", "y");
        assert_eq!(made.get(), 6);
        // Between two samples: the new mtime causes a full hash.
        let place = find("b", "y");
        let mut bytes = vec![7; 1 << 20];
        find_or_make(&Prepared { dir: &dir, contents: "c", verify: false }, "cpu_0", "y", |place| write(place, &bytes))
            .unwrap();
        assert!(!place.exists());
        let again = |verify| {
            let mut made = false;
            let make = |place: &Path| {
                made = true;
                write(place, &[7; 1 << 20])
            };
            let place = find_or_make(&Prepared { dir: &dir, contents: "c", verify }, "cpu_0", "y", make).unwrap();
            (made, place)
        };
        let place = again(true).1;
        bytes[5000] = 8;
        fs::write(place.join(WEIGHTS), &bytes).unwrap();
        assert_eq!([again(false).0, again(true).0, again(true).0], [true, false, false]);
        // Also if mtime is reset, because ctime is not.
        let file = File::options().write(true).open(place.join(WEIGHTS)).unwrap();
        let modified = file.metadata().unwrap().modified().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[8], 5000).unwrap();
        file.set_modified(modified).unwrap();
        assert!(again(false).0);
        // A file that was only touched is hashed and the new identity sealed.
        let seal = || fs::read_to_string(place.join(SEAL)).unwrap();
        let before = seal();
        File::options().write(true).open(place.join(WEIGHTS)).unwrap().set_modified(SystemTime::UNIX_EPOCH).unwrap();
        assert!(!again(false).0);
        assert_ne!(seal(), before);
        assert_eq!(fs::read_dir(&place).unwrap().count(), FILES.len() + 1, "nothing else is left");
    }

    #[test]
    fn directories_that_were_swapped_are_made_again() {
        let dir = tempfile::tempdir().unwrap();
        let prepared = Prepared { dir: dir.path(), contents: "a", verify: false };
        let made = Cell::new(0);
        let find = |partition: &str, byte: u8| {
            find_or_make(&prepared, partition, "x", |place| {
                made.set(made.get() + 1);
                write(place, &[byte; 100])
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
    fn what_fails_leaves_nothing_and_what_was_killed_is_swept_up() {
        let dir = tempfile::tempdir().unwrap();
        let prepared = Prepared { dir: dir.path(), contents: "a", verify: false };
        find_or_make(&prepared, "cpu_0", "x", stopped).unwrap_err();
        let names = || -> Vec<String> {
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
        };
        assert_eq!(names(), ["lock"]);
        // A process that was killed half way.
        let partial = dir.path().join(format!("{PARTIAL}cpu_7"));
        fs::create_dir(&partial).unwrap();
        fs::write(partial.join(WEIGHTS), b"half").unwrap();
        let place = find_or_make(&prepared, "cpu_0", "x", |place| write(place, b"weights")).unwrap();
        assert!(!partial.exists());
        // A directory without its seal is not whole, whatever is in it.
        fs::remove_file(place.join(SEAL)).unwrap();
        find_or_make(&prepared, "cpu_0", "x", stopped).unwrap_err();
    }

    #[test]
    fn two_processes_make_it_once() {
        let dir = tempfile::tempdir().unwrap();
        let made = std::sync::atomic::AtomicU32::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let prepared = Prepared { dir: dir.path(), contents: "a", verify: false };
                    find_or_make(&prepared, "cpu_0", "x", |place| {
                        made.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                        std::thread::sleep(std::time::Duration::from_millis(50));
                        write(place, b"weights")
                    })
                    .unwrap();
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
    }
}
