//! The ports: what the engine asks of whatever runs its partitions. It knows no library by name.
//!
//! Two things implement them: `hpp-backend` over ONNX Runtime, and [`mock`](crate::mock), which checks the laws written here.

use crate::error::BackendError;
use crate::reporter::Reporter;
use hpp_schema::{DType, Device, Provider};
use smallvec::SmallVec;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Sizes of a tensor's dimensions; up to six lie inline, so that describing a tensor costs no heap allocation.
pub type Dims = SmallVec<[u64; 6]>;

/// A memory tensors can lie in.
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

/// Where a session's weights are while it does not run.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Keep {
    /// In the memory of its device.
    #[default]
    InMemory,
    /// A part of them in memory, which [`Session::settle`] says; the rest on disk, from where it is read before each run
    /// ([`Session::begin`]).
    Streamed,
    /// On disk; what a run touches is read page by page while it runs.
    Mapped {
        /// Whether a run reads a few rows here and there and needs them no more afterwards.
        rows: bool,
    },
}

/// What a session is made from.
#[derive(Clone, Copy, Debug)]
pub struct SessionSpec<'a> {
    /// Name of the partition, for messages.
    pub partition: &'a str,
    /// The ONNX file.
    pub file: &'a Path,
    /// The unsplit model it was cut from: what is decided for a whole model is decided by looking there.
    pub model: &'a Path,
    /// Bytes of all the model's weights, in whatever partition.
    pub weight_bytes: u64,
    /// Directory its external data lies in.
    pub weights_dir: &'a Path,
    /// The plan's device.
    pub device: &'a Device,
    /// Providers to try, best first.
    pub providers: &'a [Provider],
    /// What to do when the best is not to be had.
    pub fallback: Fallback,
    /// Where its weights are while it does not run.
    pub keep: Keep,
    /// Whether weights are among its inputs.
    pub weights_are_inputs: bool,
    /// Whether there is another file for the host: then this one is not tried there.
    pub has_host_file: bool,
    /// Where weights that are not kept in memory may be laid out anew, as its kernels want them.
    pub prepared: Option<Prepared<'a>>,
}

/// Weights laid out as kernels want them, on disk, for the next start too.
#[derive(Clone, Copy, Debug)]
pub struct Prepared<'a> {
    /// The directory, which need not exist yet.
    pub dir: &'a Path,
    /// What the plan says of the contents of the partition's file and of all weights: what was prepared from others is of
    /// no use.
    pub contents: &'a str,
    /// Whether every byte is compared with what was written, not samples.
    pub verify: bool,
}

/// A session, and where it really is.
#[derive(Debug)]
pub struct Loaded<S> {
    /// Ready to bind and run.
    pub session: S,
    /// The provider that has it.
    pub provider: Provider,
    /// The processor it computes on, as its owner calls it.
    pub processor: String,
    /// Providers that were tried before, each with the reason it was not to be had.
    pub refused: Vec<(Provider, String)>,
}

/// A weight that is an input of a session, and where its bytes lie.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightSpec {
    /// The file.
    pub file: PathBuf,
    /// Its first byte there.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
}

/// Where the host holds weights that are copied to a device: in pinned memory, the rest in their files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hold {
    /// Most bytes of them in pinned memory, as far as there is room.
    pub pinned: u64,
    /// Whether the system is not to keep in memory what is read from files.
    pub forget: bool,
}

/// Weights that are read as one before a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChunkBytes {
    /// What they take in memory.
    pub held: u64,
    /// What is read of them: less where they are stored densely.
    pub read: u64,
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
    /// The memory the session wants it in, or leaves it in.
    pub memory: MemoryId,
}

