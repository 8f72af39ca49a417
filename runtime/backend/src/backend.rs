//! The engine's port, over ONNX Runtime.

use crate::create_session::{Made, devices_of, find_device, provide};
use crate::environment::{OpenError, OrtOptions, Runtime, open};
use crate::loading::Loading;
use crate::os;
use crate::pages;
use crate::probe;
use crate::raw::device::{DeviceMemory, Place, copy};
use crate::raw::memory::{HostMemory, Memory};
use crate::raw::run::OrtControl;
use crate::raw::value::Value;
use crate::session::{OrtSession, OrtTensor, OrtWeightStream, SessionParts};
use crate::weights::disk::DiskReaders;
use crate::weights::upload::{Source, Upload, Uploads};
use hpp_engine::port::{
    Backend, HostCopy, Interval, Loaded, MemoryId, MemoryUse, SessionSpec, TimingToken, Uploaded, WeightLocation,
    WeightResidency,
};
use hpp_engine::{BackendError, Reporter};
use hpp_schema::{DType, Provider};
use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

/// ONNX Runtime as the engine sees it. Lives on one thread; clones share its memories.
#[derive(Clone)]
pub struct OrtBackend {
    pub(crate) runtime: Arc<Runtime>,
    /// The host first, then devices as they come into use; a memory's number is its index.
    places: Rc<RefCell<Vec<Rc<Place>>>>,
    readers: DiskReaders,
    pub(crate) uploads: Uploads,
    /// See [`read_staging`](Self::read_staging).
    read_staging: Rc<RefCell<Option<Memory>>>,
    /// Where sessions loaded since then have packed their weights, until all of a plan's are loaded.
    packed: Rc<RefCell<Vec<Range<usize>>>>,
}

/// Most bytes of host memory that stay for reading tensors from devices: the scores of a few tokens of any vocabulary. Those of
/// every token of a long prompt are hundreds of times as many.
const KEPT_STAGING: u64 = 8 << 20;

/// Bytes in one memory.
pub struct OrtBuffer {
    pub(crate) memory: Memory,
    pub(crate) place: Rc<Place>,
}

impl OrtBackend {
    /// Finds ONNX Runtime and sets it up, once for the process; later calls share what the first one made. Its warnings
    /// go to `reporter`, that of the latest call.
    ///
    /// Backends may be opened on any number of threads; one thread loads sessions at a time, and the others wait. While a plan
    /// loads whose weights are read from disk, nothing else in the process may map files of its weights directory privately and
    /// writable: such mappings would be taken for those of the session.
    pub fn open(options: &OrtOptions, reporter: Arc<dyn Reporter>) -> Result<Self, OpenError> {
        let runtime = open(options, reporter)?;
        let places = Rc::new(RefCell::new(vec![Rc::new(Place::host())]));
        Ok(OrtBackend {
            runtime,
            places,
            readers: DiskReaders::default(),
            uploads: Uploads::default(),
            read_staging: Rc::default(),
            packed: Rc::default(),
        })
    }

    /// The memory of the device of a provider that plans call by this name, without a session on it.
    pub fn device_memory(&self, provider: Provider, device: &str) -> Result<MemoryId, BackendError> {
        let (_, device) = find_device(&self.runtime, provider, device)?;
        self.use_devices(provider)?;
        let places = self.places.borrow();
        let place = places.iter().find(|place| place.is(&device));
        place.map(|place| place.id).ok_or_else(|| BackendError::Runtime {
            doing: format!("use {}", provider.name()),
            cause: "its device has no memory of its own".into(),
        })
    }

    /// Host memory pinned for copies to and from a device's memory; `None` where its provider cannot pin. Not zeroed, and
    /// written only by copies.
    pub fn reserve_pinned(&self, device: MemoryId, bytes: u64) -> Result<Option<OrtBuffer>, BackendError> {
        let Some(place) = self.place(device)?.pinned(&self.runtime.environment)? else { return Ok(None) };
        let memory = Memory::Device(Rc::new(DeviceMemory::reserve(&place, bytes)?));
        Ok(Some(OrtBuffer { memory, place: Rc::new(place) }))
    }

