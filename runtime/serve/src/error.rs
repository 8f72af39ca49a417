//! Errors of the API, as OpenAI's clients expect them, and of serving itself.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use hpp_engine::EngineError;
use hpp_generate::{GenerateError, PromptError};
use hpp_schema::error_line;
use serde_json::json;
use std::borrow::Cow;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

/// Seconds after which a refused client may try again.
const RETRY_AFTER: u64 = 1;

/// An error that a client sees.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ApiError {
    /// The request is invalid or asks for something that does not exist.
    #[error("{message}")]
    Invalid {
        /// The problem, and what to do.
        message: String,
        /// The field it is about.
        param: Option<Cow<'static, str>>,
    },
    /// The API key is missing or wrong.
    #[error("give an API key of this server: `Authorization: Bearer KEY`")]
    Unauthorized,
    /// The request names another host. A web page whose own host name leads to this machine sends such requests.
    #[error("{0:?} is not a name of this server: use localhost, or start it with --allowed-host {name}", name = if .0.is_empty() { "NAME" } else { .0 })]
    ForeignHost(String),
    /// The body of the request did not arrive in time.
    #[error("the body of the request did not arrive within {} seconds", .0.as_secs())]
    SlowBody(Duration),
    /// There is no model of this name.
    #[error("there is no model {asked:?}; this server has {}", known.join(", "))]
    NoModel {
        /// The name in the request.
        asked: String,
        /// The server's models.
        known: Vec<String>,
    },
    /// The path takes another method.
    #[error("this path takes another method; docs/SERVING.md lists the paths with their methods")]
    WrongMethod,
    /// There is no such path.
    #[error(
        "there is nothing at this path: OpenAI's paths begin with /v1, as in /v1/chat/completions; docs/SERVING.md lists all"
    )]
    NotFound,
    /// The request has more bytes than allowed.
    #[error("the request is larger than this server allows (--max-body)")]
    TooLarge,
    /// The queue is full.
    #[error("the queue is full ({waiting} waiting); try again later")]
    Busy {
        /// Requests in the queue.
        waiting: usize,
    },
    /// The client has reached its rate limit.
    #[error(
        "each client may send {per_minute} requests per minute here (--rate-limit): the next is answered in {} s",
        whole_seconds(*.wait)
    )]
    RateLimited {
        /// The limit.
        per_minute: u32,
        /// Time until the client may send the next request.
        wait: Duration,
    },
    /// The request asks for more answers than may wait.
    #[error(
        "the request asks for {count} answers, and at most {limit} may wait here (--queue): ask for fewer at a time"
    )]
    TooMany {
        /// Number of prompts times answers to each.
        count: usize,
        /// Places in the queue.
        limit: usize,
        /// The field of the request that asks for so many.
        param: &'static str,
    },
    /// The answer took longer than the limit.
    #[error("the request took longer than its time limit")]
    Timeout,
    /// Memory for the request or time for its text is short, or the server is shutting down.
    #[error("{0}")]
    Unavailable(String),
    /// The engine failed.
    #[error("{0}")]
    Failed(String),
}

impl ApiError {
    /// An error about one field.
    pub fn field(param: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        ApiError::Invalid { message: message.into(), param: Some(param.into()) }
    }

    /// Adds the field `param` if the error is about a request and names no field.
    pub fn about(self, param: &'static str) -> Self {
        match self {
            ApiError::Invalid { message, param: None } => ApiError::field(param, message),
            other => other,
        }
    }

    /// A request for embeddings with another number of dimensions than the model's `own`.
    pub fn wrong_dimensions(asked: usize, own: u64) -> Self {
        ApiError::field("dimensions", format!("`dimensions`: this model has {own}, not {asked}: leave it out"))
    }

    /// The thread of the engine has ended.
    pub fn engine_gone() -> Self {
        ApiError::Unavailable("the engine has stopped; the server's log says why".to_owned())
    }

