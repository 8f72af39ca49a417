//! Named tensors for a model's inputs: checks those that the user gives and reports all problems at once, or makes random ones from a seed.

mod random;

pub use random::{random_inputs, random_tokens};

use hpp_engine::{HostTensor, NamedTensors};
use hpp_schema::{Dim, ModelInput};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Why there are no inputs for the model.
#[derive(Debug, thiserror::Error)]
pub enum InputsError {
    /// The given tensors do not fit the model.
    #[error("the tensors in {} do not fit the model:\n  {}\nthe model takes:\n  {}", path.display(), problems.join("\n  "), expected.join("\n  "))]
    Misfit {
        /// The file.
        path: PathBuf,
        /// One line for each problem.
        problems: Vec<String>,
        /// One line for each input of the model.
        expected: Vec<String>,
    },
    /// Tensors were given to a language model that takes none.
    #[error("this model takes no tensors of --inputs: hpp-exec fills its inputs from the prompt")]
    NoneTaken,
    /// There is no random value for an input.
    #[error("cannot make a random value for input {name:?}: {why}")]
    NoRandomValue {
        /// The input.
        name: String,
        /// Why not.
        why: String,
    },
    /// The model is a language model with states.
    #[error("this model generates text and keeps state from token to token; --outputs is for models that keep none")]
    GeneratesText,
}

impl InputsError {
    /// What the user can do next.
    pub fn hint(&self) -> &'static str {
        match self {
            InputsError::Misfit { .. } => {
                "save them with numpy.savez under these names; convert types with .astype(...)"
            }
            InputsError::NoneTaken => "omit --inputs; give a text with --prompt or token ids with --tokens 1,2,3",
            InputsError::NoRandomValue { .. } => "give the inputs: --inputs in.npz",
            InputsError::GeneratesText => "give a prompt: --prompt TEXT or --tokens 1,2,3",
        }
    }
}

/// Checks the tensors of the file `path` against the inputs that it must hold and reports every problem at once.
pub fn check_inputs(
    tensors: Vec<(String, HostTensor)>,
    inputs: &[ModelInput],
    path: &Path,
) -> Result<NamedTensors, InputsError> {
    if inputs.is_empty() && !tensors.is_empty() {
        return Err(InputsError::NoneTaken);
    }
    let mut given = BTreeMap::new();
    let mut problems = Vec::new();
    for (name, tensor) in tensors {
        match inputs.iter().find(|input| input.name == name) {
            None => problems.push(format!("{name}: the model has no such input")),
            Some(input) => problems.extend(misfit(input, &tensor).map(|why| format!("{name}: {why}"))),
        }
        if given.insert(name.clone(), tensor).is_some() {
            problems.push(format!("{name}: the file holds it twice"));
        }
    }
    let missing = inputs.iter().filter(|input| !given.contains_key(&input.name));
    problems.extend(missing.map(|input| format!("{}: it is missing", input.name)));
    if problems.is_empty() {
        return Ok(given);
    }
    let expected = inputs.iter().map(|input| format!("{}: {}", input.name, describe(input))).collect();
    Err(InputsError::Misfit { path: path.to_owned(), problems, expected })
}

/// Two inputs that have a dimension of the same name in different sizes; `None` if there are none. This is only a hint, because exporters' names are
/// no rules, but the sizes of caches and masks rarely differ on purpose.
pub fn different_sizes(tensors: &NamedTensors, inputs: &[ModelInput]) -> Option<String> {
    let mut known: BTreeMap<&str, (u64, &str)> = BTreeMap::new();
    for input in inputs {
        let Some(tensor) = tensors.get(&input.name) else { continue };
        for (dim, size) in input.shape.iter().zip(&tensor.shape) {
            let Some(name) = dim.as_symbol() else { continue };
            let (first, other) = *known.entry(name).or_insert((*size, &input.name));
            if first != *size {
                return Some(format!("{name} is {first} in {other} and {size} in {}", input.name));
            }
        }
    }
    None
}

fn describe(input: &ModelInput) -> String {
    let sizes: Vec<String> = input.shape.iter().map(ToString::to_string).collect();
    format!("{} [{}]", input.dtype, sizes.join(", "))
}

fn misfit(input: &ModelInput, tensor: &HostTensor) -> Option<String> {
    let differs = |(size, dim): (&u64, &Dim)| dim.as_fixed().is_some_and(|fixed| fixed != *size);
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
    use hpp_schema::{DType, InputRole};

    pub(crate) fn inputs() -> Vec<ModelInput> {
        let input = |name: &str, dtype, shape: &[&str], role| ModelInput {
            name: name.into(),
            dtype,
            shape: shape.iter().map(|d| d.parse().unwrap()).collect(),
            role,
        };
        vec![
            input("input_ids", DType::Int64, &["batch", "seq"], InputRole::TokenIds),
            input("mask", DType::Int64, &["batch", "seq"], InputRole::AttentionMask),
            input("image", DType::Float32, &["batch", "3", "4"], InputRole::Free),
        ]
    }

    #[test]
    fn all_problems_are_reported_with_the_expected_inputs() {
        let arrays = vec![
            ("input_ids".to_owned(), HostTensor::from_f32(&[1, 2], &[0.0; 2])),
            ("image".to_owned(), HostTensor::from_f32(&[1, 3, 5], &[0.0; 15])),
            ("picture".to_owned(), HostTensor::from_f32(&[], &[0.0])),
        ];
        let error = check_inputs(arrays, &inputs(), Path::new("in.npz")).unwrap_err().to_string();
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
    fn a_wrong_number_of_axes_is_reported() {
        let arrays = vec![("image".to_owned(), HostTensor::from_f32(&[12], &[0.0; 12]))];
        let error = check_inputs(arrays, &inputs()[2..], Path::new("in.npz")).unwrap_err().to_string();
        assert!(error.contains("it has 1 axes, not 3"), "{error}");
    }

    #[test]
    fn a_model_without_such_inputs_takes_no_tensors() {
        let arrays = vec![("input_ids".to_owned(), HostTensor::from_f32(&[1], &[0.0]))];
        assert!(matches!(check_inputs(arrays, &[], Path::new("in.npz")), Err(InputsError::NoneTaken)));
        assert_eq!(check_inputs(vec![], &[], Path::new("in.npz")).unwrap().len(), 0);
    }

    #[test]
    fn a_name_with_two_sizes_is_noticed() {
        let sizes = |of_mask| {
            let ids = ("input_ids".to_owned(), HostTensor::from_f32(&[1, 3], &[0.0; 3]));
            let mask = ("mask".to_owned(), HostTensor::from_f32(&[1, of_mask], &vec![0.0; of_mask as usize]));
            different_sizes(&[ids, mask].into_iter().collect(), &inputs())
        };
        assert_eq!(sizes(3), None);
        assert_eq!(sizes(4).as_deref(), Some("seq is 3 in input_ids and 4 in mask"));
    }

    #[test]
    fn tensors_that_fit_are_accepted() {
        let arrays = vec![("image".to_owned(), HostTensor::from_f32(&[2, 3, 4], &[0.0; 24]))];
        assert_eq!(check_inputs(arrays, &inputs()[2..], Path::new("in.npz")).unwrap().len(), 1);
    }
}
