//! Implements the engine's `Session`, `Tensor` and `WeightPager` ports.

use crate::cuda::streams::Streams;
use crate::loading::SessionHandle;
use crate::raw::binding::OrtBinding;
use crate::raw::lock::DeviceLock;
use crate::raw::run::OrtControl;
use crate::raw::session_memory::{HostTensors, tensor_memories};
use crate::raw::space::MemorySpace;
use crate::raw::value::Value;
use crate::weights::disk::SessionWeights;
use hpp_engine::BackendError;
use hpp_engine::port::{ChunkSize, Interval, MemoryId, Port, Session, Tensor, TimingToken, WeightPager};
use hpp_schema::{DType, Provider, TensorMemory};
use ort::value::{Outlet, TensorElementType, ValueType};
use std::cell::RefCell;
use std::ffi::CString;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// A session of ONNX Runtime and its weights, shared by the [`OrtSession`] and its [`OrtWeightPager`].
///
/// Invariant: `weights` is borrowed while the session runs, so that nothing changes them meanwhile. Fields are dropped in order:
/// `weights` first, because the session keeps the address ranges mapped that `weights` manages.
struct SessionCore {
    weights: RefCell<SessionWeights>,
    session: RefCell<SessionHandle>,
}

/// A loaded partition.
pub struct OrtSession {
    core: Rc<SessionCore>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    input_names: Vec<CString>,
    output_names: Vec<CString>,
    spaces: Vec<Rc<MemorySpace>>,
    /// Taken for each run.
    lock: DeviceLock,
    /// The streams of a device whose runs are asynchronous.
    streams: Option<Arc<Streams>>,
    /// A prepared file that stays mapped.
    mapped: Option<PathBuf>,
    /// How a plug-in whose tensors lie in host memory wants them described; `None` for other providers.
    host_tensors: Option<HostTensors>,
}

/// The arguments of [`OrtSession::new`].
pub(crate) struct SessionParts {
    pub session: ort::session::Session,
    pub weights: SessionWeights,
    pub spaces: Vec<Rc<MemorySpace>>,
    pub lock: DeviceLock,
    pub streams: Option<Arc<Streams>>,
    pub mapped: Option<PathBuf>,
    pub provider: Provider,
}

impl OrtSession {
    pub(crate) fn new(parts: SessionParts) -> Result<(Self, OrtWeightPager), BackendError> {
        let SessionParts { session, mut weights, spaces, lock, streams, mapped, provider } = parts;
        let tensors = provider.facts().tensors;
        let (input_memories, output_memories) = match tensors {
            TensorMemory::Device => tensor_memories(&session, &spaces)?,
            TensorMemory::Host => {
                (vec![MemoryId::HOST; session.inputs().len()], vec![MemoryId::HOST; session.outputs().len()])
            }
        };
        let is_plugin = provider != Provider::CPU && tensors == TensorMemory::Host;
        let host_tensors = if is_plugin { HostTensors::of(&session)? } else { None };
        let inputs = ports(session.inputs(), &input_memories)?;
        let outputs = ports(session.outputs(), &output_memories)?;
        let (input_names, output_names) = (names(&inputs)?, names(&outputs)?);
        let (chunks, experts, is_unmanaged) = (weights.chunks(), weights.experts(), weights.is_unmanaged());
        let session = RefCell::new(SessionHandle::new(session));
        let core = Rc::new(SessionCore { weights: RefCell::new(weights), session });
        let pager = OrtWeightPager { core: Rc::clone(&core), chunks, experts, is_unmanaged };
        let session = OrtSession {
            core,
            inputs,
            outputs,
            input_names,
            output_names,
            spaces,
            lock,
            streams,
            mapped,
            host_tensors,
        };
        Ok((session, pager))
    }
}

/// Fetches and evicts the weights of a session, if they are streamed from disk.
pub struct OrtWeightPager {
    core: Rc<SessionCore>,
    chunks: Vec<ChunkSize>,
    experts: Vec<Range<usize>>,
    is_unmanaged: bool,
}

impl WeightPager for OrtWeightPager {
    fn is_unmanaged(&self) -> bool {
        self.is_unmanaged
    }

    fn wants_warm_up(&self) -> bool {
        self.core.weights.borrow().wants_warm_up()
    }

    fn record_touched_pages(&mut self) {
        self.core.weights.borrow_mut().record_touched_pages();
    }

    fn lock_and_stream(&mut self, locked: u64) -> Result<Option<String>, BackendError> {
        let weights = &mut *self.core.weights.borrow_mut();
        let warning = weights.lock_and_stream(locked)?;
        (self.chunks, self.experts) = (weights.chunks(), weights.experts());
        self.is_unmanaged = weights.is_unmanaged();
        Ok(warning)
    }

    fn chunks(&self) -> &[ChunkSize] {
        &self.chunks
    }

    fn experts(&self) -> &[Range<usize>] {
        &self.experts
    }

    fn select_experts(&mut self, experts: &[u32]) {
        self.core.weights.borrow_mut().select_experts(experts);
    }

    fn evict(&mut self, chunk: usize) {
        self.core.weights.borrow_mut().evict(chunk);
    }

    fn prefetch(&mut self, chunk: usize) -> Result<(), BackendError> {
        self.core.weights.borrow_mut().prefetch(chunk)
    }

    fn wait(&mut self, chunk: usize) -> Result<Interval, BackendError> {
        self.core.weights.borrow_mut().wait(chunk, hpp_engine::since_start)
    }

    fn release(&mut self) {
        self.core.weights.borrow_mut().release();
    }
}

