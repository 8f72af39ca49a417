//! A text that changes keeps what it can, and gives the scores of a text that was read anew.

mod support;

use hpp_backend::{OrtBackend, OrtOptions};
use hpp_engine::{Engine, EngineOptions, NamedTensors, Silent};
use hpp_exec::interrupt::Interrupt;
use hpp_exec::session::{Fed, Session};
use std::sync::Arc;
use support::PlanDir;

fn session(plan: &PlanDir) -> Session<OrtBackend> {
    let backend = OrtBackend::open(&OrtOptions::default(), Arc::new(Silent)).unwrap();
    let dir = plan.path();
    let engine = Engine::load(&plan.plan, dir.parent().unwrap(), &backend, EngineOptions::default(), &Silent).unwrap();
    Session::new(engine, None, NamedTensors::new())
}

/// Scores after a text read by itself.
fn fresh(session: &mut Session<OrtBackend>, text: &[u32]) -> Vec<f32> {
    session.reset();
    session.begin(text, &Interrupt::never()).unwrap();
    session.scores().to_vec()
}

fn near(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4)
}

#[test]
fn changed_texts_keep_their_common_beginning_where_states_allow() {
    // (model, whether a text can be taken back)
    for (name, goes_back) in [
        ("genai/llama3-fp32-cpu", true),
        ("torch/gpt-dynamo", true),
        ("optimum/llama-with-past", false),
        ("genai/qwen3.5-fp32-cpu", false),
        ("genai/gemma2-fp32-cpu", false),
    ] {
        let plan = PlanDir::new(name, 64);
        let mut session = session(&plan);
        let texts: [&[u32]; 5] =
            [&[5, 6, 7, 8, 9], &[5, 6, 7, 8, 9, 10, 11], &[5, 6, 7, 30, 31], &[5, 6, 7], &[40, 41]];
        let want: Vec<Vec<f32>> = texts.iter().map(|text| fresh(&mut session, text)).collect();
        session.reset();
        let back = |n| if goes_back { n } else { 0 };
        for ((text, want), reused) in texts.iter().zip(&want).zip([0, 5, back(3), back(2), 0]) {
            assert_eq!(session.begin(text, &Interrupt::never()).unwrap(), Fed::Whole { reused }, "{name}: {text:?}");
            assert_eq!(session.tokens(), *text, "{name}");
            assert!(near(session.scores(), want), "{name}: {text:?}");
        }
    }
}

#[test]
fn ctrl_c_between_pieces_of_a_prompt_leaves_a_text_that_can_go_on() {
    let mut plan = PlanDir::new("genai/llama3-fp32-cpu", 256);
    plan.plan.schedule.prefill_chunk = Some(16);
    let mut session = session(&plan);
    let text: Vec<u32> = (0..200).collect();
    let interrupt = Interrupt::never();
    interrupt.ask();
    assert_eq!(session.begin(&text, &interrupt).unwrap(), Fed::Interrupted);
    interrupt.gentle();
    assert_eq!(session.begin(&text, &interrupt).unwrap(), Fed::Whole { reused: 0 });
    let pieces = session.scores().to_vec();
    assert!(near(&pieces, &fresh(&mut session, &text)));
    assert_eq!(session.room(), 56);
}
