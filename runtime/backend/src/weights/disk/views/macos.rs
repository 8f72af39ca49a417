//! The views of this process as macOS lists them. Never run: no such machine was at hand.

use super::super::mapping::Mapping;
use std::ffi::{CStr, OsStr};
use std::io;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Whether this system lists views.
pub(in super::super) const CAN_LIST: bool = true;
/// The question to `proc_pidinfo` for the region at or after an address, with the path of its file (`sys/proc_info.h`).
const REGION_AND_PATH: libc::c_int = 8;

/// `struct proc_regionwithpathinfo` of `sys/proc_info.h`.
#[repr(C)]
struct RegionAndPath {
    region: Region,
    file: libc::vnode_info_path,
}

/// `struct proc_regioninfo` of `sys/proc_info.h`.
#[repr(C)]
struct Region {
    protection: [u32; 4],
    offset: u64,
    /// Behaviour, tags, counts of pages and objects: not used.
    counts: [u32; 14],
    address: u64,
    size: u64,
}

/// Mappings of files under a directory: how ONNX Runtime maps external weights. If the system does not answer, there are none, and weights
/// stay where ONNX Runtime put them.
pub(crate) fn list(dir: &Path) -> io::Result<Vec<Mapping>> {
    let dir = dir.canonicalize()?;
    let (mut found, mut at) = (Vec::new(), 0);
    while let Some(RegionAndPath { region, file }) = region_from(at) {
        // SAFETY: the system ends the path with a zero byte within the array, whose rows follow each other.
        let path = unsafe { CStr::from_ptr(file.vip_path.as_ptr().cast()) };
        let path = PathBuf::from(OsStr::from_bytes(path.to_bytes()));
        let Some(next) = region.address.checked_add(region.size).filter(|next| *next > at) else { break };
        if path.starts_with(&dir) {
            let (start, length) = (region.address as usize, region.size as usize);
            found.push(Mapping { start, length, offset: region.offset, path });
        }
        at = next;
    }
    Ok(found)
}

fn region_from(address: u64) -> Option<RegionAndPath> {
    let mut found = MaybeUninit::<RegionAndPath>::zeroed();
    let bytes = size_of::<RegionAndPath>() as libc::c_int;
    // SAFETY: the buffer has the given size, and all zeros are a valid value.
    unsafe {
        let written = libc::proc_pidinfo(libc::getpid(), REGION_AND_PATH, address, found.as_mut_ptr().cast(), bytes);
        (written == bytes).then(|| found.assume_init())
    }
}

/// Bytes of a range in memory. The system counts those in its file cache, too, so more weights than runs read may be taken for read.
pub(in super::super) fn resident(addresses: &Range<usize>) -> io::Result<usize> {
    let page = super::page_bytes();
    let mut pages: Vec<libc::c_char> = vec![0; addresses.len().div_ceil(page)];
    // SAFETY: there is a byte for each page; if the range is not mapped, the call fails.
    match unsafe { libc::mincore(addresses.start as *const libc::c_void, addresses.len(), pages.as_mut_ptr()) } {
        0 => Ok(pages.iter().filter(|page| **page & 1 != 0).count() * page),
        _ => Err(io::Error::last_os_error()),
    }
}
