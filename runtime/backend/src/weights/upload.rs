//! Weights on their way from host memory or from their files to a device.
//!
//! What was pinned is copied from where it lies. The rest is read from its file into staging memory and copied from there, so that
//! a file that shrinks is an error and no crash, and nothing stays mapped: through the page cache, or past it where the host has
//! no memory for weights.
//!
//! Where a device has streams, copies are given to one of them; elsewhere a thread makes them.

use super::disk::{DirectFile, DirectReads};
use super::file::{SECTOR, WeightFile};
use crate::backend::OrtBuffer;
use crate::cuda::feeder::{self, Feeder, Feeding};
use crate::cuda::streams::{Address, Copied, Streams};
use crate::environment::Runtime;
use crate::raw::Fill;
use crate::raw::copier::{BYTES, Copier, Copies, Fetch, Piece};
use crate::raw::device::{DeviceMemory, Place};
use crate::raw::memory::{HostMemory, Memory};
use crate::raw::value::Value;
use hpp_engine::BackendError;
use hpp_engine::port::{HostCopy, Interval, MemoryId, Timing, Uploaded, WeightLocation};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::{Arc, Weak};

/// What all copies of one backend share. Clones are the same.
#[derive(Clone, Default)]
pub(crate) struct Uploads(Rc<Shared>);

#[derive(Default)]
struct Shared {
    /// Files that sources read now. Nothing is kept open beyond them: another plan may have put another file there.
    files: RefCell<BTreeMap<PathBuf, Weak<WeightFile>>>,
    /// The same, opened to be read past the page cache.
    direct_files: RefCell<BTreeMap<PathBuf, Weak<DirectFile>>>,
    /// What reads past the page cache.
    direct: Arc<DirectReads>,
    /// One for each device's memory.
    copiers: RefCell<BTreeMap<MemoryId, Rc<Copier>>>,
    /// One for each device with streams, once weights are read for it.
    feeders: RefCell<BTreeMap<MemoryId, Feeder>>,
    staging: RefCell<BTreeMap<MemoryId, Staging>>,
    pinned: RefCell<BTreeMap<MemoryId, Pinned>>,
}

/// Memory that weights go through, and whether it is pinned. The copier works off one piece after the other, so one is enough.
#[derive(Clone)]
struct Staging {
    memory: Memory,
    bytes: u64,
    place: Rc<Place>,
}

/// Weights of one stage, as copies find them.
pub struct Source {
    weights: Vec<Weight>,
}

struct Weight {
    file: Arc<WeightFile>,
    offset: u64,
    bytes: u64,
    /// The same in pinned memory, and where there.
    pinned: Option<(Memory, Rc<Place>, u64)>,
    /// Whether the system is not to keep what was read.
    forget: bool,
    /// The same file, to be read past the page cache where that is so.
    direct: Option<Arc<DirectFile>>,
}

/// A copy of weights under way.
pub struct Upload(State);

enum State {
    Done(Interval),
    /// A thread copies.
    UnderWay(Copies),
    /// A device's stream has all of it.
    Queued(Arc<Streams>, Copied),
    /// A thread gives it to a device's stream.
    Feeding(Arc<Streams>, Feeding),
}

impl Upload {
    /// Waits for the copy, or orders it before the device's later runs.
    pub(crate) fn wait(self) -> Result<Uploaded, BackendError> {
        let measured = |interval| Uploaded { copy: Timing::Measured(interval), stall: None };
        match self.0 {
            State::Done(interval) => Ok(measured(interval)),
            State::UnderWay(copies) => copies.wait().map(measured),
            State::Queued(streams, copied) => streams.arrive(copied),
            State::Feeding(streams, feeding) => streams.arrive(feeding.wait()?),
        }
    }
}

/// Memory pinned for copies to one device, filled from its beginning.
struct Pinned {
    memory: Memory,
    place: Rc<Place>,
    bytes: u64,
    used: u64,
}

/// The least worth pinning.
const LEAST_PINNED: u64 = 16 << 20;

