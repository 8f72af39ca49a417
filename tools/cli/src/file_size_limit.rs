//! The limit on the size of files that a process may write (`ulimit -f`).

/// After this call, a write beyond the limit fails with an error, as on a full disk. Without it, the system ends the process without a message.
pub fn report_file_size_limit() {
    // A signal that has any handler does not end the process. If the handler cannot be registered, the behaviour stays as it is.
    #[cfg(unix)]
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, std::sync::Arc::default());
}
