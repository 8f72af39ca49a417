//! The plan, put together from what was found and what was decided. Decides nothing itself.

use crate::analyse::Analysis;
use crate::cli::{KvPlace, SplitArgs};
use crate::costs::Load;
use crate::place::Placement;
use crate::reason::reason;
use crate::symbols::{Pass, symbols};
use hpp_graph::{Part, ValueId};
use hpp_partition::{Demand, Place, Rates, decode_ms, prefill_ms};
use hpp_schema::*;
use std::collections::{BTreeMap, BTreeSet};

/// Everything a plan is made of.
pub struct Pieces<'a> {
    /// What the model is.
    pub analysis: &'a Analysis,
    /// Costs of its blocks.
    pub blocks: &'a [hpp_partition::Block],
    /// Where they go.
    pub placement: &'a Placement,
    /// The cut.
    pub parts: &'a [Part],
    /// What the costs were counted for.
    pub load: Load,
    /// What was asked for.
    pub args: &'a SplitArgs,
}

/// The plan without its files: paths in `model`, `generation`, `files` and every `weights_dir` are filled in when written.
pub fn assemble(pieces: &Pieces) -> Plan {
    let names = partition_names(pieces);
    let partitions = partitions(pieces, &names);
    let states = states(pieces, &names);
    let schedule = schedule(pieces, &partitions);
    let buffers = buffers(pieces, &partitions);
    Plan {
        hpp_plan: PLAN_VERSION,
        model: model(pieces),
        budgets: budgets(pieces),
        devices: devices(pieces),
        partitions,
        states,
        schedule,
        buffers,
        generation: generation(pieces.analysis),
        predictions: predictions(pieces),
        files: vec![],
    }
}

fn partition_names(pieces: &Pieces) -> Vec<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let name = |run: &hpp_partition::Run| {
        let stem = if run.place == Place::Cpu { "cpu" } else { "gpu" };
        let count = counts.entry(stem).or_default();
        *count += 1;
        format!("{stem}_{}", *count - 1)
    };
    pieces.placement.runs.iter().map(name).collect()
}

fn model(pieces: &Pieces) -> Model {
    let a = pieces.analysis;
    Model {
        name: a.name.clone(),
        source: String::new(),
        tapped: None,
        weights_dir: String::new(),
        kind: a.kind,
        layers: a.segmentation.layer_count() as u32,
        context_length: a.config.context_length,
        vocab_size: a.vocab_size,
        inputs: a.inputs.clone(),
        outputs: a.outputs.clone(),
    }
}

fn budgets(pieces: &Pieces) -> Budgets {
    let budget = &pieces.placement.budget;
    Budgets {
        vram: budget.vram.iter().copied().map(ByteSize).collect(),
        ram: budget.ram.map(ByteSize),
        context: pieces.load.context,
        batch: pieces.load.batch,
        margin: ByteSize(budget.margin),
    }
}

/// The host, and every GPU that has a budget or a partition.
fn devices(pieces: &Pieces) -> Vec<Device> {
    let used = pieces.placement.places.iter().filter_map(|p| if let Place::Gpu(i) = p { Some(i + 1) } else { None });
    let gpus = used.max().unwrap_or(0).max(pieces.placement.budget.vram.len());
    let gpu = |index| Device { name: Place::Gpu(index).to_string(), kind: DeviceKind::Gpu };
    std::iter::once(Device { name: Place::Cpu.to_string(), kind: DeviceKind::Cpu }).chain((0..gpus).map(gpu)).collect()
}

fn partitions(pieces: &Pieces, names: &[String]) -> Vec<Partition> {
    let runs = &pieces.placement.runs;
    let build = |index: usize| {
        let (run, part) = (&runs[index], &pieces.parts[index]);
        let blocks = &pieces.blocks[run.blocks.clone()];
        let demand = demand(pieces, index);
        Partition {
            name: names[index].clone(),
            file: format!("{}.onnx", names[index]),
            weights_dir: String::new(),
            device: run.place.to_string(),
            providers: match run.place {
                Place::Cpu => vec![Provider::Cpu],
                Place::Gpu(_) => vec![Provider::Cuda, Provider::Webgpu, Provider::Cpu],
            },
            blocks: blocks.iter().map(|block| block.label.clone()).collect(),
            inputs: part.inputs.iter().map(|id| partition_input(pieces, names, index, *id)).collect(),
            outputs: part.outputs.iter().map(|id| partition_output(pieces, *id)).collect(),
            bytes: PartitionBytes {
                weights: ByteSize(demand.weights),
                kv: ByteSize(demand.kv),
                workspace: ByteSize(demand.workspace),
            },
            reason: reason(pieces.placement, pieces.blocks, run),
        }
    };
    (0..runs.len()).map(build).collect()
}

/// What a partition needs, with the weights its own copy of the globals reads.
fn demand(pieces: &Pieces, index: usize) -> Demand {
    let graph = &pieces.analysis.graph;
    let mut demand = Demand::of(&pieces.blocks[pieces.placement.runs[index].blocks.clone()]);
    let read = pieces.parts[index].nodes.iter().flat_map(|node| graph.node(*node).reads()).collect::<BTreeSet<_>>();
    demand.weights = read.iter().filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes).sum();
    demand
}

