//! Bytes of states on a GPU.

use super::{ObjectiveKind, Partition, Plan, StateUpdate};

/// The device of a partition in some phase.
type DeviceOf = fn(&Partition) -> &str;

/// Bytes of states on a GPU in one phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PhaseStates {
    /// States of one sequence that the GPU keeps between passes.
    pub kept: u64,
    /// States that are on the GPU during the phase: they are updated in place, and the other phase computes where they are kept.
    pub during_phase: u64,
    /// The largest states of a partition among those that are copied to shared staging buffers for each run.
    largest_copied: u64,
    /// Partitions with such states.
    copied: usize,
}

impl PhaseStates {
    /// Of the partitions that compute on `gpu` in the phase, where `here` is the device of a partition and `elsewhere` that of the other phase.
    fn of(plan: &Plan, gpu: &str, here: DeviceOf, elsewhere: DeviceOf) -> Self {
        let mut found = PhaseStates::default();
        for partition in plan.partitions.iter().filter(|partition| here(partition) == gpu && partition.bytes.kv.0 > 0) {
            let bytes = partition.bytes.kv.0;
            let states = || plan.states.iter().filter(|state| state.partition == partition.name);
            let is_in_place = states().all(|state| matches!(state.update, StateUpdate::InPlace { .. }));
            if states().all(|state| state.device == gpu) {
                found.kept = found.kept.saturating_add(bytes);
            } else if is_in_place && states().all(|state| state.device == elsewhere(partition)) {
                found.during_phase = found.during_phase.saturating_add(bytes);
            } else {
                found.largest_copied = bytes.max(found.largest_copied);
                found.copied += 1;
            }
        }
        found
    }
}

impl Plan {
    /// The states on a GPU in prompts and in decoding.
    pub fn phase_states_on(&self, gpu: &str) -> [PhaseStates; 2] {
        let decode: DeviceOf = |partition| &partition.device;
        let prefill: DeviceOf = Partition::prefill_device;
        [PhaseStates::of(self, gpu, prefill, decode), PhaseStates::of(self, gpu, decode, prefill)]
    }

    /// Bytes of states on a GPU: what it keeps of all sequences, and staging buffers for the states of one. There is a second set of the shared buffers
    /// if several partitions use them, because the states of the next one are copied ahead.
    pub fn states_on(&self, gpu: &str) -> u64 {
        let [prompt, decode] = self.phase_states_on(gpu);
        let sets = if prompt.copied.max(decode.copied) > 1 { 2 } else { 1 };
        let copied = prompt.largest_copied.max(decode.largest_copied).saturating_mul(sets);
        let kept = prompt.kept.max(decode.kept).saturating_mul(self.planned_sequences());
        [kept, prompt.during_phase, decode.during_phase].into_iter().fold(copied, u64::saturating_add)
    }

    /// The number of sequences that share the memory of the plan.
    pub fn planned_sequences(&self) -> u64 {
        let predictions = &self.predictions;
        let is_for_many =
            predictions.objective.as_ref().is_some_and(|objective| objective.kind == ObjectiveKind::Throughput);
        predictions.throughput.as_ref().filter(|_| is_for_many).map_or(1, |throughput| throughput.sequences)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Achieved, ByteSize, PredictedThroughput, PrefillVariant, Residency};

    /// The plan of the tests: `gpu_0` keeps a state of 8 KiB on its GPU, `cpu_0` one in host memory.
    fn plan() -> Plan {
        Plan::from_yaml(include_str!("../../tests/plan.yaml")).unwrap()
    }

    fn on_gpu(plan: &Plan) -> u64 {
        plan.states_on("gpu0") >> 10
    }

    #[test]
    fn a_gpu_keeps_the_states_of_all_sequences() {
        let mut plan = plan();
        assert_eq!(on_gpu(&plan), 8);
        plan.predictions.throughput = Some(PredictedThroughput { sequences: 5, ..PredictedThroughput::default() });
        assert_eq!(on_gpu(&plan), 8, "the plan is for one sequence");
        plan.predictions.objective =
            Some(Achieved { kind: ObjectiveKind::Throughput, ms: 1.0, bound_ms: 0.0, proven: false });
        assert_eq!(on_gpu(&plan), 40);
        plan.partitions[0].bytes.kv = ByteSize(u64::MAX / 2);
        assert_eq!(plan.states_on("gpu0"), u64::MAX);
    }

    #[test]
    fn states_that_are_copied_share_staging_buffers() {
        let mut plan = plan();
        plan.states[0].device = "cpu".into();
        assert_eq!(on_gpu(&plan), 8, "one set for one partition");
        let larger = {
            let mut other = plan.partitions[0].clone();
            (other.name, other.bytes.kv) = ("gpu_1".into(), ByteSize(24 << 10));
            other
        };
        let mut state = plan.states[0].clone();
        state.partition = "gpu_1".into();
        plan.partitions.push(larger);
        plan.states.push(state);
        assert_eq!(on_gpu(&plan), 2 * 24, "the states of the next partition are copied ahead");
        // A sequence more needs no other buffers.
        plan.predictions.throughput = Some(PredictedThroughput { sequences: 5, ..PredictedThroughput::default() });
        assert_eq!(on_gpu(&plan), 48);
    }

    /// Prompts on the GPU, tokens on the host, where the state is kept: it is on the GPU during the whole prompt.
    #[test]
    fn states_of_layers_that_a_gpu_computes_in_prompts_only_are_there_during_the_prompt() {
        let mut plan = plan();
        plan.states[0].device = "cpu".into();
        let prompts = [PhaseStates { during_phase: 8 << 10, ..PhaseStates::default() }, PhaseStates::default()];
        let partition = &mut plan.partitions[0];
        partition.prefill = Some(PrefillVariant {
            device: "gpu0".into(),
            residency: Residency::Resident,
            file: "gpu_0.onnx".into(),
            providers: vec![],
            weights: vec![],
            host_file: None,
        });
        partition.device = "cpu".into();
        assert_eq!(plan.phase_states_on("gpu0"), prompts);
        assert_eq!(on_gpu(&plan), 8);
    }
}
