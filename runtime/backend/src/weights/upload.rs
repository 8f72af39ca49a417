//! Uploads weights to devices, from pinned host memory or from their files.
//!
//! Pinned weights are copied in place. The others are read from their files into a staging buffer and copied from there. Files are read,
//! not mapped, so that a truncated file is an error and not a crash. Reads bypass the page cache where the host has no memory for it.
//!
//! Copies are enqueued on the device's copy stream if it has streams (CUDA); otherwise a thread makes them.

mod ahead;

use super::disk::{DirectFile, DirectReads};
use super::file::{SECTOR, WeightFile};
use crate::buffer::OrtBuffer;
use crate::cuda::feeder::{FeedWeight, Feeder, PendingFeed};
use crate::cuda::streams::{CopyRange, CopyStream, QueuedCopies, Streams};
use crate::environment::SharedRuntime;
use crate::raw::ReadWeight;
use crate::raw::copier::{BYTES, Copier, PendingCopies, StagedRead, WeightCopy};
use crate::raw::memory::{HostPages, Memory};
use crate::raw::space::MemorySpace;
use crate::raw::value::Value;
use cudarc::driver::CudaEvent;
use hpp_engine::BackendError;
use hpp_engine::port::{HostCopy, Interval, MemoryId, Timing, Uploaded, WeightLocation};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Weak};

/// The files, threads and host memory that all uploads of a backend share. Clones share them too.
#[derive(Clone, Default)]
pub(crate) struct Uploader(Rc<UploaderState>);

#[derive(Default)]
struct UploaderState {
    /// The files that upload sources have open. Weak, so that a file is reopened when all its sources are gone: another plan may have
    /// replaced it.
    files: RefCell<BTreeMap<PathBuf, Weak<WeightFile>>>,
    /// Like `files`, but opened for direct reads.
    direct_files: RefCell<BTreeMap<PathBuf, Weak<DirectFile>>>,
    /// The reader of direct files.
    direct: Arc<DirectReads>,
    /// One for each device without streams.
    copiers: RefCell<BTreeMap<MemoryId, Rc<Copier>>>,
    /// One for each copy stream of a device with streams: for weights that are read from files, or for states.
    feeders: RefCell<BTreeMap<(MemoryId, CopyStream), Feeder>>,
    /// One for each device and copy stream.
    staging: RefCell<BTreeMap<(MemoryId, CopyStream), UploadStaging>>,
    pinned: RefCell<BTreeMap<MemoryId, PinnedPool>>,
}

/// The staging buffer of a device for one copy stream, pinned if its provider can pin. The copier handles one weight at a time and uses the
/// whole buffer; a feeder uses its two halves in turn.
#[derive(Clone)]
struct UploadStaging {
    memory: Memory,
    bytes: u64,
    space: Rc<MemorySpace>,
}

/// The weights of one stage, ready to be uploaded any number of times.
pub struct UploadSource {
    weights: Vec<UploadWeight>,
}

struct UploadWeight {
    file: Arc<WeightFile>,
    offset: u64,
    bytes: u64,
    /// Its copy in pinned memory, if it has one.
    pinned: Option<PinnedWeight>,
    /// Whether reads leave nothing in the page cache.
    bypass_page_cache: bool,
    /// The file opened for direct reads, if its file system supports them and the page cache is bypassed.
    direct: Option<Arc<DirectFile>>,
}

/// A weight in pinned memory.
struct PinnedWeight {
    memory: Memory,
    space: Rc<MemorySpace>,
    offset: u64,
}

/// An upload in progress.
pub struct Upload(UploadState);

enum UploadState {
    Done(Interval),
    /// The copier makes the copies.
    Copying(PendingCopies),
    /// All copies are enqueued on the device's copy stream.
    Queued(Arc<Streams>, QueuedCopies),
    /// The feeder reads the weights and enqueues their copies.
    Feeding(Arc<Streams>, PendingFeed),
}

