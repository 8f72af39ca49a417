//! Compares passes with the plan's predictions: whether they are slower for long, and what takes the time. It has no clock: passes bring
//! their times.

use super::PassSize;
use hpp_engine::PassTelemetry;
use hpp_schema::{Plan, PredictedPass, Predictions};
use std::time::Duration;

/// Passes are judged together, in windows of at least this many passes and at least this many milliseconds.
const WINDOW_PASSES: u32 = 4;
const WINDOW_MS: f64 = 3000.0;
/// Passes after a change that are not judged: they read what the change needs.
const UNSETTLED_PASSES: u32 = 2;
/// Passes count as slower from `SLOWER` times the planned time on, and as planned again up to `AS_PLANNED` times.
pub(super) const SLOWER: f64 = 1.5;
pub(super) const AS_PLANNED: f64 = 1.2;
/// Successive windows that must agree before a drift begins or ends.
const LASTING_WINDOWS: u32 = 2;

/// What a pass spends its time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Waiting for weights that are read from disk.
    Disk,
    /// Waiting for weights that are copied to a device, and copying tensors.
    Transfers,
    /// Computing on the host.
    Host,
    /// Computing on devices.
    Devices,
}

impl Cause {
    /// All of them.
    pub const ALL: [Cause; 4] = [Cause::Disk, Cause::Transfers, Cause::Host, Cause::Devices];
}

/// One pass: its size, its time and what took it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassObservation {
    /// Sequences.
    pub sequences: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Tokens of the longest text.
    pub context: u64,
    /// Milliseconds.
    pub ms: f64,
    /// The milliseconds of each [`Cause`].
    pub spent: [f64; 4],
    /// Bytes of weights read from disk.
    pub read_bytes: u64,
    /// Milliseconds of these reads, which overlap each other and the rest.
    pub read_ms: f64,
}

impl PassObservation {
    /// What the engine measured of its last pass.
    pub fn new(pass: &PassTelemetry, size: PassSize) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let compute = |on_host: bool| {
            let lanes = pass.compute.iter().filter(|(lane, _)| is_host(lane) == on_host);
            lanes.map(|(_, time)| ms(*time)).sum()
        };
        let transfers = ms(pass.slot_stalls.time) + ms(pass.copies.time);
        let disk = ms(pass.disk_stalls.time) + ms(pass.state_stalls.time);
        let spent = [disk, transfers, compute(true), compute(false)];
        let (read_bytes, read_ms) = (pass.read_bytes, ms(pass.reads.time));
        let PassSize { sequences, tokens, context } = size;
        PassObservation { sequences, tokens, context, ms: ms(pass.time), spent, read_bytes, read_ms }
    }
}

fn is_host(lane: &str) -> bool {
    lane == "cpu" || lane.ends_with("on the CPU")
}

/// The times of passes that a plan predicts.
#[derive(Clone, Debug)]
pub struct PredictedTimes {
    passes: Vec<PredictedPass>,
    /// Whether they come from measurements of this machine.
    is_measured: bool,
    /// Tokens of context that they are for; 0 if unknown.
    context: u64,
}

impl PredictedTimes {
    /// The times that a plan predicts; `None` if it predicts none.
    pub fn of(predictions: &Predictions) -> Option<Self> {
        let one = PredictedPass { sequences: 1, tokens: 1, ms: predictions.decode_ms };
        let more = predictions.throughput.iter().flat_map(|throughput| throughput.passes.iter().copied());
        let passes: Vec<PredictedPass> = [one].into_iter().chain(more).filter(|pass| pass.ms > 0.0).collect();
        let (is_measured, context) = (!predictions.is_static(), predictions.decode_context);
        (!passes.is_empty()).then_some(PredictedTimes { passes, is_measured, context })
    }

    /// Milliseconds of a pass over `sequences` sequences with `tokens` tokens each, interpolated linearly between predicted passes; `None`
    /// beyond them.
    pub fn ms(&self, sequences: u64, tokens: u64) -> Option<f64> {
        let size = |pass: &PredictedPass| pass.sequences.max(pass.tokens);
        let alike = self.passes.iter().filter(|pass| match (sequences, tokens) {
            (1, _) => pass.sequences == 1,
            (_, 1) => pass.tokens == 1,
            _ => false,
        });
        let wanted = sequences.max(tokens);
        let below = alike.clone().filter(|pass| size(pass) <= wanted).max_by_key(|pass| size(pass))?;
        let above = alike.filter(|pass| size(pass) >= wanted).min_by_key(|pass| size(pass))?;
        let span = size(above) - size(below);
        let part = if span == 0 { 0.0 } else { (wanted - size(below)) as f64 / span as f64 };
        Some(below.ms + (above.ms - below.ms) * part)
    }
}

