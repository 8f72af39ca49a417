//! The plan as a person reads it.

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use hpp_schema::{ByteSize, DeviceKind, Plan};
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

/// The placement table and the totals below it.
pub fn plan_summary(plan: &Plan) -> String {
    let rows = plan.partitions.iter().map(|p| {
        vec![
            p.name.clone(),
            p.device.clone(),
            blocks(&p.blocks),
            p.bytes.weights.human(),
            p.bytes.kv.human(),
            p.bytes.workspace.human(),
            p.reason.clone(),
        ]
    });
    let header = ["partition", "device", "blocks", "weights", "KV", "workspace", "why"];
    let mut text = format!("{}\n\n", table(&header, &[3, 4, 5], rows));
    for (index, device) in plan.devices.iter().enumerate() {
        let _ = writeln!(text, "{}", device_line(plan, index, &device.name));
    }
    let p = &plan.predictions;
    let _ = write!(
        text,
        "expected ({} estimate): {:.1} tokens/s, {:.2} ms a token; first token of a {}-token prompt after {:.0} ms",
        p.source, p.decode_tokens_per_second, p.decode_ms, p.prompt_tokens, p.time_to_first_token_ms
    );
    text
}

fn device_line(plan: &Plan, index: usize, name: &str) -> String {
    let on = || plan.partitions.iter().filter(|p| p.device == name);
    let weights: u64 = on().map(|p| p.bytes.weights.0).sum();
    let lies_here: u64 = plan.states.iter().filter(|s| s.device == name).map(|s| s.bytes.0 * plan.budgets.batch).sum();
    let visits = on().filter(|p| plan.states.iter().any(|s| s.partition == p.name && s.device != name));
    let kv = lies_here + visits.map(|p| p.bytes.kv.0).max().unwrap_or(0);
    let workspace: u64 = on().map(|p| p.bytes.workspace.0).max().unwrap_or(0);
    let used = ByteSize(weights + kv + workspace).human();
    let gpus_before = plan.devices[..index].iter().filter(|d| d.kind == DeviceKind::Gpu).count();
    let limit = match plan.devices[index].kind {
        DeviceKind::Gpu => plan.budgets.vram.get(gpus_before).copied(),
        DeviceKind::Cpu => plan.budgets.ram,
    };
    match limit {
        Some(limit) => format!("{name}: {used} of {} at {} tokens of context", limit.human(), plan.budgets.context),
        None => format!("{name}: {used} at {} tokens of context", plan.budgets.context),
    }
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
