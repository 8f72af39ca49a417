//! Answers in OpenAI's format: whole, or as a stream of server-sent events.

use crate::engine_thread::RequestEvent;
use crate::error::ApiError;
use crate::logprobs::{Scored, TokenLogprobs};
use crate::model::ServedModel;
use crate::offsets::TextOffsets;
use crate::openai::Usage;
use axum::Json;
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::StreamExt;
use futures_util::stream::{BoxStream, select_all, unfold};
use hpp_generate::text::tools::{AnswerPart, ToolCallParser};
use hpp_generate::{FinishReason, Generated};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::UnboundedReceiver;

/// Which of OpenAI's formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiFormat {
    /// Chat completions.
    Chat,
    /// Completions.
    Text,
}

/// One answer in progress.
pub struct AnswerChoice {
    /// Its events.
    pub events: UnboundedReceiver<RequestEvent>,
    /// The start of the answer: the prompt, if the request asks for it.
    pub echo: String,
    /// Finds tool calls in the answer, if there are tools.
    pub calls: Option<ToolCallParser>,
    /// Whether probabilities are reported.
    pub has_logprobs: bool,
    /// Whether the probability of an end token is reported: if end tokens do not end the answer (`ignore_eos`), or if the prompt's tokens are
    /// reported too, so that there is an entry for each token.
    pub reports_end_tokens: bool,
}

/// All answers to a request.
pub struct Answers {
    model: Arc<ServedModel>,
    format: ApiFormat,
    id: String,
    created: u64,
    /// Number of answers to each prompt.
    each: usize,
    choices: Vec<AnswerChoice>,
}

impl Answers {
    /// Answers with a new id. Each prompt has `each` of them, one after another in `choices`.
    pub fn new(model: Arc<ServedModel>, format: ApiFormat, each: u64, choices: Vec<AnswerChoice>) -> Self {
        let prefix = if format == ApiFormat::Chat { "chatcmpl" } else { "cmpl" };
        // The standard library's hasher has random keys, which make the id random.
        let id = format!("{prefix}-{:016x}", RandomState::new().hash_one(0));
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let each = usize::try_from(each).unwrap_or(usize::MAX);
        Self { model, format, id, created, each, choices }
    }

