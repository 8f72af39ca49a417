//! Places: the host's memory and each device's, how to allocate there and how to copy between them.

use super::check;
use super::memory::{HostMemory, Memory};
use super::value::Value;
use crate::cuda::streams::Streams;
use hpp_engine::BackendError;
use hpp_engine::port::MemoryId;
use hpp_schema::DType;
use ort::AsPointer;
use ort::environment::Environment;
use ort::memory::MemoryInfo;
use ort::sys::{self, OrtAllocator, OrtEpDevice, OrtMemoryInfo, OrtValue};
use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Whether whoever uses a device waits for its turn: some providers keep what they have recorded for the device in one place
/// and do not expect two threads there. The others need no turns.
#[derive(Clone, Default)]
pub(crate) struct Turn(Option<Arc<Mutex<()>>>);

impl Turn {
    /// One user at a time.
    pub fn needed() -> Self {
        Turn(Some(Arc::default()))
    }

    /// Waits for a turn, which lasts as long as what this gives.
    pub fn take(&self) -> Option<MutexGuard<'_, ()>> {
        self.0.as_ref().map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// This turn where it is needed, else another.
    pub fn or<'a>(&'a self, other: &'a Turn) -> &'a Turn {
        if self.0.is_some() { self } else { other }
    }
}

/// Bytes of a look at a device.
const GLANCE: u64 = 16;

/// A memory by number, with what ONNX Runtime calls it.
pub(crate) struct Place {
    pub id: MemoryId,
    pub turn: Turn,
    info: MemoryInfo<'static>,
    /// `None` on the host.
    pub allocator: Option<Rc<DeviceAllocator>>,
    /// Of providers whose runs return early and tell nothing: bytes there, and room for them on the host, to
    /// read back, which waits.
    glance: Option<(Rc<DeviceMemory>, Memory)>,
    /// Where its device computes while the host goes on.
    pub streams: Option<Arc<Streams>>,
}

impl Place {
    /// The host.
    pub fn host() -> Self {
        Place {
            id: MemoryId::HOST,
            turn: Turn::default(),
            info: MemoryInfo::default(),
            allocator: None,
            glance: None,
            streams: None,
        }
    }

    /// The memory of a device.
    pub fn device(
        id: MemoryId,
        environment: &Environment,
        device: &ort::device::Device<'_>,
        turn: Turn,
        streams: Option<Arc<Streams>>,
    ) -> Result<Self, BackendError> {
        let info = device.memory_info(false).to_owned();
        let kind = sys::OrtDeviceMemoryType::OrtDeviceMemoryType_DEFAULT;
        let allocator = DeviceAllocator::new(environment, device, kind, (turn.clone(), streams.clone()))?;
        let mut place = Place { id, turn, info, allocator: Some(Rc::new(allocator)), glance: None, streams };
        if place.streams.is_none() {
            let host = Memory::Host(Rc::new(HostMemory::reserve(GLANCE)?));
            place.glance = Some((Rc::new(DeviceMemory::reserve(&place, GLANCE)?), host));
        }
        Ok(place)
    }

    /// Host memory that this device reads and writes by itself, where its provider has such memory.
    pub fn pinned(&self, environment: &Environment) -> Result<Option<Self>, BackendError> {
        let Some(own) = &self.allocator else { return Ok(None) };
        let Some(device) = environment.devices().find(|device| ptr::eq(device.ptr(), own.device)) else {
            return Ok(None);
        };
        let kind = sys::OrtDeviceMemoryType::OrtDeviceMemoryType_HOST_ACCESSIBLE;
        // SAFETY: the device is alive. Without such memory the answer is null, which `memory_info` does not expect.
        if unsafe { (ort::api().EpDevice_MemoryInfo)(own.device, kind) }.is_null() {
            return Ok(None);
        }
        let info = device.memory_info(true).to_owned();
        let allocator = DeviceAllocator::new(environment, &device, kind, (self.turn.clone(), self.streams.clone()))?;
        let (turn, allocator) = (self.turn.clone(), Some(Rc::new(allocator)));
        Ok(Some(Place { id: MemoryId::HOST, turn, info, allocator, glance: None, streams: None }))
    }

    /// Waits until the device is through with runs whose calls have returned and whose time nobody tells.
    pub fn drain(&self, environment: &Environment) -> Result<(), BackendError> {
        let Some((glance, host)) = &self.glance else { return Ok(()) };
        let there = Value::view(&Memory::Device(Rc::clone(glance)), self, DType::Uint8, &[GLANCE])?;
        copy(environment, &there, &Value::view(host, &Place::host(), DType::Uint8, &[GLANCE])?)
    }

    pub fn info(&self) -> *const OrtMemoryInfo {
        self.info.ptr()
    }

    /// Whether this is the memory of that device.
    pub fn is(&self, device: &ort::device::Device<'_>) -> bool {
        self.allocator.as_ref().is_some_and(|allocator| ptr::eq(allocator.device, device.ptr()))
    }

