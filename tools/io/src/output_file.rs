//! Result files. A regular or new file is written atomically; a device, a pipe or an open descriptor is written
//! through.

use std::fs::{self, File, Metadata, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use tempfile::NamedTempFile;

/// Why an existing file is not replaced.
const OTHER_KIND: &str = "it exists and is another kind of file, which is not overwritten; choose another name";

/// Suffix of temporary files.
const PARTIAL: &str = ".partial";

/// Maximum length of a chain of symbolic links, as in Linux.
const MAX_LINKS: usize = 40;

/// The reason why a file could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}", path.display())]
pub struct FileWriteError {
    /// The file, as the user named it.
    pub path: PathBuf,
    /// The cause.
    pub source: io::Error,
}

/// A result under construction. If dropped before [`finish`](Self::finish), it leaves no file.
pub struct OutputFile {
    /// The path as the user gave it.
    path: PathBuf,
    sink: Sink,
}

enum Sink {
    /// A temporary file in the target's directory, renamed over the target at the end.
    Replace { temporary: NamedTempFile, target: PathBuf },
    /// A temporary file, copied to the stream at the end: a pipe does not support seeking, and a failed run must send
    /// nothing.
    Stream { collected: File, into: File },
}

impl OutputFile {
    /// Begins a result for `path`. Fails here, not at the end, if the path cannot be written.
    pub fn create(path: &Path) -> Result<Self, FileWriteError> {
        let error = |source| FileWriteError { path: path.to_owned(), source };
        Ok(Self { path: path.to_owned(), sink: sink(path).map_err(error)? })
    }

    /// Like [`create`](Self::create), but replaces an existing file only if it begins with `start`, as every result of this kind does. So a
    /// mistyped path cannot overwrite a model or a plan.
    pub fn create_as(path: &Path, start: &[u8]) -> Result<Self, FileWriteError> {
        check_replaceable(path, start)?;
        Self::create(path)
    }

    /// The temporary file to write to; it supports seeking.
    pub fn file(&mut self) -> &mut File {
        match &mut self.sink {
            Sink::Replace { temporary, .. } => temporary.as_file_mut(),
            Sink::Stream { collected, .. } => collected,
        }
    }

    /// The path, as the user gave it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Flushes the result to disk and renames it, or copies it to the stream.
    pub fn finish(self) -> Result<(), FileWriteError> {
        let path = self.path;
        deliver(self.sink).map_err(|source| FileWriteError { path, source })
    }
}

/// Writes a complete result.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), FileWriteError> {
    let mut file = OutputFile::create(path)?;
    if let Err(source) = file.file().write_all(bytes) {
        return Err(FileWriteError { path: path.to_owned(), source });
    }
    file.finish()
}

/// Like [`write_file`], but see [`OutputFile::create_as`].
pub fn write_file_as(path: &Path, bytes: &[u8], start: &[u8]) -> Result<(), FileWriteError> {
    check_replaceable(path, start)?;
    write_file(path, bytes)
}

/// Refuses a file that [`OutputFile::create_as`] would not replace, before work that takes long.
pub fn check_replaceable(path: &Path, start: &[u8]) -> Result<(), FileWriteError> {
    if !path.is_file() || is_stream(path) {
        return Ok(());
    }
    let mut found = Vec::new();
    let read = File::open(path).and_then(|file| file.take(start.len() as u64).read_to_end(&mut found));
    match read {
        Ok(_) if found.is_empty() || found == start => Ok(()),
        Ok(_) => Err(FileWriteError { path: path.to_owned(), source: io::Error::other(OTHER_KIND) }),
        // What kind of file this is cannot be known without reading it.
        Err(source) => Err(FileWriteError { path: path.to_owned(), source }),
    }
}

/// Refuses a path where no file can be created, before work that takes long. Creates a temporary file there and removes it; opens no
/// stream.
pub fn check_creatable(path: &Path) -> Result<(), FileWriteError> {
    if is_stream(path) { Ok(()) } else { OutputFile::create(path).map(drop) }
}

/// Whether the path names a stream: a device, a pipe or an open descriptor.
pub fn is_stream(path: &Path) -> bool {
    matches!(destination(path), Ok(Destination::Stream(_)))
}

/// The target of a chain of symbolic links, even if it does not exist. Returns any other path unchanged.
pub fn resolve_link(path: &Path) -> io::Result<PathBuf> {
    let mut at = path.to_owned();
    for _ in 0..MAX_LINKS {
        if !fs::symlink_metadata(&at).is_ok_and(|m| m.is_symlink()) {
            return Ok(at);
        }
        at = directory(&at).join(fs::read_link(&at)?);
    }
    Err(io::Error::other("too many symbolic links lead from one to the next"))
}

