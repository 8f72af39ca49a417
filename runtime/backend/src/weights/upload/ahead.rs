//! Copies states that the next run needs from host memory to a device with streams, while the device runs.

use super::{FeedJob, Upload, Uploader};
use crate::cuda::feeder::FeedWeight;
use crate::cuda::streams::{CopyRange, CopyStream};
use crate::environment::SharedRuntime;
use crate::raw::memory::Memory;
use crate::raw::space::MemorySpace;
use crate::raw::value::Value;
use hpp_engine::BackendError;

/// Most bytes that pass through a half of the staging buffer at once.
const PIECE: u64 = 4 << 20;

impl Uploader {
    /// Starts to copy a tensor from host memory to a device. `None` if the device has no streams, if one of the tensors is no view of
    /// memory of this crate, or if they differ in size or element type. No run may use the target: the copy waits only for earlier copies
    /// of states, not for runs.
    pub fn copy_ahead(
        &self,
        runtime: &SharedRuntime,
        from: &Value,
        to: &Value,
        device: &MemorySpace,
    ) -> Result<Option<Upload>, BackendError> {
        let Some(streams) = &device.streams else { return Ok(None) };
        let (Some(source @ Memory::Host(_)), Some(target @ Memory::Device(_))) = (from.memory(), to.memory()) else {
            return Ok(None);
        };
        if from.size() != to.size() || from.dtype != to.dtype {
            return Ok(None);
        }
        let piece = PIECE.min(from.size().max(1));
        let (staging, halves) = self.halves(runtime, device, CopyStream::States, piece)?;
        // Both tensors begin where their memory begins.
        let range = CopyRange { from: source.address().cast(), to: target.address(), bytes: from.size() as usize };
        let weights = vec![FeedWeight::Host { range, piece: piece as usize }];
        let keep = vec![source.clone(), target.clone(), staging.memory];
        let job = FeedJob { after: streams.record_copies(CopyStream::States)?, weights, halves, keep };
        self.feed(device, streams, CopyStream::States, job).map(|state| Some(Upload(state)))
    }
}
