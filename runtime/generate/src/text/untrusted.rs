//! Limits for work on files of a model: tokenizers and chat templates come with a model and may be broken or hostile.
//!
//! The work runs on a thread with its own stack. A panic becomes an error. The caller abandons the thread when it exceeds
//! its time or memory. A thread cannot be stopped from outside: an abandoned one runs until its work ends, which may be never.
//! While [`MOST_ABANDONED`] of them run, no more work is begun.

use std::cell::Cell;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Once};
use std::thread;
use std::time::{Duration, Instant};

/// Parsers and destructors recurse as deep as their input nests. Stack pages that are never touched cost no memory.
const STACK_BYTES: usize = 512 << 20;

/// Interval between two checks of time and memory.
const CHECK_INTERVAL: Duration = Duration::from_millis(2);

/// Abandoned threads that may run at a time; each may have taken a gigabyte and takes a processor.
const MOST_ABANDONED: usize = 4;

/// Upper limits of one piece of work.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TextLimits {
    /// Wall-clock time.
    pub time: Duration,
    /// Bytes by which the process's resident memory may grow meanwhile.
    pub memory: u64,
}

/// Why limited work gave no result.
#[derive(Debug, thiserror::Error)]
pub enum LimitError {
    /// The work panicked: its input breaks an assumption of the parsing library.
    #[error("the parsing library failed: {0}")]
    Panic(String),
    /// It exceeded its time.
    #[error("abandoned after {} seconds", .0.as_secs())]
    Time(Duration),
    /// It exceeded its memory.
    #[error("abandoned after it had taken more than {} MiB of memory", .0 >> 20)]
    Memory(u64),
    /// Too many threads were abandoned and still run.
    #[error(
        "{0} earlier tasks on tokenizers, chat templates or grammars exceeded their limits and still run: try again later, or restart the program"
    )]
    Abandoned(usize),
    /// The system refused the thread.
    #[error("cannot start a thread with a stack of {} MiB", STACK_BYTES >> 20)]
    Thread(#[source] io::Error),
}

impl LimitError {
    /// Whether the same work may succeed later, because other work of the process may have taken the time or memory.
    pub fn is_transient(&self) -> bool {
        !matches!(self, LimitError::Panic(_))
    }
}

/// Threads that this process has abandoned and that still run.
static ABANDONED: AtomicUsize = AtomicUsize::new(0);

/// The number of threads that this process has abandoned because their work on a tokenizer or a chat template exceeded its limits, and
/// that still run and take memory.
pub fn abandoned_threads() -> usize {
    ABANDONED.load(Ordering::SeqCst)
}

/// Runs work on its own thread and abandons it beyond the limits.
pub(crate) fn run_limited<T: Send + 'static>(
    limits: TextLimits,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, LimitError> {
    run_counted(&ABANDONED, limits, work)
}

/// Counts an abandoned thread, unless it has ended meanwhile.
fn abandon(abandoned: &AtomicUsize, is_over: &AtomicBool) {
    abandoned.fetch_add(1, Ordering::SeqCst);
    if is_over.swap(true, Ordering::SeqCst) {
        abandoned.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Like [`run_limited`]; `abandoned` counts the abandoned threads that still run.
fn run_counted<T: Send + 'static>(
    abandoned: &'static AtomicUsize,
    limits: TextLimits,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, LimitError> {
    let still_running = abandoned.load(Ordering::SeqCst);
    if still_running >= MOST_ABANDONED {
        return Err(LimitError::Abandoned(still_running));
    }
    let (before, started) = (resident_bytes(), Instant::now());
    let (send, result) = sync_channel(1);
    // Set by whoever is first: the thread at its end, or the caller who abandons it.
    let is_over = Arc::new(AtomicBool::new(false));
    let has_ended = Arc::clone(&is_over);
    let run = move || {
        // Sending fails once the caller has abandoned the work.
        drop(send.send(catch_panic(work)));
        if has_ended.swap(true, Ordering::SeqCst) {
            abandoned.fetch_sub(1, Ordering::SeqCst);
        }
    };
    let thread = thread::Builder::new().name("hpp-text".into()).stack_size(STACK_BYTES);
    let thread = thread.spawn(run).map_err(LimitError::Thread)?;
    loop {
        match result.recv_timeout(CHECK_INTERVAL) {
            Ok(done) => {
                // Joining frees its stack, so that later measurements of memory exclude it.
                let _ = thread.join();
                return done;
            }
            Err(RecvTimeoutError::Disconnected) => return Err(LimitError::Panic("the thread ended".to_owned())),
            Err(RecvTimeoutError::Timeout) if started.elapsed() > limits.time => {
                abandon(abandoned, &is_over);
                return Err(LimitError::Time(limits.time));
            }
            Err(RecvTimeoutError::Timeout) => {
                let grown = resident_bytes().zip(before).map(|(now, before)| now.saturating_sub(before));
                if grown.is_some_and(|grown| grown > limits.memory) {
                    abandon(abandoned, &is_over);
                    return Err(LimitError::Memory(limits.memory));
                }
            }
        }
    }
}

/// Runs work on this thread and turns a panic into an error without printing it.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> T) -> Result<T, LimitError> {
    silence_caught_panics();
    let before = CATCHING.replace(true);
    // State that a panic leaves half changed is dropped, or is only read through this function again.
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    CATCHING.set(before);
    done.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
        LimitError::Panic(text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default())
    })
}

