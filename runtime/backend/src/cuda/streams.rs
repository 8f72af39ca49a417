//! Streams of an NVIDIA device: sessions compute on one, weights are copied on another, and events order the two both ways, so
//! that the host waits for neither before the end of a pass.
//!
//! The stream that computes is an ordinary one: copies that ONNX Runtime makes by itself go by the device's default stream, and
//! ordinary streams wait for that one and it for them. The stream that copies weights is not bound to it and goes on
//! meanwhile.

use cudarc::driver::result::stream::{StreamKind, create};
use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};
use hpp_engine::BackendError;
use hpp_engine::port::{Interval, Timing, TimingToken, Uploaded};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The streams of one device, for as long as the process lives: sessions that compute there keep its address.
pub(crate) struct Streams {
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    copies: Arc<CudaStream>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Events that nobody uses at present.
    spare: Vec<CudaEvent>,
    /// What tickets stand for, between two events.
    begun: Vec<(TimingToken, Between)>,
    /// An event that is over, and when that was.
    anchor: Option<(CudaEvent, Duration)>,
}

/// From one event to another.
struct Between {
    from: CudaEvent,
    to: CudaEvent,
}

/// Copies of weights that were given to the stream for them.
pub(crate) struct Copied(Between);

/// A piece of weights that is to be copied: where from, where to and how many bytes.
#[derive(Clone, Copy)]
pub(crate) struct Address {
    pub from: *const u8,
    pub to: *mut c_void,
    pub bytes: usize,
}

/// Tickets of all devices differ.
static TICKETS: AtomicU64 = AtomicU64::new(0);

/// Times are told by events against an anchor, in milliseconds of 24 binary digits: with one no older than this, to 0.5 us.
const ANCHORED_FOR: Duration = Duration::from_secs(4);

impl Streams {
    /// Streams on the device of this number. The driver must be there.
    pub fn new(number: usize) -> Result<Self, BackendError> {
        // SAFETY: tries to open the driver's library, whose initialisers have no preconditions. Every other call panics without it.
        if !unsafe { sys::is_culib_present() } {
            let cause = "the NVIDIA driver is not to be found".to_owned();
            return Err(BackendError::Runtime { doing: "make streams".into(), cause });
        }
        let context = CudaContext::new(number).map_err(failed("use the device"))?;
        let ordinary = create(StreamKind::Default).map_err(failed("make a stream"))?;
        // SAFETY: the stream was just made in this context, which is current; nobody destroys it.
        let compute = unsafe { context.wrap_borrowed_stream(ordinary) };
        let copies = context.new_stream().map_err(failed("make a stream for copies"))?;
        let streams = Streams { context, compute, copies, state: Mutex::default() };
        streams.anchor()?;
        Ok(streams)
    }

    /// The stream that computes, for sessions to be given.
    pub fn compute(&self) -> *mut () {
        self.compute.cu_stream().cast()
    }

    /// Where the stream that computes is now.
    pub fn mark(&self) -> Result<CudaEvent, BackendError> {
        self.event_on(&self.compute)
    }

    /// A ticket for what was given to the stream that computes since a mark.
    pub fn since(&self, from: CudaEvent) -> Result<TimingToken, BackendError> {
        let to = self.mark()?;
        Ok(self.ticket(Between { from, to }))
    }

    /// Copies weights once all that was given to the stream that computes up to a mark is over.
    ///
    /// # Safety
    /// The bytes must be there and be left alone until the copy is over. [`wait`](Self::wait) says so, and memory of this
    /// device and pinned memory wait for it before they go.
    pub unsafe fn copy(
        &self,
        after: CudaEvent,
        pieces: impl IntoIterator<Item = Address>,
    ) -> Result<Copied, BackendError> {
        let from = self.begin_copies(after)?;
        for piece in pieces {
            // SAFETY: the caller's promise.
            unsafe { self.copy_one(piece) }?;
        }
        self.end_copies(from)
    }

    /// Lets copies wait for a mark; from when on they go.
    pub fn begin_copies(&self, after: CudaEvent) -> Result<CudaEvent, BackendError> {
        self.copies.wait(&after).map_err(failed("order copies behind runs"))?;
        self.give_back(after);
        self.event_on(&self.copies)
    }

