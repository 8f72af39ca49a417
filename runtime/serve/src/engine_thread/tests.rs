//! The thread of an engine on a mock backend: which runs the engine does while answers are in progress.

use super::*;
use crate::metrics::Metrics;
use hpp_engine::mock::MockBackend;
use hpp_engine::port::Tensor;
use hpp_generate::adapt::EngineShare;
use hpp_generate::kv::{EvictionPolicy, Fingerprint};
use hpp_generate::sampling::SamplingOverrides;
use hpp_generate::speculate::{DraftLength, DraftOrigin};
use hpp_generate::{GenerationRequest, ModelInputs, PrefixCache, PrefixCacheSettings};
use hpp_schema::{FileRole, Plan, SamplingDefaults};
use std::io::Write;
use std::rc::Rc;
use std::sync::{Barrier, Mutex};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

#[path = "../../../engine/tests/support/mod.rs"]
mod toy;

/// Tokens of a chunk.
const CHUNK: usize = 4;

struct Ignored;

impl EngineEvents for Ignored {
    fn loaded(&self, result: Result<LoadReport, LoadError>) {
        result.unwrap();
    }

    fn idle(&self) {}

    fn ending(&self) {}

    fn ended(&self) {}
}

/// A thread with the toy model. `runs` has the tokens of each run of its first partition. Before a run for which `waits` returns true, the thread
/// waits at `gate` twice.
struct ToyThread {
    queue: EngineQueue,
    thread: std::thread::JoinHandle<()>,
    runs: Arc<Mutex<Vec<usize>>>,
    gate: Arc<Barrier>,
    metrics: Metrics,
}

impl ToyThread {
    /// A thread with eight sequences that waits before the second run with one token.
    fn start() -> Self {
        Self::start_with(8, second_single, Drafts::default)
    }

    /// A thread with this many sequences.
    fn start_with(sequences: u64, waits: fn(&[usize]) -> bool, drafts: fn() -> Drafts<MockBackend>) -> Self {
        let (runs, gate) = (Arc::<Mutex<Vec<usize>>>::default(), Arc::new(Barrier::new(2)));
        let (recorded, meets) = (Arc::clone(&runs), Arc::clone(&gate));
        let load = move |_| {
            let toy = load(Arc::clone(&recorded), Arc::clone(&meets), waits);
            let reclaimable = Reclaimable { sequences, ..toy.reclaimable };
            Ok(LoadedEngine { reclaimable, drafts: drafts(), ..toy })
        };
        ToyThread { runs, ..Self::start_loading(load, gate) }
    }

    /// A thread with the engine that `load` returns.
    fn start_loading(
        load: impl Fn(LoadContext) -> Result<LoadedEngine<MockBackend>, LoadError> + Send + Sync + 'static,
        gate: Arc<Barrier>,
    ) -> Self {
        let metrics = Metrics::new();
        let setup = EngineSetup {
            metrics: metrics.model("toy"),
            occupancy: Arc::default(),
            stop: Arc::default(),
            cancel: CancelHandle::new(),
        };
        let (queue, thread) = start::<MockBackend>(Arc::new(load), setup, Ignored).unwrap();
        ToyThread { queue, thread, runs: Arc::default(), gate, metrics }
    }

