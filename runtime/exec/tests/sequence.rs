//! Token sequences over ONNX Runtime: reuse of a common prefix, cancellation between chunks, batches, speculation.

mod support;

use hpp_backend::{OrtBackend, OrtOptions};
use hpp_engine::{Engine, EngineOptions, RowBatching, Silent};
use hpp_generate::kv::{DiskSettings, EvictionPolicy, Fingerprint, PageLookup};
use hpp_generate::sampling::{RandomSampling, SamplingMethod, SamplingParams};
use hpp_generate::speculate::{DraftLength, Drafter, NgramDrafter, Speculation, SuccessorTable};
use hpp_generate::text::{SpecialTokens, TextTokenizer};
use hpp_generate::{
    Batch, FinishReason, GenerateError, Generated, Generation, GenerationEvent, GenerationRequest, ModelInputs,
    Prefill, PrefixCache, PrefixCacheSettings, SingleSequence, generate, prompt_chunk,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use support::PlanDir;

fn engine(plan: &PlanDir) -> Engine<OrtBackend> {
    engine_with(plan, EngineOptions::default())
}

fn engine_with(plan: &PlanDir, options: EngineOptions) -> Engine<OrtBackend> {
    let backend = OrtBackend::open(&OrtOptions::default(), Arc::new(Silent)).unwrap();
    let dir = plan.path();
    Engine::load(&plan.plan, dir.parent().unwrap(), &backend, options, &Silent).unwrap()
}

fn sequence(plan: &PlanDir) -> SingleSequence<OrtBackend> {
    SingleSequence::new(engine(plan), ModelInputs::default())
}

/// The logits after a text that is computed from the start.
fn fresh(sequence: &mut SingleSequence<OrtBackend>, text: &[u32]) -> Vec<f32> {
    sequence.clear();
    sequence.prefill(text, &|| false).unwrap();
    sequence.logits().to_vec()
}

fn near(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4)
}

fn request(prompt: &[u32], max_new_tokens: u64) -> GenerationRequest {
    let sampling = SamplingParams { choice: SamplingMethod::Greedy, repetition_penalty: 1.0 };
    GenerationRequest {
        prompt: prompt.into(),
        max_new_tokens,
        eos_token_ids: vec![],
        stop: vec![],
        sampling,
        grammar: None,
        visible_tokens: vec![],
        prompt_logits: false,
    }
}

#[test]
fn changed_texts_keep_their_common_prefix_if_states_allow() {
    // (model, whether its states can be truncated)
    for (name, truncates) in [
        ("genai/llama3-fp32-cpu", true),
        ("torch/gpt-dynamo", true),
        ("optimum/llama-with-past", true),
        ("genai/qwen3.5-fp32-cpu", false),
        // A sliding window that is not full.
        ("genai/gemma2-fp32-cpu", true),
    ] {
        let plan = PlanDir::new(name, 64);
        let mut sequence = sequence(&plan);
        let texts: [&[u32]; 5] =
            [&[5, 6, 7, 8, 9], &[5, 6, 7, 8, 9, 10, 11], &[5, 6, 7, 30, 31], &[5, 6, 7], &[40, 41]];
        let want: Vec<Vec<f32>> = texts.iter().map(|text| fresh(&mut sequence, text)).collect();
        sequence.clear();
        let kept = |n| if truncates { n } else { 0 };
        for ((text, want), reused) in texts.iter().zip(&want).zip([0, 5, kept(3), kept(2), 0]) {
            assert_eq!(sequence.prefill(text, &|| false).unwrap(), Prefill::Complete { reused }, "{name}: {text:?}");
            assert_eq!(sequence.tokens(), *text, "{name}");
            assert!(near(sequence.logits(), want), "{name}: {text:?}");
        }
    }
}

#[test]
fn a_prefill_cancelled_between_chunks_can_be_completed() {
    let mut plan = PlanDir::new("genai/llama3-fp32-cpu", 256);
    plan.plan.schedule.prefill_chunk = Some(16);
    let mut sequence = sequence(&plan);
    let text: Vec<u32> = (0..200).collect();
    assert_eq!(sequence.prefill(&text, &|| true).unwrap(), Prefill::Cancelled);
    assert_eq!(sequence.prefill(&text, &|| false).unwrap(), Prefill::Complete { reused: 0 });
    let chunked = sequence.logits().to_vec();
    assert!(near(&chunked, &fresh(&mut sequence, &text)));
    assert_eq!(sequence.room(), 56);
}

