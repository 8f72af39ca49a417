//! Streams of an NVIDIA device: sessions compute on one, weights and states are copied on two others. Events order them in both directions,
//! so that the host waits for none before the end of a pass.
//!
//! The compute stream is a blocking one: ONNX Runtime makes its own copies on the device's default stream, and the default stream and
//! blocking streams wait for each other. The copy streams are non-blocking and continue meanwhile. States have a copy stream of their own,
//! so that they do not wait behind the weights of later runs: these wait until earlier runs have finished.

use cudarc::driver::result::stream::{StreamKind, create};
use cudarc::driver::sys::{self, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};
use hpp_engine::BackendError;
use hpp_engine::port::{Interval, Timing, TimingToken, Uploaded};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The streams of one device. They live as long as the process, because sessions keep the compute stream's address.
pub(crate) struct Streams {
    context: Arc<CudaContext>,
    compute: Arc<CudaStream>,
    copies: [Arc<CudaStream>; 2],
    state: Mutex<EventState>,
}

#[derive(Default)]
struct EventState {
    /// Events for reuse.
    spare: Vec<CudaEvent>,
    /// Intervals that have not been reported yet.
    pending: Vec<(TimingToken, EventPair)>,
    /// A completed event and its time on the host's clock.
    anchor: Option<(CudaEvent, Duration)>,
}

/// A copy stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CopyStream {
    /// The stream for copies of weights.
    Weights,
    /// The stream for copies of states ahead of their run.
    States,
}

/// The events at the start and the end of an interval.
struct EventPair {
    start: CudaEvent,
    end: CudaEvent,
}

/// Copies that were enqueued on a copy stream.
pub(crate) struct QueuedCopies(EventPair);

/// One copy: source, target and number of bytes.
#[derive(Clone, Copy)]
pub(crate) struct CopyRange {
    pub from: *const u8,
    pub to: *mut c_void,
    pub bytes: usize,
}

/// The next timing token; unique over all devices.
static NEXT_TOKEN: AtomicU64 = AtomicU64::new(0);

/// The maximum age of the anchor. CUDA gives the time between two events in milliseconds as a float32 of 24 binary digits: 0.5 us
/// resolution at this distance. Tests replace the anchor after every pass.
const ANCHOR_AGE: Duration = if cfg!(test) { Duration::ZERO } else { Duration::from_secs(4) };

impl Streams {
    /// Creates the streams of a device. An error without the NVIDIA driver.
    pub fn new(number: usize) -> Result<Self, BackendError> {
        // SAFETY: opens the driver's library, whose initialisers have no preconditions. Every other call panics without it.
        if !unsafe { sys::is_culib_present() } {
            let cause = "the NVIDIA driver was not found".to_owned();
            return Err(BackendError::Runtime { doing: "make streams".into(), cause });
        }
        let context = CudaContext::new(number).map_err(failed("use the device"))?;
        let blocking = create(StreamKind::Default).map_err(failed("make a stream"))?;
        // SAFETY: the stream was just created in this context, which is current, and is never destroyed.
        let compute = unsafe { context.wrap_borrowed_stream(blocking) };
        let copies = || context.new_stream().map_err(failed("make a stream for copies"));
        let copies = [copies()?, copies()?];
        let streams = Streams { context, compute, copies, state: Mutex::default() };
        streams.refresh_anchor()?;
        Ok(streams)
    }

    /// The compute stream, for sessions.
    pub fn compute(&self) -> *mut () {
        self.compute.cu_stream().cast()
    }

    /// Records an event on the compute stream.
    pub fn record_compute(&self) -> Result<CudaEvent, BackendError> {
        self.record(&self.compute)
    }

    /// A token for the time of all work enqueued on the compute stream since an event.
    pub fn timing_since(&self, start: CudaEvent) -> Result<TimingToken, BackendError> {
        let end = self.record_compute()?;
        Ok(self.new_token(EventPair { start, end }))
    }

    /// Enqueues copies that start when the compute stream has reached the event `after`.
    ///
    /// # Safety
    /// Sources and targets must stay valid and unused until the copies have finished. [`wait`](Self::wait) waits for them, and memory of
    /// this device and pinned memory do so before they are freed.
    pub unsafe fn copy(
        &self,
        after: CudaEvent,
        ranges: impl IntoIterator<Item = CopyRange>,
    ) -> Result<QueuedCopies, BackendError> {
        let start = self.begin_copies(CopyStream::Weights, after)?;
        for range in ranges {
            // SAFETY: the caller's promise.
            unsafe { self.copy_one(CopyStream::Weights, range) }?;
        }
        self.end_copies(CopyStream::Weights, start)
    }

    /// Makes a copy stream wait for the event `after`; an event at the start of the copies that follow.
    pub fn begin_copies(&self, on: CopyStream, after: CudaEvent) -> Result<CudaEvent, BackendError> {
        self.copies[on as usize].wait(&after).map_err(failed("order copies after runs"))?;
        self.recycle(after);
        self.record_copies(on)
    }

    /// Enqueues one copy on a copy stream.
    ///
    /// # Safety
    /// That of [`copy`](Self::copy).
    pub unsafe fn copy_one(
        &self,
        on: CopyStream,
        CopyRange { from, to, bytes }: CopyRange,
    ) -> Result<(), BackendError> {
        self.context.bind_to_thread().map_err(failed("use the device"))?;
        // SAFETY: the caller's promise; the stream belongs to this context, which is current.
        let enqueued = unsafe {
            let bytes = std::slice::from_raw_parts(from, bytes);
            result::memcpy_htod_async(to as sys::CUdeviceptr, bytes, self.copies[on as usize].cu_stream())
        };
        enqueued.map_err(failed("copy to the device"))
    }

