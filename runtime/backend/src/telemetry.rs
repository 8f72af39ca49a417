//! Turns off the telemetry of ONNX Runtime.

use std::env;

/// ONNX Runtime reads this variable when it creates its environment.
const VARIABLE: &str = "ORT_DISABLE_TELEMETRY";

/// Turns off the telemetry of ONNX Runtime for this process and the processes that it starts, unless its environment says otherwise. Without this,
/// version 1.31 writes an identifier of the device and an event of each process to the user's cache directory and tries to send them. The switch
/// in its API comes too late: the first event is recorded before.
///
/// Call this at the beginning of `main`. It does nothing if the process has other threads already, as far as the system tells.
pub fn disable_telemetry() {
    if env::var_os(VARIABLE).is_some() || has_other_threads() {
        return;
    }
    // SAFETY: no other thread reads the environment at the same time: there is none, or the system locks its environment.
    unsafe { env::set_var(VARIABLE, "1") };
}

#[cfg(target_os = "linux")]
fn has_other_threads() -> bool {
    std::fs::read_dir("/proc/self/task").map_or(true, |threads| threads.count() != 1)
}

/// Windows locks its environment, and so does macOS.
#[cfg(not(target_os = "linux"))]
fn has_other_threads() -> bool {
    false
}
