//! A backend for tests, without a runtime library: partitions are Rust functions, memories are vectors, and every call checks the
//! contracts of [`port`](crate::port).
//!
//! It allocates nothing while a session runs on bound memory, so that a test can count the engine's allocations.

mod chain;
mod clock;
mod disk;
mod queue;
mod session;
mod tensor;
mod upload;

pub use chain::{Chain, ChainInputs, ChainPart, ChainVariant};
pub use clock::{LinkCost, VirtualClock};
pub use disk::{MockDisk, MockWeightPager};
pub use session::{Frame, MockBinding, MockModel, MockSession, Takes};
pub use tensor::{MockBuffer, MockTensor};
pub use upload::{MockUpload, MockUploadSource};

use crate::error::BackendError;
use crate::port::{
    Backend, Control, Fallback, HostCopy, Interval, Loaded, MemoryId, MemoryUse, SessionSpec, Tensor, TimingToken,
    Uploaded, WeightLocation,
};
use crate::reporter::Reporter;
use crate::tensor::byte_len;
use hpp_schema::{DType, Provider};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The time that an eviction of states on disk takes.
pub const EVICTION: Duration = Duration::from_millis(1);

/// A backend for tests. Clones share everything.
#[derive(Clone, Default)]
pub struct MockBackend(Rc<World>);

#[derive(Default)]
struct World {
    failing_run: session::FailingRun,
    /// When the engine began to watch the devices that it watches.
    watches: RefCell<BTreeMap<MemoryId, Duration>>,
    models: RefCell<BTreeMap<String, MockModel>>,
    streamed: RefCell<BTreeMap<String, Vec<u64>>>,
    disk: MockDisk,
    memory_limit: Cell<Option<u64>>,
    resident: Cell<Option<u64>>,
    heap_trims: Cell<u64>,
    absent: RefCell<Vec<Provider>>,
    copies: Cell<u64>,
    reserved: Cell<u64>,
    clock: VirtualClock,
    links: clock::Links,
    uploads: upload::Uploads,
    queues: queue::Queues,
    pinnable: Cell<u64>,
    pinned: Cell<u64>,
    held: RefCell<Vec<HostCopy>>,
    memory_left: RefCell<BTreeMap<MemoryId, Rc<Cell<u64>>>>,
    /// Devices whose buffers have names instead of addresses.
    undivided: RefCell<BTreeSet<MemoryId>>,
    /// Buffers on disk, in the order in which they were reserved.
    on_disk: RefCell<Vec<MockBuffer>>,
    disk_events: RefCell<Vec<DiskBufferEvent>>,
}

/// A request about buffers on disk, which are numbered in the order in which they were reserved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DiskBufferEvent {
    /// To read this many bytes of a buffer.
    Prefetch(usize, u64),
    /// To evict buffers.
    Evict(Vec<usize>),
}

impl MockBackend {
    /// A machine without files.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the contents of a file.
    pub fn model(&self, file: &str, model: MockModel) {
        self.0.models.borrow_mut().insert(file.to_owned(), model);
    }

    /// Makes sessions read the weights of a file of this name from the disk before each run, in chunks of these bytes. If its experts are read by
    /// demand, each of the last chunks holds one expert.
    pub fn streams(&self, file: &str, chunks: Vec<u64>) {
        self.0.streamed.borrow_mut().insert(file.to_owned(), chunks);
    }

    /// The disk that weights are read from.
    pub fn disk(&self) -> &MockDisk {
        &self.0.disk
    }

    /// Sets the host memory limit, bytes.
    pub fn limit_memory(&self, bytes: u64) {
        self.0.memory_limit.set(Some(bytes));
    }

    /// Makes a provider unavailable.
    pub fn without(&self, provider: Provider) {
        self.0.absent.borrow_mut().push(provider);
    }

    /// The clock every time of an engine on this backend is taken from. Only runs, copies, evictions and waits advance it, by the time that they
    /// take.
    pub fn clock(&self) -> &VirtualClock {
        &self.0.clock
    }

