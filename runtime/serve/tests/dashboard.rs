//! The dashboard for Grafana asks for metrics, labels and tiers that the server exports, and shows all of them. The page asks for some of them.

use hpp_generate::kv::StoreStats;
use hpp_serve::Metrics;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const DASHBOARD: &str = include_str!("../../../docs/grafana/hpp.json");

/// The script of the page, whose panel shows metrics.
const PAGE: &str = include_str!("../src/page/chat.js");

/// Words of queries that are no metrics.
const FUNCTIONS: [&str; 4] = ["sum", "rate", "histogram_quantile", "label_values"];

/// Words that are followed by labels in parentheses.
const BEFORE_LABELS: [&str; 3] = ["by", "on", "group_left"];

/// Names of samples, each with its labels and their values.
type Exported = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// What `/metrics` has after a request and a look at the cache.
fn exported() -> Exported {
    let metrics = Metrics::new();
    let mut model = metrics.model("m");
    model.ended("stop");
    metrics.responded("/v1/models", 200);
    model.first_token.observe(1.0);
    model.items.observe(1.0);
    model.cache.report(&StoreStats::default(), 0);
    model.cache.count_in_sequence(1, 1);
    let text = metrics.to_text();
    let samples = text.lines().filter(|line| !line.starts_with('#'));
    let mut exported = Exported::new();
    for line in samples {
        let (name, rest) = line.split_once('{').expect("every sample has labels");
        let (labels, _) = rest.split_once('}').expect("labels end");
        let known = exported.entry(name.to_owned()).or_default();
        for (label, value) in labels.split(',').filter_map(|label| label.split_once('=')) {
            known.entry(label.to_owned()).or_default().insert(value.to_owned());
        }
    }
    exported
}

/// The words and signs of a query. Texts in quotes and ranges in brackets are one token each.
fn tokens(query: &str) -> Vec<&str> {
    let is_word = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '.');
    let (mut tokens, mut rest) = (Vec::new(), query.trim_start());
    while let Some(first) = rest.chars().next() {
        let end = match first {
            '"' => rest[1..].find('"').map(|at| at + 2),
            '[' => rest.find(']').map(|at| at + 1),
            '=' | '!' if rest[1..].starts_with(['~', '=']) => Some(2),
            _ if is_word(first) => Some(rest.find(|letter| !is_word(letter)).unwrap_or(rest.len())),
            _ => Some(first.len_utf8()),
        };
        let (token, after) = rest.split_at(end.unwrap_or(rest.len()));
        tokens.push(token);
        rest = after.trim_start();
    }
    tokens
}

/// The tokens between the bracket at `open` and the one that closes it.
fn group<'a, 'b>(tokens: &'b [&'a str], open: usize) -> &'b [&'a str] {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate().skip(open) {
        match *token {
            "(" | "{" => depth += 1,
            ")" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &tokens[open + 1..at];
        }
    }
    &tokens[open..open]
}

fn is_name(token: &str) -> bool {
    token.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_')
}

/// What is wrong with a query.
fn findings(query: &str, exported: &Exported) -> Vec<String> {
    let (tokens, mut found) = (tokens(query), Vec::new());
    let mut at = 0;
    while at < tokens.len() {
        let token = tokens[at];
        let is_followed_by = |sign: &str| tokens.get(at + 1) == Some(&sign);
        if BEFORE_LABELS.contains(&token) && is_followed_by("(") {
            let labels = group(&tokens, at + 1);
            at += labels.len() + 2;
            if token == "by" {
                found.extend(grouping_findings(labels, group(&tokens, at + 1), exported));
            }
        } else if is_name(token) && !FUNCTIONS.contains(&token) {
            let matchers = if is_followed_by("{") { group(&tokens, at + 1) } else { &[] };
            let is_rate = at >= 2 && tokens[at - 2] == "rate";
            found.extend(metric_findings(token, matchers, is_rate, exported));
            at += if is_followed_by("{") { matchers.len() + 2 } else { 0 };
        }
        at += 1;
    }
    found
}

