//! Where the time of decoded tokens goes: computing, copying, and waiting for weights.

use super::spread::Spread;
use crate::numbers::{gb_per_second, millis};
use crate::report::disk::PAGE_FAULTS;
use hpp_engine::{Counter, PassTelemetry};
use serde::Serialize;
use std::collections::BTreeMap;

/// Times of one token, or medians over several.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct TokenTimes {
    /// From feeding it to choosing the next one, milliseconds.
    pub ms: f64,
    /// Computing on each device of the plan, milliseconds. `gpu0 on the CPU` is the time of a GPU's partitions that run on the CPU.
    pub compute_ms: BTreeMap<String, f64>,
    /// Copying boundaries, state and logits between memories, milliseconds.
    pub transfer_ms: f64,
    /// Bytes of these copies.
    pub transferred_bytes: f64,
    /// Weights streamed to devices; absent if none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streamed: Option<WeightTransfer>,
    /// Weights read from disk; absent if none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<WeightTransfer>,
    /// Experts that are read by demand; absent if none were used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<TokenExperts>,
    /// Waiting for KV caches and other states on disk, milliseconds; 0 if they are in memory.
    pub state_stall_ms: f64,
    /// The remaining time, milliseconds: sampling, binding, starting runs.
    pub rest_ms: f64,
}

/// Experts that a token used.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct TokenExperts {
    /// How many.
    pub used: f64,
    /// How many were in memory when the router selected them.
    pub in_memory: f64,
}

/// Weights transferred while partitions computed.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct WeightTransfer {
    /// Bytes.
    pub bytes: f64,
    /// Milliseconds in which at least one transfer was in progress.
    pub busy_ms: f64,
    /// Bytes over that time, in 1e9 bytes a second.
    pub gb_per_second: f64,
    /// Milliseconds in which partitions waited for weights.
    pub stall_ms: f64,
    /// Runs of partitions whose weights were in a slot or were being copied to one; 0 for the disk.
    pub slot_hits: f64,
    /// Runs of partitions whose copy had not started.
    pub slot_misses: f64,
}

impl TokenTimes {
    /// From the token's time `ms` and the telemetry of its pass.
    pub fn new(ms: f64, pass: &PassTelemetry) -> Self {
        let transfer =
            |busy: Counter, bytes: u64, stalls: Counter| (bytes > 0).then(|| WeightTransfer::new(busy, bytes, stalls));
        let streamed = transfer(pass.uploads, pass.uploaded_bytes, pass.slot_stalls).map(|streamed| WeightTransfer {
            slot_hits: pass.slot_hits as f64,
            slot_misses: pass.slot_misses as f64,
            ..streamed
        });
        TokenTimes {
            ms,
            compute_ms: pass.compute.iter().map(|(device, time)| (device.clone(), millis(*time))).collect(),
            transfer_ms: pass.copies.millis(),
            transferred_bytes: pass.copied_bytes as f64,
            streamed,
            disk: transfer(pass.reads, pass.read_bytes, pass.disk_stalls),
            experts: (pass.experts_used > 0)
                .then_some(TokenExperts { used: pass.experts_used as f64, in_memory: pass.expert_hits as f64 }),
            state_stall_ms: pass.state_stalls.millis(),
            rest_ms: (ms - millis(pass.accounted())).max(0.0),
        }
    }

    /// The median of each field; `None` without tokens.
    pub fn median(tokens: &[TokenTimes]) -> Option<Self> {
        let first = tokens.first()?;
        let median = |value: &dyn Fn(&TokenTimes) -> f64| Spread::of(tokens.iter().map(value)).median;
        let compute = first.compute_ms.keys().map(|device| (device.clone(), median(&|token| token.compute_ms[device])));
        Some(TokenTimes {
            ms: median(&|token| token.ms),
            compute_ms: compute.collect(),
            transfer_ms: median(&|token| token.transfer_ms),
            transferred_bytes: median(&|token| token.transferred_bytes),
            streamed: WeightTransfer::median(tokens.iter().filter_map(|token| token.streamed.as_ref())),
            disk: WeightTransfer::median(tokens.iter().filter_map(|token| token.disk.as_ref())),
            experts: first.experts.map(|_| {
                let of = |value: fn(&TokenExperts) -> f64| median(&|token| token.experts.as_ref().map_or(0.0, value));
                TokenExperts { used: of(|experts| experts.used), in_memory: of(|experts| experts.in_memory) }
            }),
            state_stall_ms: median(&|token| token.state_stall_ms),
            rest_ms: median(&|token| token.rest_ms),
        })
    }

