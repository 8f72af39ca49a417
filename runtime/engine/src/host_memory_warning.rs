//! Compares the host memory that a plan needs with what is free.

use crate::weights::budget::{is_on_host, largest_experts, planned_expert_cache, streams_on_host};
use hpp_schema::memory::PROCESS;
use hpp_schema::{ByteSize, Partition, Plan, Residency, State};

/// What may be missing without a warning: a control group also counts the kernel's memory, such as page tables, against its limit.
const TOLERANCE: u64 = 4 << 20;

/// Bytes of host memory that a plan needs in a process that is limited to less than planned. The engine then locks fewer of the weights that the
/// host reads from disk, and says so; without such weights it does not see the process's limit.
pub fn least_needed_in_smaller_process(plan: &Plan) -> u64 {
    let of_sequences = if streams_on_host(plan) { least_needed } else { needed };
    of_sequences(plan, plan.budgets.batch)
}

/// Bytes of host memory that a plan needs at least with this many sequences: to keep to the plan's limit, the engine keeps fewer of the weights
/// that are read from disk or streamed to GPUs in memory.
pub fn least_needed(plan: &Plan, sequences: u64) -> u64 {
    let streamed = plan.partitions.iter().filter(|partition| partition.residency == Residency::Streamed);
    let locked = streamed.filter_map(|partition| partition.bytes.locked).map(|locked| locked.0);
    let cache = planned_expert_cache(plan).saturating_sub(largest_experts(plan));
    locked.chain([cache]).fold(without_streamed_to_gpus(plan, sequences), u64::saturating_sub)
}

/// A warning if less than the plan needs is free. `free` is the number of bytes that a process can still allocate.
pub fn warning(plan: &Plan, free: Option<u64>) -> Option<String> {
    // The engine keeps the limit that its plan was made for.
    let limit = plan.budgets.ram.map_or(u64::MAX, |ram| ram.0);
    // A run without the plan's own draft locks more weights instead.
    let draft = plan.draft.as_ref().map_or(0, |draft| draft.host_memory.0);
    let (needed, free) = (needed(plan, plan.budgets.batch).saturating_add(draft).min(limit), free?);
    (needed > free.saturating_add(TOLERANCE)).then(|| {
        let human = |bytes: u64| ByteSize(bytes).human();
        format!(
            "this plan needs about {} of host memory and {} are free here: the system may swap or kill the process. Plan for less \
             with --ram (--replan, where hpp-exec made the plan itself), or end other programs",
            human(needed),
            human(free)
        )
    })
}

/// A warning if all weights of a plan stay in host memory and need clearly more than its budget, which a user may have changed: the budget
/// then limits nothing. `None` for the unsplit model that a plan is compared with, which no budget limits.
pub fn budget_warning(plan: &Plan) -> Option<String> {
    let streams = |partition: &Partition| partition.variants().any(|v| v.residency == Residency::Streamed);
    let stays_in_memory = !plan.is_unsplit() && !plan.partitions.iter().any(streams);
    let budget = plan.budgets.ram.filter(|_| stays_in_memory)?;
    let needed = needed(plan, plan.budgets.batch);
    // What a plan needs is an estimate.
    (needed > budget.0.saturating_add(budget.0 / 8)).then(|| {
        let [needed, ram] = [ByteSize(needed), budget].map(ByteSize::human);
        format!(
            "the plan's budget is {ram} of host memory (budgets.ram), and its weights, which all stay in memory, need about {needed} with \
             everything else: hpp-split --ram {} plans for so little, if that is enough for the model",
            ram.replace(' ', "")
        )
    })
}

/// Bytes of host memory that a plan needs with this many sequences: resident weights, what the creation of sessions takes, the window for
/// weights read from disk, the cache of experts, states (for states on disk, their window), activations and the process itself; and as many of the weights streamed to GPUs as the
/// plan's budget has room for.
pub fn needed(plan: &Plan, sequences: u64) -> u64 {
    let streams_to_gpu = |partition: &&Partition| {
        let mut variants = partition.variants();
        variants.any(|variant| !is_on_host(plan, variant.device) && variant.residency == Residency::Streamed)
    };
    let streamed = plan.partitions.iter().filter(streams_to_gpu).map(|partition| partition.bytes.weights.0);
    let required = without_streamed_to_gpus(plan, sequences);
    let room = plan.budgets.ram.map_or(u64::MAX, |ram| ram.0.saturating_sub(required));
    required.saturating_add(streamed.fold(0, u64::saturating_add).min(room))
}