    /// Waits for all answers and returns them as one response.
    pub async fn whole(self) -> Result<Response, ApiError> {
        let Self { model, format, id, created, each, choices } = self;
        let (mut written, mut usages) = (Vec::new(), Vec::new());
        for (index, choice) in choices.into_iter().enumerate() {
            let AnswerChoice { mut events, echo, calls, has_logprobs, reports_end_tokens } = choice;
            let mut scores = Vec::new();
            let mut offsets = format.offsets(&model, &echo);
            let generated = loop {
                match events.recv().await {
                    Some(RequestEvent::PromptToken { id, logprobs }) => {
                        let offset = offsets.as_mut().map(|offsets| offsets.prompt_token(id));
                        scores.push(ReportedToken { id, offset, logprobs });
                    }
                    Some(RequestEvent::Token { id, logprobs })
                        if logprobs.is_some() && (reports_end_tokens || !model.ends_text(id)) =>
                    {
                        let offset = offsets.as_mut().map(|offsets| offsets.answer_token(id));
                        scores.push(ReportedToken { id, offset, logprobs });
                    }
                    Some(
                        RequestEvent::Started(_)
                        | RequestEvent::Token { .. }
                        | RequestEvent::Text(_)
                        | RequestEvent::Embedding(_),
                    ) => {}
                    Some(RequestEvent::Finished(generated)) => break *generated,
                    Some(RequestEvent::Failed(error)) => return Err(error.about(format.prompt_field())),
                    None => return Err(ApiError::engine_gone()),
                }
            };
            usages.push(Some(generated.usage));
            let text = echo + generated.text.as_deref().unwrap_or("");
            let logprobs = if has_logprobs { format.logprobs(&model, &scores) } else { Value::Null };
            let (message, has_calls) = message(text.clone(), calls);
            let finish = finish_reason(&generated, has_calls);
            written.push(match format {
                ApiFormat::Chat => json!({
                    "index": index,
                    "message": message,
                    "logprobs": logprobs,
                    "finish_reason": finish,
                }),
                ApiFormat::Text => json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}),
            });
        }
        let object = if format == ApiFormat::Chat { "chat.completion" } else { "text_completion" };
        let body = json!({
            "id": id,
            "object": object,
            "created": created,
            "model": model.name(),
            "choices": written,
            "usage": Usage::of(&usages, each),
        });
        Ok(Json(body).into_response())
    }

    /// Sends all answers as a stream, each token as it is generated.
    pub fn stream(self, includes_usage: bool) -> Response {
        let Self { model, format, id, created, each, choices } = self;
        let mut writer = ChunkWriter {
            model,
            format,
            id,
            created,
            each,
            includes_usage,
            usages: vec![None; choices.len()],
            unfinished: vec![true; choices.len()],
            calls: choices.iter().map(|choice| choice.calls.clone()).collect(),
            report_end_tokens: choices.iter().map(|choice| choice.reports_end_tokens).collect(),
            offsets: Vec::new(),
            ready: VecDeque::new(),
        };
        let mut sources: Vec<BoxStream<'static, (usize, RequestEvent)>> = Vec::new();
        for (index, AnswerChoice { events, echo, .. }) in choices.into_iter().enumerate() {
            writer.offsets.push(writer.format.offsets(&writer.model, &echo));
            writer.begin(index, &echo);
            let next = move |mut events: UnboundedReceiver<RequestEvent>| async move {
                events.recv().await.map(|event| ((index, event), events))
            };
            sources.push(unfold(events, next).boxed());
        }
        let state = (select_all(sources), writer, false);
        let chunks = unfold(state, |(mut events, mut writer, mut is_over)| async move {
            loop {
                if let Some(chunk) = writer.ready.pop_front() {
                    return Some((Ok::<_, Infallible>(chunk), (events, writer, is_over)));
                }
                if is_over {
                    return None;
                }
                match events.next().await {
                    Some((index, event)) => writer.event(index, event),
                    None => {
                        writer.end();
                        is_over = true;
                    }
                }
            }
        });
        Sse::new(chunks).keep_alive(KeepAlive::default()).into_response()
    }
}

/// Turns events into chunks of a stream.
struct ChunkWriter {
    model: Arc<ServedModel>,
    format: ApiFormat,
    id: String,
    created: u64,
    /// Number of answers to each prompt.
    each: usize,
    includes_usage: bool,
    /// For each answer, its token counts so far; `None` until it has started.
    usages: Vec<Option<hpp_generate::TokenUsage>>,
    /// For each answer, whether it is still open: neither its end nor an error was sent.
    unfinished: Vec<bool>,
    /// For each answer, the parser that finds tool calls.
    calls: Vec<Option<ToolCallParser>>,
    /// For each answer, whether the probability of an end token is reported.
    report_end_tokens: Vec<bool>,
    /// For each answer, the tracker of token offsets.
    offsets: Vec<Option<TextOffsets>>,
    /// Chunks to send.
    ready: VecDeque<SseEvent>,
}

