//! The connection to hpp-profile: requests from stdin, replies to stdout. Ends the process once the parent is gone.

use hpp_io::{StdoutError, show_json};
use hpp_schema::probe::{Reply, Request};
use std::io::{self, BufRead, Write};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

/// Both directions of the connection.
pub(super) struct Wire {
    out: Box<dyn Write>,
    lines: Receiver<Result<Vec<u8>, io::Error>>,
}

impl Wire {
    /// Takes over stdin and stdout. From now on, whatever libraries print to stdout goes to stderr.
    pub fn open() -> io::Result<Self> {
        let (send, lines) = sync_channel(1);
        let parent = parent();
        std::thread::Builder::new().name("requests".into()).spawn(move || {
            for line in io::stdin().lock().split(b'\n') {
                let failed = line.is_err();
                if send.send(line).is_err() || failed {
                    break;
                }
            }
            drop(send);
            exit_with(parent);
        })?;
        Ok(Self { out: own_stdout()?, lines })
    }

    /// Sends a reply and flushes.
    pub fn send(&mut self, reply: &Reply) -> Result<(), StdoutError> {
        show_json(&mut self.out, reply)
    }

    /// The next request, or why a line is not one; `None` at the end of stdin. Skips empty lines.
    pub fn receive(&mut self) -> Option<Result<Request, String>> {
        loop {
            let line = match self.lines.recv().ok()? {
                Ok(line) => line,
                Err(error) => return Some(Err(format!("cannot read the request: {error}"))),
            };
            if !line.iter().all(u8::is_ascii_whitespace) {
                return Some(serde_json::from_slice(&line).map_err(|error| format!("not a request: {error}")));
            }
        }
    }
}

/// Returns a copy of stdout for replies and redirects stdout to stderr, so that output of libraries does not mix with replies.
#[cfg(unix)]
fn own_stdout() -> io::Result<Box<dyn Write>> {
    let replies = rustix::io::dup(io::stdout())?;
    rustix::stdio::dup2_stdout(io::stderr())?;
    Ok(Box::new(std::fs::File::from(replies)))
}

/// Stdout, which libraries may print to as well.
#[cfg(not(unix))]
fn own_stdout() -> io::Result<Box<dyn Write>> {
    Ok(Box::new(io::stdout()))
}

/// Exits the process when its parent has changed, which means that hpp-profile has died. The end of stdin alone is no reason to exit: it may come
/// while the last request is still being answered. Without this check, a measurement that hangs would outlive a dead parent forever.
fn exit_with(original_parent: Option<u32>) {
    while parent() == original_parent {
        std::thread::sleep(Duration::from_millis(200));
    }
    std::process::exit(1);
}

#[cfg(unix)]
fn parent() -> Option<u32> {
    Some(std::os::unix::process::parent_id())
}

#[cfg(not(unix))]
fn parent() -> Option<u32> {
    None
}