/// Successive passes, judged together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Window {
    passes: u32,
    /// Tokens of the longest text of its last pass.
    context: u64,
    ms: f64,
    planned_ms: f64,
    spent: [f64; 4],
    read_bytes: u64,
    read_ms: f64,
}

impl Window {
    /// The time over the planned time.
    pub fn ratio(&self) -> f64 {
        self.ms / self.planned_ms
    }

    /// The time of each cause over the planned time.
    fn ratios(&self) -> [f64; 4] {
        self.spent.map(|ms| ms / self.planned_ms)
    }

    fn add(&mut self, pass: &PassObservation, planned_ms: f64) {
        self.passes += 1;
        self.context = pass.context;
        self.ms += pass.ms;
        self.planned_ms += planned_ms;
        self.spent.iter_mut().zip(pass.spent).for_each(|(sum, ms)| *sum += ms);
        self.read_bytes += pass.read_bytes;
        self.read_ms += pass.read_ms;
    }
}

/// The usual times, with which windows are compared: the plan's if they were measured, else those of the fastest windows.
#[derive(Clone, Copy, Debug)]
struct Usual {
    ratio: f64,
    ratios: [f64; 4],
    /// Tokens of the longest text; 0 if unknown.
    context: u64,
    /// Whether it is what the plan predicts.
    is_planned: bool,
}

/// Passes that are slower than planned, or than usual, for long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Drift {
    /// What takes the time.
    pub cause: Cause,
    /// Milliseconds of a pass.
    pub ms: f64,
    /// Milliseconds that were planned or usual.
    pub usual_ms: f64,
    /// Whether `usual_ms` is what the plan predicts, else it is the time of this run's fastest passes.
    pub is_planned: bool,
    /// The part of the time that the cause takes.
    pub share: f64,
    /// What the disk delivers, 1e9 bytes a second, if anything is read.
    pub disk_rate: Option<f64>,
}

/// Notices that passes have become slower than planned, or are as planned again.
#[derive(Clone, Debug)]
pub struct DriftDetector {
    predicted: PredictedTimes,
    window: Window,
    usual: Option<Usual>,
    /// How many of the next passes are not judged.
    unsettled: u32,
    /// Successive windows that contradict `drift`.
    contradicting: u32,
    /// The ratio of the last window if it was faster than usual, else 0: of two successive faster windows the slower one becomes usual.
    last_faster_ratio: f64,
    drift: Option<Drift>,
}

impl DriftDetector {
    /// A detector for the passes of a plan; `None` if the plan predicts no times.
    pub fn new(plan: &Plan) -> Option<Self> {
        let predicted = PredictedTimes::of(&plan.predictions)?;
        let context = predicted.context;
        let usual = predicted.is_measured.then_some(Usual { ratio: 1.0, ratios: [0.0; 4], context, is_planned: true });
        let (window, unsettled) = (Window::default(), UNSETTLED_PASSES);
        Some(DriftDetector {
            predicted,
            window,
            usual,
            unsettled,
            contradicting: 0,
            last_faster_ratio: 0.0,
            drift: None,
        })
    }

    /// Takes a pass. Returns a window once it is complete. Passes of other sizes than the plan predicts are not judged.
    pub fn observe(&mut self, pass: &PassObservation) -> Option<Window> {
        let planned_ms = self.predicted.ms(pass.sequences, pass.tokens)?;
        if self.unsettled > 0 {
            self.unsettled -= 1;
            return None;
        }
        self.window.add(pass, planned_ms);
        let is_complete = self.window.passes >= WINDOW_PASSES && self.window.ms >= WINDOW_MS;
        let window = is_complete.then(|| std::mem::take(&mut self.window))?;
        self.judge(&window);
        tracing::debug!(slowdown = self.slowdown(&window), ?window, "passes compared with the plan");
        Some(window)
    }

    /// Discards what was observed, because something was changed: the current window, and the drift if there is one.
    pub fn unsettle(&mut self) {
        (self.window, self.unsettled, self.contradicting) = (Window::default(), UNSETTLED_PASSES, 0);
        self.drift = None;
    }

    /// Also discards what is usual, because it has changed for a known reason; the next window becomes the usual one.
    pub fn recalibrate(&mut self) {
        self.unsettle();
        self.usual = None;
    }

    /// The lasting slowdown, if there is one.
    pub fn drift(&self) -> Option<&Drift> {
        self.drift.as_ref()
    }