/// What is wrong with the labels that a sum over `inner` keeps.
fn grouping_findings(labels: &[&str], inner: &[&str], exported: &Exported) -> Vec<String> {
    let labels: Vec<&&str> = labels.iter().filter(|token| is_name(token)).collect();
    let metrics = inner.iter().filter_map(|token| Some((token, exported.get(*token)?)));
    let mut found = Vec::new();
    for (metric, known) in metrics {
        let missing = labels.iter().filter(|label| !known.contains_key(**label as &str));
        found.extend(missing.map(|label| format!("{metric} has no label {label}")));
        if metric.ends_with("_bucket") && !labels.contains(&&"le") {
            found.push(format!("{metric} is added up over its bounds"));
        }
    }
    found
}

/// What is wrong with the use of a metric.
fn metric_findings(metric: &str, matchers: &[&str], is_rate: bool, exported: &Exported) -> Vec<String> {
    let Some(known) = exported.get(metric) else { return vec![format!("{metric} is not exported")] };
    let missing = matchers.iter().filter(|token| is_name(token) && !known.contains_key(**token));
    let mut found: Vec<String> = missing.map(|label| format!("{metric} has no label {label}")).collect();
    let tier = matchers.windows(3).find(|tokens| tokens[..2] == ["tier", "="]).map(|tokens| tokens[2]);
    if let (Some(tier), Some(tiers)) = (tier, known.get("tier"))
        && !tiers.contains(tier)
    {
        found.push(format!("{metric} has no tier {tier}"));
    }
    let is_counter = ["_total", "_bucket", "_sum", "_count"].iter().any(|ending| metric.ends_with(ending));
    if is_counter != is_rate {
        found.push(format!("{metric}: rate() belongs to counters, and to nothing else"));
    }
    found
}

fn dashboard() -> Value {
    serde_json::from_str(DASHBOARD).expect("the dashboard is JSON")
}

fn list<'a>(value: &'a Value, field: &str) -> &'a [Value] {
    value[field].as_array().unwrap_or_else(|| panic!("{field} is a list: {value}"))
}

fn text<'a>(value: &'a Value, field: &str) -> &'a str {
    value[field].as_str().filter(|text| !text.is_empty()).unwrap_or_else(|| panic!("{field} is missing: {value}"))
}

/// The panels that show something; rows are titles between them.
fn graphs(dashboard: &Value) -> impl Iterator<Item = &Value> {
    list(dashboard, "panels").iter().filter(|panel| panel["type"] != "row")
}

fn targets(dashboard: &Value) -> impl Iterator<Item = &Value> {
    graphs(dashboard).flat_map(|panel| list(panel, "targets"))
}

