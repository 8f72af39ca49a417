//! The bytes of a page, the same in memory and on disk: a header, then the contents of the states.

use crate::key::{Fingerprint, PageKey};
use memmap2::MmapMut;
use std::io;

/// Sizes, offsets and addresses of direct I/O are multiples of this.
pub(crate) const SECTOR: usize = 4096;
/// Bytes of a huge page.
#[cfg(target_os = "linux")]
const HUGE_PAGE: usize = 2 << 20;
const MAGIC: [u8; 8] = *b"HPP-KV01";

/// A page: memory with room for a header, aligned for direct I/O. It is mapped, not allocated on the heap, so that it can use huge pages,
/// which a disk fills at a higher rate, and so that dropping it returns it to the system.
pub struct PageBytes {
    memory: MmapMut,
    payload: usize,
}

impl PageBytes {
    /// Zeros for a payload of this many bytes.
    ///
    /// # Errors
    /// The system has no memory left.
    pub fn new(payload: usize) -> io::Result<Self> {
        let memory = MmapMut::map_anon(record_bytes(payload))?;
        #[cfg(target_os = "linux")]
        if memory.len() >= HUGE_PAGE {
            // Without transparent huge pages the page has small ones.
            let _ = memory.advise(memmap2::Advice::HugePage);
        }
        Ok(PageBytes { memory, payload })
    }

    /// Bytes of memory that a page with this payload takes.
    pub fn memory_for(payload: usize) -> u64 {
        record_bytes(payload) as u64
    }

    /// The payload: the contents of the states.
    pub fn payload(&self) -> &[u8] {
        &self.memory[SECTOR..][..self.payload]
    }

    /// The payload for writing.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        &mut self.memory[SECTOR..][..self.payload]
    }

    /// Header, payload and padding.
    pub(crate) fn record(&self) -> &[u8] {
        &self.memory
    }

    pub(crate) fn record_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }

    /// The record after the header: payload and padding.
    pub(crate) fn padded_payload(&self) -> &[u8] {
        &self.record()[SECTOR..]
    }

    /// The header of a record with this page, as an aligned sector of its own.
    pub(crate) fn header_sector(&self, header: &PageHeader) -> io::Result<PageBytes> {
        let checksum = *blake3::hash(self.payload()).as_bytes();
        let bytes = header.to_bytes(self.payload as u64, &checksum);
        let mut sector = PageBytes::new(0)?;
        sector.record_mut()[..bytes.len()].copy_from_slice(&bytes);
        Ok(sector)
    }

    /// Whether the record is the page of this key, whole.
    pub(crate) fn is_page(&self, fingerprint: &Fingerprint, key: &PageKey) -> bool {
        let found = PageHeader::read(self.record(), fingerprint, self.payload);
        found.is_some_and(|found| found.key == *key)
            && self.record()[CHECKSUM] == *blake3::hash(self.payload()).as_bytes()
    }
}

/// Bytes of a record with a payload of this many.
pub(crate) fn record_bytes(payload: usize) -> usize {
    SECTOR + payload.next_multiple_of(SECTOR)
}

/// The header of a record, which describes its page.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct PageHeader {
    pub fingerprint: Fingerprint,
    pub key: PageKey,
    pub parent: PageKey,
    /// Its place in the sequence, counted in pages.
    pub index: u32,
    /// Larger for pages written later.
    pub written: u64,
    /// The time that computing it took, milliseconds.
    pub cost_ms: f32,
}

/// Layout of a header: magic, fingerprint, key, parent, payload bytes, index, written, cost, the payload's checksum, then a checksum of all
/// of that. Numbers are little-endian.
const CHECKSUM: std::ops::Range<usize> = 128..160;
const BYTES: usize = 192;

impl PageHeader {
    fn to_bytes(self, payload: u64, checksum: &[u8; 32]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(BYTES);
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.fingerprint.0);
        bytes.extend_from_slice(&self.key.0);
        bytes.extend_from_slice(&self.parent.0);
        bytes.extend_from_slice(&payload.to_le_bytes());
        bytes.extend_from_slice(&self.index.to_le_bytes());
        bytes.extend_from_slice(&self.written.to_le_bytes());
        bytes.extend_from_slice(&self.cost_ms.to_le_bytes());
        bytes.extend_from_slice(checksum);
        let own = *blake3::hash(&bytes).as_bytes();
        bytes.extend_from_slice(&own);
        bytes
    }

    /// Reads a header, whose record must be of this model and payload size. `None` if there is none or it is broken.
    pub fn read(record: &[u8], fingerprint: &Fingerprint, payload: usize) -> Option<Self> {
        let bytes = record.get(..BYTES)?;
        let (fields, own) = bytes.split_at(BYTES - 32);
        if fields[..8] != MAGIC || own != blake3::hash(fields).as_bytes() {
            return None;
        }
        let hash = |at: usize| -> Option<[u8; 32]> { fields[at..at + 32].try_into().ok() };
        let number = |at: usize| fields[at..at + 8].try_into().ok().map(u64::from_le_bytes);
        let header = PageHeader {
            fingerprint: Fingerprint(hash(8)?),
            key: PageKey(hash(40)?),
            parent: PageKey(hash(72)?),
            index: u32::from_le_bytes(fields[112..116].try_into().ok()?),
            written: number(116)?,
            cost_ms: f32::from_le_bytes(fields[124..128].try_into().ok()?),
        };
        (header.fingerprint == *fingerprint && number(104)? == payload as u64).then_some(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_bit_anywhere_is_noticed() {
        let model = Fingerprint::of([("a", "b")]);
        let key = PageKey::root(&model).child(&[1], None);
        let header =
            PageHeader { fingerprint: model, key, parent: PageKey::root(&model), index: 3, written: 9, cost_ms: 2.5 };
        let mut page = PageBytes::new(5000).unwrap();
        assert_eq!(page.record().as_ptr().align_offset(SECTOR), 0);
        assert_eq!((page.record().len(), page.payload().len()), (4096 * 3, 5000));
        page.payload_mut()[4999] = 7;
        let sector = page.header_sector(&header).unwrap();
        page.record_mut()[..SECTOR].copy_from_slice(sector.record());
        assert!(page.is_page(&model, &key));
        assert_eq!(PageHeader::read(page.record(), &model, 5000), Some(header));
        assert_eq!(PageHeader::read(page.record(), &model, 5001), None);
        assert_eq!(PageHeader::read(page.record(), &Fingerprint::of([]), 5000), None);
        for at in (0..BYTES).chain([SECTOR, SECTOR + 4999]) {
            page.record_mut()[at] ^= 1;
            assert!(!page.is_page(&model, &key), "byte {at}");
            page.record_mut()[at] ^= 1;
        }
        assert!(page.is_page(&model, &key) && !page.is_page(&model, &PageKey::root(&model)));
    }
}
