//! Why a model cannot be understood.

use crate::config::ConfigError;
use crate::gpu_experts::WHOLE_MIXTURES;
use crate::rows::LAYER_MODE;
use hpp_graph::RowsError;
use hpp_onnx::{ActiveNeuronsError, ExpertDivisionError, NothingReason, QuantizeError, RowSplitError};

/// Why a model could not be analysed.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The model cannot be read.
    #[error("cannot read the model")]
    Read(#[source] Box<hpp_onnx::ReadError>),
    /// A configuration file is broken.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The model cannot be quantized.
    #[error("cannot quantize the model")]
    Quantize(#[from] QuantizeError),
    /// A layer cannot be divided by rows.
    #[error(transparent)]
    Rows(#[from] RowsError),
    /// The parts of a layer cannot be written.
    #[error("cannot divide the model by rows")]
    RowSplit(#[from] RowSplitError),
    /// Mixtures cannot be divided.
    #[error("cannot divide the experts between a GPU and the CPU")]
    ExpertDivision(#[from] ExpertDivisionError),
    /// Active neurons cannot be computed alone.
    #[error("cannot compute active neurons alone")]
    ActiveNeurons(#[from] ActiveNeuronsError),
    /// A setting is invalid for this model.
    #[error("{message}")]
    Setting {
        /// What is wrong.
        message: String,
        /// What to do.
        hint: &'static str,
    },
}

impl ModelError {
    pub(crate) fn setting(message: impl Into<String>, hint: &'static str) -> Self {
        ModelError::Setting { message: message.into(), hint }
    }

    /// What the user can do, if anything.
    pub fn hint(&self) -> Option<String> {
        match self {
            ModelError::Setting { hint, .. } => Some((*hint).to_owned()),
            ModelError::Read(error) => error.hint(),
            ModelError::Quantize(QuantizeError::Nothing { embedding_is_left: true, .. }) => {
                Some("leave --quantize out, or quantize the embedding with --quantize-embedding same".to_owned())
            }
            ModelError::Quantize(QuantizeError::Nothing { reason: NothingReason::Fits { .. }, .. }) => {
                Some("leave --quantize out, or give a smaller --bits-budget".to_owned())
            }
            ModelError::Quantize(QuantizeError::Nothing { .. }) => Some("leave --quantize out".to_owned()),
            ModelError::Quantize(QuantizeError::Budget { smallest, .. }) => Some(format!(
                "give --bits-budget {} ({smallest} bytes) or more, and leave --quantize-head and --quantize-embedding out if they were given",
                hpp_schema::ByteSize(*smallest).human_rounded_up()
            )),
            ModelError::Rows(_) | ModelError::RowSplit(_) => Some(LAYER_MODE.to_owned()),
            ModelError::ExpertDivision(_) => Some(WHOLE_MIXTURES.to_owned()),
            ModelError::ActiveNeurons(_) => Some("omit --active-neurons".to_owned()),
            ModelError::Config(_) | ModelError::Quantize(_) => None,
        }
    }
}
