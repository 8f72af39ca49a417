//! The ports: the traits through which the engine runs partitions. They name no library.
//!
//! Two crates implement them: `hpp-backend` over ONNX Runtime, and the mock of this crate (feature `mock`), which checks the
//! contracts written here.

mod time;
mod weights;

pub use time::{Interval, Timing, TimingToken};
pub use weights::{ChunkSize, ExpertWeights, HostCopy, Uploaded, WeightLocation, WeightPager, WeightResidency};

use crate::error::BackendError;
use crate::reporter::Reporter;
use hpp_schema::{DType, Device, HostKernels, Provider};
use smallvec::SmallVec;
use std::path::Path;
use std::time::Duration;

/// Sizes of a tensor's dimensions. Up to six are stored inline, so that describing a tensor needs no heap allocation.
pub type Dims = SmallVec<[u64; 6]>;

/// A memory that tensors can lie in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryId(pub u32);

impl MemoryId {
    /// The host's own memory.
    pub const HOST: MemoryId = MemoryId(0);
}

/// Whether a partition may run on another provider than the plan prefers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fallback {
    /// It may, and the reason is reported.
    #[default]
    Report,
    /// It may not: loading fails with the reason.
    Refuse,
}

/// What a session is created from.
#[derive(Clone, Copy, Debug)]
pub struct SessionSpec<'a> {
    /// Name of the partition, for messages.
    pub partition: &'a str,
    /// The ONNX file.
    pub file: &'a Path,
    /// What its operators and weights demand of CPU kernels.
    pub host_kernels: &'a HostKernels,
    /// Bytes of all the model's weights, in all partitions together.
    pub weight_bytes: u64,
    /// Directory its external data lies in.
    pub weights_dir: &'a Path,
    /// The plan's device.
    pub device: &'a Device,
    /// Providers to try, best first.
    pub providers: &'a [Provider],
    /// What to do when the best provider is unavailable.
    pub fallback: Fallback,
    /// Where its weights are while it does not run.
    pub residency: WeightResidency,
    /// Whether weights in memory are locked, including weights that kernels use directly in the mapping of their file.
    pub locks_weights: bool,
    /// Its experts, if they are read by demand.
    pub experts: Option<ExpertWeights<'a>>,
    /// Whether weights are among its inputs.
    pub weights_are_inputs: bool,
    /// Whether there is another file for the host, so that this one is not tried there.
    pub has_host_file: bool,
    /// Where weights that do not stay in memory may be written in the layout of its kernels, and compressed.
    pub prepared: Option<Prepared<'a>>,
    /// Weights that are read from disk are stored compressed where that takes at most this many of 1000 bytes. `None` if the plan does not say:
    /// then only weights in the layout of kernels are compressed.
    pub compress_permille: Option<u32>,
}

/// Weights on disk in the layout that kernels want, kept for later starts.
#[derive(Clone, Copy, Debug)]
pub struct Prepared<'a> {
    /// The directory, which need not exist yet.
    pub dir: &'a Path,
    /// Identifies the partition's file and all weights by their hashes. Prepared weights that were made from other contents are not used.
    pub contents: &'a str,
    /// Whether every byte is verified, instead of samples.
    pub verify: bool,
}

/// A session, its weights, and where it was loaded.
#[derive(Debug)]
pub struct Loaded<S, W> {
    /// Ready to bind and run.
    pub session: S,
    /// Its weights.
    pub weights: W,
    /// The provider that runs it.
    pub provider: Provider,
    /// The processor it computes on, in the backend's words.
    pub processor: String,
    /// Whether kernels on the host compute with packed weights, which may round differently than with weights as they are stored.
    pub packs_weights: bool,
    /// Providers that were tried before, each with the reason it is unavailable.
    pub refused: Vec<(Provider, String)>,
}

/// One input or output of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// The ONNX name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Declared sizes; `None` where they vary.
    pub shape: Vec<Option<u64>>,
    /// The memory in which the session wants the input, or leaves the output.
    pub memory: MemoryId,
}

/// Runs partitions and owns the memories they use.
///
/// Implementations need not be usable from several threads: an engine lives on the thread that made it.
pub trait Backend: Clone {
    /// Bytes in one memory, of fixed length, zeroed at first.
    type Buffer;
    /// A typed and shaped view of the first bytes of a buffer, which it keeps alive.
    type Tensor: Tensor;
    /// A partition ready to run.
    type Session: Session<Tensor = Self::Tensor, Control = Self::Control>;
    /// The weights of a session that may lie on disk.
    type WeightPager: WeightPager;
    /// Stops runs from another thread.
    type Control: Control;
    /// The host's side of weights that are copied to a device.
    type UploadSource;
    /// A copy of such weights in progress.
    type Upload;

