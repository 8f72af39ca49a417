//! A file of records of one size. Each record holds a page or nothing; a damaged one counts as nothing.

use crate::key::Fingerprint;
use crate::page::{PageBytes, PageHeader, SECTOR, record_bytes};
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// Most bytes of one call that reads or writes.
const BLOCK: usize = 2 << 20;

/// A record's number in its file.
pub(crate) type RecordIndex = u32;

/// The file. Different records may be read and written at the same time.
pub(crate) struct RecordFile {
    file: File,
    payload: usize,
    limit: RecordIndex,
    end: Mutex<FileEnd>,
}

/// Where the file ends.
struct FileEnd {
    /// One more than the last record that was written or is being written.
    records: RecordIndex,
    /// Records before the end whose last write failed.
    failed: BTreeSet<RecordIndex>,
}

impl RecordFile {
    /// Opens or makes a file of at most `limit` records, and reads the headers that are there. Records past the limit are cut off.
    pub fn open(
        path: &Path,
        fingerprint: &Fingerprint,
        payload: usize,
        limit: RecordIndex,
    ) -> io::Result<(Self, Vec<(RecordIndex, PageHeader)>)> {
        let record_bytes = record_bytes(payload) as u64;
        let buffered = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        if buffered.metadata()?.len() > record_bytes * u64::from(limit) {
            buffered.set_len(record_bytes * u64::from(limit))?;
        }
        let records = RecordIndex::try_from(buffered.metadata()?.len().div_ceil(record_bytes)).unwrap_or(limit);
        let mut found = Vec::new();
        let mut header = vec![0; SECTOR];
        for record in 0..records {
            if read_at(&buffered, &mut header, u64::from(record) * record_bytes).is_ok()
                && let Some(header) = PageHeader::read(&header, fingerprint, payload)
            {
                found.push((record, header));
            }
        }
        let end = Mutex::new(FileEnd { records, failed: BTreeSet::new() });
        Ok((RecordFile { file: open_direct(path).unwrap_or(buffered), payload, limit, end }, found))
    }

    /// Most records.
    pub fn limit(&self) -> RecordIndex {
        self.limit
    }

    /// Writes a page. If the write fails at the end of the file, as on a full disk, the part that was written is cut off: other files may need the
    /// room.
    pub fn write(&self, record: RecordIndex, header: &PageHeader, page: &PageBytes) -> io::Result<()> {
        let end = || self.end.lock().unwrap_or_else(PoisonError::into_inner);
        {
            let mut end = end();
            end.records = end.records.max(record + 1);
            end.failed.remove(&record);
        }
        let written = self.write_record(record, header, page);
        if written.is_err() {
            let mut end = end();
            end.failed.insert(record);
            while let Some(last) = end.records.checked_sub(1)
                && end.failed.remove(&last)
            {
                end.records = last;
            }
            // Only the error of the write is reported.
            let _ = self.file.set_len(self.offset(end.records));
        }
        written
    }

    /// Writes a page, its header last: the header of a record that was not written whole does not match its contents, or is missing.
    fn write_record(&self, record: RecordIndex, header: &PageHeader, page: &PageBytes) -> io::Result<()> {
        let start = self.offset(record);
        for (index, block) in page.padded_payload().chunks(BLOCK).enumerate() {
            write_at(&self.file, block, start + (SECTOR + index * BLOCK) as u64)?;
        }
        write_at(&self.file, page.header_sector(header)?.record(), start)
    }

    /// Reads a record. [`PageBytes::is_page`] checks whether it is the wanted page.
    pub fn read(&self, record: RecordIndex) -> io::Result<PageBytes> {
        let (mut page, start) = (PageBytes::new(self.payload)?, self.offset(record));
        for (index, block) in page.record_mut().chunks_mut(BLOCK).enumerate() {
            read_at(&self.file, block, start + (index * BLOCK) as u64)?;
        }
        Ok(page)
    }

    fn offset(&self, record: RecordIndex) -> u64 {
        u64::from(record) * record_bytes(self.payload) as u64
    }
}

/// The file opened for direct I/O, if its file system supports that, so that pages do not also fill the page cache.
fn open_direct(path: &Path) -> Option<File> {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::OpenOptionsExt;
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path).ok()
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = path;
        None
    }
}

#[cfg(unix)]
fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, offset)
}

#[cfg(unix)]
fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
fn read_at(file: &File, mut bytes: &mut [u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, bytes, offset)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => {
                bytes = &mut bytes[count..];
                offset += count as u64;
            }
        }
    }
    Ok(())
}

#[cfg(windows)]
fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        bytes = &bytes[count..];
        offset += count as u64;
    }
    Ok(())
}
