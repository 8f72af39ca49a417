//! A fake of the NVIDIA driver's library, for tests of ordering: each stream is a queue whose work executes as late, or as early, as
//! events allow.
//!
//! Device memory is host memory. Only the functions that `cuda/streams.rs` calls exist. The variable `HPP_FAKE_CUDA` selects the eager
//! streams; the others execute nothing before a caller waits for them:
//!
//! - `copies`: copies overtake computation wherever no event forbids it;
//! - `compute`: computation overtakes copies.

#![allow(non_snake_case, reason = "the driver's names")]
#![allow(missing_docs, reason = "the driver's functions")]

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

type Status = c_int;
const OK: Status = 0;
const INVALID: Status = 1;

/// Streams are numbered from 1. The first one is the compute stream, because `Streams::new` creates it first.
#[derive(Default)]
struct Driver {
    streams: Vec<Stream>,
    events: Vec<Event>,
    started: Option<Instant>,
    copied: u64,
}

#[derive(Default)]
struct Stream {
    left: VecDeque<Work>,
    eager: bool,
}

#[derive(Default)]
struct Event {
    /// How often it was recorded.
    recorded: u64,
    /// The number of the last record that a stream has reached,
    done: u64,
    /// and when.
    at: f32,
}

enum Work {
    Copy { to: usize, from: usize, bytes: usize },
    Fill { to: usize, value: u8, bytes: usize },
    Record { event: usize, number: u64 },
    Wait { event: usize, number: u64 },
    Call { function: extern "C" fn(*mut c_void), data: usize },
}

static DRIVER: Mutex<Option<Driver>> = Mutex::new(None);

fn driver<T>(act: impl FnOnce(&mut Driver) -> T) -> T {
    let mut driver: MutexGuard<'_, _> = DRIVER.lock().unwrap_or_else(PoisonError::into_inner);
    let driver = driver.get_or_insert_with(Driver::default);
    driver.started.get_or_insert_with(Instant::now);
    act(driver)
}

impl Driver {
    fn push(&mut self, stream: usize, work: Work) {
        self.streams[stream - 1].left.push_back(work);
        self.run_eager();
    }

    /// Executes the work of eager streams up to the next wait.
    fn run_eager(&mut self) {
        for stream in 1..=self.streams.len() {
            while self.streams[stream - 1].eager && self.can_go_on(stream) {
                self.step(stream);
            }
        }
    }

    fn can_go_on(&self, stream: usize) -> bool {
        match self.streams[stream - 1].left.front() {
            None => false,
            Some(Work::Wait { event, number }) => self.events[event - 1].done >= *number,
            Some(_) => true,
        }
    }

    /// Executes a stream until an event is done or the stream is empty, and whatever it waits for.
    fn finish(&mut self, stream: usize, until: Option<(usize, u64)>) {
        while until.is_none_or(|(event, number)| self.events[event - 1].done < number) {
            match self.streams[stream - 1].left.front() {
                None => return,
                Some(Work::Wait { event, number }) if self.events[event - 1].done < *number => {
                    let (event, number) = (*event, *number);
                    let record = |work: &Work| matches!(work, Work::Record { event: own, number: at } if (*own, *at) == (event, number));
                    let other = self.streams.iter().position(|stream| stream.left.iter().any(record));
                    self.finish(other.expect("a stream records it") + 1, Some((event, number)));
                }
                Some(_) => self.step(stream),
            }
        }
    }

    fn step(&mut self, stream: usize) {
        let now = self.started.map_or(0.0, |started| started.elapsed().as_secs_f32() * 1e3);
        match self.streams[stream - 1].left.pop_front() {
            Some(Work::Copy { to, from, bytes }) => {
                self.copied += 1;
                // SAFETY: the caller of the copy promised that source and target stay valid until it has finished.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
            }
            // SAFETY: the caller promised that the memory stays valid until it is filled.
            Some(Work::Fill { to, value, bytes }) => unsafe { std::ptr::write_bytes(to as *mut u8, value, bytes) },
            Some(Work::Record { event, number }) => {
                let event = &mut self.events[event - 1];
                (event.done, event.at) = (event.done.max(number), now);
            }
            Some(Work::Call { function, data }) => function(data as *mut c_void),
            Some(Work::Wait { .. }) | None => {}
        }
    }
}

/// Writes an output parameter.
fn write_out<T>(to: *mut T, value: T) -> Status {
    // SAFETY: the API requires valid output parameters.
    unsafe { to.write(value) };
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_: c_uint) -> Status {
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: *mut c_int, number: c_int) -> Status {
    if number == 0 { write_out(device, 0) } else { INVALID }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: *mut c_int, _: c_int, _: c_int) -> Status {
    write_out(value, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, _: c_int) -> Status {
    write_out(context, 1)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_: c_int) -> Status {
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: *mut usize) -> Status {
    write_out(context, 1)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(_: usize) -> Status {
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Status {
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamCreate(stream: *mut usize, _: c_uint) -> Status {
    let number = driver(|driver| {
        let eager = std::env::var("HPP_FAKE_CUDA").unwrap_or_default();
        let computes = driver.streams.is_empty();
        driver
            .streams
            .push(Stream { left: VecDeque::new(), eager: eager == if computes { "compute" } else { "copies" } });
        driver.streams.len()
    });
    write_out(stream, number)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamDestroy_v2(_: usize) -> Status {
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: usize) -> Status {
    driver(|driver| driver.finish(stream, None));
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: usize, event: usize, _: c_uint) -> Status {
    driver(|driver| {
        let number = driver.events[event - 1].recorded;
        driver.push(stream, Work::Wait { event, number });
    });
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventCreate(event: *mut usize, _: c_uint) -> Status {
    let number = driver(|driver| {
        driver.events.push(Event::default());
        driver.events.len()
    });
    write_out(event, number)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventDestroy_v2(_: usize) -> Status {
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: usize, stream: usize) -> Status {
    driver(|driver| {
        driver.events[event - 1].recorded += 1;
        let number = driver.events[event - 1].recorded;
        driver.push(stream, Work::Record { event, number });
    });
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: usize) -> Status {
    driver(|driver| {
        let number = driver.events[event - 1].recorded;
        for stream in 1..=driver.streams.len() {
            let record =
                |work: &Work| matches!(work, Work::Record { event: own, number: at } if (*own, *at) == (event, number));
            if driver.streams[stream - 1].left.iter().any(record) {
                driver.finish(stream, Some((event, number)));
            }
        }
    });
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuEventElapsedTime_v2(millis: *mut f32, from: usize, to: usize) -> Status {
    let both = driver(|driver| {
        let done = |event: usize| Some(&driver.events[event - 1]).filter(|event| event.done == event.recorded);
        Some(done(to)?.at - done(from)?.at)
    });
    both.map_or(INVALID, |elapsed| write_out(millis, elapsed))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) -> Status {
    driver(|driver| driver.push(stream, Work::Copy { to, from, bytes }));
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8Async(to: usize, value: u8, bytes: usize, stream: usize) -> Status {
    driver(|driver| driver.push(stream, Work::Fill { to, value, bytes }));
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(stream: usize, function: extern "C" fn(*mut c_void), data: usize) -> Status {
    driver(|driver| driver.push(stream, Work::Call { function, data }));
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(_: c_int, name: *mut *const c_char) -> Status {
    write_out(name, c"an error".as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(_: c_int, text: *mut *const c_char) -> Status {
    write_out(text, c"an error of the fake driver".as_ptr())
}
