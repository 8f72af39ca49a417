//! Opens the cache of KV pages of an engine: its size, its directory, and the fingerprint of everything that decides its bits.

use crate::cli::{KvArgs, RuntimeArgs};
use crate::command::host_need::HostNeed;
use crate::console::Console;
use crate::error::ExecError;
use crate::runtime::{OnnxRuntime, OrtBackend, available_memory};
use hpp_engine::{Engine, StageTelemetry};
use hpp_generate::kv::{DiskSettings, EvictionPolicy, Fingerprint, PageBytes, PageStoreError};
use hpp_generate::{PrefixCache, PrefixCacheSettings};
use hpp_schema::{ByteSize, Plan, Seal};
use std::ffi::OsStr;
use std::sync::Arc;

/// Tokens per page if the user gives no number.
const DEFAULT_PAGE_TOKENS: u64 = 128;
/// Divisor of a host memory limit, the model's ([`HostNeed::limit`]) or that of all models, that gives the part for KV pages.
const SHARE_OF_LIMIT: u64 = 20;
/// Divisor of the free memory that gives the part for KV pages if there is no limit.
const SHARE_OF_FREE: u64 = 10;
/// Most bytes on disk for the pages of all models by default.
const MOST_DISK: u64 = 16 << 30;
/// Most bytes of RAM for pages by default.
const MOST_RAM: u64 = 4 << 30;

impl KvArgs {
    /// Whether the command line asks for a prefix cache. Environment variables do not count: they may be meant for other commands.
    pub fn is_given(&self) -> bool {
        let is_variable = |name, text: &OsStr| std::env::var_os(name).is_some_and(|set| set == text);
        let by_dir = self.kv_dir.as_ref().is_some_and(|dir| !is_variable("HPP_KV_DIR", dir.as_os_str()));
        let others = [
            (self.kv_ram.is_some(), "HPP_KV_RAM"),
            (self.kv_disk.is_some(), "HPP_KV_DISK"),
            (self.kv_policy.is_some(), "HPP_KV_POLICY"),
            (self.kv_page.is_some(), "HPP_KV_PAGE"),
        ];
        by_dir || others.into_iter().any(|(is_given, name)| is_given && std::env::var_os(name).is_none())
    }

    /// Whether pages are saved on disk, for later processes.
    pub fn saves_on_disk(&self) -> bool {
        self.kv_dir.is_some() && self.disk() > 0 && self.kv_ram.is_none_or(|ram| ram.0 > 0)
    }

    /// Most bytes on disk for the pages of all models.
    fn disk(&self) -> u64 {
        self.kv_disk.map_or(MOST_DISK, |asked| asked.0)
    }

    /// Bytes of RAM for pages of a model with this need.
    pub fn ram(&self, need: &HostNeed) -> u64 {
        match self.limit {
            _ if self.kv_ram.is_some() => self.kv_ram.map_or(0, |asked| asked.0),
            Some(all) => self.ram_of(need, all),
            None => default_ram(need, None, available_memory().unwrap_or(0)),
        }
    }

    /// Bytes of RAM for pages if all models together may take `all`.
    pub fn ram_of(&self, need: &HostNeed, all: ByteSize) -> u64 {
        self.kv_ram.map_or_else(|| default_ram(need, Some(all), 0), |asked| asked.0)
    }
}

/// Bytes of RAM for pages: a share of the smaller limit of host memory, the model's or that of all models, or of the free memory if there is no
/// limit. At most what the model's limit leaves.
fn default_ram(need: &HostNeed, all: Option<ByteSize>, free: u64) -> u64 {
    let limit = need.limit.into_iter().chain(all.map(|all| all.0)).min();
    let share = limit.map_or(free / SHARE_OF_FREE, |limit| limit / SHARE_OF_LIMIT);
    share.min(MOST_RAM).min(need.room_for_pages().unwrap_or(u64::MAX))
}

