//! Weights that lie on disk while their session does not run.
//!
//! ONNX Runtime maps external weights from their file and never writes to them, so what lies behind those addresses is ours to
//! choose once a session is made ([`mapping`]): memory that is empty at first, filled by direct reads ([`reader`]) before a run
//! and given back after it. A part of each session stays filled and locked. Where kernels want another layout, the session is
//! made from a file that already has it ([`prepared`]), because what ONNX Runtime lays out itself is not mapped from anything.

mod align;
mod file;
mod mapping;
mod prepared;
mod reader;
mod weights;

pub(crate) use mapping::Mapping;
pub(crate) use prepared::{MODEL, UNALIGNED, find_or_make};

use hpp_engine::port::{Keep, Took};
use hpp_engine::{BackendError, Reporter};
use reader::Reader;
use std::cell::OnceCell;
use std::io;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;
use weights::{OnDemand, Weights};

/// Whether weights can be read while a process runs, on this system.
pub(crate) const POSSIBLE: bool = true;

/// What reads weights for the sessions of a backend; started when the first needs it.
#[derive(Clone, Default)]
pub(crate) struct Readers {
    reader: Rc<OnceCell<Rc<Reader>>>,
    /// Whether it was said that the system does not lock memory.
    warned: Rc<OnceCell<()>>,
}

/// How the weights of one session are kept. Must be dropped before the session.
pub(crate) enum Kept {
    /// Where ONNX Runtime put them: in memory, or mapped.
    InMemory,
    /// In part in memory; the rest is read before each run.
    Streamed(Weights),
    /// On disk, read page by page while a run touches them.
    OnDemand(OnDemand),
}

/// What is mapped from files under a directory.
pub(crate) fn mapped_under(dir: &Path) -> Vec<Mapping> {
    mapping::mapped_under(dir)
}

impl Readers {
    /// Takes over the weights of a session that was made since `before`, from files under `dir`.
    ///
    /// # Safety
    /// The session must live longer than what is returned and must run only after [`Kept::check`].
    pub unsafe fn keep(
        &self,
        keep: Keep,
        partition: &str,
        (before, dir): (&[Mapping], &Path),
        reporter: &dyn Reporter,
    ) -> Result<Kept, BackendError> {
        let now = mapped_under(dir);
        let locked = match keep {
            Keep::InMemory => return Ok(Kept::InMemory),
            Keep::Mapped { rows: true } => return Ok(Kept::OnDemand(OnDemand::new(before, &now))),
            Keep::Mapped { rows: false } => return Ok(Kept::InMemory),
            Keep::Streamed { locked } => locked,
        };
        let failed = |error: io::Error| BackendError::Runtime {
            doing: format!("read the weights of {partition} from {}", dir.display()),
            cause: error.to_string(),
        };
        let reader = self.reader().map_err(failed)?;
        // SAFETY: the caller's promises; ONNX Runtime keeps external weights in private mappings that it only reads.
        let taken = unsafe { Weights::take_over(reader, before, &now, locked) }.map_err(failed)?;
        let Some(mut weights) = taken else {
            reporter.warning(&format!(
                "the weights of {partition} stay in memory: they are inside its file, so there is nothing to read them from"
            ));
            return Ok(Kept::InMemory);
        };
        if let Some(error) = weights.take_unlocked().filter(|_| self.warned.set(()).is_ok()) {
            reporter.warning(&format!(
                "the system does not lock weights in memory ({error}); they may be swapped out. Raise the limit on locked memory \
                 (ulimit -l, RLIMIT_MEMLOCK, LimitMEMLOCK= of a service)"
            ));
        }
        Ok(Kept::Streamed(weights))
    }

    fn reader(&self) -> io::Result<Rc<Reader>> {
        if let Some(reader) = self.reader.get() {
            return Ok(Rc::clone(reader));
        }
        let reader = Rc::new(Reader::start()?);
        Ok(Rc::clone(self.reader.get_or_init(|| reader)))
    }
}

impl Kept {
    /// Bytes of each chunk that is read before a run.
    pub fn chunks(&self) -> &[u64] {
        match self {
            Kept::Streamed(weights) => weights.bytes(),
            Kept::InMemory | Kept::OnDemand(_) => &[],
        }
    }

    /// Begins to read a chunk.
    pub fn begin(&mut self, chunk: usize) -> Result<(), BackendError> {
        match self {
            Kept::Streamed(weights) => weights.begin(chunk),
            Kept::InMemory | Kept::OnDemand(_) => Ok(()),
        }
    }

    /// Waits for a chunk.
    pub fn finish(&mut self, chunk: usize, now: impl Fn() -> Duration) -> Result<Took, BackendError> {
        match self {
            Kept::Streamed(weights) => weights.finish(chunk, now),
            Kept::InMemory | Kept::OnDemand(_) => Ok(Took::default()),
        }
    }

    /// Gives memory back after a run.
    pub fn release(&mut self) {
        match self {
            Kept::Streamed(weights) => weights.release(),
            Kept::OnDemand(pages) => pages.release(),
            Kept::InMemory => {}
        }
    }

    /// Refuses a run while a chunk is absent.
    pub fn check(&self) -> Result<(), BackendError> {
        match self {
            Kept::Streamed(weights) => weights.check(),
            Kept::InMemory | Kept::OnDemand(_) => Ok(()),
        }
    }
}
