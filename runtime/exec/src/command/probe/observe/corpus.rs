//! Prompts of a corpus as tokens, or why one cannot be used.

use crate::error::ExecError;
use crate::plan_file::PlanFile;
use crate::prompt::TextFiles;
use crate::text::{Around, Message, Role};
use hpp_schema::probe::{self, Prompt, PromptContent};

/// The tokenizer and chat template of a model, as far as prompts need them.
pub(in crate::command::probe) struct Corpus {
    files: TextFiles,
}

impl Corpus {
    /// Opens what these prompts need; models without text files still take tokens.
    pub fn open(plan: &PlanFile, prompts: &[Prompt]) -> Result<Self, ExecError> {
        let needs = |is: fn(&PromptContent) -> bool| prompts.iter().any(|prompt| is(&prompt.content));
        let template = needs(|content| matches!(content, PromptContent::Messages(_)));
        let text = template || needs(|content| matches!(content, PromptContent::Text(_)));
        let none = TextFiles { tokenizer: None, template: None };
        Ok(Corpus { files: if text { TextFiles::open(plan, template)? } else { none } })
    }

    /// The prompt's tokens, at least one and with room for `more` in a context of `context`; else the reason why not, for
    /// people.
    pub fn tokens(&self, prompt: &Prompt, more: u64, context: u64) -> Result<Vec<u32>, String> {
        let tokens = match &prompt.content {
            PromptContent::Tokens(tokens) => tokens.clone(),
            PromptContent::Text(text) => {
                let tokenizer = self.files.tokenizer().map_err(|error| error.to_string())?;
                tokenizer.encode(text, Around::SpecialTokens).map_err(|error| error.to_string())?
            }
            PromptContent::Messages(messages) => {
                let messages: Vec<Message> = messages.iter().map(message).collect::<Result<_, _>>()?;
                self.files.conversation(&messages).map_err(|error| hpp_schema::error_line(&error))?
            }
        };
        match tokens.len() as u64 {
            0 => Err("it has no tokens".into()),
            n if n.saturating_add(more) <= context => Ok(tokens),
            n if more == 0 => Err(format!("its {n} tokens are more than the context of {context}")),
            n => Err(format!("its {n} tokens and {more} generated ones are more than the context of {context}")),
        }
    }
}

fn message(message: &probe::Message) -> Result<Message, String> {
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

    fn corpus() -> Corpus {
        Corpus { files: TextFiles { tokenizer: None, template: None } }
    }

    fn prompt(content: PromptContent) -> Prompt {
        Prompt { line: 1, content }
    }

    #[test]
    fn a_prompt_leaves_room_for_what_is_generated() {
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
        let said = |role: &str| probe::Message { role: role.into(), content: "x".into() };
        let messages = |role: &str| prompt(PromptContent::Messages(vec![said(role)]));
        assert!(corpus().tokens(&messages("tool"), 0, 8).unwrap_err().contains("\"tool\""));
        assert!(corpus().tokens(&messages("user"), 0, 8).unwrap_err().contains("no chat template"));
    }
}
