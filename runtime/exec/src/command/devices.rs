//! `hpp-exec devices`: the ONNX Runtime library, its execution providers and devices, and why a provider cannot be used.

use super::CommandContext;
use crate::cli::DevicesArgs;
use crate::error::ExecError;
use crate::report::table;
use crate::runtime::OnnxRuntime;
use hpp_backend::{ProviderReport, ProviderSource, SystemReport};
use hpp_io::{show, show_json};
use hpp_schema::{ByteSize, Evidence};
use serde::Serialize;
use std::fmt::Write;

/// Opens the library and prints what it offers.
pub fn run(args: &DevicesArgs, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    let report = OnnxRuntime::open(&args.library, ctx.console)?.devices();
    if args.json {
        show_json(ctx.out, &DevicesReport::from(&report))?;
    } else {
        show(ctx.out, &text(&report))?;
    }
    Ok(0)
}

/// The object that `--json` prints.
#[derive(Serialize)]
struct DevicesReport<'a> {
    library: String,
    version: &'a str,
    looked_at: Vec<LibraryCandidate>,
    threads: usize,
    memory_total: Option<u64>,
    memory_available: Option<u64>,
    cuda_driver: Option<&'a str>,
    providers: Vec<ProviderEntry<'a>>,
    built_in: &'a [String],
}

#[derive(Serialize)]
struct LibraryCandidate {
    origin: String,
    path: Option<String>,
    problem: Option<String>,
}

#[derive(Serialize)]
struct ProviderEntry<'a> {
    id: &'a str,
    name: &'a str,
    ort_name: Option<&'a str>,
    tested: &'static str,
    usable: bool,
    problem: Option<&'a str>,
    source: &'static str,
    path: Option<String>,
    version: Option<&'a str>,
    devices: Vec<DeviceEntry<'a>>,
}

#[derive(Serialize)]
struct DeviceEntry<'a> {
    plan_name: &'a str,
    r#type: &'static str,
    vendor: Option<&'a str>,
    description: &'a str,
    memory_total: Option<u64>,
    memory_free: Option<u64>,
}

impl<'a> From<&'a SystemReport> for DevicesReport<'a> {
    fn from(report: &'a SystemReport) -> Self {
        let candidate = |tried: &hpp_backend::discover::TriedLibrary| LibraryCandidate {
            origin: tried.origin.to_string(),
            path: tried.path.as_ref().map(|p| p.display().to_string()),
            problem: tried.problem.clone(),
        };
        DevicesReport {
            library: report.library.display().to_string(),
            version: &report.version,
            looked_at: report.tried.iter().map(candidate).collect(),
            threads: report.threads,
            memory_total: report.memory.0,
            memory_available: report.memory.1,
            cuda_driver: report.cuda_driver.as_deref(),
            providers: report.providers.iter().map(ProviderEntry::from).collect(),
            built_in: &report.built_in,
        }
    }
}

impl<'a> From<&'a ProviderReport> for ProviderEntry<'a> {
    fn from(provider: &'a ProviderReport) -> Self {
        let (source, path) = match &provider.source {
            ProviderSource::BuiltIn => ("built in", None),
            ProviderSource::Plugin(path) => ("plugin", Some(path.display().to_string())),
            ProviderSource::Absent => ("absent", None),
        };
        let devices = provider.devices.iter().map(|device| DeviceEntry {
            plan_name: &device.plan_name,
            r#type: device.kind,
            vendor: device.vendor.as_deref(),
            description: &device.description,
            memory_total: device.total,
            memory_free: device.free,
        });
        ProviderEntry {
            id: provider.provider.id(),
            name: provider.name(),
            ort_name: provider.ort_name.as_deref(),
            tested: tested(provider.evidence),
            usable: provider.problem.is_none(),
            problem: provider.problem.as_deref(),
            source,
            path,
            version: provider.version.as_deref(),
            devices: devices.collect(),
        }
    }
}

fn text(report: &SystemReport) -> String {
    let mut out = format!("ONNX Runtime {}, {} threads\n", report.version, report.threads);
    for tried in &report.tried {
        let _ = writeln!(out, "  {tried}");
    }
    let human = |bytes: Option<u64>| bytes.map_or("unknown".to_owned(), |n| ByteSize(n).human());
    let _ = writeln!(out, "\nmemory: {}, {} available", human(report.memory.0), human(report.memory.1));
    if let Some(driver) = &report.cuda_driver {
        let _ = writeln!(out, "NVIDIA driver: runs CUDA up to {driver}");
    }
    out.push('\n');
    let rows = report.providers.iter().flat_map(|provider| {
        let version = provider.version.as_ref().map_or(String::new(), |version| format!(" {version}"));
        let name = format!("{}{version}", provider.name());
        provider.devices.iter().map(move |device| {
            let [total, free] = [device.total, device.free].map(human);
            let text = [&device.plan_name, device.kind, &name, &total, &free];
            let vendor = device.vendor.clone().unwrap_or_default();
            text.map(str::to_owned).into_iter().chain([vendor, device.description.clone()]).collect::<Vec<_>>()
        })
    });
    out.push_str(&table(&["device", "type", "provider", "memory", "free", "vendor", "description"], rows));
    let (absent, failed): (Vec<_>, Vec<_>) = report
        .providers
        .iter()
        .filter_map(|provider| Some((provider, provider.problem.as_ref()?)))
        .partition(|(provider, _)| provider.source == ProviderSource::Absent);
    for (provider, problem) in failed {
        let _ = writeln!(out, "\n{} ({}) cannot be used: {problem}", provider.name(), provider.provider.id());
    }
    for provider in report.providers.iter().filter(|provider| provider.problem.is_none()) {
        let name = provider.name();
        let _ = match provider.evidence {
            Evidence::NeverRun => writeln!(out, "\nnote: HPP has never been run with {name}"),
            Evidence::ByHand => {
                writeln!(out, "\nnote: HPP was run with {name} by hand on one machine; its tests do not cover it")
            }
            Evidence::InCi | Evidence::WhereOffered => Ok(()),
        };
    }
    out.push('\n');
    for (provider, problem) in absent {
        let _ = writeln!(out, "{} ({}) is not here: {problem}", provider.name(), provider.provider.id());
    }
    let _ = writeln!(out, "built into the library: {}", report.built_in.join(", "));
    out
}

/// How far HPP's use of a provider was tested, as JSON has it.
fn tested(evidence: Evidence) -> &'static str {
    match evidence {
        Evidence::InCi => "in every run of the tests",
        Evidence::WhereOffered => "where its plug-in offers a device",
        Evidence::ByHand => "by hand on one machine",
        Evidence::NeverRun => "never run",
    }
}
