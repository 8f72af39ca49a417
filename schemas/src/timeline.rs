//! What happened when, simulated or measured, and the Chrome trace format that Perfetto opens.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// Spans on lanes; a lane does one thing at a time.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Timeline {
    /// In the order they start.
    pub spans: Vec<Span>,
}

/// One thing that took time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// What was busy: `cpu`, `gpu0`, `to gpu0`, `from gpu0`, `gpu0 to gpu1`, `disk`, or `passes` for whole passes.
    pub lane: String,
    /// What it did: a partition's or block's name, the tensor that moved.
    pub name: String,
    /// What kind of work it was.
    pub kind: SpanKind,
    /// When it began, microseconds from the start of the timeline.
    pub start_us: f64,
    /// How long it took, microseconds.
    pub duration_us: f64,
    /// Which pass it belongs to, from 0.
    pub pass: u64,
    /// Bytes moved, where bytes moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
}

/// What kind of work a span is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// A partition or block computed.
    Compute,
    /// Bytes moved.
    Transfer,
    /// Something waited for something else.
    Stall,
    /// A whole pass, from its first input to its last run.
    Pass,
}

impl SpanKind {
    /// Its name in a trace.
    pub fn as_str(self) -> &'static str {
        match self {
            SpanKind::Compute => "compute",
            SpanKind::Transfer => "transfer",
            SpanKind::Stall => "stall",
            SpanKind::Pass => "pass",
        }
    }
}

impl Timeline {
    /// The timeline as JSON in the Chrome trace event format: one process, one thread for each lane in order of first
    /// appearance, a complete event (`"ph": "X"`, times in microseconds) for each span.
    pub fn to_chrome_trace(&self) -> String {
        let mut lanes: Vec<&str> = Vec::new();
        for span in &self.spans {
            if !lanes.contains(&span.lane.as_str()) {
                lanes.push(&span.lane);
            }
        }
        let names = lanes
            .iter()
            .enumerate()
            .map(|(tid, lane)| json!({"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": lane}}));
        let spans = self.spans.iter().map(|span| {
            let tid = lanes.iter().position(|lane| *lane == span.lane);
            let mut args = json!({"pass": span.pass});
            if let Some(bytes) = span.bytes {
                args["bytes"] = bytes.into();
            }
            json!({"ph": "X", "pid": 0, "tid": tid, "name": span.name, "cat": span.kind.as_str(),
                   "ts": span.start_us, "dur": span.duration_us, "args": args})
        });
        let events: Vec<_> = names.chain(spans).collect();
        json!({"traceEvents": events, "displayTimeUnit": "ms"}).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_names_each_lane_once_and_keeps_times() {
        let span = |lane: &str, start_us, bytes| Span {
            lane: lane.into(),
            name: "layers.0".into(),
            kind: SpanKind::Compute,
            start_us,
            duration_us: 5.0,
            pass: 1,
            bytes,
        };
        let timeline =
            Timeline { spans: vec![span("cpu", 0.0, None), span("gpu0", 2.5, Some(7)), span("cpu", 9.0, None)] };
        let trace: serde_json::Value = serde_json::from_str(&timeline.to_chrome_trace()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let of = |ph: &str| events.iter().filter(|e| e["ph"] == ph).cloned().collect::<Vec<_>>();
        assert_eq!(of("M").iter().map(|e| e["args"]["name"].as_str().unwrap()).collect::<Vec<_>>(), ["cpu", "gpu0"]);
        let spans = of("X");
        assert_eq!(
            (spans[1]["ts"].as_f64(), spans[1]["dur"].as_f64(), spans[1]["tid"].as_u64()),
            (Some(2.5), Some(5.0), Some(1))
        );
        assert_eq!((spans[1]["args"]["bytes"].as_u64(), spans[2]["tid"].as_u64()), (Some(7), Some(0)));
    }
}