    /// Whether passes are compared with what the plan predicts, else with this run's fastest passes.
    pub fn compares_with_plan(&self) -> bool {
        self.usual.is_some_and(|usual| usual.is_planned)
    }

    /// The time of a window over the usual time.
    pub fn slowdown(&self, window: &Window) -> f64 {
        window.ratio() / self.usual.map_or(1.0, |usual| usual.ratio)
    }

    fn judge(&mut self, window: &Window) {
        let (ratio, ratios, context) = (window.ratio(), window.ratios(), window.context);
        let here = Usual { ratio, ratios, context, is_planned: false };
        let usual = *self.usual.get_or_insert(here);
        let slowdown = here.ratio / usual.ratio;
        if self.drift.is_none() && slowdown >= SLOWER && is_of_longer_text(window, &usual) {
            (self.usual, self.contradicting) = (Some(here), 0);
            return;
        }
        let contradicts = if self.drift.is_some() { slowdown <= AS_PLANNED } else { slowdown >= SLOWER };
        self.contradicting = if contradicts { self.contradicting + 1 } else { 0 };
        let has_changed = self.contradicting >= LASTING_WINDOWS;
        if has_changed {
            self.contradicting = 0;
        }
        match (self.drift.is_some(), has_changed) {
            (true, true) => self.drift = None,
            (false, true) => self.drift = Some(drift(window, &usual)),
            (true, false) if !contradicts => self.drift = Some(drift(window, &usual)),
            (false, false) if !contradicts => self.learn(&usual, &here),
            (_, false) => {}
        }
    }

    /// Updates what is usual. Without measured predictions the first window may have been slow: of two successive faster windows the slower
    /// one becomes usual.
    fn learn(&mut self, usual: &Usual, here: &Usual) {
        let is_faster = !self.predicted.is_measured && here.ratio < usual.ratio;
        if is_faster && self.last_faster_ratio > 0.0 {
            self.usual = Some(Usual { ratio: here.ratio.max(self.last_faster_ratio), ..*here });
        } else if usual.ratios == [0.0; 4] {
            self.usual = Some(Usual { ratios: here.ratios, ..*usual });
        }
        self.last_faster_ratio = if is_faster { here.ratio } else { 0.0 };
    }
}

/// The cause that grew most explains a slow window.
fn cause(window: &Window, usual: &Usual) -> Cause {
    let grew = |cause: &Cause| window.ratios()[*cause as usize] - usual.ratios[*cause as usize];
    Cause::ALL.into_iter().max_by(|a, b| grew(a).total_cmp(&grew(b))).unwrap_or(Cause::Host)
}

/// Whether a window is slower because its text is longer. A token attends to all tokens before it, so the time of computing grows at most
/// in proportion to the length of the text.
fn is_of_longer_text(window: &Window, usual: &Usual) -> bool {
    let longer = window.context as f64 / usual.context.max(1) as f64;
    let computes = matches!(cause(window, usual), Cause::Host | Cause::Devices);
    usual.context > 0 && computes && window.ratio() <= usual.ratio * longer
}

fn drift(window: &Window, usual: &Usual) -> Drift {
    let cause = cause(window, usual);
    let passes = f64::from(window.passes);
    Drift {
        cause,
        ms: window.ms / passes,
        usual_ms: window.planned_ms * usual.ratio / passes,
        is_planned: usual.is_planned,
        share: window.spent[cause as usize] / window.ms,
        disk_rate: (window.read_ms > 0.0).then(|| window.read_bytes as f64 / window.read_ms / 1e6),
    }
}

