//! Token sequences over ONNX Runtime: reuse of a common prefix, cancellation between chunks, several sequences on one engine.

mod support;

use hpp_backend::{OrtBackend, OrtOptions};
use hpp_engine::{Engine, EngineOptions, Silent};
use hpp_generate::sampling::{Choice, SamplingParams};
use hpp_generate::{
    Event, FinishReason, GenerateError, Generation, ModelInputs, Prefill, Request, SingleSequence, TokenSequence,
    generate, prompt_chunk,
};
use std::sync::Arc;
use support::PlanDir;

fn engine(plan: &PlanDir) -> Engine<OrtBackend> {
    let backend = OrtBackend::open(&OrtOptions::default(), Arc::new(Silent)).unwrap();
    let dir = plan.path();
    Engine::load(&plan.plan, dir.parent().unwrap(), &backend, EngineOptions::default(), &Silent).unwrap()
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

fn request(prompt: &[u32], max_new_tokens: u64) -> Request {
    let sampling = SamplingParams { choice: Choice::Greedy, repetition_penalty: 1.0 };
    Request { prompt: prompt.into(), max_new_tokens, eos_token_ids: vec![], stop: vec![], sampling }
}

#[test]
fn changed_texts_keep_their_common_prefix_if_states_allow() {
    // (model, whether its states can be truncated)
    for (name, truncates) in [
        ("genai/llama3-fp32-cpu", true),
        ("torch/gpt-dynamo", true),
        ("optimum/llama-with-past", false),
        ("genai/qwen3.5-fp32-cpu", false),
        ("genai/gemma2-fp32-cpu", false),
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
    let on_event = &mut |event: Event<'_>| {
        if let Event::Token { id, logits } = event {
            assert_eq!(logits.len(), 512);
            tokens.borrow_mut().push(id);
        }
        Ok::<_, GenerateError>(())
    };
    let cancelled = || tokens.borrow().len() == 5;
    let generated = generate(&mut sequence, request(&prompt, 16), None, &cancelled, on_event).unwrap();
    assert_eq!((generated.finish_reason, &generated.tokens[..]), (FinishReason::Cancelled, &plan.model.tokens()[..5]));
    assert_eq!(generated.tokens, *tokens.borrow());
    assert_eq!((generated.usage.prompt_tokens, generated.usage.completion_tokens), (prompt.len(), 5));
}

/// One step of one request at a time, as a scheduler would drive them.
#[test]
fn requests_interleaved_on_one_engine_give_the_tokens_they_give_alone() {
    let mut plan = PlanDir::new("genai/llama3-fp32-cpu", 128);
    plan.plan.schedule.prefill_chunk = Some(4);
    let mut engine = engine(&plan);
    let inputs = ModelInputs::default();
    let long: Vec<u32> = (0..100).collect();
    let prompts = [plan.model.prompt(), long, vec![40, 41]];
    let mut alone = SingleSequence::new(self::engine(&plan), ModelInputs::default());
    let mut want = vec![];
    for prompt in &prompts {
        alone.clear();
        let ignore = &mut |_: Event<'_>| Ok::<_, GenerateError>(());
        want.push(generate(&mut alone, request(prompt, 8), None, &|| false, ignore).unwrap().tokens);
    }

    let chunk = prompt_chunk(&engine);
    assert_eq!(chunk, 64);
    let start = |prompt: &Vec<u32>| (Generation::new(request(prompt, 8), None, chunk), TokenSequence::default());
    let mut running: Vec<(Generation, TokenSequence<OrtBackend>)> = prompts.iter().map(start).collect();
    while running.iter().any(|(generation, _)| !generation.is_finished()) {
        for (generation, sequence) in &mut running {
            let Some(tokens) = generation.next_input() else { continue };
            sequence.feed(&mut engine, &inputs, tokens).unwrap();
            generation.advance(sequence.logits(), sequence.room(&engine)).unwrap();
        }
    }
    let got: Vec<Vec<u32>> = running.into_iter().map(|(generation, _)| generation.into_result().tokens).collect();
    assert_eq!(got, want);
}
