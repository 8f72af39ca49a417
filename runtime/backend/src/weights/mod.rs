//! Weights that are not constants in the memory of their session: streamed from disk ([`disk`]), or copied to a device ([`upload`]).
//! Both read through one type of file ([`file`]).

#[cfg_attr(not(target_os = "linux"), path = "disk/unsupported.rs")]
pub(crate) mod disk;
mod file;
pub(crate) mod upload;
