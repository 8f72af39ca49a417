//! Times of computation and of transfers: a block in a phase, a boundary, streamed weights, state.

use crate::{BlockPlacement, BlockSpec, Cost, GrowingState, KvHome, Mechanisms, Phase, Placement, Problem};

/// Tensors that are copied one after another, each with its own latency.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tensors {
    pub number: u64,
    /// Total size.
    pub bytes: u64,
}

/// State that is swapped to the computing device, because another device keeps it between tokens. `None` is the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StateSwap {
    /// The device that keeps the state between tokens.
    home: Option<usize>,
    /// The device that computes.
    computes_on: Option<usize>,
    /// Whether the state stays on the computing device until all passes of the phase are done; otherwise it is swapped back after each
    /// run of the block.
    pub until_phase_ends: bool,
    /// Whether the block has its own buffer on the computing device.
    has_own_buffer: bool,
    /// Whether neither phase computes on the device that keeps the state.
    is_never_at_home: bool,
}

/// A copy of tensors between devices; `None` is the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Transfer {
    pub from: Option<usize>,
    pub to: Option<usize>,
    pub tensors: Tensors,
    /// Whether the copy is made while earlier partitions run, if several partitions of the pass share the staging buffers.
    pub ahead: bool,
}

impl StateSwap {
    /// Whether the state is copied from the host to one of two staging buffers that the blocks of a device share. False for a block that
    /// computes on the host in one phase.
    pub fn is_shared_upload(self) -> bool {
        self.is_never_at_home && self.home.is_none() && self.computes_on.is_some()
    }

    /// A number that is equal for swaps of equal cost, for the same block.
    pub fn code(self) -> u32 {
        let way = u32::from(self.until_phase_ends) + 2 * u32::from(self.is_never_at_home);
        1 + way + 4 * self.home.map_or(0, |gpu| gpu as u32 + 1)
    }
}

