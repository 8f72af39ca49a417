//! Turns the weights of streamed and movable partitions into graph inputs. Partitions with the same graph then share
//! one file, and the plan records where the bytes of each input are.

use crate::error::SplitError;
use hpp_onnx::proto::ModelProto;
use hpp_onnx::{Lifted, LiftedWeight, VirtualFiles, WeightBytes, WeightError, embed_structure};
use hpp_schema::{ByteSize, DeviceKind, Partition, PartitionVariant, Plan, Residency, WeightInput};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;

/// Bytes of weight inputs that were embedded in the model file.
pub const SLOTS_FILE: &str = "slots.bin";

/// Alignment of weights in that file, bytes.
const ALIGN: u64 = 16;

/// The shared files, and the contents of [`SLOTS_FILE`].
#[derive(Debug, Default)]
struct SharedFiles {
    /// Models whose weights are inputs, by file name.
    files: Vec<(String, ModelProto)>,
    /// Contents of [`SLOTS_FILE`].
    slots: Vec<u8>,
    /// Notes for the user.
    notes: Vec<String>,
    /// Offsets in [`SLOTS_FILE`], by weight.
    offsets: HashMap<String, u64>,
}

/// Where weight files are while the plan is written.
#[derive(Clone, Copy)]
pub struct WeightSource<'a> {
    /// Directory that weight locations are relative to.
    pub dir: &'a Path,
    /// Files that exist only in memory, in a dry run.
    pub dry_files: &'a VirtualFiles,
}

/// Turns weights into inputs in partitions that are streamed to a GPU and, if `movable`, in single-block partitions
/// that stay on a GPU. `protos` starts with the partitions' own models, in order; those stay in use on machines without
/// the GPU, and the shared models are appended. Weights named in `shared` stay constants. Updates the plan's partitions
/// and ring sizes, prints notes, and returns the contents of [`SLOTS_FILE`], which may be empty.
pub fn weights_to_inputs(
    plan: &mut Plan,
    protos: &mut Vec<(String, ModelProto)>,
    shared: &HashSet<String>,
    movable: bool,
    source: WeightSource,
) -> Result<Vec<u8>, SplitError> {
    let own: HashSet<String> = plan.partitions.iter().map(|partition| partition.file.clone()).collect();
    let mut shared_files = convert_partitions(plan, protos, shared, movable, source)?;
    size_rings(plan, &mut shared_files.notes)?;
    shared_files.notes.iter().for_each(|note| tell!("note: {note}"));
    let variants = plan.partitions.iter().flat_map(Partition::variants);
    let used: HashSet<&str> = variants.flat_map(|variant| [Some(variant.file), variant.host_file]).flatten().collect();
    protos.retain(|(name, _)| !own.contains(name) || used.contains(name.as_str()));
    protos.append(&mut shared_files.files);
    Ok(shared_files.slots)
}

fn convert_partitions(
    plan: &mut Plan,
    protos: &[(String, ModelProto)],
    shared: &HashSet<String>,
    movable: bool,
    source: WeightSource,
) -> Result<SharedFiles, SplitError> {
    let gpus: BTreeSet<String> = gpus(plan);
    let mut shared_files = SharedFiles::default();
    for (partition, (name, proto)) in plan.partitions.iter_mut().zip(protos) {
        let converts = |variant: &PartitionVariant| {
            gpus.contains(variant.device) && has_weight_inputs(partition, variant, movable)
        };
        let decode = converts(&partition.decode_variant());
        let prefill = partition.prefill.is_some() && converts(&partition.prefill_variant());
        if !decode && !prefill {
            continue;
        }
        let failed = |source: WeightError| SplitError::Extract { name: name.clone(), source: Box::new(source) };
        let mut proto = proto.clone();
        embed_structure(&mut proto, source.dir, source.dry_files).map_err(failed)?;
        let lifted = hpp_onnx::lift(&proto, |name| shared.contains(name)).map_err(failed)?;
        shared_files.note(partition, &lifted);
        match lifted.weights.is_empty() {
            true => make_resident(partition, &gpus),
            false => shared_files.assign(partition, lifted, [decode, prefill]),
        }
    }
    Ok(shared_files)
}

fn gpus(plan: &Plan) -> BTreeSet<String> {
    plan.devices.iter().filter(|device| device.kind == DeviceKind::Gpu).map(|device| device.name.clone()).collect()
}

fn has_weight_inputs(partition: &Partition, variant: &PartitionVariant, movable: bool) -> bool {
    match variant.residency {
        Residency::Streamed => true,
        Residency::Resident => movable && partition.blocks.len() == 1,
        Residency::Mapped => false,
    }
}

/// Marks a partition without weights to stream as resident on its GPU.
fn make_resident(partition: &mut Partition, gpus: &BTreeSet<String>) {
    if gpus.contains(&partition.device) {
        partition.residency = Residency::Resident;
    }
    if let Some(prefill) = partition.prefill.as_mut().filter(|prefill| gpus.contains(&prefill.device)) {
        prefill.residency = Residency::Resident;
    }
}

