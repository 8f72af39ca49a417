//! What computing and moving cost, read off a problem: one block in one phase, a boundary, a streamed block, its state.

use crate::{Choice, Cost, KvHome, Mechanisms, Phase, Problem, Where};

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

    /// Milliseconds one block computes in one pass, the start of its partition apart, and the visit of its state counted
    /// where state lies on the host.
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

    /// Copying `bytes` from the host to a GPU, milliseconds.
    pub(crate) fn upload_ms(&self, gpu: usize, bytes: u64) -> f64 {
        self.gpus[gpu].latency_ms + bytes as f64 / self.gpus[gpu].to_device
    }

    /// Copying `bytes` from a GPU to the host, milliseconds.
    pub(crate) fn download_ms(&self, gpu: usize, bytes: u64) -> f64 {
        self.gpus[gpu].latency_ms + bytes as f64 / self.gpus[gpu].from_device
    }

    /// Copying the weights of a streamed block, milliseconds, while the host does not compute.
    pub(crate) fn stream_ms(&self, block: usize, gpu: usize) -> f64 {
        self.upload_ms(gpu, self.weight_bytes(block))
    }

    /// Bytes that enter a block in one pass.
    pub(crate) fn boundary(&self, block: usize, phase: Phase, pass: usize) -> u64 {
        let tokens = match phase {
            Phase::Decode => 1,
            Phase::Prefill => self.load.passes[pass],
        };
        self.blocks[block].boundary_bytes.saturating_mul(tokens)
    }

    /// State that visits a GPU around a block in each pass, bytes: all of it where state lies on the host, else nothing.
    pub(crate) fn visiting(&self, block: usize) -> u64 {
        match self.budget.kv {
            KvHome::Device => 0,
            KvHome::Host => self.blocks[block].kv_bytes,
        }
    }

    /// The choices a block has: every pair of places where it has a finite cost. A block that is resident on a GPU in one
    /// phase is not streamed there in the other.
    pub fn choices(&self, block: usize, mechanisms: Mechanisms) -> Vec<Choice> {
        let gpus = || 0..self.gpus.len().min(self.budget.vram.len());
        let mut places = vec![Where::Cpu];
        places.extend(gpus().map(Where::Resident));
        if mechanisms == Mechanisms::All {
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
        match mechanisms {
            Mechanisms::All => !same_gpu || self.prefill == self.decode,
            Mechanisms::ResidentCpu => self.prefill == self.decode && !matches!(self.prefill, Where::Streamed(_)),
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
