//! ONNX Runtime's messages on their way to the reporter: warnings and worse, each once.

use hpp_engine::Reporter;
use ort::logging::LogLevel;
use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

/// Passes messages on. They come from any thread.
pub(crate) struct Log {
    reporter: Mutex<Arc<dyn Reporter>>,
    said: Mutex<BTreeSet<String>>,
}

/// Most different messages remembered; a library that says more is repeated rather than remembered for ever.
const MOST: usize = 1000;

impl Log {
    pub fn new(reporter: Arc<dyn Reporter>) -> Self {
        Log { reporter: Mutex::new(reporter), said: Mutex::new(BTreeSet::new()) }
    }

    /// Whom to tell from now on.
    pub fn send_to(&self, reporter: Arc<dyn Reporter>) {
        *self.reporter.lock().unwrap_or_else(PoisonError::into_inner) = reporter;
    }

    pub fn receive(&self, level: LogLevel, message: &str) {
        if level < LogLevel::Warning {
            return;
        }
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        if said.len() >= MOST {
            said.clear();
        }
        if said.insert(message.to_owned()) {
            drop(said);
            let reporter = self.reporter.lock().unwrap_or_else(PoisonError::into_inner).clone();
            reporter.warning(&format!("ONNX Runtime: {message}"));
        }
    }
}
