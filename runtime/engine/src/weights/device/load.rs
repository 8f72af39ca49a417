//! Reserves slots: a ring for each device that streams, then a slot for each resident stage, in the plan's order. Where the device has
//! less memory than planned, the stages that no longer fit are streamed instead.

use super::{DeviceTier, RingId, SlotRing, StageSlot, StageWeights, WeightBuffer};
use crate::buffers::{Buffer, BufferPool};
use crate::error::{BackendError, EngineError};
use crate::ids::{Id, IndexVec, StageId};
use crate::options::{EngineOptions, WeightReads};
use crate::port::{Backend, Dims, Fallback, HostCopy, MemoryId, WeightLocation};
use crate::program::Stage;
use crate::reporter::{Reporter, listed};
use hpp_schema::{ByteSize, PartitionVariant, Plan, Residency, WeightInput, in_slot};
use std::path::Path;

/// Slots of a ring that the plan does not have.
const DEFAULT_SLOTS: u32 = 2;

/// The inputs of [`DeviceTier::load`].
pub(crate) struct DeviceTierConfig<'a> {
    pub plan: &'a Plan,
    /// The plan's directory.
    pub dir: &'a Path,
    pub stages: &'a IndexVec<StageId, Stage>,
    pub options: &'a EngineOptions,
    /// Bytes of host memory for weights that are streamed to devices; `None` without a limit.
    pub host_memory: Option<u64>,
    pub reporter: &'a dyn Reporter,
}

impl<B: Backend> DeviceTier<B> {
    /// Reserves memory for all weights that are inputs, and copies those that stay on their device.
    pub fn load(pool: &BufferPool<B>, config: &DeviceTierConfig<'_>) -> Result<Self, EngineError> {
        let weights = config.stages.iter().map(|_| None).collect();
        let mut tier = DeviceTier { weights, rings: IndexVec::default(), poison: None };
        let host = HostCopyPolicy::new(config);
        tracing::debug!(
            host_memory = config.host_memory,
            pinned_share = host.pinned,
            bypass_page_cache = host.host_lacks_memory,
            "device tier"
        );
        for device in &config.plan.devices {
            let loader = DeviceLoader { pool, config, device: &device.name, host };
            loader.load(device.ring.map(|ring| ring.slots), &mut tier)?;
        }
        if config.options.poison_slots {
            tier.poison = tier.poison_buffer(pool)?;
        }
        Ok(tier)
    }

    /// A buffer of ones as large as the largest buffer of any slot; `None` without slots.
    fn poison_buffer(&self, pool: &BufferPool<B>) -> Result<Option<Buffer<B>>, EngineError> {
        let failed = |source| EngineError::Memory { what: "the contents of poisoned slots".into(), source };
        let largest = self.weights.iter().flatten().flat_map(|weights| &weights.slot_sizes).max();
        let Some(largest) = largest else { return Ok(None) };
        // An empty weight has a buffer of one byte.
        let bytes = largest + 1;
        let ones = pool.reserve(MemoryId::HOST, bytes).map_err(failed)?;
        pool.backend.write(&ones.handle, 0, &vec![0xff; bytes as usize]).map_err(failed)?;
        Ok(Some(ones))
    }
}

/// How the host keeps weights that are streamed to devices.
#[derive(Clone, Copy)]
struct HostCopyPolicy {
    /// The share of each stage's weights that is pinned, 0 to 1.
    pinned: f64,
    /// Whether the host lacks memory for the rest, so that reads bypass the page cache.
    host_lacks_memory: bool,
}

impl HostCopyPolicy {
    fn new(config: &DeviceTierConfig<'_>) -> Self {
        let variants = config.stages.iter().filter_map(|stage| device_variant(config.plan, stage));
        let streamed = variants.filter(is_streamed).flat_map(|variant| variant.weights).filter_map(WeightInput::bytes);
        let total = streamed.fold(0, u64::saturating_add);
        let held = total.min(config.host_memory.unwrap_or(u64::MAX));
        let pinned = held.min(config.options.pinned.unwrap_or(u64::MAX));
        HostCopyPolicy {
            pinned: if total > 0 { pinned as f64 / total as f64 } else { 0.0 },
            host_lacks_memory: held < total || config.plan.devices.iter().any(|device| device.window.is_some()),
        }
    }
}

fn is_streamed(variant: &PartitionVariant<'_>) -> bool {
    variant.residency == Residency::Streamed
}

