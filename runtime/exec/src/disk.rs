//! What reading weights from disk cost, for programs and for people.

use crate::report::millis;
use hpp_engine::Telemetry;
use hpp_schema::ByteSize;
use serde::Serialize;

/// Weights read from disk while a plan ran.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DiskReads {
    /// Bytes read.
    pub bytes: u64,
    /// Time in which something was read, in milliseconds; where several threads read at once, their times added up.
    pub busy_ms: f64,
    /// Bytes over that time, in 1e9 bytes a second.
    pub gb_per_second: f64,
    /// Time in which partitions waited for their weights, in milliseconds.
    pub stall_ms: f64,
}

impl DiskReads {
    /// From what the engine measured; `None` where nothing was read.
    pub fn new(telemetry: &Telemetry) -> Option<Self> {
        let (bytes, busy_ms) = (telemetry.read_bytes, telemetry.reads.millis());
        let gb_per_second = if busy_ms > 0.0 { bytes as f64 / busy_ms / 1e6 } else { 0.0 };
        (bytes > 0).then(|| DiskReads { bytes, busy_ms, gb_per_second, stall_ms: millis(telemetry.stalls.time) })
    }
}

/// One line for people; nothing where nothing was read.
pub fn line(reads: Option<&DiskReads>) -> String {
    let Some(reads) = reads else { return String::new() };
    let bytes = ByteSize(reads.bytes).human();
    format!(
        "disk: {bytes} of weights at {:.2} GB/s, waited for {:.0} of {:.0} ms\n",
        reads.gb_per_second, reads.stall_ms, reads.busy_ms
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn what_is_not_read_is_not_spoken_of() {
        let mut telemetry = Telemetry::default();
        assert_eq!(DiskReads::new(&telemetry), None);
        assert_eq!(line(None), "");
        telemetry.read_bytes = 3_000_000_000;
        telemetry.reads.time = Duration::from_millis(2000);
        telemetry.stalls.time = Duration::from_millis(500);
        let reads = DiskReads::new(&telemetry).unwrap();
        assert_eq!(reads.gb_per_second, 1.5);
        assert_eq!(line(Some(&reads)), "disk: 2.79 GiB of weights at 1.50 GB/s, waited for 500 of 2000 ms\n");
    }
}