    /// Loads a partition with the first available provider; `control` can cancel that.
    fn load(
        &self,
        spec: &SessionSpec<'_>,
        control: &Self::Control,
        reporter: &dyn Reporter,
    ) -> Result<Loaded<Self::Session, Self::WeightPager>, BackendError>;
    /// Called once after all partitions of a plan are loaded.
    fn finish_loading(&self) {}
    /// Reserves zeroed bytes. On the host, pages are allocated when they are first touched.
    fn reserve(&self, memory: MemoryId, bytes: u64) -> Result<Self::Buffer, BackendError>;
    /// Reserves zeroed bytes of host memory that lie in a file of this directory while they are not in use. The file has no name and is deleted
    /// when the process ends. Backends that do not implement this reserve host memory.
    fn reserve_on_disk(&self, _dir: &Path, bytes: u64) -> Result<Self::Buffer, BackendError> {
        self.reserve(MemoryId::HOST, bytes)
    }
    /// Whether the files of this directory are in memory (tmpfs), so that buffers on disk would save no memory.
    fn is_in_memory(&self, _dir: &Path) -> bool {
        false
    }
    /// Starts to read a part of a buffer on disk into memory, and returns at once.
    fn prefetch(&self, _buffer: &Self::Buffer, _offset: u64, _bytes: u64) {}
    /// Starts to write to disk what has changed in these buffers. When it returns, the buffers of the previous call are out of memory.
    fn evict(&self, _buffers: &[&Self::Buffer]) {}
    /// Part of a buffer, as a buffer that keeps the whole alive. `None` if the backend cannot make one, as on devices whose memory has no
    /// addresses.
    fn slice(&self, buffer: &Self::Buffer, offset: u64, bytes: u64) -> Option<Self::Buffer>;
    /// A view of the buffer's first bytes. An error if the shape needs more than the buffer holds. Allocates nothing on the heap.
    fn view(&self, buffer: &Self::Buffer, dtype: DType, shape: &[u64]) -> Result<Self::Tensor, BackendError>;
    /// Writes into a buffer on the host.
    fn write(&self, buffer: &Self::Buffer, offset: u64, bytes: &[u8]) -> Result<(), BackendError>;
    /// Reads `bytes.len()` bytes of a tensor in any memory from `offset` on, after whatever computes it has finished.
    fn read(&self, tensor: &Self::Tensor, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError>;
    /// Copies a tensor into another of the same type and shape in any memory.
    fn copy(&self, from: &Self::Tensor, to: &Self::Tensor) -> Result<(), BackendError>;
    /// Pins up to `bytes` of host memory in one piece for copies to a device; returns how many. Providers that cannot pin return 0.
    /// Upload sources made later take their pinned part from it.
    fn pin(&self, _memory: MemoryId, _bytes: u64) -> u64 {
        0
    }
    /// Opens weights that will be copied to a device's memory.
    fn upload_source(
        &self,
        weights: &[WeightLocation],
        memory: MemoryId,
        host: HostCopy,
    ) -> Result<Self::UploadSource, BackendError>;
    /// Starts to copy each weight of a source to the first bytes of the buffer given for it, and returns at once. Runs that were started before the
    /// call still read the old contents of the buffers.
    fn upload(&self, source: &Self::UploadSource, to: &[&Self::Buffer]) -> Result<Self::Upload, BackendError>;
    /// Orders a copy before all later runs: waits for it, or makes the device wait.
    fn wait_upload(&self, upload: Self::Upload) -> Result<Uploaded, BackendError>;
    /// Starts to copy a tensor on the host to one on a device while runs in progress there go on, and returns at once if it can. No run
    /// in progress may use the target, and the source must not change before [`wait_upload`](Self::wait_upload). `None` if the copy is
    /// complete.
    fn copy_ahead(&self, from: &Self::Tensor, to: &Self::Tensor) -> Result<Option<Self::Upload>, BackendError> {
        self.copy(from, to).map(|()| None)
    }
    /// Waits until all runs started on the device of a memory have finished. Copies and reads wait by themselves.
    fn synchronize(&self, _memory: MemoryId) -> Result<(), BackendError> {
        Ok(())
    }
    /// Waits for asynchronous runs on the device of a memory whose timing the backend does not report. May cost something, so the
    /// engine calls it only while it records a timeline.
    fn synchronize_untimed(&self, _memory: MemoryId) -> Result<(), BackendError> {
        Ok(())
    }
    /// Starts to wait in the background for the runs of [`synchronize_untimed`](Self::synchronize_untimed), so that the time at which they finish
    /// is known although the host does something else meanwhile. The engine calls it only while it records a timeline, and
    /// [`finish_watch`](Self::finish_watch) before it watches the same memory again.
    fn watch_untimed(&self, _memory: MemoryId) -> Result<(), BackendError> {
        Ok(())
    }
    /// Waits until the watched runs have finished: the interval from the start of watching until then. `None` if none are watched.
    fn finish_watch(&self, _memory: MemoryId) -> Result<Option<Interval>, BackendError> {
        Ok(None)
    }
    /// Waits until all runs on all devices have finished, and reports the intervals of all timing tokens issued since the last
    /// call, in that order. Device errors surface here at the latest.
    fn synchronize_all(&self, _report: &mut dyn FnMut(TimingToken, Interval)) -> Result<(), BackendError> {
        Ok(())
    }
    /// A new control to stop runs with.
    fn control(&self) -> Result<Self::Control, BackendError>;
    /// Monotonic time since an arbitrary start; all times of an engine are taken here.
    fn now(&self) -> Duration {
        crate::clock::since_start()
    }
    /// Returns cached memory to the system. The next run may take longer.
    fn trim_memory(&self) -> Result<(), BackendError> {
        Ok(())
    }
    /// Returns freed pages of the heap to the system, which takes a millisecond at most where
    /// [`trim_memory`](Self::trim_memory) takes several.
    fn trim_heap(&self) {}
    /// Names the files that stay mapped while sessions run, for the error message if one of them is truncated.
    fn name_mapped_files(&self, _files: &[&Path]) {}
    /// Memory that this process and the devices use.
    fn memory_use(&self) -> MemoryUse;
    /// Most host memory this process may use, if the system reports it.
    fn memory_limit(&self) -> Option<u64> {
        None
    }
}

/// A view of bytes in one memory.
pub trait Tensor {
    /// Element type.
    fn dtype(&self) -> DType;
    /// Sizes.
    fn shape(&self) -> &[u64];
    /// The memory it lies in.
    fn memory(&self) -> MemoryId;
}

/// A partition ready to run.
///
/// Inputs and outputs are bound by index, keep their binding from run to run, and keep what is bound alive. Tensors must lie in
/// the memory that the port names. A session need not compute an output that is not bound.
pub trait Session {
    /// See [`Backend::Tensor`].
    type Tensor;
    /// See [`Backend::Control`].
    type Control;
    /// What one sequence has bound; a session may have many.
    type Binding;

