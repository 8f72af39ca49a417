//! Reading through calls that return when they are through, where there is no io_uring: several threads, one read each.

use super::request::{NotNow, Read, Request};
use super::shared::{Shared, ToExpand, ends_early};
use std::io;
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Takes requests one after the other and reads them.
pub(super) fn through_calls(requests: &Mutex<Receiver<Request>>, shared: &Shared, expander: &Sender<ToExpand>) {
    loop {
        let next = requests.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(request) = next else { return };
        match Read::new(request, &shared.staging, true) {
            Ok(read) => {
                let from = Instant::now();
                let result = read_whole(&read);
                shared.end(read, result, (from, Instant::now()), expander);
            }
            Err(NotNow::Refused(ticket, error)) => shared.refuse((ticket, error)),
            Err(NotNow::Later(_)) => unreachable!("it may wait"),
        }
    }
}

fn read_whole(read: &Read) -> io::Result<()> {
    let request = &read.request;
    // SAFETY: a staging buffer belongs to the read and holds as much as may be read at once; other memory nothing else uses until the
    // read was waited for, by the promise of `Reader::read`.
    let bytes = unsafe { std::slice::from_raw_parts_mut(read.at(), request.length) };
    let mut done = 0;
    while done < read.expected() {
        match read.file.read_at(&mut bytes[done..], request.offset + done as u64) {
            Ok(0) => return Err(ends_early()),
            Ok(more) => done += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