fn partition_input(pieces: &Pieces, names: &[String], index: usize, id: ValueId) -> PartitionInput {
    let a = pieces.analysis;
    let (name, dtype, shape) = fact(a, id);
    let from = if a.states.iter().any(|s| s.past == id) {
        "state".to_owned()
    } else if a.graph.inputs.contains(&id) {
        "model".to_owned()
    } else {
        let producer = (0..index).find(|earlier| pieces.parts[*earlier].outputs.contains(&id));
        producer.map(|earlier| names[earlier].clone()).unwrap_or_default()
    };
    PartitionInput { name, dtype, shape, from }
}

fn partition_output(pieces: &Pieces, id: ValueId) -> PartitionOutput {
    let a = pieces.analysis;
    let (name, dtype, shape) = fact(a, id);
    let to = if a.states.iter().any(|s| s.present == id) {
        OutputUse::State
    } else if a.graph.outputs.contains(&id) {
        OutputUse::Model
    } else {
        OutputUse::Boundary
    };
    PartitionOutput { name, dtype, shape, to }
}

/// Name, type and shape of a value; states with the sizes the plan settled.
fn fact(a: &Analysis, id: ValueId) -> (String, DType, Shape) {
    let value = a.graph.value(id);
    let dtype = value.dtype.unwrap_or(DType::Float32);
    let mut shape = value.shape.clone().unwrap_or_default();
    if let Some(state) = a.states.iter().find(|s| s.past == id) {
        shape = state.state.shape.clone();
    }
    (value.name.clone(), dtype, shape)
}

fn states(pieces: &Pieces, names: &[String]) -> Vec<State> {
    let owner = |past: ValueId| pieces.parts.iter().position(|part| part.inputs.contains(&past));
    let place = |s: &crate::states::PlannedState| {
        let index = owner(s.past)?;
        let follows = pieces.placement.runs[index].place;
        let place = if pieces.args.kv == KvPlace::Cpu { Place::Cpu } else { follows };
        Some(State { partition: names[index].clone(), device: place.to_string(), ..s.state.clone() })
    };
    pieces.analysis.states.iter().filter_map(place).collect()
}

fn schedule(pieces: &Pieces, partitions: &[Partition]) -> Schedule {
    let mut steps = Vec::new();
    let mut there: BTreeSet<(&str, &str)> = BTreeSet::new();
    for partition in partitions {
        let device_of = |name: &str| partitions.iter().find(|p| p.name == name).map(|p| p.device.as_str());
        let mut moves: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for input in &partition.inputs {
            let Some(from) = device_of(&input.from).filter(|from| *from != partition.device) else { continue };
            if there.insert((&input.name, &partition.device)) {
                moves.entry(from).or_default().push(input.name.clone());
            }
        }
        let copy = |(from, values): (&str, Vec<String>)| {
            Step::Copy(CopyStep { values, from: from.to_owned(), to: partition.device.clone() })
        };
        steps.extend(moves.into_iter().map(copy));
        steps.push(Step::Run(partition.name.clone()));
    }
    Schedule { prefill: steps.clone(), decode: steps, prefill_chunk: pieces.analysis.prefill_chunk(pieces.load) }
}

fn buffers(pieces: &Pieces, partitions: &[Partition]) -> Vec<Buffer> {
    let states: Vec<State> = pieces.analysis.states.iter().map(|s| s.state.clone()).collect();
    let bytes = |dtype: DType, shape: &Shape, tokens| {
        let pass = Pass { batch: pieces.load.batch, tokens, past: 1 };
        let symbols = symbols(&pieces.analysis.inputs, &states, pass);
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
            let mut devices: Vec<&str> = std::iter::once(producer).chain(readers).map(|p| p.device.as_str()).collect();
            devices.sort_unstable();
            devices.dedup();
            buffers.extend(devices.into_iter().map(|device| Buffer {
                value: output.name.clone(),
                device: device.to_owned(),
                bytes_per_token: per_token.map(|(two, one)| two - one),
            }));
        }
    }
    buffers
}

fn generation(a: &Analysis) -> Option<Generation> {
    (a.kind != ModelKind::SingleRun).then(|| Generation {
        eos_token_ids: a.config.eos_token_ids.clone(),
        bos_token_id: a.config.bos_token_id,
        sampling: a.config.sampling.clone(),
        ..Generation::default()
    })
}

fn predictions(pieces: &Pieces) -> Predictions {
    let (blocks, places) = (pieces.blocks, &pieces.placement.places);
    let decode = decode_ms(blocks, places, &Rates::ASSUMED);
    Predictions {
        source: "static".to_owned(),
        decode_ms: round(decode),
        time_to_first_token_ms: round(prefill_ms(blocks, places, &Rates::ASSUMED, pieces.load.prompt)),
        prompt_tokens: pieces.load.prompt,
        decode_tokens_per_second: round(if decode > 0.0 { 1e3 / decode } else { 0.0 }),
    }
}

/// Four significant digits: more would pretend.
fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powf(3.0 - value.abs().log10().floor());
    (value * scale).round() / scale
}
