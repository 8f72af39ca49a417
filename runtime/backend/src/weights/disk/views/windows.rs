//! The views of this process on Windows. The system tells which file a view shows, but not from which offset on: that is found by comparing
//! contents.

use super::super::align::{Tensor, tensors};
use super::super::mapping::Mapping;
use crate::weights::file::WeightFile;
use std::collections::HashMap;
use std::io;
use std::mem::{size_of, zeroed};
use std::ops::Range;
use std::os::windows::fs::OpenOptionsExt;
use std::os::windows::io::AsRawHandle;
use std::path::{Path, PathBuf};
use std::ptr::from_mut;
use windows_sys::Win32::Foundation::{ERROR_NOT_LOCKED, ERROR_WORKING_SET_QUOTA};
use windows_sys::Win32::Storage::FileSystem::{FILE_FLAG_BACKUP_SEMANTICS, GetFinalPathNameByHandleW, VOLUME_NAME_NT};
use windows_sys::Win32::System::Memory::{
    GetProcessWorkingSetSizeEx, MEM_COMMIT, MEM_MAPPED, MEMORY_BASIC_INFORMATION, PrefetchVirtualMemory,
    SetProcessWorkingSetSizeEx, VirtualLock, VirtualQuery, VirtualUnlock, WIN32_MEMORY_RANGE_ENTRY,
};
use windows_sys::Win32::System::ProcessStatus::{
    K32GetMappedFileNameW, K32QueryWorkingSetEx, PSAPI_WORKING_SET_EX_INFORMATION,
};
use windows_sys::Win32::System::Threading::GetCurrentProcess;

/// Whether this system lists views.
pub(in super::super) const CAN_LIST: bool = true;
/// Views begin at multiples of this in their files.
const GRANULARITY: u64 = 64 << 10;
const PAGE: usize = 4096;
/// Characters of the longest path.
const LONGEST: usize = 32_768;
/// Set in the attributes of a page that is in the working set.
const VALID: usize = 1;
/// Places of a view that are compared with its file, and the bytes of each.
const PROBES: usize = 16;
const PROBE: usize = 64;

/// Bytes of a page.
pub(in super::super) fn page_bytes() -> usize {
    PAGE
}

/// Views of files under a directory: how ONNX Runtime maps external weights. Their offsets are 0 until [`locate`] finds them.
pub(crate) fn list(dir: &Path) -> io::Result<Vec<Mapping>> {
    let dir = dir.canonicalize()?;
    // The names of the root of a drive end in a separator.
    let names = [device_path(&dir)?, drive_path(&dir)].map(|name| name.trim_end_matches('\\').to_owned());
    let mut found: Vec<Mapping> = Vec::new();
    let mut at = 0;
    while let Some(region) = region_at(at) {
        let (start, length) = (region.BaseAddress as usize, region.RegionSize);
        let view = region.AllocationBase as usize;
        if region.Type == MEM_MAPPED && region.State == MEM_COMMIT {
            match found.last_mut().filter(|last| last.start == view && last.start + last.length == start) {
                Some(last) => last.length += length,
                None => {
                    if start == view
                        && let Some(path) = file_under(view, &dir, &names)
                    {
                        found.push(Mapping { start, length, offset: 0, path });
                    }
                }
            }
        }
        let Some(next) = start.checked_add(length).filter(|next| *next > at) else { break };
        at = next;
    }
    Ok(found)
}

fn region_at(address: usize) -> Option<MEMORY_BASIC_INFORMATION> {
    // SAFETY: all zeros are a valid structure.
    let mut found: MEMORY_BASIC_INFORMATION = unsafe { zeroed() };
    let bytes = size_of::<MEMORY_BASIC_INFORMATION>();
    // SAFETY: the address is only a question, and the structure has the given size.
    let written = unsafe { VirtualQuery(address as *const _, &mut found, bytes) };
    (written != 0).then_some(found)
}

/// The path of the file that a view shows, if it is under a directory, which has these names.
fn file_under(view: usize, dir: &Path, names: &[String]) -> Option<PathBuf> {
    let mut name = vec![0_u16; LONGEST];
    // SAFETY: the address is only a question, and the buffer has the given length.
    let length =
        unsafe { K32GetMappedFileNameW(GetCurrentProcess(), view as *const _, name.as_mut_ptr(), LONGEST as u32) }
            as usize;
    let name = String::from_utf16(name.get(..length)?).ok()?;
    let inside = names.iter().find_map(|dir| name.strip_prefix(dir)?.strip_prefix('\\'))?;
    Some(dir.join(inside))
}

/// The name of a directory by its drive, as Wine names the files of views.
fn drive_path(dir: &Path) -> String {
    dir.to_string_lossy().replacen("\\\\?\\", "\\??\\", 1)
}

