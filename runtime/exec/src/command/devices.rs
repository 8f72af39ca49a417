//! `hpp-exec devices`: which ONNX Runtime is here, what it can run on, and why the rest is not to be had.

use super::Around;
use crate::cli::DevicesArgs;
use crate::error::ExecError;
use crate::machine::Machine;
use crate::report::table;
use hpp_backend::{ProviderReport, ProviderSource, Report};
use hpp_io::{show, show_json};
use hpp_schema::ByteSize;
use serde::Serialize;
use std::fmt::Write;

/// Looks and prints.
pub fn run(args: &DevicesArgs, around: &mut Around<'_>) -> Result<u8, ExecError> {
    let report = Machine::open(&args.library, around.console)?.devices();
    if args.json {
        show_json(around.out, &Found::from(&report))?;
    } else {
        show(around.out, &text(&report))?;
    }
    Ok(0)
}

/// What `--json` prints.
#[derive(Serialize)]
struct Found<'a> {
    library: String,
    version: &'a str,
    looked_at: Vec<Place>,
    threads: usize,
    memory_total: Option<u64>,
    memory_available: Option<u64>,
    cuda_driver: Option<&'a str>,
    providers: Vec<FoundProvider<'a>>,
    built_in: &'a [String],
}

#[derive(Serialize)]
struct Place {
    origin: String,
    path: Option<String>,
    problem: Option<String>,
}

#[derive(Serialize)]
struct FoundProvider<'a> {
    name: &'static str,
    usable: bool,
    problem: Option<&'a str>,
    source: &'static str,
    path: Option<String>,
    version: Option<&'a str>,
    devices: Vec<FoundDevice<'a>>,
}

#[derive(Serialize)]
struct FoundDevice<'a> {
    plan_name: &'a str,
    description: &'a str,
    memory_total: Option<u64>,
    memory_free: Option<u64>,
}

impl<'a> From<&'a Report> for Found<'a> {
    fn from(report: &'a Report) -> Self {
        let place = |tried: &hpp_backend::discover::Tried| Place {
            origin: tried.origin.to_string(),
            path: tried.path.as_ref().map(|p| p.display().to_string()),
            problem: tried.problem.clone(),
        };
        Found {
            library: report.library.display().to_string(),
            version: &report.version,
            looked_at: report.tried.iter().map(place).collect(),
            threads: report.threads,
            memory_total: report.memory.0,
            memory_available: report.memory.1,
            cuda_driver: report.cuda_driver.as_deref(),
            providers: report.providers.iter().map(FoundProvider::from).collect(),
            built_in: &report.built_in,
        }
    }
}

impl<'a> From<&'a ProviderReport> for FoundProvider<'a> {
    fn from(provider: &'a ProviderReport) -> Self {
        let (source, path) = match &provider.source {
            ProviderSource::BuiltIn => ("built in", None),
            ProviderSource::Plugin(path) => ("plugin", Some(path.display().to_string())),
            ProviderSource::Absent => ("absent", None),
        };
        let devices = provider.devices.iter().map(|device| FoundDevice {
            plan_name: &device.plan_name,
            description: &device.description,
            memory_total: device.total,
            memory_free: device.free,
        });
        FoundProvider {
            name: provider.name,
            usable: provider.problem.is_none(),
            problem: provider.problem.as_deref(),
            source,
            path,
            version: provider.version.as_deref(),
            devices: devices.collect(),
        }
    }
}

fn text(report: &Report) -> String {
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
        provider.devices.iter().map(|device| {
            let name =
                format!("{}{}", provider.name, provider.version.as_ref().map_or(String::new(), |v| format!(" {v}")));
            vec![device.plan_name.clone(), name, human(device.total), human(device.free), device.description.clone()]
        })
    });
    out.push_str(&table(&["device", "provider", "memory", "free", "what it is"], rows));
    for provider in &report.providers {
        if let Some(problem) = &provider.problem {
            let _ = writeln!(out, "\n{} cannot be used: {problem}", provider.name);
        }
    }
    let _ = writeln!(out, "\nbuilt into the library: {}", report.built_in.join(", "));
    out
}
