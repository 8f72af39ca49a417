//! A model that is served: turns requests into tokens and submits them to the thread of its engine.

use crate::engine_pool::{EnginePool, EngineReport};
use crate::engine_thread::{CacheHints, Client, EngineTask, GenerateTask, RequestEvent, Submission};
use crate::error::ApiError;
use crate::weight_placement::WeightPlacement;
use hpp_generate::grammar::{Grammar, GrammarCompiler, GrammarSource};
use hpp_generate::sampling::SamplingOverrides;
use hpp_generate::text::tools::ToolFormat;
use hpp_generate::text::{Message, TextTokenizer};
use hpp_generate::{GenerateError, GenerationRequest, PromptEncoder, PromptError, check_prompt};
use hpp_schema::SamplingDefaults;
use serde_json::Value;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Longest text, in bytes, that is tokenized even if it may not fit the context.
const LONGEST_TEXT: usize = 1 << 20;

/// The settings of a model.
pub struct ModelSettings {
    /// The name in requests.
    pub name: String,
    /// Tokenizer and chat template.
    pub encoder: PromptEncoder,
    /// Recommended sampling settings.
    pub sampling: SamplingDefaults,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// Tokens of a sequence, prompt and answer together.
    pub context: u64,
    /// Where the plan wants its weights.
    pub placement: Vec<WeightPlacement>,
    /// Whether the model gives scores for each token of a pass, not for the last one only.
    pub scores_all_positions: bool,
    /// Whether the model has hidden states as an output. Embeddings are made from them.
    pub gives_hidden_states: bool,
    /// Numbers of a hidden state, if the model declares it.
    pub hidden_size: Option<u64>,
}

/// A model with its engine.
pub struct ServedModel {
    settings: ModelSettings,
    grammars: Option<GrammarCompiler>,
    pool: EnginePool,
    /// The engine's index in the pool.
    engine: usize,
    /// Seconds since 1970 when the server started.
    created: u64,
}

/// The options of a request.
#[derive(Clone, Debug, Default)]
pub struct RequestOptions {
    /// Most tokens to generate.
    pub max_tokens: Option<u64>,
    /// Texts that end the answer.
    pub stop: Vec<String>,
    /// How tokens are chosen.
    pub sampling: SamplingOverrides,
    /// Whether to continue after the tokens that end a text.
    pub ignore_eos: bool,
    /// Most likely tokens to report with each token.
    pub top_logprobs: Option<usize>,
    /// Time limit.
    pub timeout: Option<Duration>,
    /// The client's hints about states.
    pub hints: CacheHints,
    /// The grammar of the answer, if it is restricted.
    pub grammar: Option<Grammar>,
    /// Special tokens whose names are part of the text.
    pub visible_tokens: Vec<u32>,
    /// Whether to report probabilities of the prompt's tokens too.
    pub scores_prompt: bool,
}

impl ServedModel {
    /// A model with the engine of this index in the pool.
    pub fn new(settings: ModelSettings, pool: EnginePool, engine: usize) -> ServedModel {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let grammars = settings.encoder.grammars(&settings.eos_token_ids);
        ServedModel { settings, grammars, pool, engine, created }
    }

    /// Refuses a number of dimensions that its embeddings do not have, as far as that is known before one is computed.
    pub fn check_dimensions(&self, asked: Option<usize>) -> Result<(), ApiError> {
        match (asked, self.settings.hidden_size) {
            (Some(asked), Some(own)) if asked as u64 != own => Err(ApiError::wrong_dimensions(asked, own)),
            _ => Ok(()),
        }
    }

    /// The name in requests.
    pub fn name(&self) -> &str {
        &self.settings.name
    }

    /// Seconds since 1970 when the server started.
    pub fn created(&self) -> u64 {
        self.created
    }

    /// Tokens of a sequence.
    pub fn context(&self) -> u64 {
        self.settings.context
    }

    /// Whether its engine is loaded.
    pub fn report(&self) -> EngineReport {
        self.pool.report(self.engine)
    }

    /// Most requests that may wait for it.
    pub fn queue_limit(&self) -> usize {
        self.pool.queue_limit()
    }

    /// Where the plan wants its weights. They lie there unless a device is not available.
    pub fn planned_placement(&self) -> &[WeightPlacement] {
        &self.settings.placement
    }

