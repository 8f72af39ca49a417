//! The report of a run: JSON for programs, tables for people.

pub mod disk;
pub mod streaming;

use crate::numbers::{counted, millis, rate};
use disk::DiskReads;
use hpp_engine::{StageTelemetry, Telemetry};
use hpp_generate::speculate::SpeculationStats;
use hpp_generate::{FinishReason, Generated};
use hpp_schema::{ByteSize, Provider};
use serde::Serialize;
use std::fmt::Write;
use streaming::Streaming;

/// Largest number of stages that the table lists one by one.
const MAX_STAGE_ROWS: usize = 8;

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
pub struct RunReport<'a> {
    /// Number of tokens in the prompt.
    pub prompt_tokens: usize,
    /// The prompt's tokens.
    pub prompt_token_ids: &'a [u32],
    /// The tokens generated, the one that ended the text included.
    pub tokens: &'a [u32],
    /// The text generated; null without a tokenizer.
    pub text: Option<&'a str>,
    /// `stop`, `eos`, `grammar`, `length` or `cancelled`.
    pub finish_reason: FinishReason,
    /// The seed that reproduces the text; null for greedy choices.
    pub seed: Option<u64>,
    /// Times.
    pub timings: Timings,
    /// Memory.
    pub bytes: Bytes,
}

/// Times of a run, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timings {
    /// Loading the partitions.
    pub load_ms: f64,
    /// From the prompt to the first token.
    pub time_to_first_token_ms: Option<f64>,
    /// Prefill: computing the prompt.
    pub prefill_ms: f64,
    /// Prompt tokens that were computed, per second of prefill.
    pub prefill_tokens_per_second: Option<f64>,
    /// From the first token to the end.
    pub decode_ms: f64,
    /// Tokens after the first, per second.
    pub decode_tokens_per_second: Option<f64>,
    /// Copying tensors between memories.
    pub transfer_ms: f64,
    /// Number of such copies.
    pub transfers: u64,
    /// Speculative decoding; absent without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub speculation: Option<SpeculationReport>,
    /// Weights read from disk; absent if none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskReads>,
    /// Weights streamed to devices; absent if none were.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub streaming: Option<Streaming>,
    /// Times of each partition.
    pub stages: Vec<StageTimes>,
}

/// What speculative decoding did.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct SpeculationReport {
    /// Tokens drafted and verified.
    pub drafted: u64,
    /// Drafted tokens that the model chose.
    pub accepted: u64,
    /// Passes after the prompt.
    pub passes: u64,
    /// Mean number of tokens chosen in each of these passes.
    pub tokens_per_pass: f64,
    /// Milliseconds that speculation saved: the predicted time of passes of one token for the same tokens, from measured passes of one token, minus
    /// the time taken. Null if nothing was drafted.
    pub saved_ms: Option<f64>,
}

impl SpeculationReport {
    fn new(stats: SpeculationStats, decoded: f64, decode: f64) -> Self {
        let SpeculationStats { drafted, accepted, passes, single_seconds } = stats;
        let saved_ms = single_seconds.filter(|_| drafted > 0).map(|single| (single * decoded - decode) * 1e3);
        Self { drafted, accepted, passes, tokens_per_pass: decoded / passes.max(1) as f64, saved_ms }
    }
}

/// Times of one partition.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageTimes {
    /// Its name.
    pub partition: String,
    /// Its device in the plan.
    pub device: String,
    /// The execution provider that ran it.
    pub provider: String,
    /// The processor that it ran on.
    pub processor: String,
    /// Loading it.
    pub load_ms: f64,
    /// Its time in prefill, in all; passes that verify drafts count as prefill.
    pub prefill_ms: f64,
    /// Its time per decoded token.
    pub decode_ms_per_token: f64,
}