    /// Waits until a metric has a value.
    fn wait_for(&self, metric: &str, is_right: impl Fn(f64) -> bool) {
        let value = || {
            let text = self.metrics.to_text();
            let value = text.lines().find_map(|line| line.strip_prefix(metric)?.trim().parse().ok());
            value.unwrap_or(0.0)
        };
        let started = Instant::now();
        while !is_right(value()) {
            assert!(started.elapsed() < Duration::from_secs(60), "{metric} stays {}", value());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Asks for `answer` tokens after a prompt.
    fn ask(&self, prompt: Vec<u32>, answer: u64) -> UnboundedReceiver<RequestEvent> {
        self.ask_for_logprobs(prompt, answer, None)
    }

    fn ask_for_logprobs(
        &self,
        prompt: Vec<u32>,
        answer: u64,
        top_logprobs: Option<usize>,
    ) -> UnboundedReceiver<RequestEvent> {
        self.submit(prompt, answer, top_logprobs, false)
    }

    /// Asks for the logits of a prompt's tokens and one token after them.
    fn score(&self, prompt: Vec<u32>) -> UnboundedReceiver<RequestEvent> {
        self.submit(prompt, 1, None, true)
    }

    fn submit(
        &self,
        prompt: Vec<u32>,
        answer: u64,
        top_logprobs: Option<usize>,
        prompt_logits: bool,
    ) -> UnboundedReceiver<RequestEvent> {
        let request = GenerationRequest { prompt_logits, ..greedy(prompt, answer) };
        let task = GenerateTask { request, top_logprobs, hints: CacheHints::default() };
        self.submit_task(EngineTask::Generate(Box::new(task)))
    }

    /// Asks for one token after a prompt, in a request of this priority that has waited for `waited` already.
    fn ask_after(&self, prompt: Vec<u32>, priority: i32, waited: Duration) -> UnboundedReceiver<RequestEvent> {
        let hints = CacheHints { priority, ..CacheHints::default() };
        let task = GenerateTask { request: greedy(prompt, 1), top_logprobs: None, hints };
        let arrived = Instant::now().checked_sub(waited).expect("the clock began before");
        self.submit_arrived(EngineTask::Generate(Box::new(task)), arrived)
    }

    /// Asks for the embedding of tokens.
    fn embed(&self, tokens: Vec<u32>) -> UnboundedReceiver<RequestEvent> {
        self.submit_task(EngineTask::Embed(tokens))
    }

    fn submit_task(&self, task: EngineTask) -> UnboundedReceiver<RequestEvent> {
        self.submit_arrived(task, Instant::now())
    }

    fn submit_arrived(&self, task: EngineTask, arrived: Instant) -> UnboundedReceiver<RequestEvent> {
        let (events, receiver) = unbounded_channel();
        let client = Client { events, deadline: None, arrived };
        let place = QueuePlace::take(&Arc::default(), 1, 1).unwrap().remove(0);
        let submission = Submission { task, client };
        self.queue.submit(Queued { submission, place });
        receiver
    }
}

/// A request for the most likely tokens after a prompt.
fn greedy(prompt: Vec<u32>, max_new_tokens: u64) -> GenerationRequest {
    GenerationRequest {
        prompt,
        max_new_tokens,
        eos_token_ids: vec![],
        stop: vec![],
        sampling: SamplingOverrides::default().resolve(&SamplingDefaults::default()),
        grammar: None,
        visible_tokens: vec![],
        prompt_logits: false,
    }
}

/// The loaded toy model.
pub(crate) fn load_toy() -> LoadedEngine<MockBackend> {
    load(Arc::default(), Arc::new(Barrier::new(1)), |_| false)
}

/// Whether the last run is the second with one token.
fn second_single(runs: &[usize]) -> bool {
    runs.last() == Some(&1) && runs.iter().filter(|tokens| **tokens == 1).count() == 2
}

/// The toy model, whose hidden states are an output of the model, so that it gives embeddings.
fn toy_with_hidden_states() -> toy::Toy {
    let logits = "    - { name: logits, dtype: float32, shape: [batch, rows, 16], role: logits }\n";
    let hidden = "    - { name: hidden_states, dtype: float32, shape: [batch, seq, 1], role: free }\n";
    let yaml = include_str!("../../../engine/tests/support/toy.yaml").replace("hidden.0", "hidden_states");
    let yaml = yaml.replace("to: boundary", "to: model");
    let mut toy = toy::Toy::new();
    let files = std::mem::take(&mut toy.plan.files);
    toy.plan = Plan { files, ..Plan::from_yaml(&yaml.replace(logits, &format!("{logits}{hidden}"))).unwrap() };
    let mut second = toy::second();
    second.inputs[0].name = "hidden_states".into();
    toy.backend.model("cpu_0.onnx", second);
    toy
}

/// The loaded toy model with a cache of pages of `CHUNK` tokens, so that prompts are computed in chunks of `CHUNK` tokens.
fn load(runs: Arc<Mutex<Vec<usize>>>, gate: Arc<Barrier>, waits: fn(&[usize]) -> bool) -> LoadedEngine<MockBackend> {
    load_from(&toy_with_hidden_states(), move |tokens| {
        let waits = {
            let mut runs = runs.lock().unwrap();
            runs.push(tokens);
            waits(&runs)
        };
        if waits {
            gate.wait();
            gate.wait();
        }
    })
}

/// The loaded toy model. Each run calls `before_change` and then writes to a weight file. Unloading the model drops `before_change`.
pub(crate) fn load_changing(before_change: impl Fn() + 'static) -> LoadedEngine<MockBackend> {
    let mut toy = toy_with_hidden_states();
    let path = toy.dir.path().join("weights.data");
    std::fs::write(&path, b"weights").unwrap();
    toy.plan.files.push(toy::record(toy.dir.path(), "weights.data", FileRole::Weights));
    let weights = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    load_from(&toy, move |_| {
        before_change();
        // File times advance in steps of up to 10 ms.
        std::thread::sleep(Duration::from_millis(20));
        (&weights).write_all(b"W").unwrap();
    })
}

/// Loads a toy model that calls `on_run` with the number of tokens of each run of its first partition.
fn load_from(toy: &toy::Toy, on_run: impl Fn(usize) + 'static) -> LoadedEngine<MockBackend> {
    let mut first = toy::first(toy::DEVICE);
    first.outputs[0].name = "hidden_states".into();
    let kernel = Rc::clone(&first.kernel);
    first.kernel = Rc::new(move |frame| {
        on_run(frame.input(0)?.shape()[1] as usize);
        kernel(frame)
    });
    toy.backend.model("gpu_0.onnx", first);
    let engine = toy.load().unwrap();
    let settings = PrefixCacheSettings {
        page_tokens: CHUNK,
        ram: 16 << 20,
        disk: None,
        policy: EvictionPolicy::Lru,
        fingerprint: Fingerprint::of([("model", "toy")]),
    };
    let cache = PrefixCache::open(&engine, settings, || {}).unwrap().expect("its states can be saved");
    let mut batch = Batch::new(engine, ModelInputs::default());
    batch.save_in(cache);
    let reclaimable = Reclaimable { sequences: 8, ..Reclaimable::default() };
    LoadedEngine { batch, reclaimable, tokenizer: None, drafts: Drafts::default(), placement: vec![] }
}

/// Waits for the end of a request, and returns the tokens of its answer.
fn answer(mut events: UnboundedReceiver<RequestEvent>) -> Vec<u32> {
    let mut tokens = vec![];
    loop {
        match events.blocking_recv() {
            Some(RequestEvent::Token { id, .. }) => tokens.push(id),
            Some(RequestEvent::Finished(_)) => return tokens,
            Some(RequestEvent::Failed(error)) => panic!("{error}"),
            Some(_) => {}
            None => panic!("the thread ended"),
        }
    }
}

/// Waits for an embedding, and returns its width.
fn embedding(mut events: UnboundedReceiver<RequestEvent>) -> usize {
    match events.blocking_recv() {
        Some(RequestEvent::Embedding(vector)) => vector.len(),
        other => panic!("{other:?}"),
    }
}

/// The answer of the toy model, computed without an engine thread.
fn expected(prompt: &[u32], count: usize) -> Vec<u32> {
    let mut text = prompt.to_vec();
    (0..count).for_each(|_| text.push(toy::answer(&text)));
    text.split_off(prompt.len())
}

#[test]
fn between_two_tokens_of_an_answer_there_is_at_most_one_chunk_of_prompts() {
    let toy = ToyThread::start();
    let prompts: Vec<Vec<u32>> = (1..4).map(|of| (0..48).map(|at| (at * of + of) % 16).collect()).collect();
    let short = vec![7, 7, 3];
    let running = toy.ask(vec![3, 1, 4], 50);
    toy.gate.wait();
    // The first answer has begun, and its next token waits until all prompts have arrived.
    let others: Vec<_> = prompts.iter().map(|prompt| toy.ask(prompt.clone(), 1)).collect();
    let last = toy.ask(short.clone(), 1);
    toy.gate.wait();
    assert_eq!(answer(running), expected(&[3, 1, 4], 50));
    for (prompt, events) in prompts.iter().zip(others) {
        assert_eq!(answer(events), expected(prompt, 1));
    }
    assert_eq!(answer(last), expected(&short, 1));
    drop(toy.queue);
    toy.thread.join().unwrap();
    let runs = toy.runs.lock().unwrap();
    let passes: Vec<&[usize]> = runs[1..].split(|tokens| *tokens == 1).collect();
    let between: Vec<usize> = passes.iter().map(|runs| runs.iter().sum()).collect();
    assert_eq!(between.iter().sum::<usize>(), 3 * 48 + short.len(), "{runs:?}");
    assert!(between.iter().all(|tokens| *tokens <= CHUNK + 1), "{between:?}");
    // Prompts take turns, so that the short one does not wait for the long ones.
    let at = runs.iter().enumerate().filter(|(_, tokens)| **tokens == short.len()).nth(1).unwrap().0;
    assert!(runs[1..at].iter().filter(|tokens| **tokens > 1).count() <= 4, "{runs:?}");
}

#[test]
fn an_embedding_is_computed_while_answers_wait_for_every_sequence() {
    let toy = ToyThread::start_with(2, second_single, Drafts::default);
    let running = toy.ask(vec![3, 1, 4], 50);
    toy.gate.wait();
    let embedded = toy.embed((0..12).collect());
    let others: Vec<_> = (0..8).map(|of| toy.ask(vec![of, 9], 20)).collect();
    toy.gate.wait();
    assert_eq!(embedding(embedded), 1);
    assert_eq!(answer(running), expected(&[3, 1, 4], 50));
    for (of, events) in (0..8).zip(others) {
        assert_eq!(answer(events), expected(&[of, 9], 20));
    }
    drop(toy.queue);
    toy.thread.join().unwrap();
    let runs = toy.runs.lock().unwrap();
    let last_chunk = runs.iter().rposition(|tokens| *tokens == CHUNK).unwrap();
    assert!(!runs[..last_chunk].contains(&2), "no other answer starts before it is computed: {runs:?}");
}

#[test]
fn answers_and_embeddings_take_turns_where_there_is_one_sequence() {
    let toy = ToyThread::start_with(1, second_single, Drafts::default);
    let running = toy.ask(vec![3, 1, 4], 4);
    toy.gate.wait();
    let embeddings: Vec<_> = (0..2).map(|of| toy.embed((of..of + 8).collect())).collect();
    let answers: Vec<_> = (0..3).map(|of| toy.ask(vec![of, 9], 1)).collect();
    toy.gate.wait();
    assert_eq!(answer(running), expected(&[3, 1, 4], 4));
    assert!(embeddings.into_iter().all(|events| embedding(events) == 1));
    for (of, events) in (0..3).zip(answers) {
        assert_eq!(answer(events), expected(&[of, 9], 1));
    }
    drop(toy.queue);
    toy.thread.join().unwrap();
    let runs = toy.runs.lock().unwrap();
    assert_eq!(runs[..], [3, 1, 1, 1, CHUNK, CHUNK, 2, CHUNK, CHUNK, 2, 2]);
}

/// The order in which requests start that arrive one after another while another request holds the only sequence. `requests`: priority and seconds
/// waited so far of each. Returns their numbers.
fn order_of_starts(requests: &[(i32, u64)]) -> Vec<usize> {
    let toy = ToyThread::start_with(1, second_single, Drafts::default);
    let running = toy.ask(vec![3, 1, 4], 4);
    toy.gate.wait();
    let prompt = |number: usize| vec![number as u32; CHUNK * (number / 2) + number % 2 + 2];
    let ask = |(number, (priority, waited)): (usize, &(i32, u64))| {
        toy.ask_after(prompt(number), *priority, Duration::from_secs(*waited))
    };
    let answers: Vec<_> = requests.iter().enumerate().map(ask).collect();
    toy.gate.wait();
    assert_eq!(answer(running), expected(&[3, 1, 4], 4));
    for (number, events) in answers.into_iter().enumerate() {
        assert_eq!(answer(events), expected(&prompt(number), 1));
    }
    drop(toy.queue);
    toy.thread.join().unwrap();
    let runs = toy.runs.lock().unwrap();
    // Each prompt runs as whole chunks and a last run of 2 or 3 tokens. The number of chunks and the last run identify the prompt.
    let prompts = runs[4..].split_inclusive(|tokens| *tokens < CHUNK);
    prompts.map(|runs| 2 * (runs.len() - 1) + runs[runs.len() - 1] - 2).collect()
}

#[test]
fn more_important_requests_start_first_and_equally_important_ones_in_the_order_of_arrival() {
    assert_eq!(order_of_starts(&[(0, 0), (0, 0), (5, 0), (-10, 0), (5, 0), (10, 0)]), [5, 2, 4, 0, 1, 3]);
    assert_eq!(order_of_starts(&[(-1, 0), (-1, 0), (-1, 0)]), [0, 1, 2]);
}

#[test]
fn a_request_is_overtaken_for_a_minute_at_most() {
    // The first request has waited for more than a minute, the second for less.
    assert_eq!(order_of_starts(&[(0, 61), (0, 20), (5, 0), (10, 0)]), [0, 3, 2, 1]);
    // More important requests that arrived before the one that has waited long stay before it.
    assert_eq!(order_of_starts(&[(5, 0), (0, 61), (10, 0), (10, 0)]), [0, 1, 2, 3]);
}

/// The fourth run waits.
fn fourth_run(runs: &[usize]) -> bool {
    runs.len() == 4
}

#[test]
fn a_kept_sequence_makes_room_for_an_answer_beside_a_started_embedding() {
    let toy = ToyThread::start_with(2, fourth_run, Drafts::default);
    let (kept, prompt) = ("hpp_idle_sequences{model=\"toy\"}", (0..8).collect::<Vec<u32>>());
    assert_eq!(answer(toy.ask(prompt.clone(), 1)), expected(&prompt, 1));
    toy.wait_for(kept, |kept| kept == 1.0);
    let embedded = toy.embed((0..24).map(|at| at % 16).collect());
    // The first chunk of the embedding is computed.
    toy.gate.wait();
    let short = toy.ask(vec![7, 7], 1);
    toy.gate.wait();
    assert_eq!(answer(short), expected(&[7, 7], 1));
    assert_eq!(embedding(embedded), 1);
    toy.wait_for(kept, |kept| kept == 0.0);
    drop(toy.queue);
    toy.thread.join().unwrap();
}

#[test]
fn answers_stay_the_same_while_their_engine_gives_up_memory_and_gets_it_back() {
    let toy = ToyThread::start();
    let (pages, kept) = ("hpp_kv_pages{model=\"toy\",tier=\"ram\"}", "hpp_idle_sequences{model=\"toy\"}");
    let prompts: Vec<Vec<u32>> = (1..4).map(|of| (0..24).map(|at| (at * of + of) % 16).collect()).collect();
    for prompt in &prompts {
        assert_eq!(answer(toy.ask(prompt.clone(), 1)), expected(prompt, 1));
    }
    toy.wait_for(pages, |pages| pages == 18.0);
    toy.wait_for(kept, |kept| kept == 3.0);
    let running = toy.ask(vec![3, 1, 4], 50);
    toy.gate.wait();
    // The answer has begun, and its next token waits until there is less memory.
    toy.queue.share(EngineShare { kv: 0, sequences: 1, locked: 0 });
    let others: Vec<_> = prompts.iter().map(|prompt| toy.ask(prompt.clone(), 1)).collect();
    toy.gate.wait();
    assert_eq!(answer(running), expected(&[3, 1, 4], 50));
    for (prompt, events) in prompts.iter().zip(others) {
        assert_eq!(answer(events), expected(prompt, 1));
    }
    toy.wait_for(pages, |pages| pages == 0.0);
    toy.wait_for(kept, |kept| kept <= 1.0);
    {
        let runs = toy.runs.lock().unwrap();
        let last_single = runs.iter().rposition(|tokens| *tokens == 1).unwrap();
        let before = runs[..last_single].iter().filter(|tokens| **tokens > 1).count();
        assert_eq!(before, 3 * 6 + 1, "nothing starts beside the running answer: {runs:?}");
    }
    toy.queue.share(EngineShare { kv: 16 << 20, sequences: 99, locked: 0 });
    for prompt in &prompts {
        assert_eq!(answer(toy.ask(prompt.clone(), 1)), expected(prompt, 1));
    }
    toy.wait_for(pages, |pages| pages >= 10.0);
    toy.wait_for(kept, |kept| kept == 3.0);
    drop(toy.queue);
    toy.thread.join().unwrap();
}

#[test]
fn a_prompt_asked_again_needs_no_pass() {
    let toy = ToyThread::start_with(2, |_| false, Drafts::default);
    let prompt: Vec<u32> = (0..10).map(|at| at * 3 % 16).collect();
    let new_runs = |before: usize| toy.runs.lock().unwrap()[before..].to_vec();
    let count = || toy.runs.lock().unwrap().len();
    let first = logprobs_of(toy.ask_for_logprobs(prompt.clone(), 1, Some(2)));
    let before = count();
    // The answer's only token was not fed, so the kept sequence ends with the prompt.
    assert_eq!(logprobs_of(toy.ask_for_logprobs(prompt.clone(), 1, Some(2))), first);
    assert_eq!(new_runs(before), [0; 0]);
    assert_eq!(answer(toy.ask(prompt.clone(), 6)), expected(&prompt, 6));
    assert_eq!(new_runs(before), [1; 5], "the first token needs no run");
    // The toy's replaced state cannot go back to the end of the prompt. The prompt end is restored instead.
    let before = count();
    assert_eq!(logprobs_of(toy.ask_for_logprobs(prompt.clone(), 1, Some(2))), first);
    assert_eq!(new_runs(before), [0; 0]);
    // Neither a longer prompt nor a shorter one is equal.
    for other in [[&prompt[..], &[5, 6]].concat(), prompt[..9].to_vec()] {
        let before = count();
        assert_eq!(answer(toy.ask(other.clone(), 1)), expected(&other, 1));
        assert_eq!(new_runs(before).iter().sum::<usize>(), other.len() - (other.len() - 2) / CHUNK * CHUNK);
    }
    drop(toy.queue);
    toy.thread.join().unwrap();
}

#[test]
fn pages_found_are_counted_by_the_tier_that_had_them() {
    let toy = ToyThread::start();
    let prompt: Vec<u32> = (0..10).map(|at| at * 3 % 16).collect();
    let counts = |[in_sequence, in_ram, computed, not_in_sequence]: [f64; 4]| {
        let of = |metric: &str, tier: &str| format!("hpp_kv_{metric}_total{{model=\"toy\",tier=\"{tier}\"}}");
        toy.wait_for(&of("hits", "sequence"), |pages| pages == in_sequence);
        toy.wait_for(&of("hits", "ram"), |pages| pages == in_ram);
        toy.wait_for(&of("misses", "disk"), |pages| pages == computed);
        toy.wait_for(&of("misses", "sequence"), |pages| pages == not_in_sequence);
    };
    assert_eq!(answer(toy.ask(prompt.clone(), 1)), expected(&prompt, 1));
    counts([0.0, 0.0, 2.0, 2.0]);
    assert_eq!(answer(toy.ask(prompt.clone(), 1)), expected(&prompt, 1));
    counts([2.0, 0.0, 2.0, 2.0]);
    // The toy's replaced state cannot go back, so a longer prompt starts with stored pages.
    let longer = [&prompt[..8], &[1, 2, 3, 4, 5, 6]].concat();
    assert_eq!(answer(toy.ask(longer.clone(), 1)), expected(&longer, 1));
    counts([2.0, 2.0, 3.0, 5.0]);
    // Requests that score their prompt start with an empty sequence and look up no pages.
    assert_eq!(answer(toy.score(prompt.clone())), expected(&prompt, 1));
    counts([2.0, 2.0, 3.0, 5.0]);
    drop(toy.queue);
    toy.thread.join().unwrap();
}

#[test]
fn states_are_counted_where_they_lie() {
    let toy = ToyThread::start();
    let prompt: Vec<u32> = (0..8).collect();
    for of in 1..3 {
        let prompt = [&prompt[..], &[of]].concat();
        assert_eq!(answer(toy.ask(prompt.clone(), 1)), expected(&prompt, 1));
        // Per sequence: on the device 64 floats in place and 1 float in two buffers; on the host 64 floats in two buffers.
        for (tier, each) in [("device", 264.0), ("ram", 512.0), ("disk", 0.0)] {
            let metric = format!("hpp_state_bytes{{model=\"toy\",tier=\"{tier}\"}}");
            toy.wait_for(&metric, |bytes| bytes == each * f64::from(of));
        }
    }
    drop(toy.queue);
    toy.thread.join().unwrap();
}

#[test]
fn a_prompt_whose_sequence_is_gone_needs_no_pass() {
    let toy = ToyThread::start_with(1, |_| false, Drafts::default);
    let other = vec![15; 9];
    for tokens in [3, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1, 11] {
        let prompt: Vec<u32> = (0..tokens as u32).map(|at| (at * 3 + tokens as u32) % 16).collect();
        let first = logprobs_of(toy.ask_for_logprobs(prompt.clone(), 5, Some(2)));
        assert_eq!(answer(toy.ask(other.clone(), 3)), expected(&other, 3));
        let before = toy.runs.lock().unwrap().len();
        assert_eq!(logprobs_of(toy.ask_for_logprobs(prompt.clone(), 5, Some(2))), first, "{tokens} tokens");
        let runs = toy.runs.lock().unwrap()[before..].to_vec();
        assert_eq!(runs, [1; 4], "{tokens} tokens: the first token needs no run");
        let usage = usage(toy.ask(prompt, 5));
        assert_eq!((usage.prompt_tokens, usage.reused_tokens), (tokens, tokens));
    }
    drop(toy.queue);
    toy.thread.join().unwrap();
}

/// Waits for the end of a request, and returns its counts of tokens.
fn usage(mut events: UnboundedReceiver<RequestEvent>) -> TokenUsage {
    loop {
        match events.blocking_recv() {
            Some(RequestEvent::Finished(generated)) => return generated.usage,
            Some(RequestEvent::Failed(error)) => panic!("{error}"),
            Some(_) => {}
            None => panic!("the thread ended"),
        }
    }
}

#[test]
fn ends_of_prompts_leave_with_the_memory_for_pages() {
    let toy = ToyThread::start_with(1, |_| false, Drafts::default);
    let prompt: Vec<u32> = (0..3).collect();
    assert_eq!(answer(toy.ask(prompt.clone(), 1)), expected(&prompt, 1));
    // The sequence is too short to be kept.
    assert_eq!(usage(toy.ask(prompt.clone(), 1)).reused_tokens, 3);
    toy.queue.share(EngineShare { kv: 0, sequences: 1, locked: 0 });
    assert_eq!(usage(toy.ask(prompt.clone(), 1)).reused_tokens, 0);
    assert_eq!(usage(toy.ask(prompt.clone(), 1)).reused_tokens, 0, "and none is kept");
    toy.queue.share(EngineShare { kv: 16 << 20, sequences: 1, locked: 0 });
    assert_eq!(usage(toy.ask(prompt.clone(), 1)).reused_tokens, 0);
    assert_eq!(usage(toy.ask(prompt, 1)).reused_tokens, 3);
    drop(toy.queue);
    toy.thread.join().unwrap();
}

#[test]
fn the_logits_of_a_scored_prompt_are_not_reused() {
    let toy = ToyThread::start_with(2, |_| false, Drafts::default);
    let prompt: Vec<u32> = (0..10).map(|at| at * 3 % 16).collect();
    assert_eq!(answer(toy.score(prompt.clone())), expected(&prompt, 1));
    let before = toy.runs.lock().unwrap().len();
    assert_eq!(answer(toy.ask(prompt.clone(), 1)), expected(&prompt, 1));
    assert_eq!(toy.runs.lock().unwrap()[before..], [2], "its end is computed as that of any prompt");
    drop(toy.queue);
    toy.thread.join().unwrap();
}

/// Waits for the end of a request, and returns the tokens of its answer with their logprobs.
fn logprobs_of(mut events: UnboundedReceiver<RequestEvent>) -> Vec<(u32, String)> {
    let mut tokens = vec![];
    loop {
        match events.blocking_recv().unwrap() {
            RequestEvent::Token { id, logprobs } => tokens.push((id, format!("{:?}", logprobs.unwrap()))),
            RequestEvent::Started(_) => {}
            RequestEvent::Finished(_) => return tokens,
            other => panic!("{other:?}"),
        }
    }
}

/// Waits before the second run with one token, and later in the middle of the second pass over sixteen answers.
fn middle_of_a_pass_of_sixteen(runs: &[usize]) -> bool {
    let singles = |runs: &[usize]| runs.iter().rev().take_while(|tokens| **tokens == 1).count();
    second_single(runs) || singles(runs) == 24
}

#[test]
fn a_client_that_leaves_in_the_middle_of_a_pass_is_gone_after_it_and_the_others_go_on() {
    let toy = ToyThread::start_with(16, middle_of_a_pass_of_sixteen, Drafts::default);
    let prompt = |of: u32| vec![of, of * 3 % 16];
    let first = toy.ask(prompt(0), 40);
    toy.gate.wait();
    let mut others: Vec<_> = (1..16).map(|of| toy.ask(prompt(of), 20)).collect();
    toy.gate.wait();
    toy.gate.wait();
    // Eight of sixteen items have reached the first stage, among them the request that is about to be cancelled.
    let mut leaver = others.remove(4);
    let reported = std::iter::from_fn(|| leaver.try_recv().ok());
    let reported = reported.filter(|event| matches!(event, RequestEvent::Token { .. })).count();
    drop(leaver);
    toy.gate.wait();
    assert_eq!(answer(first), expected(&prompt(0), 40));
    for (of, events) in (1..16).filter(|of| *of != 5).zip(others) {
        assert_eq!(answer(events), expected(&prompt(of), 20), "request {of}");
    }
    drop(toy.queue);
    toy.thread.join().unwrap();
    assert!(toy.metrics.to_text().contains("outcome=\"cancelled\"} 1"), "{}", toy.metrics.to_text());
    // Of the cancelled request's tokens, the first came from its prompt and one from the pass in which it was cancelled.
    let single = toy.runs.lock().unwrap().iter().filter(|tokens| **tokens == 1).count();
    assert_eq!(single, 39 + 14 * 19 + reported, "later passes are without it");
}

#[test]
fn an_engine_whose_thread_panics_is_reported_as_gone() {
    let panics = Arc::new(AtomicBool::new(false));
    let has_defect = Arc::clone(&panics);
    let load = move |_| {
        let has_defect = Arc::clone(&has_defect);
        Ok(load_from(&toy_with_hidden_states(), move |_| assert!(!has_defect.load(Ordering::SeqCst), "a defect")))
    };
    let toy = ToyThread::start_loading(load, Arc::new(Barrier::new(1)));
    let prompt: Vec<u32> = (0..8).collect();
    assert_eq!(answer(toy.ask(prompt.clone(), 1)), expected(&prompt, 1));
    let gauges = ["hpp_idle_sequences{model=\"toy\"}", "hpp_kv_pages{model=\"toy\",tier=\"ram\"}"];
    gauges.iter().for_each(|gauge| toy.wait_for(gauge, |value| value > 0.0));
    panics.store(true, Ordering::SeqCst);
    let mut events = toy.ask(vec![1, 2], 1);
    assert!(matches!(events.blocking_recv(), Some(RequestEvent::Started(_))));
    assert!(events.blocking_recv().is_none());
    assert!(toy.thread.join().is_err());
    let text = toy.metrics.to_text();
    let states = ["device", "ram", "disk"].map(|tier| format!("hpp_state_bytes{{model=\"toy\",tier=\"{tier}\"}}"));
    for gauge in gauges.into_iter().chain(states.iter().map(String::as_str)) {
        assert!(text.contains(&format!("{gauge} 0\n")), "{text}");
    }
    assert!(text.contains("hpp_requests_total{model=\"toy\",outcome=\"failed\"} 1\n"), "{text}");
}

#[test]
fn requests_that_arrive_while_their_engine_fails_are_told() {
    let gate = Arc::new(Barrier::new(2));
    let meets = Arc::clone(&gate);
    let load = move |_| {
        let meets = Arc::clone(&meets);
        let before_change = move || {
            meets.wait();
            meets.wait();
        };
        Ok(load_changing(before_change))
    };
    let toy = ToyThread::start_loading(load, Arc::clone(&gate));
    let running = toy.ask(vec![3, 1, 4], 50);
    gate.wait();
    let arrived = [toy.ask(vec![1, 2], 3), toy.embed(vec![1])];
    gate.wait();
    for mut events in [running].into_iter().chain(arrived) {
        let mut ended = std::iter::from_fn(|| events.blocking_recv());
        let end = ended.find(|event| !matches!(event, RequestEvent::Started(_)));
        let failed = matches!(end, Some(RequestEvent::Failed(error)) if error.to_string().contains("weights.data"));
        assert!(failed);
    }
    toy.thread.join().unwrap();
    assert!(toy.metrics.to_text().contains("outcome=\"failed\"} 3"), "{}", toy.metrics.to_text());
}

#[test]
fn drafted_tokens_have_the_logprobs_that_they_have_without_drafts() {
    let answer = |drafts: fn() -> Drafts<MockBackend>| {
        let toy = ToyThread::start_with(1, |_| false, drafts);
        let mut events = toy.ask_for_logprobs(vec![0, 0, 3, 0], 40, Some(3));
        let reported = std::iter::from_fn(|| events.blocking_recv());
        let logprobs = reported.filter_map(|event| match event {
            RequestEvent::Token { id, logprobs } => Some((id, format!("{logprobs:?}"))),
            _ => None,
        });
        let logprobs: Vec<(u32, String)> = logprobs.collect();
        drop(toy.queue);
        toy.thread.join().unwrap();
        (logprobs, toy.runs.lock().unwrap()[1..].iter().max().copied())
    };
    let (alone, single) = answer(Drafts::default);
    let (drafted, several) =
        answer(|| Drafts { origin: DraftOrigin::Ngram(Rc::default()), length: DraftLength::fixed(3) });
    assert_eq!((alone.len(), single), (40, Some(1)));
    assert!(several > Some(1), "nothing was drafted");
    assert_eq!(drafted, alone);
}
