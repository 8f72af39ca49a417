//! The seal of a plan: digests of the parts of `plan.yaml` that users have no reason to edit.
//!
//! If weights are inputs of a session, the plan holds their offsets. Two weights of equal shape and type could be exchanged there and
//! every other check would pass, but the tokens would be wrong. The seal detects such changes. It guards against accidents and edits by
//! hand, not against an attacker, who can write a new seal.

use crate::{Partition, Plan, WeightInput};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Hexadecimal digits of a digest: 128 bits.
const DIGITS: usize = 32;

/// Digests of the sections of a plan that `hpp-split` decides. Each is the first 32 hexadecimal digits of BLAKE3 over a section's name, a
/// zero byte and its JSON. Not sealed, so that users may edit them: `budgets`, `generation`, `predictions`, `model.name`, and each
/// partition's `providers` and `reason`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Seal {
    /// Of `model`.
    pub model: String,
    /// Of `devices`.
    pub devices: String,
    /// Of each partition, without its weights.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub partitions: Vec<String>,
    /// Of each partition's `weights` and `prefill.weights`.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub weights: Vec<String>,
    /// Of `states`.
    pub states: String,
    /// Of `schedule`.
    pub schedule: String,
    /// Of `buffers`.
    pub buffers: String,
    /// Of `draft`; absent if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<String>,
    /// Of `files`.
    pub files: String,
}

impl Seal {
    /// Computes the seal of a plan.
    pub fn of(plan: &Plan) -> Result<Seal, serde_json::Error> {
        let mut model = plan.model.clone();
        model.name.clear();
        let partition = |partition: &Partition| digest("partition", &without_editable(partition));
        let weights = |partition: &Partition| {
            let variants: Vec<&[WeightInput]> = partition.variants().map(|variant| variant.weights).collect();
            digest("weights", &variants)
        };
        Ok(Seal {
            model: digest("model", &model)?,
            devices: digest("devices", &plan.devices)?,
            partitions: plan.partitions.iter().map(partition).collect::<Result<_, _>>()?,
            weights: plan.partitions.iter().map(weights).collect::<Result<_, _>>()?,
            states: digest("states", &plan.states)?,
            schedule: digest("schedule", &plan.schedule)?,
            buffers: digest("buffers", &plan.buffers)?,
            draft: plan.draft.as_ref().map(|draft| digest("draft", draft)).transpose()?,
            files: digest("files", &plan.files)?,
        })
    }

    /// Places in a plan that differ from the sealed plan, as paths, in file order.
    pub fn differences(&self, plan: &Plan) -> Result<Vec<String>, serde_json::Error> {
        let now = Seal::of(plan)?;
        let mut places = Vec::new();
        let mut compare = |place: &str, was: &String, is: &String| {
            if was != is {
                places.push(place.to_owned());
            }
        };
        compare("model", &self.model, &now.model);
        compare("devices", &self.devices, &now.devices);
        let counts = [self.partitions.len(), self.weights.len()];
        if counts != [now.partitions.len(); 2] {
            compare("partitions", &counts[0].to_string(), &format!("{} now", now.partitions.len()));
        } else {
            for (at, partition) in plan.partitions.iter().enumerate() {
                let name = &partition.name;
                compare(&format!("partitions[{at}] ({name})"), &self.partitions[at], &now.partitions[at]);
                compare(&format!("partitions[{at}].weights ({name})"), &self.weights[at], &now.weights[at]);
            }
        }
        compare("states", &self.states, &now.states);
        compare("schedule", &self.schedule, &now.schedule);
        compare("buffers", &self.buffers, &now.buffers);
        let none = String::new();
        compare("draft", self.draft.as_ref().unwrap_or(&none), now.draft.as_ref().unwrap_or(&none));
        compare("files", &self.files, &now.files);
        Ok(places)
    }
}

/// A partition without its editable fields and without its weights, which have their own digest.
fn without_editable(partition: &Partition) -> Partition {
    let mut sealed = partition.clone();
    sealed.reason.clear();
    sealed.providers.clear();
    sealed.weights.clear();
    if let Some(prefill) = &mut sealed.prefill {
        prefill.providers.clear();
        prefill.weights.clear();
    }
    sealed
}

/// Hashes the JSON of a typed value: its field order depends on no crate feature, unlike that of a JSON map.
fn digest(section: &str, value: &impl Serialize) -> Result<String, serde_json::Error> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(section.as_bytes());
    hasher.update(&[0]);
    hasher.update(&serde_json::to_vec(value)?);
    let mut digits = hasher.finalize().to_hex().to_string();
    digits.truncate(DIGITS);
    Ok(digits)
}
