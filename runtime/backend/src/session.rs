//! Sessions as the engine's port wants them.

use crate::cuda::streams::Streams;
use crate::loading::Released;
use crate::raw::binding::OrtBinding;
use crate::raw::device::{Place, Turn, memories};
use crate::raw::run::OrtControl;
use crate::raw::value::Value;
use crate::weights::disk::SessionWeights;
use hpp_engine::BackendError;
use hpp_engine::port::{ChunkSize, Interval, MemoryId, Port, Session, Tensor, TimingToken, WeightStream};
use hpp_schema::DType;
use ort::value::{Outlet, TensorElementType, ValueType};
use std::cell::RefCell;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

/// A session of ONNX Runtime and its weights, which both the [`OrtSession`] and its [`OrtWeightStream`] keep alive.
///
/// Invariant: `weights` is borrowed while the session runs, so that nothing changes them meanwhile. Fields are dropped in order: the
/// session keeps mapped what `weights` manages.
struct SessionCore {
    weights: RefCell<SessionWeights>,
    session: RefCell<Released>,
}

/// A partition in ONNX Runtime.
pub struct OrtSession {
    core: Rc<SessionCore>,
    inputs: Vec<Port>,
    outputs: Vec<Port>,
    input_names: Vec<CString>,
    output_names: Vec<CString>,
    places: Vec<Rc<Place>>,
    /// For its runs.
    turn: Turn,
    /// Where they go on while the host does.
    streams: Option<Arc<Streams>>,
    /// A prepared file that stays mapped.
    mapped: Option<PathBuf>,
}

/// What a session is made from.
pub(crate) struct SessionParts {
    pub session: ort::session::Session,
    pub weights: SessionWeights,
    pub places: Vec<Rc<Place>>,
    pub turn: Turn,
    pub streams: Option<Arc<Streams>>,
    pub mapped: Option<PathBuf>,
}

impl OrtSession {
    pub(crate) fn new(parts: SessionParts) -> Result<(Self, OrtWeightStream), BackendError> {
        let SessionParts { session, mut weights, places, turn, streams, mapped } = parts;
        let (inputs_in, outputs_in) = memories(&session, &places)?;
        let inputs = ports(session.inputs(), &inputs_in)?;
        let outputs = ports(session.outputs(), &outputs_in)?;
        let (input_names, output_names) = (names(&inputs)?, names(&outputs)?);
        let (chunks, is_resident) = (weights.chunks(), weights.is_resident());
        let session = RefCell::new(Released::new(session));
        let core = Rc::new(SessionCore { weights: RefCell::new(weights), session });
        let stream = OrtWeightStream { core: Rc::clone(&core), chunks, is_resident };
        let session = OrtSession { core, inputs, outputs, input_names, output_names, places, turn, streams, mapped };
        Ok((session, stream))
    }
}

/// The weights of a session that may lie on disk.
pub struct OrtWeightStream {
    core: Rc<SessionCore>,
    chunks: Vec<ChunkSize>,
    is_resident: bool,
}

impl WeightStream for OrtWeightStream {
    fn is_resident(&self) -> bool {
        self.is_resident
    }

    fn wants_warm_up(&self) -> bool {
        self.core.weights.borrow().wants_warm_up()
    }

    fn sample_resident(&mut self) {
        self.core.weights.borrow_mut().sample_resident();
    }

    fn pin_and_stream(&mut self, pinned: u64) -> Result<Option<String>, BackendError> {
        let weights = &mut *self.core.weights.borrow_mut();
        let warning = weights.pin_and_stream(pinned)?;
        (self.chunks, self.is_resident) = (weights.chunks(), weights.is_resident());
        Ok(warning)
    }

    fn chunks(&self) -> &[ChunkSize] {
        &self.chunks
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
        return Err(refuse(format!("it is {}, and only tensors can be carried", outlet.dtype())));
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
            .map_err(|_| BackendError::Misfit { what: format!("{:?}", port.name), why: "a name holds a zero".into() })
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
        binding.input(index, &self.input_names[index], &tensor.0)
    }

    fn bind_output(&self, binding: &mut OrtBinding, index: usize, tensor: &OrtTensor) -> Result<(), BackendError> {
        fits(&self.outputs[index], tensor)?;
        binding.output(index, &self.output_names[index], &tensor.0)
    }

    fn bind_output_unknown(&self, binding: &mut OrtBinding, index: usize) -> Result<(), BackendError> {
        let port = &self.outputs[index];
        let place = self.places.iter().find(|place| place.id == port.memory);
        let place = place.ok_or_else(|| BackendError::Misfit {
            what: format!("{:?}", port.name),
            why: format!("nobody knows memory {}", port.memory.0),
        })?;
        binding.output_unknown(index, &self.output_names[index], place)
    }

    fn mapped_file(&self) -> Option<&Path> {
        self.mapped.as_deref()
    }

    fn run(&mut self, binding: &mut OrtBinding, control: &OrtControl) -> Result<Option<TimingToken>, BackendError> {
        let weights = self.core.weights.borrow();
        weights.check()?;
        let session = &mut *self.core.session.borrow_mut();
        let Some(streams) = &self.streams else {
            let _turn = self.turn.take();
            return binding.run(session, control).map(|()| None);
        };
        let from = streams.mark()?;
        binding.begin(session, control)?;
        let token = streams.since(from)?;
        if self.outputs.iter().any(|output| output.memory == MemoryId::HOST) {
            streams.wait_for_runs()?;
        }
        Ok(Some(token))
    }

    fn take_output(&self, binding: &mut OrtBinding, index: usize) -> Result<OrtTensor, BackendError> {
        binding.take(index).map(OrtTensor)
    }
}

/// ONNX Runtime itself checks types and sizes, but not memories: an output bound in the wrong one is corrupted silently.
fn fits(port: &Port, tensor: &OrtTensor) -> Result<(), BackendError> {
    if port.dtype == tensor.dtype() && port.memory == tensor.memory() {
        return Ok(());
    }
    Err(BackendError::Misfit {
        what: format!("a {} tensor in memory {}", tensor.dtype(), tensor.memory().0),
        why: format!("{:?} is {} in memory {}", port.name, port.dtype, port.memory.0),
    })
}

/// A tensor in ONNX Runtime.
pub struct OrtTensor(pub(crate) Value);

impl Tensor for OrtTensor {
    fn dtype(&self) -> DType {
        self.0.dtype
    }

    fn shape(&self) -> &[u64] {
        &self.0.dims
    }

    fn memory(&self) -> MemoryId {
        self.0.place
    }
}
