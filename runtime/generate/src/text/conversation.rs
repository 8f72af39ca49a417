//! Conversations as OpenAI's clients write them, turned into messages for the chat template.

use super::tools::ToolCall;
use super::{Message, Role};
use serde::Deserialize;
use std::collections::{HashMap, HashSet};

/// A turn as a client writes it.
#[derive(Clone, Debug, Deserialize)]
pub struct ChatMessage {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    pub role: String,
    /// The text of the message.
    pub content: Option<Content>,
    /// The functions that the assistant called.
    pub tool_calls: Option<Vec<ToolCall>>,
    /// The call of which this is the result.
    pub tool_call_id: Option<String>,
    /// The name of the author.
    pub name: Option<String>,
}

/// The text of the message.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "it must be a text or a list of parts")]
pub enum Content {
    /// A text.
    Text(String),
    /// Parts of a text.
    Parts(Vec<ContentPart>),
}

/// A part of a message.
#[derive(Clone, Debug, Deserialize)]
pub struct ContentPart {
    /// Only `text`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The text.
    pub text: Option<String>,
}

/// Why a conversation cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{why}")]
pub struct ConversationError {
    /// The wrong field, as in `messages[0].content`.
    pub field: String,
    /// What is wrong, with the name of the field.
    pub why: String,
}

impl ConversationError {
    fn new(field: impl Into<String>, why: impl Into<String>) -> Self {
        Self { field: field.into(), why: why.into() }
    }
}

/// The messages of a conversation, in order. Results of calls get the names of their functions.
///
/// # Errors
/// There is no message, a message has an unknown role, no text or parts that are no text, or a result belongs to no call before it.
pub fn conversation(messages: &[ChatMessage]) -> Result<Vec<Message>, ConversationError> {
    if messages.is_empty() {
        return Err(ConversationError::new("messages", "`messages` is empty: give at least one"));
    }
    let messages = messages.iter().enumerate().map(|(index, message)| message.message(index));
    let mut messages = messages.collect::<Result<Vec<_>, _>>()?;
    check_results(&messages)?;
    name_results(&mut messages);
    Ok(messages)
}

impl ChatMessage {
    /// The message for the chat template. `index` is its place in the conversation, which errors name.
    fn message(&self, index: usize) -> Result<Message, ConversationError> {
        let wrong = |field: &str, why: &str| {
            let field = format!("messages[{index}].{field}");
            let why = format!("`{field}`: {why}");
            ConversationError { field, why }
        };
        let role = match self.role.as_str() {
            "system" | "developer" => Role::System,
            "user" => Role::User,
            "assistant" => Role::Assistant,
            "tool" => Role::Tool,
            other => {
                let why = format!("the role {other:?} is not supported: use system, user, assistant or tool");
                return Err(wrong("role", &why));
            }
        };
        let text = match &self.content {
            // The message calls functions, or was saved without its text.
            None if role == Role::Assistant => String::new(),
            None => return Err(wrong("content", "the message has none")),
            Some(Content::Text(text)) => text.clone(),
            Some(Content::Parts(parts)) => {
                let text = |part: &ContentPart| part.text.clone().filter(|_| part.kind == "text");
                let texts: Option<Vec<String>> = parts.iter().map(text).collect();
                texts.ok_or_else(|| wrong("content", "only parts of the type \"text\" are supported"))?.concat()
            }
        };
        Ok(Message {
            tool_calls: self.tool_calls.clone().unwrap_or_default(),
            tool_call_id: self.tool_call_id.clone(),
            name: self.name.clone(),
            ..Message::new(role, text)
        })
    }
}

