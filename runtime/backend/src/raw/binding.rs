//! IoBindings: the tensor that a session reads each input from and writes each output to.

use super::check;
use super::lock::DeviceLock;
use super::memory::Memory;
use super::run::OrtControl;
use super::space::MemorySpace;
use super::value::Value;
use hpp_engine::BackendError;
use hpp_engine::port::MemoryId;
use ort::AsPointer;
use ort::session::Session;
use ort::sys::{OrtIoBinding, OrtRunOptions, OrtValue};
use std::ffi::CStr;
use std::ptr::{self, NonNull};

/// The tensors that one sequence has bound to one session.
pub struct OrtBinding {
    ptr: NonNull<OrtIoBinding>,
    /// The memory bound to each input, kept alive as long as the binding.
    inputs: Vec<Option<Memory>>,
    outputs: Vec<BoundOutput>,
    /// Output indices in the order in which ONNX Runtime lists them: the order of their first binding.
    order: Vec<usize>,
}

#[derive(Clone, Default)]
struct BoundOutput {
    listed: bool,
    memory: Option<Memory>,
    /// The memory space in which ONNX Runtime allocates an output of unknown shape.
    allocated_in: Option<(MemoryId, DeviceLock)>,
}

impl OrtBinding {
    pub(crate) fn new(session: &Session) -> Result<Self, BackendError> {
        let mut binding = ptr::null_mut();
        // SAFETY: the session is alive; `binding` has room for one pointer.
        unsafe {
            check((ort::api().CreateIoBinding)(session.ptr().cast_mut(), &mut binding), || "make a binding".into())
        }?;
        let ptr = NonNull::new(binding).ok_or_else(|| BackendError::Runtime {
            doing: "make a binding".into(),
            cause: "ONNX Runtime returned nothing".into(),
        })?;
        let (inputs, outputs) = (session.inputs().len(), session.outputs().len());
        Ok(OrtBinding {
            ptr,
            inputs: vec![None; inputs],
            outputs: vec![BoundOutput::default(); outputs],
            order: Vec::with_capacity(outputs),
        })
    }

    pub(crate) fn input(&mut self, index: usize, name: &CStr, value: &Value) -> Result<(), BackendError> {
        // SAFETY: binding and value are alive; the binding keeps its own reference to the value, and `inputs` keeps its memory.
        unsafe {
            let status = (ort::api().BindInput)(self.ptr.as_ptr(), name.as_ptr(), value.as_ptr());
            check(status, || format!("bind input {name:?}"))
        }?;
        self.inputs[index] = value.memory().cloned();
        Ok(())
    }

    pub(crate) fn output(&mut self, index: usize, name: &CStr, value: &Value) -> Result<(), BackendError> {
        // SAFETY: as in `input`.
        unsafe {
            let status = (ort::api().BindOutput)(self.ptr.as_ptr(), name.as_ptr(), value.as_ptr());
            check(status, || format!("bind output {name:?}"))
        }?;
        self.list(index);
        (self.outputs[index].memory, self.outputs[index].allocated_in) = (value.memory().cloned(), None);
        Ok(())
    }

    /// Binds an output of unknown shape: ONNX Runtime allocates it in `space` during the run.
    pub(crate) fn output_unknown(
        &mut self,
        index: usize,
        name: &CStr,
        space: &MemorySpace,
    ) -> Result<(), BackendError> {
        // SAFETY: binding and memory description are alive; ONNX Runtime copies the latter.
        unsafe {
            let status = (ort::api().BindOutputToDevice)(self.ptr.as_ptr(), name.as_ptr(), space.info());
            check(status, || format!("bind output {name:?}"))
        }?;
        self.list(index);
        (self.outputs[index].memory, self.outputs[index].allocated_in) = (None, Some((space.id, space.lock.clone())));
        Ok(())
    }

    fn list(&mut self, index: usize) {
        if !std::mem::replace(&mut self.outputs[index].listed, true) {
            self.order.push(index);
        }
    }

    /// Runs the session and waits for the result.
    pub(crate) fn run(&mut self, session: &mut Session, control: &OrtControl) -> Result<(), BackendError> {
        self.run_with(session, control, control.options())
    }

    /// Runs the session, waits for the result, and frees memory of the host's arena that is not in use then.
    pub(crate) fn run_and_shrink(&mut self, session: &mut Session, control: &OrtControl) -> Result<(), BackendError> {
        self.run_with(session, control, control.shrinking())
    }

    /// Enqueues a run on the device's stream; returns before it has finished.
    pub(crate) fn enqueue(&mut self, session: &mut Session, control: &OrtControl) -> Result<(), BackendError> {
        self.run_with(session, control, control.unsynchronized())
    }

    fn run_with(
        &mut self,
        session: &mut Session,
        control: &OrtControl,
        options: *const OrtRunOptions,
    ) -> Result<(), BackendError> {
        // SAFETY: session, options and binding are alive, the binding was made for this session and keeps alive all that is bound.
        // `&mut` on both excludes another run of this binding.
        let status = unsafe { (ort::api().RunWithBinding)(session.ptr().cast_mut(), options, self.ptr.as_ptr()) };
        // SAFETY: fresh from the call above.
        let ran = unsafe { check(status, || "run".into()) };
        // ONNX Runtime has no error code for a terminated run.
        ran.map_err(|error| if control.stopped() { BackendError::Stopped } else { error })
    }

    /// Takes an output that ONNX Runtime allocated in the last run.
    pub(crate) fn take(&mut self, index: usize) -> Result<Value, BackendError> {
        let (space, lock) = self.outputs[index].allocated_in.clone().ok_or_else(|| BackendError::Misfit {
            what: format!("output {index}"),
            why: "it was bound to a tensor, which holds it".into(),
        })?;
        let wanted = self.order.iter().position(|other| *other == index);
        let (mut values, mut count) = (ptr::null_mut::<*mut OrtValue>(), 0usize);
        let mut allocator = ptr::null_mut();
        // SAFETY: the binding is alive. The list is freed with the allocator that made it. Each value in it is a new reference that the
        // caller must release: the wanted one is released by its `Value`, the others here.
        let found = unsafe {
            let api = ort::api();
            let doing = || "fetch outputs".to_owned();
            check((api.GetAllocatorWithDefaultOptions)(&mut allocator), doing)?;
            check((api.GetBoundOutputValues)(self.ptr.as_ptr(), allocator, &mut values, &mut count), doing)?;
            let mut found = None;
            for number in 0..count {
                let value = *values.add(number);
                match NonNull::new(value) {
                    Some(value) if Some(number) == wanted => found = Some(value),
                    _ => (api.ReleaseValue)(value),
                }
            }
            if !values.is_null() {
                check((api.AllocatorFree)(allocator, values.cast()), doing)?;
            }
            found
        };
        let found = found.ok_or_else(|| BackendError::Misfit {
            what: format!("output {index}"),
            why: "the run left no value there".into(),
        })?;
        // SAFETY: this function owns the reference, and ONNX Runtime allocated the value in the bound memory space.
        unsafe { Value::take(found, space, lock) }
    }
}

impl Drop for OrtBinding {
    fn drop(&mut self) {
        // SAFETY: this is the only owner, and the fields still hold the memory that the binding refers to.
        unsafe { (ort::api().ReleaseIoBinding)(self.ptr.as_ptr()) };
    }
}