    /// What is in use there; nothing for the host.
    pub fn memory_use(&self) -> Option<hpp_engine::port::DeviceMemory> {
        let allocator = self.allocator.as_ref()?;
        let name = format!("{}:{}", self.info.allocation_device().as_str(), self.info.device_id());
        Some(hpp_engine::port::DeviceMemory { name, used: allocator.stat(c"InUse"), total: allocator.stat(c"Limit") })
    }
}

/// An allocator of a device's memory, or of host memory for it, that every session on it can use.
pub(crate) struct DeviceAllocator {
    environment: Environment,
    device: *const OrtEpDevice,
    kind: sys::OrtDeviceMemoryType,
    allocator: NonNull<OrtAllocator>,
    turn: Turn,
    streams: Option<Arc<Streams>>,
}

impl DeviceAllocator {
    fn new(
        environment: &Environment,
        device: &ort::device::Device<'_>,
        kind: sys::OrtDeviceMemoryType,
        (turn, streams): (Turn, Option<Arc<Streams>>),
    ) -> Result<Self, BackendError> {
        let mut allocator = ptr::null_mut();
        // SAFETY: the device comes from this environment, which lives as long as the process; `allocator` is a place for one pointer.
        unsafe {
            let status = (ort::api().CreateSharedAllocator)(
                environment.ptr().cast_mut(),
                device.ptr(),
                kind,
                sys::OrtAllocatorType::OrtDeviceAllocator,
                ptr::null(),
                &mut allocator,
            );
            check(status, || "make an allocator for the device".into())
        }?;
        let allocator = NonNull::new(allocator).ok_or_else(|| BackendError::Runtime {
            doing: "make an allocator for the device".into(),
            cause: "the provider has none".into(),
        })?;
        Ok(DeviceAllocator { environment: environment.clone(), device: device.ptr(), kind, allocator, turn, streams })
    }

    /// One statistic of the allocator, if it keeps any.
    pub fn stat(&self, key: &CStr) -> Option<u64> {
        // SAFETY: the allocator lives as long as `self`. Some providers leave the function out, and calling through then crashes, so it
        // is looked at first; the field exists from version 23 on.
        unsafe {
            let table = self.allocator.as_ptr();
            if (*table).version < 23 || (*table).GetStats.is_none() {
                return None;
            }
            let mut stats = ptr::null_mut();
            check((ort::api().AllocatorGetStats)(table, &mut stats), String::new).ok()?;
            let value = (ort::api().GetKeyValue)(stats, key.as_ptr());
            let number = (!value.is_null()).then(|| CStr::from_ptr(value).to_str().ok()?.parse().ok()).flatten();
            (ort::api().ReleaseKeyValuePairs)(stats);
            number
        }
    }
}

impl Drop for DeviceAllocator {
    fn drop(&mut self) {
        // SAFETY: made by `new`; every block of it holds an `Rc` of this and is gone. A failure to release only leaks.
        unsafe {
            let status = (ort::api().ReleaseSharedAllocator)(self.environment.ptr().cast_mut(), self.device, self.kind);
            let _ = check(status, String::new);
        }
    }
}

/// A block on a device.
pub(crate) struct DeviceMemory {
    /// Owns the block: a tensor of bytes.
    block: NonNull<OrtValue>,
    address: *mut c_void,
    bytes: u64,
    allocator: Rc<DeviceAllocator>,
}

impl DeviceMemory {
    /// Allocates a block; its contents are whatever was there.
    pub fn reserve(place: &Place, bytes: u64) -> Result<Self, BackendError> {
        let out = |cause: String| BackendError::OutOfMemory { bytes, place: "device memory".into(), cause };
        let allocator = place.allocator.clone().ok_or_else(|| out("there is no device".into()))?;
        // Devices address whole words: WebGPU copies four bytes at a time.
        let bytes = bytes.max(1).checked_next_multiple_of(16).ok_or_else(|| out("too large".into()))?;
        let shape = [i64::try_from(bytes).map_err(|_| out("more than a tensor can hold".into()))?];
        let (mut block, mut address) = (ptr::null_mut(), ptr::null_mut());
        let turn = allocator.turn.clone();
        let _turn = turn.take();
        // SAFETY: the allocator is alive; the shape has one size; the outputs are places for one pointer each.
        unsafe {
            let kind = sys::ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
            let made =
                (ort::api().CreateTensorAsOrtValue)(allocator.allocator.as_ptr(), shape.as_ptr(), 1, kind, &mut block);
            ort::Error::result_from_status(made).map_err(|error| out(error.message().to_owned()))?;
        }
        let owned = NonNull::new(block).ok_or_else(|| out("ONNX Runtime returned nothing".into()))?;
        let mut memory = DeviceMemory { block: owned, address, bytes, allocator };
        // SAFETY: the block is a live tensor of numbers.
        unsafe {
            check((ort::api().GetTensorMutableData)(block, &mut address), || "find a device block".into())?;
        }
        memory.address = address;
        Ok(memory)
    }

    pub fn address(&self) -> *mut c_void {
        self.address
    }

