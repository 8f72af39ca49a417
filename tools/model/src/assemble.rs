//! Assembles a plan from a model's analysis and a placement decision. Makes no decisions.

use crate::analyse::Analysis;
use crate::costs::Scenario;
use crate::faults::fault;
use crate::host_kernels::host_kernels;
use crate::providers::ProviderPolicy;
use crate::symbols::{PassSize, symbol_values};
use hpp_graph::{EarlyRouter, Graph, Mixture, PartitionGraph, Prediction, Segmentation, ValueId};
use hpp_partition::{BlockPlacement, BlockSpec, Demand, KvHome, Packing, Phase, Placement};
use hpp_schema::*;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// A run of blocks that becomes one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartitionSpec {
    /// Positions of the blocks.
    pub blocks: Range<usize>,
    /// Where they compute, in each phase.
    pub placement: BlockPlacement,
}

/// How weights of the host are read from disk in each pass.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskStreaming {
    /// The share of all these weights that is locked in memory, 0 to 1.
    pub locked_share: f64,
    /// The most bytes of the model that are read of one partition, without experts that are read by demand; the rest of a larger
    /// partition is locked.
    pub read_level: u64,
    /// Memory for the rest while it is read, bytes; `None` if only tables stay on disk.
    pub window: Option<u64>,
    /// Memory for experts that were read by demand, bytes; `None` if the runtime reads whole mixtures.
    pub expert_cache: Option<u64>,
    /// For each block, whether it is a table of which a pass reads a few rows.
    pub is_table: Vec<bool>,
}

impl DiskStreaming {
    /// Whether all weights except tables stay in memory.
    pub fn holds_all(&self) -> bool {
        self.window.is_none()
    }
}

/// A placement decision, with everything else that a plan records.
pub struct Decision<'a> {
    /// The model.
    pub analysis: &'a Analysis,
    /// Its blocks, as the planner sees them.
    pub blocks: &'a [hpp_partition::BlockSpec],
    /// Runs of blocks that become partitions, in order.
    pub partitions: &'a [PartitionSpec],
    /// The mixture that each partition begins with, where its experts are read by demand.
    pub mixtures: &'a [Option<Mixture>],
    /// The blocks that the parts consist of: those of the analysis, some divided before their experts.
    pub segmentation: &'a Segmentation,
    /// Slots in the ring of each GPU; 0 if nothing is streamed to it.
    pub slots: &'a [u32],
    /// The limits that the plan records.
    pub budgets: Budgets,
    /// How the host's weights are read from disk; `None` if host memory holds them.
    pub disk: Option<DiskStreaming>,
    /// How kernels pack the host's weights.
    pub packing: Packing,
    /// Weights that are read from disk are compressed where that takes at most this many of 1000 bytes.
    pub compress_permille: u32,
    /// Heap of sessions and the tokenizer beyond that of every process, bytes.
    pub heap: u64,
    /// Host memory beyond what runs need while sessions are created, bytes.
    pub session_creation: u64,
    /// The memory that holds state.
    pub kv: KvHome,
    /// Whether state on the host lies on disk.
    pub host_kv_on_disk: bool,
    /// The cut: one part of the graph for each partition.
    pub parts: &'a [PartitionGraph],
    /// Batch, context, prompt and answer lengths that the costs assume.
    pub scenario: Scenario,
    /// The reason for each partition's place.
    pub reasons: Vec<String>,
    /// The most tokens of a pass after the prompt that follows the decode schedule.
    pub decode_tokens: u64,
    /// Predicted times.
    pub predictions: Predictions,
    /// The providers of partitions.
    pub providers: &'a ProviderPolicy,
    /// Whether single blocks on GPUs keep their weights as inputs.
    pub movable: bool,
}

/// Assembles the plan. Paths in `model`, `generation`, `files` and every `weights_dir`, the `host_kernels` of partitions, and
/// weights that become inputs, are still empty; the writer fills them in.
pub fn assemble(decision: &Decision) -> Plan {
    let names = partition_names(decision);
    let partitions = partitions(decision, &names);
    let states = states(decision, &names);
    let schedule = schedule(decision, &partitions);
    let buffers = buffers(decision, &partitions);
    Plan {
        hpp_plan: PLAN_VERSION,
        model: model(decision),
        budgets: decision.budgets.clone(),
        devices: devices(decision, &partitions),
        partitions,
        states,
        schedule,
        buffers,
        generation: generation(decision.analysis),
        draft: None,
        predictions: decision.predictions.clone(),
        files: vec![],
        seal: None,
    }
}

