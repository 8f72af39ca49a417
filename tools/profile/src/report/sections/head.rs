//! The head of the page: model, machine and settings.

use super::summary;
use crate::report::number::{bytes, count, label, plain};
use crate::report::view::{View, provider_name};
use hpp_schema::{Host, Machine, Profile, Provider};
use maud::{Markup, html};

/// The head as HTML.
pub fn html(view: &View<'_>) -> Markup {
    let profile = view.profile;
    html! {
        header {
            p.kicker { "HPP profile" }
            h1 { (label(&profile.model.name, 80)) }
            p.lead { "measured on " (label(&profile.host.cpu, 80)) ", " (label(&profile.date, 40)) }
            ul.tiles {
                @for tile in summary::tiles(view) { li { strong { (tile.value) } " " small { (tile.unit) } span { (tile.what) } } }
            }
            ul.sentences { @for sentence in summary::sentences(view) { li { (sentence) } } }
            div.facts {
                (list("Model", &model(view)))
                (list("Machine", &machine(&profile.host)))
                (list("How it was measured", &how(profile)))
                @if let Some(rates) = &profile.machine.rates { (list("Rates measured", &rates_of(rates))) }
            }
        }
    }
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

fn model(view: &View<'_>) -> Vec<(String, String)> {
    let model = &view.profile.model;
    let short: String = model.hash.chars().take(16).collect();
    vec![
        fact("weights", bytes(model.weight_bytes.0)),
        fact("blocks", format!("{} of {}", model.blocks.len(), count(view.groups().len() as u64, "class", "classes"))),
        fact("hash", short),
    ]
}

fn machine(host: &Host) -> Vec<(String, String)> {
    let mut facts = vec![
        fact("processor", host.cpu.clone()),
        fact("cores", format!("{}, {}", host.cores, count(u64::from(host.threads), "thread used", "threads used"))),
        fact("memory", bytes(host.memory.0)),
        fact("system", host.system.clone()),
        fact("ONNX Runtime", host.onnxruntime.clone()),
        fact("HPP", host.hpp.clone()),
    ];
    for device in host.devices.iter().filter(|device| device.provider != Provider::Cpu) {
        let memory = device.memory.map_or(String::new(), |memory| format!(", {}", bytes(memory.0)));
        facts.push(fact(provider_name(device.provider), format!("{}{memory}", device.name)));
    }
    facts
}

fn how(profile: &Profile) -> Vec<(String, String)> {
    let settings = &profile.settings;
    let tokens = |list: &[u64]| list.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
    let mut facts = vec![
        fact("decode at", format!("{} tokens", tokens(&settings.contexts))),
        fact("prefill of", format!("{} tokens", tokens(&settings.prefill_tokens))),
        fact("blocks", if settings.all_blocks { "every block" } else { "one of each class" }),
        fact("runs", if settings.quick { "few (--quick)" } else { "as many as steady medians need" }),
    ];
    facts.push(match &profile.corpus {
        None => fact("corpus", "none was run"),
        Some(corpus) => {
            let all = corpus.prompts_in_all.map_or(String::new(), |all| format!(" of {all}"));
            let (read, written) = (corpus.statistics.prompt_tokens, corpus.statistics.generated_tokens);
            fact("corpus", format!("{}{all} prompts, {read} tokens read, {written} generated", corpus.prompts_done))
        }
    });
    facts
}

fn rates_of(rates: &Machine) -> Vec<(String, String)> {
    let per = |gb_per_s: f64, tflops: f64, launch_us: f64| {
        format!("{} GB/s, {} TFLOP/s, {} µs to start a partition", plain(gb_per_s), plain(tflops), plain(launch_us))
    };
    let cpu = &rates.cpu;
    let mut facts = vec![fact("CPU", per(cpu.memory_gb_per_s, cpu.tflops, cpu.launch_us))];
    for gpu in &rates.gpus {
        facts.push(fact(gpu.name.clone(), per(gpu.memory_gb_per_s, gpu.tflops, gpu.launch_us)));
        let link = &gpu.link;
        let (to, from) = (plain(link.to_device_gb_per_s), plain(link.from_device_gb_per_s));
        facts.push(fact(
            "its link",
            format!("{to} GB/s there, {from} GB/s back, {} µs to start", plain(link.latency_us)),
        ));
    }
    if let Some(disk) = rates.disk {
        facts.push(fact("disk", format!("{} GB/s", plain(disk.read_gb_per_s))));
    }
    facts
}
