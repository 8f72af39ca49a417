//! Measures a disk as weights are read: direct reads, several in flight, into huge pages that are allocated already.

use super::huge_pages::HugePages;
use super::open_files::ReadFrom;
use super::reader::{ReadTarget, Reader, Ticket};
use crate::weights::file::{SECTOR, WeightFile};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of one of two buffers: one stage's weights are evicted while another's are read.
const STAGE: u64 = 16 << 20;
/// Least bytes of a measurement.
const MIN_BYTES: u64 = 256 << 20;
/// Least time of a measurement. In the first tenth of a second, or on bytes read before, a disk may be a third faster than over minutes.
const MIN_TIME: Duration = Duration::from_millis(500);

/// Stands for a stage: memory for its weights, and the reads that fill it.
struct StageBuffer {
    memory: HugePages,
    reads: Vec<Ticket>,
}

/// The rate in 1e9 bytes per second of reads of `bytes` each (rounded up to whole sectors), sequential through a file and cyclic. An
/// error if the file system has no direct reads, or if the file is shorter than one read.
pub fn read_rate(path: &Path, bytes: u64) -> io::Result<f64> {
    let file = WeightFile::open(path)?;
    if !file.is_direct() {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "its file system has no direct reads"));
    }
    let bytes = bytes.next_multiple_of(SECTOR);
    let blocks = file.expected(0, usize::MAX) as u64 / bytes;
    if blocks == 0 {
        return Err(io::Error::other(format!("it is shorter than a read of {bytes} bytes")));
    }
    let (file, reader) = (ReadFrom::Open(Arc::new(file)), Reader::start()?);
    let each = (STAGE / bytes).max(1);
    let mut buffers = [StageBuffer::new(each * bytes)?, StageBuffer::new(each * bytes)?];
    let (mut next, mut done) = (0, 0);
    let mut begin = |buffer: &mut StageBuffer| {
        for number in 0..each {
            let (offset, at) = (next % blocks * bytes, buffer.memory.start() + (number * bytes) as usize);
            // SAFETY: the memory is the buffer's, whose reads are all waited for before it is dropped.
            buffer.reads.push(unsafe { reader.read(&file, offset, bytes as usize, ReadTarget::Memory(at)) });
            next += 1;
        }
    };
    let started = Instant::now();
    buffers.iter_mut().for_each(&mut begin);
    let mut failed = Ok(());
    for turn in 0.. {
        let buffer = &mut buffers[turn % 2];
        if buffer.reads.is_empty() {
            break;
        }
        for read in buffer.reads.drain(..) {
            failed = failed.and(reader.wait(read).map(drop));
        }
        done += each * bytes;
        if failed.is_ok() && (done + each * bytes < MIN_BYTES || started.elapsed() < MIN_TIME) {
            begin(buffer);
        }
    }
    failed?;
    Ok(done as f64 / started.elapsed().as_secs_f64() / 1e9)
}

impl StageBuffer {
    fn new(bytes: u64) -> io::Result<Self> {
        let length = usize::try_from(bytes).map_err(io::Error::other)?;
        Ok(StageBuffer { memory: HugePages::new(length)?, reads: Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_positive_and_short_files_are_refused() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, vec![7; 5 << 20]).unwrap();
        let started = Instant::now();
        match read_rate(&path, 1 << 20) {
            Ok(rate) => assert!(rate > 0.0 && rate < 1e4 && started.elapsed() >= MIN_TIME, "{rate}"),
            Err(error) => assert!(error.to_string().contains("no direct reads"), "{error}"),
        }
        let error = read_rate(&path, 8 << 20).unwrap_err().to_string();
        assert!(error.contains("shorter than a read") || error.contains("no direct reads"), "{error}");
        assert!(read_rate(&dir.path().join("absent"), 4096).is_err());
    }
}
