//! The limit on the size of files that a process may write (`ulimit -f`).

/// From now on a write beyond the limit is an error of that write, as on a full disk, instead of the end of the process without a word.
pub fn report_file_size_limit() {
    // A signal with a handler, whatever it does, ends no process. Without it, which does not happen, things stay as they are.
    #[cfg(unix)]
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
}