    /// One line for people.
    pub fn line(&self) -> String {
        let mut parts: Vec<String> =
            self.compute_ms.iter().map(|(device, ms)| format!("{device} computes {ms:.2} ms")).collect();
        parts.push(format!("transfers {:.2} ms", self.transfer_ms));
        let waits = |what: &str, transfer: &WeightTransfer| format!("waits {:.2} ms for {what}", transfer.stall_ms);
        parts.extend(self.streamed.as_ref().map(|streamed| waits("streamed weights", streamed)));
        parts.extend(self.disk.as_ref().map(|disk| waits("the disk", disk)));
        let for_states = || format!("waits {:.2} ms for KV caches on disk {PAGE_FAULTS}", self.state_stall_ms);
        parts.extend((self.state_stall_ms > 0.0).then(for_states));
        format!("per token: {}, other {:.2} ms\n", parts.join(", "), self.rest_ms)
    }
}

impl WeightTransfer {
    fn new(busy: Counter, bytes: u64, stalls: Counter) -> Self {
        let busy_ms = busy.millis();
        WeightTransfer {
            bytes: bytes as f64,
            busy_ms,
            gb_per_second: gb_per_second(bytes as f64, busy_ms),
            stall_ms: stalls.millis(),
            ..WeightTransfer::default()
        }
    }

    /// The median of each field; `None` without transfers.
    fn median<'t>(transfers: impl Iterator<Item = &'t Self>) -> Option<Self> {
        let transfers: Vec<&Self> = transfers.collect();
        let median = |value: &dyn Fn(&Self) -> f64| Spread::of(transfers.iter().map(|transfer| value(transfer))).median;
        (!transfers.is_empty()).then(|| WeightTransfer {
            bytes: median(&|transfer| transfer.bytes),
            busy_ms: median(&|transfer| transfer.busy_ms),
            gb_per_second: median(&|transfer| transfer.gb_per_second),
            stall_ms: median(&|transfer| transfer.stall_ms),
            slot_hits: median(&|transfer| transfer.slot_hits),
            slot_misses: median(&|transfer| transfer.slot_misses),
        })
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
    fn a_tokens_time_is_computing_copying_waiting_and_the_rest() {
        let token = TokenTimes::new(20.0, &pass(10, 8_000_000));
        assert_eq!(token.rest_ms, 20.0 - 10.0 - 2.0 - 1.0 - 3.0, "weights are copied while partitions compute");
        let streamed = token.streamed.as_ref().unwrap();
        assert_eq!((streamed.gb_per_second, streamed.stall_ms, streamed.slot_hits), (2.0, 3.0, 5.0));
        assert_eq!(token.disk, None);
        let line = "per token: cpu computes 2.00 ms, gpu0 computes 10.00 ms, transfers 1.00 ms, waits 3.00 ms for streamed \
                    weights, other 4.00 ms\n";
        assert_eq!(token.line(), line);
        let on_disk = TokenTimes::new(20.0, &PassTelemetry { state_stalls: tally(2), ..pass(10, 8_000_000) });
        assert_eq!((on_disk.state_stall_ms, on_disk.rest_ms), (2.0, 2.0));
        let line = on_disk.line();
        let states = format!("waits 2.00 ms for KV caches on disk {PAGE_FAULTS}");
        assert!(line.ends_with(&format!(", {states}, other 2.00 ms\n")), "{line}");
    }

    #[test]
    fn each_field_has_its_own_median() {
        let tokens: Vec<TokenTimes> =
            [(20.0, 10), (30.0, 14), (22.0, 18)].map(|(ms, compute)| TokenTimes::new(ms, &pass(compute, 8))).into();
        let median = TokenTimes::median(&tokens).unwrap();
        assert_eq!((median.ms, median.compute_ms["gpu0"]), (22.0, 14.0));
        assert_eq!(median.streamed.unwrap().bytes, 8.0);
        assert_eq!(TokenTimes::median(&[]), None);
    }
}
