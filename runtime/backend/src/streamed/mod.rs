//! Weights that lie on disk while their session does not run.
//!
//! ONNX Runtime maps external weights from their file and never writes to them, so what lies behind those addresses is ours to
//! choose once a session is made ([`mapping`]): memory that is empty at first, filled by direct reads ([`reader`]) before a run
//! and given back after it. A part of each session stays filled and locked. Where kernels want another layout, the session is
//! made from a file that already has it ([`prepared`]), because what ONNX Runtime lays out itself is not mapped from anything. What
//! of such a file can be told in fewer bytes is read so and expanded when it arrives ([`dense`]).

mod align;
mod chunks;
mod dense;
mod direct;
mod file;
mod frames;
mod huge;
mod mapping;
mod memory;
mod open_files;
mod prepared;
mod rate;
mod reader;
mod staging;
mod trial;
mod weights;

pub(crate) use direct::{DirectFile, DirectReads};
pub(crate) use file::SECTOR;
pub(crate) use mapping::{Mapping, claim, forget, mapped_under};
pub(crate) use prepared::{MODEL, UNALIGNED, WEIGHTS, find_or_make};
pub use rate::read_rate;

use crate::os;
use dense::Span;
use frames::Frames;
use hpp_engine::port::{ChunkBytes, Keep, Took};
use hpp_engine::{BackendError, Reporter};
use open_files::OpenFiles;
use reader::Reader;
use std::cell::OnceCell;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use trial::Trial;
use weights::{OnDemand, Weights};

/// Whether weights can be read while a process runs, on this system.
pub(crate) const POSSIBLE: bool = true;

/// What reads weights for the sessions of a backend; started when the first needs it.
#[derive(Clone, Default)]
pub(crate) struct Readers {
    reader: Rc<OnceCell<Rc<Reader>>>,
    frames: Rc<Frames>,
    files: Arc<OpenFiles>,
    /// Why the system does not lock memory, where it does not; said once.
    unlocked: Rc<OnceCell<()>>,
}

/// How the weights of one session are kept. Must be dropped before the session.
pub(crate) enum Kept {
    /// Where ONNX Runtime put them: in memory, or mapped.
    InMemory,
    /// To be streamed, and mapped from their file until it is settled how much of them stays.
    Unsettled(Unsettled),
    /// In part in memory; the rest is read before each run.
    Streamed(Weights),
    /// On disk, read page by page while a run touches them.
    OnDemand(OnDemand),
}

/// Weights that will be streamed.
pub(crate) struct Unsettled {
    trial: Trial,
    /// What of them is stored densely.
    spans: Vec<Span>,
    readers: Readers,
    partition: String,
}

/// Where the weights of a session are: in memory, unless it says otherwise.
#[derive(Default)]
pub(crate) struct Placed {
    /// How they are to be kept.
    pub keep: Keep,
    /// What the session has mapped of files under `dir`, and nothing else ([`claim`]).
    pub mappings: Vec<Mapping>,
    pub dir: PathBuf,
    /// Whether they lie there as kernels want them, beside what they were made from.
    pub prepared: bool,
}

impl Readers {
    /// Takes over the weights of a session.
    ///
    /// # Safety
    /// `placed.mappings` must be the session's alone, as [`claim`] returns them. The session must live longer than what is
    /// returned and must run only after [`Kept::check`].
    pub unsafe fn keep(&self, placed: Placed, partition: &str, reporter: &dyn Reporter) -> Result<Kept, BackendError> {
        let Placed { keep, mappings, dir, prepared } = placed;
        if matches!(keep, Keep::InMemory | Keep::Mapped { rows: false }) {
            return Ok(Kept::InMemory);
        }
        if keep != Keep::Streamed {
            return Ok(Kept::OnDemand(OnDemand::new(mappings)));
        }
        if mappings.is_empty() {
            reporter.warning(&format!(
                "the weights of {partition} stay in memory: they are inside its file, so there is nothing to read them from"
            ));
            return Ok(Kept::InMemory);
        }
        // Making a session leaves about a MiB of freed memory, which the heap would keep, and which weights could have.
        os::trim_heap();
        let trial = Trial::new(mappings, &dir, prepared);
        let spans = if prepared { dense::spans(&dir) } else { Ok(Vec::new()) };
        let spans = spans.map_err(reading(partition))?;
        self.reader().and_then(|reader| reader.prepare()).map_err(reading(partition))?;
        Ok(Kept::Unsettled(Unsettled { trial, spans, readers: self.clone(), partition: partition.to_owned() }))
    }