/// Weights in pinned memory begin at multiples of this.
const LINE: u64 = 64;

impl Uploads {
    /// Pins memory in one piece, of so many bytes or of the half, the quarter and so on; says how many.
    pub fn pin(&self, runtime: &Runtime, place: &Place, bytes: u64) -> u64 {
        let Ok(Some(pins)) = place.pinned(&runtime.environment) else { return 0 };
        let pins = Rc::new(pins);
        let whole = Some(bytes).filter(|bytes| *bytes > 0);
        let halves = std::iter::successors(whole, |bytes| Some(bytes / 2).filter(|half| *half >= LEAST_PINNED));
        for bytes in halves {
            // Room for the gaps between weights, of which there are few thousands.
            if let Ok(memory) = DeviceMemory::reserve(&pins, bytes + (1 << 20)) {
                let bytes_there = memory.len();
                let pinned =
                    Pinned { memory: Memory::Device(Rc::new(memory)), place: pins, bytes: bytes_there, used: 0 };
                self.0.pinned.borrow_mut().insert(place.id, pinned);
                return bytes;
            }
        }
        0
    }

    /// Opens the files of some weights and puts them where they are to be held.
    pub fn source(&self, weights: &[WeightLocation], memory: MemoryId, hold: HostCopy) -> Result<Source, BackendError> {
        let mut by_size: Vec<usize> = (0..weights.len()).collect();
        by_size.sort_by_key(|at| weights[*at].bytes);
        let mut left = hold.pinned;
        let mut stays = vec![false; weights.len()];
        // Small ones first: reading each costs as much as reading much.
        for at in by_size {
            stays[at] = weights[at].bytes <= left;
            left = if stays[at] { left - weights[at].bytes } else { 0 };
        }
        let open = |(spec, stays): (&WeightLocation, &bool)| {
            let file = self.open(spec)?;
            let forget = hold.bypass_page_cache;
            let pinned = if *stays { self.put(memory, &file, spec, forget)? } else { None };
            let direct = if forget { self.open_direct(spec)? } else { None };
            let (offset, bytes) = (spec.offset, spec.bytes);
            Ok(Weight { file, offset, bytes, pinned, forget, direct })
        };
        Ok(Source { weights: weights.iter().zip(&stays).map(open).collect::<Result<_, BackendError>>()? })
    }

    /// Reads a weight into pinned memory; nothing where there is no room for it.
    fn put(
        &self,
        memory: MemoryId,
        file: &WeightFile,
        spec: &WeightLocation,
        forget: bool,
    ) -> Result<Option<(Memory, Rc<Place>, u64)>, BackendError> {
        let mut all = self.0.pinned.borrow_mut();
        let Some(pinned) = all.get_mut(&memory) else { return Ok(None) };
        let offset = pinned.used.next_multiple_of(LINE);
        let end = offset.checked_add(spec.bytes).filter(|end| *end <= pinned.bytes);
        let Some(end) = end else { return Ok(None) };
        let mut value = Value::part(&pinned.memory, &pinned.place, offset, spec.bytes)?;
        let Some(read) = value.fill_host(|bytes| file.read_exact(spec.offset, bytes, forget)) else { return Ok(None) };
        read.map_err(|cause| BackendError::Runtime { doing: "read weights into pinned memory".into(), cause })?;
        pinned.used = end;
        Ok(Some((pinned.memory.clone(), Rc::clone(&pinned.place), offset)))
    }

    fn open(&self, spec: &WeightLocation) -> Result<Arc<WeightFile>, BackendError> {
        let mut files = self.0.files.borrow_mut();
        if let Some(file) = files.get(&spec.file).and_then(Weak::upgrade) {
            return Ok(file);
        }
        let file = Arc::new(WeightFile::open_buffered(&spec.file).map_err(cannot_open(spec))?);
        files.insert(spec.file.clone(), Arc::downgrade(&file));
        Ok(file)
    }

