//! Views: ranges of weight files that ONNX Runtime has mapped. Each system lists those of this process, and takes advice about their pages.

use crate::weights::file::SECTOR;

#[cfg(unix)]
mod unix;
#[cfg(unix)]
pub(super) use unix::{advise_random, evict, lock, page_bytes, prefetch, unlock};

#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "linux")]
pub(crate) use linux::list;
#[cfg(target_os = "linux")]
pub(super) use linux::{CAN_LIST, resident};

#[cfg(target_os = "macos")]
mod macos;
#[cfg(target_os = "macos")]
pub(crate) use macos::list;
#[cfg(target_os = "macos")]
pub(super) use macos::{CAN_LIST, resident};

#[cfg(windows)]
mod windows;
#[cfg(windows)]
pub(super) use windows::{CAN_LIST, advise_random, evict, lock, page_bytes, prefetch, resident, unlock};
#[cfg(windows)]
pub(crate) use windows::{list, locate};

#[cfg(not(any(target_os = "linux", target_os = "macos", windows)))]
mod none;
#[cfg(not(any(target_os = "linux", target_os = "macos", windows)))]
pub(crate) use none::list;
#[cfg(not(any(target_os = "linux", target_os = "macos", windows)))]
pub(super) use none::{CAN_LIST, resident};

/// Finds the offsets of views in their files. Here the list has them already.
#[cfg(not(windows))]
pub(crate) fn locate(views: Vec<super::mapping::Mapping>, _: &std::path::Path) -> Vec<super::mapping::Mapping> {
    views
}

/// Mappings are divided at multiples of this: at whole pages of the system, and of the files.
pub(super) fn page_step() -> u64 {
    SECTOR.max(page_bytes() as u64)
}
