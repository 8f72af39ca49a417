//! Turns prompts into requests: turns text into tokens, and takes settings that a prompt lacks from the command line.

use crate::cli::AnswerArgs;
use crate::job_files::{Job, OneOrMany};
use hpp_generate::grammar::{Grammar, GrammarCompiler, GrammarError, GrammarSource};
use hpp_generate::sampling::SamplingMethod;
use hpp_generate::text::{Message, Role, TextTokenizer, conversation};
use hpp_generate::{GenerateError, GenerationRequest, PlanFile, PromptEncoder, PromptError, check_prompt};
use hpp_schema::SamplingDefaults;

/// Makes requests for one plan.
pub struct RequestMaker {
    encoder: PromptEncoder,
    defaults: AnswerArgs,
    authors: SamplingDefaults,
    eos_token_ids: Vec<u32>,
    context: u64,
    grammars: Option<GrammarCompiler>,
    /// The grammar for prompts without a `response_format`.
    grammar: Option<Grammar>,
}

impl RequestMaker {
    /// Opens the plan's tokenizer and chat template. `defaults` are the settings for prompts that do not give their own.
    pub fn open(plan: &PlanFile, defaults: &AnswerArgs, context: u64) -> Result<Self, GenerateError> {
        let generation = plan.plan.generation.clone().unwrap_or_default();
        let encoder = PromptEncoder::open(plan, true)?;
        Ok(Self {
            grammars: encoder.grammars(&generation.eos_token_ids),
            grammar: None,
            encoder,
            defaults: defaults.clone(),
            authors: generation.sampling,
            eos_token_ids: generation.eos_token_ids,
            context,
        })
    }

    /// Sets the grammar for prompts without a `response_format`.
    pub fn follow(mut self, source: Option<&GrammarSource>) -> Result<Self, GenerateError> {
        self.grammar = source.map(|source| self.compile(source)).transpose()?;
        Ok(self)
    }

    fn compile(&self, source: &GrammarSource) -> Result<Grammar, GenerateError> {
        Ok(self.grammars.as_ref().ok_or(PromptError::NoTokenizer)?.compile(source)?)
    }

    /// Whether prompts without settings of their own get the most likely tokens.
    pub fn is_greedy(&self) -> bool {
        self.defaults.sampling.overrides().resolve(&self.authors).choice == SamplingMethod::Greedy
    }

    /// The tokenizer, if the plan has one.
    pub fn tokenizer(&self) -> Option<TextTokenizer> {
        self.encoder.tokenizer.clone()
    }

    /// The plan's tokenizer and chat template.
    pub fn encoder(&self) -> &PromptEncoder {
        &self.encoder
    }

    /// The request of a prompt.
    pub fn request(&self, job: Job) -> Result<GenerationRequest, GenerateError> {
        let sampling = job.sampling().or(self.defaults.sampling.overrides()).resolve(&self.authors);
        let ignore_eos = job.ignore_eos.unwrap_or(self.defaults.ignore_eos);
        let max_new = job.max_new.map_or(self.defaults.max_new, |tokens| u64::try_from(tokens).ok());
        let stop = job.stop.clone().map_or(self.defaults.stop.clone(), OneOrMany::into_vec);
        if !stop.is_empty() {
            self.encoder.tokenizer()?;
        }
        let grammar = match job.response_format() {
            Ok(None) => self.grammar.clone(),
            Ok(Some(format)) => format.grammar().map(|source| self.compile(&source)).transpose()?,
            Err(error) => return Err(GrammarError::Schema(error.to_string()).into()),
        };
        let prompt = self.tokens(job)?;
        check_prompt(&prompt, self.context)?;
        Ok(GenerationRequest {
            prompt,
            max_new_tokens: max_new.unwrap_or(u64::MAX),
            eos_token_ids: if ignore_eos { vec![] } else { self.eos_token_ids.clone() },
            stop,
            sampling,
            grammar,
            visible_tokens: vec![],
            prompt_logits: false,
        })
    }

    fn tokens(&self, job: Job) -> Result<Vec<u32>, GenerateError> {
        if let Some(tokens) = job.tokens {
            return Ok(tokens);
        }
        if let Some(messages) = job.messages {
            let messages = conversation(&messages)?;
            let has_system = messages.iter().any(|message| message.role == Role::System);
            let system = self.defaults.system.as_ref().filter(|_| !has_system);
            let system = system.map(|text| Message::new(Role::System, text.as_str()));
            let messages: Vec<Message> = system.into_iter().chain(messages).collect();
            return self.encoder.encode_conversation(&messages);
        }
        let text = job.prompt.ok_or(PromptError::Empty)?;
        let system = job.system.or_else(|| self.defaults.system.clone());
        if !job.chat.unwrap_or(self.defaults.chat || system.is_some()) {
            return self.encoder.encode_text(&text);
        }
        let system = system.map(|text| Message::new(Role::System, text));
        let messages: Vec<Message> = system.into_iter().chain([Message::new(Role::User, text)]).collect();
        self.encoder.encode_conversation(&messages)
    }
}