thread_local! {
    /// Whether a panic on this thread is caught and reported as an error.
    static CATCHING: Cell<bool> = const { Cell::new(false) };
}

/// Installs a panic hook that prints only panics that nothing catches here.
fn silence_caught_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default_hook = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CATCHING.get() {
                default_hook(info);
            }
        }));
    });
}

/// Resident memory of this process in bytes.
#[cfg(target_os = "linux")]
fn resident_bytes() -> Option<u64> {
    let pages = procfs::process::Process::myself().ok()?.statm().ok()?.resident;
    Some(pages * procfs::page_size())
}

/// Resident memory of this process in bytes.
#[cfg(not(target_os = "linux"))]
fn resident_bytes() -> Option<u64> {
    use sysinfo::{ProcessRefreshKind, ProcessesToUpdate, System};
    let own = sysinfo::get_current_pid().ok()?;
    let mut system = System::new();
    system.refresh_processes_specifics(
        ProcessesToUpdate::Some(&[own]),
        false,
        ProcessRefreshKind::nothing().with_memory(),
    );
    system.process(own).map(sysinfo::Process::memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: TextLimits = TextLimits { time: Duration::from_secs(30), memory: 1 << 30 };

    #[test]
    fn results_come_back_and_panics_become_errors() {
        assert_eq!(run_limited(LIMITS, || 7).unwrap(), 7);
        let text = run_limited(LIMITS, || panic!("no {}", "good")).unwrap_err().to_string();
        assert!(text.contains("no good"), "{text}");
        assert!(matches!(catch_panic(|| panic!("x")), Err(LimitError::Panic(why)) if why == "x"));
    }

    #[test]
    fn work_that_never_ends_is_abandoned() {
        let limits = TextLimits { time: Duration::from_millis(20), ..LIMITS };
        let sleep = || thread::sleep(Duration::from_secs(5));
        assert!(matches!(run_limited(limits, sleep), Err(LimitError::Time(_))));
        assert!(abandoned_threads() > 0);
    }

    #[test]
    fn no_more_work_begins_while_too_many_abandoned_threads_run() {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let limits = TextLimits { time: Duration::from_millis(20), ..LIMITS };
        let releases: Vec<_> = (0..MOST_ABANDONED)
            .map(|_| {
                let (release, released) = sync_channel::<()>(0);
                let waits = move || released.recv().is_err();
                assert!(matches!(run_counted(&COUNT, limits, waits), Err(LimitError::Time(_))));
                release
            })
            .collect();
        assert!(matches!(run_counted(&COUNT, LIMITS, || 7), Err(LimitError::Abandoned(MOST_ABANDONED))));
        drop(releases);
        let started = Instant::now();
        while COUNT.load(Ordering::SeqCst) > 0 {
            assert!(started.elapsed() < LIMITS.time, "they have ended");
            thread::sleep(CHECK_INTERVAL);
        }
        assert_eq!(run_counted(&COUNT, LIMITS, || 7).unwrap(), 7);
    }

    #[test]
    fn work_that_takes_too_much_memory_is_abandoned() {
        let limits = TextLimits { memory: 32 << 20, ..LIMITS };
        let grow = || {
            let mut held = Vec::new();
            // The loop is bounded, so that a failing test does no harm.
            for _ in 0..256 {
                held.push(vec![1u8; 1 << 20]);
                thread::sleep(Duration::from_millis(1));
            }
            held.len()
        };
        assert!(matches!(run_limited(limits, grow), Err(LimitError::Memory(_))));
    }

    #[test]
    fn deep_recursion_fits_the_stack() {
        fn depth(n: u64) -> u64 {
            if n == 0 { 0 } else { 1 + std::hint::black_box(depth(n - 1)) }
        }
        assert_eq!(run_limited(LIMITS, || depth(500_000)).unwrap(), 500_000);
    }
}
