//! The plan as a person reads it.

use crate::amount::{self, ESTIMATED, MEASURED};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use hpp_schema::memory::PROCESS;
use hpp_schema::{
    Achieved, ByteSize, Device, DeviceKind, Form, ModelKind, ObjectiveKind, Partition, Plan, Residency, Ring,
};
use std::fmt::Write as _;

/// A table with a header; columns in `right` are aligned right.
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

/// The placement table, the totals below it and what is expected.
pub fn plan_summary(plan: &Plan) -> String {
    let rows = alike(&plan.partitions).into_iter().map(row);
    let header = ["partition", "device", "blocks", "weights", "KV", "workspace", "why"];
    let mut text = format!("{}\n\n", table(&header, &[3, 4, 5], rows));
    for (index, device) in plan.devices.iter().enumerate() {
        let _ = writeln!(text, "{}", device_line(plan, index, device));
    }
    text + &expectation(plan)
}

/// Partitions by row: neighbours that are streamed alike share one, for there may be many.
fn alike(partitions: &[Partition]) -> Vec<&[Partition]> {
    let together = |a: &Partition, b: &Partition| a.is_streamed() && b.is_streamed() && device(a) == device(b);
    partitions.chunk_by(together).collect()
}

fn row(partitions: &[Partition]) -> Vec<String> {
    let (first, last) = (&partitions[0], &partitions[partitions.len() - 1]);
    let sum = |of: fn(&Partition) -> ByteSize| ByteSize(partitions.iter().map(|p| of(p).0).sum()).human();
    let labels: Vec<String> = partitions.iter().flat_map(|p| p.blocks.clone()).collect();
    let workspace = partitions.iter().map(|p| p.bytes.workspace).max().unwrap_or_default();
    vec![
        if partitions.len() == 1 { first.name.clone() } else { format!("{} to {}", first.name, last.name) },
        device(first),
        blocks(&labels),
        sum(|p| p.bytes.weights),
        sum(|p| p.bytes.kv),
        workspace.human(),
        first.reason.clone(),
    ]
}

/// `gpu0`, `gpu0 streamed`, `cpu from disk`, `cpu (prompt: gpu0 streamed)`.
fn device(partition: &Partition) -> String {
    let one = |device: &str, residency: Residency| match residency {
        Residency::Resident => device.to_owned(),
        Residency::Streamed if device == "cpu" => format!("{device} from disk"),
        Residency::Streamed => format!("{device} streamed"),
        Residency::Mapped => format!("{device} mapped"),
    };
    let decode = one(&partition.device, partition.residency);
    match &partition.prefill {
        None => decode,
        Some(prefill) => format!("{decode} (prompt: {})", one(&prefill.device, prefill.residency)),
    }
}

/// How far off a prediction from shapes and assumed rates was seen to be.
const STATIC_ERROR: &str = "static estimate, may be off by up to 6x; hpp-profile measures";

/// What is expected. An estimate from assumed rates has two digits, because it is worth no more.
fn expectation(plan: &Plan) -> String {
    let p = &plan.predictions;
    let is_static = p.source == "static";
    let (what, worth) = if is_static { (STATIC_ERROR, ESTIMATED) } else { (p.source.as_str(), MEASURED) };
    let time = |ms| amount::time(ms, worth);
    if plan.model.kind == ModelKind::SingleRun {
        return format!("expected ({what}): {} per run", time(p.time_to_first_token_ms));
    }
    let mut text = format!(
        "expected ({what}): {} tokens/s, {} per token at {} tokens of context; time to first token {} for a {}-token prompt",
        amount::digits(p.decode_tokens_per_second, worth),
        time(p.decode_ms),
        p.decode_context,
        time(p.time_to_first_token_ms),
        p.prompt_tokens,
    );
    if let Some(limit) = &p.limit {
        let _ = write!(text, "\nbottleneck: {limit}");
    }
    if let Some(objective) = &p.objective {
        let _ = write!(text, "\n{}", proof(objective, p.new_tokens, worth));
    }
    text
}

/// What was minimised, and how far the plan may be from the best one.
fn proof(objective: &Achieved, new_tokens: u64, worth: i32) -> String {
    let what = match objective.kind {
        ObjectiveKind::Decode => "one token".to_owned(),
        ObjectiveKind::Prefill => "prompt to first token".to_owned(),
        ObjectiveKind::Mixed => format!("prompt and {new_tokens} new tokens"),
    };
    let time = |ms| amount::time(ms, worth);
    let sure = match (objective.proven, objective.bound_ms) {
        (true, _) => "optimal by these estimates (proven)".to_owned(),
        (false, bound) if bound > 0.0 => format!("by these estimates no plan takes less than {}", time(bound)),
        (false, _) => "no lower bound was computed".to_owned(),
    };
    format!("{what}: {}; {sure}", time(objective.ms))
}