/// A warning if `pages` bytes of KV pages, which the user asked for, take more memory than the plan was made for, or than this process may use.
pub fn warning_of_pages(need: &HostNeed, pages: u64) -> Option<String> {
    let (limit, most) = (need.limit?, need.taken(u64::MAX, pages));
    (most > limit).then(|| {
        let [pages, most, human] = [pages, most, limit].map(|bytes| ByteSize(bytes).human());
        let limit = match need.planned {
            Some(planned) if limit < planned => format!("this process may use {human}"),
            _ => format!("its plan was made for {human} (hpp-split --ram)"),
        };
        format!("with --kv-ram {pages} this model takes up to {most} of host memory, and {limit}")
    })
}

/// What opening a cache needs beside the engine.
pub struct CacheSettings<'a> {
    /// The options of the command line.
    pub args: &'a KvArgs,
    /// Bytes of RAM for pages ([`KvArgs::ram`]).
    pub ram: u64,
    /// Models of the process.
    pub models: u64,
}

/// Opens the cache of an engine. `None` if pages have no RAM, or if the model's states cannot be saved.
pub fn open_cache(
    engine: &Engine<OrtBackend>,
    plan: &Plan,
    runtime: &RuntimeArgs,
    CacheSettings { args, ram, models }: CacheSettings<'_>,
    wake: impl Fn() + Send + Sync + 'static,
    console: &Arc<Console>,
) -> Result<Option<PrefixCache>, ExecError> {
    // A prompt is computed in chunks of a page each, and the plan limits the size of chunks.
    let page_tokens = args.kv_page.unwrap_or(DEFAULT_PAGE_TOKENS).min(engine.chunk()).max(1);
    if let Some(wanted) = args.kv_page.filter(|wanted| *wanted > page_tokens) {
        console.warn(&format!(
            "--kv-page {wanted} is more than the plan's passes take (prefill_chunk): pages have {page_tokens} tokens"
        ));
    }
    if args.kv_dir.is_none() && args.kv_disk.is_some_and(|disk| disk.0 > 0) {
        console.warn("--kv-disk has no effect: pages are saved on disk only with --kv-dir");
    }
    let Some(layout) = engine.page_layout(page_tokens) else {
        if args.kv_dir.is_some() {
            console.warn("this model's states cannot be saved: --kv-dir has no effect");
        }
        return Ok(None);
    };
    let page = PageBytes::memory_for(usize::try_from(layout.bytes()).unwrap_or(usize::MAX));
    if args.kv_ram.is_some_and(|ram| ram.0 == 0) {
        return Ok(None);
    }
    if ram < page {
        if args.kv_ram.is_some() {
            return Err(PageStoreError::TooSmall { limit: ram, page }.into());
        }
        console.warn(&without_pages(ram, page, args));
        return Ok(None);
    }
    let (directory, bytes) = (args.kv_dir.clone().filter(|_| args.disk() > 0), args.disk());
    let disk = directory.map(|directory| DiskSettings { directory, bytes, share: bytes / models.max(1) });
    let settings = PrefixCacheSettings {
        page_tokens: usize::try_from(page_tokens).unwrap_or(usize::MAX),
        ram,
        disk,
        policy: args.kv_policy.unwrap_or(EvictionPolicy::Hybrid),
        fingerprint: fingerprint(engine, plan, runtime, page_tokens, console)?,
    };
    let cache = PrefixCache::open(engine, settings, wake)?;
    if let Some(cache) = &cache {
        let (stats, page) = (cache.stats(), ByteSize(page).human());
        tracing::info!(ram, page, page_tokens, on_disk = stats.disk_pages, "cache of KV pages");
    }
    Ok(cache)
}

