//! Implements the engine's `Backend` port.

use crate::buffer::OrtBuffer;
use crate::create_session::{CreatedSession, create_session};
use crate::environment::{OpenError, OrtOptions, SharedRuntime, open};
use crate::loading::Loading;
use crate::os::{self, Pages};
use crate::pages;
use crate::probe;
use crate::provider_devices::{devices_of, find_device};
use crate::raw::copier::PendingCopies;
use crate::raw::copy::{copy, wait_for_untimed_runs, watch_untimed_runs};
use crate::raw::memory::{HostPages, Memory};
use crate::raw::run::OrtControl;
use crate::raw::space::MemorySpace;
use crate::raw::value::Value;
use crate::session::{OrtSession, OrtTensor, OrtWeightPager, SessionParts};
use crate::state_file::StateFile;
use crate::weights::disk::{DiskReaders, stays_mapped};
use crate::weights::upload::{Upload, UploadSource, Uploader};
use hpp_engine::port::{
    Backend, HostCopy, Interval, Loaded, MemoryId, MemoryUse, SessionSpec, TimingToken, Uploaded, WeightLocation,
};
use hpp_engine::{BackendError, Reporter};
use hpp_schema::{DType, Device, DeviceKind, Provider};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// A backend that runs partitions on ONNX Runtime. Belongs to one thread; clones share its memory spaces.
#[derive(Clone)]
pub struct OrtBackend {
    pub(crate) runtime: Arc<SharedRuntime>,
    spaces: Rc<MemorySpaces>,
    readers: DiskReaders,
    pub(crate) uploader: Uploader,
    /// See [`read_staging`](Self::read_staging).
    read_staging: Rc<RefCell<Option<Memory>>>,
    /// The address ranges of packed weights of the sessions loaded since the last [`finish_loading`](Backend::finish_loading).
    packed: Rc<RefCell<Vec<Range<usize>>>>,
    /// The devices whose runs are watched.
    watches: Rc<RefCell<BTreeMap<MemoryId, PendingCopies>>>,
    /// The files of states on disk, by directory.
    state_files: Rc<RefCell<BTreeMap<PathBuf, Arc<StateFile>>>>,
}

/// The memory of each device that a backend uses.
struct MemorySpaces {
    runtime: Arc<SharedRuntime>,
    /// The host, then each device in the order of first use; a memory id is an index into this.
    list: RefCell<Vec<Rc<MemorySpace>>>,
}

/// Waits for runs that returned early. Nobody reads the outputs of some, such as states after the last token; if a process ended while its device
/// computed, software Vulkan would crash.
impl Drop for MemorySpaces {
    fn drop(&mut self) {
        for space in self.list.get_mut() {
            if let Err(error) = wait_for_untimed_runs(&self.runtime.environment, space) {
                tracing::debug!(%error, "a device does not finish its runs");
            }
        }
    }
}

/// Most bytes of staging memory that are kept for reads of device tensors: enough for the logits of a few tokens with any vocabulary. The
/// logits of every token of a long prompt take hundreds of times as much.
const KEPT_STAGING: u64 = 8 << 20;

impl OrtBackend {
    /// Finds and initialises ONNX Runtime on the first call in a process; later calls share it. Its warnings go to the `reporter` of the
    /// latest call.
    ///
    /// Backends may be opened on any number of threads; one thread loads sessions at a time, and the others wait. While a plan
    /// loads whose weights are streamed from disk, nothing else in the process may map files of its weights directory privately and
    /// writable: the backend would take such mappings for the session's.
    pub fn open(options: &OrtOptions, reporter: Arc<dyn Reporter>) -> Result<Self, OpenError> {
        let runtime = open(options, reporter)?;
        let list = RefCell::new(vec![Rc::new(MemorySpace::host())]);
        let spaces = Rc::new(MemorySpaces { runtime: runtime.clone(), list });
        Ok(OrtBackend {
            runtime,
            spaces,
            readers: DiskReaders::default(),
            uploader: Uploader::default(),
            read_staging: Rc::default(),
            packed: Rc::default(),
            watches: Rc::default(),
            state_files: Rc::default(),
        })
    }

