//! Routes, API keys, limits and shutdown.

use crate::answer::{AnswerChoice, Answers, ApiFormat};
use crate::connections::{ConnectionLimits, PeerAddress, serve_connections};
use crate::engine_pool::EnginePool;
use crate::engine_thread::RequestEvent;
use crate::error::{ApiError, ServeError};
use crate::host_check::HostCheck;
use crate::json_body::{BodyRoom, JsonBody};
use crate::metrics::Metrics;
use crate::model::{RequestOptions, ServedModel};
use crate::openai::{self, ChatRequest, CompletionRequest, EmbeddingRequest, OnePrompt, Settings};
use crate::page::page;
use crate::rate_limit::{RateClient, RateLimit};
use axum::extract::{DefaultBodyLimit, FromRef, MatchedPath, Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use hpp_generate::text::tools::ToolCallParser;
use serde::Deserialize;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tower_http::cors::{Any, CorsLayer};

/// Most embeddings of one request that are in the queue at a time.
const EMBEDDINGS_AT_ONCE: usize = 2;
/// Threads for tokenizers, templates and grammars. More would only use more memory at a time.
const TEXT_THREADS: usize = 4;

/// How to serve.
#[derive(Clone, Debug)]
pub struct ServeSettings {
    /// Where to listen.
    pub address: SocketAddr,
    /// API keys. A request must send one of them, unless there are none.
    pub api_keys: Vec<String>,
    /// Largest request, bytes.
    pub max_body: usize,
    /// Time limit of requests that give none. Requests cannot ask for a longer one.
    pub timeout: Option<Duration>,
    /// Origins whose pages may use this server from a browser.
    pub cors_origins: Vec<String>,
    /// Names of this server besides those of the loopback interface. If the server listens on the loopback interface without keys, it refuses
    /// requests to other names.
    pub allowed_hosts: Vec<String>,
    /// Limits of connections.
    pub connections: ConnectionLimits,
    /// Most requests per minute of each API key, or of each address if there are no keys. Requests that only read the server's state do not count.
    pub rate_limit: Option<u32>,
    /// Time that requests have to finish after a shutdown was requested.
    pub grace: Duration,
}

/// Ends a server from another thread. Cheap to clone.
#[derive(Clone, Default)]
pub struct Shutdown {
    requested: Arc<Notify>,
    /// Makes engines end their requests.
    stop: Arc<AtomicBool>,
}

impl Shutdown {
    /// Stops taking requests; those in progress have [`ServeSettings::grace`] to finish.
    pub fn request(&self) {
        self.requested.notify_one();
    }

    /// The flag that engines obey.
    pub fn stop_flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop)
    }
}

/// The state that handlers of requests share.
pub(crate) struct App {
    models: Vec<Arc<ServedModel>>,
    metrics: Metrics,
    /// The memory for bodies.
    bodies: BodyRoom,
    hosts: HostCheck,
    rate_limit: Option<RateLimit>,
    /// How to serve.
    pub settings: ServeSettings,
}

type SharedApp = Arc<App>;

impl FromRef<SharedApp> for BodyRoom {
    fn from_ref(app: &SharedApp) -> Self {
        app.bodies.clone()
    }
}

