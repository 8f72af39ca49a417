//! Only Linux has a handler for lost pages of mapped files so far.

use std::path::Path;

/// Does nothing.
pub(crate) fn name<P: AsRef<Path>>(_: &[P]) {}
