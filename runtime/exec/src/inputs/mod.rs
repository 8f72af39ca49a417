//! NamedTensors tensors for a model's inputs: given ones checked all at once, missing ones made up from a seed.

mod made_up;

pub use made_up::{made_up_inputs, made_up_tokens};

use hpp_engine::{HostTensor, NamedTensors};
use hpp_schema::{Dim, InputRole, Model, ModelInput};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Why the given tensors do not fit the model.
#[derive(Debug, thiserror::Error)]
pub enum InputsError {
    /// Everything that does not fit, and everything that is wanted.
    #[error("the tensors in {} do not fit the model:\n  {}\nthe model wants:\n  {}", path.display(), problems.join("\n  "), wanted.join("\n  "))]
    Misfit {
        /// The file.
        path: PathBuf,
        /// One line for each problem.
        problems: Vec<String>,
        /// One line for each input.
        wanted: Vec<String>,
    },
    /// An input cannot be made up.
    #[error("cannot make up a value for input {name:?}: {why}")]
    CannotMakeUp {
        /// The input.
        name: String,
        /// Why.
        why: String,
    },
    /// The model reads text, so tensors alone do not run it.
    #[error("this model generates text and carries state from token to token; --outputs is for models that run once")]
    NotRunOnce,
}

impl InputsError {
    /// The next step for a person.
    pub fn hint(&self) -> Option<String> {
        match self {
            InputsError::Misfit { .. } => {
                Some("save them with numpy.savez, with these names; convert types with .astype(...)".to_owned())
            }
            InputsError::CannotMakeUp { .. } => Some("give the inputs: --inputs in.npz".to_owned()),
            InputsError::NotRunOnce => Some("give a prompt: --prompt TEXT or --tokens 1,2,3".to_owned()),
        }
    }
}

/// Which inputs a file must give.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// Every input, for a run from tensors to tensors.
    All,
    /// Only those the runtime cannot fill by itself.
    Free,
}

/// Checks given tensors against the model, every problem at once.
pub fn fit(
    arrays: Vec<(String, HostTensor)>,
    model: &Model,
    wanted: Wanted,
    path: PathBuf,
) -> Result<NamedTensors, InputsError> {
    let inputs: Vec<&ModelInput> = model.inputs.iter().filter(|input| is_wanted(input, wanted)).collect();
    let mut given = BTreeMap::new();
    let mut problems = Vec::new();
    for (name, tensor) in arrays {
        match inputs.iter().find(|input| input.name == name) {
            None => problems.push(format!("{name}: the model has no such input")),
            Some(input) => problems.extend(misfit(input, &tensor).map(|why| format!("{name}: {why}"))),
        }
        if given.insert(name.clone(), tensor).is_some() {
            problems.push(format!("{name}: it is there twice"));
        }
    }
    let missing = inputs.iter().filter(|input| !given.contains_key(&input.name));
    problems.extend(missing.map(|input| format!("{}: it is missing", input.name)));
    if problems.is_empty() {
        return Ok(given);
    }
    let wanted = inputs.iter().map(|input| format!("{}: {}", input.name, describe(input))).collect();
    Err(InputsError::Misfit { path, problems, wanted })
}

fn is_wanted(input: &ModelInput, wanted: Wanted) -> bool {
    match wanted {
        // Both are the runtime's own business even where everything else is given.
        Wanted::All => !matches!(input.role, InputRole::LogitPositions | InputRole::UseCacheBranch),
        Wanted::Free => input.role == InputRole::Free,
    }
}

fn describe(input: &ModelInput) -> String {
    let sizes: Vec<String> = input.shape.iter().map(ToString::to_string).collect();
    format!("{} [{}]", input.dtype, sizes.join(", "))
}

fn misfit(input: &ModelInput, tensor: &HostTensor) -> Option<String> {
    let differs = |(have, want): (&u64, &Dim)| want.as_fixed().is_some_and(|want| want != *have);
    if tensor.dtype != input.dtype {
        Some(format!("it holds {}, not {}", tensor.dtype, input.dtype))
    } else if tensor.shape.len() != input.shape.len() {
        Some(format!("it has {} axes, not {}", tensor.shape.len(), input.shape.len()))
    } else if tensor.shape.iter().zip(&input.shape).any(differs) {
        Some(format!("its shape is {:?}", tensor.shape))
    } else {
        None
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use hpp_schema::{DType, ModelKind};

    pub(crate) fn model() -> Model {
        let input = |name: &str, dtype, shape: &[&str], role| ModelInput {
            name: name.into(),
            dtype,
            shape: shape.iter().map(|d| d.parse().unwrap()).collect(),
            role,
        };
        Model {
            name: "m".into(),
            source: "m.onnx".into(),
            tapped: None,
            weights_dir: ".".into(),
            kind: ModelKind::SingleRun,
            layers: 1,
            context_length: None,
            vocab_size: Some(10),
            inputs: vec![
                input("input_ids", DType::Int64, &["batch", "seq"], InputRole::TokenIds),
                input("mask", DType::Int64, &["batch", "seq"], InputRole::AttentionMask),
                input("image", DType::Float32, &["batch", "3", "4"], InputRole::Free),
            ],
            outputs: vec![],
        }
    }

    #[test]
    fn every_problem_is_said_with_what_is_wanted() {
        let arrays = vec![
            ("input_ids".to_owned(), HostTensor::from_f32(&[1, 2], &[0.0; 2])),
            ("image".to_owned(), HostTensor::from_f32(&[1, 3, 5], &[0.0; 15])),
            ("picture".to_owned(), HostTensor::from_f32(&[], &[0.0])),
        ];
        let error = fit(arrays, &model(), Wanted::All, "in.npz".into()).unwrap_err().to_string();
        for says in [
            "input_ids: it holds float32, not int64",
            "image: its shape is [1, 3, 5]",
            "picture: the model has no such input",
            "mask: it is missing",
            "image: float32 [batch, 3, 4]",
        ] {
            assert!(error.contains(says), "{says} is not in:\n{error}");
        }
    }

    #[test]
    fn a_wrong_number_of_axes_is_said() {
        let arrays = vec![("image".to_owned(), HostTensor::from_f32(&[12], &[0.0; 12]))];
        let error = fit(arrays, &model(), Wanted::Free, "in.npz".into()).unwrap_err().to_string();
        assert!(error.contains("it has 1 axes, not 3"), "{error}");
    }

    #[test]
    fn what_fits_is_taken() {
        let arrays = vec![("image".to_owned(), HostTensor::from_f32(&[2, 3, 4], &[0.0; 24]))];
        assert_eq!(fit(arrays, &model(), Wanted::Free, "in.npz".into()).unwrap().len(), 1);
    }
}