fn ports(outlets: &[Outlet], memories: &[MemoryId]) -> Result<Vec<Port>, BackendError> {
    outlets.iter().zip(memories).map(|(outlet, memory)| port(outlet, *memory)).collect()
}

fn port(outlet: &Outlet, memory: MemoryId) -> Result<Port, BackendError> {
    let refuse = |why: String| BackendError::Misfit { what: format!("{:?}", outlet.name()), why };
    let ValueType::Tensor { ty, shape, .. } = outlet.dtype() else {
        return Err(refuse(format!("it is {}, and only tensors are supported", outlet.dtype())));
    };
    let dtype = dtype(*ty).ok_or_else(|| refuse(format!("element type {ty} is unknown to this build")))?;
    let shape = shape.iter().map(|size| u64::try_from(*size).ok()).collect();
    Ok(Port { name: outlet.name().to_owned(), dtype, shape, memory })
}

fn dtype(kind: TensorElementType) -> Option<DType> {
    crate::raw::dtype::from_ort(kind.into())
}

fn names(ports: &[Port]) -> Result<Vec<CString>, BackendError> {
    let name = |port: &Port| {
        CString::new(port.name.as_str())
            .map_err(|_| BackendError::Misfit { what: format!("{:?}", port.name), why: "its name contains NUL".into() })
    };
    ports.iter().map(name).collect()
}

impl Session for OrtSession {
    type Tensor = OrtTensor;
    type Control = OrtControl;
    type Binding = OrtBinding;

    fn inputs(&self) -> &[Port] {
        &self.inputs
    }

    fn outputs(&self) -> &[Port] {
        &self.outputs
    }

    fn binding(&self) -> Result<OrtBinding, BackendError> {
        OrtBinding::new(&self.core.session.borrow())
    }

    fn bind_input(&self, binding: &mut OrtBinding, index: usize, tensor: &OrtTensor) -> Result<(), BackendError> {
        fits(&self.inputs[index], tensor)?;
        let Some(host) = &self.host_tensors else {
            return binding.input(index, &self.input_names[index], &tensor.0);
        };
        // SAFETY: the description belongs to the session, which `self` keeps alive, and is null or describes host memory.
        let described = unsafe { tensor.0.described_as(host.inputs[index]) }?;
        binding.input(index, &self.input_names[index], described.as_ref().unwrap_or(&tensor.0))
    }

    fn bind_output(&self, binding: &mut OrtBinding, index: usize, tensor: &OrtTensor) -> Result<(), BackendError> {
        fits(&self.outputs[index], tensor)?;
        let described = match &self.host_tensors {
            // SAFETY: as in `bind_input`.
            Some(host) => unsafe { tensor.0.described_as(host.outputs[index]) }?,
            None => None,
        };
        binding.output(index, &self.output_names[index], described.as_ref().unwrap_or(&tensor.0))
    }

    fn bind_output_unknown(&self, binding: &mut OrtBinding, index: usize) -> Result<(), BackendError> {
        let port = &self.outputs[index];
        let space = self.spaces.iter().find(|space| space.id == port.memory);
        let space = space.ok_or_else(|| BackendError::Misfit {
            what: format!("{:?}", port.name),
            why: format!("memory {} is unknown", port.memory.0),
        })?;
        binding.output_unknown(index, &self.output_names[index], space)
    }

    fn mapped_file(&self) -> Option<&Path> {
        self.mapped.as_deref()
    }

    fn run(&mut self, binding: &mut OrtBinding, control: &OrtControl) -> Result<Option<TimingToken>, BackendError> {
        let weights = self.core.weights.borrow();
        weights.check()?;
        let session = &mut *self.core.session.borrow_mut();
        let Some(streams) = &self.streams else {
            let _lock = self.lock.acquire();
            return binding.run(session, control).map(|()| None);
        };
        let start = streams.record_compute()?;
        binding.enqueue(session, control)?;
        let token = streams.timing_since(start)?;
        if self.outputs.iter().any(|output| output.memory == MemoryId::HOST) {
            streams.wait_for_runs()?;
        }
        Ok(Some(token))
    }

    fn run_and_return_memory(
        &mut self,
        binding: &mut OrtBinding,
        control: &OrtControl,
    ) -> Result<Option<TimingToken>, BackendError> {
        if self.streams.is_some() {
            return self.run(binding, control);
        }
        self.core.weights.borrow().check()?;
        let session = &mut *self.core.session.borrow_mut();
        let _lock = self.lock.acquire();
        binding.run_and_shrink(session, control).map(|()| None)
    }

    fn take_output(&self, binding: &mut OrtBinding, index: usize) -> Result<OrtTensor, BackendError> {
        binding.take(index).map(OrtTensor)
    }
}

/// Checks type and memory of a tensor. ONNX Runtime checks types and sizes, but not memories: an output bound in the wrong memory is
/// corrupted silently.
fn fits(port: &Port, tensor: &OrtTensor) -> Result<(), BackendError> {
    if port.dtype == tensor.dtype() && port.memory == tensor.memory() {
        return Ok(());
    }
    Err(BackendError::Misfit {
        what: format!("a {} tensor in memory {}", tensor.dtype(), tensor.memory().0),
        why: format!("{:?} is {} in memory {}", port.name, port.dtype, port.memory.0),
    })
}

/// A tensor of ONNX Runtime.
pub struct OrtTensor(pub(crate) Value);

impl Tensor for OrtTensor {
    fn dtype(&self) -> DType {
        self.0.dtype
    }

    fn shape(&self) -> &[u64] {
        &self.0.dims
    }

    fn memory(&self) -> MemoryId {
        self.0.space
    }
}