/// The variant of a stage whose weights are inputs; `None` for a stage that fell back to constants on the host.
fn device_variant<'a>(plan: &'a Plan, stage: &Stage) -> Option<PartitionVariant<'a>> {
    stage.weight_memory()?;
    let variants = plan.partitions[stage.partition.index()].variants();
    variants.into_iter().find(|variant| variant.device == stage.device && !variant.weights.is_empty())
}

/// The slots of one device in one memory, while they are reserved.
struct Slots<B: Backend> {
    ring: Option<SlotRing<B>>,
    resident: Vec<(StageId, Vec<Buffer<B>>)>,
    streamed: Vec<StageId>,
}

/// Reserves and fills the slots of one device.
struct DeviceLoader<'a, B: Backend> {
    pool: &'a BufferPool<B>,
    config: &'a DeviceTierConfig<'a>,
    device: &'a str,
    host: HostCopyPolicy,
}

impl<'a, B: Backend> DeviceLoader<'a, B> {
    fn load(&self, planned_slots: Option<u32>, tier: &mut DeviceTier<B>) -> Result<(), EngineError> {
        self.pin();
        let mut memories = Vec::new();
        for (id, stage) in self.stages() {
            let Some(variant) = device_variant(self.config.plan, stage) else { continue };
            let weights = self.open_weights(stage, &variant)?;
            memories.push(weights.memory);
            tier.weights[id] = Some(weights);
        }
        self.report_kept(tier);
        // More than one memory if some sessions fell back to the host.
        memories.sort_unstable();
        memories.dedup();
        memories.into_iter().try_for_each(|memory| self.load_memory(memory, planned_slots, tier))
    }

    fn stages(&self) -> impl Iterator<Item = (StageId, &'a Stage)> {
        let device = self.device;
        self.config.stages.entries().filter(move |(_, stage)| stage.device == device)
    }

