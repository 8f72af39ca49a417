//! The plan as a person reads it.

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

fn expectation(plan: &Plan) -> String {
    let p = &plan.predictions;
    let what = if p.source == "static" { "static estimate" } else { &p.source };
    if plan.model.kind == ModelKind::SingleRun {
        return format!("expected ({what}): {:.2} ms a run", p.time_to_first_token_ms);
    }
    let mut text = format!(
        "expected ({what}): {} tokens/s, {:.2} ms a token at {} of context; first token of a {}-token prompt after {:.0} ms",
        rate(p.decode_tokens_per_second),
        p.decode_ms,
        p.decode_context,
        p.prompt_tokens,
        p.time_to_first_token_ms
    );
    if let Some(limit) = &p.limit {
        let _ = write!(text, "\nlimited by {limit}");
    }
    if let Some(objective) = &p.objective {
        let _ = write!(text, "\n{}", proof(objective, p.new_tokens));
    }
    text
}

/// What was made small and how sure it is.
fn proof(objective: &Achieved, new_tokens: u64) -> String {
    let what = match objective.kind {
        ObjectiveKind::Decode => "a token takes".to_owned(),
        ObjectiveKind::Prefill => "the first token takes".to_owned(),
        ObjectiveKind::Mixed => format!("the prompt and {new_tokens} tokens take"),
    };
    let sure = match (objective.proven, objective.bound_ms) {
        (true, _) => "no plan is better".to_owned(),
        (false, bound) if bound > 0.0 => format!("none can take less than {}", time(bound)),
        (false, _) => "nothing is proven of other plans".to_owned(),
    };
    format!("{what} {}; {sure}", time(objective.ms))
}

/// Tokens a second: slow models say more digits.
fn rate(per_second: f64) -> String {
    if per_second < 1.0 { format!("{per_second:.3}") } else { format!("{per_second:.1}") }
}

/// Milliseconds, or seconds where there are many.
fn time(ms: f64) -> String {
    match ms {
        ms if ms >= 1e4 => format!("{:.1} s", ms / 1e3),
        ms => format!("{ms:.2} ms"),
    }
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
                let plural = if ring.slots == 1 { "" } else { "s" };
                format!(", {} slot{plural} of {} in it", ring.slots, ring.slot_bytes.human())
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
    match limit {
        Some(limit) => format!("{name}: {used} of {} at {context} tokens of context{parts}", limit.human()),
        None => format!("{name}: {used} at {context} tokens of context{parts}"),
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
        parts += &format!(", {} of it for the process itself", human(PROCESS));
    }
    if window > 0 {
        parts += &format!(", {} of weights locked and {} for those on their way from disk", human(held), human(window));
    }
    if kept < streamed {
        let (kept, streamed) = (human(kept), human(streamed));
        parts += &format!(", {kept} of the {streamed} streamed to GPUs kept and the rest read from disk each time");
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
