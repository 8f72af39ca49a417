//! Turns the prompts of a corpus into tokens.

use crate::error::ExecError;
use hpp_generate::text::{Message, Role};
use hpp_generate::{PlanFile, PromptEncoder};
use hpp_schema::error_line;
use hpp_schema::probe::{self, Prompt, PromptContent};

/// The tokenizer and chat template of a model, if the prompts need them.
pub(in crate::command::probe) struct CorpusEncoder {
    encoder: PromptEncoder,
}

impl CorpusEncoder {
    /// Opens the files that these prompts need. Prompts of tokens need none.
    pub fn open(plan: &PlanFile, prompts: &[Prompt]) -> Result<Self, ExecError> {
        let mut contents = prompts.iter().map(|prompt| &prompt.content);
        let needs_template = contents.clone().any(|content| matches!(content, PromptContent::Messages(_)));
        let only_tokens = contents.all(|content| matches!(content, PromptContent::Tokens(_)));
        let encoder = if only_tokens { PromptEncoder::default() } else { PromptEncoder::open(plan, needs_template)? };
        Ok(CorpusEncoder { encoder })
    }

    /// The prompt's tokens: at least one, and few enough for `new_tokens` more in the context. Otherwise the reason.
    pub fn tokens(&self, prompt: &Prompt, new_tokens: u64, context: u64) -> Result<Vec<u32>, String> {
        let tokens = match &prompt.content {
            PromptContent::Tokens(tokens) => tokens.clone(),
            PromptContent::Text(text) => self.encoder.encode_text(text).map_err(|error| error_line(&error))?,
            PromptContent::Messages(messages) => {
                let messages: Vec<Message> = messages.iter().map(message).collect::<Result<_, _>>()?;
                self.encoder.encode_conversation(&messages).map_err(|error| error_line(&error))?
            }
        };
        match tokens.len() as u64 {
            0 => Err("it has no tokens".into()),
            n if n.saturating_add(new_tokens) <= context => Ok(tokens),
            n if new_tokens == 0 => Err(format!("its {n} tokens are more than the context of {context}")),
            n => Err(format!("its {n} tokens and {new_tokens} generated ones are more than the context of {context}")),
        }
    }
}

fn message(message: &probe::ChatTurn) -> Result<Message, String> {
    let role = match message.role.as_str() {
        "system" => Role::System,
        "user" => Role::User,
        "assistant" => Role::Assistant,
        other => return Err(format!("the role {other:?} is none of system, user and assistant")),
    };
    Ok(Message::new(role, message.content.clone()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn corpus() -> CorpusEncoder {
        CorpusEncoder { encoder: PromptEncoder::default() }
    }

    fn prompt(content: PromptContent) -> Prompt {
        Prompt { line: 1, content }
    }

    #[test]
    fn a_prompt_must_leave_room_for_the_generated_tokens() {
        let three = prompt(PromptContent::Tokens(vec![1, 2, 3]));
        assert_eq!(corpus().tokens(&three, 5, 8).unwrap(), [1, 2, 3]);
        assert!(corpus().tokens(&three, 6, 8).unwrap_err().contains("3 tokens and 6 generated"));
        assert!(corpus().tokens(&three, 0, 2).unwrap_err().contains("more than the context of 2"));
        assert!(corpus().tokens(&three, u64::MAX, 8).is_err());
        assert!(corpus().tokens(&prompt(PromptContent::Tokens(vec![])), 0, 8).unwrap_err().contains("no tokens"));
    }

    #[test]
    fn text_needs_a_tokenizer_and_messages_known_roles() {
        let text = prompt(PromptContent::Text("x".into()));
        assert!(corpus().tokens(&text, 0, 8).unwrap_err().contains("no tokenizer"));
        let message = |role: &str| probe::ChatTurn { role: role.into(), content: "x".into() };
        let messages = |role: &str| prompt(PromptContent::Messages(vec![message(role)]));
        assert!(corpus().tokens(&messages("tool"), 0, 8).unwrap_err().contains("\"tool\""));
        assert!(corpus().tokens(&messages("user"), 0, 8).unwrap_err().contains("no chat template"));
    }
}