    /// Gives one piece to the stream for copies.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    pub unsafe fn copy_one(&self, Address { from, to, bytes }: Address) -> Result<(), BackendError> {
        self.context.bind_to_thread().map_err(failed("use the device"))?;
        // SAFETY: the caller's promise; the stream is one of this context, which is current.
        let begun = unsafe {
            let bytes = std::slice::from_raw_parts(from, bytes);
            result::memcpy_htod_async(to as sys::CUdeviceptr, bytes, self.copies.cu_stream())
        };
        begun.map_err(failed("copy weights"))
    }

    /// Where the stream for copies is now.
    pub fn mark_copies(&self) -> Result<CudaEvent, BackendError> {
        self.event_on(&self.copies)
    }

    /// What has been copied since.
    pub fn end_copies(&self, from: CudaEvent) -> Result<Copied, BackendError> {
        Ok(Copied(Between { from, to: self.mark_copies()? }))
    }

    /// Lets what is given to the stream that computes from now on wait for copies.
    pub fn arrive(&self, Copied(copied): Copied) -> Result<Uploaded, BackendError> {
        let before = self.mark()?;
        self.compute.wait(&copied.to).map_err(failed("order runs behind copies"))?;
        let copy = Timing::Pending(self.ticket(copied));
        Ok(Uploaded { copy, stall: Some(self.since(before)?) })
    }

    /// Waits until all runs are over.
    pub fn wait_for_runs(&self) -> Result<(), BackendError> {
        self.compute.synchronize().map_err(failed("wait for the device"))
    }

    /// Waits until nothing is going on at all.
    pub fn wait(&self) -> Result<(), BackendError> {
        self.wait_for_runs()?;
        self.copies.synchronize().map_err(failed("wait for copies"))
    }

    /// Waits until all runs have finished, and reports their intervals and those of the copies they needed.
    pub fn report(&self, report: &mut dyn FnMut(TimingToken, Interval)) -> Result<(), BackendError> {
        self.wait_for_runs()?;
        // Taken and put back empty, so that the next pass finds its room.
        let mut begun = std::mem::take(&mut self.state().begun);
        let mut told = Ok(());
        for (ticket, between) in begun.drain(..) {
            told = told.and_then(|()| self.took(&between).map(|took| report(ticket, took)));
            self.give_back(between.from);
            self.give_back(between.to);
        }
        self.state().begun = begun;
        told?;
        self.anchor()
    }

    /// From when to when something was that is over.
    fn took(&self, between: &Between) -> Result<Interval, BackendError> {
        let (anchor, at) = match self.state().anchor.take() {
            Some(anchor) => anchor,
            None => self.new_anchor()?,
        };
        let when = |event: &CudaEvent| -> Result<Duration, BackendError> {
            let millis = anchor.elapsed_ms(event).map_err(failed("ask how long a run took"))?;
            let since = Duration::from_secs_f64(f64::from(millis.abs()) / 1e3);
            Ok(if millis < 0.0 { at.saturating_sub(since) } else { at + since })
        };
        let took = when(&between.from).and_then(|from| Ok(Interval { start: from, end: when(&between.to)? }));
        self.state().anchor = Some((anchor, at));
        took
    }

    /// Sees to an anchor that is not too old, at a moment when no run is going on.
    fn anchor(&self) -> Result<(), BackendError> {
        let now = hpp_engine::since_start();
        let is_old = |(_, at): &(CudaEvent, Duration)| now.saturating_sub(*at) > ANCHORED_FOR;
        if self.state().anchor.as_ref().is_none_or(is_old) {
            let anchor = self.new_anchor()?;
            if let Some((old, _)) = self.state().anchor.replace(anchor) {
                self.give_back(old);
            }
        }
        Ok(())
    }

    fn new_anchor(&self) -> Result<(CudaEvent, Duration), BackendError> {
        let event = self.mark()?;
        event.synchronize().map_err(failed("wait for the device"))?;
        Ok((event, hpp_engine::since_start()))
    }

    fn ticket(&self, between: Between) -> TimingToken {
        let ticket = TimingToken(TICKETS.fetch_add(1, Ordering::Relaxed));
        self.state().begun.push((ticket, between));
        ticket
    }

    fn event_on(&self, stream: &CudaStream) -> Result<CudaEvent, BackendError> {
        let spare = self.state().spare.pop();
        let event = match spare {
            Some(event) => event,
            None => self.context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed("make an event"))?,
        };
        event.record(stream).map_err(failed("record an event"))?;
        Ok(event)
    }

    /// An event that was waited for, or is waited for by a stream already, may be recorded anew.
    pub fn give_back(&self, event: CudaEvent) {
        self.state().spare.push(event);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(doing: &'static str) -> impl Fn(DriverError) -> BackendError {
    move |error| BackendError::Runtime { doing: doing.into(), cause: error.to_string() }
}