fn partition_names(decision: &Decision) -> Vec<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let name = |spec: &PartitionSpec| {
        let stem = if spec.placement.decode == Placement::Cpu { "cpu" } else { "gpu" };
        let count = counts.entry(stem).or_default();
        *count += 1;
        format!("{stem}_{}", *count - 1)
    };
    decision.partitions.iter().map(name).collect()
}

/// The name of the device of a place.
fn device_name(place: Placement) -> String {
    match place.gpu() {
        None => "cpu".to_owned(),
        Some(gpu) => format!("gpu{gpu}"),
    }
}

/// The residency of a partition's weights if it computes at this place.
fn residency(disk: Option<&DiskStreaming>, spec: &PartitionSpec, place: Placement) -> Residency {
    match (place, disk) {
        (Placement::Cpu, Some(disk)) if spec.blocks.clone().all(|block| disk.is_table[block]) => Residency::Mapped,
        (Placement::Cpu, Some(disk)) if disk.holds_all() => Residency::Resident,
        (Placement::Cpu, Some(_)) | (Placement::Streamed(_), _) => Residency::Streamed,
        (Placement::Cpu | Placement::Resident(_), _) => Residency::Resident,
    }
}

/// Execution providers for a part, the preferred one first, without those that compute one of its operators wrongly.
fn providers(decision: &Decision, spec: &PartitionSpec, part: &PartitionGraph, place: Placement) -> Vec<Provider> {
    let policy = decision.providers;
    let mut providers = match place.gpu() {
        None => policy.host.get(spec.blocks.start).copied().into_iter().collect(),
        Some(gpu) => {
            let streams = decision.slots.get(gpu).is_some_and(|slots| *slots > 0);
            policy.gpus.clone().unwrap_or_else(|| Provider::for_gpus(streams || decision.movable))
        }
    };
    if !providers.contains(&Provider::CPU) {
        providers.push(Provider::CPU);
    }
    let graph = &decision.analysis.graph;
    providers.retain(|provider| fault(graph, &part.nodes, *provider).is_none());
    providers
}

/// The recorded options of the providers that partitions on a device list.
fn provider_options(
    decision: &Decision,
    partitions: &[Partition],
    device: &str,
) -> BTreeMap<Provider, ProviderOptions> {
    let variants = partitions.iter().flat_map(Partition::variants).filter(|variant| variant.device == device);
    let used: BTreeSet<Provider> = variants.flat_map(|variant| variant.providers).copied().collect();
    let options = decision.providers.options.iter().filter(|(provider, _)| used.contains(provider));
    options.map(|(provider, options)| (*provider, options.clone())).collect()
}

fn model(decision: &Decision) -> SourceModel {
    let a = decision.analysis;
    SourceModel {
        name: a.name.clone(),
        source: String::new(),
        tapped: None,
        weights_dir: String::new(),
        kind: a.kind,
        no_text: a.no_text.clone(),
        layers: a.segmentation.layer_count() as u32,
        context_length: a.config.context_length,
        positions: a.positions,
        tables_change_after: a.tables_change_after,
        vocab_size: a.vocab_size,
        inputs: a.inputs.clone(),
        outputs: a.outputs.clone(),
        states: a.rows.as_ref().map(|rows| rows.whole_states.clone()).unwrap_or_default(),
        gpu_experts: a.gpu_experts.as_ref().map(|experts| experts.experts),
        rounds_whole_passes: rounds_whole_passes(&a.graph),
        rounds_activations: rounds_to_8_bits(&a.graph),
        rounded_by: rounded_by(a),
        host_kernels: host_kernels(a.model.proto()),
    }
}

/// The options that round weights or activations of this model.
fn rounded_by(analysis: &Analysis) -> Vec<String> {
    let rounds_activations = analysis.integer_operators.is_some_and(|count| count > 0);
    let options = [(analysis.quantized.is_some(), "--quantize"), (rounds_activations, "--int8-activations")];
    options.into_iter().filter(|(is_used, _)| *is_used).map(|(_, option)| option.to_owned()).collect()
}