impl std::fmt::Display for Drift {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Drift { cause, ms, usual_ms, is_planned, share, disk_rate } = self;
        let before = if *is_planned { "planned" } else { "before" };
        write!(
            f,
            "slower than {before}: a pass takes {ms:.1} ms instead of {usual_ms:.1}; {:.0} % of it ",
            100.0 * share
        )?;
        match (cause, disk_rate) {
            (Cause::Disk, Some(rate)) => write!(f, "waits for the disk, which delivers {rate:.2} GB/s"),
            (Cause::Disk, None) => f.write_str("waits for the disk"),
            (Cause::Transfers, _) => f.write_str("waits for copies between host and devices"),
            (Cause::Host, _) => f.write_str("is computing on the CPU, which other programs may use as well"),
            (Cause::Devices, _) => f.write_str("is computing on devices"),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A plan that predicts 100 ms for a pass of one sequence, and 200 ms of four.
    pub fn plan(source: &str) -> Plan {
        let mut plan =
            Plan::from_yaml(include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml")))
                .unwrap();
        let pass = |sequences, tokens, ms| PredictedPass { sequences, tokens, ms };
        plan.predictions.source = source.to_owned();
        plan.predictions.decode_ms = 100.0;
        plan.predictions.decode_context = 600;
        plan.predictions.throughput = Some(hpp_schema::PredictedThroughput {
            passes: vec![pass(1, 1, 100.0), pass(4, 1, 200.0), pass(1, 4, 160.0)],
            sequences: 4,
            ..Default::default()
        });
        plan
    }

    /// A pass of one token: milliseconds waiting for the disk and computing on the host.
    pub fn pass(disk: f64, host: f64) -> PassObservation {
        let spent = [disk, 0.0, host, 0.0];
        let (ms, read_bytes) = (disk + host, 50_000_000);
        PassObservation { sequences: 1, tokens: 1, context: 600, ms, spent, read_bytes, read_ms: 100.0 }
    }

    /// The passes at which the answer to "is it slower?" changed, and the first drift.
    fn changes(
        detector: &mut DriftDetector,
        passes: impl Iterator<Item = PassObservation>,
    ) -> (Vec<usize>, Option<Drift>) {
        let (mut at, mut first) = (vec![], None);
        for (number, pass) in passes.enumerate() {
            let before = detector.drift().is_some();
            detector.observe(&pass);
            first = first.or(detector.drift().copied());
            if detector.drift().is_some() != before {
                at.push(number);
            }
        }
        (at, first)
    }

    #[test]
    fn times_between_predicted_passes_lie_on_a_line_and_others_are_unknown() {
        let times = PredictedTimes::of(&plan("static").predictions).unwrap();
        assert_eq!([times.ms(1, 1), times.ms(4, 1)], [Some(100.0), Some(200.0)]);
        assert!((times.ms(2, 1).unwrap() - 100.0 - 100.0 / 3.0).abs() < 1e-9);
        assert_eq!([times.ms(1, 2), times.ms(1, 4)], [Some(120.0), Some(160.0)]);
        assert_eq!([times.ms(5, 1), times.ms(1, 64), times.ms(2, 2)], [None; 3]);
    }

    #[test]
    fn a_lasting_slowdown_is_found_once_with_its_cause_and_its_end() {
        for (source, scale) in [("profile: p of d", 1.0), ("static", 3.0)] {
            let mut detector = DriftDetector::new(&plan(source)).unwrap();
            let usual = (0..100).map(|_| pass(20.0 * scale, 80.0 * scale));
            let slow = (0..100).map(|_| pass(120.0 * scale, 80.0 * scale));
            let (at, drift) = changes(&mut detector, usual.clone().chain(slow).chain(usual.clone()).chain(usual));
            assert!(at.len() == 2 && (100..140).contains(&at[0]) && (200..270).contains(&at[1]), "{at:?}");
            let drift = drift.unwrap();
            assert_eq!(drift.cause, Cause::Disk);
            let start = if source == "static" { "slower than before: a pass" } else { "slower than planned: a pass" };
            assert!(drift.to_string().starts_with(start), "{drift}");
            assert!((drift.ms - 200.0 * scale).abs() < 1.0 && (drift.usual_ms - 100.0 * scale).abs() < 1.0);
            assert!(drift.to_string().ends_with("60 % of it waits for the disk, which delivers 0.50 GB/s"), "{drift}");
        }
    }

    /// A run of a model of 80 MB of which 60 MB are read for each pass, recorded with `HPP_LOG=hpp_generate=debug`. Its disk was limited to
    /// 120 MB/s from the seventh to the sixteenth window; other programs compiled meanwhile and took more of the processor at the end.
    #[test]
    fn a_recorded_run_whose_disk_was_slow_in_the_middle() {
        let recorded = include_str!("slow_disk.csv").lines().skip(1);
        let windows: Vec<Vec<f64>> =
            recorded.map(|line| line.split(',').map(|field| field.parse().unwrap()).collect()).collect();
        let mut detector = DriftDetector::new(&plan("static")).unwrap();
        let (mut slow, mut causes) = (vec![], vec![]);
        for (at, window) in windows.iter().enumerate() {
            let [passes, ms, disk, host, read_bytes, read_ms] = window[..] else { panic!("{window:?}") };
            let spent = [disk / passes, 0.0, host / passes, 0.0];
            let (read_bytes, read_ms) = ((read_bytes / passes) as u64, read_ms / passes);
            let pass = PassObservation { ms: ms / passes, spent, read_bytes, read_ms, ..pass(0.0, 0.0) };
            for _ in 0..passes as usize {
                detector.observe(&pass);
            }
            slow.extend(detector.drift().map(|_| at));
            causes.extend(detector.drift().map(|drift| drift.cause));
        }
        assert!(slow[0] == 8 || slow[0] == 9, "two windows after the limit: {slow:?}");
        assert!(causes[..6].iter().all(|cause| *cause == Cause::Disk), "{causes:?}");
        assert!(slow.windows(2).all(|pair| pair[1] == pair[0] + 1), "found once: {slow:?}");
    }

    #[test]
    fn a_machine_slower_than_measured_is_found_from_the_start_and_one_slower_than_assumed_is_not() {
        let slow = || (0..200).map(|_| pass(10.0, 190.0));
        let (at, drift) = changes(&mut DriftDetector::new(&plan("machine: m")).unwrap(), slow());
        assert!(at.len() == 1 && drift.unwrap().cause == Cause::Host);
        assert_eq!(changes(&mut DriftDetector::new(&plan("static")).unwrap(), slow()).0, [] as [usize; 0]);
    }

    #[test]
    fn after_a_change_passes_are_compared_with_their_own_times_and_not_with_the_plan() {
        let mut detector = DriftDetector::new(&plan("profile: p")).unwrap();
        assert!(detector.compares_with_plan());
        detector.recalibrate();
        let passes = (0..200).map(|number| pass(0.0, if number < 100 { 300.0 } else { 600.0 }));
        let drift = changes(&mut detector, passes).1.unwrap();
        assert!(!detector.compares_with_plan() && drift.to_string().starts_with("slower than before: "), "{drift}");
    }

    #[test]
    fn a_slow_start_is_not_the_usual_time() {
        let mut detector = DriftDetector::new(&plan("static")).unwrap();
        let passes = [(20, 300.0), (100, 100.0), (100, 200.0)]
            .into_iter()
            .flat_map(|(n, ms)| (0..n).map(move |_| pass(0.0, ms)));
        let (at, _) = changes(&mut detector, passes);
        assert!(at.len() == 1 && (120..160).contains(&at[0]), "{at:?}");
    }

    #[test]
    fn short_disturbances_and_those_that_come_and_go_are_ignored() {
        let mut detector = DriftDetector::new(&plan("profile: p")).unwrap();
        let short = (0..2000).map(|number| if number % 50 < 12 { pass(140.0, 80.0) } else { pass(20.0, 80.0) });
        assert_eq!(changes(&mut detector, short).0, [] as [usize; 0]);
        // Between the two thresholds nothing changes.
        let near = (0..2000).map(|number| if number / 40 % 2 == 0 { pass(65.0, 80.0) } else { pass(45.0, 80.0) });
        assert_eq!(changes(&mut detector, near).0, [] as [usize; 0]);
    }

    /// From 600 to 6,000 tokens computing takes ten times as long, because the text is longer. Then it takes three times as long at the
    /// same length, which is a slowdown.
    #[test]
    fn a_longer_text_is_no_slowdown() {
        for source in ["static", "profile: p"] {
            let mut detector = DriftDetector::new(&plan(source)).unwrap();
            let grown =
                |tokens: u64| PassObservation { context: tokens, ..pass(20.0, 80.0 * (tokens as f64 / 1200.0)) };
            let (at, _) = changes(&mut detector, (600..6000).map(grown));
            assert_eq!(at, [] as [usize; 0], "{source}");
            let slow = PassObservation { context: 6000, ..pass(20.0, 1200.0) };
            assert_eq!(changes(&mut detector, (0..50).map(|_| slow)).1.unwrap().cause, Cause::Host, "{source}");
        }
        let mut detector = DriftDetector::new(&plan("static")).unwrap();
        let passes =
            (0..200).map(|at| PassObservation { context: 600 + at, ..pass(if at < 100 { 20.0 } else { 220.0 }, 80.0) });
        assert_eq!(changes(&mut detector, passes).1.unwrap().cause, Cause::Disk, "the text explains no waiting");
    }

    #[test]
    fn passes_of_several_sequences_are_compared_with_their_own_predictions() {
        let mut detector = DriftDetector::new(&plan("profile: p")).unwrap();
        let four = PassObservation { sequences: 4, ..pass(20.0, 180.0) };
        assert_eq!(changes(&mut detector, (0..200).map(|_| four)).0, [] as [usize; 0]);
        // A chunk of a prompt is not judged.
        let prompt = PassObservation { tokens: 500, ..pass(0.0, 9e9) };
        assert_eq!(changes(&mut detector, (0..200).map(|_| prompt)).0, [] as [usize; 0]);
    }
}
