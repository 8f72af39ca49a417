//! The grammar of calls, in the form that a model writes them.

use super::error::GrammarError;
use super::json_rule::json_rule;
use crate::text::TextTokenizer;
use crate::text::tools::{ToolFormat, ToolFunction};
use serde_json::Value;

/// Calls of functions.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCallGrammar {
    /// How the model writes calls.
    pub format: ToolFormat,
    /// The functions.
    pub functions: Vec<ToolFunction>,
    /// Whether there may be several calls. In formats where nothing separates calls there is only one in any case.
    pub several: bool,
}

/// The rules of these calls. `name` is the name of the first rule.
pub(super) fn rules(name: &str, calls: &ToolCallGrammar, tokenizer: &TextTokenizer) -> Result<String, GrammarError> {
    let ToolCallGrammar { format, functions, several } = calls;
    let marker = |text: &str| match tokenizer.token_id(text).filter(|id| tokenizer.special_name(*id).is_some()) {
        Some(id) => format!("<[{id}]>"),
        None => literal(text),
    };
    let (open, one) = (marker(format.open_marker()), format!("{name}_one"));
    let again = |separator: &str| if *several { format!(" ({separator} {one})*") } else { String::new() };
    let all = match format {
        ToolFormat::Hermes => format!("{one}{}", again("\"\\n\"")),
        ToolFormat::Llama => one.clone(),
        ToolFormat::Mistral => format!("{open} \" \"? \"[\" {one}{} \"]\"", again("\", \"")),
        ToolFormat::MistralArgs => format!("{one}{}", again("\"\"")),
    };
    let mut rules = format!("{name}: {all}\n{one}: ");
    let cases: Vec<String> = (0..functions.len()).map(|index| format!("{name}_{index}")).collect();
    rules.push_str(&cases.join(" | "));
    rules.push('\n');
    for (case, function) in cases.iter().zip(functions) {
        // Each schema is a rule of its own, so that its references have their own root.
        let mut parameters = function.parameters.clone();
        close(&mut parameters);
        let arguments = json_rule(&parameters, !function.strict)
            .map_err(|error| GrammarError::Schema(format!("{}: {error}", function.name)))?;
        let field = format.arguments_field();
        let object = format!("{{\"name\": {}, \"{field}\": ", Value::from(function.name.as_str()));
        let call = match format {
            ToolFormat::Hermes => {
                let (start, close) = (literal(&format!("\n{object}")), marker("</tool_call>"));
                format!("{open} {start} {case}_arguments \"}}\\n\" {close}")
            }
            ToolFormat::Llama | ToolFormat::Mistral => {
                format!("{} {case}_arguments \"}}\"", literal(&object))
            }
            ToolFormat::MistralArgs => {
                format!("{open} {} {} {case}_arguments", literal(&function.name), marker("[ARGS]"))
            }
        };
        rules.push_str(&format!("{case}: {call}\n{case}_arguments: {arguments}\n"));
    }
    Ok(rules)
}

/// Keywords with which an object may have properties that its `properties` do not name, or that combine schemas, none of which may be
/// closed alone.
const OPEN: [&str; 11] = [
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "$ref",
];

/// Lets objects have only the properties that they declare, where the schema says nothing about others: a function has no use for others,
/// and a weak model that may add some never ends. Every answer that follows the changed schema follows the given one too.
fn close(schema: &mut Value) {
    let Some(object) = schema.as_object_mut() else { return };
    if let Some(items) = object.get_mut("items") {
        close(items);
    }
    if OPEN.iter().any(|keyword| object.contains_key(*keyword)) {
        return;
    }
    let required: Vec<&Value> = object.get("required").and_then(Value::as_array).into_iter().flatten().collect();
    let Some(Value::Object(properties)) = object.get("properties") else { return };
    if !required.iter().all(|name| name.as_str().is_some_and(|name| properties.contains_key(name))) {
        return;
    }
    if let Some(Value::Object(properties)) = object.get_mut("properties") {
        properties.values_mut().for_each(close);
    }
    object.insert("additionalProperties".to_owned(), Value::from(false));
}

/// A text, as the grammar's language writes it.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
