//! Data flow: every partition input has an earlier source with the same element type, and every model output has one
//! producer.

use super::Findings;
use crate::{DType, InputRole, ModelKind, OutputRole, OutputUse, Partition, Plan};

pub(super) fn check(plan: &Plan, found: &mut Findings) {
    for (at, partition) in plan.partitions.iter().enumerate() {
        inputs(plan, found, at, partition);
        outputs(plan, found, at, partition);
    }
    for (at, output) in plan.model.outputs.iter().enumerate() {
        let producers = plan.partitions.iter().flat_map(|partition| &partition.outputs);
        let count = producers.filter(|other| other.name == output.name && other.to == OutputUse::Model).count();
        let place = format!("model.outputs[{at}]");
        found.require(count == 1, place, format!("{count} partitions produce the model output {:?}", output.name));
    }
    roles(plan, found);
}

fn inputs(plan: &Plan, found: &mut Findings, at: usize, partition: &Partition) {
    for (number, input) in partition.inputs.iter().enumerate() {
        let place = format!("partitions[{at}].inputs[{number}]");
        match source(plan, at, &input.from, &input.name) {
            Err(why) => found.error(place, format!("{:?} {why}", input.name)),
            Ok(Some(dtype)) if dtype != input.dtype => {
                found.error(place, format!("{:?} is {dtype} at its source, {} here", input.name, input.dtype));
            }
            Ok(_) => {}
        }
    }
}

/// Element type of an input at its source; `None` for states, which `states` checks.
fn source(plan: &Plan, at: usize, from: &str, name: &str) -> Result<Option<DType>, String> {
    match from {
        "state" => Ok(None),
        "model" => match plan.model.inputs.iter().find(|input| input.name == name) {
            Some(input) => Ok(Some(input.dtype)),
            None => Err("is not an input of the model".into()),
        },
        producer => {
            let Some(number) = plan.partitions.iter().position(|partition| partition.name == producer) else {
                return Err(format!("comes from {producer:?}, which is neither model, state nor a partition"));
            };
            if number >= at {
                return Err(format!("comes from {producer:?}, which does not run earlier"));
            }
            let made = plan.partitions[number].outputs.iter().find(|output| output.name == name);
            match made {
                Some(output) if output.to != OutputUse::State => Ok(Some(output.dtype)),
                _ => Err(format!("is not an output of {producer:?} for other partitions")),
            }
        }
    }
}

fn outputs(plan: &Plan, found: &mut Findings, at: usize, partition: &Partition) {
    for (number, output) in partition.outputs.iter().enumerate() {
        let place = format!("partitions[{at}].outputs[{number}]");
        let name = &output.name;
        match output.to {
            OutputUse::State => {}
            OutputUse::Model => match plan.model.outputs.iter().find(|other| other.name == *name) {
                None => found.error(place, format!("{name:?} is not an output of the model")),
                Some(declared) if declared.dtype != output.dtype => {
                    found.error(place, format!("{name:?} is {} in the model, {} here", declared.dtype, output.dtype));
                }
                Some(_) => {}
            },
            OutputUse::Boundary => {
                let readers = plan.partitions.iter().flat_map(|other| &other.inputs);
                let read = readers.into_iter().any(|input| input.from == partition.name && input.name == *name);
                if !read {
                    found.warning(place, format!("no partition reads {name:?}"));
                }
            }
        }
    }
}

fn roles(plan: &Plan, found: &mut Findings) {
    for role in [InputRole::TokenIds, InputRole::Embeddings, InputRole::LogitPositions, InputRole::UseCacheBranch] {
        let count = plan.model.inputs.iter().filter(|input| input.role == role).count();
        found.require(count <= 1, "model.inputs", format!("{count} inputs have the role {role:?}"));
    }
    let logits = plan.model.outputs.iter().filter(|output| output.role == OutputRole::Logits).count();
    if plan.model.kind == ModelKind::SingleRun {
        return;
    }
    found.require(logits == 1, "model.outputs", format!("a decoder has one logits output, not {logits}"));
    let is_text = |role| matches!(role, InputRole::TokenIds | InputRole::Embeddings);
    let has_text = plan.model.inputs.iter().any(|input| is_text(input.role));
    found.require(has_text, "model.inputs", "a decoder takes token ids or embeddings");
}
