//! What the engine tells while it works. It tells; the binary decides what to draw and where.

use hpp_schema::Provider;

/// Receives progress, warnings and the reasons of fallbacks. Every method may be ignored.
pub trait Reporter: Send + Sync {
    /// Files are being compared with what the plan recorded.
    fn checking_files(&self, _files: usize) {}
    /// Partition `index` of `count` is being loaded.
    fn loading(&self, _partition: &str, _index: usize, _count: usize) {}
    /// A partition is ready.
    fn loaded(&self, _partition: &str, _provider: Provider, _processor: &str, _millis: f64) {}
    /// A partition runs on another provider than the plan prefers.
    fn fallback(&self, _partition: &str, _wanted: Provider, _got: Provider, _reason: &str) {}
    /// Something a person should know, once.
    fn warning(&self, _message: &str) {}
}

/// Tells nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Reporter for Silent {}
