//! The head of the page: key numbers, conclusions, model, machine and settings.

use super::failures;
use super::roofline::{BEYOND, WHY_BEYOND_MEMORY};
use crate::doubt::doubts;
use crate::report::number::{bytes, count, label, percent, plain, time};
use crate::report::view::{Pass, ReportView};
use hpp_partition::Phase;
use hpp_schema::{Host, Machine, Profile, Provider};
use maud::{Markup, html};

pub fn html(view: &ReportView<'_>) -> Markup {
    let profile = view.profile;
    html! {
        header {
            p.kicker { "HPP profile" }
            h1 { (label(&profile.model.name, 80)) }
            p.lead { "measured on " (label(&profile.host.cpu, 80)) ", " (label(&profile.date, 40)) }
            ul.tiles {
                @for (value, unit, what) in tiles(view) { li { strong { (value) } " " small { (unit) } span { (what) } } }
            }
            @for doubt in doubts(profile) { p { strong { "Warning: " } (doubt) "." } }
            ul.sentences { @for sentence in sentences(view) { li { (sentence) } } }
            div.facts {
                (list("Model", &model(view)))
                (list("Machine", &machine(&profile.host)))
                (list("How it was measured", &how(profile)))
                @if let Some(rates) = &profile.machine.rates { (list("Rates measured", &rates_of(rates))) }
            }
        }
    }
}

/// The key numbers: number, unit, what it measures.
fn tiles(view: &ReportView<'_>) -> Vec<(String, &'static str, String)> {
    let model = &view.profile.model;
    let mut tiles = vec![(bytes(model.weight_bytes.0), "", format!("weights in {} blocks", model.blocks.len()))];
    for provider in &view.providers {
        let name = provider.name();
        if let Some((Pass { tokens, .. }, ms)) = whole_pass(view, *provider, Phase::Decode) {
            tiles.push((plain(1e3 / ms), "tokens/s", format!("{name}, decode at {tokens} tokens")));
        }
        if let Some((Pass { tokens, .. }, ms)) = whole_pass(view, *provider, Phase::Prefill) {
            let rate = plain(1e3 * tokens as f64 / ms);
            tiles.push((rate, "tokens/s", format!("{name}, prefill of {tokens} tokens")));
        }
    }
    if let Some(bounds) = view.bounds(Provider::CPU) {
        tiles.push((plain(bounds.gb_per_s), "GB/s", "host memory, read".to_owned()));
    }
    tiles
}

/// The longest pass with a time for every block, and its milliseconds.
fn whole_pass(view: &ReportView<'_>, provider: Provider, phase: Phase) -> Option<(Pass, f64)> {
    let pass = view.longest_pass(phase)?;
    let time = view.pass_time(provider, pass);
    (time.missing == 0 && time.ms > 0.0 && !view.blocks().is_empty()).then_some((pass, time.ms))
}

/// Conclusions from the measurements.
fn sentences(view: &ReportView<'_>) -> Vec<String> {
    let mut sentences: Vec<String> = view.providers.iter().filter_map(|p| decode_sentence(view, *p)).collect();
    sentences.extend(comparison(view));
    sentences.push(match failures::all(view.profile).len() {
        0 => "Every requested measurement succeeded.".to_owned(),
        n => format!("{} failed; the last section says why.", count(n, "measurement", "measurements")),
    });
    sentences
}

fn decode_sentence(view: &ReportView<'_>, provider: Provider) -> Option<String> {
    let (pass, ms) = whole_pass(view, provider, Phase::Decode)?;
    let mut text = format!("{}: {pass} takes {} in one partition", provider.name(), time(ms));
    let works = (0..view.blocks().len()).map(|block| view.work(block, pass));
    let read = works.map(|work| work.map(|work| work.bytes)).collect::<Option<Vec<u64>>>();
    if let (Some(read), Some(bounds)) = (read, view.bounds(provider)) {
        let read = read.into_iter().fold(0, u64::saturating_add);
        let least = read as f64 / bounds.gb_per_s / 1e6;
        let (read, rate, least_time) = (bytes(read), plain(bounds.gb_per_s), time(least));
        text += &format!("; reading the {read} it needs at the {rate} GB/s measured takes {least_time}");
        text += &match least > BEYOND * ms {
            true => format!(", longer than the pass itself: {WHY_BEYOND_MEMORY}"),
            false => format!(", so it runs at {} of what its memory allows", percent(least / ms)),
        };
    }
    Some(text + ".")
}