/// Copies for a feeder.
struct FeedJob {
    /// They begin after this event.
    after: CudaEvent,
    weights: Vec<FeedWeight>,
    /// Two parts of staging memory.
    halves: [*mut u8; 2],
    /// All memory that they use.
    keep: Vec<Memory>,
}

impl Upload {
    /// Waits for the copies, or orders the device's later runs after them.
    pub(crate) fn wait(self) -> Result<Uploaded, BackendError> {
        let measured = |interval| Uploaded { copy: Timing::Measured(interval), stall: None };
        match self.0 {
            UploadState::Done(interval) => Ok(measured(interval)),
            UploadState::Copying(copies) => copies.wait().map(measured),
            UploadState::Queued(streams, queued) => streams.order_runs_after(queued),
            UploadState::Feeding(streams, feed) => streams.order_runs_after(feed.wait()?),
        }
    }
}

/// A block of memory that is pinned for uploads to one device. Its first `used` bytes hold weights.
struct PinnedPool {
    memory: Memory,
    space: Rc<MemorySpace>,
    bytes: u64,
    used: u64,
}

/// Smaller pools are not worth pinning.
const MIN_PINNED: u64 = 16 << 20;

/// Alignment of weights in pinned memory.
const LINE: u64 = 64;

impl Uploader {
    /// Pins one block of `bytes` for a device, or of half as many, a quarter and so on while pinning fails. Returns the number pinned.
    pub fn pin(&self, runtime: &SharedRuntime, device: &MemorySpace, bytes: u64) -> u64 {
        let Ok(Some(space)) = device.pinned(&runtime.environment) else { return 0 };
        let space = Rc::new(space);
        let whole = Some(bytes).filter(|bytes| *bytes > 0);
        let halves = std::iter::successors(whole, |bytes| Some(bytes / 2).filter(|half| *half >= MIN_PINNED));
        for bytes in halves {
            // 1 MiB more for the alignment gaps between a few thousand weights.
            if let Ok(memory) = space.reserve(bytes + (1 << 20)) {
                let reserved = memory.len();
                let pool = PinnedPool { memory: Memory::Device(Rc::new(memory)), space, bytes: reserved, used: 0 };
                self.0.pinned.borrow_mut().insert(device.id, pool);
                return bytes;
            }
        }
        0
    }

    /// Opens the files of a stage's weights and reads those that `copy` wants pinned into pinned memory.
    pub fn source(
        &self,
        weights: &[WeightLocation],
        memory: MemoryId,
        copy: HostCopy,
    ) -> Result<UploadSource, BackendError> {
        let mut by_size: Vec<usize> = (0..weights.len()).collect();
        by_size.sort_by_key(|at| weights[*at].bytes);
        let mut left = copy.pinned;
        let mut is_pinned = vec![false; weights.len()];
        // Small ones first: a read of a small weight costs as much as one of a large weight.
        for at in by_size {
            is_pinned[at] = weights[at].bytes <= left;
            left = if is_pinned[at] { left - weights[at].bytes } else { 0 };
        }
        let open = |(location, is_pinned): (&WeightLocation, &bool)| {
            let file = self.open(location)?;
            let bypass_page_cache = copy.bypass_page_cache;
            let pinned =
                if *is_pinned { self.read_into_pinned(memory, &file, location, bypass_page_cache)? } else { None };
            let direct = if bypass_page_cache { self.open_direct(location)? } else { None };
            let (offset, bytes) = (location.offset, location.bytes);
            Ok(UploadWeight { file, offset, bytes, pinned, bypass_page_cache, direct })
        };
        Ok(UploadSource { weights: weights.iter().zip(&is_pinned).map(open).collect::<Result<_, BackendError>>()? })
    }