    /// The same file for direct reads; `None` where its file system has none. Weights of one file share it.
    fn open_direct(&self, spec: &WeightLocation) -> Result<Option<Arc<DirectFile>>, BackendError> {
        let mut files = self.0.direct_files.borrow_mut();
        if let Some(file) = files.get(&spec.file).and_then(Weak::upgrade) {
            return Ok(Some(file));
        }
        let file = DirectFile::open(&spec.file, &self.0.direct).map_err(cannot_open(spec))?.map(Arc::new);
        if let Some(file) = &file {
            files.insert(spec.file.clone(), Arc::downgrade(file));
        }
        Ok(file)
    }

    /// Begins to copy each weight into the buffer that stands in its place.
    pub fn begin(&self, runtime: &Runtime, source: &Source, to: &[&OrtBuffer]) -> Result<Upload, BackendError> {
        let Some(place) = to.first().map(|buffer| &buffer.place).filter(|place| place.id != MemoryId::HOST) else {
            return on_host(source, to).map(|interval| Upload(State::Done(interval)));
        };
        if let Some(streams) = &place.streams {
            return self.queue(runtime, source, to, (place, streams)).map(Upload);
        }
        let staging = source.largest_read().map(|bytes| self.staging(runtime, place, bytes)).transpose()?;
        let piece = |(weight, buffer): (&Weight, &&OrtBuffer)| {
            let (memory, from, offset, fetch) = match (&weight.pinned, &staging) {
                (Some((memory, pins, offset)), _) => (memory, pins, *offset, None),
                (None, Some(staging)) => {
                    let room = (staging.memory.address().cast(), weight.room() as usize);
                    (&staging.memory, &staging.place, weight.head(), Some(Fetch { fill: weight.fill(), room }))
                }
                (None, None) => unreachable!("what is not pinned has staging memory"),
            };
            let from = Value::part(memory, from, offset, weight.bytes)?;
            Ok(Piece { from, to: Value::view(&buffer.memory, place, BYTES, &[weight.bytes])?, fetch })
        };
        let pieces = source.weights.iter().zip(to).map(piece).collect::<Result<_, BackendError>>()?;
        Ok(Upload(State::UnderWay(self.copier(runtime, place.id)?.begin(pieces, place.turn.clone()))))
    }

    /// Gives copies to a device's stream, or to the thread that reads weights for it.
    fn queue(
        &self,
        runtime: &Runtime,
        source: &Source,
        to: &[&OrtBuffer],
        (place, streams): (&Rc<Place>, &Arc<Streams>),
    ) -> Result<State, BackendError> {
        let mut pairs = source.weights.iter().zip(to);
        if let Some((weight, buffer)) = pairs.find(|(weight, buffer)| weight.bytes > buffer.memory.len()) {
            let (what, why) = (format!("a weight of {} bytes", weight.bytes), buffer.memory.len());
            return Err(BackendError::Misfit { what, why: format!("its buffer has {why}") });
        }
        let Some(largest) = source.largest_read() else {
            let addresses = source.weights.iter().zip(to).filter_map(|(weight, buffer)| weight.address(buffer));
            // SAFETY: pinned memory and that of devices wait for these streams before they go, and the engine leaves a slot alone
            // until its weights have arrived.
            let copied = unsafe { streams.copy(streams.mark()?, addresses) }?;
            return Ok(State::Queued(Arc::clone(streams), copied));
        };
        // Halves begin at whole pages.
        let half = largest.next_multiple_of(4096);
        let staging = self.staging(runtime, place, 2 * half)?;
        let first = staging.memory.address().cast::<u8>();
        // SAFETY: the memory has room for both halves.
        let halves = [first, unsafe { first.add(half as usize) }];
        let weight = |(weight, buffer): (&Weight, &&OrtBuffer)| match weight.address(buffer) {
            Some(address) => feeder::Weight::There(address),
            None => {
                let (head, bytes) = (weight.head() as usize, weight.bytes as usize);
                let (fill, to, room) = (weight.fill(), buffer.memory.address(), weight.room() as usize);
                feeder::Weight::Filled { fill, room, to, within: head..head + bytes }
            }
        };
        let weights = source.weights.iter().zip(to).map(weight).collect();
        let pinned = source.weights.iter().filter_map(|weight| Some(weight.pinned.as_ref()?.0.clone()));
        let keep = pinned.chain(to.iter().map(|buffer| buffer.memory.clone())).chain([staging.memory]).collect();
        let mut feeders = self.0.feeders.borrow_mut();
        let feeder = match feeders.entry(place.id) {
            Entry::Occupied(feeder) => feeder.into_mut(),
            Entry::Vacant(free) => free.insert(Feeder::new(Arc::clone(streams)).map_err(no_thread)?),
        };
        Ok(State::Feeding(Arc::clone(streams), feeder.begin(weights, halves, keep)?))
    }

