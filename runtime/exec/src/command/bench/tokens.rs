//! Decoded tokens, taken apart: what computed, what was copied, read and waited for.

use super::spread::Spread;
use crate::report::millis;
use hpp_engine::{Counter, PassTelemetry};
use serde::Serialize;
use std::collections::BTreeMap;

/// One token, or the medians of several.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct Token {
    /// From its feeding to the choice of the next.
    pub ms: f64,
    /// Computing on each device of the plan, milliseconds; what a GPU's partitions take that run on the CPU is `gpu0 on the CPU`.
    pub compute_ms: BTreeMap<String, f64>,
    /// Moving boundaries, state and scores between memories, milliseconds.
    pub transfer_ms: f64,
    /// Their bytes.
    pub transferred_bytes: f64,
    /// Weights streamed to devices; absent where none are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streamed: Option<Brought>,
    /// Weights read from disk; absent where none are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<Brought>,
    /// What none of these accounts for, milliseconds: choosing a token, binding, starting runs.
    pub rest_ms: f64,
}

/// Weights that were brought beside computing.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct Brought {
    /// Their bytes.
    pub bytes: f64,
    /// Milliseconds in which they were brought; of the disk, added up where several reads went on at once.
    pub busy_ms: f64,
    /// Bytes over that time, in 1e9 bytes a second.
    pub gb_per_second: f64,
    /// Milliseconds in which partitions waited for them.
    pub stall_ms: f64,
    /// Times a partition found its weights in a slot or on their way there; zero for the disk.
    pub slot_hits: f64,
    /// Times it did not.
    pub slot_misses: f64,
}

impl Token {
    /// From what the engine measured of its pass, and the whole token.
    pub fn new(ms: f64, pass: &PassTelemetry) -> Self {
        let brought =
            |busy: Counter, bytes: u64, stalls: Counter| (bytes > 0).then(|| Brought::new(busy, bytes, stalls));
        let streamed = brought(pass.uploads, pass.uploaded_bytes, pass.slot_stalls).map(|streamed| Brought {
            slot_hits: pass.slot_hits as f64,
            slot_misses: pass.slot_misses as f64,
            ..streamed
        });
        Token {
            ms,
            compute_ms: pass.compute.iter().map(|(device, time)| (device.clone(), millis(*time))).collect(),
            transfer_ms: pass.copies.millis(),
            transferred_bytes: pass.copied_bytes as f64,
            streamed,
            disk: brought(pass.reads, pass.read_bytes, pass.disk_stalls),
            rest_ms: (ms - millis(pass.accounted())).max(0.0),
        }
    }

    /// Each number's median; `None` for no tokens.
    pub fn median(tokens: &[Token]) -> Option<Self> {
        let first = tokens.first()?;
        let of = |value: &dyn Fn(&Token) -> f64| Spread::of(tokens.iter().map(value)).median;
        let brought = |which: &dyn Fn(&Token) -> Option<&Brought>| {
            let all: Vec<&Brought> = tokens.iter().filter_map(which).collect();
            let of = |value: &dyn Fn(&Brought) -> f64| Spread::of(all.iter().map(|brought| value(brought))).median;
            (!all.is_empty()).then(|| Brought {
                bytes: of(&|brought| brought.bytes),
                busy_ms: of(&|brought| brought.busy_ms),
                gb_per_second: of(&|brought| brought.gb_per_second),
                stall_ms: of(&|brought| brought.stall_ms),
                slot_hits: of(&|brought| brought.slot_hits),
                slot_misses: of(&|brought| brought.slot_misses),
            })
        };
        let compute = first.compute_ms.keys().map(|device| (device.clone(), of(&|token| token.compute_ms[device])));
        Some(Token {
            ms: of(&|token| token.ms),
            compute_ms: compute.collect(),
            transfer_ms: of(&|token| token.transfer_ms),
            transferred_bytes: of(&|token| token.transferred_bytes),
            streamed: brought(&|token| token.streamed.as_ref()),
            disk: brought(&|token| token.disk.as_ref()),
            rest_ms: of(&|token| token.rest_ms),
        })
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let mut parts: Vec<String> =
            self.compute_ms.iter().map(|(device, ms)| format!("{device} computes {ms:.2} ms")).collect();
        parts.push(format!("transfers {:.2} ms", self.transfer_ms));
        let waits = |what: &str, brought: &Brought| format!("waits {:.2} ms for {what}", brought.stall_ms);
        parts.extend(self.streamed.as_ref().map(|streamed| waits("streamed weights", streamed)));
        parts.extend(self.disk.as_ref().map(|disk| waits("the disk", disk)));
        format!("a token: {}, {:.2} ms of rest\n", parts.join(", "), self.rest_ms)
    }
}

impl Brought {
    fn new(busy: Counter, bytes: u64, stalls: Counter) -> Self {
        let busy_ms = busy.millis();
        let gb_per_second = if busy_ms > 0.0 { bytes as f64 / busy_ms / 1e6 } else { 0.0 };
        Brought { bytes: bytes as f64, busy_ms, gb_per_second, stall_ms: stalls.millis(), ..Brought::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn tally(millis: u64) -> Counter {
        Counter { count: 1, time: Duration::from_millis(millis) }
    }

    fn pass(compute: u64, uploaded_bytes: u64) -> PassTelemetry {
        PassTelemetry {
            compute: vec![("gpu0".into(), Duration::from_millis(compute)), ("cpu".into(), Duration::from_millis(2))],
            copies: tally(1),
            uploads: tally(4),
            uploaded_bytes,
            slot_stalls: tally(3),
            slot_hits: 5,
            ..PassTelemetry::default()
        }
    }

    #[test]
    fn a_token_is_what_computed_what_moved_and_what_waited() {
        let token = Token::new(20.0, &pass(10, 8_000_000));
        assert_eq!(token.rest_ms, 20.0 - 10.0 - 2.0 - 1.0 - 3.0, "copies of weights go on beside the rest");
        let streamed = token.streamed.as_ref().unwrap();
        assert_eq!((streamed.gb_per_second, streamed.stall_ms, streamed.slot_hits), (2.0, 3.0, 5.0));
        assert_eq!(token.disk, None);
        let said = "a token: cpu computes 2.00 ms, gpu0 computes 10.00 ms, transfers 1.00 ms, waits 3.00 ms for streamed \
                    weights, 4.00 ms of rest\n";
        assert_eq!(token.line(), said);
    }

    #[test]
    fn medians_are_each_number_s_own() {
        let tokens: Vec<Token> =
            [(20.0, 10), (30.0, 14), (22.0, 18)].map(|(ms, compute)| Token::new(ms, &pass(compute, 8))).into();
        let median = Token::median(&tokens).unwrap();
        assert_eq!((median.ms, median.compute_ms["gpu0"]), (22.0, 14.0));
        assert_eq!(median.streamed.unwrap().bytes, 8.0);
        assert_eq!(Token::median(&[]), None);
    }
}