    /// Fills memory of the device with zeros, after all work on the compute stream, and waits until it is done.
    ///
    /// # Safety
    /// `to` is an allocation of at least `bytes` on this device, which no copy uses meanwhile.
    pub unsafe fn zero(&self, to: *mut c_void, bytes: usize) -> Result<(), BackendError> {
        self.context.bind_to_thread().map_err(failed("use the device"))?;
        // SAFETY: the caller's promise; the stream belongs to this context, which is current.
        let enqueued = unsafe { result::memset_d8_async(to as sys::CUdeviceptr, 0, bytes, self.compute.cu_stream()) };
        enqueued.map_err(failed("zero memory"))?;
        self.wait_for_runs()
    }

    /// Records an event on a copy stream.
    pub fn record_copies(&self, on: CopyStream) -> Result<CudaEvent, BackendError> {
        self.record(&self.copies[on as usize])
    }

    /// The copies enqueued since `start`.
    pub fn end_copies(&self, on: CopyStream, start: CudaEvent) -> Result<QueuedCopies, BackendError> {
        Ok(QueuedCopies(EventPair { start, end: self.record_copies(on)? }))
    }

    /// Makes later runs wait for copies. Returns tokens for the copies and for the time that the compute stream stalls.
    pub fn order_runs_after(&self, QueuedCopies(copies): QueuedCopies) -> Result<Uploaded, BackendError> {
        let before = self.record_compute()?;
        self.compute.wait(&copies.end).map_err(failed("order runs after copies"))?;
        let copy = Timing::Pending(self.new_token(copies));
        Ok(Uploaded { copy, stall: Some(self.timing_since(before)?) })
    }

    /// Waits until all runs have finished.
    pub fn wait_for_runs(&self) -> Result<(), BackendError> {
        self.compute.synchronize().map_err(failed("wait for the device"))
    }

    /// Waits until all runs and copies have finished.
    pub fn wait(&self) -> Result<(), BackendError> {
        self.wait_for_runs()?;
        self.copies.iter().try_for_each(|stream| stream.synchronize()).map_err(failed("wait for copies"))
    }

    /// Waits until all runs have finished, and reports their intervals and those of the copies they needed.
    pub fn report(&self, report: &mut dyn FnMut(TimingToken, Interval)) -> Result<(), BackendError> {
        self.wait_for_runs()?;
        // The vector is put back empty, so that the next pass reuses its capacity.
        let mut pending = std::mem::take(&mut self.state().pending);
        let mut reported = Ok(());
        for (token, events) in pending.drain(..) {
            reported = reported.and_then(|()| self.interval(&events).map(|interval| report(token, interval)));
            self.recycle(events.start);
            self.recycle(events.end);
        }
        self.state().pending = pending;
        reported?;
        self.refresh_anchor()
    }

    /// The interval between two completed events, on the host's clock.
    fn interval(&self, events: &EventPair) -> Result<Interval, BackendError> {
        let known = self.state().anchor.take();
        let (anchor, at) = match known {
            Some(anchor) => anchor,
            None => self.new_anchor()?,
        };
        let time_of = |event: &CudaEvent| -> Result<Duration, BackendError> {
            let millis = anchor.elapsed_ms(event).map_err(failed("ask how long a run took"))?;
            let distance = Duration::from_secs_f64(f64::from(millis.abs()) / 1e3);
            Ok(if millis < 0.0 { at.saturating_sub(distance) } else { at + distance })
        };
        let interval = time_of(&events.start).and_then(|start| Ok(Interval { start, end: time_of(&events.end)? }));
        self.state().anchor = Some((anchor, at));
        interval
    }

    /// Replaces the anchor if it is older than [`ANCHOR_AGE`]. No run may be in progress.
    fn refresh_anchor(&self) -> Result<(), BackendError> {
        let now = hpp_engine::since_start();
        let is_old = |(_, at): &(CudaEvent, Duration)| now.saturating_sub(*at) > ANCHOR_AGE;
        if self.state().anchor.as_ref().is_none_or(is_old) {
            let anchor = self.new_anchor()?;
            // Two statements: a lock taken in the condition of an `if let` is held in its body, and `recycle` takes it, too.
            let old = self.state().anchor.replace(anchor);
            if let Some((old, _)) = old {
                self.recycle(old);
            }
        }
        Ok(())
    }

    fn new_anchor(&self) -> Result<(CudaEvent, Duration), BackendError> {
        let event = self.record_compute()?;
        event.synchronize().map_err(failed("wait for the device"))?;
        Ok((event, hpp_engine::since_start()))
    }

    fn new_token(&self, events: EventPair) -> TimingToken {
        let token = TimingToken(NEXT_TOKEN.fetch_add(1, Ordering::Relaxed));
        self.state().pending.push((token, events));
        token
    }

    fn record(&self, stream: &CudaStream) -> Result<CudaEvent, BackendError> {
        let spare = self.state().spare.pop();
        let event = match spare {
            Some(event) => event,
            None => self.context.new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed("make an event"))?,
        };
        event.record(stream).map_err(failed("record an event"))?;
        Ok(event)
    }

    /// Keeps an event for reuse. The host has waited for it, or a stream waits for it: recording it again affects neither.
    pub fn recycle(&self, event: CudaEvent) {
        self.state().spare.push(event);
    }

    fn state(&self) -> MutexGuard<'_, EventState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn failed(doing: &'static str) -> impl Fn(DriverError) -> BackendError {
    move |error| BackendError::Runtime { doing: doing.into(), cause: error.to_string() }
}
