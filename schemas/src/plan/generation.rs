//! Settings for text generation.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Tokenizer, special tokens and recommended sampling.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GenerationConfig {
    /// `tokenizer.json`, relative to the plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// `tokenizer_config.json` (chat template and special tokens), relative to the plan.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokenizer_config: Option<String>,
    /// A `chat_template.jinja` file, relative to the plan; overrides the one in `tokenizer_config`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chat_template: Option<String>,
    /// Tokens that end a text.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub eos_token_ids: Vec<u32>,
    /// Token that begins a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bos_token_id: Option<u32>,
    /// Recommended sampling parameters.
    pub sampling: SamplingDefaults,
}

/// Sampling parameters that the model's authors recommend; absent where they recommend none.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[allow(missing_docs)]
pub struct SamplingDefaults {
    /// False means greedy decoding, whatever the other fields are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub do_sample: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_k: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top_p: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repetition_penalty: Option<f64>,
}