/// Whether operators round the activations of all tokens of a pass with one scale.
fn rounds_whole_passes(graph: &Graph) -> bool {
    let rounds = |op: &str| matches!(op, "DynamicQuantizeLinear" | "DynamicQuantizeMatMul");
    graph.node_ids().any(|id| rounds(&graph.node(id).op_type))
}

/// Whether operators round activations to 8 bits, of each token or block by itself.
fn rounds_to_8_bits(graph: &Graph) -> bool {
    graph.node_ids().any(|id| graph.node(id).int("accuracy_level") == Some(4))
}

/// The host, and every GPU that has a budget or a partition.
fn devices(decision: &Decision, partitions: &[Partition]) -> Vec<Device> {
    let places = decision.partitions.iter().flat_map(|spec| [spec.placement.prefill, spec.placement.decode]);
    let used = places.filter_map(Placement::gpu).map(|gpu| gpu + 1).max().unwrap_or(0);
    let gpus = used.max(decision.budgets.vram.len());
    let gpu = |gpu| {
        let name = device_name(Placement::Resident(gpu));
        let provider_options = provider_options(decision, partitions, &name);
        Device { ring: ring(decision, gpu), provider_options, ..Device::new(name, DeviceKind::Gpu) }
    };
    let window = decision.disk.as_ref().and_then(|disk| disk.window).map(ByteSize);
    let expert_cache = decision.disk.as_ref().and_then(|disk| disk.expert_cache).map(ByteSize);
    let kernel_layout = kernel_layout(decision, partitions).map(ByteSize);
    let if_any = |bytes: u64| Some(ByteSize(bytes)).filter(|bytes| bytes.0 > 0);
    let (heap, session_creation) = (if_any(decision.heap), if_any(decision.session_creation));
    let compress_permille = window.map(|_| decision.compress_permille);
    let name = device_name(Placement::Cpu);
    let provider_options = provider_options(decision, partitions, &name);
    let host = Device::new(name, DeviceKind::Cpu);
    let host = Device { window, expert_cache, kernel_layout, session_creation, ..host };
    let host = Device { heap, compress_permille, provider_options, ..host };
    std::iter::once(host).chain((0..gpus).map(gpu)).collect()
}

/// Bytes that the host holds for the weights that stay in its memory beyond their bytes in the model: growth by packing,
/// values folded from weights, and copies in sessions; `None` if 0.
fn kernel_layout(decision: &Decision, partitions: &[Partition]) -> Option<u64> {
    let held = |partition: &Partition| match partition.variants().find(|variant| variant.device == "cpu")?.residency {
        Residency::Resident => Some(partition.bytes.weights.0),
        Residency::Streamed => partition.bytes.locked.map(|locked| locked.0),
        Residency::Mapped => None,
    };
    let held = partitions.iter().filter_map(held).fold(0, u64::saturating_add);
    let is_resident = |partition: &Partition| partition.device == "cpu" && partition.residency == Residency::Resident;
    let resident = decision.partitions.iter().zip(partitions).filter(|(_, partition)| is_resident(partition));
    let folded = resident.flat_map(|(spec, _)| &decision.blocks[spec.blocks.clone()]).map(BlockSpec::folded_once);
    let computed = decision.partitions.iter().filter(|spec| spec.placement.computes_on_host());
    let sessions = computed.flat_map(|spec| &decision.blocks[spec.blocks.clone()]).map(|block| block.session_bytes);
    let more = decision.packing.packed(held) - held;
    Some(folded.chain(sessions).fold(more, u64::saturating_add)).filter(|bytes| *bytes > 0)
}

/// The ring of a GPU, with slots that hold any block streamed through them. The writer replaces the slot size by the
/// exact one.
fn ring(decision: &Decision, gpu: usize) -> Option<Ring> {
    let slots = decision.slots.get(gpu).copied().filter(|slots| *slots > 0)?;
    let is_in_slot = |placement: Placement| match placement {
        Placement::Streamed(at) => at == gpu,
        Placement::Resident(at) => at == gpu && decision.movable,
        Placement::Cpu => false,
    };
    let has_slot = |spec: &&PartitionSpec| Phase::BOTH.iter().any(|phase| is_in_slot(spec.placement.in_phase(*phase)));
    let blocks = decision.partitions.iter().filter(has_slot).flat_map(|spec| &decision.blocks[spec.blocks.clone()]);
    Some(Ring { slots, slot_bytes: ByteSize(hpp_partition::slot(blocks)) })
}

