//! The contents of quantized weights, computed when they are read.
//!
//! Numbers, scales and zero points of a weight are read one after another, several times each (hash, copy). So the results
//! of the last weight stay in memory; of a weight larger than [`WINDOW_BYTES`], those of some of its columns.

use super::matrix::{Job, Window};
use crate::virtual_file::Computed;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of results that are kept.
const WINDOW_BYTES: usize = 384 << 20;

/// All weights that are quantized.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    pub jobs: Vec<Job>,
    /// The last window, and the index of its job.
    last: Mutex<Option<(usize, Window)>>,
    window_bytes: Option<usize>,
}

/// What of a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Part {
    Numbers,
    Scales,
    ZeroPoints,
}

/// A part of a quantized weight, computed when it is read.
#[derive(Debug)]
pub(super) struct PartContents {
    pub jobs: Arc<Jobs>,
    pub job: usize,
    pub part: Part,
}

impl Jobs {
    pub fn new(jobs: Vec<Job>) -> Self {
        Jobs { jobs, ..Jobs::default() }
    }

    /// With a smaller window, to test that it changes nothing.
    #[cfg(test)]
    pub fn with_window(jobs: Vec<Job>, bytes: usize) -> Self {
        Jobs { jobs, window_bytes: Some(bytes), ..Jobs::default() }
    }

    /// Bytes of a part.
    pub fn bytes(&self, job: usize, part: Part) -> u64 {
        let job = &self.jobs[job];
        (job.matrix.columns * part.column_bytes(job)) as u64
    }

    /// Calls `use_window` with a window that holds a column.
    fn with_column<T>(&self, index: usize, column: usize, use_window: impl FnOnce(&Window) -> T) -> io::Result<T> {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = |(job, window): &&(usize, Window)| *job == index && window.columns.contains(&column);
        if let Some((_, window)) = last.as_ref().filter(holds) {
            return Ok(use_window(window));
        }
        *last = None;
        let job = &self.jobs[index];
        let per_column = job.number_bytes() + job.scale_bytes() + job.blocks();
        let columns = (self.window_bytes.unwrap_or(WINDOW_BYTES) / per_column.max(1)).max(1);
        let start = column / columns * columns;
        let window = job.window(start..(start + columns).min(job.matrix.columns))?;
        let (_, window) = last.insert((index, window));
        Ok(use_window(window))
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
