//! The wire: requests in, replies out, and the end when the other side is gone.

use hpp_io::{StdoutError, show_json};
use hpp_schema::probe::{Reply, Request};
use std::fs::File;
use std::io::{self, BufRead, Write};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

/// Both directions.
pub(super) struct Wire {
    out: Box<dyn Write>,
    lines: Receiver<Result<Vec<u8>, io::Error>>,
}

impl Wire {
    /// Takes stdin and stdout over. What anything else in this process prints goes to stderr from here on.
    pub fn open() -> io::Result<Self> {
        let (send, lines) = sync_channel(1);
        let parent = parent();
        std::thread::Builder::new().name("requests".into()).spawn(move || {
            for line in io::stdin().lock().split(b'\n') {
                let broken = line.is_err();
                if send.send(line).is_err() || broken {
                    break;
                }
            }
            drop(send);
            end_with(parent);
        })?;
        Ok(Self { out: own_stdout()?, lines })
    }

    /// Sends a reply at once.
    pub fn send(&mut self, reply: &Reply) -> Result<(), StdoutError> {
        show_json(&mut self.out, reply)
    }

    /// The next request, or why a line is none; `None` when there are no more. Empty lines are passed over.
    pub fn receive(&mut self) -> Option<Result<Request, String>> {
        loop {
            let line = match self.lines.recv().ok()? {
                Ok(line) => line,
                Err(error) => return Some(Err(format!("cannot read the request: {error}"))),
            };
            if !line.iter().all(u8::is_ascii_whitespace) {
                return Some(serde_json::from_slice(&line).map_err(|error| format!("this is no request: {error}")));
            }
        }
    }
}

/// Stdout for replies alone: libraries that print find stderr in its place.
#[cfg(unix)]
fn own_stdout() -> io::Result<Box<dyn Write>> {
    let replies = rustix::io::dup(io::stdout())?;
    rustix::stdio::dup2_stdout(io::stderr())?;
    Ok(Box::new(File::from(replies)))
}

/// Stdout, shared with whatever else prints there.
#[cfg(not(unix))]
fn own_stdout() -> io::Result<Box<dyn Write>> {
    Ok(Box::new(io::stdout()))
}

/// Requests may end while the last is being answered, and then it is answered to its end. But where they ended because the
/// parent died, nobody waits, and a measurement that hangs would hang for ever.
fn end_with(first: Option<u32>) {
    while parent() == first {
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