fn partitions(decision: &Decision, names: &[String]) -> Vec<Partition> {
    let build = |index: usize| {
        let (spec, part) = (&decision.partitions[index], &decision.parts[index]);
        let BlockPlacement { prefill, decode } = spec.placement;
        let blocks = &decision.segmentation.blocks[part.blocks.clone()];
        let demand = demand(decision, index);
        let experts = experts(decision, names, index);
        Partition {
            name: names[index].clone(),
            file: format!("{}.onnx", names[index]),
            weights_dir: String::new(),
            device: device_name(decode),
            residency: residency(decision.disk.as_ref(), spec, decode),
            weights: vec![],
            host_file: None,
            prefill: (prefill != decode).then(|| PrefillVariant {
                device: device_name(prefill),
                residency: residency(decision.disk.as_ref(), spec, prefill),
                file: format!("{}.onnx", names[index]),
                providers: providers(decision, spec, part, prefill),
                weights: vec![],
                host_file: None,
            }),
            providers: providers(decision, spec, part, decode),
            blocks: blocks.iter().map(|block| block.label.clone()).collect(),
            inputs: inputs(decision, names, index),
            outputs: outputs(decision, part),
            host_kernels: HostKernels::default(),
            bytes: PartitionBytes {
                weights: ByteSize(demand.weights),
                locked: locked(decision, spec, demand.weights, experts.as_ref().map_or(0, |experts| experts.bytes.0)),
                kv: ByteSize(demand.kv),
                workspace: ByteSize(demand.workspace),
            },
            experts,
            reason: decision.reasons[index].clone(),
        }
    };
    (0..decision.partitions.len()).map(build).collect()
}

/// The experts of a partition that are read by demand.
fn experts(decision: &Decision, names: &[String], index: usize) -> Option<Experts> {
    let mixture = decision.mixtures[index].as_ref()?;
    let graph = &decision.analysis.graph;
    let name = |id: &ValueId| graph.value(*id).name.clone();
    Some(Experts {
        router: name(&mixture.router),
        count: mixture.count,
        active: mixture.active,
        selected_by: mixture.selected_by,
        weights: mixture.weights.iter().map(name).collect(),
        apart: mixture.is_apart,
        bytes: ByteSize(mixture.bytes(graph)),
        next: decision.parts[index]
            .prediction
            .as_ref()
            .and_then(|prediction| next_experts(decision, names, prediction)),
    })
}

/// The partition whose experts a prediction predicts, and the name of the predicted router logits.
fn next_experts(decision: &Decision, names: &[String], prediction: &Prediction) -> Option<NextExperts> {
    let is_predicted =
        |mixture: &Option<Mixture>| mixture.as_ref().is_some_and(|mixture| mixture.router == prediction.router);
    let later = decision.mixtures.iter().position(is_predicted)?;
    Some(NextExperts { partition: names[later].clone(), router: prediction.name.clone() })
}

/// Bytes of a partition's weights that are locked in host memory while the rest is read from disk; `experts` of them belong to experts.
fn locked(decision: &Decision, spec: &PartitionSpec, weights: u64, experts: u64) -> Option<ByteSize> {
    let disk = decision.disk.as_ref()?;
    let weights = if disk.expert_cache.is_some() { weights.saturating_sub(experts) } else { weights };
    let streamed = residency(Some(disk), spec, Placement::Cpu) == Residency::Streamed;
    (spec.placement.computes_on_host() && streamed).then_some(ByteSize(weights.saturating_sub(disk.read_level)))
}

/// Memory demand of a partition, with the weights of the nodes that it recomputes.
fn demand(decision: &Decision, index: usize) -> Demand {
    let graph = &decision.analysis.graph;
    let PartitionSpec { blocks, placement } = &decision.partitions[index];
    let blocks = &decision.blocks[blocks.clone()];
    let mut demand = Demand::of(blocks);
    if *placement == BlockPlacement::both(Placement::Cpu) {
        demand.workspace = blocks.iter().map(|block| block.host_workspace(*placement)).max().unwrap_or(0);
    }
    let early = decision.parts[index].early_router.iter().flat_map(|router| &router.nodes);
    let read = decision.parts[index]
        .nodes
        .iter()
        .chain(early)
        .flat_map(|node| graph.node(*node).reads())
        .collect::<BTreeSet<_>>();
    // One block in two partitions has its states in the one that reads them.
    if decision.parts[index].states().is_empty() {
        demand.kv = 0;
    }
    demand.weights = read.iter().filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes).sum();
    demand
}