/// The fastest provider of each phase, if there are several.
fn comparison(view: &ReportView<'_>) -> Option<String> {
    let fastest = |phase: Phase| {
        let whole = view.providers.iter().map(|provider| (provider, whole_pass(view, *provider, phase)));
        let mut passes: Vec<(f64, &str)> =
            whole.filter_map(|(provider, pass)| Some((pass?.1, provider.name()))).collect();
        passes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (first, last) = (passes.first()?, passes.last()?);
        (passes.len() > 1).then(|| (first.1, plain(last.0 / first.0), last.1))
    };
    let (one, decode, other) = fastest(Phase::Decode)?;
    let (best, prefill, worst) = fastest(Phase::Prefill)?;
    let rest = match (one, other) == (best, worst) {
        true => format!("is {decode} times as fast as {other} in decode and {prefill} times in prefill"),
        false => format!(
            "decodes {decode} times as fast as {other}, and {best} takes prompts in {prefill} times as fast as {worst}"
        ),
    };
    Some(format!("With all of the model on one processor, {one} {rest}."))
}

fn list(title: &str, facts: &[(String, String)]) -> Markup {
    html! {
        section {
            h2 { (title) }
            dl { @for (name, value) in facts { div { dt { (label(name, 40)) } dd { (label(value, 200)) } } } }
        }
    }
}

fn fact(name: impl Into<String>, value: impl Into<String>) -> (String, String) {
    (name.into(), value.into())
}

fn model(view: &ReportView<'_>) -> Vec<(String, String)> {
    let model = &view.profile.model;
    vec![
        fact("weights", bytes(model.weight_bytes.0)),
        fact("blocks", format!("{} of {}", model.blocks.len(), count(view.groups().len(), "class", "classes"))),
        fact("hash", model.hash.chars().take(16).collect::<String>()),
    ]
}

fn machine(host: &Host) -> Vec<(String, String)> {
    let mut facts = vec![
        fact("processor", &host.cpu),
        fact("cores", format!("{}, {}", host.cores, count(host.threads, "thread used", "threads used"))),
        fact("memory", bytes(host.memory.0)),
        fact("system", &host.system),
        fact("ONNX Runtime", &host.onnxruntime),
        fact("HPP", &host.hpp),
    ];
    for device in host.devices.iter().filter(|device| device.provider != Provider::CPU) {
        let memory = device.memory.map_or(String::new(), |memory| format!(", {}", bytes(memory.0)));
        facts.push(fact(device.provider.name(), format!("{}{memory}", device.name)));
    }
    facts
}

fn how(profile: &Profile) -> Vec<(String, String)> {
    let settings = &profile.settings;
    let tokens = |list: &[u64]| list.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let corpus = profile.corpus.as_ref().map_or("none was run".to_owned(), |corpus| {
        let all = corpus.prompts_in_all.map_or(String::new(), |all| format!(" of {all}"));
        let (read, written) = (corpus.statistics.prompt_tokens, corpus.statistics.generated_tokens);
        format!("{}{all} prompts, {read} tokens read, {written} generated", corpus.prompts_done)
    });
    vec![
        fact("decode at", format!("{} tokens", tokens(&settings.contexts))),
        fact("prefill of", format!("{} tokens", tokens(&settings.prefill_tokens))),
        fact("blocks", if settings.all_blocks { "every block" } else { "one of each class" }),
        fact(
            "activations",
            if settings.activations.are_exported() { "as exported" } else { "of 8 bits (--int8-activations)" },
        ),
        fact("runs", if settings.quick { "few (--quick)" } else { "as many as steady medians need" }),
        fact("corpus", corpus),
    ]
}

fn rates_of(rates: &Machine) -> Vec<(String, String)> {
    let per = |gb_per_s: f64, tflops: f64, launch_us: f64| {
        format!("{} GB/s, {} TFLOP/s, {} µs to start a partition", plain(gb_per_s), plain(tflops), plain(launch_us))
    };
    let cpu = &rates.cpu;
    let mut facts = vec![fact("CPU", per(cpu.memory_gb_per_s, cpu.tflops, cpu.launch_us))];
    for gpu in &rates.gpus {
        let link = &gpu.link;
        let (to, from) = (plain(link.to_device_gb_per_s), plain(link.from_device_gb_per_s));
        facts.push(fact(&gpu.name, per(gpu.memory_gb_per_s, gpu.tflops, gpu.launch_us)));
        let link = format!("{to} GB/s to the device, {from} GB/s back, {} µs to start a copy", plain(link.latency_us));
        facts.push(fact("its link", link));
    }
    facts.extend(rates.disk.map(|disk| fact("disk", format!("{} GB/s", plain(disk.read_gb_per_s)))));
    facts
}