    /// Pins host memory for the device's streamed weights, or as much as the system allows.
    fn pin(&self) {
        let sizes =
            self.stages().map(|(_, stage)| (stage, self.host_copy(stage).pinned)).filter(|(_, bytes)| *bytes > 0);
        let sizes: Vec<(&Stage, u64)> = sizes.collect();
        let memory = sizes.first().and_then(|(stage, _)| stage.weight_memory());
        let Some(memory) = memory.filter(|memory| *memory != MemoryId::HOST) else { return };
        let wanted = sizes.iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add);
        let pinned = self.pool.backend.pin(memory, wanted);
        tracing::info!(device = self.device, wanted, pinned, "host memory pinned for copies to the device");
        // A provider that cannot pin at all is no reason for a warning unless the user asked for pinned memory.
        if pinned < wanted && (pinned > 0 || self.config.options.pinned.is_some()) {
            self.config.reporter.warning(&format!(
                "{} of host memory could be pinned for {}, of {}: the other weights are read and copied through a small part of it",
                ByteSize(pinned).human(),
                self.device,
                ByteSize(wanted).human()
            ));
        }
    }

    /// How the host keeps a stage's weights. Resident ones are copied once and need no pinned memory.
    fn host_copy(&self, stage: &Stage) -> HostCopy {
        let streamed = device_variant(self.config.plan, stage).filter(is_streamed);
        let sizes = streamed.iter().flat_map(|variant| variant.weights).filter_map(WeightInput::bytes);
        let bytes = sizes.fold(0, u64::saturating_add);
        HostCopy { pinned: (self.host.pinned * bytes as f64) as u64, bypass_page_cache: self.host.host_lacks_memory }
    }

    fn open_weights(&self, stage: &Stage, variant: &PartitionVariant<'_>) -> Result<StageWeights<B>, EngineError> {
        let partition = &self.config.plan.partitions[stage.partition.index()];
        let dir = self.config.dir.join(&partition.weights_dir);
        let bytes_of = |weight: &WeightInput| weight.bytes().unwrap_or(u64::MAX);
        let locate = |weight: &WeightInput| WeightLocation {
            file: dir.join(&weight.file),
            offset: weight.offset,
            bytes: bytes_of(weight),
        };
        let memory = stage.weight_memory().unwrap_or(MemoryId::HOST);
        let wants_host = |at: usize| {
            memory != MemoryId::HOST && stage.weight_memories().any(|weight| weight == (at, MemoryId::HOST))
        };
        let (mut copied, mut kept, mut inputs) = (Vec::new(), Vec::new(), Vec::new());
        let order = in_slot(variant.weights);
        for (at, weight) in variant.weights.iter().enumerate() {
            let buffer = if wants_host(at) {
                kept.push(locate(weight));
                WeightBuffer::Host(kept.len() - 1)
            } else {
                copied.push(locate(weight));
                WeightBuffer::Slot(order.iter().position(|other| *other == at).unwrap_or(0))
            };
            inputs.push((Dims::from_slice(&weight.shape), buffer));
        }
        let source = self.pool.backend.upload_source(&copied, memory, self.host_copy(stage));
        let source = source.map_err(|source| stage.failed("opening its weights", source))?;
        let on_host =
            self.read_to_host(&kept).map_err(|source| stage.failed("reading weights to host memory", source))?;
        Ok(StageWeights {
            source,
            inputs,
            on_host,
            slot_sizes: order.iter().map(|at| bytes_of(&variant.weights[*at])).collect(),
            bytes: copied.iter().map(|location| location.bytes).fold(0, u64::saturating_add),
            memory,
            slot: StageSlot::Resident(vec![]),
        })
    }

    /// Buffers in host memory with these weights.
    fn read_to_host(&self, locations: &[WeightLocation]) -> Result<Vec<Buffer<B>>, BackendError> {
        let backend = &self.pool.backend;
        let sizes: Vec<u64> = locations.iter().map(|location| location.bytes).collect();
        let buffers = reserve_slot(self.pool, &sizes, MemoryId::HOST)?;
        if !buffers.is_empty() {
            let copy = HostCopy { pinned: 0, bypass_page_cache: self.host.host_lacks_memory };
            let source = backend.upload_source(locations, MemoryId::HOST, copy)?;
            let handles: Vec<&B::Buffer> = buffers.iter().map(|buffer| &buffer.handle).collect();
            backend.wait_upload(backend.upload(&source, &handles)?)?;
        }
        Ok(buffers)
    }

    /// Says which weights stay in host memory because the device's provider computes with them on the host.
    fn report_kept(&self, tier: &DeviceTier<B>) {
        let kept = self.stages().filter_map(|(id, stage)| {
            let on_host = &tier.weights[id].as_ref()?.on_host;
            let bytes = on_host.iter().map(|buffer| buffer.bytes).fold(0, u64::saturating_add);
            (!on_host.is_empty()).then_some((&*stage.name, bytes))
        });
        let (names, sizes): (Vec<&str>, Vec<u64>) = kept.unzip();
        if !names.is_empty() {
            let bytes = ByteSize(sizes.into_iter().fold(0, u64::saturating_add)).human();
            self.config.reporter.warning(&format!(
                "{bytes} of weights of {} stay in host memory: {} leaves operators that use them to the host",
                listed(&names),
                self.device
            ));
        }
    }

    /// Reserves the slots in one memory and fills the resident ones.
    fn load_memory(
        &self,
        memory: MemoryId,
        planned_slots: Option<u32>,
        tier: &mut DeviceTier<B>,
    ) -> Result<(), EngineError> {
        let in_memory = |id: StageId| tier.weights[id].as_ref().is_some_and(|weights| weights.memory == memory);
        let stages = self.stages().filter(|(id, _)| in_memory(*id));
        let (streamed, resident): (Vec<_>, Vec<_>) =
            stages.partition(|(_, stage)| device_variant(self.config.plan, stage).as_ref().is_some_and(is_streamed));
        let streamed: Vec<StageId> = streamed.into_iter().map(|(id, _)| id).collect();
        let resident: Vec<StageId> = resident.into_iter().map(|(id, _)| id).collect();
        let ring = match streamed.is_empty() {
            true => None,
            false => Some(self.reserve_ring(memory, planned_slots.unwrap_or(DEFAULT_SLOTS))?),
        };
        let slots = self.reserve_resident(memory, tier, Slots { ring, resident: vec![], streamed }, &resident)?;
        tracing::info!(
            device = self.device,
            ?memory,
            resident_stages = slots.resident.len(),
            streamed_stages = slots.streamed.len(),
            "stages with weights in device memory"
        );
        for (stage, slot) in slots.resident {
            self.fill_resident(tier, stage, slot)?;
        }
        if let Some(ring) = slots.ring {
            let ring: RingId = tier.rings.push(ring);
            for stage in slots.streamed {
                tier.set_slot(stage, StageSlot::Ring(ring));
            }
        }
        Ok(())
    }

    /// Reserves a slot for each resident stage. The first stage that does not fit and all after it are streamed instead. If there is no ring yet,
    /// as many stages before it are streamed too as the ring needs room.
    fn reserve_resident(
        &self,
        memory: MemoryId,
        tier: &DeviceTier<B>,
        mut slots: Slots<B>,
        resident: &[StageId],
    ) -> Result<Slots<B>, EngineError> {
        for (number, stage) in resident.iter().enumerate() {
            let sizes = tier.weights[*stage].as_ref().map_or(&[][..], |weights| &weights.slot_sizes);
            let error = match reserve_slot(self.pool, sizes, memory) {
                Ok(slot) => {
                    slots.resident.push((*stage, slot));
                    continue;
                }
                Err(error) => error,
            };
            let mut moved = resident[number..].to_vec();
            if slots.ring.is_none() {
                slots.ring = Some(self.ring_instead_of_resident(memory, &mut slots.resident, &mut moved, &error)?);
            }
            self.report_moved(&moved, resident.len(), error)?;
            slots.streamed.extend(moved);
            break;
        }
        Ok(slots)
    }

    /// A ring of as many slots as planned, or as many as fit.
    fn reserve_ring(&self, memory: MemoryId, planned: u32) -> Result<SlotRing<B>, EngineError> {
        let sizes = self.config.plan.slot(self.device);
        let mut slots = Vec::new();
        for number in 0..planned {
            match reserve_slot(self.pool, &sizes, memory) {
                Ok(slot) => slots.push(slot),
                Err(error) if number == 0 || self.config.options.fallback == Fallback::Refuse => {
                    return Err(self.out_of_memory(error));
                }
                Err(error) => {
                    let warning = format!("{} has room for {number} slots of {planned}: {error}", self.device);
                    self.config.reporter.warning(&warning);
                    break;
                }
            }
        }
        Ok(self.new_ring(memory, slots))
    }

    /// A ring in the place of the last resident slots, whose stages are moved to it.
    fn ring_instead_of_resident(
        &self,
        memory: MemoryId,
        resident: &mut Vec<(StageId, Vec<Buffer<B>>)>,
        moved: &mut Vec<StageId>,
        error: &BackendError,
    ) -> Result<SlotRing<B>, EngineError> {
        let sizes = self.config.plan.slot(self.device);
        let mut slots = Vec::new();
        while slots.len() < DEFAULT_SLOTS as usize {
            match (reserve_slot(self.pool, &sizes, memory), resident.pop()) {
                (Ok(slot), last) => {
                    slots.push(slot);
                    resident.extend(last);
                }
                (Err(_), Some((last, _))) => moved.insert(0, last),
                (Err(_), None) if !slots.is_empty() => break,
                (Err(_), None) => return Err(self.out_of_memory(error.clone())),
            }
        }
        Ok(self.new_ring(memory, slots))
    }

    fn new_ring(&self, memory: MemoryId, slots: Vec<Vec<Buffer<B>>>) -> SlotRing<B> {
        tracing::info!(device = self.device, ?memory, slots = slots.len(), "ring reserved");
        SlotRing::new(memory, slots, self.config.options.weights != WeightReads::OnDemand)
    }

    fn fill_resident(&self, tier: &mut DeviceTier<B>, stage: StageId, slot: Vec<Buffer<B>>) -> Result<(), EngineError> {
        let Some(weights) = &tier.weights[stage] else { return Ok(()) };
        let uploaded = weights.upload(self.pool, &slot).and_then(|upload| self.pool.backend.wait_upload(upload));
        uploaded.map_err(|source| self.config.stages[stage].failed("copying its weights", source))?;
        tier.set_slot(stage, StageSlot::Resident(slot));
        Ok(())
    }

    /// Warns of stages that are streamed instead of staying, or refuses that.
    fn report_moved(&self, moved: &[StageId], resident: usize, error: BackendError) -> Result<(), EngineError> {
        if self.config.options.fallback == Fallback::Refuse {
            return Err(self.out_of_memory(error));
        }
        let names: Vec<&str> = moved.iter().map(|stage| &*self.config.stages[*stage].name).collect();
        self.config.reporter.warning(&format!(
            "{} has less memory than planned: {} of {resident} resident partitions are streamed instead ({})",
            self.device,
            moved.len(),
            listed(&names)
        ));
        Ok(())
    }

    fn out_of_memory(&self, source: BackendError) -> EngineError {
        EngineError::Memory { what: format!("the weights on {}", self.device), source }
    }
}

impl<B: Backend> DeviceTier<B> {
    fn set_slot(&mut self, stage: StageId, slot: StageSlot<B>) {
        if let Some(weights) = &mut self.weights[stage] {
            weights.slot = slot;
        }
    }
}

/// The buffers of one slot.
pub(super) fn reserve_slot<B: Backend>(
    pool: &BufferPool<B>,
    sizes: &[u64],
    memory: MemoryId,
) -> Result<Vec<Buffer<B>>, BackendError> {
    sizes.iter().map(|bytes| pool.reserve(memory, *bytes)).collect()
}
