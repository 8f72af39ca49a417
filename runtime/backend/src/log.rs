//! Forwards ONNX Runtime's warnings and errors to the reporter, each once. Messages about node placement are not forwarded: placement is
//! checked after the session is created and reported more clearly.

use hpp_engine::Reporter;
use ort::logging::LogLevel;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Receives log messages from any thread.
pub(crate) struct Log {
    reporter: Mutex<Arc<dyn Reporter>>,
    forwarded: Mutex<BTreeSet<String>>,
    kept_on_host: Mutex<BTreeSet<String>>,
}

/// The text before and after the name of a node that ONNX Runtime keeps on the host although a provider could run it: it computes shapes.
const KEPT_ON_HOST: (&str, &str) = ("Force fallback to CPU execution for node ", " because");

/// The starts of messages that are expected and not forwarded.
const EXPECTED: [&str; 5] = [
    // A node failed: the error of its run has the same text.
    "Non-zero status code returned while running ",
    // Where the home directory cannot be written. Telemetry is off (`environment.rs`).
    "Failed to persist telemetry device ID",
    // Every session on a device: shape arithmetic stays on the CPU. `create_session` checks the placement of the other nodes.
    "Some nodes were not assigned to the preferred",
    "Rerunning with verbose output",
    // Prepared weights are for one kind of processor; on another they are prepared again.
    "Serializing optimized model with Graph Optimization level greater than",
];

/// Most messages remembered. Beyond this the memory is cleared and messages may repeat.
const MAX_REMEMBERED: usize = 1000;

/// The least severe messages that ONNX Runtime is asked for: more than warnings only if the log shows them.
pub(crate) fn wanted_level() -> LogLevel {
    if tracing::enabled!(target: "onnxruntime", tracing::Level::TRACE) { LogLevel::Info } else { LogLevel::Warning }
}

impl Log {
    pub fn new(reporter: Arc<dyn Reporter>) -> Self {
        Log { reporter: Mutex::new(reporter), forwarded: Mutex::default(), kept_on_host: Mutex::default() }
    }

    /// Sets the reporter for later messages.
    pub fn send_to(&self, reporter: Arc<dyn Reporter>) {
        *self.reporter.lock().unwrap_or_else(PoisonError::into_inner) = reporter;
    }

    /// The nodes that ONNX Runtime kept on the host on purpose since the last call.
    pub fn take_kept_on_host(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.kept_on_host.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes a message of ONNX Runtime.
    pub fn receive(&self, level: LogLevel, message: &str) {
        match level {
            LogLevel::Verbose | LogLevel::Info => tracing::trace!(target: "onnxruntime", "{}", message.trim()),
            LogLevel::Warning | LogLevel::Error | LogLevel::Fatal => {
                tracing::debug!(target: "onnxruntime", ?level, "{}", message.trim());
            }
        }
        let message = message.trim();
        if level < LogLevel::Warning || EXPECTED.iter().any(|start| message.starts_with(start)) {
            return;
        }
        let (before, after) = KEPT_ON_HOST;
        if let Some((name, _)) = message.split_once(before).and_then(|(_, rest)| rest.split_once(after)) {
            self.kept_on_host.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
            return;
        }
        let mut forwarded = self.forwarded.lock().unwrap_or_else(PoisonError::into_inner);
        if forwarded.len() >= MAX_REMEMBERED {
            forwarded.clear();
        }
        if forwarded.insert(message.to_owned()) {
            drop(forwarded);
            self.warn(&format!("ONNX Runtime: {message}"));
        }
    }

    /// Sends a warning to the reporter.
    pub fn warn(&self, message: &str) {
        let reporter = self.reporter.lock().unwrap_or_else(PoisonError::into_inner).clone();
        reporter.warning(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Recorder(Mutex<Vec<String>>);

    impl Reporter for Recorder {
        fn warning(&self, message: &str) {
            self.0.lock().unwrap().push(message.to_owned());
        }
    }

    #[test]
    fn each_warning_is_forwarded_once_and_placement_is_recorded() {
        let recorder = Arc::new(Recorder::default());
        let log = Log::new(recorder.clone());
        log.receive(LogLevel::Info, "chatter");
        log.receive(LogLevel::Warning, "  careful\n");
        log.receive(LogLevel::Warning, "careful");
        log.receive(LogLevel::Error, "Non-zero status code returned while running Gather node. Name:'g'");
        log.receive(LogLevel::Warning, "Some nodes were not assigned to the preferred execution providers");
        let purpose = "EP optimization: Force fallback to CPU execution for node /model/Add because the CPU is faster";
        log.receive(LogLevel::Warning, purpose);
        assert_eq!(*recorder.0.lock().unwrap(), ["ONNX Runtime: careful"]);
        assert_eq!(log.take_kept_on_host(), BTreeSet::from(["/model/Add".to_owned()]));
        assert!(log.take_kept_on_host().is_empty());
    }
}
