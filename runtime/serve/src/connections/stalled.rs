//! A stream that fails if its client accepts no data for too long, and reports when all of an answer is written.

use super::ConnectionState;
use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// A stream whose writes fail if none makes progress within a time limit.
pub(super) struct StallLimit<S> {
    stream: S,
    limit: Duration,
    state: Arc<ConnectionState>,
    /// The timer that ends a write without progress; `None` if no write waits.
    end: Option<Pin<Box<Sleep>>>,
}

impl<S> StallLimit<S> {
    pub fn new(stream: S, limit: Duration, state: Arc<ConnectionState>) -> Self {
        StallLimit { stream, limit, state, end: None }
    }

    /// Passes on the result of a write, or returns an error if writes have waited too long.
    fn limited<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.end = None;
            return written;
        }
        let limit = self.limit;
        let end = self.end.get_or_insert_with(|| Box::pin(sleep(limit)));
        match end.as_mut().poll(context) {
            Poll::Ready(()) => {
                end.as_mut().reset(Instant::now() + limit);
                Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client takes nothing of its answer")))
            }
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for StallLimit<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for StallLimit<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limited(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.limited(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        if matches!(flushed, Poll::Ready(Ok(()))) {
            self.state.all_written();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
