//! Read bandwidth of host memory with several threads: each repeatedly sums its part of an array and counts the bytes.

use super::{MeasureError, median, point, sorted_sizes};
use hpp_schema::BandwidthPoint;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time windows in which the bandwidth is measured; the result is their median.
const WINDOWS: usize = 9;
const WINDOW: Duration = Duration::from_millis(40);
/// Numbers summed between two updates of the counter: 1 MiB.
const STRIDE: usize = (1 << 20) / size_of::<u64>();

/// Read bandwidth for arrays of these sizes, in 1e9 bytes per second.
pub(crate) fn read_curve(bytes: &[u64], threads: usize, free: u64) -> Result<Vec<BandwidthPoint>, MeasureError> {
    let sizes = sorted_sizes(bytes)?;
    let measured = |bytes: u64| {
        let readers = Readers::start(bytes, threads, free)?;
        Ok(point(bytes, readers.bandwidth()))
    };
    sizes.into_iter().map(measured).collect()
}

/// Threads that read memory until this is dropped.
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
    /// Starts the threads on arrays of `bytes` in all and waits until all of them read.
    pub fn start(bytes: u64, threads: usize, free: u64) -> Result<Self, MeasureError> {
        if bytes > free / 2 {
            return Err(MeasureError::NoRoom { asked: bytes, available: free });
        }
        let length = (bytes as usize / size_of::<u64>() / threads).max(1);
        let mut readers = Readers { shared: Arc::default(), threads: Vec::new() };
        for _ in 0..threads {
            let shared = Arc::clone(&readers.shared);
            let reader = std::thread::Builder::new().name("reader".into()).spawn(move || shared.work(length));
            // If one fails to start, dropping `readers` stops the others.
            readers.threads.push(reader.map_err(|source| MeasureError::Threads { threads, source })?);
        }
        while readers.shared.ready.load(Ordering::Acquire) < threads {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(readers)
    }

    /// Their bandwidth in 1e9 bytes per second without other load.
    pub fn bandwidth(&self) -> f64 {
        median((0..WINDOWS).map(|_| self.during(|| std::thread::sleep(WINDOW))).collect())
    }

    /// Their bandwidth in 1e9 bytes per second while `act` runs.
    pub fn during(&self, act: impl FnOnce()) -> f64 {
        let (before, started) = (self.shared.read.load(Ordering::Relaxed), Instant::now());
        act();
        let after = self.shared.read.load(Ordering::Relaxed);
        (after - before) as f64 / started.elapsed().as_secs_f64() / 1e9
    }
}

impl Shared {
    /// Sums this thread's own array, which the system places in the memory of the NUMA node that touches it first.
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
            // A panic in a reader has no consequence: the measurement has ended.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_one_point_in_order() {
        let points = read_curve(&[4 << 20, 1 << 16, 4 << 20], 2, u64::MAX).unwrap();
        assert_eq!(points.iter().map(|p| p.bytes).collect::<Vec<_>>(), [1 << 16, 4 << 20]);
        assert!(points.iter().all(|p| p.gb_per_s > 0.01 && p.gb_per_s < 1e5), "{points:?}");
    }

    #[test]
    fn too_much_memory_is_refused_before_it_is_allocated() {
        assert!(matches!(read_curve(&[600], 1, 1000), Err(MeasureError::NoRoom { .. })));
        assert!(matches!(read_curve(&[], 1, 1000), Err(MeasureError::NoSize)));
    }
}