/// Something that runs partitions and owns the memories they use.
///
/// Implementations need not be usable from several threads: an engine lives on the thread that made it.
pub trait Backend: Clone {
    /// Bytes in one memory, of fixed length, all zero at first.
    type Buffer;
    /// A typed and shaped view of the first bytes of a buffer, which it keeps alive.
    type Tensor: Tensor;
    /// A partition ready to run.
    type Session: Session<Tensor = Self::Tensor, Control = Self::Control>;
    /// Stops runs from another thread.
    type Control: Control;
    /// Weights of one stage on the host, from where they are copied to a device.
    type Source;
    /// A copy of them that is under way.
    type Upload;

    /// Loads a partition with the first provider that has it; `control` can end that.
    fn load(
        &self,
        spec: &SessionSpec<'_>,
        control: &Self::Control,
        reporter: &dyn Reporter,
    ) -> Result<Loaded<Self::Session>, BackendError>;
    /// All partitions of a plan are loaded: what is best done once for all of them is done now.
    fn finish_loading(&self) {}
    /// Reserves zeroed bytes. On the host no page is touched until it is used.
    fn reserve(&self, memory: MemoryId, bytes: u64) -> Result<Self::Buffer, BackendError>;
    /// A view of the buffer's first bytes. Fails where the shape needs more than the buffer holds. Allocates nothing on the heap.
    fn view(&self, buffer: &Self::Buffer, dtype: DType, shape: &[u64]) -> Result<Self::Tensor, BackendError>;
    /// Writes into a buffer on the host.
    fn write(&self, buffer: &Self::Buffer, offset: u64, bytes: &[u8]) -> Result<(), BackendError>;
    /// Reads a tensor from any memory, from `offset` on, waiting for whatever computes it.
    fn read(&self, tensor: &Self::Tensor, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError>;
    /// Copies a tensor into another of the same type and shape in any memory.
    fn copy(&self, from: &Self::Tensor, to: &Self::Tensor) -> Result<(), BackendError>;
    /// Pins host memory for copies to a device, in one piece: so many bytes, or as many as can be had; says how many. A provider
    /// that cannot pin gives none. Sources that are to be pinned lie there, while there is room.
    fn pin(&self, _memory: MemoryId, _bytes: u64) -> u64 {
        0
    }
    /// Makes weights ready to be copied to a device's memory, for as long as the source lives.
    fn source(&self, weights: &[WeightSpec], memory: MemoryId, hold: Hold) -> Result<Self::Source, BackendError>;
    /// Begins to copy each weight of a source to the first bytes of the buffer given for it, and returns at once. Runs that were
    /// begun before still find there what was there before.
    fn upload(&self, source: &Self::Source, to: &[&Self::Buffer]) -> Result<Self::Upload, BackendError>;
    /// Sees to it that runs from now on find what was copied: waits for it, or lets the device wait.
    fn arrive(&self, upload: Self::Upload) -> Result<Arrived, BackendError>;
    /// Waits until all runs begun on the device of a memory are over. Copies and reads wait by themselves.
    fn wait_for(&self, _memory: MemoryId) -> Result<(), BackendError> {
        Ok(())
    }
    /// Waits until all runs begun on the device of a memory are over whose time nobody tells, though they went on when their calls
    /// returned. That may cost something: it is asked for where times are to be told apart.
    fn drain(&self, _memory: MemoryId) -> Result<(), BackendError> {
        Ok(())
    }
    /// Waits until all runs begun on any device are over, and tells the times of all tickets given out since the last call, in
    /// that order. What failed on a device is told here at the latest.
    fn wait_for_all(&self, _tell: &mut dyn FnMut(Ticket, Took)) -> Result<(), BackendError> {
        Ok(())
    }
    /// A new means of stopping runs.
    fn control(&self) -> Result<Self::Control, BackendError>;
    /// Time since some moment before; all times of an engine are taken here.
    fn now(&self) -> Duration {
        crate::clock::since_start()
    }
    /// Gives back memory that is kept for runs to come. The next run may take longer.
    fn let_go_of_memory(&self) -> Result<(), BackendError> {
        Ok(())
    }
    /// Files that are mapped while sessions run: who shortens one of them ends the process, and these are named then.
    fn name_faults(&self, _files: &[&Path]) {}
    /// What this process and the devices use now and used at most.
    fn memory_use(&self) -> MemoryUse;
    /// Most host memory this process may use, where the system tells.
    fn memory_limit(&self) -> Option<u64> {
        None
    }
}

/// What can be asked of a tensor.
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
/// the memory the port names. An output that is not bound is not computed for its own sake.
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
    /// Lets the session allocate an output, for a shape nobody knows before. Holds for one run.
    fn bind_output_unknown(&self, binding: &mut Self::Binding, index: usize) -> Result<(), BackendError>;
    /// Whether a few runs before [`settle`](Self::settle) would show which of its weights runs use at all.
    fn wants_trial(&self) -> bool {
        false
    }
    /// For streamed weights: reads `locked` bytes of them to stay in memory and lets go of the others. Until then they come
    /// page by page while the session runs. Returns what a person should know of it.
    fn settle(&mut self, _locked: u64) -> Result<Option<String>, BackendError> {
        Ok(None)
    }
    /// Bytes of each chunk of weights that must be read before each run; nothing where all weights stay in memory.
    fn chunks(&self) -> &[ChunkBytes] {
        &[]
    }
    /// Begins to read a chunk, which takes memory from now on. Returns at once.
    fn begin(&mut self, _chunk: usize) -> Result<(), BackendError> {
        Ok(())
    }
    /// Waits until a chunk is there; from when to when it was read.
    fn finish(&mut self, _chunk: usize) -> Result<Took, BackendError> {
        Ok(Took::default())
    }
    /// Gives the memory of all chunks back, those included that are still being read.
    fn release(&mut self) -> Result<(), BackendError> {
        Ok(())
    }
    /// A file of the backend's own that stays mapped while the session runs: nobody may write to it.
    fn mapped(&self) -> Option<&Path> {
        None
    }
    /// Runs, with all chunks there. When it returns, host outputs are complete; a device may still compute, and what is begun
    /// there later comes after it. With a ticket, its time will be told; else it took as long as the call.
    fn run(&mut self, binding: &mut Self::Binding, control: &Self::Control) -> Result<Option<Ticket>, BackendError>;
    /// An output that [`bind_output_unknown`](Self::bind_output_unknown) asked for, after the run.
    fn take_output(&self, binding: &mut Self::Binding, index: usize) -> Result<Self::Tensor, BackendError>;
}