fn inputs(decision: &Decision, names: &[String], index: usize) -> Vec<PartitionInput> {
    let part = &decision.parts[index];
    let predicted = part.prediction.iter().map(|prediction| {
        let gives =
            |other: &PartitionGraph| other.early_router.as_ref().is_some_and(|router| router.prediction == *prediction);
        let producer = decision.parts.iter().position(gives).map(|part| names[part].clone());
        let (_, dtype, shape) = described(decision.analysis, prediction.router);
        PartitionInput { name: prediction.name.clone(), dtype, shape, from: producer.unwrap_or_default() }
    });
    part.inputs.iter().map(|id| partition_input(decision, names, index, *id)).chain(predicted).collect()
}

fn outputs(decision: &Decision, part: &PartitionGraph) -> Vec<PartitionOutput> {
    let predicted = part.early_router.iter().map(|EarlyRouter { prediction, .. }| {
        let (_, dtype, shape) = described(decision.analysis, prediction.router);
        PartitionOutput { name: prediction.name.clone(), dtype, shape, to: OutputUse::Boundary }
    });
    part.outputs.iter().map(|id| partition_output(decision, *id)).chain(predicted).collect()
}

fn partition_input(decision: &Decision, names: &[String], index: usize, id: ValueId) -> PartitionInput {
    let a = decision.analysis;
    let (name, dtype, shape) = described(a, id);
    let from = if a.states.iter().any(|s| s.past == id) {
        "state".to_owned()
    } else if a.graph.inputs.contains(&id) {
        "model".to_owned()
    } else {
        let producer = (0..index).find(|earlier| decision.parts[*earlier].outputs.contains(&id));
        producer.map(|earlier| names[earlier].clone()).unwrap_or_default()
    };
    PartitionInput { name, dtype, shape, from }
}

fn partition_output(decision: &Decision, id: ValueId) -> PartitionOutput {
    let a = decision.analysis;
    let (name, dtype, shape) = described(a, id);
    let to = if a.states.iter().any(|s| s.present == id) {
        OutputUse::State
    } else if a.graph.outputs.contains(&id) {
        OutputUse::Model
    } else {
        OutputUse::Boundary
    };
    PartitionOutput { name, dtype, shape, to }
}

/// Name, type and shape of a value; for a state, the planned shape.
fn described(a: &Analysis, id: ValueId) -> (String, DType, Shape) {
    let value = a.graph.value(id);
    let dtype = value.dtype.unwrap_or(DType::Float32);
    let mut shape = value.shape.clone().unwrap_or_default();
    if let Some(state) = a.states.iter().find(|s| s.past == id) {
        shape = state.state.shape.clone();
    }
    (value.name.clone(), dtype, shape)
}

fn states(decision: &Decision, names: &[String]) -> Vec<State> {
    let owner = |past: ValueId| decision.parts.iter().position(|part| part.inputs.contains(&past));
    let placed = |s: &crate::states::PlannedState| {
        let index = owner(s.past)?;
        let follows = decision.partitions[index].placement.decode;
        let place = if decision.kv == KvHome::Host { Placement::Cpu } else { follows };
        let on_disk = decision.host_kv_on_disk && place == Placement::Cpu;
        Some(State { partition: names[index].clone(), device: device_name(place), on_disk, ..s.state.clone() })
    };
    decision.analysis.states.iter().filter_map(placed).collect()
}

fn schedule(decision: &Decision, partitions: &[Partition]) -> Schedule {
    Schedule {
        prefill: steps(partitions, Partition::prefill_device),
        decode: steps(partitions, |partition| &partition.device),
        prefill_chunk: decision.analysis.prefill_chunk(decision.scenario),
        decode_tokens: Some(decision.decode_tokens).filter(|tokens| *tokens > 1),
    }
}

