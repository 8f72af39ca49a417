//! The grammar of calls, in the form that a model writes them.

use super::compiler::{GrammarError, json_rule};
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
    /// Whether there may be several calls. One is always possible, and the only possibility where nothing separates calls.
    pub several: bool,
}

/// The rules of these calls; `name` is that of the first.
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
        let arguments = json_rule(&function.parameters, !function.strict)
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

/// A text, as the grammar's language writes it.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}
