//! Reading host memory with several threads at once: each adds up its part of an array, over and over, and counts.

use super::{MeasureError, median, point, sizes};
use hpp_schema::BandwidthPoint;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Windows of time the bandwidth is looked at in; their median counts.
const WINDOWS: usize = 9;
const WINDOW: Duration = Duration::from_millis(40);
/// Numbers added up between two looks at the counter: 1 MiB.
const STRIDE: usize = (1 << 20) / size_of::<u64>();

/// Read bandwidth for arrays of these sizes, in 1e9 bytes per second.
pub(super) fn points(bytes: &[u64], threads: usize, free: u64) -> Result<Vec<BandwidthPoint>, MeasureError> {
    let sizes = sizes(bytes)?;
    let measured = |bytes: u64| {
        let readers = Readers::start(bytes, threads, free)?;
        Ok(point(bytes, readers.bandwidth()))
    };
    sizes.into_iter().map(measured).collect()
}

/// Threads that read until this is dropped.
pub(super) struct Readers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    read: AtomicU64,
    ready: AtomicUsize,
    stop: AtomicBool,
}

impl Readers {
    /// Starts so many threads on an array of so many bytes in all, and waits until all of them read.
    pub fn start(bytes: u64, threads: usize, free: u64) -> Result<Self, MeasureError> {
        if bytes > free / 2 {
            return Err(MeasureError::NoRoom { asked: bytes, available: free });
        }
        let length = (bytes as usize / size_of::<u64>() / threads).max(1);
        let mut readers = Readers { shared: Arc::default(), threads: Vec::new() };
        for _ in 0..threads {
            let shared = Arc::clone(&readers.shared);
            let reader = std::thread::Builder::new().name("reader".into()).spawn(move || shared.work(length));
            // What was started stops with `readers`.
            readers.threads.push(reader.map_err(|source| MeasureError::Threads { threads, source })?);
        }
        while readers.shared.ready.load(Ordering::Acquire) < threads {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(readers)
    }

    /// What they read in 1e9 bytes per second, when nothing else is done.
    pub fn bandwidth(&self) -> f64 {
        median((0..WINDOWS).map(|_| self.during(|| std::thread::sleep(WINDOW))).collect())
    }

    /// What they read in 1e9 bytes per second while something is done.
    pub fn during(&self, act: impl FnOnce()) -> f64 {
        let (before, started) = (self.shared.read.load(Ordering::Relaxed), Instant::now());
        act();
        let after = self.shared.read.load(Ordering::Relaxed);
        (after - before) as f64 / started.elapsed().as_secs_f64() / 1e9
    }
}

impl Shared {
    /// A thread's part is its own: it was the first to touch it, so it lies in the memory next to it.
    fn work(&self, length: usize) {
        let array: Vec<u64> = (0..length as u64).collect();
        self.ready.fetch_add(1, Ordering::Release);
        while !self.stop.load(Ordering::Relaxed) {
            for part in array.chunks(STRIDE) {
                black_box(part.iter().fold(0u64, |sum, number| sum.wrapping_add(*number)));
                self.read.fetch_add(size_of_val(part) as u64, Ordering::Relaxed);
                if self.stop.load(Ordering::Relaxed) {
                    return;
                }
            }
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // A reader does not panic, and one that did has nothing left to say.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_its_point_in_order() {
        let points = points(&[4 << 20, 1 << 16, 4 << 20], 2, u64::MAX).unwrap();
        assert_eq!(points.iter().map(|p| p.bytes).collect::<Vec<_>>(), [1 << 16, 4 << 20]);
        assert!(points.iter().all(|p| p.gb_per_s > 0.01 && p.gb_per_s < 1e5), "{points:?}");
    }

    #[test]
    fn more_than_is_free_is_refused_before_it_is_touched() {
        assert!(matches!(points(&[600], 1, 1000), Err(MeasureError::NoRoom { .. })));
        assert!(matches!(points(&[], 1, 1000), Err(MeasureError::NoSize)));
    }
}