    pub fn len(&self) -> u64 {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // Runs and copies may be going on that use it. If waiting fails, the device has failed, and nothing goes on there.
        let _ = self.allocator.streams.as_ref().map(|streams| streams.wait());
        let _turn = self.allocator.turn.take();
        // SAFETY: owned by this alone; views of it hold an `Rc` of this and are gone. The allocator outlives it.
        unsafe { (ort::api().ReleaseValue)(self.block.as_ptr()) };
    }
}

/// Copies a tensor into another of the same type and shape, wherever both are, and waits for it.
pub(crate) fn copy(environment: &Environment, from: &Value, to: &Value) -> Result<(), BackendError> {
    if from.dtype != to.dtype || from.dims != to.dims {
        return Err(BackendError::Misfit {
            what: format!("a copy of {} {:?}", from.dtype, from.dims.as_slice()),
            why: format!("it goes to {} {:?}", to.dtype, to.dims.as_slice()),
        });
    }
    let _turn = from.turn.or(&to.turn).take();
    // SAFETY: both are live values of equal size.
    unsafe { check(copy_values(environment, from.as_ptr(), to.as_ptr()), || "copy a tensor between memories".into()) }
}

/// Copies one value into another.
///
/// # Safety
/// Both must be alive and of one type and shape.
pub(super) unsafe fn copy_values(
    environment: &Environment,
    from: *mut OrtValue,
    to: *mut OrtValue,
) -> sys::OrtStatusPtr {
    let (source, mut target) = ([from.cast_const()], [to.cast_const()]);
    // SAFETY: the caller's promise; one pair is announced and one is given; no stream means that the copy is over, or ordered
    // before whatever the device does next, when the call returns.
    unsafe {
        let environment = environment.ptr().cast_mut();
        (ort::api().CopyTensors)(environment, source.as_ptr(), target.as_mut_ptr(), ptr::null_mut(), 1)
    }
}

/// The memory each input and each output of a session is in, in the session's order.
pub(crate) fn memories(
    session: &ort::session::Session,
    places: &[Rc<Place>],
) -> Result<(Vec<MemoryId>, Vec<MemoryId>), BackendError> {
    let api = ort::api();
    let inputs = ask(session, session.inputs().len(), api.SessionGetMemoryInfoForInputs, places)?;
    let outputs = ask(session, session.outputs().len(), api.SessionGetMemoryInfoForOutputs, places)?;
    Ok((inputs, outputs))
}

type Ask = unsafe extern "system" fn(*const sys::OrtSession, *mut *const OrtMemoryInfo, usize) -> sys::OrtStatusPtr;

fn ask(
    session: &ort::session::Session,
    count: usize,
    question: Ask,
    places: &[Rc<Place>],
) -> Result<Vec<MemoryId>, BackendError> {
    let mut infos = vec![ptr::null(); count];
    if count > 0 {
        // SAFETY: the session is alive and `infos` has room for the count it has.
        unsafe {
            check(question(session.ptr(), infos.as_mut_ptr(), count), || "ask a session for its memories".into())
        }?;
    }
    infos.into_iter().map(|info| place_of(info, places)).collect()
}

/// What tells one device's memory from another's. Names will not do: a provider may call its memory otherwise than its library.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Identity {
    vendor: u32,
    number: i32,
}

/// Where a description says memory is; `None` for the host, and for memory of a device that the host can use as its own.
fn identity(info: *const OrtMemoryInfo) -> Result<Option<Identity>, BackendError> {
    let mut kind = sys::OrtMemoryInfoDeviceType::OrtMemoryInfoDeviceType_CPU;
    let mut number = 0;
    // SAFETY: the caller has the description from ONNX Runtime, and its owner is alive.
    unsafe {
        let api = ort::api();
        check((api.MemoryInfoGetId)(info, &mut number), || "ask for a memory's number".into())?;
        (api.MemoryInfoGetDeviceType)(info, &mut kind);
        let shared = sys::OrtDeviceMemoryType::OrtDeviceMemoryType_HOST_ACCESSIBLE;
        if kind == sys::OrtMemoryInfoDeviceType::OrtMemoryInfoDeviceType_CPU
            || (api.MemoryInfoGetDeviceMemType)(info) == shared
        {
            return Ok(None);
        }
        Ok(Some(Identity { vendor: (api.MemoryInfoGetVendorId)(info), number }))
    }
}

fn place_of(info: *const OrtMemoryInfo, places: &[Rc<Place>]) -> Result<MemoryId, BackendError> {
    if info.is_null() {
        return Ok(MemoryId::HOST);
    }
    let Some(wanted) = identity(info)? else { return Ok(MemoryId::HOST) };
    for place in places {
        if identity(place.info())? == Some(wanted) {
            return Ok(place.id);
        }
    }
    Err(BackendError::Runtime {
        doing: "place a session's tensors".into(),
        cause: format!("it uses device {} of vendor {:#x}, which no provider has shown", wanted.number, wanted.vendor),
    })
}
