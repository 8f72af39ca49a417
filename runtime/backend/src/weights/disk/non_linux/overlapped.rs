//! Windows: overlapped reads of a file without buffering, several in flight from one thread.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::windows::fs::OpenOptionsExt;
use std::os::windows::io::{AsRawHandle, FromRawHandle, OwnedHandle};
use std::path::Path;
use windows_sys::Win32::Foundation::{
    ERROR_HANDLE_EOF, ERROR_INVALID_PARAMETER, ERROR_IO_PENDING, ERROR_NOT_SUPPORTED,
};
use windows_sys::Win32::Storage::FileSystem::{FILE_FLAG_NO_BUFFERING, FILE_FLAG_OVERLAPPED, ReadFile};
use windows_sys::Win32::System::IO::{GetOverlappedResult, OVERLAPPED};
use windows_sys::Win32::System::Threading::CreateEventW;

/// Reads in flight at once.
const DEPTH: usize = 8;

/// Opens a file for direct reads; `None` if its file system has none. The standard library must not read from it: its reads cannot be
/// overlapped.
pub(super) fn open(path: &Path) -> io::Result<Option<File>> {
    let direct = FILE_FLAG_NO_BUFFERING | FILE_FLAG_OVERLAPPED;
    match OpenOptions::new().read(true).custom_flags(direct).open(path) {
        Ok(file) => Ok(Some(file)),
        Err(error) if is(&error, &[ERROR_INVALID_PARAMETER, ERROR_NOT_SUPPORTED]) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Fills `bytes` from an offset in pieces of `piece` bytes, both multiples of a sector; how many were read, fewer than asked for at the end
/// of the file.
pub(super) fn read(file: &File, offset: u64, bytes: &mut [u8], piece: usize) -> io::Result<usize> {
    let (mut in_flight, mut read) = (VecDeque::with_capacity(DEPTH), Ok(0));
    let finish = |read: io::Result<usize>, ended: Overlapped| {
        // Each is waited for, even if an earlier one failed.
        let more = ended.wait(file);
        read.and_then(|sum| more.map(|count| sum + count))
    };
    for (number, part) in bytes.chunks_mut(piece).enumerate() {
        if in_flight.len() == DEPTH
            && let Some(oldest) = in_flight.pop_front()
        {
            read = finish(read, oldest);
        }
        if read.is_err() {
            break;
        }
        // SAFETY: `bytes` is borrowed mutably until all reads have been waited for, below; a panic in between is not possible, because an
        // allocation that fails aborts.
        match unsafe { Overlapped::begin(file, offset + (number * piece) as u64, part) } {
            Ok(begun) => in_flight.push_back(begun),
            Err(error) => read = Err(error),
        }
    }
    in_flight.into_iter().fold(read, finish)
}

/// A read in flight. Must be waited for.
struct Overlapped {
    state: Box<OVERLAPPED>,
    /// Signalled when the read has ended. The handle of the file cannot serve: it is signalled by any of its reads.
    _event: OwnedHandle,
    /// Whether the read ended at once at the end of the file.
    is_empty: bool,
}

impl Overlapped {
    /// # Safety
    /// Nothing may use `bytes` until [`wait`](Self::wait) has returned.
    unsafe fn begin(file: &File, offset: u64, bytes: &mut [u8]) -> io::Result<Self> {
        let length = u32::try_from(bytes.len()).map_err(io::Error::other)?;
        // SAFETY: the call takes no pointer that is not null.
        let event = unsafe { CreateEventW(std::ptr::null(), 1, 0, std::ptr::null()) };
        if event.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the event was made above and nothing else owns it.
        let owned = unsafe { OwnedHandle::from_raw_handle(event) };
        let mut state = Box::new(OVERLAPPED { hEvent: event, ..OVERLAPPED::default() });
        state.Anonymous.Anonymous.Offset = offset as u32;
        state.Anonymous.Anonymous.OffsetHigh = (offset >> 32) as u32;
        let (handle, at) = (file.as_raw_handle(), bytes.as_mut_ptr());
        // SAFETY: the file is open, and buffer, state and event live until the read was waited for.
        let ended = unsafe { ReadFile(handle, at, length, std::ptr::null_mut(), &mut *state) } != 0;
        let error = io::Error::last_os_error();
        match ended {
            true => Ok(Overlapped { state, _event: owned, is_empty: false }),
            false if is(&error, &[ERROR_IO_PENDING]) => Ok(Overlapped { state, _event: owned, is_empty: false }),
            false if is(&error, &[ERROR_HANDLE_EOF]) => Ok(Overlapped { state, _event: owned, is_empty: true }),
            false => Err(error),
        }
    }

    /// Waits for the read; how many bytes it has read.
    fn wait(self, file: &File) -> io::Result<usize> {
        if self.is_empty {
            return Ok(0);
        }
        let mut count = 0;
        // SAFETY: the state is that of a read of this file, which was begun and not waited for.
        let done = unsafe { GetOverlappedResult(file.as_raw_handle(), &*self.state, &mut count, 1) } != 0;
        if done {
            return Ok(count as usize);
        }
        let error = io::Error::last_os_error();
        if is(&error, &[ERROR_HANDLE_EOF]) { Ok(0) } else { Err(error) }
    }
}

fn is(error: &io::Error, codes: &[u32]) -> bool {
    error.raw_os_error().is_some_and(|code| codes.contains(&(code as u32)))
}