    fn place(&self, memory: MemoryId) -> Result<Rc<Place>, BackendError> {
        let place = self.places.borrow().get(memory.0 as usize).cloned();
        place.ok_or_else(|| BackendError::Misfit {
            what: format!("memory {}", memory.0),
            why: "no partition has brought it into use".into(),
        })
    }

    /// Host memory that tensors on devices are copied to when they are read: the same each time, unless it is large.
    fn read_staging(&self, bytes: u64) -> Result<Memory, BackendError> {
        let mut kept = self.read_staging.borrow_mut();
        if let Some(memory) = kept.as_ref().filter(|memory| memory.len() >= bytes) {
            return Ok(memory.clone());
        }
        let memory = Memory::Host(Rc::new(HostMemory::reserve(bytes)?));
        if bytes <= KEPT_STAGING {
            *kept = Some(memory.clone());
        }
        Ok(memory)
    }

    /// Makes every device of a provider a place tensors can lie in.
    fn use_devices(&self, provider: Provider) -> Result<(), BackendError> {
        for (number, device) in devices_of(&self.runtime, provider).into_iter().enumerate() {
            let known = self.places.borrow().iter().any(|place| place.is(&device));
            if !known {
                let id = MemoryId(self.places.borrow().len() as u32);
                let (turn, streams) = (self.runtime.turn(provider), self.runtime.streams(provider, number));
                tracing::info!(
                    provider = provider.name(),
                    number,
                    device = crate::create_session::describe(&device),
                    streams = streams.is_some(),
                    "device in use"
                );
                let place = Place::device(id, &self.runtime.environment, &device, turn, streams)?;
                self.places.borrow_mut().push(Rc::new(place));
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
    type WeightStream = OrtWeightStream;
    type UploadSource = Source;
    type Upload = Upload;

    fn pin(&self, memory: MemoryId, bytes: u64) -> u64 {
        self.place(memory).map_or(0, |place| self.uploads.pin(&self.runtime, &place, bytes))
    }

    fn upload_source(
        &self,
        weights: &[WeightLocation],
        memory: MemoryId,
        host: HostCopy,
    ) -> Result<Source, BackendError> {
        self.uploads.source(weights, memory, host)
    }

    fn upload(&self, source: &Source, to: &[&OrtBuffer]) -> Result<Upload, BackendError> {
        self.uploads.begin(&self.runtime, source, to)
    }

    fn wait_upload(&self, upload: Upload) -> Result<Uploaded, BackendError> {
        upload.wait()
    }

    fn synchronize(&self, memory: MemoryId) -> Result<(), BackendError> {
        match &self.place(memory)?.streams {
            Some(streams) => streams.wait_for_runs(),
            None => Ok(()),
        }
    }

    fn synchronize_untimed(&self, memory: MemoryId) -> Result<(), BackendError> {
        self.place(memory)?.drain(&self.runtime.environment)
    }

    fn synchronize_all(&self, report: &mut dyn FnMut(TimingToken, Interval)) -> Result<(), BackendError> {
        let places = self.places.borrow();
        places.iter().filter_map(|place| place.streams.as_ref()).try_for_each(|streams| streams.report(report))
    }

    fn load(
        &self,
        spec: &SessionSpec<'_>,
        control: &OrtControl,
        reporter: &dyn Reporter,
    ) -> Result<Loaded<OrtSession, OrtWeightStream>, BackendError> {
        let loading = Loading::begin();
        let provided = provide(&self.runtime, spec, control, reporter, &loading)?;
        if provided.provider != Provider::Cpu {
            self.use_devices(provided.provider)?;
        }
        let Made { session, processor, weights, packed } = provided.made;
        let is_mapped = weights.prepared && matches!(weights.residency, WeightResidency::Mapped { .. });
        let stays_mapped = is_mapped.then(|| weights.dir.join(crate::weights::disk::WEIGHTS));
        // SAFETY: `provide` claimed the mappings for this session alone. The session drops its weights before
        // itself, and checks them before each run.
        let weights = unsafe { self.readers.keep(weights, spec.partition, reporter) }?;
        self.packed.borrow_mut().extend(packed);
        let turn = self.runtime.turn(provided.provider);
        let streams = match provided.provider {
            Provider::Cuda => {
                let (number, _) = find_device(&self.runtime, Provider::Cuda, &spec.device.name)?;
                self.runtime.streams(Provider::Cuda, number)
            }
            Provider::Webgpu | Provider::Cpu => None,
        };
        let places = self.places.borrow().clone();
        let parts = SessionParts { session, weights, places, turn, streams, mapped: stays_mapped };
        let (session, weights) = OrtSession::new(parts)?;
        let (provider, refused) = (provided.provider, provided.refused);
        Ok(Loaded { session, weights, provider, processor, refused })
    }

    fn finish_loading(&self) {
        pages::gather(&self.packed.take());
    }

    fn reserve(&self, memory: MemoryId, bytes: u64) -> Result<OrtBuffer, BackendError> {
        let place = self.place(memory)?;
        if memory == MemoryId::HOST {
            return Ok(OrtBuffer { memory: Memory::Host(Rc::new(HostMemory::reserve(bytes)?)), place });
        }
        let buffer = OrtBuffer { memory: Memory::Device(Rc::new(DeviceMemory::reserve(&place, bytes)?)), place };
        // Devices hand out what others left. Untouched host pages are all one page of zeros, so this costs a copy and no memory.
        let zeros = self.reserve(MemoryId::HOST, bytes)?;
        let shape = [bytes];
        self.copy(&self.view(&zeros, DType::Uint8, &shape)?, &self.view(&buffer, DType::Uint8, &shape)?)?;
        Ok(buffer)
    }

    fn view(&self, buffer: &OrtBuffer, dtype: DType, shape: &[u64]) -> Result<OrtTensor, BackendError> {
        Value::view(&buffer.memory, &buffer.place, dtype, shape).map(OrtTensor)
    }

    fn write(&self, buffer: &OrtBuffer, offset: u64, bytes: &[u8]) -> Result<(), BackendError> {
        match &buffer.memory {
            Memory::Host(host) => host.write(offset, bytes),
            Memory::Device(_) => Err(BackendError::Misfit {
                what: "a write".into(),
                why: "device memory is written by copying a tensor there".into(),
            }),
        }
    }

    fn read(&self, tensor: &OrtTensor, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        let OrtTensor(value) = tensor;
        if value.place == MemoryId::HOST {
            return value.read_host(offset, bytes);
        }
        self.synchronize(value.place)?;
        if offset.checked_add(bytes.len() as u64).is_none_or(|end| end > value.size()) {
            let why = format!("the tensor is {} {:?}", value.dtype, value.dims.as_slice());
            return Err(BackendError::Misfit { what: format!("{} bytes at {offset}", bytes.len()), why });
        }
        let (memory, host) = (self.read_staging(value.size())?, self.place(MemoryId::HOST)?);
        // A copy takes whole tensors. It cannot begin at the rows that are wanted: WebGPU's addresses are handles of buffers, and
        // `CopyTensors` knows no offset.
        let there = Value::view(&memory, &host, value.dtype, &value.dims)?;
        copy(&self.runtime.environment, value, &there)?;
        there.read_host(offset, bytes)
    }

    fn copy(&self, from: &OrtTensor, to: &OrtTensor) -> Result<(), BackendError> {
        // ONNX Runtime copies from and to devices only.
        match (from.0.memory(), to.0.memory()) {
            (Some(Memory::Host(source)), Some(Memory::Host(target))) => source.copy(target, from.0.size()),
            _ => {
                self.synchronize(from.0.place)?;
                self.synchronize(to.0.place)?;
                copy(&self.runtime.environment, &from.0, &to.0)
            }
        }
    }

    fn control(&self) -> Result<OrtControl, BackendError> {
        OrtControl::new()
    }

    fn name_mapped_files(&self, files: &[&Path]) {
        crate::fault::name(files);
    }

    fn memory_limit(&self) -> Option<u64> {
        os::memory_limit()
    }

    fn trim_memory(&self) -> Result<(), BackendError> {
        probe::trim_memory(&self.runtime)?;
        os::trim_heap();
        Ok(())
    }

    fn memory_use(&self) -> MemoryUse {
        let (peak_resident, resident) = os::resident();
        let devices = self.places.borrow().iter().filter_map(|place| place.memory_use()).collect();
        MemoryUse { peak_resident, resident, devices }
    }
}