    /// Makes the device of a memory asynchronous: runs and uploads are queued there.
    pub fn queue(&self, memory: MemoryId) {
        self.0.queues.add(memory);
    }

    /// Makes the device asynchronous without reports of intervals.
    pub fn queue_untimed(&self, memory: MemoryId) {
        self.0.queues.add_untimed(memory);
    }

    /// Sets the resident set of the process, which is unknown by default.
    pub fn set_resident(&self, bytes: u64) {
        self.0.resident.set(Some(bytes));
    }

    /// How often freed pages of the heap were returned to the system.
    pub fn heap_trims(&self) -> u64 {
        self.0.heap_trims.get()
    }

    /// Makes one run fail: the next one after `before` runs, of whichever session.
    pub fn fail_run(&self, before: u64) {
        self.0.failing_run.set(Some(before));
    }

    /// How often a caller waited for a busy [asynchronous](Self::queue) device.
    pub fn waits(&self) -> u64 {
        self.0.queues.waits()
    }

    /// Sets the cost of copies and reads from one memory to another; they are free by default.
    pub fn link(&self, from: MemoryId, to: MemoryId, cost: LinkCost) {
        self.0.links.set(from, to, cost);
    }

    /// Sets how much host memory can be pinned at once, bytes; none by default.
    pub fn can_pin(&self, bytes: u64) {
        self.0.pinnable.set(bytes);
    }

    /// Bytes pinned so far, and where weights that are copied to devices were to be held.
    pub fn held(&self) -> (u64, Vec<HostCopy>) {
        (self.0.pinned.get(), self.0.held.borrow().clone())
    }

    /// Limits how many more bytes a memory has room for.
    pub fn limit_device(&self, memory: MemoryId, bytes: u64) {
        self.0.memory_left.borrow_mut().insert(memory, Rc::new(Cell::new(bytes)));
    }

    /// From now on, buffers of this memory cannot be sliced.
    pub fn refuse_slices(&self, memory: MemoryId) {
        self.0.undivided.borrow_mut().insert(memory);
    }

    fn pass(&self, from: &MockTensor, to: MemoryId, bytes: u64) {
        self.0.queues.wait(from.memory(), &self.0.clock);
        self.0.queues.wait(to, &self.0.clock);
        for (from, to) in self.0.links.legs(from.memory(), to) {
            let time = self.0.links.time(from, to, bytes);
            self.0.uploads.delay(to, time, &self.0.clock);
            self.0.clock.advance(time);
        }
    }

    /// Takes the requests about buffers on disk since the last call.
    pub fn take_disk_events(&self) -> Vec<DiskBufferEvent> {
        self.0.disk_events.take()
    }

    /// The number of a buffer on disk.
    fn on_disk(&self, buffer: &MockBuffer) -> Option<usize> {
        self.0.on_disk.borrow().iter().position(|other| other.is_same(buffer))
    }

    /// Copies between tensors so far.
    pub fn copies(&self) -> u64 {
        self.0.copies.get()
    }

    /// Bytes reserved so far, over all memories.
    pub fn reserved(&self) -> u64 {
        self.0.reserved.get()
    }

    fn weights(&self, file: &str, spec: &SessionSpec<'_>) -> disk::MockWeights {
        let is_streamed = spec.residency == crate::port::WeightResidency::ReadFromDisk;
        let chunks = self.0.streamed.borrow().get(file).cloned().filter(|_| is_streamed);
        let (disk, clock) = (self.0.disk.clone(), self.0.clock.clone());
        let experts = chunks.as_ref().and(spec.experts).map_or(0, |experts| experts.count);
        disk::MockWeights::new(chunks.unwrap_or_default(), experts, spec.residency, disk, clock)
    }

    fn provider(&self, spec: &SessionSpec<'_>) -> Result<(Provider, Vec<(Provider, String)>), BackendError> {
        let mut refused = Vec::new();
        for provider in spec.providers {
            if *provider == Provider::CPU && spec.has_host_file {
                break;
            }
            if !self.0.absent.borrow().contains(provider) {
                return Ok((*provider, refused));
            }
            refused.push((*provider, "it was taken away".to_owned()));
            if spec.fallback == Fallback::Refuse {
                break;
            }
        }
        Err(BackendError::NoProvider { refused })
    }
}

