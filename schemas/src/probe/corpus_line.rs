//! A line of a corpus: a prompt as a JSON object.

use super::{ChatTurn, PromptContent};
use serde_json::{Map, Value};

impl PromptContent {
    /// The prompt of a line such as `{"prompt": "..."}`: text (`prompt` or `text`), a conversation (`messages`, or the fields `chat` and `system`
    /// that `hpp-exec jobs` reads), or token ids (`tokens`). Other fields are ignored. A field that is null counts as absent.
    ///
    /// # Errors
    /// The reason why the line is not a prompt, as a sentence without a full stop.
    pub fn of_json_line(text: &str) -> Result<Self, String> {
        let value: Value = serde_json::from_str(text).map_err(|e| format!("it is not JSON: {}", reason(&e)))?;
        let Value::Object(mut fields) = value else { return Err("it is not a JSON object".into()) };
        fields.retain(|_, value| !value.is_null());
        let known: Vec<&str> =
            ["prompt", "text", "messages", "tokens"].into_iter().filter(|name| fields.contains_key(*name)).collect();
        match known[..] {
            ["messages"] => messages(&fields["messages"]).map(PromptContent::Messages),
            ["tokens"] => tokens(&fields["tokens"]).map(PromptContent::Tokens),
            [name] => {
                let text = prompt(name, &fields[name])?;
                let system = fields.get("system").map(|system| prompt("system", system)).transpose()?;
                Ok(match is_chat(&fields, system.is_some())? {
                    true => PromptContent::Messages(conversation(system, text)),
                    false => PromptContent::Text(text),
                })
            }
            [] => Err(format!("it has none of `prompt`, `text`, `messages` and `tokens`{}", instead(&fields))),
            _ => Err(format!("it has `{}`, and only one can be the prompt", known.join("` and `"))),
        }
    }
}

/// Whether the prompt is a user's message, by the fields that `hpp-exec jobs` reads. `chat` decides; without it, a `system` message makes the
/// prompt one.
fn is_chat(fields: &Map<String, Value>, has_system: bool) -> Result<bool, String> {
    match fields.get("chat") {
        None => Ok(has_system),
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

/// Names the first fields of the line.
fn instead(fields: &Map<String, Value>) -> String {
    match fields.keys().take(4).map(|name| format!("`{name}`")).collect::<Vec<_>>() {
        names if names.is_empty() => String::new(),
        names => format!(", but {}", names.join(", ")),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn turn(role: &str, content: &str) -> ChatTurn {
        ChatTurn { role: role.to_owned(), content: content.to_owned() }
    }

    #[test]
    fn each_kind_of_line_is_read() {
        let text = PromptContent::Text("a".to_owned());
        let chat = |turns: &[ChatTurn]| PromptContent::Messages(turns.to_vec());
        for (line, content) in [
            (r#"{"prompt": "a", "id": 7}"#, text.clone()),
            (r#"{"text": "a", "tokens": null, "chat": null, "system": null}"#, text.clone()),
            (r#"{"prompt": "a", "chat": false}"#, text),
            (r#"{"prompt": "a", "chat": true}"#, chat(&[turn("user", "a")])),
            (r#"{"prompt": "a", "system": "s"}"#, chat(&[turn("system", "s"), turn("user", "a")])),
            (r#"{"messages": [{"role": "user", "content": "c"}]}"#, chat(&[turn("user", "c")])),
            (r#"{"tokens": [5, 9]}"#, PromptContent::Tokens(vec![5, 9])),
        ] {
            assert_eq!(PromptContent::of_json_line(line), Ok(content), "{line}");
        }
    }

    #[test]
    fn the_reason_says_what_is_wrong() {
        for (line, why) in [
            ("{\"prompt\": ", "it is not JSON: EOF"),
            ("{\"prompt\": null}", "`messages` and `tokens`"),
            ("{\"prompt\": \"a\", \"tokens\": [1]}", "`prompt` and `tokens`, and only one"),
            ("{\"prompt\": \"a\", \"chat\": 1}", "`chat` is neither true nor false"),
            ("{\"tokens\": [3, -1]}", "token 2 is not a token's number"),
        ] {
            let said = PromptContent::of_json_line(line).unwrap_err();
            assert!(said.contains(why), "{line}: {said}");
        }
    }
}
