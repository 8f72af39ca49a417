//! Reads the fields of a request, and names the one that is wrong.

use crate::error::ApiError;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// Reads the fields of type `T` from the body of a request. Other fields are ignored.
///
/// # Errors
/// A field is missing or has a wrong type: the error names it, as in `messages[0].role`.
pub fn read<T: DeserializeOwned>(body: &Value) -> Result<T, ApiError> {
    if !body.is_object() {
        let message = "the request: the body must be a JSON object".to_owned();
        return Err(ApiError::Invalid { message, param: None });
    }
    serde_path_to_error::deserialize(body).map_err(|error| {
        let (path, what) = (error.path().to_string(), error.inner().to_string());
        let missing = what.strip_prefix("missing field `").and_then(|rest| rest.split('`').next());
        let param = match (path.as_str(), missing) {
            (".", missing) => missing.map(str::to_owned),
            (path, Some(missing)) => Some(format!("{path}.{missing}")),
            (path, None) => Some(path.to_owned()),
        };
        let message = match (&param, missing) {
            (Some(param), Some(_)) => format!("`{param}` is missing"),
            (Some(param), None) => format!("`{param}`: {}", plain(&what)),
            (None, _) => format!("the request: {}", plain(&what)),
        };
        ApiError::Invalid { message, param: param.map(Into::into) }
    })
}

/// The text of a type error, without Rust's names of types.
fn plain(error: &str) -> String {
    let whole = ["u32", "u64", "usize"].map(|name| (name, "a whole number, not below 0"));
    let signed = ["i32", "i64"].map(|name| (name, "a whole number"));
    let others = [("f64", "a number"), ("a sequence", "a list"), ("a boolean", "true or false")];
    let names = whole.into_iter().chain(signed).chain(others);
    names.fold(error.to_owned(), |text, (rust, plain)| {
        text.replace(&format!("expected {rust}"), &format!("expected {plain}"))
    })
}

#[cfg(test)]
mod tests {
    use super::super::{ChatRequest, CompletionRequest};
    use super::*;
    use serde_json::json;

    fn refused<T: std::fmt::Debug>(read: Result<T, ApiError>) -> (Option<String>, String) {
        match read {
            Err(ApiError::Invalid { param, message }) => (param.map(Into::into), message),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_field_that_is_wrong_is_named() {
        for (body, param, says) in [
            (json!({}), "messages", "is missing"),
            (json!({"messages": "x"}), "messages", "expected a list"),
            (
                json!({"messages": [{"role": "user", "content": "x"}, {"content": "x"}]}),
                "messages[1].role",
                "is missing",
            ),
            (json!({"messages": [{"role": "user", "content": 3}]}), "messages[0].content", "a text or a list of parts"),
            (
                json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}),
                "messages[0].tool_calls[0].function.name",
                "is missing",
            ),
            (json!({"messages": [], "temperature": "hot"}), "temperature", "expected a number"),
            (json!({"messages": [], "max_tokens": -5}), "max_tokens", "a whole number, not below 0"),
            (
                json!({"messages": [], "stream_options": {"include_usage": 1}}),
                "stream_options.include_usage",
                "true or false",
            ),
            (json!({"messages": [], "stop": 7}), "stop", "a text or a list of texts"),
        ] {
            let (found, message) = refused(ChatRequest::read(&body));
            assert_eq!(found.as_deref(), Some(param), "{message}");
            assert!(message.contains(says) && message.contains(param), "{message}");
        }
        let (param, message) = refused(CompletionRequest::read(&json!({"prompt": {"a": 1}})));
        assert_eq!(param.as_deref(), Some("prompt"));
        assert!(message.contains("list of texts"), "{message}");
        assert_eq!(refused(CompletionRequest::read(&json!([1]))).0, None);
    }
}
