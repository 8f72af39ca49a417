//! Weights on their way from host memory or from their files to a device.
//!
//! What was pinned is copied from where it lies. The rest is read from its file, through the page cache, into staging
//! memory and copied from there, so that a file that shrinks is an error and no crash, and nothing stays mapped.

mod file;

use crate::backend::OrtBuffer;
use crate::environment::Runtime;
use crate::raw::copier::{BYTES, Copier, Copies, Fetch, Piece};
use crate::raw::device::{DeviceMemory, Place};
use crate::raw::memory::{HostMemory, Memory};
use crate::raw::value::Value;
use file::WeightFile;
use hpp_engine::BackendError;
use hpp_engine::port::{Hold, MemoryId, Took, WeightSpec};
use std::cell::RefCell;
use std::collections::BTreeMap;
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
    /// One for each device's memory.
    copiers: RefCell<BTreeMap<MemoryId, Rc<Copier>>>,
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
}

/// A copy of weights under way.
pub struct Upload(State);

enum State {
    Over(Took),
    UnderWay(Copies),
}

impl Upload {
    pub(crate) fn wait(self) -> Result<Took, BackendError> {
        match self.0 {
            State::Over(took) => Ok(took),
            State::UnderWay(copies) => copies.wait(),
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
    pub fn source(&self, weights: &[WeightSpec], memory: MemoryId, hold: Hold) -> Result<Source, BackendError> {
        let open = |spec: &WeightSpec| {
            let file = self.open(spec)?;
            let pinned = if hold == Hold::Pinned { self.put(memory, &file, spec) } else { None };
            Ok(Weight { file, offset: spec.offset, bytes: spec.bytes, pinned, forget: hold == Hold::Disk })
        };
        Ok(Source { weights: weights.iter().map(open).collect::<Result<_, BackendError>>()? })
    }

    /// Reads a weight into pinned memory; nothing where there is no room for it.
    fn put(&self, memory: MemoryId, file: &WeightFile, spec: &WeightSpec) -> Option<(Memory, Rc<Place>, u64)> {
        let mut all = self.0.pinned.borrow_mut();
        let pinned = all.get_mut(&memory)?;
        let offset = pinned.used.next_multiple_of(LINE);
        let end = offset.checked_add(spec.bytes).filter(|end| *end <= pinned.bytes)?;
        let mut value = Value::part(&pinned.memory, &pinned.place, offset, spec.bytes).ok()?;
        let read = value.fill_host(|bytes| file.read(spec.offset, bytes, false).is_ok());
        pinned.used = end;
        (read == Some(true)).then(|| (pinned.memory.clone(), Rc::clone(&pinned.place), offset))
    }

    fn open(&self, spec: &WeightSpec) -> Result<Arc<WeightFile>, BackendError> {
        let mut files = self.0.files.borrow_mut();
        if let Some(file) = files.get(&spec.file).and_then(Weak::upgrade) {
            return Ok(file);
        }
        let opened = WeightFile::open(&spec.file).map_err(|error| BackendError::Runtime {
            doing: format!("open {}", spec.file.display()),
            cause: error.to_string(),
        })?;
        let file = Arc::new(opened);
        files.insert(spec.file.clone(), Arc::downgrade(&file));
        Ok(file)
    }

    /// Begins to copy each weight into the buffer that stands in its place.
    pub fn begin(&self, runtime: &Runtime, source: &Source, to: &[&OrtBuffer]) -> Result<Upload, BackendError> {
        let Some(place) = to.first().map(|buffer| &buffer.place).filter(|place| place.id != MemoryId::HOST) else {
            return on_host(source, to).map(|took| Upload(State::Over(took)));
        };
        let largest = source.weights.iter().filter(|weight| weight.pinned.is_none()).map(|weight| weight.bytes).max();
        let staging = largest.map(|bytes| self.staging(runtime, place, bytes)).transpose()?;
        let piece = |(weight, buffer): (&Weight, &&OrtBuffer)| {
            let (memory, from, offset, fetch) = match (&weight.pinned, &staging) {
                (Some((memory, pins, offset)), _) => (memory, pins, *offset, None),
                (None, Some(staging)) => (&staging.memory, &staging.place, 0, weight.fetch()),
                (None, None) => unreachable!("what is not pinned has staging memory"),
            };
            let from = Value::part(memory, from, offset, weight.bytes)?;
            Ok(Piece { from, to: Value::view(&buffer.memory, place, BYTES, &[weight.bytes])?, fetch })
        };
        let pieces = source.weights.iter().zip(to).map(piece).collect::<Result<_, BackendError>>()?;
        Ok(Upload(State::UnderWay(self.copier(runtime, place.id)?.begin(pieces, place.turn.clone()))))
    }

    fn copier(&self, runtime: &Runtime, memory: MemoryId) -> Result<Rc<Copier>, BackendError> {
        let mut copiers = self.0.copiers.borrow_mut();
        if let Some(copier) = copiers.get(&memory) {
            return Ok(Rc::clone(copier));
        }
        let copier = Copier::new(runtime.environment.clone()).map_err(|error| BackendError::Runtime {
            doing: "start a thread that copies weights".into(),
            cause: error.to_string(),
        })?;
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

impl Weight {
    fn fetch(&self) -> Fetch {
        let (file, offset, forget) = (Arc::clone(&self.file), self.offset, self.forget);
        Some(Arc::new(move |bytes: &mut [u8]| file.read(offset, bytes, forget)))
    }
}

/// To a session that is on the host after all.
fn on_host(source: &Source, to: &[&OrtBuffer]) -> Result<Took, BackendError> {
    let from = hpp_engine::since_start();
    let mut bytes = Vec::new();
    for (weight, buffer) in source.weights.iter().zip(to) {
        let Memory::Host(host) = &buffer.memory else { continue };
        bytes.resize(weight.bytes as usize, 0);
        let read = weight.file.read(weight.offset, &mut bytes, weight.forget);
        read.map_err(|cause| BackendError::Runtime { doing: "read weights".into(), cause })?;
        host.write(0, &bytes)?;
    }
    Ok(Took { from, to: hpp_engine::since_start() })
}
