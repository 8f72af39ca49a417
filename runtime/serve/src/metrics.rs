//! Counters, gauges and histograms for Prometheus, by model.

use hpp_generate::kv::StoreStats;
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::sync::atomic::AtomicU64;

/// Upper bounds of the histograms, seconds: from one token of a small model to a long prompt on weights from disk.
const SECONDS: [f64; 14] = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];

/// Upper bounds of the time to restore states, seconds: from one page in RAM to a long conversation on a slow disk.
const RESTORE_SECONDS: [f64; 12] = [0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0];

/// Upper bounds of the number of items in a pass.
const ITEMS: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    model: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct MemoryLabels {
    /// Always `host`.
    memory: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishLabels {
    model: String,
    /// `stop`, `length`, `cancelled`, `failed`, `timeout`, `refused` or `prefetch`.
    outcome: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResponseLabels {
    /// A route of this server, or `other`.
    path: String,
    /// The HTTP status.
    status: u16,
}

/// All metrics of a server.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    responses: Family<ResponseLabels, Counter>,
    requests: Family<FinishLabels, Counter>,
    prompt_tokens: Family<Labels, Counter>,
    cached_tokens: Family<Labels, Counter>,
    generated_tokens: Family<Labels, Counter>,
    passes: Family<Labels, Counter>,
    items: Family<Labels, Histogram, fn() -> Histogram>,
    batched_rows: Family<Labels, Counter>,
    running: Family<Labels, Gauge>,
    waiting: Family<Labels, Gauge>,
    idle_sequences: Family<Labels, Gauge>,
    state_bytes: Family<TierLabels, Gauge>,
    memory_limit: Family<MemoryLabels, Gauge>,
    memory_reclaimed: Family<Labels, Gauge>,
    slowdown: Family<Labels, Gauge<f64, AtomicU64>>,
    weight_bytes: Family<Labels, Counter>,
    first_token: Family<Labels, Histogram, fn() -> Histogram>,
    between_tokens: Family<Labels, Histogram, fn() -> Histogram>,
    queued: Family<Labels, Histogram, fn() -> Histogram>,
    loaded: Family<Labels, Gauge>,
    loads: Family<Labels, Counter>,
    load_errors: Family<Labels, Counter>,
    load_seconds: Family<Labels, Counter<f64, AtomicU64>>,
    cache: CacheFamilies,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TierLabels {
    model: String,
    /// For states: `device`, `ram` or `disk`. For pages: `ram` or `disk`; for hits and misses also `sequence`, a kept sequence.
    tier: String,
}

/// Counts of the stores of KV pages.
#[derive(Clone, Debug)]
struct CacheFamilies {
    pages: Family<TierLabels, Gauge>,
    bytes: Family<TierLabels, Gauge>,
    prompt_ends: Family<Labels, Gauge>,
    hits: Family<TierLabels, Counter>,
    misses: Family<TierLabels, Counter>,
    restored: Family<TierLabels, Histogram, fn() -> Histogram>,
    evictions: Family<TierLabels, Counter>,
    refused: Family<Labels, Counter>,
    written: Family<Labels, Counter>,
    read: Family<Labels, Counter>,
    read_seconds: Family<Labels, Counter<f64, AtomicU64>>,
    errors: Family<Labels, Counter>,
}

/// The counts of one model's store of KV pages.
#[derive(Clone, Debug)]
pub struct CacheMetrics {
    model: String,
    families: CacheFamilies,
    /// The last reported values.
    last: StoreStats,
}

/// Bytes of states by the tier where they lie.
#[derive(Clone, Debug)]
pub struct StateMetrics {
    /// Device memory, of all devices together.
    pub device: Gauge,
    /// Host memory.
    pub ram: Gauge,
    /// Files.
    pub disk: Gauge,
}

/// The metrics of one model.
#[derive(Clone, Debug)]
pub struct ModelMetrics {
    model: String,
    requests: Family<FinishLabels, Counter>,
    /// Prompt tokens of requests that were started.
    pub prompt_tokens: Counter,
    /// Of these, tokens whose states were reused.
    pub cached_tokens: Counter,
    /// Tokens generated.
    pub generated_tokens: Counter,
    /// Passes over the weights.
    pub passes: Counter,
    /// Requests for which one pass computes something.
    pub items: Histogram,
    /// Tokens computed as rows of a batch of several requests.
    pub batched_rows: Counter,
    /// Requests in the batch.
    pub running: Gauge,
    /// Requests in the queue.
    pub waiting: Gauge,
    /// Sequences of answered requests whose states are kept.
    pub idle_sequences: Gauge,
    /// The states of running and of idle sequences.
    pub states: StateMetrics,
    /// Host memory that all models together may take now, bytes. All models share this gauge.
    pub memory_limit: Gauge,
    /// Host memory that was reclaimed from the model because the limit was lowered, bytes.
    pub memory_reclaimed: Gauge,
    /// Ratio of the time of recent passes to the planned time.
    pub slowdown: Gauge<f64, AtomicU64>,
    /// Weights read from disk or copied to a device, bytes.
    pub weight_bytes: Counter,
    /// Seconds from the arrival of a request to its first token.
    pub first_token: Histogram,
    /// Seconds between two tokens of a request.
    pub between_tokens: Histogram,
    /// Seconds from the arrival of a request to its first pass.
    pub queued: Histogram,
    /// 1 while its engine is loaded, else 0.
    pub loaded: Gauge,
    /// Loads of its engine.
    pub loads: Counter,
    /// Loads that failed.
    pub load_errors: Counter,
    /// Total seconds of the loads that did not fail.
    pub load_seconds: Counter<f64, AtomicU64>,
    /// Seconds from the look-up of a request's pages until its states are restored, if all pages were in RAM.
    pub restored_from_ram: Histogram,
    /// Seconds from the look-up of a request's pages until its states are restored, if it waited for pages from disk.
    pub restored_from_disk: Histogram,
    /// The cache of KV pages.
    pub cache: CacheMetrics,
}

impl Default for Metrics {
    fn default() -> Self {
        Metrics::new()
    }
}

impl Metrics {
    /// All metrics, at zero.
    pub fn new() -> Self {
        let histogram: fn() -> Histogram = || Histogram::new(SECONDS);
        let mut this = Metrics {
            registry: Registry::default(),
            responses: Family::default(),
            requests: Family::default(),
            prompt_tokens: Family::default(),
            cached_tokens: Family::default(),
            generated_tokens: Family::default(),
            passes: Family::default(),
            items: Family::new_with_constructor(|| Histogram::new(ITEMS)),
            batched_rows: Family::default(),
            running: Family::default(),
            waiting: Family::default(),
            idle_sequences: Family::default(),
            state_bytes: Family::default(),
            memory_limit: Family::default(),
            memory_reclaimed: Family::default(),
            slowdown: Family::default(),
            weight_bytes: Family::default(),
            first_token: Family::new_with_constructor(histogram),
            between_tokens: Family::new_with_constructor(histogram),
            queued: Family::new_with_constructor(histogram),
            loaded: Family::default(),
            loads: Family::default(),
            load_errors: Family::default(),
            load_seconds: Family::default(),
            cache: CacheFamilies::new(),
        };
        let registry = &mut this.registry;
        let help = "HTTP responses by route and status, those to requests that no model saw included";
        registry.register("hpp_http_responses", help, this.responses.clone());
        let help = "Answers by outcome: each choice of a request, and each text of one for embeddings";
        registry.register("hpp_requests", help, this.requests.clone());
        registry.register(
            "hpp_prompt_tokens",
            "Prompt tokens of requests that were started",
            this.prompt_tokens.clone(),
        );
        registry.register("hpp_cached_tokens", "Prompt tokens whose states were reused", this.cached_tokens.clone());
        registry.register("hpp_generated_tokens", "Generated tokens", this.generated_tokens.clone());
        registry.register("hpp_passes", "Passes over the weights", this.passes.clone());
        let help = "Requests of which a pass computes something";
        registry.register("hpp_items_per_pass", help, this.items.clone());
        let help = "Tokens computed as rows of a batch of several requests";
        registry.register("hpp_batched_rows", help, this.batched_rows.clone());
        registry.register("hpp_requests_running", "Requests in the batch", this.running.clone());
        registry.register("hpp_requests_waiting", "Requests in the queue", this.waiting.clone());
        registry.register(
            "hpp_idle_sequences",
            "Answered sequences whose states are kept",
            this.idle_sequences.clone(),
        );
        let state_bytes = this.state_bytes.clone();
        let help = "KV caches and other states of running and kept sequences, in a tier";
        registry.register_with_unit("hpp_state", help, Unit::Bytes, state_bytes);
        let limit = this.memory_limit.clone();
        registry.register_with_unit("hpp_memory_limit", "Memory that all models may take now", Unit::Bytes, limit);
        let reclaimed = this.memory_reclaimed.clone();
        let help = "Host memory that was reclaimed from a model because the limit was lowered";
        registry.register_with_unit("hpp_memory_reclaimed", help, Unit::Bytes, reclaimed);
        let help = "Time of recent passes over the planned time, or the usual time if the plan was not measured";
        registry.register("hpp_slowdown", help, this.slowdown.clone());
        let weight_bytes = this.weight_bytes.clone();
        registry.register_with_unit("hpp_weights_streamed", "Weights read or copied", Unit::Bytes, weight_bytes);
        let first_token = this.first_token.clone();
        registry.register_with_unit(
            "hpp_time_to_first_token",
            "From arrival to first token",
            Unit::Seconds,
            first_token,
        );
        let between = this.between_tokens.clone();
        registry.register_with_unit("hpp_time_between_tokens", "Between two tokens", Unit::Seconds, between);
        let queued = this.queued.clone();
        registry.register_with_unit("hpp_time_in_queue", "From arrival to the first pass", Unit::Seconds, queued);
        registry.register("hpp_model_loaded", "1 while the model is loaded", this.loaded.clone());
        registry.register("hpp_model_loads", "Loads of the model", this.loads.clone());
        registry.register("hpp_model_load_errors", "Loads of the model that failed", this.load_errors.clone());
        let load_seconds = this.load_seconds.clone();
        registry.register_with_unit("hpp_model_load_time", "Total time of the loads", Unit::Seconds, load_seconds);
        this.cache.register(registry);
        this
    }

    /// The metrics of a model.
    pub fn model(&self, name: &str) -> ModelMetrics {
        let labels = Labels { model: name.to_owned() };
        let tier = |tier: &str| TierLabels { model: name.to_owned(), tier: tier.to_owned() };
        let restored = |place: &str| self.cache.restored.get_or_create(&tier(place)).clone();
        let states = |place: &str| self.state_bytes.get_or_create(&tier(place)).clone();
        ModelMetrics {
            model: name.to_owned(),
            requests: self.requests.clone(),
            prompt_tokens: self.prompt_tokens.get_or_create(&labels).clone(),
            cached_tokens: self.cached_tokens.get_or_create(&labels).clone(),
            generated_tokens: self.generated_tokens.get_or_create(&labels).clone(),
            passes: self.passes.get_or_create(&labels).clone(),
            items: self.items.get_or_create(&labels).clone(),
            batched_rows: self.batched_rows.get_or_create(&labels).clone(),
            running: self.running.get_or_create(&labels).clone(),
            waiting: self.waiting.get_or_create(&labels).clone(),
            idle_sequences: self.idle_sequences.get_or_create(&labels).clone(),
            states: StateMetrics { device: states("device"), ram: states("ram"), disk: states("disk") },
            memory_limit: self.memory_limit.get_or_create(&MemoryLabels { memory: "host".to_owned() }).clone(),
            memory_reclaimed: self.memory_reclaimed.get_or_create(&labels).clone(),
            slowdown: self.slowdown.get_or_create(&labels).clone(),
            weight_bytes: self.weight_bytes.get_or_create(&labels).clone(),
            first_token: self.first_token.get_or_create(&labels).clone(),
            between_tokens: self.between_tokens.get_or_create(&labels).clone(),
            queued: self.queued.get_or_create(&labels).clone(),
            loaded: self.loaded.get_or_create(&labels).clone(),
            loads: self.loads.get_or_create(&labels).clone(),
            load_errors: self.load_errors.get_or_create(&labels).clone(),
            load_seconds: self.load_seconds.get_or_create(&labels).clone(),
            restored_from_ram: restored("ram"),
            restored_from_disk: restored("disk"),
            cache: CacheMetrics { model: name.to_owned(), families: self.cache.clone(), last: StoreStats::default() },
        }
    }

    /// Counts a response of a route.
    pub fn responded(&self, path: &str, status: u16) {
        self.responses.get_or_create(&ResponseLabels { path: path.to_owned(), status }).inc();
    }

    /// All metrics in the text format of OpenMetrics.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

impl ModelMetrics {
    /// Counts an answer that ended with this outcome. A request for several answers counts once for each.
    pub fn ended(&self, outcome: &str) {
        let labels = FinishLabels { model: self.model.clone(), outcome: outcome.to_owned() };
        self.requests.get_or_create(&labels).inc();
    }

    /// Sets to zero the gauges that have no meaning while the engine is not loaded.
    pub fn unloaded(&self) {
        let StateMetrics { device, ram, disk } = &self.states;
        for gauge in [&self.running, &self.idle_sequences, device, ram, disk] {
            gauge.set(0);
        }
        self.cache.unloaded();
    }
}

impl CacheFamilies {
    fn new() -> Self {
        CacheFamilies {
            pages: Family::default(),
            bytes: Family::default(),
            prompt_ends: Family::default(),
            hits: Family::default(),
            misses: Family::default(),
            restored: Family::new_with_constructor(|| Histogram::new(RESTORE_SECONDS)),
            evictions: Family::default(),
            refused: Family::default(),
            written: Family::default(),
            read: Family::default(),
            read_seconds: Family::default(),
            errors: Family::default(),
        }
    }

    fn register(&self, registry: &mut Registry) {
        registry.register("hpp_kv_pages", "KV pages in a tier; those in RAM may be on disk too", self.pages.clone());
        registry.register_with_unit("hpp_kv", "KV pages in a tier", Unit::Bytes, self.bytes.clone());
        let help = "States and logits of the last tokens of prompts in RAM, beside the KV pages";
        registry.register_with_unit("hpp_kv_prompt_end", help, Unit::Bytes, self.prompt_ends.clone());
        let help = "Whole KV pages of prompts found in a tier; the tier sequence is the states of a kept sequence";
        registry.register("hpp_kv_hits", help, self.hits.clone());
        let help = "KV pages that prompts found neither in a tier nor in those above it";
        registry.register("hpp_kv_misses", help, self.misses.clone());
        let help = "From the look-up of a prompt's KV pages to the restored states; by the slowest tier";
        registry.register_with_unit("hpp_kv_restore", help, Unit::Seconds, self.restored.clone());
        registry.register("hpp_kv_evictions", "KV pages evicted from a tier", self.evictions.clone());
        registry.register("hpp_kv_refused", "KV pages that found no room in RAM, or on disk", self.refused.clone());
        registry.register("hpp_kv_written_pages", "KV pages written to disk", self.written.clone());
        registry.register("hpp_kv_read_pages", "KV pages read from disk", self.read.clone());
        let read_seconds = self.read_seconds.clone();
        registry.register_with_unit("hpp_kv_read_time", "Total time of the reads", Unit::Seconds, read_seconds);
        registry.register("hpp_kv_errors", "Reads and writes of KV pages that failed", self.errors.clone());
    }
}

impl CacheMetrics {
    /// Sets the gauges of pages in RAM to zero.
    fn unloaded(&self) {
        let ram = TierLabels { model: self.model.clone(), tier: "ram".to_owned() };
        for pages in [&self.families.pages, &self.families.bytes] {
            pages.get_or_create(&ram).set(0);
        }
        self.families.prompt_ends.get_or_create(&Labels { model: self.model.clone() }).set(0);
    }

    /// Counts a prompt whose kept sequence had `found` whole pages and lacked `missing`.
    pub fn count_in_sequence(&self, found: usize, missing: usize) {
        let sequence = TierLabels { model: self.model.clone(), tier: "sequence".to_owned() };
        self.families.hits.get_or_create(&sequence).inc_by(found as u64);
        self.families.misses.get_or_create(&sequence).inc_by(missing as u64);
    }

    /// Adds what the store has counted since the last report. `prompt_ends`: bytes of RAM that prompt ends take.
    pub fn report(&mut self, now: &StoreStats, prompt_ends: u64) {
        let (families, last) = (&self.families, &self.last);
        let model = Labels { model: self.model.clone() };
        let tier = |tier: &str| TierLabels { model: self.model.clone(), tier: tier.to_owned() };
        let (ram, disk) = (tier("ram"), tier("disk"));
        let number = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        families.pages.get_or_create(&ram).set(number(now.ram_pages));
        families.pages.get_or_create(&disk).set(number(now.disk_pages));
        families.bytes.get_or_create(&ram).set(number(now.ram_bytes));
        families.bytes.get_or_create(&disk).set(number(now.disk_bytes));
        families.prompt_ends.get_or_create(&model).set(number(prompt_ends));
        families.hits.get_or_create(&ram).inc_by(now.ram_hits - last.ram_hits);
        families.hits.get_or_create(&disk).inc_by(now.disk_hits - last.disk_hits);
        // Pages found on disk were missing in RAM.
        let below_ram = |stats: &StoreStats| stats.disk_hits + stats.misses;
        families.misses.get_or_create(&ram).inc_by(below_ram(now) - below_ram(last));
        families.misses.get_or_create(&disk).inc_by(now.misses - last.misses);
        families.evictions.get_or_create(&ram).inc_by(now.ram_evictions - last.ram_evictions);
        families.evictions.get_or_create(&disk).inc_by(now.disk_evictions - last.disk_evictions);
        families.refused.get_or_create(&model).inc_by(now.refused - last.refused);
        families.written.get_or_create(&model).inc_by(now.writes - last.writes);
        families.read.get_or_create(&model).inc_by(now.reads - last.reads);
        let seconds = (now.read_micros - last.read_micros) as f64 / 1e6;
        families.read_seconds.get_or_create(&model).inc_by(seconds);
        let errors = |stats: &StoreStats| stats.read_errors + stats.write_errors;
        families.errors.get_or_create(&model).inc_by(errors(now) - errors(last));
        self.last = *now;
    }
}