/// Runs of the partitions in order, each after copies of the tensors that it reads from other devices.
fn steps(partitions: &[Partition], device: impl Fn(&Partition) -> &str) -> Vec<Step> {
    let mut steps = Vec::new();
    // Pairs of a tensor and a device that holds a copy of it.
    let mut copied: BTreeSet<(&str, &str)> = BTreeSet::new();
    for partition in partitions {
        let own_device = device(partition);
        let device_of = |name: &str| partitions.iter().find(|p| p.name == name).map(&device);
        let mut moves: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for input in &partition.inputs {
            let Some(from) = device_of(&input.from).filter(|from| *from != own_device) else { continue };
            if copied.insert((&input.name, own_device)) {
                moves.entry(from).or_default().push(input.name.clone());
            }
        }
        let copy = |(from, values): (&str, Vec<String>)| {
            Step::Copy(CopyStep { values, from: from.to_owned(), to: own_device.to_owned() })
        };
        steps.extend(moves.into_iter().map(copy));
        steps.push(Step::Run(partition.name.clone()));
    }
    steps
}

/// One buffer for each boundary tensor on each device that writes or reads it.
fn buffers<'a>(decision: &Decision, partitions: &'a [Partition]) -> Vec<BoundaryBuffer> {
    let states: Vec<State> = decision.analysis.states.iter().map(|s| s.state.clone()).collect();
    let bytes = |dtype: DType, shape: &Shape, tokens| {
        let pass = PassSize { batch: decision.scenario.batch, tokens, past: 1 };
        let symbols = symbol_values(&decision.analysis.inputs, &states, pass);
        let sizes = shape.iter().map(|dim| dim.eval(&symbols));
        let elements = sizes.into_iter().try_fold(1u64, |product, size| product.checked_mul(size?))?;
        dtype.bytes_for(elements)
    };
    let mut buffers = Vec::new();
    for producer in partitions {
        for output in producer.outputs.iter().filter(|output| output.to == OutputUse::Boundary) {
            let per_token = bytes(output.dtype, &output.shape, 2).zip(bytes(output.dtype, &output.shape, 1));
            let readers = partitions
                .iter()
                .filter(|p| p.inputs.iter().any(|input| input.name == output.name && input.from == producer.name));
            let both = |p: &'a Partition| [p.device.as_str(), p.prefill_device()];
            let mut devices: Vec<&str> = std::iter::once(producer).chain(readers).flat_map(both).collect();
            devices.sort_unstable();
            devices.dedup();
            buffers.extend(devices.into_iter().map(|device| BoundaryBuffer {
                value: output.name.clone(),
                device: device.to_owned(),
                bytes_per_token: per_token.map(|(two, one)| two - one),
            }));
        }
    }
    buffers
}

fn generation(a: &Analysis) -> Option<GenerationConfig> {
    (a.kind != ModelKind::SingleRun).then(|| GenerationConfig {
        eos_token_ids: a.config.eos_token_ids.clone(),
        bos_token_id: a.config.bos_token_id,
        sampling: a.config.sampling.clone(),
        ..GenerationConfig::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn residency_follows_place_and_disk_streaming() {
        let disk = DiskStreaming {
            locked_share: 0.5,
            read_level: 1,
            window: Some(1),
            expert_cache: None,
            is_table: vec![true, false],
        };
        let spec = |blocks| PartitionSpec {
            blocks,
            placement: BlockPlacement { prefill: Placement::Cpu, decode: Placement::Streamed(0) },
        };
        let residencies = |blocks: Range<usize>, disk: Option<&DiskStreaming>| {
            [Placement::Cpu, Placement::Resident(0), Placement::Streamed(0)]
                .map(|place| residency(disk, &spec(blocks.clone()), place))
        };
        let (resident, streamed) = (Residency::Resident, Residency::Streamed);
        assert_eq!(residencies(0..2, None), [resident, resident, streamed]);
        assert_eq!(residencies(0..2, Some(&disk)), [streamed, resident, streamed]);
        assert_eq!(residencies(0..1, Some(&disk)), [Residency::Mapped, resident, streamed]);
        // If everything except tables fits, only tables stay on disk.
        let disk = DiskStreaming { locked_share: 1.0, read_level: 0, window: None, ..disk };
        assert_eq!(residencies(1..2, Some(&disk)), [resident, resident, streamed]);
        assert_eq!(residencies(0..1, Some(&disk)), [Residency::Mapped, resident, streamed]);
    }
}
