//! A SIGBUS handler that names the mapped weight file which can no longer be read.
//!
//! Weights are mapped from their files. If such a file is truncated, or its disk fails, the next access to a lost page raises
//! SIGBUS and the process cannot continue. The handler looks the faulting address up in `/proc/self/maps` (ONNX Runtime makes the
//! mappings and they move, so a table kept here would become stale). If the mapping belongs to a registered file, the handler writes the
//! file and a hint to standard error and exits with [`EXIT`]. It passes every other SIGBUS to the previous handler.
//!
//! The handler calls `open`, `read`, `write`, `close`, `sigaction`, `sched_yield` and `_exit` only, which are safe in a signal handler, and
//! allocates nothing. (`signal-hook`, the crate for signals, forbids handlers of SIGBUS.)

use std::cell::UnsafeCell;
use std::ffi::{c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Mutex, Once, OnceLock, PoisonError};

/// Exit code of a process that lost a mapped file: EX_IOERR of `sysexits.h`.
pub(crate) const EXIT: c_int = 74;
/// Most files that can be registered. A SIGBUS in a further one goes to the previous handler.
const MAX_FILES: usize = 4096;
/// Longest line of `/proc/self/maps`: a path, and less than 100 bytes in front of it.
const LINE: usize = libc::PATH_MAX as usize + 128;

/// Paths of registered files as `/proc/self/maps` writes them. They are never freed, because the handler may read them at any time.
static REGISTERED: [AtomicPtr<Vec<u8>>; MAX_FILES] = [const { AtomicPtr::new(ptr::null_mut()) }; MAX_FILES];
/// Number of registered files; locked while one is added.
static COUNT: Mutex<usize> = Mutex::new(0);
/// The previous handler.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();
/// Buffer of the handler; one thread uses it at a time.
static SCRATCH: Scratch = Scratch { taken: AtomicBool::new(false), bytes: UnsafeCell::new([0; 2 * LINE]) };

struct Scratch {
    taken: AtomicBool,
    bytes: UnsafeCell<[u8; 2 * LINE]>,
}

// SAFETY: a thread accesses the bytes only after it changed `taken` from false to true.
unsafe impl Sync for Scratch {}

/// Registers files: from now on the handler names them. The first call installs the handler.
pub(crate) fn register<P: AsRef<Path>>(files: &[P]) {
    static INSTALL: Once = Once::new();
    INSTALL.call_once(install);
    let mut count = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
    for file in files {
        let Ok(real) = file.as_ref().canonicalize() else { continue };
        let path = as_listed(real.as_os_str().as_bytes());
        if *count < MAX_FILES && !REGISTERED[..*count].iter().any(|known| registered(known) == Some(path.as_slice())) {
            REGISTERED[*count].store(Box::into_raw(Box::new(path)), Ordering::Release);
            *count += 1;
        }
    }
}

/// A path as `/proc/self/maps` writes it: line breaks as `\012`, all other bytes unchanged.
fn as_listed(path: &[u8]) -> Vec<u8> {
    path.iter().flat_map(|byte| if *byte == b'\n' { b"\\012".to_vec() } else { vec![*byte] }).collect()
}

fn registered(slot: &AtomicPtr<Vec<u8>>) -> Option<&[u8]> {
    // SAFETY: a slot is null or points to a vector that is never changed or freed.
    unsafe { slot.load(Ordering::Acquire).as_ref() }.map(Vec::as_slice)
}

fn install() {
    // SAFETY: all zeros are a valid `sigaction`: no flags, no signals blocked, the default action.
    let (mut action, mut previous) = unsafe { std::mem::zeroed::<(libc::sigaction, libc::sigaction)>() };
    action.sa_sigaction = on_fault as extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) as usize;
    // SA_ONSTACK: the previous handler may be Rust's for stack overflows, which needs the alternate stack.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
    // SAFETY: the handler keeps to what a signal handler may do, and both structures live until the call returns.
    if unsafe { libc::sigaction(libc::SIGBUS, &action, &mut previous) } == 0 {
        let _ = PREVIOUS.set(previous);
    }
}

