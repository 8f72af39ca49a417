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
use hpp_engine::port::{ChunkSize, Interval, WeightResidency};
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
pub(crate) enum SessionWeights {
    /// Where ONNX Runtime put them: in memory, or mapped.
    InMemory,
    /// To be streamed, and mapped from their file until it is settled how much of them stays.
    Pending(PendingWeights),
    /// In part in memory; the rest is read before each run.
    Streamed(Weights),
    /// On disk, read page by page while a run touches them.
    OnDemand(OnDemand),
}

/// Weights that will be streamed.
pub(crate) struct PendingWeights {
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
    pub residency: WeightResidency,
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
    /// returned and must run only after [`SessionWeights::check`].
    pub unsafe fn keep(
        &self,
        placed: Placed,
        partition: &str,
        reporter: &dyn Reporter,
    ) -> Result<SessionWeights, BackendError> {
        let Placed { residency, mappings, dir, prepared } = placed;
        if matches!(residency, WeightResidency::InMemory | WeightResidency::Mapped { sparse_rows: false }) {
            return Ok(SessionWeights::InMemory);
        }
        if residency != WeightResidency::Streamed {
            return Ok(SessionWeights::OnDemand(OnDemand::new(mappings)));
        }
        if mappings.is_empty() {
            reporter.warning(&format!(
                "the weights of {partition} stay in memory: they are inside its file, so there is nothing to read them from"
            ));
            return Ok(SessionWeights::InMemory);
        }
        // Making a session leaves about a MiB of freed memory, which the heap would keep, and which weights could have.
        os::trim_heap();
        let trial = Trial::new(mappings, &dir, prepared);
        let spans = if prepared { dense::spans(&dir) } else { Ok(Vec::new()) };
        let spans = spans.map_err(reading(partition))?;
        self.reader().and_then(|reader| reader.prepare()).map_err(reading(partition))?;
        Ok(SessionWeights::Pending(PendingWeights {
            trial,
            spans,
            readers: self.clone(),
            partition: partition.to_owned(),
        }))
    }

    fn reader(&self) -> io::Result<Rc<Reader>> {
        if let Some(reader) = self.reader.get() {
            return Ok(Rc::clone(reader));
        }
        let reader = Rc::new(Reader::start()?);
        Ok(Rc::clone(self.reader.get_or_init(|| reader)))
    }
}

impl PendingWeights {
    fn pin_and_stream(self, pinned: u64) -> Result<(Weights, Option<String>), BackendError> {
        let PendingWeights { trial, spans, readers, partition } = self;
        let failed = reading(&partition);
        let shared = (readers.reader().map_err(&failed)?, Rc::clone(&readers.frames), Arc::clone(&readers.files));
        // SAFETY: the mappings are this session's alone, which lives longer and runs only after `SessionWeights::check` (the promises made
        // to `Readers::keep`); ONNX Runtime maps external weights privately and only reads them; no run is in progress, since a run
        // borrows the session's weights (`SessionCore`).
        let mut weights = unsafe { Weights::take_over(shared, trial.used(), &spans, pinned) }.map_err(&failed)?;
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

impl SessionWeights {
    /// Whether the weights stay where they are, so that no run needs a fetch or a release.
    pub fn is_resident(&self) -> bool {
        matches!(self, SessionWeights::InMemory)
    }

    /// Whether warm-up runs would show which weights runs read.
    pub fn wants_warm_up(&self) -> bool {
        matches!(self, SessionWeights::Pending(pending) if pending.trial.is_wanted())
    }

    /// After a warm-up run: records which pages it touched, and drops them.
    pub fn sample_resident(&mut self) {
        if let SessionWeights::Pending(pending) = self {
            pending.trial.look();
        }
    }

    /// Reads and pins up to `pinned` bytes, and drops the rest; a warning for the user, if there is one.
    pub fn pin_and_stream(&mut self, pinned: u64) -> Result<Option<String>, BackendError> {
        match std::mem::replace(self, SessionWeights::InMemory) {
            SessionWeights::Pending(pending) => {
                let (weights, warning) = pending.pin_and_stream(pinned)?;
                *self = SessionWeights::Streamed(weights);
                Ok(warning)
            }
            other => {
                *self = other;
                Ok(None)
            }
        }
    }

    /// The weights that are read before each run, if there are any.
    fn streamed(&mut self) -> Option<&mut Weights> {
        match self {
            SessionWeights::Streamed(weights) => Some(weights),
            SessionWeights::InMemory | SessionWeights::Pending(_) | SessionWeights::OnDemand(_) => None,
        }
    }

    /// The chunks that are read before each run.
    pub fn chunks(&mut self) -> Vec<ChunkSize> {
        self.streamed().map_or(Vec::new(), |weights| weights.bytes().to_vec())
    }

    /// Starts to read a chunk.
    pub fn prefetch(&mut self, chunk: usize) -> Result<(), BackendError> {
        self.streamed().map_or(Ok(()), |weights| weights.begin(chunk))
    }

    /// Waits for a chunk.
    pub fn wait(&mut self, chunk: usize, now: impl Fn() -> Duration) -> Result<Interval, BackendError> {
        self.streamed().map_or(Ok(Interval::default()), |weights| weights.finish(chunk, now))
    }

    /// Evicts what the last run used.
    pub fn release(&mut self) {
        match self {
            SessionWeights::Streamed(weights) => weights.release(),
            SessionWeights::OnDemand(pages) => pages.release(),
            SessionWeights::Pending(_) | SessionWeights::InMemory => {}
        }
    }

    /// Refuses a run while a chunk is absent.
    pub fn check(&self) -> Result<(), BackendError> {
        match self {
            SessionWeights::Streamed(weights) => weights.check(),
            SessionWeights::InMemory | SessionWeights::Pending(_) | SessionWeights::OnDemand(_) => Ok(()),
        }
    }
}

fn reading(partition: &str) -> impl Fn(io::Error) -> BackendError {
    move |error| BackendError::Runtime { doing: format!("read the weights of {partition}"), cause: error.to_string() }
}
