//! Counters, gauges and histograms for Prometheus, one of each for every model.

use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Upper bounds of the histograms, seconds: from a token of a small model to a long prompt from disk.
const SECONDS: [f64; 14] = [0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    model: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishLabels {
    model: String,
    /// `stop`, `length`, `cancelled`, `failed`, `timeout` or `refused`.
    outcome: String,
}

/// All metrics of a server.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    requests: Family<FinishLabels, Counter>,
    prompt_tokens: Family<Labels, Counter>,
    cached_tokens: Family<Labels, Counter>,
    generated_tokens: Family<Labels, Counter>,
    passes: Family<Labels, Counter>,
    running: Family<Labels, Gauge>,
    waiting: Family<Labels, Gauge>,
    idle_sequences: Family<Labels, Gauge>,
    state_bytes: Family<Labels, Gauge>,
    weight_bytes: Family<Labels, Counter>,
    first_token: Family<Labels, Histogram, fn() -> Histogram>,
    between_tokens: Family<Labels, Histogram, fn() -> Histogram>,
}

/// The metrics of one model.
#[derive(Clone, Debug)]
pub struct ModelMetrics {
    model: String,
    requests: Family<FinishLabels, Counter>,
    /// Prompt tokens of requests that were started.
    pub prompt_tokens: Counter,
    /// Of these, tokens whose states were there already.
    pub cached_tokens: Counter,
    /// Tokens generated.
    pub generated_tokens: Counter,
    /// Passes over the weights.
    pub passes: Counter,
    /// Requests in the batch.
    pub running: Gauge,
    /// Requests in the queue.
    pub waiting: Gauge,
    /// Sequences of answered requests whose states are kept.
    pub idle_sequences: Gauge,
    /// Bytes of states, of running and of idle sequences.
    pub state_bytes: Gauge,
    /// Weights brought from disk or to a device, bytes.
    pub weight_bytes: Counter,
    /// Seconds from the arrival of a request to its first token.
    pub first_token: Histogram,
    /// Seconds between two tokens of a request.
    pub between_tokens: Histogram,
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
            requests: Family::default(),
            prompt_tokens: Family::default(),
            cached_tokens: Family::default(),
            generated_tokens: Family::default(),
            passes: Family::default(),
            running: Family::default(),
            waiting: Family::default(),
            idle_sequences: Family::default(),
            state_bytes: Family::default(),
            weight_bytes: Family::default(),
            first_token: Family::new_with_constructor(histogram),
            between_tokens: Family::new_with_constructor(histogram),
        };
        let registry = &mut this.registry;
        registry.register("hpp_requests", "Requests by outcome", this.requests.clone());
        registry.register(
            "hpp_prompt_tokens",
            "Prompt tokens of requests that were started",
            this.prompt_tokens.clone(),
        );
        registry.register("hpp_cached_tokens", "Prompt tokens whose states were kept", this.cached_tokens.clone());
        registry.register("hpp_generated_tokens", "Generated tokens", this.generated_tokens.clone());
        registry.register("hpp_passes", "Passes over the weights", this.passes.clone());
        registry.register("hpp_requests_running", "Requests in the batch", this.running.clone());
        registry.register("hpp_requests_waiting", "Requests in the queue", this.waiting.clone());
        registry.register(
            "hpp_idle_sequences",
            "Answered sequences whose states are kept",
            this.idle_sequences.clone(),
        );
        let state_bytes = this.state_bytes.clone();
        registry.register_with_unit("hpp_state", "KV caches and other states", Unit::Bytes, state_bytes);
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
        this
    }

    /// The metrics of a model.
    pub fn model(&self, name: &str) -> ModelMetrics {
        let labels = Labels { model: name.to_owned() };
        ModelMetrics {
            model: name.to_owned(),
            requests: self.requests.clone(),
            prompt_tokens: self.prompt_tokens.get_or_create(&labels).clone(),
            cached_tokens: self.cached_tokens.get_or_create(&labels).clone(),
            generated_tokens: self.generated_tokens.get_or_create(&labels).clone(),
            passes: self.passes.get_or_create(&labels).clone(),
            running: self.running.get_or_create(&labels).clone(),
            waiting: self.waiting.get_or_create(&labels).clone(),
            idle_sequences: self.idle_sequences.get_or_create(&labels).clone(),
            state_bytes: self.state_bytes.get_or_create(&labels).clone(),
            weight_bytes: self.weight_bytes.get_or_create(&labels).clone(),
            first_token: self.first_token.get_or_create(&labels).clone(),
            between_tokens: self.between_tokens.get_or_create(&labels).clone(),
        }
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
    /// Counts a request that ended so.
    pub fn ended(&self, outcome: &str) {
        let labels = FinishLabels { model: self.model.clone(), outcome: outcome.to_owned() };
        self.requests.get_or_create(&labels).inc();
    }
}
