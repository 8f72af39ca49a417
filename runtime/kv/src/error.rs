//! The errors of opening a store.

use std::io;
use std::path::PathBuf;

/// Why a store cannot be opened. Later faults (a full disk, a damaged record) cost a page, never an answer; they are logged and counted.
#[derive(Debug, thiserror::Error)]
pub enum PageStoreError {
    /// Its directory or file cannot be used.
    #[error("cannot use the KV store {path}")]
    Io {
        /// The directory or file.
        path: PathBuf,
        /// What the system reported.
        source: io::Error,
    },
    /// Another process has it open.
    #[error("another process uses the KV store {0}: give this one another --kv-dir")]
    InUse(PathBuf),
    /// The limit is smaller than a page.
    #[error(
        "the KV store may take {}, and one page has {}: allow more with --kv-ram or --kv-disk, or turn the tier off with 0",
        kib(*.limit), kib(.page.saturating_add(KIB - 1))
    )]
    TooSmall {
        /// Bytes that the tier may take.
        limit: u64,
        /// Bytes of a page with its header.
        page: u64,
    },
    /// Models in use take all bytes that the directory may hold.
    #[error("models in use take all of the {limit} bytes that the KV store {path} may hold: allow more")]
    Full {
        /// The directory.
        path: PathBuf,
        /// Bytes of all models together.
        limit: u64,
    },
    /// A thread could not be started.
    #[error("cannot start a thread of the KV store")]
    Thread(#[source] io::Error),
}

const KIB: u64 = 1 << 10;

/// A size in the notation of --kv-ram, rounded down.
fn kib(bytes: u64) -> String {
    format!("{}K", bytes / KIB)
}