    fn copier(&self, runtime: &Runtime, memory: MemoryId) -> Result<Rc<Copier>, BackendError> {
        let mut copiers = self.0.copiers.borrow_mut();
        if let Some(copier) = copiers.get(&memory) {
            return Ok(Rc::clone(copier));
        }
        let copier = Copier::new(runtime.environment.clone()).map_err(no_thread)?;
        copiers.insert(memory, Rc::clone(&copier));
        Ok(copier)
    }

    /// Staging memory for a device, of so many bytes at least. A larger one takes the place of one that copies still use: those
    /// keep it.
    fn staging(&self, runtime: &Runtime, place: &Place, bytes: u64) -> Result<Staging, BackendError> {
        let mut all = self.0.staging.borrow_mut();
        if let Some(staging) = all.get(&place.id).filter(|staging| staging.bytes >= bytes) {
            return Ok(staging.clone());
        }
        let pinned = place.pinned(&runtime.environment)?.map(Rc::new);
        let reserve =
            |place: Rc<Place>| Some((Memory::Device(Rc::new(DeviceMemory::reserve(&place, bytes).ok()?)), place));
        let (memory, place_of_it) = match pinned.and_then(reserve) {
            Some(pinned) => pinned,
            None => (Memory::Host(Rc::new(HostMemory::reserve(bytes)?)), Rc::new(Place::host())),
        };
        let staging = Staging { memory, bytes, place: place_of_it };
        all.insert(place.id, staging.clone());
        Ok(staging)
    }
}

impl Source {
    /// Bytes of staging memory for the largest weight that is read from its file for each copy.
    fn largest_read(&self) -> Option<u64> {
        self.weights.iter().filter(|weight| weight.pinned.is_none()).map(Weight::room).max()
    }
}

impl Weight {
    /// What reads it, with its first byte at [`head`](Self::head) of [`room`](Self::room) bytes.
    fn fill(&self) -> Fill {
        let (file, direct, forget) = (Arc::clone(&self.file), self.direct.clone(), self.forget);
        let (offset, head, end) = (self.offset, self.head() as usize, (self.head() + self.bytes) as usize);
        Arc::new(move |room: &mut [u8]| match &direct {
            Some(direct) if DirectFile::reads_to(offset - head as u64, room.as_ptr()) => {
                direct.read(offset - head as u64, room).map_err(|error| file.cannot_read(offset, &error))
            }
            _ => file.read_exact(offset, &mut room[head..end], forget),
        })
    }

    /// Bytes in front of it that are read with it: direct reads begin at sectors.
    fn head(&self) -> u64 {
        if self.direct.is_some() { self.offset % SECTOR } else { 0 }
    }

    /// Bytes that are read for it.
    fn room(&self) -> u64 {
        if self.direct.is_some() { (self.head() + self.bytes).next_multiple_of(SECTOR) } else { self.bytes }
    }

    /// Its way from pinned memory to a buffer, if it is pinned and fits there.
    fn address(&self, to: &OrtBuffer) -> Option<Address> {
        let (memory, _, offset) = self.pinned.as_ref()?;
        // SAFETY: the weight lies within that memory, where `put` has left it.
        let from = unsafe { memory.address().cast::<u8>().add(*offset as usize) };
        Some(Address { from, to: to.memory.address(), bytes: self.bytes as usize })
    }
}

