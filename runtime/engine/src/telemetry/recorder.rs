//! The recorder: the engine reports here everything that takes time. It always updates the telemetry, and the timeline while one
//! is recorded.

use super::{ExpertUse, PassTelemetry, Phase, StageTelemetry, Telemetry};
use crate::ids::{Id, StageId};
use crate::port::{Interval, MemoryId, Timing, TimingToken};
use hpp_schema::{Span, SpanKind, Timeline};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

/// Telemetry, and the timeline while one is recorded.
pub(crate) struct Recorder {
    pub telemetry: Telemetry,
    /// The current or last pass.
    pub pass: PassTelemetry,
    /// Devices by the memory their stages use.
    devices: BTreeMap<MemoryId, String>,
    /// The track of each stage.
    tracks: Vec<String>,
    /// The end of the last read from disk.
    read_until: Duration,
    timeline: Option<TimelineRecording>,
    /// The last run on each track, in the order of the pass's tracks.
    last: Vec<Option<StageRun>>,
    /// Operations whose interval the backend reports later, oldest first.
    pending: VecDeque<(TimingToken, DeviceEvent)>,
}

/// An operation that may run asynchronously on a device.
#[derive(Clone, Copy, Debug)]
pub(crate) enum DeviceEvent {
    /// A stage's run.
    Run(StageRun),
    /// An upload of a stage's weights to a device.
    Upload { stage: StageId, memory: MemoryId, bytes: u64 },
    /// A copy of a stage's states to a device ahead of its run.
    StatesAhead { stage: StageId, memory: MemoryId, bytes: u64 },
    /// A stage's wait for its weights or states.
    Stall { stage: StageId, awaited: Awaited },
}

/// A run of a stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StageRun {
    pub stage: StageId,
    pub phase: Phase,
    /// The index of the item in the pass.
    pub item: usize,
}

struct TimelineRecording {
    since: Duration,
    pass: u64,
    spans: Vec<Span>,
    /// For each track of reads from disk, the end of its last read.
    disk_tracks: Vec<Duration>,
}

/// A copy of a tensor from one memory to another.
pub(crate) struct TensorCopy<'a> {
    pub name: &'a str,
    pub from: MemoryId,
    pub to: MemoryId,
    pub bytes: u64,
}

/// What a stage waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Awaited {
    /// Weights read from disk.
    Disk,
    /// Weights uploaded to a slot.
    Slot,
    /// States copied ahead.
    States,
}

impl Recorder {
    /// A recorder for stages that took `load` to load.
    pub fn new(devices: BTreeMap<MemoryId, String>, load: Duration, stages: Vec<StageTelemetry>) -> Self {
        let tracks: Vec<String> = stages.iter().map(StageTelemetry::track).collect();
        let pass = PassTelemetry::of(&tracks);
        let telemetry = Telemetry { load, stages, ..Telemetry::default() };
        let last = vec![None; pass.compute.len()];
        Recorder {
            telemetry,
            pass,
            devices,
            tracks,
            read_until: Duration::ZERO,
            timeline: None,
            last,
            pending: VecDeque::new(),
        }
    }

    /// Starts a new timeline at `now`, or stops recording.
    pub fn record_timeline(&mut self, now: Option<Duration>) {
        self.timeline =
            now.map(|since| TimelineRecording { since, pass: 0, spans: Vec::new(), disk_tracks: Vec::new() });
    }

    /// Whether a timeline is recorded.
    pub fn is_recording(&self) -> bool {
        self.timeline.is_some()
    }

    /// Spans recorded so far.
    pub fn spans(&self) -> usize {
        self.timeline.as_ref().map_or(0, |recording| recording.spans.len())
    }

    /// Removes the spans recorded so far and returns them, in no order. Recording goes on.
    pub fn take_spans(&mut self) -> Vec<Span> {
        self.timeline.as_mut().map_or(Vec::new(), |recording| std::mem::take(&mut recording.spans))
    }