/// From when to when something took, by [`Backend::now`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Took {
    /// Its beginning.
    pub from: Duration,
    /// Its end.
    pub to: Duration,
}

impl Took {
    /// How long it took.
    pub fn length(self) -> Duration {
        self.to.saturating_sub(self.from)
    }
}

/// Stands for a time that is known once a device is through with something ([`Backend::wait_for_all`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket(pub u64);

/// From when to when something took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Time {
    /// This long.
    Known(Took),
    /// It will be told.
    Later(Ticket),
}

/// Weights that runs from now on find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrived {
    /// Their copy.
    pub copy: Time,
    /// How long their device waited for them, where the caller did not.
    pub stall: Option<Ticket>,
}

/// Stops runs from another thread.
pub trait Control: Clone + Send + Sync + 'static {
    /// Ends runs in progress and refuses new ones with [`BackendError::Stopped`].
    fn stop(&self);
    /// Lets runs start again.
    fn resume(&self);
}

/// What this process and the devices use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUse {
    /// Most bytes of this process that were in RAM at once, where the system tells.
    pub peak_resident: Option<u64>,
    /// Bytes of this process in RAM now, where the system tells.
    pub resident: Option<u64>,
    /// One entry for each device in use.
    pub devices: Vec<DeviceMemory>,
}

/// Memory of one device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// The device, as its owner calls it.
    pub name: String,
    /// Bytes the engine's tensors and weights take there, where the device tells.
    pub used: Option<u64>,
    /// All it has, where the device tells.
    pub total: Option<u64>,
}
