//! The engine: a loaded plan and its public operations. It follows the plan's schedule and makes no choices of its own.

use crate::buffers::BufferPool;
use crate::cancel::CancelHandle;
use crate::error::EngineError;
use crate::ids::{Id, PartitionId, StageId};
use crate::options::EngineOptions;
use crate::port::Backend;
use crate::program::Program;
use crate::reporter::Reporter;
use crate::runtime::{
    LogitRows, NamedTensors, PageLayout, PageToSave, RowBatcher, Runtime, Sequence, StepInput, StepRequest, WorkItem,
};
use crate::telemetry::{PassTelemetry, Telemetry};
use crate::tensor::{HostTensor, Logits};
use hpp_schema::{Plan, Residency, Span, Timeline};
use std::collections::BTreeMap;
use std::path::Path;

static NO_EXTRA_INPUTS: BTreeMap<String, HostTensor> = BTreeMap::new();

/// A plan, loaded and ready. Lives on the thread that made it.
pub struct Engine<B: Backend> {
    pub(crate) program: Program,
    pub(crate) runtime: Runtime<B>,
    batcher: RowBatcher<B>,
}

impl<B: Backend> Engine<B> {
    /// Checks a plan and its files, and loads its partitions.
    ///
    /// `dir` is the directory of the plan. Errors list everything that is wrong with the plan or its files.
    pub fn load(
        plan: &Plan,
        dir: &Path,
        backend: &B,
        options: EngineOptions,
        reporter: &dyn Reporter,
    ) -> Result<Self, EngineError> {
        let batcher = RowBatcher::new(options.row_batching);
        let (program, runtime) = crate::load::load(plan, dir, backend, options, reporter)?;
        Ok(Engine { program, runtime, batcher })
    }

    /// Starts a new text.
    pub fn new_sequence(&mut self) -> Result<Sequence<B>, EngineError> {
        self.runtime.new_sequence(&self.program)
    }

    /// Frees a sequence. The time that states on disk take counts as waiting for them.
    pub fn free(&mut self, sequence: Sequence<B>) {
        self.runtime.free(&self.program, sequence);
    }

    /// Appends tokens to a sequence and returns next-token logits `[rows, vocab]`.
    pub fn step(
        &mut self,
        sequence: &mut Sequence<B>,
        input: StepInput<'_>,
        rows: LogitRows,
    ) -> Result<Logits, EngineError> {
        let mut logits = Logits::default();
        self.step_into(sequence, input, rows, &mut logits)?;
        Ok(logits)
    }

    /// [`step`](Self::step) into logits that are reused, so that decoding allocates nothing.
    pub fn step_into(
        &mut self,
        sequence: &mut Sequence<B>,
        input: StepInput<'_>,
        rows: LogitRows,
        logits: &mut Logits,
    ) -> Result<(), EngineError> {
        self.step_with(sequence, input, rows, &NO_EXTRA_INPUTS, logits)
    }

    /// [`step_into`](Self::step_into) for models with further inputs, by name.
    pub fn step_with(
        &mut self,
        sequence: &mut Sequence<B>,
        input: StepInput<'_>,
        rows: LogitRows,
        extra: &BTreeMap<String, HostTensor>,
        logits: &mut Logits,
    ) -> Result<(), EngineError> {
        self.runtime.step_with(&self.program, sequence, StepRequest { input, rows, extra, logits })
    }

