//! Structured logs: `-v` and `HPP_LOG` select events, each of which becomes one line of text.
//!
//! Libraries emit events with the `tracing` crate. The commands install the subscriber here, and only if the user asks for logs:
//! without one, an event costs one comparison and evaluates no field.

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Instant;
use tracing::Subscriber;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::layer::SubscriberExt;

/// Environment variable with a filter, which overrides `-v`.
const VARIABLE: &str = "HPP_LOG";
/// What targets of events begin with: the crates of this workspace, and the log of ONNX Runtime.
const TARGETS: [&str; 2] = ["hpp", "onnxruntime"];

/// `HPP_LOG` is not a filter.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("HPP_LOG={filter} is not a log filter: {why}")]
pub struct LogFilterError {
    filter: String,
    why: String,
}

impl LogFilterError {
    /// The syntax of filters.
    pub fn hint(&self) -> &'static str {
        "write a level (error, warn, info, debug, trace or off), or target=level pairs, separated by commas: \
         HPP_LOG=info,hpp_backend=debug"
    }
}

/// Sends log lines to `print`, without line ends, from any thread. `HPP_LOG` is the filter. If it is not set, `verbose`, the number of `-v`,
/// selects info, debug or trace. Without both, nothing is logged.
pub fn log_to(verbose: u8, print: impl Fn(&str) + Send + Sync + 'static) -> Result<(), LogFilterError> {
    let targets = match (std::env::var_os(VARIABLE).filter(|filter| !filter.is_empty()), verbose) {
        (Some(filter), _) => parse(&filter.to_string_lossy())?,
        (None, 0) => return Ok(()),
        (None, 1) => Targets::new().with_default(LevelFilter::INFO),
        (None, 2) => Targets::new().with_default(LevelFilter::DEBUG),
        (None, _) => Targets::new().with_default(LevelFilter::TRACE),
    };
    // Fails if the process has a subscriber already, such as that of a test that runs two commands.
    let _ = tracing::subscriber::set_global_default(subscriber(targets, print));
    Ok(())
}

/// Writes a line to stderr. A closed stderr is not an error of the command.
pub fn line_to_stderr(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

fn parse(filter: &str) -> Result<Targets, LogFilterError> {
    let error = |why| LogFilterError { filter: filter.to_owned(), why };
    let targets: Targets =
        filter.parse().map_err(|cause: tracing_subscriber::filter::ParseError| error(cause.to_string()))?;
    // `Targets` takes an unknown level for a target, so that HPP_LOG=verbose would silently log nothing.
    let unknown = targets.iter().find(|(target, _)| !TARGETS.iter().any(|known| target.starts_with(known)));
    match unknown {
        Some((target, _)) => Err(error(format!("{target:?} is neither a level nor a target of HPP"))),
        None => Ok(targets),
    }
}

fn subscriber(targets: Targets, print: impl Fn(&str) + Send + Sync + 'static) -> impl Subscriber + Send + Sync {
    let print = Arc::new(print);
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .with_timer(SinceStart(Instant::now()))
        .with_writer(move || LinePrinter(Arc::clone(&print)));
    tracing_subscriber::registry().with(targets).with(lines)
}

/// Seconds since the log began.
struct SinceStart(Instant);

impl FormatTime for SinceStart {
    fn format_time(&self, writer: &mut Writer<'_>) -> std::fmt::Result {
        write!(writer, "{:.3}s", self.0.elapsed().as_secs_f64())
    }
}

/// Passes on lines. The formatter writes each event, with its line end, in one call.
struct LinePrinter<P>(Arc<P>);

impl<P: Fn(&str)> Write for LinePrinter<P> {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        (self.0)(String::from_utf8_lossy(event).trim_end_matches('\n'));
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn an_event_is_a_line_with_level_target_and_fields() {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let printed = Arc::clone(&lines);
        let print = move |line: &str| printed.lock().unwrap().push(line.to_owned());
        tracing::subscriber::with_default(subscriber(parse("info,hpp_io=debug").unwrap(), print), || {
            tracing::info!(target: "hpp_model", bytes = 3, "model read");
            tracing::debug!(target: "hpp_model", "not selected");
            tracing::debug!(target: "hpp_io::read", path = "a b", "file read");
        });
        let lines = lines.lock().unwrap();
        let ends = ["s  INFO hpp_model: model read bytes=3", "s DEBUG hpp_io::read: file read path=\"a b\""];
        assert_eq!(lines.len(), ends.len(), "{lines:?}");
        for (line, end) in lines.iter().zip(ends) {
            assert!(line.ends_with(end), "{line:?}");
        }
    }

    #[test]
    fn filters_name_levels_and_known_targets() {
        for filter in ["info", "TRACE", "off", "hpp_split=debug", "warn,hpp_engine::load=trace,onnxruntime=debug"] {
            assert!(parse(filter).is_ok(), "{filter}");
        }
        for (filter, says) in
            [("hpp_split=loud", "hpp_split=loud"), ("verbose", "\"verbose\""), ("tokio=info", "tokio")]
        {
            let error = parse(filter).unwrap_err();
            assert!(error.to_string().contains(says) && error.hint().contains("target=level"), "{error}");
        }
    }
}
