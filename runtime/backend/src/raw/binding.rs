//! Bindings: which tensor a session reads each input from and writes each output to.

use super::check;
use super::device::{Place, Turn};
use super::memory::Memory;
use super::run::OrtControl;
use super::value::Value;
use hpp_engine::BackendError;
use hpp_engine::port::MemoryId;
use ort::AsPointer;
use ort::session::Session;
use ort::sys::{OrtIoBinding, OrtRunOptions, OrtValue};
use std::ffi::CStr;
use std::ptr::{self, NonNull};

/// What one sequence has bound at one session.
pub struct OrtBinding {
    ptr: NonNull<OrtIoBinding>,
    /// Memory of what is bound, by input, so that it outlives the binding.
    inputs: Vec<Option<Memory>>,
    outputs: Vec<Output>,
    /// Outputs in the order in which ONNX Runtime lists them: that of their first binding.
    order: Vec<usize>,
}

#[derive(Clone, Default)]
struct Output {
    listed: bool,
    memory: Option<Memory>,
    /// Where ONNX Runtime allocates it, if it does.
    unknown: Option<(MemoryId, Turn)>,
}

impl OrtBinding {
    pub(crate) fn new(session: &Session) -> Result<Self, BackendError> {
        let mut binding = ptr::null_mut();
        // SAFETY: the session is alive; `binding` is a place for one pointer.
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
            outputs: vec![Output::default(); outputs],
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
        // SAFETY: as for inputs.
        unsafe {
            let status = (ort::api().BindOutput)(self.ptr.as_ptr(), name.as_ptr(), value.as_ptr());
            check(status, || format!("bind output {name:?}"))
        }?;
        self.list(index);
        (self.outputs[index].memory, self.outputs[index].unknown) = (value.memory().cloned(), None);
        Ok(())
    }

    pub(crate) fn output_unknown(&mut self, index: usize, name: &CStr, place: &Place) -> Result<(), BackendError> {
        // SAFETY: binding and memory description are alive; ONNX Runtime copies the latter.
        unsafe {
            let status = (ort::api().BindOutputToDevice)(self.ptr.as_ptr(), name.as_ptr(), place.info());
            check(status, || format!("bind output {name:?}"))
        }?;
        self.list(index);
        (self.outputs[index].memory, self.outputs[index].unknown) = (None, Some((place.id, place.turn.clone())));
        Ok(())
    }

    fn list(&mut self, index: usize) {
        if !std::mem::replace(&mut self.outputs[index].listed, true) {
            self.order.push(index);
        }
    }

    /// Runs, until it is over.
    pub(crate) fn run(&mut self, session: &mut Session, control: &OrtControl) -> Result<(), BackendError> {
        self.run_with(session, control, control.options())
    }

    /// Runs, until all of it is given to the device's stream.
    pub(crate) fn begin(&mut self, session: &mut Session, control: &OrtControl) -> Result<(), BackendError> {
        self.run_with(session, control, control.unwaited())
    }

    fn run_with(
        &mut self,
        session: &mut Session,
        control: &OrtControl,
        options: *const OrtRunOptions,
    ) -> Result<(), BackendError> {
        // SAFETY: session, options and binding are alive, the binding was made for this session, and everything bound is kept by it.
        // `&mut` on both means that no other run of this binding is in progress.
        let status = unsafe { (ort::api().RunWithBinding)(session.ptr().cast_mut(), options, self.ptr.as_ptr()) };
        // SAFETY: fresh from the call above.
        let ran = unsafe { check(status, || "run".into()) };
        // ONNX Runtime has no error code for a run that was told to end.
        ran.map_err(|error| if control.stopped() { BackendError::Stopped } else { error })
    }

    /// An output that ONNX Runtime allocated in the last run.
    pub(crate) fn take(&mut self, index: usize) -> Result<Value, BackendError> {
        let place = self.outputs[index].unknown.clone().ok_or_else(|| BackendError::Misfit {
            what: format!("output {index}"),
            why: "it was bound to memory and is there".into(),
        })?;
        let at = self.order.iter().position(|other| *other == index);
        let (mut values, mut count) = (ptr::null_mut::<*mut OrtValue>(), 0usize);
        let mut allocator = ptr::null_mut();
        // SAFETY: the binding is alive. The list comes from the default allocator and goes back to it; each value in it is a new
        // reference that is ours to release, which the one wanted leaves to its `Value` and the others have done here.
        let found = unsafe {
            let api = ort::api();
            let doing = || "fetch outputs".to_owned();
            check((api.GetAllocatorWithDefaultOptions)(&mut allocator), doing)?;
            check((api.GetBoundOutputValues)(self.ptr.as_ptr(), allocator, &mut values, &mut count), doing)?;
            let mut found = None;
            for number in 0..count {
                let value = *values.add(number);
                match NonNull::new(value) {
                    Some(value) if Some(number) == at => found = Some(value),
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
        // SAFETY: the reference is ours, and ONNX Runtime allocated it where it was told to.
        unsafe { Value::take(found, place) }
    }
}

impl Drop for OrtBinding {
    fn drop(&mut self) {
        // SAFETY: owned by this alone, and dropped before the memory it refers to, which the fields below still hold.
        unsafe { (ort::api().ReleaseIoBinding)(self.ptr.as_ptr()) };
    }
}
