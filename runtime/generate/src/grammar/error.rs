//! Why an answer cannot follow a grammar.

use crate::text::untrusted::LimitError;

/// What a person writes instead of a schema that cannot be read or followed.
pub const SCHEMA_HINT: &str = "write a JSON schema (json-schema.org), such as {\"type\": \"object\", \"properties\": {\"name\": \
                               {\"type\": \"string\"}}, \"required\": [\"name\"]}; docs/SERVING.md says which keywords can be followed";

/// Why there is no grammar, or why it cannot be followed further.
#[derive(Debug, thiserror::Error)]
pub enum GrammarError {
    /// The schema is not valid or has something that is not supported.
    #[error("the schema cannot be followed: {0}")]
    Schema(String),
    /// The tokens of the model have no known bytes.
    #[error("no grammar can be followed with this model's tokenizer: {0}")]
    Vocabulary(String),
    /// The schema takes too long or too much memory.
    #[error("the schema cannot be compiled")]
    Limit(#[source] LimitError),
    /// No token continues the text, or computing which ones do exceeds the limits.
    #[error("the answer cannot go on by its grammar: {0}")]
    Stuck(String),
}
