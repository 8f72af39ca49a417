//! `tools`, `tool_choice` and `parallel_tool_calls` of chat completions.

use crate::error::ApiError;
use hpp_generate::grammar::{GrammarSource, ToolCallGrammar};
use hpp_generate::text::tools::{ToolFormat, ToolFunction};
use serde_json::Value;

/// Most tools of one request.
const MAX_TOOLS: usize = 128;

/// The tools of a request that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    /// The definitions as the request gives them, for the chat template.
    pub definitions: Vec<Value>,
    functions: Vec<ToolFunction>,
    choice: ToolChoice,
    /// Whether an answer may have several tool calls.
    parallel: bool,
}

/// Whether the model must call a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ToolChoice {
    /// The model decides.
    Auto,
    /// The model must call one or more functions.
    Required,
    /// The model must call the function at this index, once.
    Function(usize),
}

impl Tools {
    /// Reads the fields of a request. `None` if the model may call nothing.
    pub fn read(
        tools: Option<&Value>,
        choice: Option<&Value>,
        parallel: Option<bool>,
    ) -> Result<Option<Self>, ApiError> {
        let definitions = match tools {
            None | Some(Value::Null) => vec![],
            Some(Value::Array(tools)) if tools.len() <= MAX_TOOLS => tools.clone(),
            Some(_) => return Err(ApiError::field("tools", format!("`tools` must be a list of at most {MAX_TOOLS}"))),
        };
        let read = |(index, tool): (usize, &Value)| {
            ToolFunction::from_json(tool)
                .map_err(|error| ApiError::field(format!("tools[{index}]"), format!("`tools[{index}]`: {error}")))
        };
        let functions = definitions.iter().enumerate().map(read).collect::<Result<Vec<_>, ApiError>>()?;
        let wrong = |text: String| Err(ApiError::field("tool_choice", format!("`tool_choice` {text}")));
        let given = choice.filter(|choice| !choice.is_null());
        let choice = match given.map(|choice| choice.as_str().ok_or(choice)) {
            None | Some(Ok("auto")) if functions.is_empty() => return Ok(None),
            Some(Ok("none")) => return Ok(None),
            Some(_) if functions.is_empty() => return wrong("needs `tools`".to_owned()),
            None | Some(Ok("auto")) => ToolChoice::Auto,
            Some(Ok("required")) => ToolChoice::Required,
            Some(Err(named)) if named["type"] == "function" => {
                let name = &named["function"]["name"];
                match functions.iter().position(|function| *name == function.name.as_str()) {
                    Some(index) => ToolChoice::Function(index),
                    None => return wrong(format!("names the function {name}, which `tools` lack")),
                }
            }
            Some(_) => return wrong("must be none, auto, required, or name a function".to_owned()),
        };
        Ok(Some(Self { definitions, functions, choice, parallel: parallel.unwrap_or(true) }))
    }

    /// The names of the functions.
    pub fn names(&self) -> Vec<String> {
        self.functions.iter().map(|function| function.name.clone()).collect()
    }

    /// The grammar of an answer that may have tool calls in this format, and the request field that the grammar comes from. `text`: the grammar of an
    /// answer without calls.
    pub fn grammar(&self, format: ToolFormat, text: Option<GrammarSource>) -> Option<(GrammarSource, &'static str)> {
        let (functions, several) = match self.choice {
            ToolChoice::Function(index) => (vec![self.functions[index].clone()], false),
            ToolChoice::Auto | ToolChoice::Required => (self.functions.clone(), self.parallel),
        };
        let calls = GrammarSource::ToolCalls(ToolCallGrammar { format, functions, several });
        match (self.choice, text) {
            (ToolChoice::Auto, None) => None,
            (ToolChoice::Auto, Some(text)) => Some((GrammarSource::Either(Box::new([text, calls])), "response_format")),
            (ToolChoice::Required | ToolChoice::Function(_), _) => Some((calls, "tools")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tools() -> Value {
        json!([{"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {"name": "g"}}])
    }

    #[test]
    fn choices_decide_what_may_and_must_be_called() {
        let grammar = |choice: Value, text: Option<GrammarSource>| {
            let tools = Tools::read(Some(&tools()), Some(&choice), Some(true)).unwrap()?;
            tools.grammar(ToolFormat::Hermes, text)
        };
        let calls = |choice: Value| match grammar(choice, Some(GrammarSource::JsonObject)) {
            Some((GrammarSource::ToolCalls(calls), "tools")) => (calls.functions.len(), calls.several),
            other => panic!("{other:?}"),
        };
        assert_eq!(grammar(Value::Null, None), None);
        assert_eq!(grammar(json!("none"), Some(GrammarSource::JsonObject)), None, "no tools at all");
        assert!(matches!(grammar(json!("auto"), Some(GrammarSource::JsonObject)), Some((GrammarSource::Either(_), _))));
        assert_eq!(calls(json!("required")), (2, true));
        assert_eq!(calls(json!({"type": "function", "function": {"name": "g"}})), (1, false));
    }

    #[test]
    fn wrong_tools_and_choices_name_their_field() {
        let refused = |tools: Value, choice: Value| match Tools::read(Some(&tools), Some(&choice), None) {
            Err(ApiError::Invalid { param, .. }) => param.unwrap().into_owned(),
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(json!({}), Value::Null), "tools");
        assert_eq!(refused(json!(vec![&tools()[0]; 129]), Value::Null), "tools");
        assert_eq!(refused(json!([tools()[0], {"type": "mcp"}]), Value::Null), "tools[1]");
        assert_eq!(refused(json!([]), json!("required")), "tool_choice");
        assert_eq!(refused(tools(), json!({"type": "function", "function": {"name": "h"}})), "tool_choice");
        assert_eq!(refused(tools(), json!("any")), "tool_choice");
        assert_eq!(Tools::read(None, Some(&json!("auto")), None), Ok(None));
        assert_eq!(Tools::read(Some(&json!([])), None, None), Ok(None));
    }
}