    fn reader(&self) -> io::Result<Rc<Reader>> {
        if let Some(reader) = self.reader.get() {
            return Ok(Rc::clone(reader));
        }
        let reader = Rc::new(Reader::start()?);
        Ok(Rc::clone(self.reader.get_or_init(|| reader)))
    }
}

impl Unsettled {
    fn settle(self, locked: u64) -> Result<(Weights, Option<String>), BackendError> {
        let Unsettled { trial, spans, readers, partition } = self;
        let failed = reading(&partition);
        let shared = (readers.reader().map_err(&failed)?, Rc::clone(&readers.frames), Arc::clone(&readers.files));
        // SAFETY: the mappings are this session's alone, which lives longer and runs only after `Kept::check` (the promises made
        // to `Readers::keep`); ONNX Runtime maps external weights privately and only reads them; nothing runs meanwhile, since
        // whoever runs the session needs it mutably too.
        let mut weights = unsafe { Weights::take_over(shared, trial.used(), &spans, locked) }.map_err(&failed)?;
        let unlocked = weights.take_unlocked().filter(|_| readers.unlocked.set(()).is_ok());
        let warning = |error: io::Error| {
            format!(
                "the system does not lock weights in memory ({error}); they may be swapped out. Raise the limit on locked memory \
                 (ulimit -l, RLIMIT_MEMLOCK, LimitMEMLOCK= of a service)"
            )
        };
        Ok((weights, unlocked.map(warning)))
    }
}

impl Kept {
    /// Whether runs before [`settle`](Self::settle) would tell which weights are used.
    pub fn wants_trial(&self) -> bool {
        matches!(self, Kept::Unsettled(unsettled) if unsettled.trial.is_wanted())
    }

    /// Reads what stays and lets go of the rest; what a person should know of it.
    pub fn settle(&mut self, locked: u64) -> Result<Option<String>, BackendError> {
        match std::mem::replace(self, Kept::InMemory) {
            Kept::Unsettled(unsettled) => {
                let (weights, warning) = unsettled.settle(locked)?;
                *self = Kept::Streamed(weights);
                Ok(warning)
            }
            other => {
                *self = other;
                Ok(None)
            }
        }
    }

    /// Bytes of each chunk that is read before a run.
    pub fn chunks(&self) -> &[ChunkBytes] {
        match self {
            Kept::Streamed(weights) => weights.bytes(),
            Kept::InMemory | Kept::Unsettled(_) | Kept::OnDemand(_) => &[],
        }
    }

    /// Begins to read a chunk.
    pub fn begin(&mut self, chunk: usize) -> Result<(), BackendError> {
        match self {
            Kept::Streamed(weights) => weights.begin(chunk),
            Kept::InMemory | Kept::Unsettled(_) | Kept::OnDemand(_) => Ok(()),
        }
    }

    /// Waits for a chunk.
    pub fn finish(&mut self, chunk: usize, now: impl Fn() -> Duration) -> Result<Took, BackendError> {
        match self {
            Kept::Streamed(weights) => weights.finish(chunk, now),
            Kept::InMemory | Kept::Unsettled(_) | Kept::OnDemand(_) => Ok(Took::default()),
        }
    }

    /// Gives memory back after a run.
    pub fn release(&mut self) {
        match self {
            Kept::Streamed(weights) => weights.release(),
            Kept::OnDemand(pages) => pages.release(),
            Kept::Unsettled(unsettled) => unsettled.trial.look(),
            Kept::InMemory => {}
        }
    }

    /// Refuses a run while a chunk is absent.
    pub fn check(&self) -> Result<(), BackendError> {
        match self {
            Kept::Streamed(weights) => weights.check(),
            Kept::InMemory | Kept::Unsettled(_) | Kept::OnDemand(_) => Ok(()),
        }
    }
}

fn reading(partition: &str) -> impl Fn(io::Error) -> BackendError {
    move |error| BackendError::Runtime { doing: format!("read the weights of {partition}"), cause: error.to_string() }
}