/// Serves the models of a pool until a shutdown is requested and all requests have ended. Calls `on_ready` with the address when it listens.
pub fn serve(
    models: Vec<ServedModel>,
    pool: EnginePool,
    metrics: Metrics,
    settings: ServeSettings,
    shutdown: &Shutdown,
    on_ready: impl FnOnce(SocketAddr),
) -> Result<(), ServeError> {
    let cors = cors(&settings.cors_origins)?;
    let grace = settings.grace;
    let hosts = HostCheck::new(settings.address.ip(), !settings.api_keys.is_empty(), &settings.allowed_hosts);
    let (bodies, limits) = (BodyRoom::new(settings.max_body, settings.connections.body), settings.connections);
    let models = models.into_iter().map(Arc::new).collect();
    let rate_limit = settings.rate_limit.map(RateLimit::new);
    let app = Arc::new(App { models, metrics, bodies, hosts, rate_limit, settings });
    let router = router(&app).layer(cors);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .max_blocking_threads(TEXT_THREADS)
        .enable_all()
        .build()?;
    let address = app.settings.address;
    drop(app);
    let served: Result<(), ServeError> = runtime.block_on(async {
        let listen = TcpListener::bind(address).await;
        let listener = listen.map_err(|source| ServeError::Listen { address, source })?;
        on_ready(listener.local_addr()?);
        let (requested, stop) = (Arc::clone(&shutdown.requested), shutdown.stop_flag());
        let is_requested = async move {
            requested.notified().await;
            tokio::spawn(async move {
                tokio::time::sleep(grace).await;
                stop.store(true, Ordering::SeqCst);
            });
        };
        serve_connections(listener, router, limits, is_requested).await;
        Ok(())
    });
    shutdown.stop.store(true, Ordering::SeqCst);
    // Drops the tasks of remaining connections, which ends their requests.
    runtime.shutdown_timeout(Duration::from_secs(1));
    pool.close();
    served
}

fn router(app: &SharedApp) -> Router {
    let with_key = Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(complete))
        .route("/v1/embeddings", post(embed))
        .route("/v1/models", get(list_models))
        .route("/v1/models/{*name}", get(one_model))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/metrics", get(metrics))
        .fallback(|| async { ApiError::NotFound })
        .method_not_allowed_fallback(|| async { ApiError::WrongMethod })
        .layer(from_fn_with_state(Arc::clone(app), check_client));
    Router::new()
        .route("/", get(page))
        .route("/health", get(|| async { Json(json!({"status": "ok"})) }))
        .method_not_allowed_fallback(|| async { ApiError::WrongMethod })
        .merge(with_key)
        .layer(DefaultBodyLimit::max(app.settings.max_body))
        .layer(from_fn_with_state(Arc::clone(app), check_host))
        .layer(from_fn_with_state(Arc::clone(app), count_response))
        .with_state(Arc::clone(app))
}

fn cors(origins: &[String]) -> Result<CorsLayer, ServeError> {
    let layer = CorsLayer::new();
    if origins.iter().any(|origin| origin == "*") {
        return Ok(layer.allow_origin(Any).allow_headers(Any).allow_methods(Any));
    }
    let values: Result<Vec<HeaderValue>, ServeError> =
        origins.iter().map(|origin| origin.parse().map_err(|_| ServeError::Origin(origin.clone()))).collect();
    let values = values?;
    Ok(if values.is_empty() { layer } else { layer.allow_origin(values).allow_headers(Any).allow_methods(Any) })
}

/// Counts each response, refusals included.
async fn count_response(State(app): State<SharedApp>, request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().cloned();
    let response = next.run(request).await;
    let path = route.as_ref().map_or("other", MatchedPath::as_str);
    app.metrics.responded(path, response.status().as_u16());
    response
}