#[test]
fn a_callback_receives_each_token_and_a_cancelled_generation_keeps_its_tokens() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 64);
    let mut sequence = sequence(&plan);
    let prompt = plan.model.prompt();
    let tokens = std::cell::RefCell::new(vec![]);
    let on_event = &mut |event: GenerationEvent<'_>| {
        if let GenerationEvent::Token { id, logits } = event {
            assert_eq!(logits.len(), 512);
            tokens.borrow_mut().push(id);
        }
        Ok::<_, GenerateError>(())
    };
    let cancelled = || tokens.borrow().len() == 5;
    let generation = Generation::new(request(&prompt, 16), None, usize::MAX);
    let generated = generate(&mut sequence, generation, &cancelled, on_event).unwrap();
    assert_eq!((generated.finish_reason, &generated.tokens[..]), (FinishReason::Cancelled, &plan.model.tokens()[..5]));
    assert_eq!(generated.tokens, *tokens.borrow());
    assert_eq!((generated.usage.prompt_tokens, generated.usage.completion_tokens), (prompt.len(), 5));
}

/// Where a model changes its tables of rotary embeddings, a pass must not have tokens on both sides.
#[test]
fn drafts_end_where_tables_change() {
    let mut plan = PlanDir::new("genai/llama3-fp32-cpu", 64);
    plan.plan.model.tables_change_after = Some(20);
    let mut sequence = sequence(&plan);
    let most = |sequence: &mut SingleSequence<OrtBackend>, tokens: usize| {
        sequence.clear();
        sequence.prefill(&vec![1; tokens], &|| false).unwrap();
        sequence.max_draft()
    };
    assert!(most(&mut sequence, 4) >= 15);
    // 15 tokens, the one that is fed, and four drafted ones.
    assert_eq!([15, 18, 19, 20].map(|tokens| most(&mut sequence, tokens)), [4, 1, 0, 0]);
    assert!(most(&mut sequence, 21) > 4, "beyond it");
}

/// Models with states of every kind: in place, appended, a sliding window, convolution and recurrent, none.
const STATES: [&str; 6] = [
    "genai/llama3-fp32-cpu",
    "optimum/llama-with-past",
    "genai/gemma2-fp32-cpu",
    "genai/qwen3.5-fp32-cpu",
    "genai/lfm2-fp32-cpu",
    "torch/gpt-dynamo",
];

/// Tokens, and the logits that each was chosen from.
type Answer = (Vec<u32>, Vec<Vec<f32>>);

fn answer_alone(sequence: &mut SingleSequence<OrtBackend>, generation: Generation) -> (Generated, Answer) {
    let mut answer = Answer::default();
    let generated = generate(sequence, generation, &|| false, &mut |event| {
        if let GenerationEvent::Token { id, logits } = event {
            answer.0.push(id);
            answer.1.push(logits.to_vec());
        }
        Ok::<_, GenerateError>(())
    });
    (generated.unwrap(), answer)
}

/// Models whose states lie in one buffer for several sequences: float and 4-bit weights, position ids, tied weights, experts.
const ROWS: [&str; 6] = [
    "genai/llama3-fp32-cpu",
    "genai/llama3-int4-cpu",
    "genai/qwen3-int4-cpu",
    "genai/phi2-fp32-cpu",
    "genai/llama3-tied-int4-cpu-shared",
    "genai/gpt-oss-int4-cpu",
];

