//! Reads with blocking calls, where there is no io_uring: several threads, one read each.

use super::request::{NotNow, Read, ReadRequest};
use super::shared::{Shared, ToDecompress, ends_early};
use std::io;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Reads one request after the other.
pub(super) fn through_calls(
    requests: &Mutex<Receiver<ReadRequest>>,
    shared: &Shared,
    decompressor: &Sender<ToDecompress>,
) {
    loop {
        let next = requests.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(request) = next else { return };
        match Read::new(request, &shared.staging, true) {
            Ok(read) => {
                let from = Instant::now();
                let result = read_whole(&read);
                shared.finish(read, result, (from, Instant::now()), decompressor);
            }
            Err(NotNow::Refused(ticket, error)) => shared.refuse(ticket, error),
            Err(NotNow::Later(_)) => unreachable!("it may wait"),
        }
    }
}

fn read_whole(read: &Read) -> io::Result<()> {
    let request = &read.request;
    // SAFETY: a staging buffer belongs to the read and has room for the largest one; any other destination is not used by anything
    // else until the read was waited for, by the contract of `Reader::read`.
    let bytes = unsafe { std::slice::from_raw_parts_mut(read.at(), request.length) };
    let mut done = 0;
    while done < read.expected() {
        match read.file.read_at(&mut bytes[done..], request.offset + done as u64) {
            Ok(0) => return Err(ends_early(&read.file)),
            Ok(more) => done += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