    /// The timeline so far, ordered by start; enclosing spans come before those within.
    pub fn timeline(&self) -> Timeline {
        Timeline::ordered(self.timeline.as_ref().map_or(Vec::new(), |recording| recording.spans.clone()))
    }

    /// A tensor was copied between memories.
    pub fn copied(&mut self, transfer: &TensorCopy<'_>, interval: Interval) {
        self.telemetry.copies.add(interval.duration());
        self.telemetry.copied_bytes += transfer.bytes;
        self.pass.copies.add(interval.duration());
        self.pass.copied_bytes += transfer.bytes;
        let Some(timeline) = &mut self.timeline else { return };
        let device = |memory| self.devices.get(&memory).map_or("?", String::as_str);
        let track = match (transfer.from, transfer.to) {
            (MemoryId::HOST, MemoryId::HOST) => "cpu".to_owned(),
            (MemoryId::HOST, to) => format!("to {}", device(to)),
            (from, MemoryId::HOST) => format!("from {}", device(from)),
            (from, to) => format!("{} to {}", device(from), device(to)),
        };
        timeline.span(track, transfer.name.to_owned(), SpanKind::Transfer, interval, Some(transfer.bytes));
    }

    /// Weights of a stage were read from disk. Reads overlap; the time in which several were in progress counts once.
    pub fn read_from_disk(&mut self, stage: StageId, bytes: u64, interval: Interval) {
        let busy = interval.end.saturating_sub(interval.start.max(self.read_until));
        self.read_until = self.read_until.max(interval.end);
        self.telemetry.reads.add(busy);
        self.telemetry.read_bytes += bytes;
        self.pass.reads.add(busy);
        self.pass.read_bytes += bytes;
        if let Some(timeline) = &mut self.timeline {
            let partition = self.telemetry.stages[stage.index()].partition.clone();
            timeline.read(partition, interval, bytes);
        }
    }

    /// A run uses an expert.
    pub fn expert_used(&mut self, used: ExpertUse) {
        *match used {
            ExpertUse::InMemory => &mut self.telemetry.expert_hits,
            ExpertUse::ReadAhead => &mut self.telemetry.experts_read_ahead,
            ExpertUse::Read => &mut self.telemetry.expert_misses,
        } += 1;
        self.pass.experts_used += 1;
        self.pass.expert_hits += u64::from(used == ExpertUse::InMemory);
    }

    /// Counts experts that were read ahead and that no run used.
    pub fn read_in_vain(&mut self, experts: u64) {
        self.telemetry.experts_read_in_vain += experts;
    }

    /// An operation has finished, or its interval is reported later.
    pub fn record(&mut self, event: DeviceEvent, timing: Timing) {
        match (timing, event) {
            (Timing::Pending(token), _) => self.pending.push_back((token, event)),
            (Timing::Measured(interval), DeviceEvent::Run(run)) => self.ran(run, interval),
            (Timing::Measured(interval), DeviceEvent::Upload { stage, memory, bytes }) => {
                self.uploaded(stage, memory, bytes, interval);
            }
            (Timing::Measured(interval), DeviceEvent::StatesAhead { stage, memory, bytes }) => {
                self.copied_ahead(stage, memory, bytes, interval);
            }
            (Timing::Measured(interval), DeviceEvent::Stall { stage, awaited }) => {
                self.stalled(stage, awaited, interval)
            }
        }
    }

    /// The backend reports an interval. Tokens of operations that were not recorded are ignored.
    pub fn completed(&mut self, token: TimingToken, interval: Interval) {
        let at = self.pending.iter().position(|(pending, _)| *pending == token);
        if let Some((_, event)) = at.and_then(|at| self.pending.remove(at)) {
            self.record(event, Timing::Measured(interval));
        }
    }

