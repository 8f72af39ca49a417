//! Prompts: turns text and conversations into tokens with the tokenizer and chat template of a plan, and checks their length.

use crate::error::{GenerateError, PromptError};
use crate::grammar::GrammarCompiler;
use crate::plan_file::PlanFile;
use crate::text::{ChatTemplate, Message, SpecialTokens, TextTokenizer};
use hpp_schema::{ModelKind, Plan};

/// Turns text and conversations into tokens.
#[derive(Default)]
pub struct PromptEncoder {
    /// The model's tokenizer, if it has one.
    pub tokenizer: Option<TextTokenizer>,
    /// The model's chat template, if it has one and the caller requested it.
    pub template: Option<ChatTemplate>,
}

impl PromptEncoder {
    /// Opens the tokenizer that the plan names and, if `with_template`, its chat template.
    pub fn open(plan: &PlanFile, with_template: bool) -> Result<Self, GenerateError> {
        let Some(generation) = &plan.plan.generation else { return Ok(Self::default()) };
        let path = |file: &Option<String>| file.as_ref().map(|file| plan.resolve(file));
        let tokenizer = path(&generation.tokenizer).map(|path| TextTokenizer::open(&path)).transpose()?;
        let mut template = None;
        if with_template {
            let (file, config) = (path(&generation.chat_template), path(&generation.tokenizer_config));
            template = ChatTemplate::open(file.as_deref(), config.as_deref())?;
        }
        Ok(Self { tokenizer, template })
    }

    /// The tokenizer, or [`PromptError::NoTokenizer`].
    pub fn tokenizer(&self) -> Result<&TextTokenizer, PromptError> {
        self.tokenizer.as_ref().ok_or(PromptError::NoTokenizer)
    }

    /// Compiles grammars for the tokenizer, if there is one. `ends` are the tokens that end a text.
    pub fn grammars(&self, ends: &[u32]) -> Option<GrammarCompiler> {
        self.tokenizer.as_ref().map(|tokenizer| GrammarCompiler::new(tokenizer.clone(), ends))
    }

    /// The tokens of a text, with the special tokens that the tokenizer adds.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        Ok(self.tokenizer()?.encode(text, SpecialTokens::Add)?)
    }

    /// The tokens of a conversation, rendered by the chat template.
    pub fn encode_conversation(&self, messages: &[Message]) -> Result<Vec<u32>, GenerateError> {
        self.encode_with_tools(messages, &[])
    }

    /// Like [`encode_conversation`](Self::encode_conversation), but for a model that may call these tools, which are JSON as in OpenAI's
    /// API.
    pub fn encode_with_tools(
        &self,
        messages: &[Message],
        tools: &[serde_json::Value],
    ) -> Result<Vec<u32>, GenerateError> {
        self.encode_rendered(&self.render_with_tools(messages, tools)?)
    }

    /// The text of a conversation with a model that may call these tools, as the chat template renders it.
    ///
    /// # Errors
    /// There is no template, or it fails.
    pub fn render_with_tools(
        &self,
        messages: &[Message],
        tools: &[serde_json::Value],
    ) -> Result<String, GenerateError> {
        let template = self.template.as_ref().ok_or(PromptError::NoTemplate)?;
        Ok(template.render_with_tools(messages, tools)?)
    }

    /// The tokens of a text that the chat template has rendered.
    ///
    /// # Errors
    /// There is no tokenizer, or it fails.
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        Ok(self.tokenizer()?.encode(text, SpecialTokens::Omit)?)
    }
}

/// Refuses a prompt that is empty or longer than the context.
pub fn check_prompt(prompt: &[u32], context: u64) -> Result<(), PromptError> {
    match prompt.len() {
        0 => Err(PromptError::Empty),
        tokens if tokens as u64 > context => Err(PromptError::TooLong { tokens, context, most: None }),
        _ => Ok(()),
    }
}

/// Refuses a plan whose model generates no text.
pub fn check_language_model(plan: &Plan) -> Result<(), PromptError> {
    match plan.model.kind {
        ModelKind::SingleRun => Err(PromptError::NotALanguageModel { why: plan.model.no_text.clone() }),
        ModelKind::Decoder | ModelKind::DecoderWithoutCache => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_must_have_tokens_and_fit() {
        assert_eq!(check_prompt(&[], 8), Err(PromptError::Empty));
        assert_eq!(check_prompt(&[1; 9], 8), Err(PromptError::TooLong { tokens: 9, context: 8, most: None }));
        assert_eq!(check_prompt(&[1; 8], 8), Ok(()));
    }

    #[test]
    fn without_files_text_and_conversations_are_errors() {
        let encoder = PromptEncoder::default();
        assert!(matches!(encoder.encode_text("x"), Err(GenerateError::Prompt(PromptError::NoTokenizer))));
        assert!(matches!(encoder.encode_conversation(&[]), Err(GenerateError::Prompt(PromptError::NoTemplate))));
    }
}