#[test]
fn requests_of_a_batch_give_the_logits_they_give_alone() {
    let row_wise = ROWS.map(|name| (name, RowBatching::Exact));
    for (name, row_batching) in STATES.map(|name| (name, RowBatching::Off)).into_iter().chain(row_wise) {
        let mut plan = PlanDir::new(name, 128);
        plan.plan.schedule.prefill_chunk = Some(8);
        let tokens = |count: u32| (0..count).collect::<Vec<u32>>();
        let mut requests = vec![(plan.model.prompt(), 8), (tokens(50), 5), (vec![40, 41], 12), (vec![7], 3)];
        // Prompts of a chunk and a token more, and of a token less.
        requests.extend([(tokens(8), 4), (tokens(9), 4), (tokens(16), 4), (tokens(17), 4)]);
        let options = EngineOptions { sequences: Some(9), row_batching, ..EngineOptions::default() };
        let mut batch = Batch::new(engine_with(&plan, options), ModelInputs::default());
        let chunk = batch.prompt_chunk();
        let mut alone = sequence(&plan);
        let mut want = vec![];
        for (prompt, new) in &requests {
            alone.clear();
            let generation = Generation::new(request(prompt, *new), None, prompt_chunk(alone.engine()));
            want.push(answer_alone(&mut alone, generation).1);
        }

        let mut waiting = requests.iter().enumerate();
        let (mut running, mut answers) = (HashMap::new(), vec![Answer::default(); requests.len()]);
        let bad = batch.add(Generation::new(request(&[1, u32::MAX], 4), None, chunk));
        let mut failed = 0;
        while !batch.is_empty() || waiting.len() > 0 {
            // One more with each pass.
            if let Some((index, (prompt, new))) = waiting.next() {
                running.insert(batch.add(Generation::new(request(prompt, *new), None, chunk)), index);
            }
            let finished = batch.pass::<GenerateError>(&mut |id, event| {
                if let GenerationEvent::Token { id: token, logits } = event {
                    let answer = &mut answers[running[&id]];
                    answer.0.push(token);
                    answer.1.push(logits.to_vec());
                }
                Ok(())
            });
            for finished in finished.unwrap() {
                assert_eq!(finished.result.is_err(), finished.id == bad, "{name}: {:?}", finished.result);
                failed += usize::from(finished.id == bad);
            }
        }
        assert_eq!(failed, 1, "{name}: a token that the model does not know fails alone");
        for (index, (got, want)) in answers.iter().zip(&want).enumerate() {
            assert_eq!(got.0, want.0, "{name}: request {index}");
            assert!(got.1 == want.1, "{name}: the logits of request {index} differ");
        }
        let rows = batch.engine().telemetry().batched_rows;
        assert!(row_batching == RowBatching::Exact || rows == 0, "{name}");
        eprintln!("{name}: {rows} tokens in batches");
    }
}

#[test]
fn rows_that_may_round_are_batched_and_near_what_they_are_alone() {
    for name in &ROWS[..5] {
        let plan = PlanDir::new(name, 128);
        let options = EngineOptions { sequences: Some(4), row_batching: RowBatching::On, ..EngineOptions::default() };
        let mut batch = Batch::new(engine_with(&plan, options), ModelInputs::default());
        let prompts: [Vec<u32>; 4] = [plan.model.prompt(), (0..30).collect(), vec![40, 41], vec![7]];
        let mut alone = sequence(&plan);
        let mut want = HashMap::new();
        for prompt in &prompts {
            alone.clear();
            let generation = || Generation::new(request(prompt, 12), None, usize::MAX);
            let answer = answer_alone(&mut alone, generation()).1;
            want.insert(batch.add(generation()), answer);
        }
        let mut compared = 0;
        while !batch.is_empty() {
            let passed = batch.pass::<GenerateError>(&mut |id, event| {
                if let GenerationEvent::Token { id: token, logits } = event
                    && let Some((tokens, rows)) = want.get_mut(&id)
                    && !tokens.is_empty()
                {
                    let (same, near) = (tokens.remove(0) == token, rows.remove(0));
                    let largest = near.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
                    let is_near = near.iter().zip(logits).all(|(a, b)| (a - b).abs() <= 0.05 * largest);
                    assert!(is_near, "{name}: token {compared}");
                    // Behind another token the texts are different ones.
                    if same {
                        compared += 1;
                    } else {
                        tokens.clear();
                    }
                }
                Ok(())
            });
            passed.unwrap().into_iter().for_each(|finished| assert!(finished.result.is_ok(), "{name}"));
        }
        let rows = batch.engine().telemetry().batched_rows;
        assert!(rows > 20 && compared > 20, "{name}: {rows} rows batched, {compared} tokens compared");
    }
}

