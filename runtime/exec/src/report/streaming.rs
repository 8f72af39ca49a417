//! The cost of streaming weights to devices: fields for `--json` and a line for people.

use crate::numbers::{gb_per_second, millis};
use hpp_engine::Telemetry;
use hpp_schema::ByteSize;
use serde::Serialize;

/// Weights streamed to devices while a plan ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Streaming {
    /// Bytes copied.
    pub bytes: u64,
    /// Time in which copies were in progress, in milliseconds.
    pub busy_ms: f64,
    /// Bytes over that time, in 1e9 bytes a second.
    pub gb_per_second: f64,
    /// Time in which partitions waited for their weights, in milliseconds.
    pub stall_ms: f64,
    /// Runs of partitions whose weights were in a slot or being copied to one.
    pub slot_hits: u64,
    /// Runs whose copy had not started.
    pub slot_misses: u64,
}

impl Streaming {
    /// From the engine's telemetry; `None` if nothing was streamed.
    pub fn new(telemetry: &Telemetry) -> Option<Self> {
        let (bytes, busy_ms) = (telemetry.uploaded_bytes, telemetry.uploads.millis());
        let gb_per_second = gb_per_second(bytes as f64, busy_ms);
        let (slot_hits, slot_misses) = (telemetry.slot_hits, telemetry.slot_misses);
        let stall_ms = millis(telemetry.slot_stalls.time);
        (bytes > 0).then_some(Streaming { bytes, busy_ms, gb_per_second, stall_ms, slot_hits, slot_misses })
    }
}

/// One line for people; empty if nothing was streamed.
pub fn line(streaming: Option<&Streaming>) -> String {
    let Some(streaming) = streaming else { return String::new() };
    let bytes = ByteSize(streaming.bytes).human();
    let Streaming { gb_per_second, stall_ms, busy_ms, slot_hits, slot_misses, .. } = streaming;
    format!(
        "streamed: {bytes} of weights at {gb_per_second:.2} GB/s in {busy_ms:.0} ms, {slot_hits} of {} prefetched; partitions waited \
         {stall_ms:.0} ms for them\n",
        slot_hits + slot_misses
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn without_streaming_there_is_no_line() {
        let mut telemetry = Telemetry::default();
        assert_eq!(Streaming::new(&telemetry), None);
        assert_eq!(line(None), "");
        telemetry.uploaded_bytes = 3_000_000_000;
        telemetry.uploads.time = Duration::from_millis(2000);
        telemetry.slot_stalls.time = Duration::from_millis(500);
        (telemetry.slot_hits, telemetry.slot_misses) = (9, 1);
        let text = line(Streaming::new(&telemetry).as_ref());
        let want = "streamed: 2.79 GiB of weights at 1.50 GB/s in 2000 ms, 9 of 10 prefetched; partitions waited 500 ms for them\n";
        assert_eq!(text, want);
    }
}
