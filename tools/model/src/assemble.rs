//! The plan, put together from what was found and what was decided. Decides nothing itself.

use crate::analyse::Analysis;
use crate::costs::Load;
use crate::symbols::{Pass, symbols};
use hpp_graph::{Part, ValueId};
use hpp_partition::{Budget, Demand, KvHome, Place, Run};
use hpp_schema::*;
use std::collections::{BTreeMap, BTreeSet};

/// Everything a plan is made of.
pub struct Decision<'a> {
    /// What the model is.
    pub analysis: &'a Analysis,
    /// Costs of its blocks.
    pub blocks: &'a [hpp_partition::Block],
    /// Runs of blocks that become partitions.
    pub runs: &'a [Run],
    /// The limits that were kept.
    pub budget: &'a Budget,
    /// The cut, one part for each run.
    pub parts: &'a [Part],
    /// What the costs were counted for.
    pub load: Load,
    /// Why each run is where it is.
    pub reasons: Vec<String>,
    /// What the cost model expects.
    pub predictions: Predictions,
}

/// The plan without its files: paths in `model`, `generation`, `files` and every `weights_dir` are filled in when written.
pub fn assemble(decision: &Decision) -> Plan {
    let names = partition_names(decision);
    let partitions = partitions(decision, &names);
    let states = states(decision, &names);
    let schedule = schedule(decision, &partitions);
    let buffers = buffers(decision, &partitions);
    Plan {
        hpp_plan: PLAN_VERSION,
        model: model(decision),
        budgets: budgets(decision),
        devices: devices(decision),
        partitions,
        states,
        schedule,
        buffers,
        generation: generation(decision.analysis),
        predictions: decision.predictions.clone(),
        files: vec![],
    }
}

fn partition_names(decision: &Decision) -> Vec<String> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    let name = |run: &hpp_partition::Run| {
        let stem = if run.place == Place::Cpu { "cpu" } else { "gpu" };
        let count = counts.entry(stem).or_default();
        *count += 1;
        format!("{stem}_{}", *count - 1)
    };
    decision.runs.iter().map(name).collect()
}

fn model(decision: &Decision) -> Model {
    let a = decision.analysis;
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

fn budgets(decision: &Decision) -> Budgets {
    let budget = decision.budget;
    Budgets {
        vram: budget.vram.iter().copied().map(ByteSize).collect(),
        ram: budget.ram.map(ByteSize),
        context: decision.load.context,
        batch: decision.load.batch,
        margin: ByteSize(budget.margin),
    }
}

/// The host, and every GPU that has a budget or a partition.
fn devices(decision: &Decision) -> Vec<Device> {
    let used = decision.runs.iter().filter_map(|run| if let Place::Gpu(i) = run.place { Some(i + 1) } else { None });
    let gpus = used.max().unwrap_or(0).max(decision.budget.vram.len());
    let gpu = |index| Device { name: Place::Gpu(index).to_string(), kind: DeviceKind::Gpu };
    std::iter::once(Device { name: Place::Cpu.to_string(), kind: DeviceKind::Cpu }).chain((0..gpus).map(gpu)).collect()
}

fn partitions(decision: &Decision, names: &[String]) -> Vec<Partition> {
    let runs = decision.runs;
    let build = |index: usize| {
        let (run, part) = (&runs[index], &decision.parts[index]);
        let blocks = &decision.blocks[run.blocks.clone()];
        let demand = demand(decision, index);
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
            inputs: part.inputs.iter().map(|id| partition_input(decision, names, index, *id)).collect(),
            outputs: part.outputs.iter().map(|id| partition_output(decision, *id)).collect(),
            bytes: PartitionBytes {
                weights: ByteSize(demand.weights),
                kv: ByteSize(demand.kv),
                workspace: ByteSize(demand.workspace),
            },
            reason: decision.reasons[index].clone(),
        }
    };
    (0..runs.len()).map(build).collect()
}

/// What a partition needs, with the weights its own copy of the globals reads.
fn demand(decision: &Decision, index: usize) -> Demand {
    let graph = &decision.analysis.graph;
    let mut demand = Demand::of(&decision.blocks[decision.runs[index].blocks.clone()]);
    let read = decision.parts[index].nodes.iter().flat_map(|node| graph.node(*node).reads()).collect::<BTreeSet<_>>();
    demand.weights = read.iter().filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes).sum();
    demand
}

fn partition_input(decision: &Decision, names: &[String], index: usize, id: ValueId) -> PartitionInput {
    let a = decision.analysis;
    let (name, dtype, shape) = fact(a, id);
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

fn states(decision: &Decision, names: &[String]) -> Vec<State> {
    let owner = |past: ValueId| decision.parts.iter().position(|part| part.inputs.contains(&past));
    let place = |s: &crate::states::PlannedState| {
        let index = owner(s.past)?;
        let follows = decision.runs[index].place;
        let place = if decision.budget.kv == KvHome::Host { Place::Cpu } else { follows };
        Some(State { partition: names[index].clone(), device: place.to_string(), ..s.state.clone() })
    };
    decision.analysis.states.iter().filter_map(place).collect()
}

fn schedule(decision: &Decision, partitions: &[Partition]) -> Schedule {
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
    Schedule { prefill: steps.clone(), decode: steps, prefill_chunk: decision.analysis.prefill_chunk(decision.load) }
}

fn buffers(decision: &Decision, partitions: &[Partition]) -> Vec<Buffer> {
    let states: Vec<State> = decision.analysis.states.iter().map(|s| s.state.clone()).collect();
    let bytes = |dtype: DType, shape: &Shape, tokens| {
        let pass = Pass { batch: decision.load.batch, tokens, past: 1 };
        let symbols = symbols(&decision.analysis.inputs, &states, pass);
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
