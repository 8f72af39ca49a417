//! Finding `hpp-exec` and waiting for it as a child process.

use std::io;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::time::Duration;

/// Environment variable with the path of hpp-exec, for when it is not beside this program.
pub const EXEC: &str = "HPP_EXEC";

/// There is no hpp-exec at the expected path.
#[derive(Debug, thiserror::Error)]
#[error("cannot find hpp-exec: {} does not exist", .0.display())]
pub struct ExecNotFound(PathBuf);

/// Path of hpp-exec: `HPP_EXEC`, else beside this program.
pub fn find_exec() -> Result<PathBuf, ExecNotFound> {
    let sibling = || {
        let own = std::env::current_exe().unwrap_or_default();
        own.with_file_name(format!("hpp-exec{}", std::env::consts::EXE_SUFFIX))
    };
    let path = std::env::var_os(EXEC).map_or_else(sibling, PathBuf::from);
    if path.is_file() { Ok(path) } else { Err(ExecNotFound(path)) }
}

/// Waits for a child, and polls it and `cancelled` every `interval`. Kills the child and returns `None` once
/// `cancelled` is true.
pub fn wait(mut child: Child, interval: Duration, cancelled: impl Fn() -> bool) -> io::Result<Option<ExitStatus>> {
    loop {
        let status = child.try_wait();
        if status.is_err() || cancelled() {
            let _ = child.kill();
            let _ = child.wait();
            return status.map(|_| None);
        }
        match status? {
            Some(status) => return Ok(Some(status)),
            None => std::thread::sleep(interval),
        }
    }
}