    /// Its tokenizer.
    pub fn tokenizer(&self) -> Result<&TextTokenizer, ApiError> {
        self.settings.encoder.tokenizer().map_err(|error| ApiError::Invalid { message: error.to_string(), param: None })
    }

    /// The tokens of a text. Unlike [`encode_text`](Self::encode_text), it takes texts of up to [`LONGEST_TEXT`] bytes whether or not they fit the
    /// context.
    ///
    /// # Errors
    /// It has more than [`LONGEST_TEXT`] bytes and does not fit the context.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, ApiError> {
        if text.len() > LONGEST_TEXT {
            self.check_length(text.len())?;
        }
        Ok(self.settings.encoder.encode_text(text)?)
    }

    /// The tokens of a text to continue.
    ///
    /// # Errors
    /// It does not fit the context.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, ApiError> {
        self.check_length(text.len())?;
        Ok(self.settings.encoder.encode_text(text)?)
    }

    /// Refuses a text with more bytes than the longest tokens that fill the context. A tokenizer takes 200 times the bytes of a text, and minutes for
    /// the largest texts.
    fn check_length(&self, bytes: usize) -> Result<(), ApiError> {
        let Some(tokenizer) = &self.settings.encoder.tokenizer else { return Ok(()) };
        let context = self.settings.context;
        // Twice as many: composing characters (NFC) may make a text shorter.
        let longest = context.saturating_mul(2).saturating_mul(tokenizer.longest_token() as u64);
        if bytes as u64 <= longest {
            return Ok(());
        }
        let message = format!("the text has {bytes} bytes; a context of {context} tokens holds at most {longest}");
        Err(ApiError::Invalid { message, param: None })
    }

    /// The tokens of a conversation with a model that may call these tools.
    ///
    /// # Errors
    /// It does not fit the context, or the template fails.
    pub fn encode_conversation(&self, messages: &[Message], tools: &[Value]) -> Result<Vec<u32>, ApiError> {
        let encoder = &self.settings.encoder;
        self.check_length(messages.iter().map(|message| message.content.len()).sum())?;
        let text = encoder.render_with_tools(messages, tools)?;
        // The rendered text also has tools, calls, names and what the template adds to each message.
        self.check_length(text.len())?;
        Ok(encoder.encode_rendered(&text)?)
    }

    /// How the model writes tool calls.
    ///
    /// # Errors
    /// Its chat template takes no tools.
    pub fn tool_format(&self) -> Result<ToolFormat, ApiError> {
        let Some(template) = &self.settings.encoder.template else {
            return Err(ApiError::field("tools", format!("`tools`: {}", PromptError::NoTemplate)));
        };
        template
            .tool_format()
            .ok_or_else(|| ApiError::field("tools", "`tools`: the chat template of this model takes none"))
    }

    /// The special tokens that mark calls.
    pub fn tool_markers(&self, format: ToolFormat) -> Vec<u32> {
        let Some(tokenizer) = &self.settings.encoder.tokenizer else { return vec![] };
        format.markers().iter().filter_map(|marker| tokenizer.token_id(marker)).collect()
    }

    /// Compiles a grammar that the field `param` of a request gives. May take long.
    pub fn compile(&self, source: &GrammarSource, param: &'static str) -> Result<Grammar, ApiError> {
        let grammars = self.grammars.as_ref();
        let grammars = grammars.ok_or_else(|| ApiError::field(param, PromptError::NoTokenizer.to_string()))?;
        grammars.compile(source).map_err(|error| match GenerateError::from(error) {
            error if error.is_transient() => error.into(),
            error => ApiError::field(param, format!("`{param}`: {}", hpp_schema::error_line(&error))),
        })
    }

    /// The text of tokens.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, ApiError> {
        let failed = |error| ApiError::Invalid { message: hpp_schema::error_line(&error), param: None };
        self.tokenizer()?.decode(tokens).map_err(failed)
    }

    /// Checks that the tokenizer has all these tokens.
    pub fn check_known(&self, tokens: &[u32]) -> Result<(), ApiError> {
        let failed = |error| ApiError::Invalid { message: hpp_schema::error_line(&error), param: None };
        self.tokenizer()?.check_known(tokens).map_err(failed)
    }

    /// The bytes that one token adds to a text; for a special token, the bytes of its name.
    pub fn token_bytes(&self, token: u32) -> Vec<u8> {
        self.tokenizer().map_or_else(|_| vec![], |tokenizer| tokenizer.token_bytes(token))
    }

    /// The text that one token adds. Incomplete characters are replaced.
    pub fn token_text(&self, token: u32) -> String {
        String::from_utf8_lossy(&self.token_bytes(token)).into_owned()
    }

    /// Whether a token ends a text.
    pub fn ends_text(&self, token: u32) -> bool {
        self.settings.eos_token_ids.contains(&token)
    }

    /// Checks a request and turns it into one for the engine. The answer is cancelled when the receiver is dropped.
    ///
    /// # Errors
    /// The prompt does not fit the context, an option is out of range, stop texts are given to a model without a tokenizer, or scores of the prompt
    /// are wanted from a model that does not give them.
    pub fn prepare(
        &self,
        prompt: Vec<u32>,
        options: &RequestOptions,
    ) -> Result<(Submission, UnboundedReceiver<RequestEvent>), ApiError> {
        let settings = &self.settings;
        check_prompt(&prompt, settings.context)
            .map_err(|error| ApiError::Invalid { message: error.to_string(), param: None })?;
        if let Err((name, expected)) = options.sampling.check() {
            return Err(ApiError::field(name, format!("`{name}` must be {expected}")));
        }
        if options.scores_prompt && !settings.scores_all_positions {
            let why = "`echo` with `logprobs` needs scores for each token of the prompt, and this model gives those of the last token of a pass only: \
                       leave one of them out";
            return Err(ApiError::field("echo", why));
        }
        if !options.stop.is_empty() {
            self.tokenizer().map_err(|error| error.about("stop"))?;
        }
        let request = GenerationRequest {
            prompt,
            max_new_tokens: options.max_tokens.unwrap_or(u64::MAX),
            eos_token_ids: if options.ignore_eos { vec![] } else { settings.eos_token_ids.clone() },
            stop: options.stop.clone(),
            sampling: options.sampling.resolve(&settings.sampling),
            grammar: options.grammar.clone(),
            visible_tokens: options.visible_tokens.clone(),
            prompt_logits: options.scores_prompt,
        };
        let task = GenerateTask { request, top_logprobs: options.top_logprobs, hints: options.hints.clone() };
        Ok(submission(EngineTask::Generate(Box::new(task)), options.timeout))
    }

    /// Checks the tokens of a text and makes a request for its embedding.
    ///
    /// # Errors
    /// The model gives no hidden states, or the text does not fit the context.
    pub fn prepare_embedding(
        &self,
        tokens: Vec<u32>,
        timeout: Option<Duration>,
    ) -> Result<(Submission, UnboundedReceiver<RequestEvent>), ApiError> {
        if !self.settings.gives_hidden_states {
            return Err(ApiError::field(
                "model",
                format!(
                    "the model {:?} gives no hidden states, so it has no embeddings: export it with them (ONNX Runtime GenAI's \
                     builder: --extra_options include_hidden_states=true)",
                    self.settings.name
                ),
            ));
        }
        check_prompt(&tokens, self.settings.context).map_err(|error| ApiError::field("input", error.to_string()))?;
        Ok(submission(EngineTask::Embed(tokens), timeout))
    }

    /// Puts requests into the engine's queue, all of them or none.
    ///
    /// # Errors
    /// See [`EnginePool::submit`].
    pub async fn submit(&self, submissions: Vec<Submission>) -> Result<(), ApiError> {
        self.pool.submit(self.engine, submissions).await
    }

    /// Puts a request into the engine's queue as soon as the queue has room.
    ///
    /// # Errors
    /// See [`EnginePool::submit_when_free`].
    pub async fn submit_when_free(&self, submission: Submission) -> Result<(), ApiError> {
        self.pool.submit_when_free(self.engine, submission).await
    }
}

/// Makes a submission that arrives now, and the receiver of its events.
fn submission(task: EngineTask, timeout: Option<Duration>) -> (Submission, UnboundedReceiver<RequestEvent>) {
    let (events, receiver) = unbounded_channel();
    let arrived = Instant::now();
    let deadline = timeout.and_then(|timeout| arrived.checked_add(timeout));
    (Submission { task, client: Client { events, deadline, arrived } }, receiver)
}

#[cfg(test)]
pub(crate) mod tests;