impl Problem {
    /// Weights that one block reads, bytes.
    pub fn weight_bytes(&self, block: usize) -> u64 {
        self.blocks[block].weights.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Weights of one block that are copied in every pass if it is streamed to a GPU, bytes.
    pub fn streamed_bytes(&self, block: usize) -> u64 {
        self.blocks[block].streamed.bytes()
    }

    /// Number of passes of a phase: those of the prompt, or one for a decoded token.
    pub fn passes(&self, phase: Phase) -> usize {
        match phase {
            Phase::Decode => 1,
            Phase::Prefill => self.load.passes.len(),
        }
    }

    /// Time of one block in one pass, milliseconds, without launch cost and state swaps.
    pub(crate) fn block_ms(&self, block: usize, place: Placement, phase: Phase, pass: usize) -> f64 {
        let ms = |cost: &Cost| match phase {
            Phase::Decode => cost.decode_ms,
            Phase::Prefill => cost.prefill_ms[pass],
        };
        match place.gpu() {
            None => ms(&self.cpu[block]),
            Some(gpu) => ms(&self.gpus[gpu].blocks[block]),
        }
    }

    /// Time of one block in all passes of a phase, milliseconds.
    pub fn phase_ms(&self, block: usize, place: Placement, phase: Phase) -> f64 {
        (0..self.passes(phase)).map(|pass| self.block_ms(block, place, phase, pass)).sum()
    }

    /// The costs of all blocks on the host, or on a GPU.
    pub fn costs_mut(&mut self, place: Placement) -> &mut [Cost] {
        match place.gpu() {
            None => &mut self.cpu,
            Some(gpu) => &mut self.gpus[gpu].blocks,
        }
    }

    /// Launch cost of a partition, milliseconds.
    pub fn launch_ms(&self, place: Placement) -> f64 {
        place.gpu().map_or(self.cpu_launch_ms, |gpu| self.gpus[gpu].launch_ms)
    }

    /// Time of a copy from the host to a GPU, milliseconds.
    pub(crate) fn upload_ms(&self, gpu: usize, tensors: Tensors) -> f64 {
        tensors.number as f64 * self.gpus[gpu].latency_ms + tensors.bytes as f64 / self.gpus[gpu].to_device
    }

    /// Time of a copy from a GPU to the host, milliseconds.
    pub(crate) fn download_ms(&self, gpu: usize, tensors: Tensors) -> f64 {
        tensors.number as f64 * self.gpus[gpu].latency_ms + tensors.bytes as f64 / self.gpus[gpu].from_device
    }

    /// Time to copy the weights of a streamed block, as one copy and without contention, milliseconds.
    pub(crate) fn stream_ms(&self, block: usize, gpu: usize) -> f64 {
        self.upload_ms(gpu, Tensors { number: 1, bytes: self.streamed_bytes(block) })
    }

    /// The boundary tensors that enter a block in one pass.
    pub(crate) fn boundary(&self, block: usize, phase: Phase, pass: usize) -> Tensors {
        let tokens = match phase {
            Phase::Decode => 1,
            Phase::Prefill => self.load.passes[pass],
        };
        let block = &self.blocks[block];
        Tensors { number: block.boundary_tensors, bytes: block.boundary_bytes.saturating_mul(tokens) }
    }

    /// A block's state; `None` if it has none.
    pub(crate) fn state(&self, block: usize) -> Option<Tensors> {
        let block = &self.blocks[block];
        (block.kv_bytes > 0).then_some(Tensors { number: block.kv_tensors, bytes: block.kv_bytes })
    }

    /// The device that keeps a block's state between tokens; `None` is the host.
    fn home(&self, placement: BlockPlacement) -> Option<usize> {
        placement.decode.gpu().filter(|_| self.budget.kv == KvHome::Device)
    }

    /// How a block's state is swapped in a phase; `None` if the computing device keeps it between tokens.
    pub(crate) fn state_swap(&self, block: usize, placement: BlockPlacement, phase: Phase) -> Option<StateSwap> {
        self.state(block)?;
        let home = self.home(placement);
        let computes_on = placement.in_phase(phase).gpu();
        // If the other phase computes where the state is kept, the block has its own buffer on the computing device of this phase.
        let is_never_at_home = placement.in_phase(phase.other()).gpu() != home;
        let has_own_buffer = self.blocks[block].kv_grows.is_none() && !is_never_at_home;
        // In a pass of several sequences the next one needs the buffer.
        let until_phase_ends = has_own_buffer && self.load.sequences == 1;
        let swap = StateSwap { home, computes_on, until_phase_ends, has_own_buffer, is_never_at_home };
        (computes_on != home).then_some(swap)
    }

    /// Whether a block's state has its own buffer on the computing device of a phase.
    pub(crate) fn has_own_state_buffer(&self, block: usize, placement: BlockPlacement, phase: Phase) -> bool {
        self.state_swap(block, placement, phase).is_some_and(|swap| swap.has_own_buffer)
    }

    /// The transfer of a block's state after the prompt to the device that keeps it; `None` if it is there already.
    pub(crate) fn handover(&self, block: usize, placement: BlockPlacement) -> Option<Transfer> {
        let swap = self.state_swap(block, placement, Phase::Prefill).filter(|swap| swap.until_phase_ends)?;
        let bytes = self.in_place_bytes(block, swap, self.prefill_tokens());
        let tensors = Tensors { number: self.state(block)?.number, bytes };
        Some(Transfer { from: swap.computes_on, to: swap.home, tensors, ahead: false })
    }

    /// Time of the [`handover`](Self::handover), milliseconds; 0 if there is none.
    pub(crate) fn handover_ms(&self, block: usize, placement: BlockPlacement) -> f64 {
        self.handover(block, placement).map_or(0.0, |transfer| self.copy_ms(transfer))
    }

    /// The transfers of a block's state in all passes of a phase.
    pub(crate) fn swap_transfers(
        &self,
        block: usize,
        placement: BlockPlacement,
        phase: Phase,
    ) -> impl Iterator<Item = Transfer> {
        let swap =
            self.state_swap(block, placement, phase).filter(|swap| !swap.until_phase_ends || phase == Phase::Decode);
        let in_all_passes =
            move |swap| (0..self.passes(phase)).flat_map(move |pass| self.pass_transfers(block, swap, phase, pass));
        swap.into_iter().flat_map(in_all_passes)
    }

    /// The transfers of a block's state to the computing device and back in one pass.
    pub(crate) fn pass_transfers(&self, block: usize, swap: StateSwap, phase: Phase, pass: usize) -> [Transfer; 2] {
        let [before, after] = match phase {
            Phase::Prefill => [pass, pass + 1].map(|passes| self.load.passes[..passes].iter().sum()),
            Phase::Decode => [0, 1].map(|more| self.load.prompt_tokens + self.load.new_tokens / 2 + more),
        };
        // A buffer that is updated in place is laid out for all tokens of the prompt before the first pass.
        let laid_out = if phase == Phase::Prefill { self.prefill_tokens() } else { after };
        let state = &self.blocks[block];
        let tensors = |tokens: u64| Tensors {
            number: state.kv_tensors,
            bytes: match state.kv_grows {
                None => self.in_place_bytes(block, swap, laid_out),
                Some(GrowingState { fixed, token }) => {
                    fixed.saturating_add(token.saturating_mul(tokens)).min(state.kv_bytes)
                }
            },
        };
        let StateSwap { home, computes_on, has_own_buffer, .. } = swap;
        // An empty state is not copied to the block's own buffer.
        let past = if has_own_buffer && before == 0 { Tensors { number: 0, bytes: 0 } } else { tensors(before) };
        [
            Transfer { from: home, to: computes_on, tensors: past, ahead: swap.is_shared_upload() },
            Transfer { from: computes_on, to: home, tensors: tensors(after), ahead: false },
        ]
    }

    /// Bytes to copy of in-place state with this many tokens.
    fn in_place_bytes(&self, block: usize, swap: StateSwap, tokens: u64) -> u64 {
        let BlockSpec { kv_bytes, kv_filled, .. } = self.blocks[block];
        kv_filled.filter(|_| swap.home.is_none()).map_or(kv_bytes, |filled| filled.bytes(tokens))
    }

    /// Tokens of all prefill passes.
    fn prefill_tokens(&self) -> u64 {
        self.load.passes.iter().sum()
    }

    /// Time of a transfer, from GPU to GPU through the host, milliseconds.
    pub(crate) fn copy_ms(&self, transfer: Transfer) -> f64 {
        let download_ms = transfer.from.map_or(0.0, |gpu| self.download_ms(gpu, transfer.tensors));
        download_ms + transfer.to.map_or(0.0, |gpu| self.upload_ms(gpu, transfer.tensors))
    }

    /// The placements of a block: the one that the user assigned, if it is possible, else those on GPUs if it needs one, else all.
    pub fn placements(&self, block: usize, mechanisms: Mechanisms) -> Vec<BlockPlacement> {
        let BlockSpec { assigned, needs_gpu, .. } = self.blocks[block];
        let mut all = self.possible_placements(block, mechanisms);
        let is_wanted = |placement: &BlockPlacement| match assigned {
            Some(assigned) => *placement == BlockPlacement::both(assigned),
            None => !needs_gpu || !placement.computes_on_host(),
        };
        if all.iter().any(is_wanted) {
            all.retain(is_wanted);
        }
        all
    }

    /// Every pair of places with finite times. A block that is resident on a GPU in one phase is not streamed to the same GPU in the other.
    pub(crate) fn possible_placements(&self, block: usize, mechanisms: Mechanisms) -> Vec<BlockPlacement> {
        let gpus = || 0..self.gpus.len().min(self.budget.vram.len());
        let mut places = vec![Placement::Cpu];
        places.extend(gpus().map(Placement::Resident));
        if mechanisms.streams() {
            places.extend(gpus().map(Placement::Streamed));
        }
        let can_stream = |place| match place {
            Placement::Streamed(gpu) => self.stream_ms(block, gpu).is_finite(),
            _ => true,
        };
        let usable = |place: &Placement, phase| self.phase_ms(block, *place, phase).is_finite() && can_stream(*place);
        let pairs = places.iter().filter(|p| usable(p, Phase::Prefill)).flat_map(|prefill| {
            let decode = places.iter().filter(|p| usable(p, Phase::Decode));
            decode.map(|decode| BlockPlacement { prefill: *prefill, decode: *decode })
        });
        pairs.filter(|placement| placement.is_legal(mechanisms)).collect()
    }
}

impl BlockPlacement {
    /// Whether the runtime supports this block placement with these mechanisms.
    pub fn is_legal(self, mechanisms: Mechanisms) -> bool {
        let same_gpu = self.prefill.gpu().is_some() && self.prefill.gpu() == self.decode.gpu();
        match mechanisms.streams() {
            true => !same_gpu || self.prefill == self.decode,
            false => self.prefill == self.decode && !matches!(self.prefill, Placement::Streamed(_)),
        }
    }

    /// GPUs where the block's weights are resident: at most one for each phase.
    pub(crate) fn resident(self) -> impl Iterator<Item = usize> {
        let resident_gpu = |place| if let Placement::Resident(gpu) = place { Some(gpu) } else { None };
        let decode = resident_gpu(self.decode).filter(|_| self.decode != self.prefill);
        resident_gpu(self.prefill).into_iter().chain(decode)
    }

    /// Whether the block's weights are resident on this GPU in either phase.
    pub(crate) fn is_resident_on(self, gpu: usize) -> bool {
        [self.prefill, self.decode].contains(&Placement::Resident(gpu))
    }

    /// Whether the block is streamed to this GPU in either phase.
    pub(crate) fn is_streamed_to(self, gpu: usize) -> bool {
        [self.prefill, self.decode].contains(&Placement::Streamed(gpu))
    }

    /// Whether the host computes the block in either phase.
    pub fn computes_on_host(self) -> bool {
        [self.prefill, self.decode].contains(&Placement::Cpu)
    }

    /// Whether the host holds the block's weights, to compute with them or to copy them.
    pub fn holds_weights_on_host(self) -> bool {
        !matches!((self.prefill, self.decode), (Placement::Resident(_), Placement::Resident(_)))
    }
}