/// Memory of a run, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Bytes {
    /// Peak resident memory of the process, if the system reports it.
    pub peak_rss: Option<u64>,
    /// Bytes reserved for the sequence's state.
    pub state: u64,
    /// Most bytes of the state that are in host memory at once, if the plan keeps it on disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_window: Option<u64>,
    /// Copied between memories.
    pub transferred: u64,
    /// Memory on each accelerator.
    pub devices: Vec<DeviceBytes>,
}

/// Memory on one accelerator.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeviceBytes {
    /// The device's name.
    pub name: String,
    /// Used memory, if the device reports it.
    pub used: Option<u64>,
    /// All of its memory, if the device reports it.
    pub total: Option<u64>,
}

impl Timings {
    /// From the generation's timings and the engine's telemetry.
    pub fn new(generated: &Generated, telemetry: &Telemetry) -> Self {
        let decoded = generated.tokens.len().saturating_sub(1) as f64;
        let decode = generated.timings.decode.as_secs_f64();
        // If a prompt was cancelled, it is not known how many of its tokens were computed.
        let is_complete = generated.timings.first_token.is_some();
        let prefill = generated.timings.prefill.as_secs_f64();
        let computed = generated.usage.prompt_tokens.saturating_sub(generated.usage.reused_tokens);
        Self {
            load_ms: millis(telemetry.load),
            time_to_first_token_ms: generated.timings.first_token.map(millis),
            prefill_ms: millis(generated.timings.prefill),
            prefill_tokens_per_second: (is_complete && computed > 0 && prefill > 0.0)
                .then(|| computed as f64 / prefill),
            decode_ms: millis(generated.timings.decode),
            decode_tokens_per_second: (decoded > 0.0 && decode > 0.0).then(|| decoded / decode),
            transfer_ms: telemetry.copies.millis(),
            transfers: telemetry.copies.count,
            speculation: generated.speculation.map(|stats| SpeculationReport::new(stats, decoded, decode)),
            disk: DiskReads::new(telemetry),
            streaming: Streaming::new(telemetry),
            stages: telemetry.stages.iter().map(StageTimes::new).collect(),
        }
    }
}

impl StageTimes {
    /// From the engine's telemetry.
    pub fn new(stage: &StageTelemetry) -> Self {
        Self {
            partition: stage.partition.clone(),
            device: stage.device.clone(),
            provider: stage.provider.name().to_owned(),
            processor: stage.processor.clone(),
            load_ms: millis(stage.load),
            prefill_ms: stage.prefill.millis(),
            decode_ms_per_token: stage.decode.millis_each(),
        }
    }
}

impl Bytes {
    /// From the engine's telemetry and the bytes of the sequence's `state`.
    pub fn new(telemetry: &Telemetry, state: u64) -> Self {
        let devices = telemetry.memory.devices.iter();
        Self {
            peak_rss: telemetry.memory.peak_resident,
            state_window: Some(telemetry.state_window).filter(|bytes| *bytes > 0),
            state,
            transferred: telemetry.copied_bytes,
            devices: devices.map(|d| DeviceBytes { name: d.name.clone(), used: d.used, total: d.total }).collect(),
        }
    }
}

