//! What reading a model changed, for messages to the user.

use hpp_schema::{DType, Shape};
use std::fmt;

/// A change that reading made to a model.
#[derive(Clone, Debug, PartialEq)]
pub enum Note {
    /// The nodes were not in a topological order and were sorted.
    Sorted,
    /// Functions that the model defines were inlined.
    InlinedFunctions {
        /// Number of different functions.
        functions: usize,
        /// Number of calls.
        calls: usize,
    },
    /// A function was not inlined because it uses another operator set version than the model.
    KeptFunction {
        /// Domain and name.
        function: String,
    },
    /// Large `Constant` nodes became weights.
    LiftedConstants {
        /// Number of nodes.
        constants: usize,
    },
    /// The model is a merged decoder, of which one branch was kept.
    Branch(BranchChoice),
}

/// The branch of a merged decoder that became the graph.
#[derive(Clone, Debug, PartialEq)]
pub struct BranchChoice {
    /// The boolean graph input that selects the branch.
    pub condition: String,
    /// The value of that input for this branch.
    pub value: bool,
    /// Graph inputs that only this branch reads: its states.
    pub state_inputs: Vec<String>,
    /// Graph inputs that became unread and were removed, the condition first.
    pub dropped_inputs: Vec<DroppedInput>,
}

/// A graph input that was removed.
#[derive(Clone, Debug, PartialEq)]
pub struct DroppedInput {
    /// Its name.
    pub name: String,
    /// Element type; `None` if it is not a tensor.
    pub dtype: Option<DType>,
    /// Declared shape.
    pub shape: Option<Shape>,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::InlinedFunctions { functions, calls } => {
                write!(f, "inlined {calls} calls of {functions} functions that the model defines")
            }
            Note::KeptFunction { function } => {
                write!(f, "kept the function {function}: it uses another operator set version than the model")
            }
            Note::LiftedConstants { constants } => write!(f, "turned {constants} large Constant nodes into weights"),
            Note::Branch(choice) => choice.fmt(f),
            Note::Sorted => f.write_str("sorted the nodes, which were not in a topological order"),
        }
    }
}

impl fmt::Display for BranchChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let BranchChoice { condition, value, state_inputs, .. } = self;
        let n = state_inputs.len();
        write!(f, "merged decoder: kept the branch for {condition} = {value}, which reads {n} state inputs")
    }
}