/// Tokens of a page.
const PAGE: usize = 8;

fn batch_with_cache(plan: &PlanDir, directory: &Path) -> Option<Batch<OrtBackend>> {
    // Room for two sequences, so that states are rows of common buffers.
    let engine = engine_with(plan, EngineOptions { sequences: Some(2), ..EngineOptions::default() });
    let settings = PrefixCacheSettings {
        page_tokens: PAGE,
        ram: 4 << 20,
        disk: Some(DiskSettings { directory: directory.to_owned(), bytes: 64 << 20, share: 64 << 20 }),
        policy: EvictionPolicy::Hybrid,
        fingerprint: Fingerprint::of([("model", "one")]),
    };
    let cache = PrefixCache::open(&engine, settings, || {}).unwrap()?;
    let mut batch = Batch::new(engine, ModelInputs::default());
    batch.save_in(cache);
    Some(batch)
}

/// The answer to a prompt that starts from what the batch's cache has of it, and how many tokens that was.
fn answer_from_pages(
    batch: &mut Batch<OrtBackend>,
    prompt: &[u32],
    new: u64,
    session: Option<&str>,
) -> (Answer, usize) {
    let found = batch.cache().map(|cache| cache.look_up(prompt, session)).unwrap_or_default();
    let mut ticket = None;
    let pages = loop {
        match batch.cache().map(|cache| cache.load(&found, 0, ticket.as_ref())) {
            None => break vec![],
            Some(PageLookup::Pages(pages)) => break pages,
            Some(PageLookup::Loading(given)) => ticket = given,
        }
        std::thread::yield_now();
    };
    let sequence = batch.restore(prompt, &found, &pages).unwrap();
    let generation = Generation::new(request(prompt, new), None, PAGE);
    let (_, kept) = batch.add_to(sequence, generation, session, PAGE).unwrap();
    let mut answer = Answer::default();
    while !batch.is_empty() {
        let passed = batch.pass::<GenerateError>(&mut |_, event| {
            if let GenerationEvent::Token { id, logits } = event {
                answer.0.push(id);
                answer.1.push(logits.to_vec());
            }
            Ok(())
        });
        passed.unwrap().into_iter().for_each(|finished| assert!(finished.result.is_ok()));
    }
    (answer, kept)
}

#[test]
fn saved_pages_go_on_with_the_bits_of_the_sequence_that_saved_them() {
    let mut saved = 0;
    for name in STATES {
        let (plan, dir) = (PlanDir::new(name, 128), tempfile::tempdir().unwrap());
        let prompt: Vec<u32> = (0..50).collect();
        let mut plain = Batch::new(engine(&plan), ModelInputs::default());
        let (cold, kept) = answer_from_pages(&mut plain, &prompt, 20, None);
        assert_eq!(kept, 0);
        let Some(mut first) = batch_with_cache(&plan, dir.path()) else { continue };
        saved += 1;
        assert_eq!(answer_from_pages(&mut first, &prompt, 20, Some("talk")), (cold.clone(), 0), "{name}");
        assert_eq!(answer_from_pages(&mut first, &prompt, 20, None), (cold.clone(), 50), "{name}: its end, too");
        // A conversation goes on after its own answer, another one only after the prompt.
        let mut later = [&prompt[..], &cold.0, &[3, 1, 4]].concat();
        let (cold_later, _) = answer_from_pages(&mut plain, &later, 6, None);
        assert_eq!(answer_from_pages(&mut first, &later, 6, Some("other")), (cold_later, 48), "{name}");
        later.push(9);
        let (resumed, kept) = answer_from_pages(&mut first, &later, 6, Some("talk"));
        assert_eq!(kept, 64, "{name}");
        assert!(first.cache().unwrap().flush(std::time::Duration::from_secs(60)));
        drop(first);
        let mut second = batch_with_cache(&plan, dir.path()).unwrap();
        assert_eq!(answer_from_pages(&mut second, &prompt, 20, None), (cold, 48), "{name}: after a restart");
        let after = answer_from_pages(&mut second, &later, 6, Some("talk"));
        assert_eq!(after.1, if kept == 64 { 72 } else { 0 }, "{name}: its later prompt was saved too");
        assert_eq!(after.0.0, resumed.0, "{name}");
        assert_eq!(second.cache().unwrap().stats().read_errors, 0);
    }
    assert!(saved >= 5, "{saved} models");
}