impl ChunkWriter {
    fn begin(&mut self, index: usize, echo: &str) {
        match self.format {
            ApiFormat::Chat => {
                let delta = json!({"role": "assistant", "content": ""});
                self.chunk(json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]), None);
            }
            ApiFormat::Text if !echo.is_empty() => self.text(index, echo, Value::Null),
            ApiFormat::Text => {}
        }
    }

    fn event(&mut self, index: usize, event: RequestEvent) {
        if let (RequestEvent::Token { .. }, Some(usage)) = (&event, &mut self.usages[index]) {
            usage.completion_tokens += 1;
        }
        match event {
            RequestEvent::Started(usage) => self.usages[index] = Some(usage),
            RequestEvent::Token { logprobs: None, .. } | RequestEvent::Embedding(_) => {}
            RequestEvent::Token { id, .. } if self.model.ends_text(id) && !self.report_end_tokens[index] => {}
            RequestEvent::Token { id, logprobs } => {
                let offset = self.offsets[index].as_mut().map(|offsets| offsets.answer_token(id));
                self.token(index, ReportedToken { id, offset, logprobs });
            }
            RequestEvent::PromptToken { id, logprobs } => {
                let offset = self.offsets[index].as_mut().map(|offsets| offsets.prompt_token(id));
                self.token(index, ReportedToken { id, offset, logprobs });
            }
            RequestEvent::Text(text) => match &mut self.calls[index] {
                None => self.text(index, &text, Value::Null),
                Some(calls) => {
                    let before = calls.calls();
                    let parts = calls.push(&text);
                    self.parts(index, before, parts);
                }
            },
            RequestEvent::Finished(generated) => {
                self.unfinished[index] = false;
                self.usages[index] = Some(generated.usage);
                let found = self.calls[index].as_mut().map(|calls| (calls.calls(), calls.finish()));
                let has_calls = found.as_ref().is_some_and(|(calls, _)| *calls > 0);
                if let Some((calls, parts)) = found {
                    self.parts(index, calls, parts);
                }
                let finish = finish_reason(&generated, has_calls);
                let choice = match self.format {
                    ApiFormat::Chat => json!({"index": index, "delta": {}, "logprobs": null, "finish_reason": finish}),
                    ApiFormat::Text => json!({"index": index, "text": "", "logprobs": null, "finish_reason": finish}),
                };
                self.chunk(json!([choice]), None);
            }
            RequestEvent::Failed(error) => {
                self.unfinished[index] = false;
                self.send(&error.about(self.format.prompt_field()).to_json());
            }
        }
    }

    fn token(&mut self, index: usize, token: ReportedToken) {
        let logprobs = self.format.logprobs(&self.model, &[token]);
        self.text(index, "", logprobs);
    }

    /// Sends parts of an answer. `calls`: number of tool calls that the answer has had so far.
    fn parts(&mut self, index: usize, mut calls: usize, parts: Vec<AnswerPart>) {
        for part in parts {
            match part {
                AnswerPart::Text(text) => self.text(index, &text, Value::Null),
                AnswerPart::Call { name, arguments } => {
                    let mut call = tool_call(&name, &arguments);
                    call["index"] = json!(calls);
                    calls += 1;
                    let delta = json!({"tool_calls": [call]});
                    self.chunk(
                        json!([{"index": index, "delta": delta, "logprobs": null, "finish_reason": null}]),
                        None,
                    );
                }
            }
        }
    }

    fn text(&mut self, index: usize, text: &str, logprobs: Value) {
        let choice = match self.format {
            ApiFormat::Chat => {
                json!({"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": null})
            }
            ApiFormat::Text => json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": null}),
        };
        self.chunk(json!([choice]), None);
    }

    fn end(&mut self) {
        if self.unfinished.iter().any(|unfinished| *unfinished) {
            self.send(&ApiError::engine_gone().to_json());
        }
        if self.includes_usage {
            let usage = Usage::of(&self.usages, self.each);
            self.chunk(json!([]), Some(usage));
        }
        self.ready.push_back(SseEvent::default().data("[DONE]"));
    }

    fn chunk(&mut self, choices: Value, usage: Option<Usage>) {
        let object = if self.format == ApiFormat::Chat { "chat.completion.chunk" } else { "text_completion" };
        let mut chunk = json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model.name(),
            "choices": choices,
        });
        if self.includes_usage {
            chunk["usage"] = json!(usage);
        }
        self.send(&chunk);
    }

    fn send(&mut self, chunk: &Value) {
        self.ready.push_back(SseEvent::default().data(chunk.to_string()));
    }
}

/// A token whose probability is reported.
struct ReportedToken {
    id: u32,
    /// Where the token begins in the text; only in completions.
    offset: Option<usize>,
    /// The probabilities; the first token of a prompt has none.
    logprobs: Option<TokenLogprobs>,
}