/// The summary at the end of a run, for people.
pub fn summary(generated: &Generated, telemetry: &Telemetry, state: u64) -> String {
    let timings = Timings::new(generated, telemetry);
    let mut out = String::from("\n");
    let prompt_tokens = generated.usage.prompt_tokens;
    let _ = writeln!(out, "{} from a prompt of {prompt_tokens}", counted(generated.tokens.len() as u64, "token"));
    if telemetry.prefill.count == 0 && telemetry.decode.count == 0 {
        let memory = memory(&Bytes::new(telemetry, state));
        let _ = write!(out, "load {:.0} ms, no pass was run\nmemory: {memory}", timings.load_ms);
        return out;
    }
    let first = timings.time_to_first_token_ms.map_or("-".to_owned(), |ms| format!("{ms:.0} ms"));
    let _ = writeln!(
        out,
        "load {:.0} ms, first token after {first}, prefill {} tok/s, decode {} tok/s",
        timings.load_ms,
        rate(timings.prefill_tokens_per_second),
        rate(timings.decode_tokens_per_second)
    );
    if let Some(SpeculationReport { drafted, accepted, tokens_per_pass, .. }) = timings.speculation {
        let tokens = rate(Some(tokens_per_pass));
        let _ = writeln!(out, "speculation: {accepted} of {drafted} drafted tokens accepted, {tokens} tokens a pass");
    }
    let column = match timings.speculation {
        Some(_) => PrefillColumn::PromptAndDrafts,
        None if telemetry.decode.count == 0 && generated.tokens.len() > 1 => PrefillColumn::EveryPass,
        None => PrefillColumn::Prompt,
    };
    out.push_str(&stage_table(&timings.stages, column));
    if timings.transfers > 0 {
        let copied = ByteSize(telemetry.copied_bytes).human();
        // WebGPU runs return before the device has finished, so the first copy waits for it.
        let waits = timings.stages.iter().any(|stage| stage.provider == Provider::WEBGPU.name());
        let waits = if waits { ", including waits for the device" } else { "" };
        let _ = writeln!(out, "transfers: {} of {copied} in {:.1} ms{waits}", timings.transfers, timings.transfer_ms);
    }
    out.push_str(&disk::line(timings.disk.as_ref()));
    out.push_str(&streaming::line(timings.streaming.as_ref()));
    let _ = write!(out, "memory: {}", memory(&Bytes::new(telemetry, state)));
    out
}

/// The passes that telemetry counts as prefill, for the heads of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillColumn {
    /// The passes of the prompt.
    Prompt,
    /// The passes of the prompt and those that verify drafts.
    PromptAndDrafts,
    /// All passes, because the model keeps no state and each pass recomputes the whole text.
    EveryPass,
}

impl PrefillColumn {
    fn head(self) -> &'static str {
        match self {
            PrefillColumn::Prompt => "prefill ms",
            PrefillColumn::PromptAndDrafts => "prefill, verify ms",
            PrefillColumn::EveryPass => "ms in all passes",
        }
    }

    /// The head of the decode column, beside [`head`](Self::head).
    fn decode_head(self) -> &'static str {
        match self {
            // Passes that verify drafts yield several tokens. They are in the other column.
            PrefillColumn::PromptAndDrafts => "ms/pass of one token",
            PrefillColumn::Prompt | PrefillColumn::EveryPass => "decode ms/token",
        }
    }
}

/// A row for each stage. If there are many, consecutive stages on one processor share a row with the sum of their times; `--json`
/// lists each.
pub fn stage_table(stages: &[StageTimes], prefill: PrefillColumn) -> String {
    let sum = |run: &[StageTimes], of: fn(&StageTimes) -> f64| run.iter().map(of).sum::<f64>();
    stage_rows(stages, &[prefill.head(), prefill.decode_head()], |run| {
        let decode = sum(run, |stage| stage.decode_ms_per_token);
        // Without a decoded token there is no time.
        let decode = if decode > 0.0 { format!("{decode:.2}") } else { "-".to_owned() };
        vec![format!("{:.1}", sum(run, |stage| stage.prefill_ms)), decode]
    })
}

/// The table for a model that runs once and generates no tokens.
pub fn run_table(stages: &[StageTimes]) -> String {
    stage_rows(stages, &["ms"], |run| vec![format!("{:.1}", run.iter().map(|stage| stage.prefill_ms).sum::<f64>())])
}

fn stage_rows(stages: &[StageTimes], times: &[&str], of: impl Fn(&[StageTimes]) -> Vec<String>) -> String {
    let alike = |a: &StageTimes, b: &StageTimes| {
        stages.len() > MAX_STAGE_ROWS && (&a.provider, &a.processor) == (&b.provider, &b.processor)
    };
    let rows = stages.chunk_by(alike).map(|run| {
        let (first, last) = (&run[0], &run[run.len() - 1]);
        let name =
            if run.len() > 1 { format!("{} to {}", first.partition, last.partition) } else { first.partition.clone() };
        [vec![name, format!("{} ({})", first.provider, first.processor)], of(run)].concat()
    });
    table(&[&["stage", "runs on"][..], times].concat(), rows)
}

