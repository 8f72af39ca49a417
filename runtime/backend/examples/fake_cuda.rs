//! A stand-in for the NVIDIA driver's library, for tests of how work is ordered: streams are lists that are worked off as late,
//! or as early, as their order allows.
//!
//! Device memory is host memory. Only what `cuda/streams.rs` calls is there. What a test says in `HPP_FAKE_CUDA` decides which
//! streams are eager; the others do nothing before somebody waits for them:
//!
//! - `copies`: what copies overtakes what computes, wherever no event forbids it;
//! - `compute`: what computes overtakes what copies.

#![allow(non_snake_case, reason = "the driver's names")]
#![allow(missing_docs, reason = "the driver's functions")]

use std::collections::VecDeque;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

type Status = c_int;
const OK: Status = 0;
const INVALID: Status = 1;

/// Streams by number, from 1; number 1 is the first that was made, which computes.
#[derive(Default)]
struct Driver {
    streams: Vec<Stream>,
    /// How often each event was recorded, and what is done of that: with the time of the last.
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
    recorded: u64,
    done: u64,
    at: f32,
}

enum Work {
    Copy { to: usize, from: usize, bytes: usize },
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

    /// Works off what eager streams can do by themselves.
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

    /// Works a stream off until an event is done or nothing is left, and what that waits for.
    fn finish(&mut self, stream: usize, until: Option<(usize, u64)>) {
        while until.is_none_or(|(event, number)| self.events[event - 1].done < number) {
            match self.streams[stream - 1].left.front() {
                None => return,
                Some(Work::Wait { event, number }) if self.events[event - 1].done < *number => {
                    let (event, number) = (*event, *number);
                    let record = |work: &Work| matches!(work, Work::Record { event: own, number: at } if (*own, *at) == (event, number));
                    let other = self.streams.iter().position(|stream| stream.left.iter().any(record));
                    self.finish(other.expect("somebody records it") + 1, Some((event, number)));
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
                // SAFETY: whoever asked for the copy promised that both are there until it is over.
                unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to as *mut u8, bytes) };
            }
            Some(Work::Record { event, number }) => {
                let event = &mut self.events[event - 1];
                (event.done, event.at) = (event.done.max(number), now);
            }
            Some(Work::Call { function, data }) => function(data as *mut c_void),
            Some(Work::Wait { .. }) | None => {}
        }
    }
}

/// Writes through a pointer of the caller's.
fn give<T>(to: *mut T, value: T) -> Status {
    // SAFETY: the driver's callers give places for what they ask for.
    unsafe { to.write(value) };
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_: c_uint) -> Status {
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGet(device: *mut c_int, number: c_int) -> Status {
    if number == 0 { give(device, 0) } else { INVALID }
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDeviceGetAttribute(value: *mut c_int, _: c_int, _: c_int) -> Status {
    give(value, 0)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRetain(context: *mut usize, _: c_int) -> Status {
    give(context, 1)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_: c_int) -> Status {
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxGetCurrent(context: *mut usize) -> Status {
    give(context, 1)
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
    give(stream, number)
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
    give(event, number)
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
    both.map_or(INVALID, |elapsed| give(millis, elapsed))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize) -> Status {
    driver(|driver| driver.push(stream, Work::Copy { to, from, bytes }));
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchHostFunc(stream: usize, function: extern "C" fn(*mut c_void), data: usize) -> Status {
    driver(|driver| driver.push(stream, Work::Call { function, data }));
    OK
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorName(_: c_int, name: *mut *const c_char) -> Status {
    give(name, c"an error".as_ptr())
}

#[unsafe(no_mangle)]
pub extern "C" fn cuGetErrorString(_: c_int, text: *mut *const c_char) -> Status {
    give(text, c"an error of the stand-in".as_ptr())
}