extern "C" fn on_fault(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // A second thread that faults waits here: either the process exits, or the buffer becomes free.
    while SCRATCH.taken.swap(true, Ordering::Acquire) {
        // SAFETY: no preconditions.
        unsafe { libc::sched_yield() };
    }
    // SAFETY: this thread set `taken`, so no other accesses the bytes; the kernel passes a valid `info`.
    let (buffer, address) = unsafe { (&mut *SCRATCH.bytes.get(), (*info).si_addr() as usize) };
    if let Some(file) = file_at(address, buffer)
        && REGISTERED.iter().map_while(registered).any(|path| is_mapping_of(file, path))
    {
        for part in [
            b"\nerror: cannot read mapped weights from ".as_slice(),
            file,
            b": the file was truncated while it was mapped, or its disk failed. Output printed so far is correct\n",
            b"hint: restore the file and run again, or make the plan again: with hpp-split --force, or if you gave a model, by the same command\n",
        ] {
            write_all(part);
        }
        // SAFETY: no preconditions; no destructors or exit handlers run.
        unsafe { libc::_exit(EXIT) };
    }
    SCRATCH.taken.store(false, Ordering::Release);
    // SAFETY: these are the arguments that the kernel passed.
    unsafe { call_previous_handler(signal, info, context) };
}

/// Whether a path from `/proc/self/maps` is this one; the kernel appends a remark to a deleted file's.
fn is_mapping_of(listed: &[u8], path: &[u8]) -> bool {
    listed.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest == b" (deleted)")
}

fn write_all(mut bytes: &[u8]) {
    while !bytes.is_empty() {
        // SAFETY: the pointer and length are those of a valid slice.
        let written = unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
        match usize::try_from(written) {
            Ok(written) if written > 0 => bytes = &bytes[written..],
            _ => return,
        }
    }
}

/// The path of the file mapped at an address, if there is one. `buffer` holds its line.
fn file_at(address: usize, buffer: &mut [u8; 2 * LINE]) -> Option<&[u8]> {
    // SAFETY: the path is NUL-terminated.
    let maps = unsafe { libc::open(c"/proc/self/maps".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC) };
    if maps < 0 {
        return None;
    }
    let found = line_of(address, maps, buffer);
    // SAFETY: this function opened the descriptor and uses it no more.
    unsafe { libc::close(maps) };
    let line = &buffer[found?];
    let slash = line.iter().position(|byte| *byte == b'/')?;
    Some(&line[slash..])
}

/// The range of `buffer` with the line of `/proc/self/maps` that covers an address, without its line break.
fn line_of(address: usize, maps: c_int, buffer: &mut [u8; 2 * LINE]) -> Option<std::ops::Range<usize>> {
    let mut filled = 0;
    loop {
        let rest = &mut buffer[filled..];
        // SAFETY: the pointer and length are those of a valid slice.
        let read = unsafe { libc::read(maps, rest.as_mut_ptr().cast(), rest.len()) };
        filled += usize::try_from(read).ok().filter(|read| *read > 0)?;
        let mut begin = 0;
        while let Some(length) = buffer[begin..filled].iter().position(|byte| *byte == b'\n') {
            if covers(&buffer[begin..begin + length], address) {
                return Some(begin..begin + length);
            }
            begin += length + 1;
        }
        if begin == 0 && filled == buffer.len() {
            return None;
        }
        buffer.copy_within(begin..filled, 0);
        filled -= begin;
    }
}

/// Whether a line of `/proc/self/maps` (`start-end ...`, hexadecimal) covers an address.
fn covers(line: &[u8], address: usize) -> bool {
    let number = |digits: &[u8]| {
        digits.iter().try_fold(0usize, |sum, digit| Some(sum << 4 | char::from(*digit).to_digit(16)? as usize))
    };
    let mut ends = line.split(|byte| *byte == b' ').next().unwrap_or_default().splitn(2, |byte| *byte == b'-');
    let (Some(start), Some(end)) = (ends.next().and_then(number), ends.next().and_then(number)) else { return false };
    (start..end).contains(&address)
}

