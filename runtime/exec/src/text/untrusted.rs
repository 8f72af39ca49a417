//! Work that files of a model direct: tokenizers and chat templates come with a model, and may be broken or hostile.
//!
//! Such work runs on a thread with a stack of its own, a panic in it becomes an error, and it is given up when it takes too
//! long or too much memory. No thread can be stopped from outside: one that was given up on runs until the process ends, so
//! whoever gets that error should end it.

use std::cell::Cell;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Parsers and destructors recurse as deep as their input nests. Untouched pages of a stack cost nothing.
const STACK: usize = 512 << 20;

/// How often memory and the clock are looked at.
const LOOK: Duration = Duration::from_millis(2);

/// What work may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Time.
    pub time: Duration,
    /// Bytes by which the process may grow meanwhile, where the system tells its size.
    pub memory: u64,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// The work panicked: its input breaks a promise the library relies on.
    #[error("it makes the library that reads it fail: {0}")]
    Panic(String),
    /// Time is up.
    #[error("it was given up after {} seconds", .0.as_secs())]
    Time(Duration),
    /// Memory is up.
    #[error("it was given up when it had taken more than {} MiB of memory", .0 >> 20)]
    Memory(u64),
    /// There is no thread.
    #[error("cannot start a thread with a stack of {} MiB", STACK >> 20)]
    Thread(#[source] io::Error),
}

/// Runs work on a thread of its own, within limits.
pub(super) fn run<T: Send + 'static>(limits: Limits, work: impl FnOnce() -> T + Send + 'static) -> Result<T, Failure> {
    let (before, started) = (resident(), Instant::now());
    let (send, result) = sync_channel(1);
    let thread = thread::Builder::new().name("hpp-text".into()).stack_size(STACK);
    // Nobody listens any more to what was given up on.
    let thread = thread.spawn(move || drop(send.send(contained(work)))).map_err(Failure::Thread)?;
    loop {
        match result.recv_timeout(LOOK) {
            Ok(done) => {
                // Its memory is free, and its stack, before anything else is measured.
                let _ = thread.join();
                return done;
            }
            Err(RecvTimeoutError::Disconnected) => return Err(Failure::Panic("the thread ended".to_owned())),
            Err(RecvTimeoutError::Timeout) if started.elapsed() > limits.time => {
                return Err(Failure::Time(limits.time));
            }
            Err(RecvTimeoutError::Timeout) => {
                let grown = resident().zip(before).map(|(now, before)| now.saturating_sub(before));
                if grown.is_some_and(|grown| grown > limits.memory) {
                    return Err(Failure::Memory(limits.memory));
                }
            }
        }
    }
}

/// Runs work here; a panic becomes an error and prints nothing.
pub(super) fn contained<T>(work: impl FnOnce() -> T) -> Result<T, Failure> {
    quiet_panics();
    let before = CONTAINED.replace(true);
    // What a panic leaves half-done is dropped, or is only read through calls that come here again.
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    CONTAINED.set(before);
    done.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|s| (*s).to_owned());
        Failure::Panic(text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_default())
    })
}

thread_local! {
    /// Whether a panic on this thread is caught and reported as an error.
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Panics that are caught are not printed; all others are, as before.
fn quiet_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CONTAINED.get() {
                loud(info);
            }
        }));
    });
}

/// Memory this process holds.
fn resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits = Limits { time: Duration::from_secs(30), memory: 1 << 30 };

    #[test]
    fn results_come_back_and_panics_become_errors() {
        assert_eq!(run(LIMITS, || 7).unwrap(), 7);
        let said = run(LIMITS, || panic!("no {}", "good")).unwrap_err().to_string();
        assert!(said.contains("no good"), "{said}");
        assert!(matches!(contained(|| panic!("x")), Err(Failure::Panic(why)) if why == "x"));
    }

    #[test]
    fn work_without_an_end_is_given_up() {
        let limits = Limits { time: Duration::from_millis(20), ..LIMITS };
        let sleep = || thread::sleep(Duration::from_secs(5));
        assert!(matches!(run(limits, sleep), Err(Failure::Time(_))));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn work_that_takes_memory_without_end_is_given_up() {
        let limits = Limits { memory: 32 << 20, ..LIMITS };
        let grow = || {
            let mut held = Vec::new();
            // It ends by itself, so that a failing test does no harm.
            for _ in 0..256 {
                held.push(vec![1u8; 1 << 20]);
                thread::sleep(Duration::from_millis(1));
            }
            held.len()
        };
        assert!(matches!(run(limits, grow), Err(Failure::Memory(_))));
    }

    #[test]
    fn deep_recursion_has_a_stack() {
        fn depth(n: u64) -> u64 {
            if n == 0 { 0 } else { 1 + std::hint::black_box(depth(n - 1)) }
        }
        assert_eq!(run(LIMITS, || depth(500_000)).unwrap(), 500_000);
    }
}
