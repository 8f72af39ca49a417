//! Each state is an input and an output of one partition, and its sizes are known and consistent.

use super::{Findings, names};
use crate::{DeviceKind, Dim, InputRole, ModelKind, OutputUse, Plan, State, StateUpdate};
use std::collections::BTreeSet;

pub(super) fn check(plan: &Plan, found: &mut Findings) {
    let batch = batch_symbols(plan);
    for (at, state) in plan.states.iter().enumerate() {
        let place = format!("states[{at}]");
        ends(plan, found, &place, state);
        size(plan, found, &place, state, &batch);
    }
    for (at, state) in plan.model.states.iter().enumerate() {
        size(plan, found, &format!("model.states[{at}]"), state, &batch);
    }
    claimed(plan, found);
    per_partition(plan, found);
    let carries = plan.states.iter().any(|state| state.update != StateUpdate::ReadOnly);
    let free = carries && plan.model.kind == ModelKind::DecoderWithoutCache;
    found.require(!free, "states", "a decoder without cache has no states");
}

fn ends(plan: &Plan, found: &mut Findings, place: &str, state: &State) {
    let Some(partition) = plan.partitions.iter().find(|partition| partition.name == state.partition) else {
        return found.error(place, format!("the plan has no partition {:?}", state.partition));
    };
    let past = partition.inputs.iter().find(|input| input.name == state.past && input.from == "state");
    match past {
        None => found.error(place, format!("{:?} has no state input {:?}", partition.name, state.past)),
        Some(input) => {
            let fits = input.dtype == state.dtype && input.shape.len() == state.shape.len();
            found.require(fits, place, format!("{:?} has another type or rank in {:?}", state.past, partition.name));
        }
    }
    if state.update != StateUpdate::ReadOnly {
        let present = partition.outputs.iter().find(|o| o.name == state.present && o.to == OutputUse::State);
        match present {
            None => found.error(place, format!("{:?} has no state output {:?}", partition.name, state.present)),
            Some(output) => {
                let same = output.dtype == state.dtype;
                found.require(same, place, format!("{:?} is {} as an output", state.present, output.dtype));
            }
        }
    }
    match names::device(plan, &state.device) {
        None => found.error(place, format!("the plan has no device {:?}", state.device)),
        Some(device) => {
            let may_lie_on_disk = device.kind == DeviceKind::Cpu && state.update != StateUpdate::ReadOnly;
            let why = "only states that the host computes lie on disk";
            found.require(!state.on_disk || may_lie_on_disk, place, why);
        }
    }
}

fn size(plan: &Plan, found: &mut Findings, place: &str, state: &State, batch: &BTreeSet<&str>) {
    let (axis, length) = match state.update {
        StateUpdate::Sliding { axis, capacity } => (Some(axis), capacity.min(plan.budgets.context)),
        update => update.tokens().map_or((None, 1), |(axis, capacity)| (Some(axis), capacity)),
    };
    if axis.is_some_and(|axis| axis >= state.shape.len()) {
        return found.error(place, format!("it has no axis {}", axis.unwrap_or_default()));
    }
    found.require(length > 0, place, "its capacity is 0 tokens");
    if let StateUpdate::Append { capacity, .. } = state.update {
        let same = capacity == plan.budgets.context;
        let why = format!("its capacity is {capacity} tokens, but the context is {}", plan.budgets.context);
        found.require(same, place, why);
    }
    if state.update == StateUpdate::ReadOnly {
        return;
    }
    match elements(state, axis, length, batch) {
        Err(why) => found.error(place, why),
        Ok(elements) => match state.dtype.bytes_for(elements) {
            Some(bytes) if bytes == state.bytes.0 => {}
            Some(bytes) => found.error(place, format!("its shape has {bytes} bytes, but bytes is {}", state.bytes)),
            None => found.error(place, format!("the bytes of {elements} elements of {} are unknown", state.dtype)),
        },
    }
}

/// The symbols that stand for the number of sequences: the axis for sequences of the model's inputs, and the first axis of states.
fn batch_symbols(plan: &Plan) -> BTreeSet<&str> {
    let inputs = plan.model.inputs.iter().filter_map(|input| match input.role {
        InputRole::TokenIds | InputRole::TokenTypeIds | InputRole::AttentionMask if input.shape.len() < 2 => None,
        InputRole::PositionIds if input.shape.len() != 2 => input.shape.get(1).filter(|_| input.shape.len() == 3),
        InputRole::TokenIds
        | InputRole::TokenTypeIds
        | InputRole::AttentionMask
        | InputRole::PositionIds
        | InputRole::PastLengths
        | InputRole::TotalLengths
        | InputRole::Embeddings => input.shape.first(),
        InputRole::LogitPositions | InputRole::UseCacheBranch | InputRole::Zeros | InputRole::Free => None,
    });
    inputs.chain(plan.states.iter().filter_map(|state| state.shape.first())).filter_map(Dim::as_symbol).collect()
}

/// Number of elements of a state for one sequence.
fn elements(state: &State, axis: Option<usize>, length: u64, batch: &BTreeSet<&str>) -> Result<u64, String> {
    let mut product = 1u64;
    for (at, dim) in state.shape.iter().enumerate() {
        let size = if Some(at) == axis { Some(length) } else { known(dim, batch) };
        let size = size.ok_or_else(|| format!("the size of axis {at} ({dim}) is unknown"))?;
        product = product.checked_mul(size).ok_or("the number of elements overflows 64 bits")?;
    }
    Ok(product)
}

fn known(dim: &Dim, batch: &BTreeSet<&str>) -> Option<u64> {
    dim.as_fixed().or_else(|| batch.contains(dim.as_symbol()?).then_some(1))
}

/// Checks that every input and output that is declared as a state belongs to exactly one state.
fn claimed(plan: &Plan, found: &mut Findings) {
    for (at, partition) in plan.partitions.iter().enumerate() {
        let mine = || plan.states.iter().filter(|state| state.partition == partition.name);
        for (number, input) in partition.inputs.iter().enumerate().filter(|(_, input)| input.from == "state") {
            let count = mine().filter(|state| state.past == input.name).count();
            let place = format!("partitions[{at}].inputs[{number}]");
            found.require(count == 1, place, format!("{count} states have the input {:?}", input.name));
        }
        for (number, output) in partition.outputs.iter().enumerate().filter(|(_, o)| o.to == OutputUse::State) {
            let count = mine().filter(|state| state.present == output.name).count();
            let place = format!("partitions[{at}].outputs[{number}]");
            found.require(count == 1, place, format!("{count} states have the output {:?}", output.name));
        }
    }
}

fn per_partition(plan: &Plan, found: &mut Findings) {
    for (at, partition) in plan.partitions.iter().enumerate() {
        let states = plan.states.iter().filter(|state| state.partition == partition.name);
        let need = states.map(|state| state.bytes.0).try_fold(0u64, u64::checked_add);
        let need = need.and_then(|bytes| bytes.checked_mul(plan.budgets.batch));
        let place = format!("partitions[{at}].bytes.kv");
        match need {
            None => found.error(place, "the sum of its states overflows 64 bits"),
            Some(need) if need > partition.bytes.kv.0 => {
                found.error(place, format!("its states need {need} bytes, but kv is {}", partition.bytes.kv));
            }
            Some(_) => {}
        }
    }
}
