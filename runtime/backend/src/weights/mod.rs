//! Weights outside of their session's own memory: streamed from disk ([`disk`]) or uploaded to a device ([`upload`]). Both read through one
//! file type ([`file`]).

pub(crate) mod disk;
mod file;
pub(crate) mod upload;
