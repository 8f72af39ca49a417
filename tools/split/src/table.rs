//! The plan as a table: partitions, memory of each device, predictions.

use crate::amount::{self, ESTIMATED, MEASURED};
use crate::{fold, split_mode};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use hpp_partition::MOST_SEQUENCES;
use hpp_schema::memory::{PROCESS, RESERVE};
use hpp_schema::{
    Achieved, ByteSize, Device, DeviceKind, ModelKind, ObjectiveKind, Partition, PartitionVariant, Plan,
    PredictedThroughput, Predictions, Residency, Ring,
};
use std::collections::BTreeSet;
use std::fmt::Write as _;

/// A table with a header; aligns the columns `right` to the right.
pub fn table(header: &[&str], right: &[usize], rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled).set_header(header);
    table.add_rows(rows);
    for column in right {
        if let Some(column) = table.column_mut(*column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The table of partitions, one line of memory per device, and the predictions. `undivided`: layers could be divided before their experts,
/// and no such plan was compared.
pub fn plan_summary(plan: &Plan, undivided: bool) -> String {
    let shards = plan.partitions.iter().filter_map(split_mode::shard).map(|(_, shard)| shard + 1).max().unwrap_or(0);
    let rows = fold::rows(&plan.partitions, device).into_iter().map(|partitions| row(&partitions, shards));
    let header = ["partition", "device", "blocks", "weights", "KV", "workspace", "why"];
    let mut text = format!("{}\n\n", table(&header, &[3, 4, 5], rows));
    for (index, device) in plan.devices.iter().enumerate() {
        let _ = writeln!(text, "{}", device_line(plan, index, device));
    }
    text + &expectation(plan, undivided)
}

fn row(partitions: &[&Partition], shards: usize) -> Vec<String> {
    let (first, last) = (partitions[0], partitions[partitions.len() - 1]);
    let sum = |bytes: fn(&Partition) -> ByteSize| ByteSize(partitions.iter().map(|p| bytes(p).0).sum()).human();
    let mut labels: Vec<String> = partitions.iter().flat_map(|p| p.blocks.clone()).collect();
    if partitions.len() > 1 {
        // The halves of a block before and from its experts on.
        let whole: BTreeSet<String> = labels.iter().filter(|label| !label.ends_with(OF_EXPERTS)).cloned().collect();
        labels.retain(|label| label.strip_suffix(OF_EXPERTS).is_none_or(|layer| !whole.contains(layer)));
    }
    let workspace = partitions.iter().map(|p| p.bytes.workspace).max().unwrap_or_default();
    vec![
        if partitions.len() == 1 { first.name.clone() } else { format!("{} to {}", first.name, last.name) },
        device(first),
        fold::shard(partitions, shards).unwrap_or_else(|| match partitions.len() {
            1 => blocks(&labels),
            _ => blocks_and_experts(&labels),
        }),
        sum(|p| p.bytes.weights),
        sum(|p| p.bytes.kv),
        workspace.human(),
        first.reason.clone(),
    ]
}

/// `gpu0`, `gpu0 streamed`, `cpu from disk`, `cpu (prompt: gpu0 streamed)`.
fn device(partition: &Partition) -> String {
    let describe = |device: &str, residency: Residency| match residency {
        Residency::Resident => device.to_owned(),
        Residency::Streamed if device == "cpu" => format!("{device} from disk"),
        Residency::Streamed => format!("{device} streamed"),
        Residency::Mapped => format!("{device} mapped"),
    };
    let decode = describe(&partition.device, partition.residency);
    match &partition.prefill {
        None => decode,
        Some(prefill) => format!("{decode} (prompt: {})", describe(&prefill.device, prefill.residency)),
    }
}

/// Largest observed error of predictions from shapes and assumed rates.
const STATIC_ERROR: &str = "static estimate, may be off by up to 6x; hpp-profile measures";
/// The same for small models, whose time goes to calls of operators and to small tensors, which the estimate leaves out. Observed with models of
/// about 1 MB: up to 21 times for a prompt and 8 times for a token (by hand, 2026-11-29).
const STATIC_ERROR_OF_SMALL: &str =
    "static estimate, may be off by up to 25x for so small a model; hpp-profile measures";
/// Models with fewer bytes of weights are small.
const SMALL: u64 = 64 << 20;

/// How much estimates may be off for a model with so many bytes of weights.
fn static_error(weights: u64) -> &'static str {
    if weights < SMALL { STATIC_ERROR_OF_SMALL } else { STATIC_ERROR }
}

/// The predictions. Estimates from assumed rates are printed with two significant digits, which match their accuracy.
fn expectation(plan: &Plan, undivided: bool) -> String {
    let p = &plan.predictions;
    let is_static = p.is_static();
    let weights: u64 = plan.partitions.iter().map(|partition| partition.bytes.weights.0).sum();
    let (source, significant) = match is_static {
        true => (static_error(weights), ESTIMATED),
        false => (p.source.as_str(), MEASURED),
    };
    let time = |ms| amount::time(ms, significant);
    if plan.model.kind == ModelKind::SingleRun {
        return format!("expected ({source}): {} per run", time(p.time_to_first_token_ms));
    }
    let each = match plan.budgets.batch {
        1 => String::new(),
        batch => format!(" for each of {batch} sequences in one pass"),
    };
    let mut text = format!(
        "expected ({source}): {} tokens/s{each}, {} per token at {} tokens of context; time to first token {} for a {}-token prompt",
        amount::digits(p.decode_tokens_per_second, significant),
        time(p.decode_ms),
        p.decode_context,
        time(p.time_to_first_token_ms),
        p.prompt_tokens,
    );
    if let Some(throughput) = &p.throughput {
        let reads_experts = plan.devices.iter().any(|device| device.expert_cache.is_some());
        let unknown = reads_experts && p.source == STATIC && gains_from_more(throughput);
        let _ = write!(text, "\n{}", throughput_line(p, throughput, significant, unknown));
    }
    if let Some(limit) = &p.limit {
        let _ = write!(text, "\nbottleneck: {limit}");
    }
    if let Some(objective) = &p.objective {
        let _ = write!(text, "\n{}", objective_line(plan, objective, significant, undivided));
    }
    text
}

/// More tokens per second by this factor are clearly more.
const CLEARLY: f64 = 1.05;

/// The source of predictions without measurements.
const STATIC: &str = Predictions::STATIC;

/// Several sequences together, and how many of them take no more time than one. `unknown`: more may be faster, if they share experts.
fn throughput_line(alone: &Predictions, throughput: &PredictedThroughput, significant: i32, unknown: bool) -> String {
    let rate = amount::digits(throughput.tokens_per_second, significant);
    let is_for_many = alone.objective.as_ref().is_some_and(|objective| objective.kind == ObjectiveKind::Throughput);
    let alone_ms = alone.time_to_first_token_ms + alone.new_tokens.saturating_sub(1) as f64 * alone.decode_ms;
    let alone = amount::digits(1e3 * alone.new_tokens as f64 / alone_ms.max(1e-9), significant);
    let most = throughput.passes.iter().filter(|pass| pass.tokens == 1).map(|pass| pass.sequences).max().unwrap_or(1);
    let free = match throughput.free_sequences {
        free if free == most && most < MOST_SEQUENCES => {
            let other_plan = if is_for_many { "" } else { "--objective throughput, " };
            let more = 2 * most;
            format!(
                "by its estimates this plan has memory for fewer than {more}, though a run may find room for more; {other_plan}a shorter --context or more memory may change that"
            )
        }
        1 if unknown => {
            "more at once may be faster: hpp-profile --prompts measures what sequences share of the experts in memory"
                .to_owned()
        }
        1 => "more at once are not faster".to_owned(),
        _ if throughput.sequences == 1 => "more at once are hardly faster".to_owned(),
        free => format!("up to {free} at once take hardly longer than one"),
    };
    let together = match throughput.sequences {
        1 => format!("one sequence at a time, {rate} tokens/s"),
        sequences => format!("{sequences} sequences together, {rate} tokens/s (one alone: {alone})"),
    };
    format!("hpp-exec jobs, time for prompts included: {together}; {free}")
}

/// The minimised time and its proven lower bound. The bound is for passes of the planned length and, with a GPU, for layers divided as
/// planned.
fn objective_line(plan: &Plan, objective: &Achieved, significant: i32, undivided: bool) -> String {
    let new_tokens = plan.predictions.new_tokens;
    let new = |tokens| if tokens == 1 { "1 new token".to_owned() } else { format!("{tokens} new tokens") };
    let passes = match plan.schedule.prefill_chunk {
        Some(tokens) => format!(" with passes of {tokens} tokens"),
        None if plan.model.kind == ModelKind::SingleRun => String::new(),
        None => " without dividing prompts".to_owned(),
    };
    let has_gpu = plan.devices.iter().any(|device| device.kind == DeviceKind::Gpu);
    let of_layers = match undivided && has_gpu {
        _ if !plan.model.states.is_empty() => " of layers divided by rows",
        true => " of undivided layers",
        false => "",
    };
    let what = match objective.kind {
        ObjectiveKind::Decode => "one token".to_owned(),
        ObjectiveKind::Prefill => "prompt to first token".to_owned(),
        ObjectiveKind::Mixed => format!("prompt and {}", new(new_tokens)),
        ObjectiveKind::Throughput => format!("prompts and {} of all sequences", new(new_tokens)),
    };
    let time = |ms| amount::time(ms, significant);
    let bound = match (objective.proven, objective.bound_ms) {
        (true, _) => format!("proven to be the best plan{of_layers}{passes} by these estimates"),
        (false, bound_ms) if bound_ms > 0.0 => {
            format!("by these estimates no plan{of_layers}{passes} takes less than {}", time(bound_ms))
        }
        (false, _) => "no lower bound was computed".to_owned(),
    };
    format!("{what}: {}; {bound}", time(objective.ms))
}

/// `gpu0: used of limit at N tokens of context`, with the large items.
fn device_line(plan: &Plan, index: usize, device: &Device) -> String {
    let (name, context) = (&device.name, plan.budgets.context);
    let on_device = || plan.partitions.iter().filter(|p| p.variants().any(|variant| variant.device == *name));
    let states = || plan.states.iter().filter(|state| state.device == *name);
    let in_memory: u64 = states().filter(|state| !state.on_disk).map(|state| state.memory() * plan.budgets.batch).sum();
    let kv = match device.kind {
        DeviceKind::Cpu => in_memory + plan.state_window(),
        DeviceKind::Gpu => plan.states_on(name),
    };
    let workspace: u64 = on_device().map(|p| p.bytes.workspace.0).max().unwrap_or(0);
    let (used, limit, parts) = match device.kind {
        DeviceKind::Gpu => {
            let gpus_before = plan.devices[..index].iter().filter(|d| d.kind == DeviceKind::Gpu).count();
            let ring = device.ring.map_or(0, |ring| ring.slot_bytes.0.saturating_mul(ring.slots.into()));
            let used = [plan.weights_on(name).unwrap_or(u64::MAX), ring, kv, workspace];
            let slots = |ring: Ring| {
                let slots = amount::count(ring.slots as usize, "slot");
                format!(", {slots} of {} for streamed weights included", ring.slot_bytes.human())
            };
            let mut parts = device.ring.map_or(String::new(), slots);
            let [prompt, _] = plan.phase_states_on(name);
            if prompt.during_phase > 0 {
                let bytes = ByteSize(prompt.during_phase).human();
                parts += &format!(", {bytes} for the KV caches of layers that it computes in prompts only");
            }
            let used = used.into_iter().fold(0, u64::saturating_add);
            (used, plan.budgets.vram.get(gpus_before).copied(), parts)
        }
        DeviceKind::Cpu => {
            let limit = plan.budgets.ram;
            let (further, of_further) = further_sequences(plan, in_memory);
            let other = [kv, workspace, further].into_iter().fold(0, u64::saturating_add);
            let (used, parts) = host_memory(plan, device, (other, &of_further), limit.map(|limit| limit.0));
            (used, limit, parts)
        }
    };
    let used = ByteSize(used).human();
    // The workspace grows with the tokens per pass.
    let per_pass = match plan.schedule.prefill_chunk {
        Some(chunk) if plan.model.kind != ModelKind::SingleRun => format!(" ({chunk} per pass at most)"),
        _ => String::new(),
    };
    match limit {
        Some(limit) => format!("{name}: {used} of {} at {context} tokens of context{per_pass}{parts}", limit.human()),
        None => format!("{name}: {used} at {context} tokens of context{per_pass}{parts}"),
    }
}

/// Bytes of host memory for the states of further sequences, in a plan for several, and what that is as text. `of_one`: bytes of one.
fn further_sequences(plan: &Plan, of_one: u64) -> (u64, String) {
    let bytes = of_one.saturating_mul(plan.planned_sequences().saturating_sub(1));
    let text = match bytes {
        0 => String::new(),
        _ => format!(", {} for the KV caches of other sequences", ByteSize(bytes).human()),
    };
    (bytes, text)
}

/// Bytes of the states in host memory whose partitions decode on another device, for one sequence.
fn copied_states(plan: &Plan, host: &str) -> u64 {
    let is_elsewhere =
        |name: &str| plan.partitions.iter().any(|partition| partition.name == name && partition.device != host);
    let here =
        plan.states.iter().filter(|state| state.device == host && !state.on_disk && is_elsewhere(&state.partition));
    here.map(|state| state.memory().saturating_mul(plan.budgets.batch)).fold(0, u64::saturating_add)
}

/// Bytes of host memory in use, and their large items as text: weights that compute there, locked parts of weights read
/// from disk, the cache of experts, `other` bytes of state and workspace with their text, and as many of the weights streamed to GPUs as fit in
/// the rest of `limit`.
fn host_memory(plan: &Plan, host: &Device, (other, of_other): (u64, &str), limit: Option<u64>) -> (u64, String) {
    let human = |bytes: u64| ByteSize(bytes).human();
    let held = |partition: &Partition| match partition
        .variants()
        .find(|variant| variant.device == host.name)
        .map(|variant| variant.residency)
    {
        Some(Residency::Resident) => partition.bytes.weights.0,
        Some(Residency::Streamed) => partition.bytes.locked.map_or(0, |locked| locked.0),
        Some(Residency::Mapped) | None => 0,
    };
    let streams = |variant: &PartitionVariant| variant.device != host.name && variant.residency == Residency::Streamed;
    let sum = |bytes: &dyn Fn(&Partition) -> u64| plan.partitions.iter().map(bytes).fold(0, u64::saturating_add);
    // Weights that compute on the host in the other phase count twice: kernels hold them in a packed layout.
    let streamed = sum(&|p| if p.variants().any(|variant| streams(&variant)) { p.bytes.weights.0 } else { 0 });
    let (held, window) = (sum(&held), host.window.map_or(0, |window| window.0));
    let of_process = host.heap.map_or(PROCESS, |heap| PROCESS.saturating_add(heap.0));
    let (process, cache) = (limit.map_or(0, |_| of_process), host.expert_cache.map_or(0, |cache| cache.0));
    let layout = host.kernel_layout.map_or(0, |layout| layout.0);
    let draft = plan.draft.as_ref().map_or(0, |draft| draft.host_memory.0);
    let required = [held, layout, window, cache, other, process, draft].into_iter().fold(0, u64::saturating_add);
    let kept = limit.map_or(streamed, |limit| streamed.min(limit.saturating_sub(required)));
    let mut parts = String::new();
    let with_heap = if host.heap.is_some() { ", its sessions and the tokenizer" } else { " itself" };
    if limit.is_some() {
        parts += &format!(", {} for the process{with_heap} included", human(of_process));
    }
    if window > 0 {
        parts +=
            &format!(", {} of weights locked, {} of buffers to read the rest from disk", human(held), human(window));
    }
    if layout > 0 {
        parts += &format!(", {} that the layout of CPU kernels takes beside the weights", human(layout));
    }
    let copied = copied_states(plan, &host.name);
    if copied > 0 {
        parts += &format!(", {} for KV caches of layers on GPUs, copied there around each run", human(copied));
    }
    if plan.state_window() > 0 {
        parts += &format!(", {} for KV caches on disk", human(plan.state_window()));
    }
    if cache > 0 {
        parts += &format!(", {} for experts that were used", human(cache));
    }
    if draft > 0 {
        parts += &format!(", {} for the draft", human(draft));
    }
    if kept == streamed && streamed > 0 {
        parts +=
            &format!(", {} for copying weights to GPUs, beside those that the host computes with", human(streamed));
    }
    if kept < streamed {
        let (kept, streamed) = (human(kept), human(streamed));
        parts += &format!(
            ", {kept} of the {streamed} streamed to GPUs stay in memory, the rest is read from disk in each pass"
        );
    }
    let used = required.saturating_add(kept);
    // Without room for it, the runtime locks fewer weights.
    let free = limit.filter(|_| window > 0).map_or(0, |limit| RESERVE.min(limit.saturating_sub(used)));
    if free > 0 {
        parts += &format!(", {} left free", human(free));
    }
    parts += of_other;
    if limit.is_none() {
        parts += &format!("; in addition {} for the process{with_heap}", human(of_process));
    }
    if let Some(more) = host.session_creation {
        parts += &format!(", {} more while sessions are created", human(more.0));
    }
    (used.saturating_add(free), parts)
}

/// `embedding, layers.0-11, head`: joins labels, with consecutive layers as a range.
pub fn blocks(labels: &[String]) -> String {
    let mut parts: Vec<(String, Option<(u64, u64)>)> = Vec::new();
    for label in labels {
        let numbered = label.rsplit_once('.').and_then(|(stem, n)| Some((stem.to_owned(), n.parse::<u64>().ok()?)));
        match (numbered, parts.last_mut()) {
            (Some((stem, n)), Some((last, Some((_, end))))) if *last == stem && n == *end + 1 => *end = n,
            (Some((stem, n)), _) => parts.push((stem, Some((n, n)))),
            (None, _) => parts.push((label.clone(), None)),
        }
    }
    let text = parts.into_iter().map(|(stem, range)| match range {
        Some((a, b)) if a == b => format!("{stem}.{a}"),
        Some((a, b)) => format!("{stem}.{a}-{b}"),
        None => stem,
    });
    text.collect::<Vec<_>>().join(", ")
}

/// The ending of the labels of blocks that are the experts of a layer.
const OF_EXPERTS: &str = ".experts";

/// `layers.2-3, experts of layers.0-1`: joins labels, with the experts of layers after whole blocks.
pub fn blocks_and_experts(labels: &[String]) -> String {
    let layer_of = |label: &String| label.strip_suffix(OF_EXPERTS).map(str::to_owned);
    let whole: Vec<String> = labels.iter().filter(|label| layer_of(label).is_none()).cloned().collect();
    let layers: Vec<String> = labels.iter().filter_map(layer_of).collect();
    match (whole.is_empty(), layers.is_empty()) {
        (_, true) => blocks(&whole),
        (true, false) => format!("experts of {}", blocks(&layers)),
        (false, false) => format!("{}, experts of {}", blocks(&whole), blocks(&layers)),
    }
}

/// Whether passes of more sequences than the planned number give clearly more tokens per second. Without a corpus the planner does not rely on
/// that where experts are read.
fn gains_from_more(throughput: &PredictedThroughput) -> bool {
    let of_one_token = throughput.passes.iter().filter(|pass| pass.tokens == 1);
    let rates = of_one_token.map(|pass| (pass.sequences, pass.sequences as f64 / pass.ms));
    let (planned, more): (Vec<_>, Vec<_>) = rates.partition(|(sequences, _)| *sequences <= throughput.sequences);
    let fastest = |rates: &[(u64, f64)]| rates.iter().map(|(_, rate)| *rate).fold(0.0, f64::max);
    fastest(&more) > CLEARLY * fastest(&planned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::PredictedPass;

    #[test]
    fn more_sequences_than_planned_may_be_faster() {
        let pass = |sequences, ms| PredictedPass { sequences, tokens: 1, ms };
        let passes = vec![pass(1, 10.0), pass(2, 19.0), pass(4, 33.0)];
        let planned = |sequences| PredictedThroughput { sequences, passes: passes.clone(), ..Default::default() };
        assert!(gains_from_more(&planned(1)) && !gains_from_more(&planned(4)));
        let alone = Predictions { new_tokens: 10, decode_ms: 1.0, ..Predictions::default() };
        let line = throughput_line(&alone, &PredictedThroughput { free_sequences: 1, ..planned(1) }, 2, true);
        assert!(line.contains("more at once may be faster: hpp-profile --prompts"), "{line}");
        let line = throughput_line(&alone, &PredictedThroughput { free_sequences: 1, ..planned(1) }, 2, false);
        assert!(line.contains("more at once are not faster"), "{line}");
        assert!(!gains_from_more(&PredictedThroughput {
            sequences: 1,
            passes: vec![pass(1, 10.0), pass(2, 19.5)],
            ..Default::default()
        }));
    }

    #[test]
    fn estimates_of_small_models_may_be_off_by_more() {
        assert!(static_error(SMALL - 1).contains("up to 25x for so small a model"));
        assert!(static_error(SMALL).contains("up to 6x; hpp-profile measures"));
    }

    #[test]
    fn memory_that_ends_the_number_of_sequences_is_named() {
        let alone = Predictions { new_tokens: 10, decode_ms: 1.0, ..Predictions::default() };
        let pass = |sequences| PredictedPass { sequences, tokens: 1, ms: 1.0 };
        let line = |most: u64, free_sequences| {
            let passes = (0..=most.ilog2()).map(|power| pass(1 << power)).collect();
            let throughput = PredictedThroughput { sequences: most, tokens_per_second: 1.0, free_sequences, passes };
            throughput_line(&alone, &throughput, 2, false)
        };
        assert!(
            line(4, 4).contains("by its estimates this plan has memory for fewer than 8")
                && !line(4, 2).contains("has memory")
        );
        assert!(
            line(1, 1).contains(
                "by its estimates this plan has memory for fewer than 2, though a run may find room for more"
            )
        );
        assert!(line(4, 1).contains("more at once are not faster"));
        let throughput = PredictedThroughput {
            sequences: 1,
            passes: vec![pass(1), pass(2), pass(4)],
            free_sequences: 3,
            ..Default::default()
        };
        let hardly_faster = throughput_line(&alone, &throughput, 2, false);
        assert!(hardly_faster.ends_with("; more at once are hardly faster"), "{hardly_faster}");
        assert!(line(4, 2).contains("up to 2 at once") && line(MOST_SEQUENCES, MOST_SEQUENCES).contains("up to 64"));
    }

    #[test]
    fn consecutive_layers_become_a_range() {
        let labels = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(blocks(&labels("embedding layers.0 layers.1 layers.2 head")), "embedding, layers.0-2, head");
        assert_eq!(blocks(&labels("layers.3 layers.5 layers.6")), "layers.3, layers.5-6");
        assert_eq!(blocks(&[]), "");
        let divided = labels("layers.0.experts layers.1.experts layers.2 layers.3");
        assert_eq!(blocks_and_experts(&divided), "layers.2-3, experts of layers.0-1");
        assert_eq!(blocks_and_experts(&divided[..2]), "experts of layers.0-1");
        assert_eq!(blocks_and_experts(&divided[2..]), "layers.2-3");
    }
}
