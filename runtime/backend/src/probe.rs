//! A tiny test session that adds a number to itself. It tests whether a device computes in float16 before a model is loaded there,
//! because some devices accept a session and fail at its first run, too late to choose another. It also shrinks the host's arena.

#![allow(clippy::result_large_err, reason = "ort's builder comes back in its errors")]

use crate::environment::SharedRuntime;
use crate::provider_devices::processor;
use crate::raw::binding::OrtBinding;
use crate::raw::failed;
use crate::raw::memory::{HostPages, Memory};
use crate::raw::run::OrtControl;
use crate::raw::space::MemorySpace;
use crate::raw::value::Value;
use hpp_engine::BackendError;
use hpp_schema::DType;
use ort::device::Device;
use ort::session::Session;
use ort::session::builder::SessionBuilder;
use ort::value::ValueType;
use std::rc::Rc;

/// Whether any input or output of a session is float16.
pub(crate) fn uses_f16(session: &Session) -> bool {
    let is_f16 = |kind: &ValueType| match kind {
        ValueType::Tensor { ty, .. } => crate::raw::dtype::from_ort((*ty).into()) == Some(DType::Float16),
        _ => false,
    };
    session.inputs().iter().chain(session.outputs()).any(|outlet| is_f16(outlet.dtype()))
}

/// Runs an addition in float16 on the device; its error if that fails.
pub(crate) fn computes_in_f16(runtime: &SharedRuntime, device: Device<'_>) -> Result<(), BackendError> {
    let doing = "compute in float16";
    add(builder(runtime, device, doing)?, DType::Float16, OrtBinding::run, doing)
}

/// Frees the unused memory of the shared arena. ONNX Runtime does so only at the end of a run whose options request it.
pub(crate) fn trim_memory(runtime: &SharedRuntime) -> Result<(), BackendError> {
    let doing = "free memory that the arena keeps for later runs";
    let builder = builder(runtime, processor(runtime)?, doing)?.with_env_allocators().map_err(failed(doing))?;
    add(builder, DType::Float32, OrtBinding::run_and_shrink, doing)
}

fn builder(runtime: &SharedRuntime, device: Device<'_>, doing: &str) -> Result<SessionBuilder, BackendError> {
    let builder = Session::builder(&runtime.environment).map_err(failed(doing))?;
    builder.with_devices([device], None).map_err(failed(doing))
}

/// A way to run a session.
type Run = fn(&mut OrtBinding, &mut Session, &OrtControl) -> Result<(), BackendError>;

/// Runs a model that adds one number to itself.
fn add(mut builder: SessionBuilder, dtype: DType, run: Run, doing: &str) -> Result<(), BackendError> {
    let mut session = builder.commit_from_memory(&model(dtype)).map_err(failed(doing))?;
    let host = MemorySpace::host();
    let memory = Memory::Host(Rc::new(HostPages::reserve(8)?));
    let one = Value::view(&memory, &host, dtype, &[1])?;
    let mut binding = OrtBinding::new(&session)?;
    binding.input(0, c"x", &one)?;
    binding.output_unknown(0, c"y", &host)?;
    run(&mut binding, &mut session, &OrtControl::new()?)
}

/// The ONNX model `y = x + x` over one number.
fn model(dtype: DType) -> Vec<u8> {
    let tensor = |name: &str| {
        let shape = message(2, &message(1, &number(1, 1)));
        let kind = message(1, &[number(1, dtype.to_onnx() as u8), shape].concat());
        [message(1, name.as_bytes()), message(2, &kind)].concat()
    };
    let node = [message(1, b"x"), message(1, b"x"), message(2, b"y"), message(4, b"Add")].concat();
    let parts = [message(1, &node), message(2, b"probe"), message(11, &tensor("x")), message(12, &tensor("y"))];
    [number(1, 8), message(7, &parts.concat()), message(8, &number(2, 17))].concat()
}

/// A protobuf field with a number below 128.
fn number(field: u8, value: u8) -> Vec<u8> {
    vec![field << 3, value]
}

/// A protobuf field with fewer than 128 bytes.
fn message(field: u8, bytes: &[u8]) -> Vec<u8> {
    [&[field << 3 | 2, bytes.len() as u8], bytes].concat()
}