/// Refuses a result of a call that no assistant made before it. Conversations need no ids: a result without one, or after a call without
/// one, is taken.
fn check_results(messages: &[Message]) -> Result<(), ConversationError> {
    let mut called: HashSet<&str> = HashSet::new();
    for (index, message) in messages.iter().enumerate() {
        if message.role == Role::Assistant {
            called.extend(message.tool_calls.iter().map(|call| call.id.as_str()));
        }
        let id = message.tool_call_id.as_deref().filter(|id| message.role == Role::Tool && !id.is_empty());
        if let Some(id) = id.filter(|id| !called.contains(id) && !called.contains("")) {
            let message = format!(
                "`tool_call_id`: messages with role 'tool' must be a response to a preceding message with 'tool_calls', and no call \
                 before this one has the id {id:?}"
            );
            return Err(ConversationError::new(format!("messages[{index}].tool_call_id"), message));
        }
    }
    Ok(())
}

/// Gives each result the name of the function that was called: some templates need it, and clients send the id of the call alone.
fn name_results(messages: &mut [Message]) {
    let mut called: HashMap<String, String> = HashMap::new();
    for message in messages {
        called.extend(message.tool_calls.iter().map(|call| (call.id.clone(), call.function.name.clone())));
        if message.role == Role::Tool && message.name.is_none() {
            message.name = message.tool_call_id.as_ref().and_then(|id| called.get(id).cloned());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(messages: &str) -> Result<Vec<Message>, ConversationError> {
        conversation(&serde_json::from_str::<Vec<ChatMessage>>(messages).unwrap())
    }

    #[test]
    fn results_get_the_name_of_the_function_that_was_called() {
        let text = r#"[{"role": "assistant", "content": null, "tool_calls": [
                {"id": "7", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]},
            {"role": "tool", "tool_call_id": "7", "content": "x"}, {"role": "tool", "content": "y"}]"#;
        let messages = of(text).unwrap();
        assert_eq!(messages[0].tool_calls[0].function.arguments["a"], 1);
        assert_eq!((messages[1].name.as_deref(), messages[2].name.as_deref()), (Some("f"), None));
    }

    #[test]
    fn a_result_belongs_to_a_call_before_it() {
        let call = |id: &str| {
            format!(
                r#"{{"role": "assistant", "tool_calls": [{{{id}"function": {{"name": "f", "arguments": "{{}}"}}}}]}}"#
            )
        };
        let result = |id: &str| format!(r#"{{"role": "tool", {id}"content": "x"}}"#);
        let (called, called_without_id) = (call(r#""id": "7", "#), call(""));
        let [fits, other, null, empty] =
            ["\"7\"", "\"8\"", "null", "\"\""].map(|id| result(&format!("\"tool_call_id\": {id}, ")));
        let without_id = result("");
        let talk = |messages: &[&String]| {
            let messages: Vec<&str> = messages.iter().map(|message| message.as_str()).collect();
            of(&format!("[{}]", messages.join(",")))
        };
        assert_eq!(talk(&[&called, &fits, &fits]).map(|messages| messages.len()), Ok(3));
        for result in [&without_id, &null, &empty] {
            assert!(talk(&[&called, result]).is_ok() && talk(&[result]).is_ok(), "{result}");
        }
        assert!(talk(&[&called_without_id, &other]).is_ok());
        for (messages, index) in [(&[&called, &other][..], 1), (&[&other][..], 0), (&[&fits, &called][..], 0)] {
            match talk(messages) {
                Err(ConversationError { field, why }) => {
                    assert_eq!(field, format!("messages[{index}].tool_call_id"));
                    assert!(why.contains("must be a response to a preceding message with 'tool_calls'"), "{why}");
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn texts_parts_and_roles_become_messages() {
        let text = r#"[{"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null}]"#;
        let expected =
            [Message::new(Role::System, "be brief"), Message::new(Role::User, "ab"), Message::new(Role::Assistant, "")];
        assert_eq!(of(text).unwrap(), expected);
        for wrong in [
            "[]",
            r#"[{"role": "function", "content": "x"}]"#,
            r#"[{"role": "user"}]"#,
            r#"[{"role": "system", "content": null}, {"role": "user", "content": "x"}]"#,
            r#"[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]"#,
        ] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