    fn uploaded(&mut self, stage: StageId, memory: MemoryId, bytes: u64, interval: Interval) {
        self.telemetry.uploads.add(interval.duration());
        self.telemetry.uploaded_bytes += bytes;
        self.pass.uploads.add(interval.duration());
        self.pass.uploaded_bytes += bytes;
        self.span_to(memory, ("", stage), interval, bytes);
    }

    /// States of a stage were copied to a device beside runs. Only the time that a run waits for them counts as time of copies.
    fn copied_ahead(&mut self, stage: StageId, memory: MemoryId, bytes: u64, interval: Interval) {
        self.telemetry.copied_bytes += bytes;
        self.pass.copied_bytes += bytes;
        self.span_to(memory, ("states of ", stage), interval, bytes);
    }

    /// A copy of what belongs to a stage, in a recorded timeline.
    fn span_to(&mut self, memory: MemoryId, (what, stage): (&str, StageId), interval: Interval, bytes: u64) {
        if let Some(timeline) = &mut self.timeline {
            let track = format!("to {}", self.devices.get(&memory).map_or("?", String::as_str));
            let name = format!("{what}{}", self.telemetry.stages[stage.index()].partition);
            timeline.span(track, name, SpanKind::Transfer, interval, Some(bytes));
        }
    }

    /// A stage with streamed weights is next: whether they were in a slot or being uploaded.
    pub fn slot_lookup(&mut self, hit: bool) {
        let (total, pass) = match hit {
            true => (&mut self.telemetry.slot_hits, &mut self.pass.slot_hits),
            false => (&mut self.telemetry.slot_misses, &mut self.pass.slot_misses),
        };
        *total += 1;
        *pass += 1;
    }

    fn stalled(&mut self, stage: StageId, awaited: Awaited, interval: Interval) {
        let (total, pass, name) = match awaited {
            Awaited::Disk => (&mut self.telemetry.disk_stalls, &mut self.pass.disk_stalls, "waits for the disk"),
            Awaited::Slot => (&mut self.telemetry.slot_stalls, &mut self.pass.slot_stalls, "waits for its weights"),
            Awaited::States => (&mut self.telemetry.copies, &mut self.pass.copies, "waits for its states"),
        };
        total.add(interval.duration());
        pass.add(interval.duration());
        self.stall_span(stage, name, interval);
    }

    /// A stage has waited for states on disk.
    pub fn waited_for_states(&mut self, stage: StageId, interval: Interval) {
        self.telemetry.state_stalls.add(interval.duration());
        self.pass.state_stalls.add(interval.duration());
        self.stall_span(stage, "waits for KV caches on disk", interval);
    }

    fn stall_span(&mut self, stage: StageId, name: &str, interval: Interval) {
        if let Some(timeline) = self.timeline.as_mut().filter(|_| !interval.duration().is_zero()) {
            timeline.span(self.tracks[stage.index()].clone(), name.to_owned(), SpanKind::Stall, interval, None);
        }
    }

    fn ran(&mut self, run: StageRun, interval: Interval) {
        let (stage, track) = (&mut self.telemetry.stages[run.stage.index()], &self.tracks[run.stage.index()]);
        stage.phase(run.phase).add(interval.duration());
        if let Some(at) = self.pass.computed(track, interval.duration()) {
            self.last[at] = Some(run);
        }
        if let Some(timeline) = &mut self.timeline {
            timeline.compute(track.clone(), stage.partition.clone(), run.item, interval);
        }
    }

    /// A device without timing reports was waited for: it computed its last run meanwhile.
    pub fn synchronized(&mut self, memory: MemoryId, interval: Interval) {
        let Some(name) = self.devices.get(&memory).filter(|_| !interval.duration().is_zero()) else { return };
        let Some(device) = self.pass.computed(name, interval.duration()) else { return };
        let Some(run) = self.last[device] else { return };
        let stage = &mut self.telemetry.stages[run.stage.index()];
        stage.phase(run.phase).time += interval.duration();
        if let Some(timeline) = &mut self.timeline {
            timeline.compute(stage.device.clone(), stage.partition.clone(), run.item, interval);
        }
    }

