//! Parses one line of a corpus.

use super::CorpusFormat;
use hpp_schema::probe::{ChatTurn, PromptContent};
use serde_json::{Map, Value};

/// The prompt of a line, or the reason why it is invalid.
pub(super) fn content(format: CorpusFormat, line: &[u8]) -> Result<PromptContent, String> {
    let text = std::str::from_utf8(line).map_err(|e| format!("it is not UTF-8 at byte {}", e.valid_up_to() + 1))?;
    match format {
        CorpusFormat::Text => Ok(PromptContent::Text(text.trim_end_matches(['\r', '\n']).to_owned())),
        CorpusFormat::JsonLines => json(text.trim()),
    }
}

fn json(text: &str) -> Result<PromptContent, String> {
    let value: Value = serde_json::from_str(text).map_err(|e| format!("it is not JSON: {}", reason(&e)))?;
    let Value::Object(fields) = value else { return Err("it is not a JSON object".into()) };
    let known: Vec<&str> =
        ["prompt", "text", "messages", "tokens"].into_iter().filter(|name| fields.contains_key(*name)).collect();
    match known[..] {
        ["messages"] => messages(&fields["messages"]).map(PromptContent::Messages),
        ["tokens"] => tokens(&fields["tokens"]).map(PromptContent::Tokens),
        [name] => {
            let text = prompt(name, &fields[name])?;
            let system = fields
                .get("system")
                .filter(|system| !system.is_null())
                .map(|system| prompt("system", system))
                .transpose()?;
            Ok(match is_chat(&fields, system.is_some())? {
                true => PromptContent::Messages(conversation(system, text)),
                false => PromptContent::Text(text),
            })
        }
        [] => Err(format!("it has none of `prompt`, `text`, `messages` and `tokens`, but {}", names(&fields))),
        _ => Err(format!("it has `{}`, and only one can be the prompt", known.join("` and `"))),
    }
}

/// Whether a prompt is a user's message, by the fields that `hpp-exec jobs` reads: `chat`, or else whether there is a `system` message.
fn is_chat(fields: &Map<String, Value>, has_system: bool) -> Result<bool, String> {
    match fields.get("chat") {
        None | Some(Value::Null) => Ok(has_system),
        Some(Value::Bool(false)) if has_system => Err("its `system` needs `chat`".into()),
        Some(Value::Bool(chat)) => Ok(*chat),
        Some(_) => Err("its `chat` is neither true nor false".into()),
    }
}

fn conversation(system: Option<String>, text: String) -> Vec<ChatTurn> {
    let turn = |role: &str, content| ChatTurn { role: role.to_owned(), content };
    system.map(|system| turn("system", system)).into_iter().chain([turn("user", text)]).collect()
}

/// The parser's message without the line number, which is always 1.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let words = text.split(" at line ").next().unwrap_or_default();
    format!("{words} at byte {}", error.column())
}

fn names(fields: &Map<String, Value>) -> String {
    match fields.keys().take(4).map(|name| format!("`{name}`")).collect::<Vec<_>>() {
        names if names.is_empty() => "nothing".to_owned(),
        names => names.join(", "),
    }
}

fn prompt(name: &str, value: &Value) -> Result<String, String> {
    match value.as_str() {
        Some("") => Err(format!("its `{name}` is empty")),
        Some(text) => Ok(text.to_owned()),
        None => Err(format!("its `{name}` is not text")),
    }
}

fn tokens(value: &Value) -> Result<Vec<u32>, String> {
    let entries = value.as_array().ok_or("its `tokens` are not a list")?;
    if entries.is_empty() {
        return Err("its `tokens` are empty".into());
    }
    let token = |(at, entry): (usize, &Value)| {
        let number = entry.as_u64().and_then(|number| u32::try_from(number).ok());
        number.ok_or_else(|| format!("its token {} is not a token's number", at + 1))
    };
    entries.iter().enumerate().map(token).collect()
}

fn messages(value: &Value) -> Result<Vec<ChatTurn>, String> {
    let entries = value.as_array().ok_or("its `messages` are not a list")?;
    if entries.is_empty() {
        return Err("its `messages` are empty".into());
    }
    let message = |(at, entry): (usize, &Value)| {
        let field = |name: &str| {
            let text = entry[name].as_str().map(str::to_owned);
            text.ok_or_else(|| format!("its message {} has no text in `{name}`", at + 1))
        };
        Ok(ChatTurn { role: field("role")?, content: field("content")? })
    };
    entries.iter().enumerate().map(message).collect()
}
