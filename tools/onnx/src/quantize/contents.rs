//! The contents of quantized weights, computed when they are read.
//!
//! Numbers, scales and zero points of a weight are read one after another, each several times (to hash and to copy them). So the results of the
//! last weight stay in memory; for a weight larger than [`WINDOW_BYTES`], the results of some of its columns. While a caller reads them, a thread
//! computes the next window, because weights are mostly read in the order of the model.

use super::matrix::{Job, Window};
use crate::virtual_file::Computed;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Maximum bytes of the results in memory. The results that are computed ahead may take as many again.
const WINDOW_BYTES: usize = 384 << 20;

/// All weights that are quantized.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    pub jobs: Arc<Vec<Job>>,
    windows: Mutex<Windows>,
    window_bytes: Option<usize>,
}

/// The windows in memory.
#[derive(Debug, Default)]
struct Windows {
    /// The window that was read last, and the index of its job.
    last: Option<(usize, Window)>,
    ahead: Option<Ahead>,
}

/// A window that a thread is computing. Dropping it waits for the thread, because the thread may read files in a temporary directory, which this
/// process must remove before it ends.
#[derive(Debug)]
struct Ahead {
    job: usize,
    columns: Range<usize>,
    /// `None` after it was joined.
    thread: Option<JoinHandle<io::Result<Window>>>,
}

impl Ahead {
    /// Waits for the window. `None` if the thread panicked.
    fn computed(mut self) -> Option<io::Result<Window>> {
        self.thread.take()?.join().ok()
    }
}

impl Drop for Ahead {
    fn drop(&mut self) {
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// The tensors of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Part {
    Numbers,
    Scales,
    ZeroPoints,
}

/// One tensor of a quantized weight, computed when it is read.
#[derive(Debug)]
pub(super) struct PartContents {
    pub jobs: Arc<Jobs>,
    pub job: usize,
    pub part: Part,
}

impl Jobs {
    pub fn new(jobs: Vec<Job>) -> Self {
        Jobs { jobs: Arc::new(jobs), ..Jobs::default() }
    }

    /// Like [`Self::new`] with smaller windows, to test that the window size changes nothing.
    #[cfg(test)]
    pub fn with_window(jobs: Vec<Job>, bytes: usize) -> Self {
        Jobs { jobs: Arc::new(jobs), window_bytes: Some(bytes), ..Jobs::default() }
    }

    /// Bytes of a part.
    pub fn bytes(&self, job: usize, part: Part) -> u64 {
        let job = &self.jobs[job];
        (job.matrix.columns * part.column_bytes(job)) as u64
    }

    /// Calls `use_window` with a window that holds a column.
    fn with_column<T>(&self, job: usize, column: usize, use_window: impl FnOnce(&Window) -> T) -> io::Result<T> {
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = |(known, window): &&(usize, Window)| *known == job && window.columns.contains(&column);
        if let Some((_, window)) = windows.last.as_ref().filter(holds) {
            return Ok(use_window(window));
        }
        windows.last = None;
        let columns = self.columns(job, column);
        let ahead = windows.ahead.take();
        let is_expected = ahead.as_ref().is_some_and(|ahead| ahead.job == job && ahead.columns == columns);
        // Waits even for a window that is not needed, so that never more than two windows are in memory.
        let computed = ahead.and_then(Ahead::computed);
        let window = match computed.filter(|_| is_expected) {
            Some(window) => window?,
            None => self.jobs[job].window(columns.clone())?,
        };
        windows.ahead = self.compute_after(job, &columns);
        let (_, window) = windows.last.insert((job, window));
        Ok(use_window(window))
    }

    /// The columns of the window that holds this one.
    fn columns(&self, job: usize, column: usize) -> Range<usize> {
        let job = &self.jobs[job];
        let per_column = job.number_bytes() + job.scale_bytes() + job.blocks();
        let columns = (self.window_bytes.unwrap_or(WINDOW_BYTES) / per_column.max(1)).max(1);
        let start = column / columns * columns;
        start..(start + columns).min(job.matrix.columns)
    }

    /// Starts a thread that computes the window after this one. `None` if this is the last window of all weights or the thread cannot be started.
    /// Also `None` after the last of several windows of a weight: there, its first window is read next, for another tensor.
    fn compute_after(&self, job: usize, columns: &Range<usize>) -> Option<Ahead> {
        let (job, column) = match columns.end == self.jobs[job].matrix.columns {
            true if columns.start > 0 => return None,
            true => (job + 1, 0),
            false => (job, columns.end),
        };
        self.jobs.get(job)?;
        let columns = self.columns(job, column);
        let (jobs, wanted) = (Arc::clone(&self.jobs), columns.clone());
        let compute = move || jobs[job].window(wanted);
        let thread = std::thread::Builder::new().name("hpp-quantize".into()).spawn(compute).ok()?;
        Some(Ahead { job, columns, thread: Some(thread) })
    }
}

impl Part {
    fn column_bytes(self, job: &Job) -> usize {
        match self {
            Part::Numbers => job.number_bytes(),
            Part::Scales => job.scale_bytes(),
            Part::ZeroPoints => job.zero_point_bytes(),
        }
    }

    fn of(self, window: &Window) -> &[u8] {
        match self {
            Part::Numbers => &window.numbers,
            Part::Scales => &window.scales,
            Part::ZeroPoints => &window.zero_points,
        }
    }
}

impl Computed for PartContents {
    fn read_at(&self, offset: u64, buffer: &mut [u8]) -> io::Result<usize> {
        let per_column = self.part.column_bytes(&self.jobs.jobs[self.job]);
        let offset = usize::try_from(offset).map_err(io::Error::other)?;
        self.jobs.with_column(self.job, offset / per_column, |window| {
            let bytes = self.part.of(window);
            let start = offset - window.columns.start * per_column;
            let length = buffer.len().min(bytes.len() - start);
            buffer[..length].copy_from_slice(&bytes[start..start + length]);
            length
        })
    }
}