    /// One pass for several sequences: each stage's weights are fetched once, then every item runs; items of one token run together where
    /// [`EngineOptions::row_batching`] allows it. Without [`RowBatching::On`](crate::RowBatching::On) an item computes the same bits as in a pass
    /// of its own. Returns the outcome of each item; an error of the whole pass concerns all of them.
    pub fn pass(&mut self, items: &mut [WorkItem<'_, B>]) -> Result<Vec<Result<(), EngineError>>, EngineError> {
        let Engine { program, runtime, batcher } = self;
        match program.recomputes() {
            true => runtime.recompute_items(program, items),
            false => batcher.pass(program, runtime, items),
        }
    }

    /// Most tokens of one item of a [`pass`](Self::pass): the plan's chunk size.
    pub fn chunk(&self) -> u64 {
        self.program.plan.schedule.prefill_chunk.unwrap_or(u64::MAX)
    }

    /// Drops tokens so that at most `length` are left, and returns how many are left: `length`, or the number before the last pass if a state
    /// (convolution, recurrent) can go back only to that; then the caller feeds the missing tokens again. Returns `None` and changes nothing if a
    /// state cannot go back that far: then the text must be computed again in a new sequence.
    pub fn truncate(&mut self, sequence: &mut Sequence<B>, length: u64) -> Result<Option<u64>, EngineError> {
        let Runtime { pool, scratch, .. } = &mut self.runtime;
        sequence.truncate(&self.program, pool, length, scratch)
    }

    /// How many tokens [`truncate`](Self::truncate) to `length` would leave; `None` if it cannot go back that far.
    pub fn truncated_length(&self, sequence: &Sequence<B>, length: u64) -> Option<u64> {
        sequence.truncated_length(&self.program, length)
    }

    /// Most tokens of a pass that can be undone by [`truncate`](Self::truncate), if the sequence [keeps
    /// snapshots](Sequence::keep_snapshots). 0 if a sliding window on a device is full.
    pub fn max_undo(&self, sequence: &Sequence<B>) -> u64 {
        sequence.max_undo(&self.program)
    }

    /// The layout of pages of `tokens` tokens, the same for all sequences. `None` if states cannot be saved: the caller gives one of the
    /// states, or the model keeps none.
    pub fn page_layout(&self, tokens: u64) -> Option<PageLayout> {
        PageLayout::new(&self.program, tokens)
    }

    /// Copies pages of tokens out of a sequence's states, between two passes. States on a device are copied once for all pages. Each page has a
    /// layout made by [`page_layout`](Self::page_layout), for any number of tokens.
    ///
    /// # Errors
    /// The sequence does not hold all tokens of the pages, or, where the layout [has snapshots](PageLayout::has_snapshots), it does not end with
    /// each page; a page has another size than its layout's.
    pub fn save_pages(&mut self, sequence: &Sequence<B>, pages: Vec<PageToSave<'_>>) -> Result<(), EngineError> {
        self.runtime.save_pages(&self.program, sequence, pages)
    }

    /// Makes a sequence from saved pages, each with its layout. The pages follow each other from the sequence's first token on. It continues with
    /// the same bits as the sequence that the pages were saved from.
    ///
    /// # Errors
    /// Memory is short, the pages hold more tokens than the context, or a page has another size than its layout's.
    pub fn restore_pages(&mut self, pages: &[(&PageLayout, &[u8])]) -> Result<Sequence<B>, EngineError> {
        self.runtime.restore_pages(&self.program, pages)
    }

    /// Runs every partition once on named inputs and returns the model's outputs, including states.
    pub fn infer(&mut self, inputs: &NamedTensors) -> Result<NamedTensors, EngineError> {
        self.runtime.infer(&self.program, inputs)
    }

    /// Sets a state of a sequence that the model only reads, such as the keys and values of an encoder's output.
    pub fn set_read_only_state(
        &mut self,
        sequence: &mut Sequence<B>,
        past: &str,
        tensor: &HostTensor,
    ) -> Result<(), EngineError> {
        sequence.set_read_only_state(&self.program, &self.runtime.pool, past, tensor)
    }

    /// Sets which partition outputs are read back after each pass; an error if no partition has an output of such a name.
    pub fn set_taps<'a>(&mut self, names: impl IntoIterator<Item = &'a str>) -> Result<(), EngineError> {
        let Runtime { taps, lanes, .. } = &mut self.runtime;
        let boundaries = &lanes[0].boundaries;
        let find = |name: &str| {
            let found = boundaries.find(name);
            found.ok_or_else(|| EngineError::WrongOutput { name: name.to_owned(), why: "no partition has it".into() })
        };
        taps.wanted = names.into_iter().map(find).collect::<Result<_, _>>()?;
        taps.read.clear();
        taps.version += 1;
        Ok(())
    }

    /// The outputs of the last pass that [`set_taps`](Self::set_taps) asked for.
    pub fn taps(&self) -> &BTreeMap<String, HostTensor> {
        &self.runtime.taps.read
    }

    /// Keeps a partition's weights on their device from now on, or streams them before each run. The weights must be inputs of its file, and
    /// streaming them needs a slot ring on the device. On an error nothing has changed.
    pub fn set_residency(&mut self, partition: &str, residency: Residency) -> Result<(), EngineError> {
        let (id, _) = self.find_partition(partition)?;
        let Runtime { pool, weights, .. } = &mut self.runtime;
        let stages = self.program.stages.entries().filter(|(_, stage)| stage.partition == id);
        let stage = stages.map(|(stage, _)| stage).find(|stage| weights.device.can_move(*stage));
        let stage = stage.ok_or_else(|| cannot_move(partition, "its weights are constants of its session"))?;
        match residency {
            Residency::Resident => {
                let failed = |source| EngineError::Memory { what: format!("the weights of {partition}"), source };
                weights.device.make_resident(pool, stage).map_err(failed)?;
            }
            Residency::Streamed => {
                weights.device.make_streamed(stage).map_err(|why| cannot_move(partition, &why))?;
            }
            Residency::Mapped => return Err(cannot_move(partition, "weights that are inputs cannot be mapped")),
        }
        self.restart_prefetch()
    }