/// Says why no pages are kept: one takes `page` bytes, and all of them may take `ram` by default.
fn without_pages(ram: u64, page: u64, args: &KvArgs) -> String {
    let on_disk = if args.kv_dir.is_some() { ", on disk neither" } else { "" };
    format!(
        "no KV pages are kept{on_disk}: one takes {}, and all of them may take {} (a part of the memory limit, at most what the model leaves of it); \
         --kv-ram allows more",
        ByteSize(page).human_rounded_up(),
        ByteSize(ram).human()
    )
}

/// Hashes everything but the tokens that decides the bits of states.
fn fingerprint(
    engine: &Engine<OrtBackend>,
    plan: &Plan,
    runtime: &RuntimeArgs,
    page_tokens: u64,
    console: &Arc<Console>,
) -> Result<Fingerprint, ExecError> {
    let seal = Seal::of(plan).and_then(|seal| serde_json::to_string(&seal)).map_err(ExecError::Fingerprint)?;
    let stages = engine.telemetry().stages;
    let place = |stage: &StageTelemetry| {
        let packs = if stage.packs_weights { "packed" } else { "unpacked" };
        format!("{:?} {} {packs}", stage.provider, stage.processor)
    };
    let places: Vec<String> = stages.iter().map(place).collect();
    let providers = stages.iter().map(|stage| stage.provider);
    let library = OnnxRuntime::open_for(plan, runtime, console)?.backend().results_depend_on(providers);
    let (page, context) = (page_tokens.to_string(), engine.context().to_string());
    Ok(Fingerprint::of([
        ("hpp", env!("CARGO_PKG_VERSION")),
        ("plan", &seal),
        ("places", &places.join(", ")),
        ("library", &library),
        ("page", &page),
        ("context", &context),
    ]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_take_a_share_of_the_smaller_limit_or_of_the_free_memory() {
        let mib = |mib: u64| Some(ByteSize(mib << 20));
        let default = |of_plan: Option<ByteSize>, all, free| {
            let limit = of_plan.map(|limit| limit.0);
            default_ram(&HostNeed { planned: limit, limit, least: 64 << 20 }, all, free)
        };
        assert_eq!(default(mib(20_000), mib(400), 1 << 40), 20 << 20);
        assert_eq!(default(mib(400), mib(20_000), 1 << 40), 20 << 20);
        assert_eq!((default(mib(400), None, 0), default(None, mib(400), 0)), (20 << 20, 20 << 20));
        assert_eq!(default(None, None, 800 << 20), 80 << 20);
        assert_eq!(default(None, None, 1 << 40), MOST_RAM);
        // A model that fills its limit leaves less.
        assert_eq!((default(mib(66), None, 0), default(mib(60), None, 0)), (2 << 20, 0));
    }

    #[test]
    fn pages_beyond_the_plans_limit_get_a_warning() {
        let warning =
            |planned, limit, pages: u64| warning_of_pages(&HostNeed { planned, limit, least: 300 << 20 }, pages << 20);
        let planned = Some(400 << 20);
        assert_eq!([warning(None, None, 1000), warning(planned, planned, 100)], [None, None]);
        let of_plan = warning(planned, planned, 150).unwrap();
        assert!(of_plan.contains("--kv-ram 150 MiB") && of_plan.contains("up to 450 MiB"), "{of_plan}");
        assert!(of_plan.contains("its plan was made for 400 MiB"), "{of_plan}");
        let of_process = warning(planned, Some(380 << 20), 100).unwrap();
        assert!(
            of_process.contains("up to 400 MiB") && of_process.contains("this process may use 380 MiB"),
            "{of_process}"
        );
    }

    /// With as much as the message names, there is room for a page.
    #[test]
    fn the_named_size_of_a_page_suffices() {
        let page = (16 << 20) + 4096;
        let said = without_pages(0, page, &KvArgs::default());
        let size = said.split("one takes ").nth(1).unwrap().split(',').next().unwrap();
        assert!(ByteSize::typed(&size.replace(' ', "")).unwrap().0 >= page, "{said}");
    }
}