    /// Reads a weight into pinned memory; `None` if there is no room left.
    fn read_into_pinned(
        &self,
        memory: MemoryId,
        file: &WeightFile,
        location: &WeightLocation,
        bypass_page_cache: bool,
    ) -> Result<Option<PinnedWeight>, BackendError> {
        let mut pools = self.0.pinned.borrow_mut();
        let Some(pool) = pools.get_mut(&memory) else { return Ok(None) };
        let offset = pool.used.next_multiple_of(LINE);
        let end = offset.checked_add(location.bytes).filter(|end| *end <= pool.bytes);
        let Some(end) = end else { return Ok(None) };
        let mut value = Value::part(&pool.memory, &pool.space, offset, location.bytes)?;
        let read = value.fill_host(|bytes| file.read_exact(location.offset, bytes, bypass_page_cache));
        let Some(read) = read else { return Ok(None) };
        read.map_err(|cause| BackendError::Runtime { doing: "read weights into pinned memory".into(), cause })?;
        pool.used = end;
        Ok(Some(PinnedWeight { memory: pool.memory.clone(), space: Rc::clone(&pool.space), offset }))
    }

    /// Opens a file for buffered reads. Weights of one file share it.
    fn open(&self, location: &WeightLocation) -> Result<Arc<WeightFile>, BackendError> {
        let mut files = self.0.files.borrow_mut();
        if let Some(file) = files.get(&location.file).and_then(Weak::upgrade) {
            return Ok(file);
        }
        let file = Arc::new(WeightFile::open_buffered(&location.file).map_err(cannot_open(location))?);
        files.insert(location.file.clone(), Arc::downgrade(&file));
        Ok(file)
    }

    /// Opens a file for direct reads; `None` if its file system has none. Weights of one file share it.
    fn open_direct(&self, location: &WeightLocation) -> Result<Option<Arc<DirectFile>>, BackendError> {
        let mut files = self.0.direct_files.borrow_mut();
        if let Some(file) = files.get(&location.file).and_then(Weak::upgrade) {
            return Ok(Some(file));
        }
        let file = DirectFile::open(&location.file, &self.0.direct).map_err(cannot_open(location))?.map(Arc::new);
        if let Some(file) = &file {
            files.insert(location.file.clone(), Arc::downgrade(file));
        }
        Ok(file)
    }

    /// Starts to upload each weight to the buffer at the same index of `to`.
    pub fn begin(
        &self,
        runtime: &SharedRuntime,
        source: &UploadSource,
        to: &[&OrtBuffer],
    ) -> Result<Upload, BackendError> {
        let Some(device) = to.first().map(|buffer| &buffer.space).filter(|space| space.id != MemoryId::HOST) else {
            return read_to_host(source, to).map(|interval| Upload(UploadState::Done(interval)));
        };
        if let Some(streams) = &device.streams {
            return self.enqueue(runtime, source, to, device, streams).map(Upload);
        }
        let staging =
            source.largest_read().map(|bytes| self.staging(runtime, device, CopyStream::Weights, bytes)).transpose()?;
        let copy = |(weight, buffer): (&UploadWeight, &&OrtBuffer)| {
            let to = Value::view(&buffer.memory, device, BYTES, &[weight.bytes])?;
            Ok(match (&weight.pinned, &staging) {
                (Some(PinnedWeight { memory, space, offset }), _) => {
                    WeightCopy { from: Value::part(memory, space, *offset, weight.bytes)?, to, read: None }
                }
                (None, Some(UploadStaging { memory, space, .. })) => {
                    let from = Value::part(memory, space, weight.lead(), weight.bytes)?;
                    let (buffer, length) = (memory.address().cast(), weight.read_bytes() as usize);
                    WeightCopy { from, to, read: Some(StagedRead { read: weight.reader(), buffer, length }) }
                }
                (None, None) => unreachable!("`largest_read` covers every weight that is not pinned"),
            })
        };
        let copies = source.weights.iter().zip(to).map(copy).collect::<Result<_, BackendError>>()?;
        Ok(Upload(UploadState::Copying(self.copier(runtime, device.id)?.begin(copies, device.lock.clone()))))
    }

