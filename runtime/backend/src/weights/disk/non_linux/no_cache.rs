//! macOS: reads of a file with `F_NOCACHE`, by a few threads, since a thread has one read in flight.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;

/// Threads that read.
const THREADS: usize = 4;

/// Opens a file for reads that do not fill the file cache; `None` if its file system refuses.
pub(super) fn open(path: &Path) -> io::Result<Option<File>> {
    let file = File::open(path)?;
    // SAFETY: the descriptor is open, and the call takes no pointer.
    let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_NOCACHE, 1) } != -1;
    Ok(done.then_some(file))
}

/// Fills `bytes` from an offset in pieces of `piece` bytes; how many were read, fewer than asked for at the end of the file.
pub(super) fn read(file: &File, offset: u64, bytes: &mut [u8], piece: usize) -> io::Result<usize> {
    let mut shares: Vec<Vec<(u64, &mut [u8])>> = (0..THREADS).map(|_| Vec::new()).collect();
    for (number, part) in bytes.chunks_mut(piece).enumerate() {
        shares[number % THREADS].push((offset + (number * piece) as u64, part));
    }
    let read_all = |share: Vec<(u64, &mut [u8])>| {
        share.into_iter().try_fold(0, |sum, (at, part)| read_part(file, at, part).map(|count| sum + count))
    };
    thread::scope(|scope| {
        let mut shares = shares.into_iter().filter(|share| !share.is_empty());
        let own = shares.next().unwrap_or_default();
        let others: Vec<_> = shares.map(|share| scope.spawn(move || read_all(share))).collect();
        let mut read = read_all(own);
        for other in others {
            let more = other.join().unwrap_or_else(|_| Err(io::Error::other("a thread that reads weights has ended")));
            read = read.and_then(|sum| more.map(|count| sum + count));
        }
        read
    })
}

fn read_part(file: &File, offset: u64, bytes: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => break,
            Ok(more) => done += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}