    /// The memory of a provider's device, by its name in plans (`gpu0`); needs no session on the device.
    pub fn device_memory(&self, provider: Provider, device: &str) -> Result<MemoryId, BackendError> {
        let device = find_device(&self.runtime, provider, &Device::new(device, DeviceKind::Gpu))?.device;
        self.add_spaces(provider)?;
        let spaces = self.spaces.list.borrow();
        let space = spaces.iter().find(|space| space.belongs_to(&device));
        space.map(|space| space.id).ok_or_else(|| BackendError::Runtime {
            doing: format!("use {}", provider.name()),
            cause: "its device has no memory of its own".into(),
        })
    }

    /// Host memory pinned for copies to and from a device's memory; `None` if its provider cannot pin. Not zeroed, and
    /// written only by copies.
    pub fn reserve_pinned(&self, device: MemoryId, bytes: u64) -> Result<Option<OrtBuffer>, BackendError> {
        let Some(space) = self.space(device)?.pinned(&self.runtime.environment)? else { return Ok(None) };
        let memory = Memory::Device(Rc::new(space.reserve(bytes)?));
        Ok(Some(OrtBuffer { memory, space: Rc::new(space) }))
    }

    fn space(&self, memory: MemoryId) -> Result<Rc<MemorySpace>, BackendError> {
        let space = self.spaces.list.borrow().get(memory.0 as usize).cloned();
        space.ok_or_else(|| BackendError::Misfit {
            what: format!("memory {}", memory.0),
            why: "no partition uses its device".into(),
        })
    }

    /// Host memory to which [`read`](Backend::read) copies device tensors. Reused, unless it is larger than [`KEPT_STAGING`].
    fn read_staging(&self, bytes: u64) -> Result<Memory, BackendError> {
        let mut kept = self.read_staging.borrow_mut();
        if let Some(memory) = kept.as_ref().filter(|memory| memory.len() >= bytes) {
            return Ok(memory.clone());
        }
        let memory = Memory::Host(Rc::new(HostPages::reserve(bytes)?));
        if bytes <= KEPT_STAGING {
            *kept = Some(memory.clone());
        }
        Ok(memory)
    }

    /// Adds the memory space of every device of a provider that keeps tensors there.
    fn add_spaces(&self, provider: Provider) -> Result<(), BackendError> {
        if provider.uses_host_memory() {
            return Ok(());
        }
        for (number, device) in devices_of(&self.runtime, provider).into_iter().enumerate() {
            let known = self.spaces.list.borrow().iter().any(|space| space.belongs_to(&device));
            if !known {
                let id = MemoryId(self.spaces.list.borrow().len() as u32);
                let (lock, streams) = (self.runtime.device_lock(provider), self.runtime.streams(provider, number));
                tracing::info!(
                    provider = provider.id(),
                    number,
                    device = crate::provider_devices::describe(&device),
                    streams = streams.is_some(),
                    "device in use"
                );
                let space = MemorySpace::device(id, &self.runtime.environment, &device, lock, streams)?;
                self.spaces.list.borrow_mut().push(Rc::new(space));
            }
        }
        Ok(())
    }
}

impl Backend for OrtBackend {
    type Buffer = OrtBuffer;
    type Tensor = OrtTensor;
    type Session = OrtSession;
    type Control = OrtControl;
    type WeightPager = OrtWeightPager;
    type UploadSource = UploadSource;
    type Upload = Upload;

    fn pin(&self, memory: MemoryId, bytes: u64) -> u64 {
        self.space(memory).map_or(0, |space| self.uploader.pin(&self.runtime, &space, bytes))
    }

    fn upload_source(
        &self,
        weights: &[WeightLocation],
        memory: MemoryId,
        host: HostCopy,
    ) -> Result<UploadSource, BackendError> {
        self.uploader.source(weights, memory, host)
    }

    fn upload(&self, source: &UploadSource, to: &[&OrtBuffer]) -> Result<Upload, BackendError> {
        self.uploader.begin(&self.runtime, source, to)
    }

    fn wait_upload(&self, upload: Upload) -> Result<Uploaded, BackendError> {
        upload.wait()
    }

    fn copy_ahead(&self, from: &OrtTensor, to: &OrtTensor) -> Result<Option<Upload>, BackendError> {
        let device = self.space(to.0.space)?;
        match self.uploader.copy_ahead(&self.runtime, &from.0, &to.0, &device)? {
            Some(upload) => Ok(Some(upload)),
            // Without streams the device's queue orders the copy after the runs that were submitted before.
            None => self.copy(from, to).map(|()| None),
        }
    }

    fn synchronize(&self, memory: MemoryId) -> Result<(), BackendError> {
        match &self.space(memory)?.streams {
            Some(streams) => streams.wait_for_runs(),
            None => Ok(()),
        }
    }

