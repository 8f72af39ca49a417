//! `response_format` of a request, as OpenAI's API defines it.

use super::GrammarSource;
use serde_json::Value;

/// The form that a request asks for.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ResponseFormat {
    /// Any text.
    #[default]
    Text,
    /// A text of a grammar.
    Grammar(GrammarSource),
}

/// Why a `response_format` is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FormatError(String);

impl ResponseFormat {
    /// Reads `{"type": "text"}`, `{"type": "json_object"}` or `{"type": "json_schema", "json_schema": {"schema": {...}}}`. Without
    /// `"strict": false`, keywords that cannot be followed are errors.
    pub fn from_json(format: &Value) -> Result<Self, FormatError> {
        let wrong = |text: &str| Err(FormatError(format!("`response_format`: {text}")));
        match format["type"].as_str() {
            None if format.is_null() || format.as_object().is_some_and(serde_json::Map::is_empty) => Ok(Self::Text),
            None => wrong("it must be an object with a `type`"),
            Some("text") => Ok(Self::Text),
            Some("json_object") => Ok(Self::Grammar(GrammarSource::JsonObject)),
            Some("json_schema") => {
                let described = &format["json_schema"];
                match &described["schema"] {
                    schema @ Value::Object(_) => {
                        let lenient = described["strict"] == false;
                        Ok(Self::Grammar(GrammarSource::JsonSchema { schema: schema.clone(), lenient }))
                    }
                    _ => wrong("`json_schema` must have a `schema`, which is an object"),
                }
            }
            Some(other) => wrong(&format!("the type {other:?} is not supported: use text, json_object or json_schema")),
        }
    }

    /// The grammar, if there is one.
    pub fn grammar(self) -> Option<GrammarSource> {
        match self {
            ResponseFormat::Text => None,
            ResponseFormat::Grammar(source) => Some(source),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn formats_are_read_and_others_refused() {
        let read = |value: Value| ResponseFormat::from_json(&value).map(ResponseFormat::grammar);
        assert_eq!(read(Value::Null), Ok(None));
        assert_eq!(read(json!({})), Ok(None));
        assert_eq!(read(json!({"type": "text"})), Ok(None));
        assert_eq!(read(json!({"type": "json_object"})), Ok(Some(GrammarSource::JsonObject)));
        let schema = json!({"type": "integer"});
        for (strict, lenient) in [(Value::Null, false), (json!(true), false), (json!(false), true)] {
            let format =
                json!({"type": "json_schema", "json_schema": {"name": "n", "strict": strict, "schema": schema}});
            assert_eq!(read(format), Ok(Some(GrammarSource::JsonSchema { schema: schema.clone(), lenient })));
        }
        for wrong in [
            json!("json_object"),
            json!({"type": "xml"}),
            json!({"type": "json_schema"}),
            json!({"type": "json_schema", "json_schema": {"schema": "x"}}),
            json!({"type": 3}),
        ] {
            let error = read(wrong.clone()).unwrap_err().to_string();
            assert!(error.starts_with("`response_format`: "), "{wrong}: {error}");
        }
    }
}