/// The name of a directory by its device, as Windows names the files of views.
fn device_path(dir: &Path) -> io::Result<String> {
    let open = std::fs::OpenOptions::new().read(true).custom_flags(FILE_FLAG_BACKUP_SEMANTICS).open(dir)?;
    let mut name = vec![0_u16; LONGEST];
    // SAFETY: the handle is open, and the buffer has the given length.
    let length =
        unsafe { GetFinalPathNameByHandleW(open.as_raw_handle(), name.as_mut_ptr(), LONGEST as u32, VOLUME_NAME_NT) }
            as usize;
    match name.get(..length).filter(|name| !name.is_empty()) {
        Some(name) => String::from_utf16(name).map_err(io::Error::other),
        None => Err(io::Error::last_os_error()),
    }
}

/// Finds the offsets of views of the weights of a model file, and returns the pages of each weight. Views that show no known weight are left
/// out: the system manages their pages.
pub(crate) fn locate(views: Vec<Mapping>, model: &Path) -> Vec<Mapping> {
    let weights = std::fs::read(model).and_then(|model| tensors(&model)).unwrap_or_default();
    // The offsets of weights whose views would have this length.
    let mut candidates: HashMap<(String, usize), Vec<u64>> = HashMap::new();
    for Tensor { location, stored, packed, .. } in &weights {
        let name = location.rsplit(['/', '\\']).next().unwrap_or(location);
        for (offset, length) in stored.iter().chain(packed) {
            let bytes = ((offset % GRANULARITY + length) as usize).next_multiple_of(PAGE);
            let offsets = candidates.entry((name.to_owned(), bytes)).or_default();
            if !offsets.contains(offset) {
                offsets.push(*offset);
            }
        }
    }
    let mut files: HashMap<PathBuf, Option<WeightFile>> = HashMap::new();
    let mut weight_of = |view: Mapping| {
        let file = files.entry(view.path.clone()).or_insert_with(|| WeightFile::open_buffered(&view.path).ok());
        let name = view.path.file_name()?.to_string_lossy().into_owned();
        let offsets = candidates.get_mut(&(name, view.length))?;
        let found = offsets.iter().position(|offset| shows(&view, file.as_ref(), offset - offset % GRANULARITY))?;
        let offset = offsets.remove(found);
        // A view begins up to 64 KiB before its weight.
        let skipped = (offset % GRANULARITY) as usize / PAGE * PAGE;
        let (start, length) = (view.start + skipped, view.length - skipped);
        Some(Mapping { start, length, offset: offset / PAGE as u64 * PAGE as u64, ..view })
    };
    views.into_iter().filter_map(&mut weight_of).collect()
}

/// Whether a view shows its file from an offset on, by samples.
fn shows(view: &Mapping, file: Option<&WeightFile>, offset: u64) -> bool {
    let Some(file) = file else { return false };
    (0..PROBES).all(|number| {
        let at = (view.length - PROBE) / (PROBES - 1) * number;
        let mut expected = [0; PROBE];
        let read = file.read_at(&mut expected, offset + at as u64).unwrap_or(0);
        // SAFETY: the view is mapped, because its session is alive, and nobody writes to it.
        let shown = unsafe { std::slice::from_raw_parts((view.start + at) as *const u8, read) };
        shown == &expected[..read]
    })
}

/// Takes the pages of an address range from the working set. A later access reads them from their file again, or finds them in the
/// system's cache.
///
/// # Safety
/// The range must be part of a view.
pub(in super::super) unsafe fn evict(addresses: &Range<usize>) {
    // SAFETY: this function's contract. Unlocking pages that are not locked takes them from the working set, and returns an error that
    // says so.
    let done = unsafe { VirtualUnlock(addresses.start as *const _, addresses.len()) } != 0;
    debug_assert!(
        done || io::Error::last_os_error().raw_os_error() == Some(ERROR_NOT_LOCKED as i32) || addresses.is_empty()
    );
}

/// Reads the pages of a view ahead, in large requests; returns before all are read.
pub(in super::super) fn prefetch(addresses: &Range<usize>) {
    let range = WIN32_MEMORY_RANGE_ENTRY { VirtualAddress: addresses.start as *mut _, NumberOfBytes: addresses.len() };
    // SAFETY: reading ahead changes no contents; there is one entry, and failure only costs time.
    unsafe { PrefetchVirtualMemory(GetCurrentProcess(), 1, &range, 0) };
}

/// Does nothing: Windows takes no such advice for views.
pub(in super::super) fn advise_random(_: &Range<usize>) {}

/// Locks the pages of a range in memory; an error if the system refuses. Raises the least working set of this process if it is too small
/// for that.
pub(in super::super) fn lock(addresses: &Range<usize>) -> io::Result<()> {
    let first = lock_now(addresses);
    match first {
        Err(error) if error.raw_os_error() == Some(ERROR_WORKING_SET_QUOTA as i32) => {
            enlarge_working_set(addresses.len())?;
            lock_now(addresses)
        }
        other => other,
    }
}