    fn synchronize_untimed(&self, memory: MemoryId) -> Result<(), BackendError> {
        let space = self.space(memory)?;
        wait_for_untimed_runs(&self.runtime.environment, &space)
    }

    fn watch_untimed(&self, memory: MemoryId) -> Result<(), BackendError> {
        let space = self.space(memory)?;
        let watch = watch_untimed_runs(&self.uploader.copier(&self.runtime, memory)?, &space)?;
        self.watches.borrow_mut().extend(watch.map(|watch| (memory, watch)));
        Ok(())
    }

    fn finish_watch(&self, memory: MemoryId) -> Result<Option<Interval>, BackendError> {
        let watch = self.watches.borrow_mut().remove(&memory);
        watch.map(PendingCopies::wait).transpose()
    }

    fn synchronize_all(&self, report: &mut dyn FnMut(TimingToken, Interval)) -> Result<(), BackendError> {
        let spaces = self.spaces.list.borrow();
        spaces.iter().filter_map(|space| space.streams.as_ref()).try_for_each(|streams| streams.report(report))
    }

    fn load(
        &self,
        spec: &SessionSpec<'_>,
        control: &OrtControl,
        reporter: &dyn Reporter,
    ) -> Result<Loaded<OrtSession, OrtWeightPager>, BackendError> {
        let loading = Loading::begin();
        let provided = create_session(&self.runtime, spec, control, reporter, &loading)?;
        self.add_spaces(provided.provider)?;
        let CreatedSession { session, processor, weights, packs_weights, packed } = provided.created;
        let is_mapped = weights.sealed.is_some() && stays_mapped(weights.residency);
        let mapped = is_mapped.then(|| weights.dir.join(crate::weights::disk::WEIGHTS));
        // SAFETY: `create_session` claimed the mappings for this session alone. `SessionCore` drops the weights before the session, and `run`
        // checks them first.
        let weights = unsafe { self.readers.take_over(weights, spec.partition, reporter) }?;
        self.packed.borrow_mut().extend(packed);
        let lock = self.runtime.device_lock(provided.provider);
        let streams = match provided.provider.facts().user_streams {
            true => {
                let number = find_device(&self.runtime, provided.provider, spec.device)?.number;
                self.runtime.streams(provided.provider, number)
            }
            false => None,
        };
        let spaces = self.spaces.list.borrow().clone();
        let provider = provided.provider;
        let parts = SessionParts { session, weights, spaces, lock, streams, mapped, provider };
        let (session, weights) = OrtSession::new(parts)?;
        let (provider, refused) = (provided.provider, provided.refused);
        Ok(Loaded { session, weights, provider, processor, packs_weights, refused })
    }

    fn finish_loading(&self) {
        pages::collapse(&self.packed.take());
    }

    fn reserve(&self, memory: MemoryId, bytes: u64) -> Result<OrtBuffer, BackendError> {
        let space = self.space(memory)?;
        if memory == MemoryId::HOST {
            return Ok(OrtBuffer { memory: Memory::Host(Rc::new(HostPages::reserve(bytes)?)), space });
        }
        let buffer = OrtBuffer { memory: Memory::Device(Rc::new(space.reserve(bytes)?)), space };
        // Devices do not zero their blocks.
        if let Some(streams) = buffer.space.streams.as_ref().filter(|_| bytes > 0) {
            // SAFETY: the block was just reserved on this device, and nothing else knows it.
            unsafe { streams.zero(buffer.memory.address(), usize::try_from(bytes).unwrap_or(usize::MAX)) }?;
            return Ok(buffer);
        }
        // Untouched host pages all share one page of zeros, so this costs a copy and no memory.
        let zeros = self.reserve(MemoryId::HOST, bytes)?;
        let shape = [bytes];
        self.copy(&self.view(&zeros, DType::Uint8, &shape)?, &self.view(&buffer, DType::Uint8, &shape)?)?;
        Ok(buffer)
    }

    fn reserve_on_disk(&self, dir: &Path, bytes: u64) -> Result<OrtBuffer, BackendError> {
        let failed =
            |error: io::Error| BackendError::NoDiskRoom { dir: dir.to_owned(), bytes, cause: error.to_string() };
        let known = self.state_files.borrow().get(dir).cloned();
        let file = match known {
            Some(file) => file,
            None => {
                let file = StateFile::create(dir).map_err(failed)?;
                self.state_files.borrow_mut().insert(dir.to_owned(), Arc::clone(&file));
                file
            }
        };
        let pages = file.reserve(bytes).map_err(failed)?;
        let memory = Memory::Host(Rc::new(HostPages::from(pages)));
        Ok(OrtBuffer { memory, space: self.space(MemoryId::HOST)? })
    }

