//! Reads the body of a request: JSON, within limits of size, time and memory.

use crate::connections::ConnectionState;
use crate::error::ApiError;
use axum::Json;
use axum::body::{Body, BodyDataStream, Bytes};
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRef, FromRequest, Request};
use axum::http::{StatusCode, header};
use futures_util::StreamExt;
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How many bodies of the largest size may be in memory at a time. Parsed JSON takes up to 32 times the bytes of its text (a list of digits), and
/// what is made of it takes memory too.
const LARGEST_AT_ONCE: usize = 2;
/// A refused body is read and dropped, up to this many times the largest size. Many clients read the answer only after they have sent their request;
/// if the connection were closed earlier, they would see an error without its reason.
const DISCARDED: u64 = 8;
/// How long the server waits for the next part of a refused body.
const DISCARD_READ_TIMEOUT: Duration = Duration::from_millis(250);

/// The memory for bodies, and the time to read one. Cheap to clone.
#[derive(Clone)]
pub(crate) struct BodyRoom {
    free: Arc<Semaphore>,
    most: usize,
    time: Duration,
}

/// Bytes taken from a [`BodyRoom`]. Dropping this gives them back.
pub(crate) struct TakenRoom(Option<OwnedSemaphorePermit>);

impl BodyRoom {
    /// Room for bodies of at most this many bytes each, which come within `time`.
    pub fn new(most: usize, time: Duration) -> Self {
        let all = most.saturating_mul(LARGEST_AT_ONCE).min(Semaphore::MAX_PERMITS);
        BodyRoom { free: Arc::new(Semaphore::new(all)), most, time }
    }

    /// Reads a body part by part, until it ends or is refused.
    async fn read(&self, parts: &mut BodyDataStream) -> Result<(Vec<u8>, TakenRoom), ApiError> {
        let (mut read, mut taken) = (Vec::new(), TakenRoom(None));
        while let Some(part) = parts.next().await {
            let broken =
                |_| ApiError::Invalid { message: "the request ended before its body did".to_owned(), param: None };
            let part = part.map_err(broken)?;
            self.take(&mut taken, read.len(), &part)?;
            read.extend_from_slice(&part);
        }
        Ok((read, taken))
    }

    /// Reads and drops the rest of a refused body, at most [`DISCARDED`] times the largest size.
    async fn discard(&self, parts: &mut BodyDataStream) {
        let mut left = self.discarded();
        while let Ok(Some(Ok(part))) = tokio::time::timeout(DISCARD_READ_TIMEOUT, parts.next()).await {
            match left.checked_sub(part.len() as u64) {
                Some(rest) => left = rest,
                None => return,
            }
        }
    }

    fn discarded(&self) -> u64 {
        (self.most as u64).saturating_mul(DISCARDED)
    }

    /// Takes room for the next part of a body. `before`: bytes of the body read so far.
    fn take(&self, taken: &mut TakenRoom, before: usize, part: &Bytes) -> Result<(), ApiError> {
        let bytes = u32::try_from(part.len()).ok().filter(|_| before + part.len() <= self.most);
        let permit = Arc::clone(&self.free).try_acquire_many_owned(bytes.ok_or(ApiError::TooLarge)?);
        let full =
            |_| ApiError::Unavailable("other requests take all memory for their bodies; try again later".to_owned());
        let permit = permit.map_err(full)?;
        match &mut taken.0 {
            Some(taken) => taken.merge(permit),
            none => *none = Some(permit),
        }
        Ok(())
    }
}

/// The body of a request. Its room is taken until this is dropped.
pub(crate) struct JsonBody {
    /// The parsed JSON.
    pub value: Value,
    /// The room that the body takes. Drop it once the request is turned into tokens.
    pub room: TakenRoom,
}

impl<S: Send + Sync> FromRequest<S> for JsonBody
where
    BodyRoom: FromRef<S>,
{
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, ApiError> {
        let bodies = BodyRoom::from_ref(state);
        let (parts, body) = request.into_parts();
        let mut stream = body.into_data_stream();
        let announced = parts.headers.get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        if let Some(announced) = announced.filter(|announced: &u64| *announced > bodies.most as u64) {
            // A client that sent `Expect` waits for permission and has sent nothing of the body yet.
            if announced <= bodies.discarded() && !parts.headers.contains_key(header::EXPECT) {
                let _ = tokio::time::timeout(bodies.time, bodies.discard(&mut stream)).await;
            }
            return Err(ApiError::TooLarge);
        }
        let read = tokio::time::timeout(bodies.time, bodies.read(&mut stream)).await;
        let read = read.map_err(|_| ApiError::SlowBody(bodies.time))?;
        if read.is_err() {
            let _ = tokio::time::timeout(bodies.time, bodies.discard(&mut stream)).await;
        }
        let (bytes, room) = read?;
        if let Some(connection_state) = parts.extensions.get::<Arc<ConnectionState>>() {
            connection_state.request_arrived();
        }
        let parsed = Json::from_request(Request::from_parts(parts, Body::from(bytes)), state).await;
        Ok(JsonBody { value: value(parsed)?, room })
    }
}

/// The JSON of a body, or why it is none.
fn value(parsed: Result<Json<Value>, JsonRejection>) -> Result<Value, ApiError> {
    match parsed {
        Ok(Json(value)) => Ok(value),
        Err(rejection) if rejection.status() == StatusCode::UNSUPPORTED_MEDIA_TYPE => {
            let message = "the body must be JSON and say so: -H 'content-type: application/json'".to_owned();
            Err(ApiError::Invalid { message, param: None })
        }
        Err(rejection) => {
            let text = rejection.body_text();
            let what = text.trim_start_matches("Failed to parse the request body as JSON: ");
            // serde's path to a place that is nested too deeply has hundreds of characters, so it is left out.
            let what = if what.contains("recursion limit exceeded") { "it is nested too deeply" } else { what };
            Err(ApiError::Invalid { message: format!("the request: {what}"), param: None })
        }
    }
}