impl Backend for MockBackend {
    type Buffer = MockBuffer;
    type Tensor = MockTensor;
    type Session = MockSession;
    type Control = MockControl;
    type WeightPager = MockWeightPager;
    type UploadSource = MockUploadSource;
    type Upload = MockUpload;

    fn pin(&self, _: MemoryId, bytes: u64) -> u64 {
        let pinned = bytes.min(self.0.pinnable.get());
        self.0.pinned.set(self.0.pinned.get() + pinned);
        pinned
    }

    fn trim_heap(&self) {
        self.0.heap_trims.set(self.0.heap_trims.get() + 1);
    }

    fn upload_source(
        &self,
        weights: &[WeightLocation],
        _: MemoryId,
        host: HostCopy,
    ) -> Result<MockUploadSource, BackendError> {
        self.0.held.borrow_mut().push(host);
        MockUploadSource::read(weights)
    }

    fn upload(&self, source: &MockUploadSource, to: &[&MockBuffer]) -> Result<MockUpload, BackendError> {
        let memory = to.first().map_or(MemoryId::HOST, |buffer| buffer.memory());
        let time = self.0.links.time(MemoryId::HOST, memory, source.bytes());
        let free = self.0.queues.busy_until(memory).unwrap_or_default().max(self.0.clock.now());
        self.0.uploads.start(source, to, free, time, &self.0.clock)
    }

    fn wait_upload(&self, upload: MockUpload) -> Result<Uploaded, BackendError> {
        upload.wait(&self.0.queues, &self.0.clock)
    }

    fn copy_ahead(&self, from: &MockTensor, to: &MockTensor) -> Result<Option<MockUpload>, BackendError> {
        self.0.copies.set(self.0.copies.get() + 1);
        let bytes = byte_len(from.dtype(), from.shape()).unwrap_or(0);
        let time = self.0.links.time(MemoryId::HOST, to.memory(), bytes);
        self.0.uploads.start_tensor(from, to, time, &self.0.clock).map(Some)
    }

    fn synchronize(&self, memory: MemoryId) -> Result<(), BackendError> {
        if !self.0.queues.is_untimed(memory) {
            self.0.queues.wait(memory, &self.0.clock);
        }
        Ok(())
    }

    fn synchronize_untimed(&self, memory: MemoryId) -> Result<(), BackendError> {
        self.0.queues.wait(memory, &self.0.clock);
        Ok(())
    }

    fn watch_untimed(&self, memory: MemoryId) -> Result<(), BackendError> {
        if self.0.queues.is_untimed(memory) {
            self.0.watches.borrow_mut().insert(memory, self.0.clock.now());
        }
        Ok(())
    }

    fn finish_watch(&self, memory: MemoryId) -> Result<Option<Interval>, BackendError> {
        let Some(start) = self.0.watches.borrow_mut().remove(&memory) else { return Ok(None) };
        let end = self.0.queues.busy_until(memory).unwrap_or_default().max(start);
        self.0.queues.wait(memory, &self.0.clock);
        Ok(Some(Interval { start, end }))
    }

    fn synchronize_all(&self, report: &mut dyn FnMut(TimingToken, Interval)) -> Result<(), BackendError> {
        let timed = self.0.queues.memories().into_iter().filter(|memory| !self.0.queues.is_untimed(*memory));
        timed.for_each(|memory| self.0.queues.wait(memory, &self.0.clock));
        self.0.queues.report(report);
        Ok(())
    }