#[test]
fn an_equal_prompt_needs_no_pass_after_another_conversation() {
    // A prompt that begins like no other of these.
    let prompt = |tokens: usize| -> Vec<u32> { (0..tokens as u32).map(|at| (at * 7 + tokens as u32) % 100).collect() };
    let (other, mut saved) = (prompt(3 * PAGE + 5), 0);
    for name in STATES {
        let (plan, dir) = (PlanDir::new(name, 128), tempfile::tempdir().unwrap());
        let mut plain = Batch::new(engine(&plan), ModelInputs::default());
        let Some(mut batch) = batch_with_cache(&plan, dir.path()) else { continue };
        saved += 1;
        let prefills = |batch: &Batch<OrtBackend>| batch.engine().telemetry().prefill.count;
        // Around the ends of pages: the last tokens are computed in one chunk, or in two where they are one more than a page.
        for tokens in [5 * PAGE + 3, 2 * PAGE + 2, 2 * PAGE + 1, 2 * PAGE, PAGE + 2, PAGE + 1, PAGE, PAGE - 1, 2] {
            let (cold, _) = answer_from_pages(&mut plain, &prompt(tokens), 10, None);
            let first = answer_from_pages(&mut batch, &prompt(tokens), 10, Some("a"));
            assert_eq!(first, (cold.clone(), 0), "{name}: {tokens} tokens");
            answer_from_pages(&mut batch, &other, 10, None);
            let before = prefills(&batch);
            for session in [None, Some("a"), Some("b")] {
                let again = answer_from_pages(&mut batch, &prompt(tokens), 10, session);
                assert_eq!(again, (cold.clone(), tokens), "{name}: {tokens} tokens, session {session:?}");
            }
            assert_eq!(prefills(&batch), before, "{name}: {tokens} tokens");
            // Its start and more.
            let longer = [&prompt(tokens)[..], &[11, 12, 13]].concat();
            let (cold, _) = answer_from_pages(&mut plain, &longer, 4, None);
            assert_eq!(answer_from_pages(&mut batch, &longer, 4, None).0, cold, "{name}: {tokens} tokens and more");
        }
        let cache = batch.cache().unwrap();
        assert!(cache.look_up(&prompt(2), None).has_end(), "{name}");
        cache.set_ram(0);
        assert!(!cache.look_up(&prompt(2), None).has_end(), "{name}");
    }
    assert!(saved >= 5, "{saved} models");
}

#[test]
fn a_request_that_is_cancelled_leaves_the_others_alone() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 128);
    let mut batch = Batch::new(engine(&plan), ModelInputs::default());
    let ids: Vec<_> =
        (0..16).map(|_| batch.add(Generation::new(request(&plan.model.prompt(), 12), None, usize::MAX))).collect();
    let mut left = vec![];
    for pass in 0..12 {
        if pass == 5 {
            let cancelled = batch.cancel(ids[3]).unwrap().result.unwrap();
            assert_eq!((cancelled.finish_reason, cancelled.tokens.len()), (FinishReason::Cancelled, 5));
            assert!(batch.cancel(ids[3]).is_none());
        }
        left.extend(batch.pass::<GenerateError>(&mut |_, _| Ok(())).unwrap());
    }
    assert!(batch.is_empty());
    assert_eq!(left.len(), 15);
    for finished in left {
        assert_eq!(finished.result.unwrap().tokens, plan.model.tokens()[..12]);
    }
}

/// Drafts the answer, with every third token wrong.
struct NearlyRight {
    answer: Vec<u32>,
    position: usize,
    prompt: usize,
}

impl Drafter for NearlyRight {
    fn extend(&mut self, tokens: &[u32]) {
        self.position += tokens.len();
    }

    fn confidence(&self) -> Option<usize> {
        Some(5)
    }

    fn is_free(&self) -> bool {
        true
    }

