//! What computing and moving cost, read off a problem: one block in one phase, a boundary, a streamed block, its state.

use crate::{Choice, Cost, KvHome, Mechanisms, Phase, Problem, Where};

/// Tensors that are copied one after the other, each with a latency of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tensors {
    pub number: u64,
    /// Of all of them together.
    pub bytes: u64,
}

impl Problem {
    /// Weights one block reads, bytes. A streamed block is copied whole, weights it shares with others too.
    pub fn weight_bytes(&self, block: usize) -> u64 {
        self.blocks[block].weights.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Passes over all blocks that a phase takes: those of the prompt, or one for a decoded token.
    pub fn passes(&self, phase: Phase) -> usize {
        match phase {
            Phase::Decode => 1,
            Phase::Prefill => self.load.passes.len(),
        }
    }

    /// Milliseconds one block computes in one pass, the start of its partition and visits of its state apart.
    pub(crate) fn block_ms(&self, block: usize, place: Where, phase: Phase, pass: usize) -> f64 {
        let ms = |cost: &Cost| match phase {
            Phase::Decode => cost.decode_ms,
            Phase::Prefill => cost.prefill_ms[pass],
        };
        match place.gpu() {
            None => ms(&self.cpu[block]),
            Some(gpu) => ms(&self.gpus[gpu].blocks[block]),
        }
    }

    /// The same, added up over all passes of a phase.
    pub(crate) fn block_ms_in_all(&self, block: usize, place: Where, phase: Phase) -> f64 {
        (0..self.passes(phase)).map(|pass| self.block_ms(block, place, phase, pass)).sum()
    }

    /// Cost of starting a partition there, milliseconds.
    pub(crate) fn launch_ms(&self, place: Where) -> f64 {
        place.gpu().map_or(self.cpu_launch_ms, |gpu| self.gpus[gpu].launch_ms)
    }

    /// Copying from the host to a GPU, milliseconds.
    pub(crate) fn upload_ms(&self, gpu: usize, tensors: Tensors) -> f64 {
        tensors.number as f64 * self.gpus[gpu].latency_ms + tensors.bytes as f64 / self.gpus[gpu].to_device
    }

    /// Copying from a GPU to the host, milliseconds.
    pub(crate) fn download_ms(&self, gpu: usize, tensors: Tensors) -> f64 {
        tensors.number as f64 * self.gpus[gpu].latency_ms + tensors.bytes as f64 / self.gpus[gpu].from_device
    }

    /// Copying the weights of a streamed block, milliseconds, while the host does not compute: all of them as one.
    pub(crate) fn stream_ms(&self, block: usize, gpu: usize) -> f64 {
        self.upload_ms(gpu, Tensors { number: 1, bytes: self.weight_bytes(block) })
    }

    /// What enters a block in one pass.
    pub(crate) fn boundary(&self, block: usize, phase: Phase, pass: usize) -> Tensors {
        let tokens = match phase {
            Phase::Decode => 1,
            Phase::Prefill => self.load.passes[pass],
        };
        let block = &self.blocks[block];
        Tensors { number: block.boundary_tensors, bytes: block.boundary_bytes.saturating_mul(tokens) }
    }

    /// A block's state, where it has any.
    pub(crate) fn state(&self, block: usize) -> Option<Tensors> {
        let block = &self.blocks[block];
        (block.kv_bytes > 0).then_some(Tensors { number: block.kv_tensors, bytes: block.kv_bytes })
    }

    /// State that visits a GPU around a block in each pass: all of it where state lies on the host, else none.
    pub(crate) fn visiting(&self, block: usize) -> Option<Tensors> {
        self.state(block).filter(|_| self.budget.kv == KvHome::Host)
    }

    /// State of a block that moves once the prompt is in, where decoding computes elsewhere and state lies where it is
    /// computed on.
    pub(crate) fn moving(&self, block: usize, choice: Choice) -> Option<Tensors> {
        let moves = self.budget.kv == KvHome::Device && choice.prefill.gpu() != choice.decode.gpu();
        self.state(block).filter(|_| moves)
    }

    /// Moving the state of a block once the prompt is in, milliseconds.
    pub(crate) fn handover_ms(&self, block: usize, choice: Choice) -> f64 {
        let Some(state) = self.moving(block, choice) else { return 0.0 };
        let from = choice.prefill.gpu().map_or(0.0, |gpu| self.download_ms(gpu, state));
        from + choice.decode.gpu().map_or(0.0, |gpu| self.upload_ms(gpu, state))
    }

    /// The choices a block has: every pair of places where it has a finite cost. A block that is resident on a GPU in one
    /// phase is not streamed there in the other.
    pub fn choices(&self, block: usize, mechanisms: Mechanisms) -> Vec<Choice> {
        let gpus = || 0..self.gpus.len().min(self.budget.vram.len());
        let mut places = vec![Where::Cpu];
        places.extend(gpus().map(Where::Resident));
        if mechanisms.streams() {
            places.extend(gpus().map(Where::Streamed));
        }
        let can = |place: Where, phase| self.block_ms_in_all(block, place, phase).is_finite();
        let can_stream = |place| match place {
            Where::Streamed(gpu) => self.stream_ms(block, gpu).is_finite(),
            _ => true,
        };
        let usable = |place: &Where, phase| can(*place, phase) && can_stream(*place);
        let pairs = places.iter().filter(|p| usable(p, Phase::Prefill)).flat_map(|prefill| {
            let decode = places.iter().filter(|p| usable(p, Phase::Decode));
            decode.map(|decode| Choice { prefill: *prefill, decode: *decode })
        });
        pairs.filter(|choice| choice.is_legal(mechanisms)).collect()
    }
}

impl Choice {
    /// Whether a runtime with these mechanisms could do this.
    pub fn is_legal(self, mechanisms: Mechanisms) -> bool {
        let same_gpu = self.prefill.gpu().is_some() && self.prefill.gpu() == self.decode.gpu();
        match mechanisms.streams() {
            true => !same_gpu || self.prefill == self.decode,
            false => self.prefill == self.decode && !matches!(self.prefill, Where::Streamed(_)),
        }
    }

    /// The GPU that holds the block's weights for good, if one does; two where each phase has its own.
    pub(crate) fn resident(self) -> impl Iterator<Item = usize> {
        let gpu = |place| if let Where::Resident(gpu) = place { Some(gpu) } else { None };
        let decode = gpu(self.decode).filter(|_| self.decode != self.prefill);
        gpu(self.prefill).into_iter().chain(decode)
    }

    /// Whether the host must hold the block's weights: it computes with them or they are copied from it.
    pub(crate) fn on_host(self) -> bool {
        !matches!((self.prefill, self.decode), (Where::Resident(_), Where::Resident(_)))
    }
}
