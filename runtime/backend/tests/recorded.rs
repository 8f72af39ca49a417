//! Every recorded decoder, whole, through the engine on the CPU provider: the recorded tokens and scores come out.

mod support;

use hpp_engine::{Engine, EngineOptions, LogitRows, Silent, StepInput};
use support::{Recorded, backend, error, recorded};

fn best(scores: &[f32]) -> u32 {
    let mut at = 0;
    for (index, score) in scores.iter().enumerate() {
        if *score > scores[at] {
            at = index;
        }
    }
    at as u32
}

/// Greedy generation with the prompt in chunks of `chunk`; the largest error over all steps.
fn generate(model: &Recorded, chunk: usize) -> Result<f32, String> {
    let plan = model.plan(64);
    let backend = backend();
    let say = |error: hpp_engine::EngineError| {
        format!("{error}: {:?}", std::error::Error::source(&error).map(|s| s.to_string()))
    };
    let mut engine = Engine::load(&plan, &model.dir, &backend, EngineOptions::default(), &Silent).map_err(say)?;
    let mut sequence = engine.new_sequence().map_err(say)?;
    let prompt = model.prompt();
    let mut logits = Default::default();
    for part in prompt.chunks(chunk) {
        engine.step_into(&mut sequence, StepInput::Tokens(part), LogitRows::Last, &mut logits).map_err(say)?;
    }
    let want = model.floats("step_logits").unwrap();
    let vocab = logits.vocab;
    let mut worst = 0f32;
    for (step, token) in model.tokens().iter().enumerate() {
        let recorded = &want[step * vocab..(step + 1) * vocab];
        worst = worst.max(error(logits.last(), recorded));
        if best(logits.last()) != *token {
            return Err(format!("step {step}: token {} instead of {token}, error {worst}", best(logits.last())));
        }
        engine.step_into(&mut sequence, StepInput::Tokens(&[*token]), LogitRows::Last, &mut logits).map_err(say)?;
    }
    Ok(worst)
}

fn decoders() -> impl Iterator<Item = Recorded> {
    recorded().into_iter().filter(|model| model.kind().starts_with("decoder") && takes_tokens(model))
}

fn takes_tokens(model: &Recorded) -> bool {
    model.facts["inputs"].as_array().unwrap().iter().any(|input| input["name"] == "input_ids")
}

#[test]
fn decoders_say_what_was_recorded() {
    let mut failed = Vec::new();
    for model in decoders() {
        // gpt2-merged's reference used another branch for the prompt; its with-past branch takes one token at a time.
        match generate(&model, usize::MAX) {
            Ok(error) => println!("{:45} error {error:e}", model.name()),
            Err(why) => failed.push(format!("{}: {why}", model.name())),
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn a_prompt_in_pieces_is_the_same_prompt() {
    let mut failed = Vec::new();
    for model in decoders() {
        for chunk in [1, 3] {
            match generate(&model, chunk) {
                Ok(error) if error < 2e-2 => {}
                Ok(error) => failed.push(format!("{} by {chunk}: error {error}", model.name())),
                Err(why) => failed.push(format!("{} by {chunk}: {why}", model.name())),
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}
