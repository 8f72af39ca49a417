//! Evicts the caches between runs, as the rest of the model does in a pass.
//!
//! It reads other memory by a product of one row with a large matrix, on the threads or the device that computes: private caches
//! belong to cores, and a sleeping thread pool takes a moment to wake. The next timed partition finds caches and threads as another partition of
//! the model would leave them.

use super::{Spec, about, run_failed};
use crate::error::{BackendError, EngineError};
use crate::port::{Backend, MemoryId, Session};
use crate::reporter::Reporter;
use hpp_schema::{DType, HostKernels, Provider};
use std::path::Path;

/// Columns and rows of the matrix in one slab of memory: 16 MiB.
const ROWS: u64 = 256;
const COLUMNS: u64 = 16384;
const ROW_BYTES: u64 = COLUMNS * 4;
const SLAB: u64 = ROWS * ROW_BYTES;

/// Reads memory by computing with it.
pub struct CacheFlusher<B: Backend> {
    backend: B,
    control: B::Control,
    session: B::Session,
    binding: <B::Session as Session>::Binding,
    /// The one row, `[1, ROWS]`.
    row: B::Buffer,
    slabs: Vec<B::Buffer>,
    /// Rows that hold numbers, counted over all slabs.
    written: u64,
    memory: MemoryId,
}

impl<B: Backend> CacheFlusher<B> {
    /// `product` is an ONNX file with inputs `a` `[m, k]` and `b` `[k, n]` and the output `c`, their product, all float32.
    pub fn load(backend: &B, product: &Path, provider: Provider, reporter: &dyn Reporter) -> Result<Self, EngineError> {
        let folder = product.parent().unwrap_or(Path::new("."));
        let control = backend.control().map_err(|source| about("the means to stop runs", source))?;
        let host_kernels = &HostKernels::default();
        let spec = Spec { name: "flusher", file: product, host_kernels, weights_dir: folder, weight_bytes: 0 };
        let session = spec.load(backend, provider, &control, reporter)?.session;
        let failed = |source| run_failed("flusher", "being bound", source);
        let mut binding = session.binding().map_err(failed)?;
        let (memory, out) = (session.inputs()[1].memory, session.outputs()[0].memory);
        let row = backend.reserve(session.inputs()[0].memory, ROWS * 4).map_err(failed)?;
        let answer = backend.reserve(out, ROW_BYTES).map_err(failed)?;
        let view = backend.view(&answer, DType::Float32, &[1, COLUMNS]).map_err(failed)?;
        session.bind_output(&mut binding, 0, &view).map_err(failed)?;
        Ok(CacheFlusher {
            backend: backend.clone(),
            control,
            session,
            binding,
            row,
            slabs: Vec::new(),
            written: 0,
            memory,
        })
    }

    /// Reserves the memory that will be read, so that no later call has to, and frees the rest.
    pub fn make_room(&mut self, bytes: u64) -> Result<(), EngineError> {
        let failed = |source| about("memory to read between runs", source);
        let rows = bytes / ROW_BYTES;
        self.slabs.truncate(rows.div_ceil(ROWS) as usize);
        self.written = self.written.min(self.slabs.len() as u64 * ROWS);
        while (self.slabs.len() as u64) < rows.div_ceil(ROWS) {
            self.slabs.push(self.backend.reserve(self.memory, SLAB).map_err(failed)?);
        }
        // All pages of the host that were never written are one page of zeros, and reading that leaves caches as they are.
        let ones: Vec<u8> = (0..COLUMNS).flat_map(|_| 1f32.to_le_bytes()).collect();
        while self.memory == MemoryId::HOST && self.written < rows {
            let slab = &self.slabs[(self.written / ROWS) as usize];
            self.backend.write(slab, self.written % ROWS * ROW_BYTES, &ones).map_err(failed)?;
            self.written += 1;
        }
        Ok(())
    }

    /// Reads about this many bytes: up to 64 KiB fewer, because it reads whole rows.
    pub fn flush(&mut self, bytes: u64) -> Result<(), EngineError> {
        let mut rows = (bytes / ROW_BYTES).min(self.slabs.len() as u64 * ROWS);
        for number in 0..rows.div_ceil(ROWS) as usize {
            let now = rows.min(ROWS);
            self.multiply(number, now).map_err(|source| run_failed("flusher", "running", source))?;
            rows -= now;
        }
        let failed = |source| run_failed("flusher", "running", source);
        // Otherwise the next timed run would wait for it.
        self.backend
            .synchronize_all(&mut |_, _| ())
            .and_then(|()| self.backend.synchronize_untimed(self.memory))
            .map_err(failed)
    }

    fn multiply(&mut self, slab: usize, rows: u64) -> Result<(), BackendError> {
        let row = self.backend.view(&self.row, DType::Float32, &[1, rows])?;
        let matrix = self.backend.view(&self.slabs[slab], DType::Float32, &[rows, COLUMNS])?;
        self.session.bind_input(&mut self.binding, 0, &row)?;
        self.session.bind_input(&mut self.binding, 1, &matrix)?;
        self.session.run(&mut self.binding, &self.control).map(drop)
    }
}