    /// Enqueues the copies on the device's copy stream, or hands them to its feeder if some weights must be read first.
    fn enqueue(
        &self,
        runtime: &SharedRuntime,
        source: &UploadSource,
        to: &[&OrtBuffer],
        device: &Rc<MemorySpace>,
        streams: &Arc<Streams>,
    ) -> Result<UploadState, BackendError> {
        let mut pairs = source.weights.iter().zip(to);
        if let Some((weight, buffer)) = pairs.find(|(weight, buffer)| weight.bytes > buffer.memory.len()) {
            let (what, why) = (format!("a weight of {} bytes", weight.bytes), buffer.memory.len());
            return Err(BackendError::Misfit { what, why: format!("its buffer has {why}") });
        }
        let Some(largest) = source.largest_read() else {
            let ranges = source.weights.iter().zip(to).filter_map(|(weight, buffer)| weight.pinned_range(buffer));
            // SAFETY: pinned memory and device memory wait for these streams before they are freed, and the engine does not use a slot
            // until its upload was waited for.
            let queued = unsafe { streams.copy(streams.record_compute()?, ranges) }?;
            return Ok(UploadState::Queued(Arc::clone(streams), queued));
        };
        let (staging, halves) = self.halves(runtime, device, CopyStream::Weights, largest)?;
        let feed = |(weight, buffer): (&UploadWeight, &&OrtBuffer)| match weight.pinned_range(buffer) {
            Some(range) => FeedWeight::Pinned(range),
            None => {
                let (lead, length) = (weight.lead() as usize, weight.read_bytes() as usize);
                let within = lead..lead + weight.bytes as usize;
                FeedWeight::Read { read: weight.reader(), length, weight: within, to: buffer.memory.address() }
            }
        };
        let weights = source.weights.iter().zip(to).map(feed).collect();
        let pinned = source.weights.iter().filter_map(|weight| Some(weight.pinned.as_ref()?.memory.clone()));
        let keep = pinned.chain(to.iter().map(|buffer| buffer.memory.clone())).chain([staging.memory]).collect();
        let job = FeedJob { after: streams.record_compute()?, weights, halves, keep };
        self.feed(device, streams, CopyStream::Weights, job)
    }

    /// The staging buffer of a device, and two halves of it with room for `bytes` each. Each half begins at a page, as direct reads need.
    fn halves(
        &self,
        runtime: &SharedRuntime,
        device: &MemorySpace,
        on: CopyStream,
        bytes: u64,
    ) -> Result<(UploadStaging, [*mut u8; 2]), BackendError> {
        let half = bytes.next_multiple_of(4096);
        let staging = self.staging(runtime, device, on, 2 * half)?;
        let first = staging.memory.address().cast::<u8>();
        // SAFETY: the memory has room for both halves.
        let halves = [first, unsafe { first.add(half as usize) }];
        Ok((staging, halves))
    }

    /// Hands copies to a feeder of a device.
    fn feed(
        &self,
        device: &MemorySpace,
        streams: &Arc<Streams>,
        on: CopyStream,
        FeedJob { after, weights, halves, keep }: FeedJob,
    ) -> Result<UploadState, BackendError> {
        let mut feeders = self.0.feeders.borrow_mut();
        let feeder = match feeders.entry((device.id, on)) {
            Entry::Occupied(feeder) => feeder.into_mut(),
            Entry::Vacant(free) => free.insert(Feeder::new(Arc::clone(streams), on).map_err(no_thread)?),
        };
        Ok(UploadState::Feeding(Arc::clone(streams), feeder.begin(after, weights, halves, keep)))
    }

    /// The copy thread of a device without streams.
    pub fn copier(&self, runtime: &SharedRuntime, memory: MemoryId) -> Result<Rc<Copier>, BackendError> {
        let mut copiers = self.0.copiers.borrow_mut();
        if let Some(copier) = copiers.get(&memory) {
            return Ok(Rc::clone(copier));
        }
        let copier = Copier::new(runtime.environment.clone()).map_err(no_thread)?;
        copiers.insert(memory, Rc::clone(&copier));
        Ok(copier)
    }