fn lock_now(addresses: &Range<usize>) -> io::Result<()> {
    // SAFETY: locking changes no contents; if the range is not mapped, the call fails.
    match unsafe { VirtualLock(addresses.start as *const _, addresses.len()) } {
        0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

fn enlarge_working_set(bytes: usize) -> io::Result<()> {
    let (mut least, mut most, mut flags) = (0, 0, 0);
    // SAFETY: the handle of this process needs no closing, and the three places are written.
    let known = unsafe {
        GetProcessWorkingSetSizeEx(GetCurrentProcess(), from_mut(&mut least), from_mut(&mut most), from_mut(&mut flags))
    } != 0;
    // SAFETY: as above. The flags are those that hold now.
    let done = known
        && unsafe { SetProcessWorkingSetSizeEx(GetCurrentProcess(), least + bytes, most.max(least) + bytes, flags) }
            != 0;
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Undoes [`lock`]: the pages may be evicted again.
pub(in super::super) fn unlock(addresses: &Range<usize>) {
    // SAFETY: unlocking changes no contents; if the range is not locked, the call fails.
    unsafe { VirtualUnlock(addresses.start as *const _, addresses.len()) };
}

/// Bytes of a range that are in the working set.
pub(in super::super) fn resident(addresses: &Range<usize>) -> io::Result<usize> {
    let page = |at: usize| {
        // SAFETY: all zeros are a valid structure.
        let mut asked: PSAPI_WORKING_SET_EX_INFORMATION = unsafe { zeroed() };
        asked.VirtualAddress = at as *mut _;
        asked
    };
    let mut pages: Vec<_> = addresses.clone().step_by(PAGE).map(page).collect();
    let bytes = size_of_val(&*pages) as u32;
    // SAFETY: the buffer has the given length.
    let done = unsafe { K32QueryWorkingSetEx(GetCurrentProcess(), pages.as_mut_ptr().cast(), bytes) } != 0;
    if !done {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the attributes are plain flags in either reading of the union.
    let is_valid = |page: &&PSAPI_WORKING_SET_EX_INFORMATION| unsafe { page.VirtualAttributes.Flags } & VALID != 0;
    Ok(pages.iter().filter(is_valid).count() * PAGE)
}

#[cfg(test)]
mod tests {
    use super::super::super::align::tests::{model, tensor};
    use super::*;
    use std::fs::File;

    #[test]
    fn views_are_listed_with_their_files_and_offsets() {
        let dir = tempfile::tempdir().unwrap();
        let (weights, graph) = (dir.path().join("weights"), dir.path().join("model.onnx"));
        let bytes: Vec<u8> = (0..700_000_u32).flat_map(u32::to_le_bytes).collect();
        std::fs::write(&weights, bytes).unwrap();
        // Two of one length, one that begins within a unit of views, and one shorter than a sample.
        let ranges = [(0, 300_000), (393_216, 300_000), (1_000_000, 123_456), (2_000_000, 16)];
        let of = |(offset, length): (u64, usize)| {
            let [offset, length] = [offset.to_string(), length.to_string()];
            tensor("w", &[("location", "weights"), ("offset", &offset), ("length", &length)])
        };
        std::fs::write(&graph, model(&ranges.map(of))).unwrap();
        let file = File::open(&weights).unwrap();
        let view = |(offset, length): (u64, usize)| {
            // SAFETY: only this test uses the file.
            unsafe { memmap2::MmapOptions::new().offset(offset).len(length).map(&file) }.unwrap()
        };
        let views = ranges.map(view);
        let found = list(dir.path()).unwrap();
        assert_eq!(found.len(), ranges.len());
        let located = locate(found, &graph);
        for ((offset, _), view) in ranges.into_iter().zip(&views) {
            let inside = offset % PAGE as u64;
            let start = view.as_ptr() as usize - inside as usize;
            let found = located.iter().find(|mapping| mapping.start == start);
            let length = (inside as usize + view.len()).next_multiple_of(PAGE);
            assert_eq!(found.map(|mapping| (mapping.offset, mapping.length)), Some((offset - inside, length)));
        }
        assert!(located.iter().all(|mapping| mapping.path == weights.canonicalize().unwrap()));
        let other = tempfile::tempdir().unwrap();
        assert_eq!(list(other.path()).unwrap(), []);
        std::fs::write(&graph, model(&[of((0, 16))])).unwrap();
        assert_eq!(locate(list(dir.path()).unwrap(), &graph), [], "views of no known weight are left to the system");
    }

    #[test]
    fn pages_can_be_locked() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, vec![7; 8 << 20]).unwrap();
        // SAFETY: only this test uses the file.
        let view = unsafe { memmap2::Mmap::map(&File::open(&path).unwrap()) }.unwrap();
        let addresses = view.as_ptr() as usize..view.as_ptr() as usize + view.len();
        prefetch(&addresses);
        lock(&addresses).unwrap();
        assert_eq!(resident(&addresses).unwrap(), view.len());
        unlock(&addresses);
    }
}