    /// A whole pass has succeeded.
    pub fn passed(&mut self, phase: Phase, tokens: u64, interval: Interval) {
        let (passes, counted) = match phase {
            Phase::Prefill => (&mut self.telemetry.prefill, &mut self.telemetry.prefill_tokens),
            Phase::Decode => (&mut self.telemetry.decode, &mut self.telemetry.decode_tokens),
        };
        passes.add(interval.duration());
        *counted += tokens;
        self.pass.time = interval.duration();
        if let Some(timeline) = &mut self.timeline {
            let name = match phase {
                Phase::Prefill => format!("prefill of {tokens}"),
                Phase::Decode => "decode".to_owned(),
            };
            timeline.span("passes".to_owned(), name, SpanKind::Pass, interval, None);
            timeline.pass += 1;
        }
    }
}

impl TimelineRecording {
    fn span(&mut self, track: String, name: String, kind: SpanKind, interval: Interval, bytes: Option<u64>) {
        let span = self.new_span(track, name, kind, interval);
        self.spans.push(Span { bytes, ..span });
    }

    /// Adds a read to the first track of the disk that is free during it: `disk`, `disk 2`, ...
    fn read(&mut self, partition: String, interval: Interval, bytes: u64) {
        let free = self.disk_tracks.iter().position(|end| *end <= interval.start).unwrap_or(self.disk_tracks.len());
        match self.disk_tracks.get_mut(free) {
            Some(end) => *end = interval.end,
            None => self.disk_tracks.push(interval.end),
        }
        let track = if free == 0 { "disk".to_owned() } else { format!("disk {}", free + 1) };
        self.span(track, partition, SpanKind::Transfer, interval, Some(bytes));
    }

    fn compute(&mut self, track: String, name: String, item: usize, interval: Interval) {
        let span = self.new_span(track, name, SpanKind::Compute, interval);
        self.spans.push(Span { item: Some(item as u64), ..span });
    }

    fn new_span(&self, track: String, name: String, kind: SpanKind, interval: Interval) -> Span {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        // Without what was before the timeline.
        let start = interval.start.max(self.since);
        let (start_us, duration_us) = (micros(start - self.since), micros(interval.end.saturating_sub(start)));
        Span { lane: track, name, kind, start_us, duration_us, pass: self.pass, bytes: None, item: None }
    }
}

#[cfg(test)]
mod tests {
    use super::super::WeightResidency;
    use super::*;
    use hpp_schema::Provider;

    fn stage() -> StageTelemetry {
        let counter = super::super::Counter::default();
        StageTelemetry {
            partition: "cpu_0".to_owned(),
            device: "cpu".to_owned(),
            provider: Provider::CPU,
            processor: String::new(),
            packs_weights: false,
            residency: WeightResidency::default(),
            refused: vec![],
            load: Duration::ZERO,
            prefill: counter,
            decode: counter,
        }
    }

    #[test]
    fn overlapping_reads_have_tracks_of_their_own_and_their_time_counts_once() {
        let mut recorder = Recorder::new(BTreeMap::new(), Duration::ZERO, vec![stage()]);
        recorder.record_timeline(Some(Duration::ZERO));
        let ms = Duration::from_millis;
        for (start, end) in [(0, 10), (2, 8), (9, 12), (12, 13), (20, 21)] {
            recorder.read_from_disk(StageId::new(0), 100, Interval { start: ms(start), end: ms(end) });
        }
        let timeline = recorder.timeline.as_ref().unwrap();
        let spans = timeline.spans.iter().map(|span| (&*span.lane, span.duration_us / 1e3));
        let expected = [("disk", 10.0), ("disk 2", 6.0), ("disk 2", 3.0), ("disk", 1.0), ("disk", 1.0)];
        assert_eq!(spans.collect::<Vec<_>>(), expected);
        assert_eq!((recorder.telemetry.reads.time, recorder.pass.reads.count), (ms(14), 5));
    }
}
