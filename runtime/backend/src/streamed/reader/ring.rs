//! Reading through io_uring: one thread, several reads at once.

use super::super::file::SECTOR;
use super::DEPTH;
use super::request::{NotNow, Read, Request};
use super::shared::{Shared, Times, ToExpand, ends_early};
use io_uring::{IoUring, opcode, types};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::mpsc::{Receiver, Sender, TryRecvError};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// A read that the ring has.
struct InFlight {
    read: Read,
    /// Bytes that have come.
    done: usize,
    from: Instant,
}

/// Takes requests and keeps the ring full until nobody can ask any more.
pub(super) fn through_ring(
    mut ring: IoUring,
    requests: &Mutex<Receiver<Request>>,
    shared: &Shared,
    expander: &Sender<ToExpand>,
) {
    let requests = requests.lock().unwrap_or_else(PoisonError::into_inner);
    let mut next: Option<Request> = None;
    let mut flying: HashMap<u64, InFlight> = HashMap::new();
    let mut waiting: VecDeque<InFlight> = VecDeque::new();
    let mut over: Vec<(Read, io::Result<()>, Times)> = Vec::new();
    let mut last = Instant::now();
    loop {
        while flying.len() + waiting.len() < DEPTH {
            let idle = flying.is_empty() && waiting.is_empty() && over.is_empty();
            let request = match next.take() {
                Some(request) => Ok(request),
                None if idle => requests.recv().map_err(|_| TryRecvError::Disconnected),
                None => requests.try_recv(),
            };
            match request.map(|request| Read::new(request, &shared.staging, idle)) {
                Ok(Ok(read)) => waiting.push_back(InFlight { read, done: 0, from: Instant::now() }),
                Ok(Err(NotNow::Refused(ticket, error))) => shared.refuse((ticket, error)),
                Ok(Err(NotNow::Later(request))) => {
                    next = Some(request);
                    break;
                }
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) if idle => return,
                Err(TryRecvError::Disconnected) => break,
            }
        }
        while let Some(mut flight) = waiting.pop_front() {
            flight.from = if flying.is_empty() { Instant::now() } else { flight.from };
            push(&mut ring, &flight);
            flying.insert(flight.read.request.ticket.0, flight);
        }
        // The disk is at work again before anybody is told what it brought, who might want this thread's processor.
        let begun = if over.is_empty() { Ok(0) } else { ring.submit() };
        over.drain(..).for_each(|(read, result, times)| shared.end(read, result, times, expander));
        if flying.is_empty() {
            continue;
        }
        match begun.and_then(|_| ring.submit_and_wait(1)) {
            Ok(_) => {}
            Err(error) if is_passing(&error) => continue,
            // Nothing may be told to be over while the system may still write to its memory, and nobody can say any more
            // whether it does. Only a mistake in this file leads here.
            Err(error) => {
                eprintln!(
                    "hpp: fatal: io_uring cannot be waited on ({error}) with {} reads of weights under way, which may still \
                     write to memory",
                    flying.len()
                );
                std::process::abort()
            }
        }
        while let Some(entry) = ring.completion().next() {
            let Some(mut flight) = flying.remove(&entry.user_data()) else { continue };
            let expected = flight.read.expected();
            let result = match usize::try_from(entry.result()) {
                Err(_) => Err(io::Error::from_raw_os_error(-entry.result())),
                Ok(bytes) if flight.done + bytes >= expected => Ok(()),
                Ok(0) => Err(ends_early()),
                Ok(bytes) => {
                    // Direct reads go on at a sector.
                    let done = (flight.done + bytes) / SECTOR as usize * SECTOR as usize;
                    if done > flight.done {
                        flight.done = done;
                        waiting.push_back(flight);
                        continue;
                    }
                    Err(ends_early())
                }
            };
            let times = (flight.from.max(last), Instant::now());
            last = times.1;
            over.push((flight.read, result, times));
        }
    }
}

/// Whether the same call may work the next time.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

fn push(ring: &mut IoUring, InFlight { read, done, .. }: &InFlight) {
    let request = &read.request;
    let length = (request.length - done) as u32;
    let entry = opcode::Read::new(types::Fd(read.file.descriptor()), read.at().wrapping_add(*done), length)
        .offset(request.offset + *done as u64)
        .build()
        .user_data(request.ticket.0);
    // SAFETY: the descriptor is open as long as the read is kept, which is until it is over; so is the memory: a staging buffer
    // belongs to the read, and other memory stays by the promise of `Reader::read`. There is room: no more reads fly than the ring
    // has entries.
    let pushed = unsafe { ring.submission().push(&entry) };
    pushed.expect("the ring has an entry for each read that may fly");
}