    fn is_in_memory(&self, dir: &Path) -> bool {
        crate::state_file::is_in_memory(dir)
    }

    fn prefetch(&self, buffer: &OrtBuffer, offset: u64, bytes: u64) {
        if let Memory::Host(host) = &buffer.memory {
            host.prefetch(offset, bytes);
        }
    }

    fn evict(&self, buffers: &[&OrtBuffer]) {
        let pages = |buffer: &&'_ OrtBuffer| match &buffer.memory {
            Memory::Host(host) => Some(Rc::clone(host)),
            Memory::Device(_) => None,
        };
        let hosts: Vec<Rc<HostPages>> = buffers.iter().filter_map(pages).collect();
        let pages: Vec<&Pages> = hosts.iter().map(|host| host.pages()).collect();
        if let Some(file) = pages.iter().find_map(|pages| pages.file()) {
            file.evict(&pages);
        }
    }

    fn slice(&self, buffer: &OrtBuffer, offset: u64, bytes: u64) -> Option<OrtBuffer> {
        let memory = match &buffer.memory {
            Memory::Host(host) => Memory::Host(Rc::new(host.slice(offset, bytes)?)),
            Memory::Device(device) => Memory::Device(Rc::new(device.slice(offset, bytes)?)),
        };
        Some(OrtBuffer { memory, space: Rc::clone(&buffer.space) })
    }

    fn view(&self, buffer: &OrtBuffer, dtype: DType, shape: &[u64]) -> Result<OrtTensor, BackendError> {
        Value::view(&buffer.memory, &buffer.space, dtype, shape).map(OrtTensor)
    }

    fn write(&self, buffer: &OrtBuffer, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        match &buffer.memory {
            Memory::Host(host) => host.write(offset, bytes),
            Memory::Device(_) => Err(BackendError::Misfit {
                what: "a write".into(),
                why: "device memory is written by copying a tensor to it".into(),
            }),
        }
    }

    fn read(&self, tensor: &OrtTensor, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        let OrtTensor(value) = tensor;
        if value.space == MemoryId::HOST {
            return value.read_host(offset, bytes);
        }
        self.synchronize(value.space)?;
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > value.size()) {
            let why = format!("the tensor is {} {:?}", value.dtype, value.dims.as_slice());
            return Err(BackendError::Misfit { what: format!("{} bytes at {offset}", bytes.len()), why });
        }
        let (memory, host) = (self.read_staging(value.size())?, self.space(MemoryId::HOST)?);
        // Copies the whole tensor even for a few rows: WebGPU's addresses are buffer handles, and `CopyTensors` takes no offset.
        let staged = Value::view(&memory, &host, value.dtype, &value.dims)?;
        copy(&self.runtime.environment, value, &staged)?;
        staged.read_host(offset, bytes)
    }

    fn copy(&self, from: &OrtTensor, to: &OrtTensor) -> Result<(), BackendError> {
        // ONNX Runtime copies from and to devices only.
        match (from.0.memory(), to.0.memory()) {
            (Some(Memory::Host(source)), Some(Memory::Host(target))) => source.copy(target, from.0.size()),
            _ => {
                self.synchronize(from.0.space)?;
                self.synchronize(to.0.space)?;
                copy(&self.runtime.environment, &from.0, &to.0)
            }
        }
    }

    fn control(&self) -> Result<OrtControl, BackendError> {
        OrtControl::new()
    }

    fn name_mapped_files(&self, files: &[&Path]) {
        crate::sigbus::register(files);
    }

    fn memory_limit(&self) -> Option<u64> {
        os::memory_limit()
    }

    fn trim_memory(&self) -> Result<(), BackendError> {
        probe::trim_memory(&self.runtime)?;
        os::trim_heap();
        Ok(())
    }

    fn trim_heap(&self) {
        os::trim_heap();
    }

    fn memory_use(&self) -> MemoryUse {
        let (peak_resident, resident) = os::resident();
        let devices = self.spaces.list.borrow().iter().filter_map(|space| space.memory_use()).collect();
        MemoryUse { peak_resident, resident, devices }
    }
}