#[test]
fn every_query_asks_for_what_is_exported() {
    let (dashboard, exported) = (dashboard(), exported());
    let mut found = Vec::new();
    for target in targets(&dashboard) {
        found.extend(findings(text(target, "expr"), &exported));
    }
    for variable in list(&dashboard["templating"], "list").iter().filter(|variable| variable["type"] == "query") {
        let query = text(&variable["query"], "query");
        let inner = query.strip_prefix("label_values(").and_then(|rest| rest.strip_suffix(')'));
        let (metric, label) = inner.and_then(|inner| inner.split_once(", ")).expect("a list of a label's values");
        assert_eq!(variable["definition"], query);
        found.extend(metric_findings(metric, &[label], false, &exported));
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}

#[test]
fn every_metric_is_shown() {
    let (dashboard, exported) = (dashboard(), exported());
    let words: BTreeSet<&str> = targets(&dashboard).flat_map(|target| tokens(text(target, "expr"))).collect();
    // Of a histogram, the buckets are shown.
    let is_part = |name: &str| name.ends_with("_sum") || name.ends_with("_count");
    let unseen: Vec<&String> =
        exported.keys().filter(|name| !is_part(name) && !words.contains(name.as_str())).collect();
    assert!(exported.len() > 20 && unseen.is_empty(), "{unseen:?}");
}

#[test]
fn every_tier_is_exported() {
    let exported = exported();
    for (metric, tiers) in [
        ("hpp_state_bytes", &["device", "ram", "disk"][..]),
        ("hpp_kv_bytes", &["ram", "disk"]),
        ("hpp_kv_hits_total", &["sequence", "ram", "disk"]),
        ("hpp_kv_misses_total", &["sequence", "ram", "disk"]),
    ] {
        let expected: BTreeSet<String> = tiers.iter().map(|tier| format!("\"{tier}\"")).collect();
        assert_eq!(exported[metric]["tier"], expected, "{metric}");
    }
}

#[test]
fn the_page_asks_for_what_is_exported() {
    let exported = exported();
    let words = PAGE.split('"').filter(|word| word.starts_with("hpp_") && word.len() > 4);
    let names: BTreeSet<&str> = words.collect();
    let unknown: Vec<&&str> = names.iter().filter(|name| !exported.contains_key(**name)).collect();
    assert!(names.len() > 8 && unknown.is_empty(), "{unknown:?} of {names:?}");
}

#[test]
fn wrong_queries_are_noticed() {
    let exported = exported();
    let of = |query: &str| findings(query, &exported).len();
    assert_eq!(of("sum by (model) (rate(hpp_requests_total{model=~\"$model\", outcome=\"stop\"}[1m]))"), 0);
    assert_eq!(of("histogram_quantile(0.9, sum by (le) (rate(hpp_time_in_queue_seconds_bucket[1m])))"), 0);
    assert_eq!(of("rate(hpp_requests[1m])"), 1, "without _total");
    assert_eq!(of("hpp_requests_running{tier=\"ram\"}"), 1, "no such label");
    assert_eq!(of("sum by (model, tier) (hpp_requests_running)"), 1, "no such label");
    assert_eq!(of("hpp_state_bytes{tier=\"device\"}"), 0);
    assert_eq!(of("hpp_kv_bytes{tier=\"device\"}"), 1, "no such tier");
    assert_eq!(of("rate(hpp_requests_running[1m])"), 1, "a rate of a gauge");
    assert_eq!(of("hpp_requests_total / hpp_requests_running"), 1, "a counter without a rate");
    assert_eq!(of("sum by (model) (rate(hpp_time_in_queue_seconds_bucket[1m]))"), 1, "bounds added up");
}

#[test]
fn every_panel_has_what_grafana_needs() {
    let dashboard = dashboard();
    assert_eq!([text(&dashboard, "title"), text(&dashboard, "uid")], ["HPP", "hpp-serve"]);
    assert!(dashboard["schemaVersion"].as_u64().is_some_and(|version| version >= 36) && dashboard["id"].is_null());
    let variables = list(&dashboard["templating"], "list");
    let source = variables.iter().find(|variable| variable["type"] == "datasource").expect("a data source to choose");
    assert_eq!([text(source, "name"), text(source, "query")], ["datasource", "prometheus"]);
    let panels = list(&dashboard, "panels");
    let ids: BTreeSet<u64> = panels.iter().filter_map(|panel| panel["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "each panel has an id of its own");
    assert!(panels.iter().all(|panel| !text(panel, "title").is_empty()));
    for panel in graphs(&dashboard) {
        assert!(!text(panel, "type").is_empty() && !text(&panel["fieldConfig"]["defaults"], "unit").is_empty());
        let targets = list(panel, "targets");
        let refs: BTreeSet<&str> = targets.iter().map(|target| text(target, "refId")).collect();
        assert_eq!(refs.len(), targets.len(), "{}: each query has a letter of its own", panel["title"]);
        assert!(!targets.is_empty() && panel["datasource"]["uid"] == "${datasource}", "{}", panel["title"]);
        targets.iter().for_each(legend_has_labels_of_the_query);
    }
}

/// Fails if a legend shows a label that the query does not keep.
fn legend_has_labels_of_the_query(target: &Value) {
    let (query, legend) = (tokens(text(target, "expr")), text(target, "legendFormat"));
    assert_eq!(target["datasource"]["uid"], "${datasource}");
    let kept = query.iter().enumerate().filter(|(_, token)| **token == "by").flat_map(|(at, _)| group(&query, at + 1));
    let kept: BTreeSet<&&str> = kept.collect();
    for (label, _) in legend.split("{{").skip(1).filter_map(|part| part.split_once("}}")) {
        assert!(kept.contains(&label), "{legend}: {query:?} does not keep {label}");
    }
}

#[test]
fn panels_lie_beside_each_other() {
    let dashboard = dashboard();
    let mut taken = BTreeSet::new();
    for panel in list(&dashboard, "panels") {
        let place = |side: &str| panel["gridPos"][side].as_u64().expect("a place on the grid");
        let (x, y, width, height) = (place("x"), place("y"), place("w"), place("h"));
        assert!(x + width <= 24, "{} leaves the grid", panel["title"]);
        for cell in (y..y + height).flat_map(|row| (x..x + width).map(move |column| (row, column))) {
            assert!(taken.insert(cell), "{} lies over another panel", panel["title"]);
        }
    }
}