impl SharedFiles {
    fn note(&mut self, partition: &Partition, lifted: &Lifted) {
        if lifted.kept > 0 {
            let (name, kept) = (&partition.name, ByteSize(lifted.kept).human());
            self.notes.push(format!(
                "{kept} of the weights of {name} stay on its GPU: their kernels accept only constants, or a nested graph reads them"
            ));
        }
    }

    /// Sets a partition's file and weights in the variants that have weight inputs, and reorders its inputs and outputs as
    /// in the file.
    fn assign(&mut self, partition: &mut Partition, lifted: Lifted, [decode, prefill]: [bool; 2]) {
        sort(&mut partition.inputs, &lifted.inputs, |input| &input.name);
        sort(&mut partition.outputs, &lifted.outputs, |output| &output.name);
        let weights: Vec<WeightInput> = lifted.weights.into_iter().map(|weight| self.input(weight)).collect();
        let (file, own) = (self.file_of(lifted.proto), partition.file.clone());
        if let Some(variant) = partition.prefill.as_mut().filter(|_| prefill) {
            (variant.file, variant.weights, variant.host_file) = (file.clone(), weights.clone(), Some(own.clone()));
        }
        if decode {
            (partition.file, partition.weights, partition.host_file) = (file, weights, Some(own));
        }
    }

    /// The name of the file with this model; adds it if new.
    fn file_of(&mut self, proto: ModelProto) -> String {
        if let Some((name, _)) = self.files.iter().find(|(_, known)| *known == proto) {
            return name.clone();
        }
        let name = format!("class_{}.onnx", self.files.len());
        self.files.push((name.clone(), proto));
        name
    }

    fn input(&mut self, weight: LiftedWeight) -> WeightInput {
        let LiftedWeight { name, dtype, shape, bytes } = weight;
        let (file, offset) = match bytes {
            WeightBytes::External { location, offset, .. } => (location, offset),
            WeightBytes::Embedded(bytes) => (SLOTS_FILE.to_owned(), self.add_embedded(&name, &bytes)),
        };
        WeightInput { name, dtype, shape, file, offset }
    }

    /// The offset of an embedded weight in [`SLOTS_FILE`]; adds its bytes on first use.
    fn add_embedded(&mut self, name: &str, bytes: &[u8]) -> u64 {
        if let Some(offset) = self.offsets.get(name) {
            return *offset;
        }
        let offset = (self.slots.len() as u64).next_multiple_of(ALIGN);
        self.slots.resize(offset as usize, 0);
        self.slots.extend_from_slice(bytes);
        self.offsets.insert(name.to_owned(), offset);
        offset
    }
}

fn sort<T>(items: &mut [T], order: &[String], name: impl Fn(&T) -> &String) {
    items.sort_by_key(|item| order.iter().position(|other| other == name(item)));
}

/// Sets slot sizes to what the streamed weights really take. That may be more than planned: inseparable blocks become
/// one partition, and movable partitions need a slot too. If the device's budget is then exceeded, removes slots and
/// adds a note.
fn size_rings(plan: &mut Plan, notes: &mut Vec<String>) -> Result<(), SplitError> {
    for at in 0..plan.devices.len() {
        let name = plan.devices[at].name.clone();
        let Some(planned) = plan.devices[at].ring else { continue };
        let slot = plan.slot(&name);
        let bytes = ByteSize(slot.iter().fold(0, |sum, piece| piece.saturating_add(sum)));
        if bytes.0 == 0 {
            plan.devices[at].ring = None;
            continue;
        }
        let was_within = !is_over_budget(plan, &name);
        plan.devices[at].ring = Some(hpp_schema::Ring { slot_bytes: bytes, ..planned });
        while was_within && is_over_budget(plan, &name) {
            let Some(ring) = plan.devices[at].ring.as_mut().filter(|ring| ring.slots > 1) else {
                let message = format!(
                    "{name} has no room for a slot of {}: {} were planned",
                    bytes.human(),
                    planned.slot_bytes.human()
                );
                return Err(SplitError::setting(message, "give more --vram, or stream fewer blocks"));
            };
            ring.slots -= 1;
        }
        let slots = plan.devices[at].ring.map_or(0, |ring| ring.slots);
        if slots < planned.slots {
            notes.push(format!(
                "{name} has {slots} slots of {} instead of {} of {}: a slot must hold more than was planned",
                bytes.human(),
                planned.slots,
                planned.slot_bytes.human()
            ));
        }
    }
    Ok(())
}

/// Whether a device's budget is exceeded.
fn is_over_budget(plan: &Plan, device: &str) -> bool {
    let place = format!("devices.{device}");
    plan.check().iter().any(|finding| finding.place == place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_weights_are_stored_once_and_aligned() {
        let mut shared_files = SharedFiles::default();
        let weights = [("a", &b"123"[..]), ("b", b"4567"), ("a", b"123"), ("c", b"8")];
        let offsets = weights.map(|(name, bytes)| shared_files.add_embedded(name, bytes));
        assert_eq!(offsets, [0, 16, 0, 32]);
        assert_eq!((shared_files.slots.len(), &shared_files.slots[16..20]), (33, &b"4567"[..]));
    }
}
