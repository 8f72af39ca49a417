//! The generation loop: feed, choose, show, until there is a reason to end. Knows no terminal and no files.

use crate::error::ExecError;
use crate::interrupt::Interrupt;
use crate::sampling::{Sampler, Sampling};
use crate::session::{Fed, Session};
use crate::text::{Pieces, StopFilter, Stopped, TextTokenizer};
use hpp_engine::Backend;
use serde::Serialize;
use std::time::{Duration, Instant};

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request {
    /// Tokens to continue.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_new: u64,
    /// Tokens that end the text.
    pub eos: Vec<u32>,
    /// Texts that end the text.
    pub stop: Vec<String>,
    /// How tokens are chosen.
    pub sampling: Sampling,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// A stop text came.
    Stop,
    /// The model ended it.
    Eos,
    /// As many tokens as were asked for, or as fit.
    Length,
    /// Ctrl-C.
    Cancelled,
}

/// What was generated.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    /// Every token chosen, the one that ended the text included.
    pub tokens: Vec<u32>,
    /// The text, where there is a tokenizer; without the stop text.
    pub text: Option<String>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Tokens of the prompt kept from the text before.
    pub reused: usize,
    /// From the start to the first token, where one came.
    pub first_token: Option<Duration>,
    /// Taking the prompt in.
    pub prefill: Duration,
    /// From the first token to the end.
    pub decode: Duration,
}

/// Receives what is generated, as it comes.
pub trait Sink {
    /// More text.
    fn text(&mut self, _text: &str) -> Result<(), ExecError> {
        Ok(())
    }
    /// A token, and the scores it was chosen from.
    fn token(&mut self, _token: u32, _scores: &[f32]) -> Result<(), ExecError> {
        Ok(())
    }
}

/// Continues a prompt.
pub fn generate<B: Backend>(
    session: &mut Session<B>,
    tokenizer: Option<&TextTokenizer>,
    request: &Request,
    sink: &mut dyn Sink,
    interrupt: &Interrupt,
) -> Result<Generated, ExecError> {
    let started = Instant::now();
    let mut run = Run::new(tokenizer, request);
    let _watch = interrupt.watch(&session.engine().cancel_handle());
    let fed =
        if request.max_new == 0 { Fed::Whole { reused: 0 } } else { session.begin(&request.prompt, interrupt)? };
    let prefill = started.elapsed();
    let mut first_token = None;
    let (reused, finish) = match fed {
        Fed::Interrupted => (0, FinishReason::Cancelled),
        Fed::Whole { reused } => loop {
            if let Some(finish) = run.ended(request, interrupt) {
                break (reused, finish);
            }
            let token = run.choose(session.scores(), sink)?;
            first_token.get_or_insert_with(|| started.elapsed());
            if let Some(finish) = run.take(token, request, sink)? {
                break (reused, finish);
            }
            if session.room() == 0 || run.tokens.len() as u64 == request.max_new {
                break (reused, FinishReason::Length);
            }
            match session.feed(&[token]) {
                Err(error) if error.is_cancelled() => break (reused, FinishReason::Cancelled),
                fed => fed?,
            }
        },
    };
    let text = run.finish(finish, sink)?;
    let decode = started.elapsed().saturating_sub(first_token.unwrap_or(prefill));
    Ok(Generated { tokens: run.tokens, text, finish, reused, first_token, prefill, decode })
}

/// One text being generated.
struct Run<'t> {
    sampler: Sampler,
    tokens: Vec<u32>,
    writer: Option<Writer<'t>>,
}

impl<'t> Run<'t> {
    fn new(tokenizer: Option<&'t TextTokenizer>, request: &Request) -> Self {
        let writer = tokenizer.map(|t| Writer {
            pieces: Pieces::new(t),
            filter: StopFilter::new(request.stop.iter().cloned()),
            text: String::new(),
        });
        Self { sampler: Sampler::new(request.sampling, &request.prompt), tokens: Vec::new(), writer }
    }

    fn ended(&self, request: &Request, interrupt: &Interrupt) -> Option<FinishReason> {
        if interrupt.asked() {
            return Some(FinishReason::Cancelled);
        }
        (self.tokens.len() as u64 >= request.max_new).then_some(FinishReason::Length)
    }

    fn choose(&mut self, scores: &[f32], sink: &mut dyn Sink) -> Result<u32, ExecError> {
        let token = self.sampler.next(scores)?;
        self.tokens.push(token);
        sink.token(token, scores)?;
        Ok(token)
    }

    /// Shows a token's text; says whether it ends the text.
    fn take(&mut self, token: u32, request: &Request, sink: &mut dyn Sink) -> Result<Option<FinishReason>, ExecError> {
        if request.eos.contains(&token) {
            return Ok(Some(FinishReason::Eos));
        }
        let Some(writer) = &mut self.writer else { return Ok(None) };
        let piece = writer.pieces.push(token)?;
        Ok(writer.show(&piece, sink)?.then_some(FinishReason::Stop))
    }

    /// Shows what was held back, and returns the whole text.
    fn finish(&mut self, finish: FinishReason, sink: &mut dyn Sink) -> Result<Option<String>, ExecError> {
        let Some(mut writer) = self.writer.take() else { return Ok(None) };
        if finish != FinishReason::Stop {
            let rest = writer.pieces.finish()?;
            if !writer.show(&rest, sink)? {
                let held = writer.filter.finish();
                writer.put(&held, sink)?;
            }
        }
        Ok(Some(writer.text))
    }
}

struct Writer<'t> {
    pieces: Pieces<'t>,
    filter: StopFilter,
    text: String,
}

impl Writer<'_> {
    /// Shows what is certain of a piece; says whether a stop text came.
    fn show(&mut self, piece: &str, sink: &mut dyn Sink) -> Result<bool, ExecError> {
        if piece.is_empty() {
            return Ok(false);
        }
        match self.filter.push(piece) {
            Stopped::No(text) => self.put(&text, sink).map(|()| false),
            Stopped::Yes(text) => self.put(&text, sink).map(|()| true),
        }
    }

    fn put(&mut self, text: &str, sink: &mut dyn Sink) -> Result<(), ExecError> {
        if text.is_empty() {
            return Ok(());
        }
        self.text.push_str(text);
        sink.text(text)
    }
}
