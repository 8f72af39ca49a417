//! ONNX Runtime's messages on their way to the reporter: warnings and worse, each once. What it says about placing nodes is kept
//! instead, because placement is proved and reported in better words.

use hpp_engine::Reporter;
use ort::logging::LogLevel;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Passes messages on. They come from any thread.
pub(crate) struct Log {
    reporter: Mutex<Arc<dyn Reporter>>,
    said: Mutex<BTreeSet<String>>,
    kept_on_host: Mutex<BTreeSet<String>>,
}

/// Remarks on placement that say nothing of their own.
const PLACEMENT: [&str; 2] = ["Some nodes were not assigned to the preferred", "Rerunning with verbose output"];

/// Around the name of a node that a provider could run and ONNX Runtime leaves to the host on purpose: it computes on shapes.
const ON_PURPOSE: (&str, &str) = ("Force fallback to CPU execution for node ", " because");

/// Messages every mixed session gives, about shape arithmetic it rightly keeps on the CPU. Nodes that land on the wrong
/// provider are found through the session's own record of its placement.
const EXPECTED: [&str; 3] = [
    "Some nodes were not assigned to the preferred execution providers",
    "Rerunning with verbose output",
    // Prepared weights are kept by processor, and made anew for another.
    "Serializing optimized model with Graph Optimization level greater than",
];

/// Most different messages remembered; a library that says more is repeated rather than remembered for ever.
const MOST: usize = 1000;

/// The least severe messages that ONNX Runtime is asked for: more than warnings only if the log shows them.
pub(crate) fn wanted_level() -> LogLevel {
    if tracing::enabled!(target: "onnxruntime", tracing::Level::TRACE) { LogLevel::Info } else { LogLevel::Warning }
}

impl Log {
    pub fn new(reporter: Arc<dyn Reporter>) -> Self {
        Log { reporter: Mutex::new(reporter), said: Mutex::default(), kept_on_host: Mutex::default() }
    }

    /// Whom to tell from now on.
    pub fn send_to(&self, reporter: Arc<dyn Reporter>) {
        *self.reporter.lock().unwrap_or_else(PoisonError::into_inner) = reporter;
    }

    /// Nodes left to the host on purpose since this was asked last.
    pub fn take_kept_on_host(&self) -> BTreeSet<String> {
        std::mem::take(&mut self.kept_on_host.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn receive(&self, level: LogLevel, message: &str) {
        match level {
            LogLevel::Verbose | LogLevel::Info => tracing::trace!(target: "onnxruntime", "{}", message.trim()),
            LogLevel::Warning | LogLevel::Error | LogLevel::Fatal => {
                tracing::debug!(target: "onnxruntime", ?level, "{}", message.trim());
            }
        }
        if level < LogLevel::Warning || EXPECTED.iter().any(|known| message.starts_with(known)) {
            return;
        }
        let message = message.trim();
        if PLACEMENT.iter().any(|remark| message.starts_with(remark)) {
            return;
        }
        if let Some((name, _)) = message.split_once(ON_PURPOSE.0).and_then(|(_, rest)| rest.split_once(ON_PURPOSE.1)) {
            self.kept_on_host.lock().unwrap_or_else(PoisonError::into_inner).insert(name.to_owned());
            return;
        }
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() >= MOST {
            said.clear();
        }
        if said.insert(message.to_owned()) {
            drop(said);
            self.say(&format!("ONNX Runtime: {message}"));
        }
    }

    /// Says something of our own.
    pub fn say(&self, message: &str) {
        let reporter = self.reporter.lock().unwrap_or_else(PoisonError::into_inner).clone();
        reporter.warning(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Heard(Mutex<Vec<String>>);

    impl Reporter for Heard {
        fn warning(&self, message: &str) {
            self.0.lock().unwrap().push(message.to_owned());
        }
    }

    #[test]
    fn warnings_come_once_and_placement_is_kept() {
        let heard = Arc::new(Heard::default());
        let log = Log::new(heard.clone());
        log.receive(LogLevel::Info, "chatter");
        log.receive(LogLevel::Warning, "  careful\n");
        log.receive(LogLevel::Warning, "careful");
        log.receive(LogLevel::Warning, "Some nodes were not assigned to the preferred execution providers");
        let purpose = "EP optimization: Force fallback to CPU execution for node /model/Add because the CPU is faster";
        log.receive(LogLevel::Warning, purpose);
        assert_eq!(*heard.0.lock().unwrap(), ["ONNX Runtime: careful"]);
        assert_eq!(log.take_kept_on_host(), BTreeSet::from(["/model/Add".to_owned()]));
        assert!(log.take_kept_on_host().is_empty());
    }
}
