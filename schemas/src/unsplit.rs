//! Derives from a plan the plan of the unsplit model: one partition, with which `hpp-exec verify` compares a split.
//! Copies no files.

use crate::{
    DeviceKind, InputRole, OutputUse, Partition, PartitionBytes, PartitionInput, PartitionOutput, Plan, Predictions,
    Provider, Residency, Schedule, SourceModel, State, Step,
};
use std::collections::BTreeSet;

/// The file of the unsplit model to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whole {
    /// The model as exported.
    Source,
    /// The model with all boundary tensors as outputs. A plan may lack it.
    Tapped,
}

impl Plan {
    /// The unsplit model with the same roles, states and context, as one partition on the host. `None` if the plan
    /// lacks the file.
    pub fn unsplit(&self, whole: Whole) -> Option<Plan> {
        let file = match whole {
            Whole::Source => self.model.source.clone(),
            Whole::Tapped => self.model.tapped.clone()?,
        };
        let mut outputs: Vec<PartitionOutput> = self.model.outputs.iter().map(model_output).collect();
        let is_divided = whole == Whole::Source && !self.model.states.is_empty();
        let states = if is_divided { &self.model.states } else { &self.states };
        outputs
            .extend(states.iter().filter_map(|state| if is_divided { Some(next(state)) } else { self.present(state) }));
        if whole == Whole::Tapped {
            outputs.extend(self.boundaries());
        }
        // Splitting adds the input for logit positions and may choose a branch. So the source model has no logit positions, and the tapped model
        // has no inputs of the other branch.
        let is_absent = |role: InputRole| match whole {
            Whole::Source => role == InputRole::LogitPositions,
            Whole::Tapped => role.is_of_source_only(),
        };
        let model = SourceModel {
            inputs: self.model.inputs.iter().filter(|input| !is_absent(input.role)).cloned().collect(),
            ..self.model.clone()
        };
        let device = self.devices.iter().find(|device| device.kind == DeviceKind::Cpu).cloned();
        let mut device = device.unwrap_or_else(|| crate::Device::new("cpu", DeviceKind::Cpu));
        device.provider_options.clear();
        let mut inputs: Vec<PartitionInput> = model.inputs.iter().map(model_input).collect();
        inputs.extend(states.iter().map(state_input));
        let states = states.iter().map(|state| State {
            partition: WHOLE.into(),
            device: device.name.clone(),
            on_disk: false,
            ..state.clone()
        });
        let partition = Partition {
            name: WHOLE.into(),
            file,
            weights_dir: match whole {
                Whole::Source => self.model.weights_dir.clone(),
                // The tapped model is in the plan's directory and uses the weights of the partitions.
                Whole::Tapped => self.partitions.first().map_or(".".into(), |first| first.weights_dir.clone()),
            },
            device: device.name.clone(),
            residency: Residency::Resident,
            weights: vec![],
            host_file: None,
            prefill: None,
            experts: None,
            providers: vec![Provider::CPU],
            blocks: self.partitions.iter().flat_map(|partition| partition.blocks.clone()).collect(),
            inputs,
            outputs,
            host_kernels: model.host_kernels.clone(),
            bytes: self.total_bytes(),
            reason: "the unsplit model".into(),
        };
        let steps = vec![Step::Run(WHOLE.into())];
        Some(Plan {
            states: states.collect(),
            devices: vec![device],
            partitions: vec![partition],
            schedule: Schedule { prefill: steps.clone(), decode: steps, ..self.schedule.clone() },
            buffers: vec![],
            draft: None,
            predictions: Predictions::default(),
            model,
            ..self.clone()
        })
    }

    /// Whether this is a plan of the unsplit model, as [`unsplit`](Self::unsplit) makes it.
    pub fn is_unsplit(&self) -> bool {
        matches!(&self.partitions[..], [only] if only.name == WHOLE)
    }

    fn present(&self, state: &State) -> Option<PartitionOutput> {
        let partition = self.partitions.iter().find(|partition| partition.name == state.partition)?;
        partition.outputs.iter().find(|output| output.name == state.present && output.to == OutputUse::State).cloned()
    }

    /// The model's tensors that cross between partitions, each with the partition that computes it, in the order of computation. Predictions of
    /// experts are left out, because the model does not have them.
    pub fn crossing_tensors(&self) -> impl Iterator<Item = (&Partition, &PartitionOutput)> {
        let experts = self.partitions.iter().filter_map(|partition| partition.experts.as_ref()?.next.as_ref());
        let predictions: BTreeSet<&str> = experts.map(|next| &*next.router).collect();
        let outputs = self
            .partitions
            .iter()
            .flat_map(|partition| partition.outputs.iter().map(move |output| (partition, output)));
        outputs.filter(move |(_, output)| output.to == OutputUse::Boundary && !predictions.contains(&*output.name))
    }

    fn boundaries(&self) -> Vec<PartitionOutput> {
        let mut crossing: Vec<_> = self.crossing_tensors().map(|(_, output)| output.clone()).collect();
        crossing.sort_by(|a, b| a.name.cmp(&b.name));
        crossing.dedup_by(|a, b| a.name == b.name);
        crossing
    }

    fn total_bytes(&self) -> PartitionBytes {
        let mut total = PartitionBytes::default();
        for bytes in self.partitions.iter().map(|partition| &partition.bytes) {
            total.weights.0 = total.weights.0.saturating_add(bytes.weights.0);
            total.kv.0 = total.kv.0.saturating_add(bytes.kv.0);
            total.workspace.0 = total.workspace.0.max(bytes.workspace.0);
        }
        total
    }
}

/// Name of the only partition of a plan that runs the unsplit model.
pub const WHOLE: &str = "whole";

fn model_input(input: &crate::ModelInput) -> PartitionInput {
    let crate::ModelInput { name, dtype, shape, .. } = input.clone();
    PartitionInput { name, dtype, shape, from: "model".into() }
}

fn state_input(state: &State) -> PartitionInput {
    PartitionInput { name: state.past.clone(), dtype: state.dtype, shape: state.shape.clone(), from: "state".into() }
}

/// The output for a state of the model that no partition of the plan computes in this form.
fn next(state: &State) -> PartitionOutput {
    let State { present, dtype, shape, .. } = state.clone();
    PartitionOutput { name: present, dtype, shape, to: OutputUse::State }
}

fn model_output(output: &crate::ModelOutput) -> PartitionOutput {
    let crate::ModelOutput { name, dtype, shape, .. } = output.clone();
    PartitionOutput { name, dtype, shape, to: OutputUse::Model }
}