    /// The staging buffer of a device for one copy stream, of at least `bytes`. If it is too small, a larger one replaces it; copies in
    /// progress keep the old one alive.
    fn staging(
        &self,
        runtime: &SharedRuntime,
        device: &MemorySpace,
        on: CopyStream,
        bytes: u64,
    ) -> Result<UploadStaging, BackendError> {
        let mut all = self.0.staging.borrow_mut();
        if let Some(staging) = all.get(&(device.id, on)).filter(|staging| staging.bytes >= bytes) {
            return Ok(staging.clone());
        }
        let pinned = device.pinned(&runtime.environment)?;
        let pinned = pinned.and_then(|space| Some((Memory::Device(Rc::new(space.reserve(bytes).ok()?)), space)));
        let (memory, space) = match pinned {
            Some(pinned) => pinned,
            None => (Memory::Host(Rc::new(HostPages::reserve(bytes)?)), MemorySpace::host()),
        };
        let staging = UploadStaging { memory, bytes, space: Rc::new(space) };
        all.insert((device.id, on), staging.clone());
        Ok(staging)
    }
}

impl UploadSource {
    /// Bytes of the largest read that an upload makes; `None` if all weights are pinned.
    fn largest_read(&self) -> Option<u64> {
        self.weights.iter().filter(|weight| weight.pinned.is_none()).map(UploadWeight::read_bytes).max()
    }
}

impl UploadWeight {
    /// A function that fills a buffer of [`read_bytes`](Self::read_bytes), with the weight at [`lead`](Self::lead).
    fn reader(&self) -> ReadWeight {
        let (file, direct, bypass_page_cache) = (Arc::clone(&self.file), self.direct.clone(), self.bypass_page_cache);
        let (offset, lead, end) = (self.offset, self.lead() as usize, (self.lead() + self.bytes) as usize);
        Arc::new(move |buffer: &mut [u8]| match &direct {
            Some(direct) if DirectFile::is_aligned(offset - lead as u64, buffer.as_ptr()) => {
                direct.read(offset - lead as u64, buffer).map_err(|error| file.cannot_read(offset, &error))
            }
            _ => file.read_exact(offset, &mut buffer[lead..end], bypass_page_cache),
        })
    }

    /// Bytes that are read before the weight: direct reads begin at a sector.
    fn lead(&self) -> u64 {
        if self.direct.is_some() { self.offset % SECTOR } else { 0 }
    }

    /// Bytes of the read, lead included.
    fn read_bytes(&self) -> u64 {
        if self.direct.is_some() { (self.lead() + self.bytes).next_multiple_of(SECTOR) } else { self.bytes }
    }

    /// The copy from pinned memory to a buffer, if the weight is pinned.
    fn pinned_range(&self, to: &OrtBuffer) -> Option<CopyRange> {
        let PinnedWeight { memory, offset, .. } = self.pinned.as_ref()?;
        // SAFETY: `read_into_pinned` put the weight within that memory.
        let from = unsafe { memory.address().cast::<u8>().add(*offset as usize) };
        Some(CopyRange { from, to: to.memory.address(), bytes: self.bytes as usize })
    }
}

fn cannot_open(location: &WeightLocation) -> impl Fn(std::io::Error) -> BackendError + '_ {
    move |error| BackendError::Runtime { doing: format!("open {}", location.file.display()), cause: error.to_string() }
}

fn no_thread(error: std::io::Error) -> BackendError {
    BackendError::Runtime { doing: "start a thread that copies weights".into(), cause: error.to_string() }
}

