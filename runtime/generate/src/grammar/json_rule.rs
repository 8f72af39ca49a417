//! The rule of a grammar for JSON that a schema describes.

use super::error::GrammarError;
use serde_json::{Value, json};

/// Longest schema, in bytes.
const MAX_SCHEMA_BYTES: usize = 1 << 20;
/// White space between two parts of a JSON text: a space, or new lines with an indentation, as in llama.cpp. Bounded, because a weak model
/// that may write white space never ends.
const WHITE_SPACE: &str = r"\x20|\x0A{1,2}[\x20\x09]{0,20}";

/// A rule for JSON that a schema describes.
pub(super) fn json_rule(schema: &Value, lenient: bool) -> Result<String, GrammarError> {
    let Value::Object(fields) = schema else {
        return Err(GrammarError::Schema("it must be an object".to_owned()));
    };
    let mut fields = fields.clone();
    let options = json!({"whitespace_pattern": WHITE_SPACE, "lenient": lenient});
    fields.insert("x-guidance".to_owned(), options);
    let text = Value::Object(fields).to_string();
    if text.len() > MAX_SCHEMA_BYTES {
        return Err(GrammarError::Schema(format!("it is longer than {MAX_SCHEMA_BYTES} bytes")));
    }
    Ok(format!("%json {text}"))
}