fn device_line(plan: &Plan, index: usize, device: &Device) -> String {
    let (name, context) = (&device.name, plan.budgets.context);
    let on = || plan.partitions.iter().filter(|p| p.device == *name);
    let lies_here: u64 = plan.states.iter().filter(|s| s.device == *name).map(|s| s.bytes.0 * plan.budgets.batch).sum();
    let visits = on().filter(|p| plan.states.iter().any(|s| s.partition == p.name && s.device != *name));
    let kv = lies_here + visits.map(|p| p.bytes.kv.0).max().unwrap_or(0);
    let workspace: u64 = on().map(|p| p.bytes.workspace.0).max().unwrap_or(0);
    let (used, limit, parts) = match device.kind {
        DeviceKind::Gpu => {
            let gpus_before = plan.devices[..index].iter().filter(|d| d.kind == DeviceKind::Gpu).count();
            let ring = device.ring.map_or(0, |ring| ring.slot_bytes.0.saturating_mul(ring.slots.into()));
            let used = [plan.weights_on(name).unwrap_or(u64::MAX), ring, kv, workspace];
            let slots = |ring: Ring| {
                let slots = amount::count(ring.slots as usize, "slot");
                format!(", {slots} of {} for streamed weights included", ring.slot_bytes.human())
            };
            let used = used.into_iter().fold(0, u64::saturating_add);
            (used, plan.budgets.vram.get(gpus_before).copied(), device.ring.map_or(String::new(), slots))
        }
        DeviceKind::Cpu => {
            let limit = plan.budgets.ram;
            let (used, parts) = on_host(plan, device, kv.saturating_add(workspace), limit.map(|limit| limit.0));
            (used, limit, parts)
        }
    };
    let used = ByteSize(used).human();
    // What the workspace grows with.
    let per_pass = match plan.schedule.prefill_chunk {
        Some(chunk) if plan.model.kind != ModelKind::SingleRun => format!(" ({chunk} per pass at most)"),
        _ => String::new(),
    };
    match limit {
        Some(limit) => format!("{name}: {used} of {} at {context} tokens of context{per_pass}{parts}", limit.human()),
        None => format!("{name}: {used} at {context} tokens of context{per_pass}{parts}"),
    }
}

/// Bytes of host memory beside state and activations, and what they are for: weights that compute there, what of others is locked,
/// and as much as there is room for of those that are streamed to GPUs.
fn on_host(plan: &Plan, host: &Device, beside: u64, limit: Option<u64>) -> (u64, String) {
    let human = |bytes: u64| ByteSize(bytes).human();
    let held = |partition: &Partition| {
        let here = partition.forms().find(|form| form.device == host.name).map(|form| form.residency);
        match here {
            Some(Residency::Resident) => partition.bytes.weights.0,
            Some(Residency::Streamed) => partition.bytes.locked.map_or(0, |locked| locked.0),
            Some(Residency::Mapped) | None => 0,
        }
    };
    let streams = |form: &Form| form.device != host.name && form.residency == Residency::Streamed;
    let sum = |of: &dyn Fn(&Partition) -> u64| plan.partitions.iter().map(of).fold(0, u64::saturating_add);
    // Also of what computes here in another phase: kernels have packed that otherwise.
    let streamed = sum(&|p| if p.forms().any(|form| streams(&form)) { p.bytes.weights.0 } else { 0 });
    let (held, window) = (sum(&held), host.window.map_or(0, |window| window.0));
    let process = limit.map_or(0, |_| PROCESS);
    let first = [held, window, beside, process].into_iter().fold(0, u64::saturating_add);
    let kept = limit.map_or(streamed, |limit| streamed.min(limit.saturating_sub(first)));
    let mut parts = String::new();
    if limit.is_some() {
        parts += &format!(", {} for the process itself included", human(PROCESS));
    }
    if window > 0 {
        parts +=
            &format!(", {} of weights pinned, {} of buffers to read the rest from disk", human(held), human(window));
    }
    if kept < streamed {
        let (kept, streamed) = (human(kept), human(streamed));
        parts += &format!(
            ", {kept} of the {streamed} streamed to GPUs stay in memory, the rest is read from disk in each pass"
        );
    }
    (first.saturating_add(kept), parts)
}

/// `embedding, layers.0-11, head`: consecutive layers shortened to a range.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_layers_become_a_range() {
        let labels = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(blocks(&labels("embedding layers.0 layers.1 layers.2 head")), "embedding, layers.0-2, head");
        assert_eq!(blocks(&labels("layers.3 layers.5 layers.6")), "layers.3, layers.5-6");
        assert_eq!(blocks(&[]), "");
    }
}
