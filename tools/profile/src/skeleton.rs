//! The model's skeleton: its inputs, states and logits, with almost no computation and no weights. The time of a token of the
//! skeleton outside its partition is the overhead of a pass: feeding inputs, binding, reading logits, sampling.

use crate::taps::int;
use crate::taps::plan_dir::{self, Draft, PartitionFile, PlanDirError};
use hpp_model::Analysis;
use hpp_onnx::proto::{AttributeProto, GraphProto, NodeProto, TensorProto};
use hpp_schema::{ByteSize, DType, Dim, InputRole, ModelOutput, OutputRole, OutputUse, State, StateUpdate};
use std::path::{Path, PathBuf};

/// Why a model has no skeleton.
#[derive(Debug, thiserror::Error)]
pub enum SkeletonError {
    #[error("the model takes no token ids")]
    NoTokens,
    #[error("the model has no logits")]
    NoScores,
    #[error("the size of {0:?} is not known")]
    Size(String),
    #[error(transparent)]
    Write(#[from] PlanDirError),
}

/// Writes the skeleton and its plan into the empty directory `dir`; returns the plan's path.
pub fn write(analysis: &Analysis, dir: &Path) -> Result<PathBuf, SkeletonError> {
    let whole = 0..analysis.segmentation.blocks.len();
    let draft = Draft::new(analysis, &[whole], |_| {})?;
    let mut proto = draft.protos(analysis, &analysis.model)?.remove(0);
    let mut plan = draft.plan;
    let scores = plan.model.outputs.iter().find(|output| output.role == OutputRole::Logits);
    let scores = scores.ok_or(SkeletonError::NoScores)?.clone();
    let partition = &mut plan.partitions[0];
    partition.bytes.weights = ByteSize(0);
    partition.outputs.retain(|output| output.to == OutputUse::State || output.name == scores.name);
    let kept: Vec<&str> = partition.outputs.iter().map(|output| output.name.as_str()).collect();
    let graph = proto.graph.get_or_insert_default();
    let mut made = GraphBuilder(GraphProto {
        name: graph.name.take(),
        input: std::mem::take(&mut graph.input),
        output: graph.output.drain(..).filter(|output| kept.contains(&output.name())).collect(),
        ..GraphProto::default()
    });
    plan.states.iter().try_for_each(|state| made.state(state))?;
    let input = |role| plan.model.inputs.iter().find(|input| input.role == role).map(|input| &input.name);
    let ids = input(InputRole::TokenIds).ok_or(SkeletonError::NoTokens)?;
    made.scores(ids, input(InputRole::LogitPositions), &scores, analysis.vocab_size)?;
    (proto.graph, proto.functions) = (Some(made.0), vec![]);
    let file = PartitionFile { proto: &proto, weights: &plan_dir::real(analysis.model.dir())? };
    Ok(plan_dir::write(dir, analysis, plan, &[file])?)
}

/// A graph under construction.
struct GraphBuilder(GraphProto);

impl GraphBuilder {
    /// Adds the update of a state: appends one entry if the state grows, and drops the oldest if it slides; else copies it.
    fn state(&mut self, state: &State) -> Result<(), SkeletonError> {
        match state.update {
            StateUpdate::Append { axis, .. } | StateUpdate::Sliding { axis, .. } => {
                let size = |(at, dim): (usize, &Dim)| match at {
                    0 => Some(1),
                    _ if at == axis => Some(1),
                    _ => dim.as_fixed(),
                };
                let sizes: Option<Vec<u64>> = state.shape.iter().enumerate().map(size).collect();
                let sizes = sizes.ok_or_else(|| SkeletonError::Size(state.past.clone()))?;
                let entry = format!("{}/one_more", state.present);
                self.zeros(&entry, state.dtype, &sizes)?;
                let axis = i64::try_from(axis).unwrap_or_default();
                let StateUpdate::Sliding { capacity, .. } = state.update else {
                    self.node("Concat", [&state.past, &entry], &state.present, vec![int("axis", axis)]);
                    return Ok(());
                };
                let [joined, first, end, along] =
                    ["joined", "first", "end", "along"].map(|name| format!("{}/{name}", state.present));
                self.node("Concat", [&state.past, &entry], &joined, vec![int("axis", axis)]);
                self.numbers(&first, &[-i64::try_from(capacity).unwrap_or(i64::MAX)]);
                self.numbers(&end, &[i64::MAX]);
                self.numbers(&along, &[axis]);
                self.node("Slice", [&joined, &first, &end, &along], &state.present, vec![]);
            }
            StateUpdate::InPlace { .. } | StateUpdate::Replace | StateUpdate::ReadOnly => {
                self.node("Identity", [&state.past], &state.present, vec![]);
            }
        }
        Ok(())
    }

    /// Adds logits for each token, or for the requested positions: the token's id for every entry of the vocabulary.
    fn scores(
        &mut self,
        ids: &String,
        positions: Option<&String>,
        scores: &ModelOutput,
        vocab: Option<u64>,
    ) -> Result<(), SkeletonError> {
        let vocab = vocab.and_then(|vocab| i64::try_from(vocab).ok());
        let vocab = vocab.ok_or_else(|| SkeletonError::Size(scores.name.clone()))?;
        let [asked, number, column, one_each, all] =
            ["asked", "number", "column", "one_each", "all"].map(|name| format!("{}/{name}", scores.name));
        self.numbers(&one_each, &[1, -1, 1]);
        self.numbers(&all, &[1, 1, vocab]);
        if let Some(positions) = positions {
            self.node("Gather", [ids, positions], &asked, vec![int("axis", 1)]);
        }
        let ids = positions.map_or(ids, |_| &asked);
        self.node("Cast", [ids], &number, vec![int("to", scores.dtype.to_onnx().into())]);
        self.node("Reshape", [&number, &one_each], &column, vec![]);
        self.node("Expand", [&column, &all], &scores.name, vec![]);
        Ok(())
    }

    fn node<const N: usize>(
        &mut self,
        operator: &str,
        inputs: [&String; N],
        output: &str,
        attribute: Vec<AttributeProto>,
    ) {
        self.0.node.push(NodeProto {
            op_type: Some(operator.to_owned()),
            name: Some(format!("{output}/{operator}")),
            input: inputs.map(Clone::clone).to_vec(),
            output: vec![output.to_owned()],
            attribute,
            ..NodeProto::default()
        });
    }

    fn zeros(&mut self, name: &str, dtype: DType, sizes: &[u64]) -> Result<(), SkeletonError> {
        let elements = sizes.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let bytes =
            elements.and_then(|elements| dtype.bytes_for(elements)).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.ok_or_else(|| SkeletonError::Size(name.to_owned()))?;
        self.tensor(name, dtype, sizes.iter().map(|size| *size as i64).collect(), vec![0; bytes]);
        Ok(())
    }

    fn numbers(&mut self, name: &str, numbers: &[i64]) {
        let bytes = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        self.tensor(name, DType::Int64, vec![numbers.len() as i64], bytes);
    }

    fn tensor(&mut self, name: &str, dtype: DType, dims: Vec<i64>, bytes: Vec<u8>) {
        self.0.initializer.push(TensorProto {
            name: Some(name.to_owned()),
            data_type: Some(dtype.to_onnx()),
            dims,
            raw_data: Some(bytes.into()),
            ..TensorProto::default()
        });
    }
}

#[cfg(test)]
mod tests;