impl ApiFormat {
    /// The field of a request that holds the prompt.
    pub fn prompt_field(self) -> &'static str {
        if self == ApiFormat::Chat { "messages" } else { "prompt" }
    }

    /// The tracker of token offsets for an answer that begins with `echo`. `None` if the format reports no offsets or the model has no tokenizer.
    fn offsets(self, model: &ServedModel, echo: &str) -> Option<TextOffsets> {
        (self == ApiFormat::Text).then(|| model.tokenizer().ok().map(|tokenizer| TextOffsets::new(tokenizer, echo)))?
    }

    /// Probabilities of tokens.
    fn logprobs(self, model: &ServedModel, tokens: &[ReportedToken]) -> Value {
        match self {
            ApiFormat::Chat => {
                let entry = |scored: &Scored| {
                    let bytes = model.token_bytes(scored.id);
                    json!({"token": String::from_utf8_lossy(&bytes), "logprob": scored.logprob, "bytes": bytes})
                };
                let content = tokens.iter().filter_map(|token| token.logprobs.as_ref()).map(|token| {
                    let mut chosen = entry(&token.chosen);
                    chosen["top_logprobs"] = token.top.iter().map(entry).collect();
                    chosen
                });
                json!({"content": content.collect::<Vec<Value>>(), "refusal": null})
            }
            ApiFormat::Text => {
                let top = |token: &TokenLogprobs| {
                    let mut entries = serde_json::Map::new();
                    for Scored { id, logprob } in &token.top {
                        // Incomplete parts of characters have the same text: the entry has the probability of the most likely part.
                        entries.entry(model.token_text(*id)).or_insert_with(|| json!(logprob));
                    }
                    Value::Object(entries)
                };
                let scores = || tokens.iter().map(|token| token.logprobs.as_ref());
                json!({
                    "tokens": tokens.iter().map(|token| model.token_text(token.id)).collect::<Vec<_>>(),
                    "text_offset": tokens.iter().map(|token| token.offset).collect::<Vec<_>>(),
                    "token_logprobs": scores().map(|token| token.map(|token| token.chosen.logprob)).collect::<Vec<_>>(),
                    "top_logprobs": scores().map(|token| token.map(top)).collect::<Vec<_>>(),
                })
            }
        }
    }
}

/// A message of the assistant, and whether it has tool calls.
fn message(text: String, calls: Option<ToolCallParser>) -> (Value, bool) {
    let Some(mut parser) = calls else {
        return (json!({"role": "assistant", "content": text, "refusal": null, "annotations": []}), false);
    };
    let (mut content, mut calls) = (String::new(), Vec::new());
    for part in parser.push(&text).into_iter().chain(parser.finish()) {
        match part {
            AnswerPart::Text(text) => content.push_str(&text),
            AnswerPart::Call { name, arguments } => calls.push(tool_call(&name, &arguments)),
        }
    }
    let has_calls = !calls.is_empty();
    let content = if content.is_empty() && has_calls { Value::Null } else { json!(content) };
    let mut message = json!({"role": "assistant", "content": content, "refusal": null, "annotations": []});
    if has_calls {
        message["tool_calls"] = json!(calls);
    }
    (message, has_calls)
}

/// A tool call with a new id. The id is nine letters and digits, because templates of Mistral's models accept no others.
fn tool_call(name: &str, arguments: &str) -> Value {
    let digit = |number: u64| char::from_digit((number % 36) as u32, 36).unwrap_or('0');
    let random = RandomState::new().hash_one(0);
    let id: String = (0..9).map(|place| digit(random / 36u64.pow(place))).collect();
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn finish_reason(generated: &Generated, has_calls: bool) -> &'static str {
    match generated.finish_reason {
        FinishReason::Stop | FinishReason::Eos | FinishReason::Grammar if has_calls => "tool_calls",
        FinishReason::Stop | FinishReason::Eos | FinishReason::Grammar => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
    }
}

#[cfg(test)]
mod tests;