/// Whether both paths lead to one file, which may not exist yet. Devices and pipes are never one file: each may be written twice.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    let real = |path: &Path| {
        let at = resolve_link(path).ok()?;
        let is_file = fs::metadata(&at).map_or(true, |metadata| metadata.is_file());
        let name = at.file_name().filter(|_| is_file)?;
        Some(directory(&at).canonicalize().ok()?.join(name))
    };
    real(a).is_some_and(|a| real(b) == Some(a))
}

fn sink(path: &Path) -> io::Result<Sink> {
    match destination(path)? {
        Destination::Stream(into) => Ok(Sink::Stream { collected: tempfile::tempfile()?, into: into.open(path)? }),
        Destination::File(target) => Ok(Sink::Replace { temporary: temporary_beside(&target)?, target }),
    }
}

fn deliver(sink: Sink) -> io::Result<()> {
    match sink {
        Sink::Replace { temporary, target } => {
            temporary.as_file().sync_all()?;
            temporary.persist(&target).map(drop).map_err(|e| e.error)
        }
        Sink::Stream { mut collected, mut into } => {
            collected.seek(SeekFrom::Start(0))?;
            io::copy(&mut collected, &mut into)?;
            into.flush()
        }
    }
}

enum Destination {
    /// A regular or new file, with links resolved.
    File(PathBuf),
    /// A stream to write through.
    Stream(Stream),
}

enum Stream {
    /// A device node or a descriptor, to be opened.
    Node,
    /// A regular file that is this process's stdout or stderr: replacing it would lose other output.
    Standard(File),
}

impl Stream {
    fn open(self, path: &Path) -> io::Result<File> {
        match self {
            // Append, to keep the contents if the descriptor is of a regular file.
            Stream::Node => File::options().append(true).open(path),
            Stream::Standard(file) => Ok(file),
        }
    }
}

fn destination(path: &Path) -> io::Result<Destination> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        // A new file, or a link to one.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Destination::File(resolve_link(path)?)),
        Err(error) => return Err(not_created(&error, directory(path))),
    };
    if metadata.is_dir() {
        return Err(io::Error::new(io::ErrorKind::IsADirectory, "it is a directory"));
    }
    if let Some(file) = standard_stream(&metadata) {
        return Ok(Destination::Stream(Stream::Standard(file)));
    }
    if !metadata.is_file() || is_descriptor(path)? {
        return Ok(Destination::Stream(Stream::Node));
    }
    Ok(Destination::File(resolve_link(path)?))
}

/// Standard output or standard error, if this is its file. The duplicate shares the offset, so nothing is overwritten.
#[cfg(unix)]
fn standard_stream(metadata: &Metadata) -> Option<File> {
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;
    let (out, err) = (io::stdout(), io::stderr());
    let own = [out.as_fd(), err.as_fd()].map(|fd| fd.try_clone_to_owned().map(File::from));
    let same = |m: Metadata| (m.dev(), m.ino()) == (metadata.dev(), metadata.ino());
    own.into_iter().flatten().find(|file| file.metadata().is_ok_and(same))
}

#[cfg(not(unix))]
fn standard_stream(_: &Metadata) -> Option<File> {
    None
}

/// Whether a path goes through `/dev/fd` or `/proc/PID/fd`, and so names an open descriptor.
fn is_descriptor(path: &Path) -> io::Result<bool> {
    let mut at = path.to_owned();
    for _ in 0..MAX_LINKS {
        if !fs::symlink_metadata(&at)?.is_symlink() {
            return Ok(false);
        }
        let parent = fs::canonicalize(directory(&at))?;
        if parent.starts_with("/proc") && parent.ends_with("fd") {
            return Ok(true);
        }
        at = directory(&at).join(fs::read_link(&at)?);
    }
    Ok(false)
}