/// The memory of a run on one line, without the state where there is none.
pub fn memory(bytes: &Bytes) -> String {
    let human = |n: Option<u64>| n.map_or("unknown".to_owned(), |n| ByteSize(n).human());
    let mut out = format!("peak RSS {}", human(bytes.peak_rss));
    // A model that generates no text has no state, and a cancelled pass has dropped it.
    if bytes.state > 0 {
        let _ = write!(out, ", state {}", ByteSize(bytes.state).human());
        if let Some(window) = bytes.state_window {
            let _ = write!(out, " (on disk, at most {} of it in memory)", ByteSize(window).human());
        }
    }
    for device in &bytes.devices {
        let _ = write!(out, ", {} {} of {}", device.name, human(device.used), human(device.total));
    }
    out
}

/// Rows under a header, in columns as wide as their widest cell. All but the first two columns are right-aligned.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let rows: Vec<Vec<String>> =
        std::iter::once(header.iter().map(|h| (*h).to_owned()).collect()).chain(rows).collect();
    let width = |column: usize| rows.iter().filter_map(|r| r.get(column)).map(|c| c.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut out = String::new();
    for row in &rows {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if column < 2 { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        let _ = writeln!(out, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_stages_on_one_processor_share_a_row() {
        let stage = |number: usize| StageTimes {
            partition: format!("cpu_{number}"),
            device: "cpu".into(),
            provider: if number == 4 { "WebGPU".into() } else { "CPU".into() },
            processor: "2 threads".into(),
            load_ms: 0.0,
            prefill_ms: 2.0,
            decode_ms_per_token: 0.25,
        };
        let few: Vec<StageTimes> = (0..MAX_STAGE_ROWS).map(stage).collect();
        assert_eq!(stage_table(&few, PrefillColumn::Prompt).lines().count(), 1 + MAX_STAGE_ROWS);
        let many: Vec<StageTimes> = (0..MAX_STAGE_ROWS + 1).map(stage).collect();
        let text = stage_table(&many, PrefillColumn::Prompt);
        let rows: Vec<Vec<&str>> = text.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["cpu_0", "to", "cpu_3", "CPU", "(2", "threads)", "8.0", "1.00"]);
        assert_eq!(rows[1], ["cpu_4", "WebGPU", "(2", "threads)", "2.0", "0.25"]);
        assert_eq!(rows[2][..3], ["cpu_5", "to", "cpu_8"]);
        let speculative = stage_table(&few, PrefillColumn::PromptAndDrafts);
        assert!(speculative.lines().next().is_some_and(|heads| heads.contains("prefill, verify ms")), "{speculative}");
        let once = StageTimes { decode_ms_per_token: 0.0, ..stage(0) };
        assert!(stage_table(std::slice::from_ref(&once), PrefillColumn::Prompt).ends_with("2.0                -\n"));
        let text = run_table(&[once]);
        assert!(text.contains(" ms\n") && text.ends_with("2.0\n") && !text.contains("token"), "{text}");
    }

    #[test]
    fn a_state_that_is_gone_is_not_part_of_the_memory() {
        let window = Some(1 << 20);
        let bytes = Bytes { peak_rss: Some(2 << 20), state: 0, state_window: window, transferred: 0, devices: vec![] };
        assert_eq!(memory(&bytes), "peak RSS 2 MiB");
        let bytes = Bytes { state: 3 << 20, ..bytes };
        assert_eq!(memory(&bytes), "peak RSS 2 MiB, state 3 MiB (on disk, at most 1 MiB of it in memory)");
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [vec!["a".into(), "bb".into(), "1.0".into()], vec!["long".into(), "c".into(), "10.0".into()]];
        assert_eq!(table(&["x", "y", "ms"], rows), "x     y     ms\na     bb   1.0\nlong  c   10.0\n");
    }
}
