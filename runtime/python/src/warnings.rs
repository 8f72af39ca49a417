//! Collects the warnings of a load and of runs, for Python to issue.

use hpp_engine::{ProviderFallback, Reporter, fallback_warnings};
use hpp_schema::Provider;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Warnings that Python has not issued yet.
#[derive(Default)]
pub struct Warnings {
    messages: Mutex<Vec<String>>,
    fallbacks: Mutex<Vec<ProviderFallback>>,
}

impl Warnings {
    /// Adds a warning.
    pub fn add(&self, message: impl Into<String>) {
        lock(&self.messages).push(message.into());
    }

    /// Ends loading. Adds warnings, as few as possible, about partitions that do not run on the device of the plan. `has_device` returns whether a
    /// provider has a device on this machine.
    pub fn loading_done(&self, has_device: impl Fn(Provider) -> bool) {
        let fallbacks = std::mem::take(&mut *lock(&self.fallbacks));
        fallback_warnings(&fallbacks, has_device).into_iter().for_each(|message| self.add(message));
    }

    /// The warnings since the last call.
    pub fn take(&self) -> Vec<String> {
        std::mem::take(&mut *lock(&self.messages))
    }
}

impl Reporter for Warnings {
    fn fallback(&self, partition: &str, wanted: Provider, got: Provider, reason: &str) {
        let fallback = ProviderFallback { partition: partition.to_owned(), wanted, got, reason: reason.to_owned() };
        lock(&self.fallbacks).push(fallback);
    }

    fn warning(&self, message: &str) {
        self.add(message);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