/// Calls the previous handler; the default action if there is none.
///
/// # Safety
/// The arguments must be those the kernel passed to this handler.
unsafe fn call_previous_handler(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.get().filter(|previous| ![libc::SIG_DFL, libc::SIG_IGN].contains(&previous.sa_sigaction));
    match previous {
        None => {
            // SAFETY: no preconditions. The access is repeated when this handler returns, and then kills the process.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Some(previous) if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with SA_SIGINFO the handler is a function of three arguments.
            let handler = unsafe {
                std::mem::transmute::<usize, extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void)>(
                    previous.sa_sigaction,
                )
            };
            handler(signal, info, context);
        }
        Some(previous) => {
            // SAFETY: without SA_SIGINFO the handler is a function of the signal number alone.
            let handler = unsafe { std::mem::transmute::<usize, extern "C" fn(c_int)>(previous.sa_sigaction) };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;
    use std::process::{Command, Output};

    /// Set in a child process that will fault: the file to truncate.
    const FAULT: &str = "HPP_TEST_FAULT";

    /// Runs [`faults`] in a process of its own.
    fn process_that_faults(file: &Path, registered: bool) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "sigbus::tests::faults", "--nocapture", "--test-threads", "1"]);
        command.env(FAULT, file).env("HPP_TEST_REGISTERED", if registered { "1" } else { "0" });
        command.output().unwrap()
    }

    /// The child process: maps a file, truncates it, reads the mapping.
    #[test]
    fn faults() {
        let Some(path) = std::env::var_os(FAULT) else { return };
        std::fs::write(&path, vec![7; 100_000]).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        // SAFETY: this test wants the fault that truncating the file causes.
        let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
        let others = tempfile::NamedTempFile::new().unwrap();
        register(&[others.path()]);
        if std::env::var("HPP_TEST_REGISTERED").unwrap() == "1" {
            register(&[&path, &path]);
        }
        std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(5000).unwrap();
        let sum: u64 = map.iter().map(|byte| u64::from(*byte)).sum();
        println!("read {sum}");
    }

    #[test]
    fn a_truncated_file_that_is_registered_is_named() {
        let dir = tempfile::tempdir().unwrap();
        // /proc/self/maps escapes line breaks.
        let path = dir.path().canonicalize().unwrap().join("the weights\nof a model");
        let done = process_that_faults(&path, true);
        let stderr = String::from_utf8_lossy(&done.stderr);
        assert_eq!(done.status.code(), Some(EXIT), "{stderr}");
        let listed = path.to_str().unwrap().replace('\n', "\\012");
        for word in [&*listed, "error: cannot read mapped weights", "truncated", "hint: restore the file"] {
            assert!(stderr.contains(word), "{word:?} is not in {stderr}");
        }
    }

    #[test]
    fn the_previous_handler_gets_all_other_faults() {
        let dir = tempfile::tempdir().unwrap();
        let done = process_that_faults(&dir.path().join("other"), false);
        assert_eq!(done.status.signal(), Some(libc::SIGBUS), "{done:?}");
        assert!(!String::from_utf8_lossy(&done.stderr).contains("hint:"), "{done:?}");
    }

    #[test]
    fn file_at_finds_the_mapped_file() {
        let line = b"7f0000001000-7f0000004000 rw-p 00002000 fe:00 12   /a dir/model.data";
        assert!(covers(line, 0x7f00_0000_1000) && covers(line, 0x7f00_0000_3fff));
        assert!(!covers(line, 0x7f00_0000_4000) && !covers(line, 0x7f00_0000_0fff) && !covers(b"nonsense", 0));
        let mut buffer = [0; 2 * LINE];
        assert_eq!(file_at(buffer.as_ptr() as usize, &mut buffer), None, "the stack is not a file");
        let code = file_at(covers as fn(&[u8], usize) -> bool as usize, &mut buffer).unwrap().to_vec();
        assert_eq!(code, std::env::current_exe().unwrap().as_os_str().as_bytes());
    }

    #[test]
    fn a_deleted_file_is_still_recognised() {
        assert!(is_mapping_of(b"/a/b", b"/a/b") && is_mapping_of(b"/a/b (deleted)", b"/a/b"));
        assert!(!is_mapping_of(b"/a/bc", b"/a/b") && !is_mapping_of(b"/a", b"/a/b"));
    }
}