    /// No more requests are taken.
    pub fn shutting_down() -> Self {
        ApiError::Unavailable("the server is shutting down".to_owned())
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        match self {
            ApiError::Invalid { .. } | ApiError::TooMany { .. } => StatusCode::BAD_REQUEST,
            ApiError::Unauthorized => StatusCode::UNAUTHORIZED,
            ApiError::ForeignHost(_) => StatusCode::FORBIDDEN,
            ApiError::SlowBody(_) => StatusCode::REQUEST_TIMEOUT,
            ApiError::NoModel { .. } | ApiError::NotFound => StatusCode::NOT_FOUND,
            ApiError::WrongMethod => StatusCode::METHOD_NOT_ALLOWED,
            ApiError::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            ApiError::Busy { .. } | ApiError::RateLimited { .. } => StatusCode::TOO_MANY_REQUESTS,
            ApiError::Timeout => StatusCode::GATEWAY_TIMEOUT,
            ApiError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            ApiError::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Seconds after which the client may try again, if that may help.
    fn retry_after(&self) -> Option<u64> {
        match self {
            ApiError::RateLimited { wait, .. } => Some(whole_seconds(*wait)),
            ApiError::Busy { .. } | ApiError::Unavailable(_) => Some(RETRY_AFTER),
            _ => None,
        }
    }

    /// The error as OpenAI's clients read it.
    pub fn to_json(&self) -> serde_json::Value {
        let kind = match self {
            ApiError::Invalid { .. }
            | ApiError::TooMany { .. }
            | ApiError::NoModel { .. }
            | ApiError::NotFound
            | ApiError::WrongMethod
            | ApiError::SlowBody(_)
            | ApiError::TooLarge => "invalid_request_error",
            ApiError::Unauthorized => "authentication_error",
            ApiError::ForeignHost(_) => "permission_error",
            ApiError::Busy { .. } | ApiError::RateLimited { .. } => "rate_limit_error",
            ApiError::Timeout => "timeout",
            ApiError::Unavailable(_) | ApiError::Failed(_) => "server_error",
        };
        let param = match self {
            ApiError::Invalid { param, .. } => param.as_deref(),
            ApiError::NoModel { .. } => Some("model"),
            ApiError::TooMany { param, .. } => Some(*param),
            _ => None,
        };
        let code = match self {
            ApiError::Unauthorized => Some("invalid_api_key"),
            ApiError::NoModel { .. } => Some("model_not_found"),
            ApiError::RateLimited { .. } => Some("rate_limit_exceeded"),
            _ => None,
        };
        json!({"error": {"message": self.to_string(), "type": kind, "param": param, "code": code}})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.to_json())).into_response();
        if let Some(seconds) = self.retry_after() {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }
}

/// Whole seconds, rounded up, after which a time has passed.
fn whole_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

impl From<GenerateError> for ApiError {
    fn from(error: GenerateError) -> Self {
        let message = error_line(&error);
        match error {
            _ if error.is_transient() => ApiError::Unavailable(message),
            GenerateError::Prompt(PromptError::NoTemplate) => {
                ApiError::Invalid { message: format!("{message}: /v1/completions continues a text"), param: None }
            }
            GenerateError::Prompt(_)
            | GenerateError::Conversation(_)
            | GenerateError::Template(_)
            | GenerateError::Tokenizer(_)
            | GenerateError::Engine(EngineError::TokenOutOfRange { .. } | EngineError::ContextExceeded { .. }) => {
                ApiError::Invalid { message, param: None }
            }
            _ if error.is_out_of_memory() => ApiError::Unavailable(message),
            _ => ApiError::Failed(message),
        }
    }
}

/// Why serving failed.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The server cannot listen on the address.
    #[error("cannot listen on {address}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// What the system reported.
        source: io::Error,
    },
    /// An origin is no HTTP header value.
    #[error("{0:?} is not an origin of a page, such as http://localhost:3000")]
    Origin(String),
    /// The thread of an engine ended while it loaded.
    #[error("{0}")]
    EngineThread(String),
    /// Another error of the system.
    #[error("cannot serve")]
    Io(#[from] io::Error),
}

impl ServeError {
    /// What the user can do next.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            ServeError::Listen { source, .. } if source.kind() == io::ErrorKind::AddrInUse => {
                Some("another program listens there: give another --port; --port 0 takes a free one")
            }
            ServeError::Listen { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                Some("ports below 1024 need privileges: give another --port")
            }
            _ => None,
        }
    }
}

/// Checks that the server can listen on an address, before models are loaded.
///
/// # Errors
/// It is in use, not allowed, or not of this machine.
pub fn check_address(address: SocketAddr) -> Result<(), ServeError> {
    match std::net::TcpListener::bind(address) {
        Ok(_) => Ok(()),
        Err(source) => Err(ServeError::Listen { address, source }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_generate::text::{LimitError, TokenizerError};

    #[test]
    fn limits_of_the_process_are_no_fault_of_a_request() {
        let status = |limit: LimitError| {
            let (path, source) = ("tokenizer.json".into(), limit.into());
            ApiError::from(GenerateError::from(TokenizerError::Encode { path, source })).status()
        };
        for limit in [LimitError::Memory(1), LimitError::Time(Duration::ZERO), LimitError::Abandoned(4)] {
            assert_eq!(status(limit), StatusCode::SERVICE_UNAVAILABLE);
        }
        assert_eq!(status(LimitError::Panic("a defect".to_owned())), StatusCode::BAD_REQUEST);
    }
}