    fn draft(&mut self, most: usize, draft: &mut Vec<u32>) -> Result<(), GenerateError> {
        let from = self.position - self.prompt;
        let tokens = self.answer.iter().enumerate().skip(from).take(most);
        draft.clear();
        draft.extend(tokens.map(|(index, token)| if index % 3 == 2 { (token + 1) % 100 } else { *token }));
        Ok(())
    }
}

#[test]
fn drafted_tokens_do_not_change_the_answer() {
    for name in STATES {
        let mut plan = PlanDir::new(name, 128);
        plan.plan.schedule.prefill_chunk = Some(16);
        let prompt = plan.model.prompt();
        let mut sequence = sequence(&plan);
        let (_, want) = answer_alone(&mut sequence, Generation::new(request(&prompt, 24), None, 16));
        for length in [1, 4, 9] {
            sequence.clear();
            let drafter = NearlyRight { answer: want.0.clone(), position: 0, prompt: prompt.len() };
            let speculation = Speculation::with_length(Box::new(drafter), DraftLength::fixed(length));
            let generation = Generation::new(request(&prompt, 24), None, 16).speculate(speculation);
            let (generated, got) = answer_alone(&mut sequence, generation);
            assert_eq!(got.0, want.0, "{name}, drafts of {length}");
            assert!(got.1.iter().zip(&want.1).all(|(got, want)| near(got, want)), "{name}, drafts of {length}");
            assert_eq!(sequence.tokens(), [&prompt[..], &want.0[..23]].concat(), "{name}, drafts of {length}");
            let stats = generated.speculation.unwrap();
            assert!(stats.accepted > 0 && stats.drafted > stats.accepted, "{name}, drafts of {length}: {stats:?}");
            assert!(stats.passes < 23, "{name}, drafts of {length}: {stats:?}");
        }
    }
}

/// Beginnings of prose that the trained model continues, each with texts of its own.
const PROSE: [&str; 10] = [
    "Returns the number of elements in the vector, also referred to as its length.",
    "A trait tells the compiler about functionality a type has and can share with other types.",
    "The scope of a name is the region of program text within which it can be used.",
    "An iterator over the bytes of a string slice, which is created by",
    "Removes the last element from a vector and returns it, or",
    "A module is an organizational unit of code, and it may contain",
    "If the value is not a number, the result is",
    "The function is unsafe because it does not check that",
    "A list is a sequence of values, which are changed in place by",
    "Converts the string to its lower case, and returns",
];

/// Tokens of each pass of sampled prose with drafts of four tokens, with a table of successors for each text and with one for all.
#[test]
fn texts_of_an_engine_draft_for_each_other() {
    let plan = PlanDir::new("genai/learned-llama-fp32-cpu", 256);
    let tokenizer = TextTokenizer::open(&plan.file("tokenizer.json")).unwrap();
    let mut sequence = sequence(&plan);
    let mut answers = |successors: Option<Rc<RefCell<SuccessorTable>>>| {
        let (mut tokens, mut decoded, mut passes) = (vec![], 0, 0);
        for (seed, text) in (0..).zip(PROSE) {
            let choice = RandomSampling { temperature: 0.7, top_k: 0, top_p: 1.0, min_p: 0.0, seed };
            let sampling = SamplingParams { choice: SamplingMethod::Random(choice), repetition_penalty: 1.0 };
            let request =
                GenerationRequest { sampling, ..request(&tokenizer.encode(text, SpecialTokens::Add).unwrap(), 120) };
            let drafter = NgramDrafter::new(successors.clone().unwrap_or_default());
            let speculation = Speculation::with_length(Box::new(drafter), DraftLength::fixed(4));
            sequence.clear();
            let generation = Generation::new(request, None, usize::MAX).speculate(speculation);
            let (generated, answer) = answer_alone(&mut sequence, generation);
            (decoded, passes) = (decoded + answer.0.len() - 1, passes + generated.speculation.unwrap().passes);
            tokens.push(answer.0);
        }
        (tokens, decoded as f64 / passes as f64)
    };
    let (own, apart) = answers(None);
    let (common, together) = answers(Some(Rc::default()));
    eprintln!("{apart:.3} tokens a pass with a table for each text, {together:.3} with one for all");
    assert_eq!(common, own, "drafts change no answer");
    assert!(together > 1.02 * apart, "{together} and {apart}");
}
