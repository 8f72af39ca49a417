//! Timelines, simulated or measured, and their export to the Chrome trace format, which Perfetto opens.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Spans of time on tracks. Spans of a track do not overlap.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Timeline {
    /// In order of their start.
    pub spans: Vec<Span>,
}

/// An interval of work or waiting.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// The busy resource: `cpu`, `gpu0`, `to gpu0`, `from gpu0`, `gpu0 to gpu1`, `disk`, or `passes` for whole passes.
    pub lane: String,
    /// Name of the partition, block or copied tensor.
    pub name: String,
    /// The kind of work.
    pub kind: SpanKind,
    /// Start, microseconds from the start of the timeline.
    pub start_us: f64,
    /// Duration, microseconds.
    pub duration_us: f64,
    /// Number of the pass, from 0.
    pub pass: u64,
    /// Bytes copied, for copies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Number of the work item in the pass, from 0, for runs of an engine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub item: Option<u64>,
}

/// The kind of work of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SpanKind {
    /// Computation of a partition or block.
    Compute,
    /// A copy.
    Transfer,
    /// Waiting for another resource.
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

/// How a file in the Chrome trace format of [`Timeline::to_chrome_trace`] begins.
pub const TRACE_START: &str = r#"{"traceEvents":["#;

impl Timeline {
    /// The timeline with these spans, ordered by start; enclosing spans come before those within.
    pub fn ordered(mut spans: Vec<Span>) -> Self {
        spans.sort_by(|a, b| a.start_us.total_cmp(&b.start_us).then(b.duration_us.total_cmp(&a.duration_us)));
        Timeline { spans }
    }

    /// Exports to JSON in the Chrome trace event format: one process, one thread per track in order of first appearance,
    /// one complete event (`"ph": "X"`, times in microseconds) per span.
    pub fn to_chrome_trace(&self) -> String {
        let mut lanes: Vec<&str> = Vec::new();
        for span in &self.spans {
            if !lanes.contains(&span.lane.as_str()) {
                lanes.push(&span.lane);
            }
        }
        let names = lanes.iter().enumerate().map(|(tid, lane)| TraceEvent::lane(tid, lane));
        let thread = |lane: &str| lanes.iter().position(|known| *known == lane).unwrap_or_default();
        let spans = self.spans.iter().map(|span| TraceEvent::span(thread(&span.lane), span));
        // Events are written one by one: the JSON tree of all events of a long run would take several times the memory of the text.
        let mut text = String::from(TRACE_START);
        for (number, event) in names.chain(spans).enumerate() {
            if number > 0 {
                text.push(',');
            }
            text += &serde_json::to_string(&event).expect("numbers and strings are JSON");
        }
        text + r#"],"displayTimeUnit":"ms"}"#
    }
}

/// An event of the Chrome trace event format; its fields have the format's names.
#[derive(Serialize)]
struct TraceEvent<'a> {
    ph: &'static str,
    pid: u32,
    tid: usize,
    name: &'a str,
    #[serde(flatten)]
    times: Option<TraceTimes>,
    args: TraceArguments<'a>,
}

#[derive(Serialize)]
struct TraceTimes {
    cat: &'static str,
    ts: f64,
    dur: f64,
}

#[derive(Serialize)]
#[serde(untagged)]
enum TraceArguments<'a> {
    Lane {
        name: &'a str,
    },
    Span {
        pass: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        bytes: Option<u64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        item: Option<u64>,
    },
}

impl<'a> TraceEvent<'a> {
    fn lane(tid: usize, name: &'a str) -> Self {
        TraceEvent { ph: "M", pid: 0, tid, name: "thread_name", times: None, args: TraceArguments::Lane { name } }
    }

    fn span(tid: usize, span: &'a Span) -> Self {
        let times = TraceTimes { cat: span.kind.as_str(), ts: span.start_us, dur: span.duration_us };
        let args = TraceArguments::Span { pass: span.pass, bytes: span.bytes, item: span.item };
        TraceEvent { ph: "X", pid: 0, tid, name: &span.name, times: Some(times), args }
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
            item: bytes.map(|bytes| bytes + 1),
        };
        let timeline =
            Timeline { spans: vec![span("cpu", 0.0, None), span("gpu0", 2.5, Some(7)), span("cpu", 9.0, None)] };
        let trace: serde_json::Value = serde_json::from_str(&timeline.to_chrome_trace()).unwrap();
        let events = trace["traceEvents"].as_array().unwrap();
        let events_of = |ph: &str| events.iter().filter(|e| e["ph"] == ph).cloned().collect::<Vec<_>>();
        assert_eq!(
            events_of("M").iter().map(|e| e["args"]["name"].as_str().unwrap()).collect::<Vec<_>>(),
            ["cpu", "gpu0"]
        );
        let spans = events_of("X");
        assert_eq!(
            (spans[1]["ts"].as_f64(), spans[1]["dur"].as_f64(), spans[1]["tid"].as_u64()),
            (Some(2.5), Some(5.0), Some(1))
        );
        assert_eq!((spans[1]["args"]["bytes"].as_u64(), spans[2]["tid"].as_u64()), (Some(7), Some(0)));
        assert_eq!((spans[1]["args"]["item"].as_u64(), spans[2]["args"]["item"].as_u64()), (Some(8), None));
    }
}
