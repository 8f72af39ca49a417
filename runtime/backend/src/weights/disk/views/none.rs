//! Systems whose views are not listed: weights stay where ONNX Runtime put them.

use super::super::mapping::Mapping;
use std::io;
use std::ops::Range;
use std::path::Path;

/// Whether this system lists views.
pub(in super::super) const CAN_LIST: bool = false;

/// Always empty.
pub(crate) fn list(_: &Path) -> io::Result<Vec<Mapping>> {
    Ok(Vec::new())
}

/// Not called, since no view is listed.
pub(in super::super) fn resident(_: &Range<usize>) -> io::Result<usize> {
    Err(io::ErrorKind::Unsupported.into())
}