/// Refuses requests to names that are not this server's.
async fn check_host(State(app): State<SharedApp>, request: Request, next: Next) -> Response {
    match app.hosts.check(request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

/// Refuses requests without a key of this server, and those of clients that have sent too many.
async fn check_client(State(app): State<SharedApp>, request: Request, next: Next) -> Response {
    match app.check_client(&request) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn given_key(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let bearer =
        bearer.and_then(|value| value.split_once(' ')).filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
    bearer.map(|(_, key)| key.trim()).or_else(|| headers.get("x-api-key").and_then(|value| value.to_str().ok()))
}

/// Compares two keys in a time that does not depend on where they differ.
fn is_equal(a: &str, b: &str) -> bool {
    a.len() == b.len() && a.bytes().zip(b.bytes()).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

impl App {
    fn check_client(&self, request: &Request) -> Result<(), ApiError> {
        let keys = &self.settings.api_keys;
        let given = given_key(request.headers());
        let key = keys.iter().find(|key| given.is_some_and(|given| is_equal(key, given)));
        if key.is_none() && !keys.is_empty() {
            return Err(ApiError::Unauthorized);
        }
        let Some(limit) = self.rate_limit.as_ref().filter(|_| request.method() == Method::POST) else { return Ok(()) };
        let address = request.extensions().get::<PeerAddress>().and_then(|peer| peer.0);
        limit.take(key.cloned().map_or_else(|| RateClient::at(address), RateClient::Key), Instant::now())
    }

    fn model(&self, name: Option<&str>) -> Result<Arc<ServedModel>, ApiError> {
        let found = match (name, self.models.as_slice()) {
            (None, [only]) => Some(only),
            (None, _) => return Err(ApiError::field("model", "`model` is missing; GET /v1/models lists them")),
            (Some(name), models) => models.iter().find(|model| model.name() == name),
        };
        found.cloned().ok_or_else(|| ApiError::NoModel {
            asked: name.unwrap_or_default().to_owned(),
            known: self.models.iter().map(|model| model.name().to_owned()).collect(),
        })
    }

    fn question(&self, settings: &Settings, top_logprobs: Option<usize>) -> Result<Question, ApiError> {
        Ok(Question {
            model: self.model(settings.model.as_deref())?,
            options: self.limited(settings.options(top_logprobs)?),
            answers: settings.answers()?,
            streams: settings.streams(),
            includes_usage: settings.includes_usage(),
            calls: None,
        })
    }

    /// The options with the server's time limit applied.
    fn limited(&self, options: RequestOptions) -> RequestOptions {
        RequestOptions { timeout: self.time_limit(options.timeout), ..options }
    }

    /// The time limit of a request that asks for `asked`.
    fn time_limit(&self, asked: Option<Duration>) -> Option<Duration> {
        match (asked, self.settings.timeout) {
            (Some(asked), Some(most)) => Some(asked.min(most)),
            (asked, most) => asked.or(most),
        }
    }
}

/// Runs tokenizer or template work, which may take long, on a thread for blocking work instead of those that serve connections.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let failed = |_| ApiError::Failed("the work on the text was interrupted".to_owned());
    tokio::task::spawn_blocking(work).await.map_err(failed)?
}

async fn chat(State(app): State<SharedApp>, JsonBody { value, room }: JsonBody) -> Result<Response, ApiError> {
    let request = ChatRequest::read(&value)?;
    drop(value);
    let mut question = app.question(&request.settings, request.top_logprobs()?)?;
    question.check_count(1)?;
    let (conversation, text_grammar) = (request.conversation()?, request.settings.grammar()?);
    let model = Arc::clone(&question.model);
    let (mut grammar, mut definitions) = (text_grammar.map(|source| (source, "response_format")), vec![]);
    if let Some(tools) = request.settings.tools()? {
        let format = model.tool_format()?;
        grammar = tools.grammar(format, grammar.map(|(source, _)| source));
        question.options.visible_tokens = model.tool_markers(format);
        question.calls = Some(ToolCallParser::new(format, tools.names()));
        definitions = tools.definitions;
    }
    let encoded = blocking(move || {
        let _room = room;
        let grammar = grammar.map(|(source, param)| model.compile(&source, param)).transpose()?;
        let prompt = model.encode_conversation(&conversation, &definitions);
        Ok((prompt.map_err(|error| error.about("messages"))?, grammar))
    });
    let (prompt, grammar) = encoded.await?;
    question.options.grammar = grammar;
    question.answer(ApiFormat::Chat, vec![(prompt, String::new())]).await
}

async fn complete(State(app): State<SharedApp>, JsonBody { value, room }: JsonBody) -> Result<Response, ApiError> {
    let request = CompletionRequest::read(&value)?;
    drop(value);
    let mut question = app.question(&request.settings, request.top_logprobs()?)?;
    let echoes = request.echo.unwrap_or(false);
    let (prompts, grammar) = (request.prompts()?, request.settings.grammar()?);
    question.check_count(prompts.len())?;
    if request.settings.tools()?.is_some() {
        return Err(ApiError::field("tools", "`tools` are for /v1/chat/completions: leave them out"));
    }
    let model = Arc::clone(&question.model);
    let encoded = blocking(move || {
        let _room = room;
        let encode = |prompt: OnePrompt| match prompt {
            OnePrompt::Text(text) if text.is_empty() => Err(ApiError::field("prompt", "`prompt` is empty")),
            OnePrompt::Text(text) => Ok((model.encode_text(&text)?, if echoes { text } else { String::new() })),
            OnePrompt::Tokens(tokens) => {
                let text = if echoes { model.decode(&tokens)? } else { String::new() };
                Ok((tokens, text))
            }
        };
        let grammar = grammar.map(|source| model.compile(&source, "response_format")).transpose()?;
        let prompts = prompts.into_iter().map(encode).collect::<Result<Vec<_>, ApiError>>();
        Ok((prompts.map_err(|error| error.about("prompt"))?, grammar))
    });
    let (prompts, grammar) = encoded.await?;
    question.options.grammar = grammar;
    question.options.scores_prompt = request.scores_prompt();
    question.answer(ApiFormat::Text, prompts).await
}

/// Answers with the embeddings of texts: for each text the hidden state after its last token, scaled to length one.
async fn embed(State(app): State<SharedApp>, JsonBody { value, room }: JsonBody) -> Result<Json<Value>, ApiError> {
    let request = EmbeddingRequest::read(&value)?;
    drop(value);
    let model = app.model(request.model.as_deref())?;
    let inputs = request.inputs()?;
    model.check_dimensions(request.dimensions)?;
    let timeout = app.time_limit(openai::time_limit(request.timeout)?);
    let encoding = Arc::clone(&model);
    let encoded = blocking(move || {
        let _room = room;
        let encode = |input| match input {
            OnePrompt::Text(text) => encoding.encode_text(&text).map_err(|error| error.about("input")),
            OnePrompt::Tokens(tokens) => Ok(tokens),
        };
        inputs.into_iter().map(encode).collect::<Result<Vec<_>, ApiError>>()
    });
    let encoded = encoded.await?;
    let prompt_tokens = encoded.iter().map(Vec::len).sum::<usize>();
    let prepared = encoded.into_iter().map(|tokens| model.prepare_embedding(tokens, timeout));
    let (submissions, receivers): (Vec<_>, Vec<_>) = prepared.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    // A request may have more texts than the queue has places for it: further texts are submitted as others are answered.
    let (mut data, mut submissions) = (Vec::new(), submissions.into_iter());
    let at_once = EMBEDDINGS_AT_ONCE.min(model.queue_limit()).max(1);
    model.submit(submissions.by_ref().take(at_once).collect()).await?;
    for (index, mut events) in receivers.into_iter().enumerate() {
        let vector = loop {
            match events.recv().await {
                Some(RequestEvent::Embedding(vector)) => break vector,
                Some(RequestEvent::Failed(error)) => return Err(error.about("input")),
                Some(_) => {}
                None => return Err(ApiError::engine_gone()),
            }
        };
        if let Some(asked) = request.dimensions.filter(|asked| *asked != vector.len()) {
            return Err(ApiError::wrong_dimensions(asked, vector.len() as u64));
        }
        data.push(json!({"object": "embedding", "index": index, "embedding": request.encoding_format.write(&vector)}));
        if let Some(next) = submissions.next() {
            model.submit_when_free(next).await?;
        }
    }
    let usage = json!({"prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens});
    Ok(Json(json!({"object": "list", "data": data, "model": model.name(), "usage": usage})))
}

/// The common part of chat and text completions.
struct Question {
    model: Arc<ServedModel>,
    options: RequestOptions,
    /// Number of answers to each prompt.
    answers: u64,
    streams: bool,
    includes_usage: bool,
    /// Finds tool calls in the answers, if there are tools.
    calls: Option<ToolCallParser>,
}

impl Question {
    /// Refuses more answers than the queue can ever hold, before any work is done for them.
    fn check_count(&self, prompts: usize) -> Result<(), ApiError> {
        let (count, limit) =
            (prompts.saturating_mul(usize::try_from(self.answers).unwrap_or(usize::MAX)), self.model.queue_limit());
        let param = if self.answers > 1 { "n" } else { "prompt" };
        if count > limit { Err(ApiError::TooMany { count, limit, param }) } else { Ok(()) }
    }

    /// Submits each prompt once for each answer. A prompt is given as tokens, with the text that its answers begin with. Each answer has a seed of
    /// its own.
    async fn answer(self, format: ApiFormat, prompts: Vec<(Vec<u32>, String)>) -> Result<Response, ApiError> {
        let (mut submissions, mut choices) = (Vec::new(), Vec::new());
        for (prompt, echo) in prompts {
            for index in 0..self.answers {
                let mut options = self.options.clone();
                options.sampling.seed = options.sampling.seed.map(|seed| seed.wrapping_add(index));
                let (submission, events) =
                    self.model.prepare(prompt.clone(), &options).map_err(|error| error.about(format.prompt_field()))?;
                submissions.push(submission);
                let (echo, calls) = (echo.clone(), self.calls.clone());
                let reports_end_tokens = options.scores_prompt || options.ignore_eos;
                let has_logprobs = options.top_logprobs.is_some();
                choices.push(AnswerChoice { events, echo, calls, has_logprobs, reports_end_tokens });
            }
        }
        self.model.submit(submissions).await?;
        let answers = Answers::new(self.model, format, self.answers, choices);
        if self.streams { Ok(answers.stream(self.includes_usage)) } else { answers.whole().await }
    }
}

fn description(model: &ServedModel) -> Value {
    let report = model.report();
    json!({
        "id": model.name(),
        "object": "model",
        "created": model.created(),
        "owned_by": "hpp",
        "max_model_len": model.context(),
        "placement": report.placement.as_deref().unwrap_or(model.planned_placement()),
        "state": report.state.name(),
        "memory": {"host": report.needs.host, "devices": report.needs.devices},
        "error": report.error,
    })
}

async fn list_models(State(app): State<SharedApp>) -> Json<Value> {
    let data: Vec<Value> = app.models.iter().map(|model| description(model)).collect();
    Json(json!({"object": "list", "data": data}))
}

async fn one_model(State(app): State<SharedApp>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    Ok(Json(description(&*app.model(Some(&name))?)))
}

/// Text to turn into tokens.
#[derive(Deserialize)]
struct TokenizeRequest {
    model: Option<String>,
    content: String,
}

async fn tokenize(State(app): State<SharedApp>, JsonBody { value, room }: JsonBody) -> Result<Json<Value>, ApiError> {
    let request: TokenizeRequest = openai::read(&value)?;
    let model = app.model(request.model.as_deref())?;
    let encoded = blocking(move || {
        let _room = room;
        model.tokenize(&request.content)
    });
    let tokens = encoded.await.map_err(|error| error.about("content"))?;
    Ok(Json(json!({"tokens": tokens})))
}

/// Tokens to turn into text.
#[derive(Deserialize)]
struct DetokenizeRequest {
    model: Option<String>,
    tokens: Vec<u32>,
}

async fn detokenize(State(app): State<SharedApp>, JsonBody { value, room }: JsonBody) -> Result<Json<Value>, ApiError> {
    let request: DetokenizeRequest = openai::read(&value)?;
    let model = app.model(request.model.as_deref())?;
    let decoded = blocking(move || {
        let _room = room;
        model.check_known(&request.tokens)?;
        model.decode(&request.tokens)
    });
    let content = decoded.await.map_err(|error| error.about("tokens"))?;
    Ok(Json(json!({"content": content})))
}

async fn metrics(State(app): State<SharedApp>) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], app.metrics.to_text()).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_compared_whole() {
        assert!(is_equal("abc", "abc") && !is_equal("abc", "abd") && !is_equal("abc", "ab") && is_equal("", ""));
        let headers = |name: &'static str, value: &'static str| {
            HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_static(value))])
        };
        assert_eq!(given_key(&headers("authorization", "Bearer k")), Some("k"));
        assert_eq!(given_key(&headers("authorization", "Basic k")), None);
        assert_eq!(given_key(&headers("x-api-key", "k")), Some("k"));
        assert_eq!(given_key(&HeaderMap::new()), None);
    }
}