    fn load(
        &self,
        spec: &SessionSpec<'_>,
        control: &MockControl,
        _: &dyn Reporter,
    ) -> Result<Loaded<MockSession, MockWeightPager>, BackendError> {
        if control.stopped() {
            return Err(BackendError::Stopped);
        }
        let name = spec.file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let model = self.0.models.borrow().get(&name).cloned();
        let model = model.ok_or_else(|| BackendError::Runtime {
            doing: format!("load {name}"),
            cause: "no such model was set up".into(),
        })?;
        let (provider, refused) = self.provider(spec)?;
        let weights = self.weights(&name, spec);
        Ok(Loaded {
            session: MockSession::new(
                model,
                self.0.clock.clone(),
                self.0.queues.clone(),
                weights.clone(),
                self.0.failing_run.clone(),
            ),
            weights: MockWeightPager::new(weights),
            provider,
            processor: "mock".into(),
            packs_weights: false,
            refused,
        })
    }

    fn reserve(&self, memory: MemoryId, bytes: u64) -> Result<MockBuffer, BackendError> {
        self.0.reserved.set(self.0.reserved.get() + bytes);
        let account = self.0.memory_left.borrow().get(&memory).cloned();
        if let Some(left) = &account {
            let out = || BackendError::OutOfMemory { bytes, place: "mock memory".into(), cause: "it is full".into() };
            left.set(left.get().checked_sub(bytes).ok_or_else(out)?);
        }
        MockBuffer::of(memory, bytes, account)
    }

    fn reserve_on_disk(&self, _dir: &Path, bytes: u64) -> Result<MockBuffer, BackendError> {
        let buffer = self.reserve(MemoryId::HOST, bytes)?;
        self.0.on_disk.borrow_mut().push(buffer.clone());
        Ok(buffer)
    }

    fn prefetch(&self, buffer: &MockBuffer, _offset: u64, bytes: u64) {
        let number = self.on_disk(buffer).expect("only buffers on disk are prefetched");
        self.0.disk_events.borrow_mut().push(DiskBufferEvent::Prefetch(number, bytes));
    }

    fn evict(&self, buffers: &[&MockBuffer]) {
        let number = |buffer: &&MockBuffer| self.on_disk(buffer).expect("only buffers on disk are evicted");
        self.0.disk_events.borrow_mut().push(DiskBufferEvent::Evict(buffers.iter().map(number).collect()));
        self.0.clock.advance(EVICTION);
    }

    fn slice(&self, buffer: &MockBuffer, offset: u64, bytes: u64) -> Option<MockBuffer> {
        let is_undivided = self.0.undivided.borrow().contains(&buffer.memory());
        buffer.slice(offset, bytes).filter(|_| !is_undivided)
    }

    fn view(&self, buffer: &MockBuffer, dtype: DType, shape: &[u64]) -> Result<MockTensor, BackendError> {
        MockTensor::view(buffer, dtype, shape)
    }

    fn write(&self, buffer: &MockBuffer, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        buffer.write(offset, bytes)
    }

    fn read(&self, tensor: &MockTensor, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        tensor.read(offset, bytes)?;
        self.pass(tensor, MemoryId::HOST, bytes.len() as u64);
        Ok(())
    }

    fn copy(&self, from: &MockTensor, to: &MockTensor) -> Result<(), BackendError> {
        self.0.copies.set(self.0.copies.get() + 1);
        from.copy_to(to)?;
        self.pass(from, to.memory(), byte_len(from.dtype(), from.shape()).unwrap_or(0));
        Ok(())
    }

    fn control(&self) -> Result<MockControl, BackendError> {
        Ok(MockControl::default())
    }

    fn now(&self) -> Duration {
        self.0.clock.now()
    }

    fn memory_use(&self) -> MemoryUse {
        MemoryUse { resident: self.0.resident.get(), ..MemoryUse::default() }
    }

    fn memory_limit(&self) -> Option<u64> {
        self.0.memory_limit.get()
    }
}

/// Stops mock runs.
#[derive(Clone, Default)]
pub struct MockControl(Arc<AtomicBool>);

impl MockControl {
    pub(crate) fn stopped(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl Control for MockControl {
    fn stop(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn resume(&self) {
        self.0.store(false, Ordering::SeqCst);
    }
}