fn cannot_open(spec: &WeightLocation) -> impl Fn(std::io::Error) -> BackendError + '_ {
    move |error| BackendError::Runtime { doing: format!("open {}", spec.file.display()), cause: error.to_string() }
}

fn no_thread(error: std::io::Error) -> BackendError {
    BackendError::Runtime { doing: "start a thread that copies weights".into(), cause: error.to_string() }
}

/// To a session that is on the host after all.
fn on_host(source: &Source, to: &[&OrtBuffer]) -> Result<Interval, BackendError> {
    let start = hpp_engine::since_start();
    let mut bytes = Vec::new();
    for (weight, buffer) in source.weights.iter().zip(to) {
        let Memory::Host(host) = &buffer.memory else { continue };
        bytes.resize(weight.bytes as usize, 0);
        let read = weight.file.read_exact(weight.offset, &mut bytes, weight.forget);
        read.map_err(|cause| BackendError::Runtime { doing: "read weights".into(), cause })?;
        host.write(0, &bytes)?;
    }
    Ok(Interval { start, end: hpp_engine::since_start() })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A weight in the middle of a file, as a copy finds it.
    fn read(source: &Source) -> Result<Vec<u8>, String> {
        let weight = &source.weights[0];
        let pages = HostMemory::reserve(weight.room()).unwrap();
        // SAFETY: the pages live and nobody else looks at them.
        let room = unsafe { std::slice::from_raw_parts_mut(pages.address(), weight.room() as usize) };
        weight.fill()(room)?;
        let head = weight.head() as usize;
        Ok(room[head..head + weight.bytes as usize].to_vec())
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn weights_of_one_file_share_its_descriptors() {
        let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let file = dir.path().canonicalize().unwrap().join("weights");
        std::fs::write(&file, vec![1; 64 << 10]).unwrap();
        let specs: Vec<WeightLocation> =
            (0..200).map(|at| WeightLocation { file: file.clone(), offset: at * 100, bytes: 100 }).collect();
        let uploads = Uploads::default();
        let hold = HostCopy { pinned: 0, bypass_page_cache: true };
        let stages: Vec<Source> =
            specs.chunks(20).map(|specs| uploads.source(specs, MemoryId(1), hold).unwrap()).collect();
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
        let memory = Memory::Host(Rc::new(HostMemory::reserve(1 << 20).unwrap()));
        let pinned = Pinned { memory, place: Rc::new(Place::host()), bytes: 1 << 20, used: 0 };
        backend.uploads.0.pinned.borrow_mut().insert(MemoryId(1), pinned);
        let hold = HostCopy { pinned: u64::MAX, bypass_page_cache: false };
        let spec = |offset: u64, bytes: u64| [WeightLocation { file: file.clone(), offset, bytes }];
        let source = |spec: &[WeightLocation]| backend.uploads.source(spec, MemoryId(1), hold);
        assert!(source(&spec(100, 1000)).unwrap().weights[0].pinned.is_some());
        let error = source(&spec(9000, 2000)).err().expect("the file is shorter").to_string();
        assert!(error.contains(file.to_str().unwrap()) && error.contains("make the plan again"), "{error}");
        // What it would have taken is free for the next.
        assert_eq!(source(&spec(0, 1000)).unwrap().weights[0].pinned.as_ref().unwrap().2, 1024);
    }

    #[test]
    fn a_file_that_was_replaced_is_read_anew_and_one_in_use_must_not_be() {
        for forget in [false, true] {
            let hold = HostCopy { pinned: 0, bypass_page_cache: forget };
            let dir = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
            let file = dir.path().join("weights");
            let contents = |first: u32| -> Vec<u8> { (first..first + 20_000).map(|at| (at % 251) as u8).collect() };
            let specs = [WeightLocation { file: file.clone(), offset: 5003, bytes: 9001 }];
            let uploads = Uploads::default();
            let source = || uploads.source(&specs, MemoryId(1), hold).unwrap();
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