fn directory(path: &Path) -> &Path {
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A locked temporary file in the target's directory. The lock ends with the process, so a file with a free lock is
/// abandoned.
fn temporary_beside(target: &Path) -> io::Result<NamedTempFile> {
    let name = target.file_name().unwrap_or_default().to_string_lossy();
    let prefix = format!(".{name}.hpp-");
    remove_abandoned(directory(target), &prefix);
    let mut builder = tempfile::Builder::new();
    builder.prefix(&prefix).suffix(PARTIAL);
    ordinary_permissions(&mut builder);
    loop {
        let temporary =
            builder.tempfile_in(directory(target)).map_err(|error| not_created(&error, directory(target)))?;
        // Another process may remove the file as abandoned before it is locked; then try again. On a file system
        // without locks, no process removes abandoned files.
        let is_taken = matches!(temporary.as_file().try_lock(), Err(TryLockError::WouldBlock));
        if is_taken || !temporary.path().exists() {
            continue;
        }
        if let Ok(before) = fs::metadata(target) {
            temporary.as_file().set_permissions(before.permissions())?;
        }
        return Ok(temporary);
    }
}

/// Why no file can be created in a directory. The original error names the temporary file, which the user does not know.
fn not_created(error: &io::Error, directory: &Path) -> io::Error {
    let place = directory.display();
    let why = match error.kind() {
        // Some directories that exist, such as /proc, give this error too.
        io::ErrorKind::NotFound if !directory.exists() => {
            format!("there is no directory {place}: create it, or give another path")
        }
        io::ErrorKind::NotADirectory => format!("{place} is not a directory: give another path"),
        _ => {
            let text = error.to_string();
            let system = text.split_once(" at path ").map_or(text.as_str(), |(system, _)| system);
            format!("no file can be created in {place}: {system}")
        }
    };
    io::Error::new(error.kind(), why)
}

/// Removes temporary files that killed processes left for the same target.
fn remove_abandoned(directory: &Path, prefix: &str) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let is_ours = name.to_str().is_some_and(|name| name.starts_with(prefix) && name.ends_with(PARTIAL));
        if is_ours && File::open(entry.path()).is_ok_and(|file| file.try_lock().is_ok()) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Gives a temporary file the permissions of any new file: by default only the owner could read it.
#[cfg(unix)]
fn ordinary_permissions(builder: &mut tempfile::Builder<'_, '_>) {
    use std::os::unix::fs::PermissionsExt;
    builder.permissions(fs::Permissions::from_mode(0o666));
}

#[cfg(not(unix))]
fn ordinary_permissions(_: &mut tempfile::Builder<'_, '_>) {}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(unix)]
    use std::process::Command;

    #[cfg(unix)]
    #[test]
    fn paths_to_one_file_are_the_same_file_before_it_exists_too() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        let path = |name: &str| dir.path().join(name);
        std::os::unix::fs::symlink(path("a"), path("link")).unwrap();
        for exists in [false, true] {
            if exists {
                fs::write(path("a"), "").unwrap();
            }
            for other in ["a", "./a", "sub/../a", "link"] {
                assert!(is_same_file(&path("a"), &path(other)) && is_same_file(&path(other), &path("a")), "{other}");
            }
            assert!(!is_same_file(&path("a"), &path("b")) && !is_same_file(&path("a"), &path("sub/a")));
        }
        assert!(!is_same_file(Path::new("/dev/null"), Path::new("/dev/null")));
        assert!(is_same_file(Path::new("no-such-file"), Path::new("./no-such-file")));
    }

    #[test]
    fn a_file_of_another_kind_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("result.npy");
        for (before, is_replaced) in [("", true), ("NPY one", true), ("NP", false), ("model", false)] {
            fs::write(&path, before).unwrap();
            let written = write_file_as(&path, b"NPY two", b"NPY");
            assert_eq!(written.is_ok(), is_replaced, "{before}");
            assert_eq!(OutputFile::create_as(&path, b"NPY").is_ok(), is_replaced, "{before}");
            assert_eq!(fs::read_to_string(&path).unwrap(), if is_replaced { "NPY two" } else { before });
        }
        write_file_as(&dir.path().join("new.npy"), b"NPY", b"NPY").unwrap();
    }

    #[test]
    fn nothing_appears_until_the_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let mut file = OutputFile::create(&path).unwrap();
        file.file().write_all(b"half").unwrap();
        assert!(!path.exists());
        drop(file);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        write_file(&path, b"whole").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"whole");
    }

    #[test]
    fn files_of_killed_processes_are_removed_with_the_next_result_of_that_name() {
        let dir = tempfile::tempdir().unwrap();
        let abandoned = dir.path().join(".x.hpp-abc123.partial");
        let foreign = dir.path().join(".y.hpp-abc123.partial");
        fs::write(&abandoned, "half").unwrap();
        fs::write(&foreign, "half").unwrap();
        let path = dir.path().join("x");
        let mut first = OutputFile::create(&path).unwrap();
        assert!(!abandoned.exists() && foreign.exists());
        write_file(&path, b"second").unwrap();
        first.file().write_all(b"first").unwrap();
        first.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"first", "a file in use stays");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 2);
    }

    #[test]
    fn directories_and_missing_ones_are_named() {
        let dir = tempfile::tempdir().unwrap();
        let (missing, file) = (dir.path().join("no/such/x.npy"), dir.path().join("file"));
        fs::write(&file, "x").unwrap();
        let no_directory = format!("there is no directory {}: create it", dir.path().join("no/such").display());
        let no_file = format!("{} is not a directory", file.display());
        for (path, why) in
            [(missing.as_path(), no_directory.as_str()), (dir.path(), "it is a directory"), (&file.join("x"), &no_file)]
        {
            let error = OutputFile::create(path).err().unwrap();
            assert_eq!(check_creatable(path).unwrap_err().source.to_string(), error.source.to_string());
            assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
            assert!(error.source.to_string().contains(why), "{error:?}");
        }
        assert!(!is_stream(&missing) && !is_stream(dir.path()));
        check_creatable(&dir.path().join("new")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left of the check");
    }

    /// Nobody may create a file there, not even root.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_directory_without_new_files_is_named_and_no_temporary_file() {
        let error = OutputFile::create(Path::new("/proc/x.npy")).err().unwrap();
        assert_eq!(error.to_string(), "cannot write /proc/x.npy");
        let why = error.source.to_string();
        assert!(why.starts_with("no file can be created in /proc: ") && !why.contains(PARTIAL), "{why}");
    }

    #[cfg(unix)]
    #[test]
    fn links_stay_and_what_they_lead_to_is_replaced() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("sub")).unwrap();
        let (file, link, chain) = (dir.path().join("sub/file"), dir.path().join("link"), dir.path().join("sub/chain"));
        symlink("sub/file", &link).unwrap();
        symlink("../link", &chain).unwrap();
        // First the target does not exist, then it is a private file.
        for text in ["new", "newer"] {
            write_file(&chain, text.as_bytes()).unwrap();
            assert!(
                fs::symlink_metadata(&link).unwrap().is_symlink() && fs::symlink_metadata(&chain).unwrap().is_symlink()
            );
            assert!(fs::symlink_metadata(&file).unwrap().is_file());
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        }
        write_file(&link, b"newest").unwrap();
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600, "permissions stay");
        let around = dir.path().join("around");
        symlink("around", &around).unwrap();
        assert!(write_file(&around, b"x").is_err());
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_gets_a_whole_result_and_stays_a_pipe() {
        use std::os::unix::fs::FileTypeExt;
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        assert!(is_stream(&pipe));
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || fs::read_to_string(pipe).unwrap()
        });
        let mut file = OutputFile::create(&pipe).unwrap();
        file.file().write_all(b"__ of it").unwrap();
        // Writing a result may seek back, which a pipe does not support.
        file.file().seek(SeekFrom::Start(0)).unwrap();
        file.file().write_all(b"all").unwrap();
        file.finish().unwrap();
        assert_eq!(reader.join().unwrap(), "allof it");
        assert!(fs::symlink_metadata(&pipe).unwrap().file_type().is_fifo());
    }

    /// Creates its own device nodes: run as root, a bug must not replace those of the machine.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_device_is_written_through() {
        use std::os::unix::fs::{FileTypeExt, symlink};
        let dir = tempfile::tempdir().unwrap();
        let node = |name: &str, minor: &str| {
            let path = dir.path().join(name);
            let made = Command::new("mknod").arg(&path).args(["c", "1", minor]).output().unwrap().status.success();
            // Only root makes device nodes, and not every file system lets them be opened.
            (made && File::options().write(true).open(&path).is_ok()).then_some(path)
        };
        let (Some(null), Some(full)) = (node("null", "3"), node("full", "7")) else { return };
        let link = dir.path().join("link");
        symlink("null", &link).unwrap();
        write_file(&null, b"gone").unwrap();
        write_file(&link, b"gone").unwrap();
        assert_eq!(write_file(&full, b"x").unwrap_err().source.kind(), io::ErrorKind::StorageFull);
        for path in [&null, &full] {
            assert!(fs::symlink_metadata(path).unwrap().file_type().is_char_device());
        }
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn an_open_descriptor_of_a_file_is_appended_to() {
        use std::os::fd::AsRawFd;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        fs::write(&path, "before ").unwrap();
        let open = File::options().append(true).open(&path).unwrap();
        write_file(Path::new(&format!("/dev/fd/{}", open.as_raw_fd())), b"after").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "before after");
    }
}
