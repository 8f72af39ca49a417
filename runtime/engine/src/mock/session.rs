//! Sessions that are Rust functions; they check every binding.

use super::disk::MockWeights;
use super::queue::Queues;
use super::tensor::misfit;
use super::{MockBuffer, MockControl, MockTensor, VirtualClock};
use crate::error::BackendError;
use crate::port::{MemoryId, Port, Session, Tensor, TimingToken};
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// The contents of a partition file.
#[derive(Clone)]
pub struct MockModel {
    /// Inputs in the file's order.
    pub inputs: Vec<Port>,
    /// Outputs in the file's order.
    pub outputs: Vec<Port>,
    /// Pairs of input and output that must be one buffer; all others must not be.
    pub in_place: Vec<(usize, usize)>,
    /// Its computation.
    pub kernel: Kernel,
    /// How long that takes on the mock's clock; no time if `None`.
    pub takes: Option<Takes>,
}

/// How long a run takes, by the number of tokens in it.
#[derive(Clone)]
pub struct Takes {
    /// The input and its axis whose size is that number.
    tokens: (usize, usize),
    time: Rc<dyn Fn(u64) -> Duration>,
}

impl MockModel {
    /// This model with runs that take time. `tokens` is an input and the axis of it that counts the tokens of a pass.
    pub fn taking(self, tokens: (usize, usize), time: Rc<dyn Fn(u64) -> Duration>) -> Self {
        MockModel { takes: Some(Takes { tokens, time }), ..self }
    }
}

/// Computes a partition's outputs from its inputs.
pub type Kernel = Rc<dyn Fn(&mut Frame<'_>) -> Result<(), BackendError>>;

/// A loaded mock partition.
pub struct MockSession {
    model: MockModel,
    clock: VirtualClock,
    queues: Queues,
    weights: MockWeights,
    failing_run: FailingRun,
}

/// How many runs succeed before one that fails, of all sessions of a backend; `None` if none fails.
pub(super) type FailingRun = Rc<Cell<Option<u64>>>;

/// What is bound at a mock partition.
pub struct MockBinding {
    inputs: Vec<Option<MockTensor>>,
    outputs: Vec<Slot>,
}

#[derive(Clone)]
enum Slot {
    Unbound,
    Bound(MockTensor),
    Unknown(Option<MockTensor>),
}

/// One run as the kernel sees it.
pub struct Frame<'a> {
    model: &'a MockModel,
    binding: &'a mut MockBinding,
}

impl Frame<'_> {
    /// An input.
    pub fn input(&self, index: usize) -> Result<MockTensor, BackendError> {
        let missing = || misfit(&self.model.inputs[index].name, "it is not bound".into());
        self.binding.inputs[index].clone().ok_or_else(missing)
    }

    /// The last size of an output, where it is fixed.
    pub fn width(&self, index: usize) -> u64 {
        self.model.outputs[index].shape.last().copied().flatten().unwrap_or(1)
    }

    /// Where to write an output of this shape; `None` if it is not bound. A shape other than the bound one is an error, as
    /// in a real runtime.
    pub fn output(&mut self, index: usize, shape: &[u64]) -> Result<Option<MockTensor>, BackendError> {
        let port = &self.model.outputs[index];
        match &mut self.binding.outputs[index] {
            Slot::Unbound => Ok(None),
            Slot::Bound(tensor) if tensor.shape() == shape => Ok(Some(tensor.clone())),
            Slot::Bound(tensor) => Err(misfit(&port.name, format!("{shape:?} is made, {:?} is bound", tensor.shape()))),
            Slot::Unknown(made) => {
                let bytes = crate::tensor::byte_len(port.dtype, shape).unwrap_or(0).max(1);
                let tensor = MockTensor::view(&MockBuffer::new(port.memory, bytes)?, port.dtype, shape)?;
                Ok(Some(made.insert(tensor).clone()))
            }
        }
    }
}

impl MockSession {
    pub(super) fn new(
        model: MockModel,
        clock: VirtualClock,
        queues: Queues,
        weights: MockWeights,
        failing_run: FailingRun,
    ) -> Self {
        MockSession { model, clock, queues, weights, failing_run }
    }

    /// A run that fails may have begun on an asynchronous device.
    fn leave_work(&self, binding: &MockBinding) {
        let memories = || self.model.inputs.iter().map(|port| port.memory);
        if memories().any(|memory| self.queues.busy_until(memory).is_some()) {
            self.take_time(binding);
        }
    }

    /// Advances the clock by the time of a run, or queues the run on an asynchronous device. Outputs on the host are waited for.
    fn take_time(&self, binding: &MockBinding) -> Option<TimingToken> {
        let takes = self.model.takes.as_ref();
        let time = takes.map(|Takes { tokens: (input, axis), time }| {
            let bound = binding.inputs[*input].as_ref();
            time(bound.and_then(|tensor| tensor.shape().get(*axis).copied()).unwrap_or(0))
        });
        let time = time.unwrap_or_default();
        let memories = || self.model.inputs.iter().chain(&self.model.outputs).map(|port| port.memory);
        let device = memories().find(|memory| *memory != MemoryId::HOST);
        let Some(device) = device.filter(|device| self.queues.busy_until(*device).is_some()) else {
            self.clock.advance(time);
            return None;
        };
        let token = self.queues.push(device, self.clock.now(), time);
        let end = self.queues.busy_until(device).unwrap_or_default();
        let outputs = binding.outputs.iter().filter_map(|slot| match slot {
            Slot::Bound(tensor) => Some(tensor),
            Slot::Unbound | Slot::Unknown(_) => None,
        });
        binding.inputs.iter().flatten().chain(outputs).for_each(|tensor| tensor.use_until(end));
        if self.model.outputs.iter().any(|port| port.memory == MemoryId::HOST) {
            self.queues.wait(device, &self.clock);
        }
        (!self.queues.is_untimed(device)).then_some(token)
    }

