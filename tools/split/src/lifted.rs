//! Pieces whose weights are inputs: the files that serve all pieces that are the same graph, and where each piece's weights
//! lie.

use crate::error::SplitError;
use hpp_onnx::proto::ModelProto;
use hpp_onnx::{Lifted, LiftedWeight, VirtualFiles, WeightBytes, WeightError, embed_structure};
use hpp_schema::{ByteSize, DeviceKind, Form, Partition, Plan, Residency, WeightInput};
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;

/// Weights that were in the model file and are inputs now.
pub const SLOTS_FILE: &str = "slots.bin";

/// Weights in that file begin at multiples of this.
const ALIGN: u64 = 16;

/// Files that pieces share, and what goes beside them.
#[derive(Debug, Default)]
struct Classes {
    /// Files whose weights are inputs, by name.
    files: Vec<(String, ModelProto)>,
    /// Contents of [`SLOTS_FILE`].
    slots: Vec<u8>,
    /// Things a person should know.
    notes: Vec<String>,
    /// Where in [`SLOTS_FILE`] weights lie, by name.
    offsets: HashMap<String, u64>,
}

/// Which pieces are lifted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Those streamed to a GPU.
    Streamed,
    /// Also single blocks that stay on a GPU, so that they can move.
    Movable,
}

/// Makes inputs of the weights of pieces that are to be lifted, and writes into the plan what comes of it: the pieces' own files
/// in `protos`, which come first there, stay for machines without the GPU. `weights` are
/// what locations are relative to, and files that are not written. Gives what [`SLOTS_FILE`] has to hold, if anything, and tells what a person should know.
pub fn lift(
    plan: &mut Plan,
    protos: &mut Vec<(String, ModelProto)>,
    shared: &HashSet<String>,
    which: Which,
    weights: (&Path, &VirtualFiles),
) -> Result<Vec<u8>, SplitError> {
    let own: HashSet<String> = plan.partitions.iter().map(|partition| partition.file.clone()).collect();
    let mut classes = lift_pieces(plan, protos, shared, which, weights)?;
    size_rings(plan, &mut classes.notes)?;
    classes.notes.iter().for_each(|note| eprintln!("note: {note}"));
    let forms = plan.partitions.iter().flat_map(Partition::forms);
    let used: HashSet<&str> = forms.flat_map(|form| [Some(form.file), form.host_file]).flatten().collect();
    protos.retain(|(name, _)| !own.contains(name) || used.contains(name.as_str()));
    protos.append(&mut classes.files);
    Ok(classes.slots)
}

fn lift_pieces(
    plan: &mut Plan,
    protos: &[(String, ModelProto)],
    shared: &HashSet<String>,
    which: Which,
    weights: (&Path, &VirtualFiles),
) -> Result<Classes, SplitError> {
    let gpus: BTreeSet<String> = gpus(plan);
    let mut classes = Classes::default();
    for (partition, (name, proto)) in plan.partitions.iter_mut().zip(protos) {
        let wants = |form: &Form| gpus.contains(form.device) && is_lifted(partition, form, which);
        let (decode, prefill) =
            (wants(&partition.form()), partition.prefill.is_some() && wants(&partition.prefill_form()));
        if !decode && !prefill {
            continue;
        }
        let failed = |source: WeightError| SplitError::Extract { name: name.clone(), source: Box::new(source) };
        let mut proto = proto.clone();
        embed_structure(&mut proto, weights.0, weights.1).map_err(failed)?;
        let lifted = hpp_onnx::lift(&proto, |name| shared.contains(name)).map_err(failed)?;
        classes.note(partition, &lifted);
        match lifted.weights.is_empty() {
            true => stay(partition, &gpus),
            false => classes.take(partition, lifted, [decode, prefill]),
        }
    }
    Ok(classes)
}

fn gpus(plan: &Plan) -> BTreeSet<String> {
    plan.devices.iter().filter(|device| device.kind == DeviceKind::Gpu).map(|device| device.name.clone()).collect()
}

fn is_lifted(partition: &Partition, form: &Form, which: Which) -> bool {
    match form.residency {
        Residency::Streamed => true,
        Residency::Resident => which == Which::Movable && partition.blocks.len() == 1,
        Residency::Mapped => false,
    }
}

/// What has nothing to stream lies on its GPU for good.
fn stay(partition: &mut Partition, gpus: &BTreeSet<String>) {
    if gpus.contains(&partition.device) {
        partition.residency = Residency::Resident;
    }
    if let Some(prefill) = partition.prefill.as_mut().filter(|prefill| gpus.contains(&prefill.device)) {
        prefill.residency = Residency::Resident;
    }
}

impl Classes {
    fn note(&mut self, partition: &Partition, lifted: &Lifted) {
        if lifted.kept > 0 {
            let (name, kept) = (&partition.name, ByteSize(lifted.kept).human());
            self.notes.push(format!(
                "{kept} of the weights of {name} stay on its GPU: their kernels take constants only, or a body of a node reads them"
            ));
        }
    }

    /// Gives a piece its file and weights, in the forms that are lifted, and puts its inputs and outputs in the file's order.
    fn take(&mut self, partition: &mut Partition, lifted: Lifted, [decode, prefill]: [bool; 2]) {
        sort(&mut partition.inputs, &lifted.inputs, |input| &input.name);
        sort(&mut partition.outputs, &lifted.outputs, |output| &output.name);
        let weights: Vec<WeightInput> = lifted.weights.into_iter().map(|weight| self.input(weight)).collect();
        let (file, own) = (self.file(lifted.proto), partition.file.clone());
        if let Some(placement) = partition.prefill.as_mut().filter(|_| prefill) {
            (placement.file, placement.weights, placement.host_file) =
                (file.clone(), weights.clone(), Some(own.clone()));
        }
        if decode {
            (partition.file, partition.weights, partition.host_file) = (file, weights, Some(own));
        }
    }

    /// The name of a file with this graph.
    fn file(&mut self, proto: ModelProto) -> String {
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
            WeightBytes::Embedded(bytes) => (SLOTS_FILE.to_owned(), self.slot(&name, &bytes)),
        };
        WeightInput { name, dtype, shape, file, offset }
    }

    /// Where embedded bytes go; those of one weight once.
    fn slot(&mut self, name: &str, bytes: &[u8]) -> u64 {
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

/// Sets the rings to what the weights streamed through them take. Where that is more than was planned, because blocks that
/// cannot be parted are one partition, or movable ones have to fit too, and does not fit, there are fewer slots; a note says so.
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
        let fitted = !is_over(plan, &name);
        plan.devices[at].ring = Some(hpp_schema::Ring { slot_bytes: bytes, ..planned });
        while fitted && is_over(plan, &name) {
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
                "{name} has {slots} slots of {} instead of {} of {}: more goes into one than was planned",
                bytes.human(),
                planned.slots,
                planned.slot_bytes.human()
            ));
        }
    }
    Ok(())
}

/// Whether a device's budget is exceeded.
fn is_over(plan: &Plan, device: &str) -> bool {
    let place = format!("devices.{device}");
    plan.check().iter().any(|finding| finding.place == place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_weights_lie_once_and_aligned() {
        let mut classes = Classes::default();
        let places = [("a", &b"123"[..]), ("b", b"4567"), ("a", b"123"), ("c", b"8")];
        let offsets = places.map(|(name, bytes)| classes.slot(name, bytes));
        assert_eq!(offsets, [0, 16, 0, 32]);
        assert_eq!((classes.slots.len(), &classes.slots[16..20]), (33, &b"4567"[..]));
    }
}
