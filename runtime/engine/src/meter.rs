//! The meter: everything an engine does that takes time passes here, into the telemetry always and into a timeline when one
//! is recorded.

use crate::port::MemoryId;
pub(crate) use crate::port::{Ticket, Time, Took};
use crate::telemetry::{PassTelemetry, Phase, StageTelemetry, Telemetry};
use hpp_schema::{Span, SpanKind, Timeline};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Telemetry, and the timeline while one is recorded.
pub(crate) struct Meter {
    pub telemetry: Telemetry,
    /// The same of the pass at hand, or of the last.
    pub pass: PassTelemetry,
    /// Devices by the memory their stages use.
    devices: BTreeMap<MemoryId, String>,
    /// Where the time of each stage belongs.
    lanes: Vec<String>,
    recording: Option<Recording>,
    /// The last stage that ran on each lane, in the order of the pass's lanes.
    last: Vec<Option<(usize, Phase)>>,
    /// What devices were given to do, oldest first, and where it belongs.
    begun: VecDeque<(Ticket, Began)>,
}

/// Something a device does that takes time.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Began {
    /// A stage's run.
    Run { stage: usize, phase: Phase },
    /// A copy of a stage's weights to a device.
    Upload { stage: usize, memory: MemoryId, bytes: u64 },
    /// A stage's wait for its weights.
    Stall { stage: usize, awaited: Awaited },
}

struct Recording {
    since: Duration,
    pass: u64,
    spans: Vec<Span>,
}

/// Bytes of a tensor that went from one memory to another.
pub(crate) struct Moved<'a> {
    pub name: &'a str,
    pub from: MemoryId,
    pub to: MemoryId,
    pub bytes: u64,
}

/// Weights that were read from disk.
pub(crate) struct Read<'a> {
    pub partition: &'a str,
    pub bytes: u64,
}

/// What a stage waited for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Awaited {
    /// Weights read from disk.
    Disk,
    /// Weights copied to a slot.
    Slot,
}

impl Meter {
    /// A meter of stages that took `load` to load.
    pub fn new(devices: BTreeMap<MemoryId, String>, load: Duration, stages: Vec<StageTelemetry>) -> Self {
        let lanes: Vec<String> = stages.iter().map(StageTelemetry::lane).collect();
        let pass = PassTelemetry::of(&lanes);
        let telemetry = Telemetry { load, stages, ..Telemetry::default() };
        let last = vec![None; pass.compute.len()];
        Meter { telemetry, pass, devices, lanes, recording: None, last, begun: VecDeque::new() }
    }

    /// Records from now on, and forgets what was recorded; or stops recording.
    pub fn record(&mut self, now: Option<Duration>) {
        self.recording = now.map(|since| Recording { since, pass: 0, spans: Vec::new() });
    }

    /// Whether times are recorded, and so to be told apart.
    pub fn is_recording(&self) -> bool {
        self.recording.is_some()
    }

    /// What was recorded so far, in the order it started; what lies in something comes after it.
    pub fn timeline(&self) -> Timeline {
        let mut spans = self.recording.as_ref().map_or(Vec::new(), |recording| recording.spans.clone());
        spans.sort_by(|a, b| a.start_us.total_cmp(&b.start_us).then(b.duration_us.total_cmp(&a.duration_us)));
        Timeline { spans }
    }

    /// A tensor was copied.
    pub fn moved(&mut self, moved: &Moved<'_>, took: Took) {
        self.telemetry.copies.add(took.length());
        self.telemetry.copied_bytes += moved.bytes;
        self.pass.copies.add(took.length());
        self.pass.copied_bytes += moved.bytes;
        let Some(recording) = &mut self.recording else { return };
        let device = |memory| self.devices.get(&memory).map_or("?", String::as_str);
        let lane = match (moved.from, moved.to) {
            (MemoryId::HOST, MemoryId::HOST) => "cpu".to_owned(),
            (MemoryId::HOST, to) => format!("to {}", device(to)),
            (from, MemoryId::HOST) => format!("from {}", device(from)),
            (from, to) => format!("{} to {}", device(from), device(to)),
        };
        recording.span(lane, moved.name.to_owned(), SpanKind::Transfer, took, Some(moved.bytes));
    }

    /// Weights were read from disk, while something else computed or nothing did.
    pub fn read(&mut self, read: &Read<'_>, took: Took) {
        self.telemetry.reads.add(took.length());
        self.telemetry.read_bytes += read.bytes;
        self.pass.reads.add(took.length());
        self.pass.read_bytes += read.bytes;
        if let Some(recording) = &mut self.recording {
            let (lane, name) = ("disk".to_owned(), read.partition.to_owned());
            recording.span(lane, name, SpanKind::Transfer, took, Some(read.bytes));
        }
    }