    /// A run must not read what it writes, except the in-place pairs.
    fn check_aliasing(&self, binding: &MockBinding) -> Result<(), BackendError> {
        for (output, slot) in binding.outputs.iter().enumerate() {
            let Slot::Bound(written) = slot else { continue };
            for (input, read) in binding.inputs.iter().enumerate() {
                let shared = read.as_ref().is_some_and(|read| read.shares_memory_with(written));
                let wanted = self.model.in_place.contains(&(input, output));
                if shared != wanted {
                    let names = (&self.model.inputs[input].name, &self.model.outputs[output].name);
                    let state = if shared { "share" } else { "do not share" };
                    return Err(misfit(names.1, format!("{} and {} {state} a buffer", names.0, names.1)));
                }
            }
        }
        Ok(())
    }
}

fn fits(port: &Port, tensor: &MockTensor) -> Result<(), BackendError> {
    let sizes = port.shape.len() == tensor.shape().len()
        && port.shape.iter().zip(tensor.shape()).all(|(want, have)| want.is_none_or(|want| want == *have));
    if sizes && port.dtype == tensor.dtype() && port.memory == tensor.memory() {
        return Ok(());
    }
    let have = format!("{} {:?} in memory {}", tensor.dtype(), tensor.shape(), tensor.memory().0);
    Err(misfit(
        &port.name,
        format!("{} {:?} in memory {} is wanted, not {have}", port.dtype, port.shape, port.memory.0),
    ))
}

impl Session for MockSession {
    type Tensor = MockTensor;
    type Control = MockControl;
    type Binding = MockBinding;

    fn inputs(&self) -> &[Port] {
        &self.model.inputs
    }

    fn outputs(&self) -> &[Port] {
        &self.model.outputs
    }

    fn binding(&self) -> Result<MockBinding, BackendError> {
        let (inputs, outputs) = (self.model.inputs.len(), self.model.outputs.len());
        Ok(MockBinding { inputs: vec![None; inputs], outputs: vec![Slot::Unbound; outputs] })
    }

    fn bind_input(&self, binding: &mut MockBinding, index: usize, tensor: &MockTensor) -> Result<(), BackendError> {
        fits(&self.model.inputs[index], tensor)?;
        binding.inputs[index] = Some(tensor.clone());
        Ok(())
    }

    fn bind_output(&self, binding: &mut MockBinding, index: usize, tensor: &MockTensor) -> Result<(), BackendError> {
        fits(&self.model.outputs[index], tensor)?;
        binding.outputs[index] = Slot::Bound(tensor.clone());
        Ok(())
    }

    fn bind_output_unknown(&self, binding: &mut MockBinding, index: usize) -> Result<(), BackendError> {
        binding.outputs[index] = Slot::Unknown(None);
        Ok(())
    }

    fn run(&mut self, binding: &mut MockBinding, control: &MockControl) -> Result<Option<TimingToken>, BackendError> {
        if control.stopped() {
            return Err(BackendError::Stopped);
        }
        if let Some(missing) = binding.inputs.iter().position(Option::is_none) {
            return Err(misfit(&self.model.inputs[missing].name, "it is not bound".into()));
        }
        if binding.outputs.iter().any(|slot| matches!(slot, Slot::Unknown(Some(_)))) {
            return Err(misfit("an output", "asking for an unknown shape holds for one run".into()));
        }
        let coming = |input: &Option<MockTensor>| input.as_ref().is_some_and(MockTensor::is_coming);
        if let Some(early) = binding.inputs.iter().position(coming) {
            return Err(misfit(&self.model.inputs[early].name, "it has not arrived".into()));
        }
        self.check_aliasing(binding)?;
        self.weights.check()?;
        if let Some(before) = self.failing_run.get() {
            self.failing_run.set(before.checked_sub(1));
            if before == 0 {
                self.leave_work(binding);
                return Err(BackendError::Runtime { doing: "run".into(), cause: "the mock was told to fail".into() });
            }
        }
        let kernel = self.model.kernel.clone();
        kernel(&mut Frame { model: &self.model, binding })?;
        let token = self.take_time(binding);
        if control.stopped() { Err(BackendError::Stopped) } else { Ok(token) }
    }

    fn take_output(&self, binding: &mut MockBinding, index: usize) -> Result<MockTensor, BackendError> {
        match &binding.outputs[index] {
            Slot::Unknown(Some(tensor)) => Ok(tensor.clone()),
            _ => Err(misfit(&self.model.outputs[index].name, "no run has made it".into())),
        }
    }
}