    /// From now on, decoding runs a partition on another of its devices: the device of prefill, or its own again. Its states stay where they are
    /// and are staged.
    pub fn decode_on(&mut self, partition: &str, device: &str) -> Result<(), EngineError> {
        let (id, stages) = self.find_partition(partition)?;
        let stage = stages.into_iter().find(|stage| self.program.stages[*stage].device == device);
        let stage = stage.ok_or_else(|| cannot_move(partition, &format!("the plan does not have it on {device}")))?;
        self.runtime.route.decode[id] = stage;
        self.restart_prefetch()
    }

    /// Locks `bytes` of the streamed weights in host memory from now on, but at most as many as were locked at load. To be called between two
    /// passes. The rest is read for each pass. Returns how many are locked; 0 where no weights are streamed.
    ///
    /// # Errors
    /// Weights cannot be read: then the engine must be loaded again.
    pub fn set_locked(&mut self, bytes: u64) -> Result<u64, EngineError> {
        self.runtime.set_locked(&self.program, bytes)
    }

    /// Bytes of each partition's streamed weights that are locked in host memory, in the order of the plan.
    pub fn locked_of_partitions(&self) -> Vec<u64> {
        let mut locked = self.runtime.locked.divided(self.runtime.locked_now);
        // Empty where no weights are streamed.
        locked.resize(self.plan().partitions.len(), 0);
        locked
    }

    /// Bytes of the streamed weights that are locked in host memory, and the most that [`set_locked`](Self::set_locked) can lock.
    pub fn locked(&self) -> (u64, u64) {
        (self.runtime.locked_now, self.runtime.locked.total())
    }

    fn find_partition(&self, name: &str) -> Result<(PartitionId, Vec<StageId>), EngineError> {
        let index = self.program.plan.partitions.iter().position(|partition| partition.name == name);
        let id = index.map(PartitionId::new).ok_or_else(|| cannot_move(name, "the plan has no such partition"))?;
        let stages = self.program.stages.entries().filter(|(_, stage)| stage.partition == id);
        Ok((id, stages.map(|(stage, _)| stage).collect()))
    }

    fn restart_prefetch(&mut self) -> Result<(), EngineError> {
        let Runtime { weights, route, pool, .. } = &mut self.runtime;
        weights.device.restart(pool, &self.program.run_order(route))
    }

    /// Cancels this engine's work from any thread.
    pub fn cancel_handle(&self) -> CancelHandle {
        self.runtime.cancel.clone()
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.program.plan
    }

    /// Most tokens of one sequence.
    pub fn context(&self) -> u64 {
        self.program.context
    }

    /// Sequences whose states fit the plan's memory budget together: at most those of [`EngineOptions::sequences`], at least one.
    pub fn max_sequences(&self) -> u64 {
        self.runtime.max_sequences
    }

    /// Bytes of host memory that the states of one sequence take.
    pub fn host_state_bytes(&self) -> u64 {
        self.program.host_state_bytes()
    }

    /// Bytes of device memory that the states of one sequence take, of all devices together.
    pub fn device_state_bytes(&self) -> u64 {
        self.program.device_state_bytes()
    }

    /// Bytes of disk that the states of one sequence take.
    pub fn disk_state_bytes(&self) -> u64 {
        self.program.disk_state_bytes()
    }

    /// Whether each step computes the whole sequence again, because the model keeps no state.
    pub fn recomputes(&self) -> bool {
        self.program.recomputes()
    }

    /// Times, counts, bytes and memory so far.
    pub fn telemetry(&self) -> Telemetry {
        let memory = self.pool().backend.memory_use();
        Telemetry { memory, ..self.runtime.recorder.telemetry.clone() }
    }

    /// The times of the last pass.
    pub fn last_pass(&self) -> &PassTelemetry {
        &self.runtime.recorder.pass
    }

    /// Resets times and counts of passes, for instance after a warm-up.
    pub fn reset_telemetry(&mut self) {
        self.runtime.recorder.telemetry.reset_passes();
    }

    /// Starts a new timeline, or stops recording. Off at first: recording allocates for each run and each copy.
    pub fn record_timeline(&mut self, on: bool) {
        let now = on.then(|| self.pool().backend.now());
        self.runtime.recorder.record_timeline(now);
    }

    /// Spans that the timeline has so far. An engine that runs for long should stop recording at some number of them.
    pub fn timeline_spans(&self) -> usize {
        self.runtime.recorder.spans()
    }

    /// Removes the spans of the timeline so far and returns them, in no order. Recording goes on.
    pub fn take_timeline(&mut self) -> Vec<Span> {
        self.runtime.recorder.take_spans()
    }

    /// The timeline so far: a track for each device (`gpu0`, or `gpu0 on the CPU` for its stages that run there), for each
    /// direction between memories, and for whole passes.
    pub fn timeline(&self) -> Timeline {
        self.runtime.recorder.timeline()
    }

    fn pool(&self) -> &BufferPool<B> {
        &self.runtime.pool
    }
}

fn cannot_move(partition: &str, why: &str) -> EngineError {
    EngineError::CannotMove { partition: partition.to_owned(), why: why.to_owned() }
}