    /// Something was begun that took so long, or will be told to have.
    pub fn began(&mut self, began: Began, time: Time) {
        match (time, began) {
            (Time::Later(ticket), _) => self.begun.push_back((ticket, began)),
            (Time::Known(took), Began::Run { stage, phase }) => self.ran(stage, phase, took),
            (Time::Known(took), Began::Upload { stage, memory, bytes }) => self.uploaded(stage, memory, bytes, took),
            (Time::Known(took), Began::Stall { stage, awaited }) => self.stalled(stage, awaited, took),
        }
    }

    /// A device tells how long something took. What is not known here was begun while nobody measured.
    pub fn told(&mut self, ticket: Ticket, took: Took) {
        let at = self.begun.iter().position(|(own, _)| *own == ticket);
        if let Some((_, began)) = at.and_then(|at| self.begun.remove(at)) {
            self.began(began, Time::Known(took));
        }
    }

    /// Weights were copied to a device, while something else computed or nothing did.
    fn uploaded(&mut self, stage: usize, memory: MemoryId, bytes: u64, took: Took) {
        self.telemetry.uploads.add(took.length());
        self.telemetry.uploaded_bytes += bytes;
        self.pass.uploads.add(took.length());
        self.pass.uploaded_bytes += bytes;
        if let Some(recording) = &mut self.recording {
            let lane = format!("to {}", self.devices.get(&memory).map_or("?", String::as_str));
            let partition = self.telemetry.stages[stage].partition.clone();
            recording.span(lane, partition, SpanKind::Transfer, took, Some(bytes));
        }
    }

    /// A stage came for weights that are streamed to it: whether they were there or on their way.
    pub fn came_for_slot(&mut self, hit: bool) {
        let (all, now) = match hit {
            true => (&mut self.telemetry.slot_hits, &mut self.pass.slot_hits),
            false => (&mut self.telemetry.slot_misses, &mut self.pass.slot_misses),
        };
        *all += 1;
        *now += 1;
    }

    /// A stage waited for its weights.
    fn stalled(&mut self, stage: usize, awaited: Awaited, took: Took) {
        let (all, now, awaited) = match awaited {
            Awaited::Disk => (&mut self.telemetry.stalls, &mut self.pass.stalls, "waits for the disk"),
            Awaited::Slot => (&mut self.telemetry.slot_stalls, &mut self.pass.slot_stalls, "waits for its weights"),
        };
        all.add(took.length());
        now.add(took.length());
        if let Some(recording) = self.recording.as_mut().filter(|_| !took.length().is_zero()) {
            recording.span(self.lanes[stage].clone(), awaited.to_owned(), SpanKind::Stall, took, None);
        }
    }

    /// A stage has run.
    fn ran(&mut self, number: usize, phase: Phase, took: Took) {
        let (stage, lane) = (&mut self.telemetry.stages[number], &self.lanes[number]);
        stage.phase(phase).add(took.length());
        if let Some(at) = self.pass.computed(lane, took.length()) {
            self.last[at] = Some((number, phase));
        }
        if let Some(recording) = &mut self.recording {
            recording.span(lane.clone(), stage.partition.clone(), SpanKind::Compute, took, None);
        }
    }

    /// A device went on with what it had been given after the calls had returned: that is its last stage's.
    pub fn drained(&mut self, memory: MemoryId, took: Took) {
        let Some(name) = self.devices.get(&memory).filter(|_| !took.length().is_zero()) else { return };
        let Some(device) = self.pass.computed(name, took.length()) else { return };
        let Some((stage, phase)) = self.last[device] else { return };
        let stage = &mut self.telemetry.stages[stage];
        stage.phase(phase).time += took.length();
        if let Some(recording) = &mut self.recording {
            recording.span(stage.device.clone(), stage.partition.clone(), SpanKind::Compute, took, None);
        }
    }

    /// A whole pass succeeded.
    pub fn passed(&mut self, phase: Phase, tokens: u64, took: Took) {
        let (tally, counted) = match phase {
            Phase::Prefill => (&mut self.telemetry.prefill, &mut self.telemetry.prefill_tokens),
            Phase::Decode => (&mut self.telemetry.decode, &mut self.telemetry.decode_tokens),
        };
        tally.add(took.length());
        *counted += tokens;
        if let Some(recording) = &mut self.recording {
            let name = match phase {
                Phase::Prefill => format!("prefill of {tokens}"),
                Phase::Decode => "decode".to_owned(),
            };
            recording.span("passes".to_owned(), name, SpanKind::Pass, took, None);
            recording.pass += 1;
        }
    }
}

impl Recording {
    fn span(&mut self, lane: String, name: String, kind: SpanKind, took: Took, bytes: Option<u64>) {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let start_us = micros(took.from.saturating_sub(self.since));
        self.spans.push(Span {
            lane,
            name,
            kind,
            start_us,
            duration_us: micros(took.length()),
            pass: self.pass,
            bytes,
        });
    }
}