    /// Inputs in the file's order.
    fn inputs(&self) -> &[Port];
    /// Outputs in the file's order.
    fn outputs(&self) -> &[Port];
    /// An empty binding.
    fn binding(&self) -> Result<Self::Binding, BackendError>;
    /// Binds an input.
    fn bind_input(&self, binding: &mut Self::Binding, index: usize, tensor: &Self::Tensor) -> Result<(), BackendError>;
    /// Binds an output to a tensor of exactly the shape the run will produce.
    fn bind_output(&self, binding: &mut Self::Binding, index: usize, tensor: &Self::Tensor)
    -> Result<(), BackendError>;
    /// Lets the session allocate an output whose shape is not known before the run. Holds for one run.
    fn bind_output_unknown(&self, binding: &mut Self::Binding, index: usize) -> Result<(), BackendError>;
    /// A file of the backend's own that stays mapped while the session runs and must not be written to.
    fn mapped_file(&self) -> Option<&Path> {
        None
    }
    /// Runs the partition, whose weights must all be in memory. When the call returns, host outputs are complete, but a device may still compute:
    /// operations that are started there later are ordered after the run. With a token, the backend reports the run's interval later; without one,
    /// the run took as long as the call.
    fn run(
        &mut self,
        binding: &mut Self::Binding,
        control: &Self::Control,
    ) -> Result<Option<TimingToken>, BackendError>;
    /// Like [`run`](Self::run), but the host memory that the run frees is returned to the system instead of being kept for later runs.
    fn run_and_return_memory(
        &mut self,
        binding: &mut Self::Binding,
        control: &Self::Control,
    ) -> Result<Option<TimingToken>, BackendError> {
        self.run(binding, control)
    }
    /// An output that [`bind_output_unknown`](Self::bind_output_unknown) asked for, after the run.
    fn take_output(&self, binding: &mut Self::Binding, index: usize) -> Result<Self::Tensor, BackendError>;
}

/// Stops runs from another thread.
pub trait Control: Clone + Send + Sync + 'static {
    /// Ends runs in progress and refuses new ones with [`BackendError::Stopped`].
    fn stop(&self);
    /// Lets runs start again.
    fn resume(&self);
}

/// Memory that this process and the devices use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Peak resident set size, bytes, if the system reports it.
    pub peak_resident: Option<u64>,
    /// Resident set size now, bytes, if the system reports it.
    pub resident: Option<u64>,
    /// One entry for each device in use.
    pub devices: Vec<DeviceMemoryInfo>,
}

/// Memory of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMemoryInfo {
    /// The device, in the backend's words.
    pub name: String,
    /// Bytes that tensors and weights of all models in this process take there, if the device reports it.
    pub used: Option<u64>,
    /// Total bytes, if the device reports it.
    pub total: Option<u64>,
}