/// [`needed`] without the weights that are streamed to GPUs.
fn without_streamed_to_gpus(plan: &Plan, sequences: u64) -> u64 {
    let on_host = |device: &str| is_on_host(plan, device);
    let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
    let resident_weights = |partition: &Partition| {
        let on_host = partition.variants().find(|variant| on_host(variant.device));
        match on_host.map(|variant| variant.residency) {
            Some(Residency::Resident) => partition.bytes.weights.0,
            Some(Residency::Streamed) => partition.bytes.locked.map_or(0, |locked| locked.0),
            Some(Residency::Mapped) | None => 0,
        }
    };
    let computed_on_host = plan.partitions.iter().filter(|partition| on_host(&partition.device));
    let states = plan.states.iter().filter(|state| on_host(&state.device) && !state.on_disk).map(State::memory);
    let parts = [
        sum(&mut plan.partitions.iter().map(resident_weights)),
        sum(&mut plan.devices.iter().filter_map(|device| device.window).map(|window| window.0)),
        sum(&mut plan.devices.iter().filter_map(|device| device.kernel_layout).map(|layout| layout.0)),
        sum(&mut plan.devices.iter().filter_map(|device| device.session_creation).map(|more| more.0)),
        sum(&mut plan.devices.iter().filter_map(|device| device.heap).map(|heap| heap.0)),
        sum(&mut plan.devices.iter().filter_map(|device| device.expert_cache).map(|cache| cache.0)),
        sum(&mut states.map(|bytes| bytes.saturating_mul(sequences))),
        plan.state_window(),
        computed_on_host.map(|partition| partition.bytes.workspace.0).max().unwrap_or(0),
        PROCESS,
    ];
    sum(&mut parts.into_iter())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::{DeviceKind, OwnDraft, Whole};

    fn plan() -> Plan {
        let plan = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml"));
        Plan::from_yaml(plan).unwrap()
    }

    #[test]
    fn the_warning_has_both_numbers() {
        let mut plan = plan();
        let small = needed(&plan, plan.budgets.batch);
        assert!(small > PROCESS);
        assert_eq!([small, small - TOLERANCE].map(|free| warning(&plan, Some(free))), [None, None]);
        assert!(warning(&plan, Some(small - TOLERANCE - 1)).is_some());
        let host = plan.devices.iter().find(|device| device.kind == DeviceKind::Cpu).unwrap().name.clone();
        let partition = plan.partitions.iter_mut().find(|partition| partition.device == host).unwrap();
        partition.bytes.weights.0 += 49 << 30;
        assert_eq!(needed(&plan, plan.budgets.batch), small + (49 << 30));
        let text = warning(&plan, Some(23 << 30)).unwrap();
        assert!(text.contains("49.") && text.contains("23 GiB are free"), "{text}");
        assert_eq!(warning(&plan, None), None, "the system does not report it");
        plan.draft = Some(OwnDraft {
            plan: "draft/plan.yaml".into(),
            bits: 4,
            host_memory: ByteSize(3 << 30),
            sequence_memory: ByteSize(0),
        });
        assert!(warning(&plan, Some(23 << 30)).unwrap().contains("52."), "with the plan's own draft");
    }

    #[test]
    fn a_budget_that_weights_in_memory_exceed_is_said() {
        let mut plan = plan();
        let stays = |variant: &mut Residency| *variant = Residency::Resident;
        plan.partitions.iter_mut().for_each(|partition| {
            stays(&mut partition.residency);
            partition.prefill.iter_mut().for_each(|prefill| stays(&mut prefill.residency));
        });
        let needed = needed(&plan, plan.budgets.batch);
        plan.budgets.ram = None;
        assert_eq!(budget_warning(&plan), None);
        plan.budgets.ram = Some(ByteSize(needed));
        assert_eq!(budget_warning(&plan), None);
        plan.budgets.ram = Some(ByteSize(needed / 2));
        let text = budget_warning(&plan).unwrap();
        assert!(text.contains("budgets.ram"), "{text}");
        // The advice can be typed.
        let (_, advised) = text.split_once("hpp-split --ram ").unwrap();
        let size = advised.split(' ').next().unwrap();
        assert!(ByteSize::typed(size).unwrap().0.abs_diff(needed / 2) <= needed / 100, "{text}");
        let whole = plan.unsplit(Whole::Source).unwrap();
        assert_eq!(budget_warning(&whole), None, "no budget limits the unsplit model");
        plan.partitions[0].residency = Residency::Streamed;
        assert_eq!(budget_warning(&plan), None);
    }

    #[test]
    fn states_on_disk_take_their_window_alone() {
        let mut plan = plan();
        let hosts = |plan: &Plan| {
            let is_host = |device: &str| plan.devices.iter().any(|d| d.name == device && d.kind == DeviceKind::Cpu);
            plan.states.iter().filter(|state| is_host(&state.device)).map(State::memory).sum::<u64>()
        };
        let (in_memory, states) = (needed(&plan, 100), hosts(&plan));
        assert!(states > 0);
        for state in &mut plan.states {
            state.on_disk = true;
        }
        assert!(plan.state_window() > 0);
        assert_eq!(needed(&plan, 100), in_memory - 100 * states + plan.state_window());
    }
}
