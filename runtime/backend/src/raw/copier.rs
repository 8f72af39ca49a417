//! A thread that copies host memory to a device while sessions compute.
//!
//! Objects of this room belong to one thread; the copier is the one exception. It gets addresses of values that the thread that
//! asked keeps, in a register here, until the copy is over and that thread has heard of it.

use super::device::Turn;
use super::value::Value;
use super::{Fill, check};
use hpp_engine::BackendError;
use hpp_engine::port::Interval;
use hpp_schema::DType;
use ort::environment::Environment;
use ort::sys::OrtValue;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

/// One weight on its way: bytes on the host, and the tensor of bytes they go to.
pub(crate) struct Piece {
    pub from: Value,
    pub to: Value,
    /// What fills host memory before it is copied, `from` within it; nothing where the bytes are there.
    pub fetch: Option<Fetch>,
}

/// A reading of a weight.
#[derive(Clone)]
pub(crate) struct Fetch {
    pub fill: Fill,
    /// Staging memory of so many bytes.
    pub room: (*mut u8, usize),
}

/// The thread, and what it works on.
pub(crate) struct Copier {
    /// `None` once it is to end.
    jobs: RefCell<Option<Sender<Job>>>,
    thread: RefCell<Option<JoinHandle<()>>>,
    /// Values of jobs nobody has waited for yet.
    register: RefCell<BTreeMap<u64, Vec<Piece>>>,
    next: Cell<u64>,
}

/// Copies that were asked for together.
pub(crate) struct Copies {
    number: u64,
    done: Receiver<Result<Interval, String>>,
    copier: Rc<Copier>,
    over: bool,
}

struct Job {
    pieces: Vec<Addresses>,
    turn: Turn,
    done: Sender<Result<Interval, String>>,
}

struct Addresses {
    from: *mut OrtValue,
    to: *mut OrtValue,
    fetch: Option<Fetch>,
}

// SAFETY: the values and the memory behind them are kept by the register until the job is over and waited for, and nobody else
// touches the host bytes meanwhile: staging memory is lent to one job at a time, and other sources are only read. The values
// themselves are used for nothing but this copy.
unsafe impl Send for Addresses {}

impl Copier {
    pub fn new(environment: Environment) -> std::io::Result<Rc<Self>> {
        let (jobs, todo) = channel::<Job>();
        let work = move || {
            for job in todo {
                let mut begun = None;
                let copied = job.pieces.iter().try_for_each(|piece| copy(&environment, piece, &job.turn, &mut begun));
                let to = hpp_engine::since_start();
                // Whoever asked may be gone.
                let _ = job.done.send(copied.map(|()| Interval { start: begun.unwrap_or(to), end: to }));
            }
        };
        let thread = std::thread::Builder::new().name("hpp-copier".into()).spawn(work)?;
        Ok(Rc::new(Copier {
            jobs: RefCell::new(Some(jobs)),
            thread: RefCell::new(Some(thread)),
            register: RefCell::default(),
            next: Cell::new(0),
        }))
    }

    /// Begins to copy, piece by piece, each in its turn with runs on devices that want them one at a time.
    pub fn begin(self: &Rc<Self>, pieces: Vec<Piece>, turn: Turn) -> Copies {
        let (done, over) = channel();
        let addresses =
            |piece: &Piece| Addresses { from: piece.from.as_ptr(), to: piece.to.as_ptr(), fetch: piece.fetch.clone() };
        let job = Job { pieces: pieces.iter().map(addresses).collect(), turn, done };
        let number = self.next.get();
        self.next.set(number + 1);
        self.register.borrow_mut().insert(number, pieces);
        if let Some(jobs) = &*self.jobs.borrow() {
            // A thread that is gone drops the job, and with it the sender: waiting then says so.
            let _ = jobs.send(job);
        }
        Copies { number, done: over, copier: Rc::clone(self), over: false }
    }
}

impl Copies {
    /// Waits until all of it is copied; from when to when that was.
    pub fn wait(mut self) -> Result<Interval, BackendError> {
        self.finish()
    }

    fn finish(&mut self) -> Result<Interval, BackendError> {
        self.over = true;
        let outcome = self.done.recv().unwrap_or_else(|_| Err("the thread that copies is gone".into()));
        // Only now nobody uses the addresses any more.
        self.copier.register.borrow_mut().remove(&self.number);
        outcome.map_err(|cause| BackendError::Runtime { doing: "copy weights to a device".into(), cause })
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        if !self.over {
            let _ = self.finish();
        }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        *self.jobs.borrow_mut() = None;
        if let Some(thread) = self.thread.borrow_mut().take() {
            // The register goes after this, when nobody uses its addresses any more.
            let _ = thread.join();
        }
    }
}

/// Copies one weight; says when the first of them began, not counting what filled it and waiting for a turn.
fn copy(environment: &Environment, piece: &Addresses, turn: &Turn, begun: &mut Option<Duration>) -> Result<(), String> {
    if let Some(Fetch { fill, room: (address, length) }) = &piece.fetch {
        // SAFETY: staging memory of that length, lent to this job (see `Addresses`).
        fill(unsafe { std::slice::from_raw_parts_mut(*address, *length) })?;
    }
    let _turn = turn.take();
    begun.get_or_insert_with(hpp_engine::since_start);
    // SAFETY: both values are alive and of equal size (see `Addresses`).
    let status = unsafe { super::device::copy_values(environment, piece.from, piece.to) };
    // SAFETY: fresh from the call above.
    unsafe { check(status, || "copy weights".into()) }.map_err(|error| error.to_string())
}

/// Both sides of a copy are plain bytes.
pub(crate) const BYTES: DType = DType::Uint8;
