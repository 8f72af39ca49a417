//! Functions and calls, as chat templates take them.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// Longest name of a function, in characters.
const MAX_NAME: usize = 64;

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolFunction {
    /// Its name.
    pub name: String,
    /// The JSON Schema of its arguments: an object.
    pub parameters: Value,
    /// Whether the schema must be followed to the letter: then a keyword that cannot be followed is an error.
    pub strict: bool,
}

/// A call in a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// What the result refers to.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub id: String,
    /// Always `function`.
    #[serde(rename = "type", default = "function")]
    pub kind: String,
    /// The function and its arguments.
    pub function: FunctionCall,
}

/// A function and its arguments.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// The name.
    pub name: String,
    /// The arguments: an object, as templates expect. A text of JSON is read as one.
    #[serde(default, deserialize_with = "object")]
    pub arguments: Value,
}

fn function() -> String {
    "function".to_owned()
}

fn object<'de, D: Deserializer<'de>>(source: D) -> Result<Value, D::Error> {
    let arguments = Value::deserialize(source)?;
    let read = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()).filter(Value::is_object);
    Ok(read.unwrap_or(arguments))
}

impl ToolFunction {
    /// Reads an entry of `tools`: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn from_json(tool: &Value) -> Result<Self, String> {
        if tool["type"] != "function" {
            return Err(format!("the type {} is not supported: use function", tool["type"]));
        }
        let function = &tool["function"];
        let name = function["name"].as_str().ok_or("`function` must have a `name`")?;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(is_plain) {
            return Err(format!("the name {name:?} must have 1 to {MAX_NAME} letters, digits, `_`, `-` and `.`"));
        }
        let parameters = match &function["parameters"] {
            Value::Null => serde_json::json!({"type": "object"}),
            parameters @ Value::Object(_) => parameters.clone(),
            _ => return Err(format!("the `parameters` of {name} must be an object, a JSON schema")),
        };
        Ok(Self { name: name.to_owned(), parameters, strict: function["strict"] == true })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_in_a_text_become_an_object() {
        let call =
            json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": [2]}"}});
        let call: ToolCall = serde_json::from_value(call).unwrap();
        assert_eq!(call.function.arguments, json!({"b": 1, "a": [2]}));
        assert_eq!(
            serde_json::to_string(&call).unwrap(),
            r#"{"id":"1","type":"function","function":{"name":"f","arguments":{"b":1,"a":[2]}}}"#
        );
        let broken: FunctionCall = serde_json::from_value(json!({"name": "f", "arguments": "{x"})).unwrap();
        assert_eq!(broken.arguments, json!("{x"));
    }

    #[test]
    fn functions_are_read_and_others_refused() {
        let read = |tool: Value| ToolFunction::from_json(&tool);
        let plain = read(json!({"type": "function", "function": {"name": "now"}})).unwrap();
        assert_eq!((plain.name.as_str(), plain.strict), ("now", false));
        assert_eq!(plain.parameters, json!({"type": "object"}));
        for (wrong, says) in [
            (json!({"type": "retrieval"}), "retrieval"),
            (json!({"type": "function", "function": {}}), "name"),
            (json!({"type": "function", "function": {"name": "a b"}}), "a b"),
            (json!({"type": "function", "function": {"name": "x".repeat(65)}}), "64"),
            (json!({"type": "function", "function": {"name": "f", "parameters": 3}}), "parameters"),
            (json!("f"), "type"),
        ] {
            let error = read(wrong).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