/// Reads the weights of a session that fell back to the host into host buffers.
fn read_to_host(source: &UploadSource, to: &[&OrtBuffer]) -> Result<Interval, BackendError> {
    let start = hpp_engine::since_start();
    let mut bytes = Vec::new();
    for (weight, buffer) in source.weights.iter().zip(to) {
        let Memory::Host(host) = &buffer.memory else { continue };
        bytes.resize(weight.bytes as usize, 0);
        let read = weight.file.read_exact(weight.offset, &mut bytes, weight.bypass_page_cache);
        read.map_err(|cause| BackendError::Runtime { doing: "read weights".into(), cause })?;
        host.write(0, &bytes)?;
    }
    Ok(Interval { start, end: hpp_engine::since_start() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads the first weight of a source as an upload does.
    fn read(source: &UploadSource) -> Result<Vec<u8>, String> {
        let weight = &source.weights[0];
        let pages = HostPages::reserve(weight.read_bytes()).unwrap();
        // SAFETY: the pages live, and only this function uses them.
        let buffer = unsafe { std::slice::from_raw_parts_mut(pages.address(), weight.read_bytes() as usize) };
        weight.reader()(buffer)?;
        let lead = weight.lead() as usize;
        Ok(buffer[lead..lead + weight.bytes as usize].to_vec())
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn weights_of_one_file_share_its_descriptors() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let file = dir.path().canonicalize().unwrap().join("weights");
        std::fs::write(&file, vec![1; 64 << 10]).unwrap();
        let weights: Vec<WeightLocation> =
            (0..200).map(|at| WeightLocation { file: file.clone(), offset: at * 100, bytes: 100 }).collect();
        let uploader = Uploader::default();
        let copy = HostCopy { pinned: 0, bypass_page_cache: true };
        let stages: Vec<UploadSource> =
            weights.chunks(20).map(|weights| uploader.source(weights, MemoryId(1), copy).unwrap()).collect();
        let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let open = all.filter(|entry| std::fs::read_link(entry.path()).is_ok_and(|path| path == file)).count();
        assert!((1..=2).contains(&open), "{open} descriptors");
        assert_eq!(read(&stages[7]).unwrap(), [1; 100]);
    }

    #[test]
    fn a_weight_that_cannot_be_read_into_pinned_memory_is_an_error() {
        let backend = crate::OrtBackend::open(&Default::default(), Arc::new(hpp_engine::Silent)).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("weights");
        std::fs::write(&file, vec![5; 10_000]).unwrap();
        let memory = Memory::Host(Rc::new(HostPages::reserve(1 << 20).unwrap()));
        let pool = PinnedPool { memory, space: Rc::new(MemorySpace::host()), bytes: 1 << 20, used: 0 };
        backend.uploader.0.pinned.borrow_mut().insert(MemoryId(1), pool);
        let copy = HostCopy { pinned: u64::MAX, bypass_page_cache: false };
        let location = |offset: u64, bytes: u64| [WeightLocation { file: file.clone(), offset, bytes }];
        let source = |weights: &[WeightLocation]| backend.uploader.source(weights, MemoryId(1), copy);
        assert!(source(&location(100, 1000)).unwrap().weights[0].pinned.is_some());
        let error = source(&location(9000, 2000)).err().expect("the file is shorter").to_string();
        assert!(error.contains(file.to_str().unwrap()) && error.contains("make the plan again"), "{error}");
        // The failed read took no room in the pool.
        assert_eq!(source(&location(0, 1000)).unwrap().weights[0].pinned.as_ref().unwrap().offset, 1024);
    }

    #[test]
    fn a_replaced_file_is_reopened_and_a_change_in_use_is_an_error() {
        for bypass_page_cache in [false, true] {
            let copy = HostCopy { pinned: 0, bypass_page_cache };
            let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
            let file = dir.path().join("weights");
            let contents = |first: u32| -> Vec<u8> { (first..first + 20_000).map(|at| (at % 251) as u8).collect() };
            let weights = [WeightLocation { file: file.clone(), offset: 5003, bytes: 9001 }];
            let uploader = Uploader::default();
            let source = || uploader.source(&weights, MemoryId(1), copy).unwrap();
            std::fs::write(&file, contents(0)).unwrap();
            let first = source();
            assert_eq!(read(&first).unwrap(), contents(0)[5003..14_004]);
            std::fs::write(&file, &contents(7)[..16_000]).unwrap();
            let error = read(&first).unwrap_err();
            assert!(error.contains("was changed while it was in use"), "{error}");
            drop(first);
            assert_eq!(read(&source()).unwrap(), contents(7)[5003..14_004]);
        }
    }
}
