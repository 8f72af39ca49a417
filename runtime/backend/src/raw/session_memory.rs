//! The memory space of each input and output of a session.

use super::check;
use super::space::MemorySpace;
use hpp_engine::BackendError;
use hpp_engine::port::MemoryId;
use ort::AsPointer;
use ort::session::Session;
use ort::sys::{self, OrtMemoryInfo};
use std::ptr;
use std::rc::Rc;

/// The memory ids of a session's inputs and of its outputs, in the session's order.
pub(crate) fn tensor_memories(
    session: &Session,
    spaces: &[Rc<MemorySpace>],
) -> Result<(Vec<MemoryId>, Vec<MemoryId>), BackendError> {
    let api = ort::api();
    let inputs = query(session, session.inputs().len(), api.SessionGetMemoryInfoForInputs, spaces)?;
    let outputs = query(session, session.outputs().len(), api.SessionGetMemoryInfoForOutputs, spaces)?;
    Ok((inputs, outputs))
}

/// The memory descriptions that a session wants for tensors which the engine keeps in host memory; null where it does not say.
///
/// The descriptions belong to the session: use them while it lives.
pub(crate) struct HostTensors {
    /// The session's own description of each input.
    pub inputs: Vec<*const OrtMemoryInfo>,
    /// The same of each output.
    pub outputs: Vec<*const OrtMemoryInfo>,
}

impl HostTensors {
    /// Asks a session; `None` if it wants any tensor in the memory of a device.
    pub fn of(session: &Session) -> Result<Option<Self>, BackendError> {
        let api = ort::api();
        let inputs = infos(session, session.inputs().len(), api.SessionGetMemoryInfoForInputs)?;
        let outputs = infos(session, session.outputs().len(), api.SessionGetMemoryInfoForOutputs)?;
        for info in inputs.iter().chain(&outputs).filter(|info| !info.is_null()) {
            if device_identity(*info)?.is_some() {
                return Ok(None);
            }
        }
        Ok(Some(HostTensors { inputs, outputs }))
    }
}

type QueryFn = unsafe extern "system" fn(*const sys::OrtSession, *mut *const OrtMemoryInfo, usize) -> sys::OrtStatusPtr;

fn query(
    session: &Session,
    count: usize,
    function: QueryFn,
    spaces: &[Rc<MemorySpace>],
) -> Result<Vec<MemoryId>, BackendError> {
    infos(session, count, function)?.into_iter().map(|info| memory_id(info, spaces)).collect()
}

/// The memory descriptions of inputs or outputs, which live as long as the session.
fn infos(session: &Session, count: usize, function: QueryFn) -> Result<Vec<*const OrtMemoryInfo>, BackendError> {
    let mut infos = vec![ptr::null(); count];
    if count > 0 {
        // SAFETY: the session is alive and `infos` has room for the count it has.
        unsafe {
            check(function(session.ptr(), infos.as_mut_ptr(), count), || "ask a session for its memories".into())
        }?;
    }
    Ok(infos)
}

/// What distinguishes the memory of one device from another's. Names do not: a provider may name its memory differently than its
/// library does.
#[derive(Clone, Copy, PartialEq, Eq)]
struct DeviceIdentity {
    vendor: u32,
    number: i32,
}

/// The device of a memory description; `None` for host memory, including device-pinned host memory.
fn device_identity(info: *const OrtMemoryInfo) -> Result<Option<DeviceIdentity>, BackendError> {
    let mut kind = sys::OrtMemoryInfoDeviceType::OrtMemoryInfoDeviceType_CPU;
    let mut number = 0;
    // SAFETY: the caller has the description from ONNX Runtime, and its owner is alive.
    unsafe {
        let api = ort::api();
        check((api.MemoryInfoGetId)(info, &mut number), || "ask for a memory's number".into())?;
        (api.MemoryInfoGetDeviceType)(info, &mut kind);
        let host_accessible = sys::OrtDeviceMemoryType::OrtDeviceMemoryType_HOST_ACCESSIBLE;
        if kind == sys::OrtMemoryInfoDeviceType::OrtMemoryInfoDeviceType_CPU
            || (api.MemoryInfoGetDeviceMemType)(info) == host_accessible
        {
            return Ok(None);
        }
        Ok(Some(DeviceIdentity { vendor: (api.MemoryInfoGetVendorId)(info), number }))
    }
}

fn memory_id(info: *const OrtMemoryInfo, spaces: &[Rc<MemorySpace>]) -> Result<MemoryId, BackendError> {
    if info.is_null() {
        return Ok(MemoryId::HOST);
    }
    let Some(wanted) = device_identity(info)? else { return Ok(MemoryId::HOST) };
    for space in spaces {
        if device_identity(space.info())? == Some(wanted) {
            return Ok(space.id);
        }
    }
    Err(BackendError::Runtime {
        doing: "place a session's tensors".into(),
        cause: format!("it uses device {} of vendor {:#x}, which no provider has listed", wanted.number, wanted.vendor),
    })
}
