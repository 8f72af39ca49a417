//! Steps over a toy decoder: the right tokens however the text is cut, the states where they belong, and honest errors.

mod support;

use hpp_engine::mock::MockBackend;
use hpp_engine::{Engine, EngineError, EngineOptions, LogitRows, Logits, PageLayout, PageToSave, Sequence, StepInput};
use hpp_schema::{Dim, StateUpdate};
use proptest::prelude::*;
use support::{DEVICE, Toy, VOCAB, answer, best, second};

fn say(engine: &mut Engine<MockBackend>, sequence: &mut Sequence<MockBackend>, ids: &[u32]) -> u32 {
    best(engine.step(sequence, StepInput::Tokens(ids), LogitRows::Last).unwrap().last())
}

#[test]
fn greedy_text_is_the_plain_one() {
    let toy = Toy::new();
    let mut engine = toy.load().unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let mut text = vec![3, 1, 4, 1, 5];
    let mut next = say(&mut engine, &mut sequence, &text);
    for _ in 0..20 {
        assert_eq!(next, answer(&text));
        text.push(next);
        next = say(&mut engine, &mut sequence, &text[text.len() - 1..]);
    }
    assert_eq!(sequence.len(), 25);
    let telemetry = engine.telemetry();
    assert_eq!((telemetry.prefill.count, telemetry.decode.count), (1, 20));
    assert_eq!((telemetry.prefill_tokens, telemetry.decode_tokens), (5, 20));
    assert_eq!(telemetry.stages.iter().map(|stage| stage.decode.count).collect::<Vec<_>>(), [20, 20]);
    assert_eq!(telemetry.copies.count, 42, "token ids and one boundary cross in each pass");
    assert_eq!(telemetry.copied_bytes, (5 + 20) * (8 + 4));
}

#[test]
fn scores_left_on_a_device_are_read_from_there_and_counted() {
    let toy = Toy::new();
    let mut head = second();
    head.outputs[0].memory = DEVICE;
    toy.backend.model("cpu_0.onnx", head);
    let mut engine = toy.load().unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let text = [3, 1, 4];
    assert_eq!(say(&mut engine, &mut sequence, &text), answer(&text));
    let telemetry = engine.telemetry();
    assert_eq!((telemetry.copies.count, telemetry.copied_bytes), (3, 3 * (8 + 4) + VOCAB * 4));
}

#[test]
fn all_rows_are_the_answers_after_each_token() {
    let toy = Toy::new();
    let mut engine = toy.load().unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let text = [7, 7, 2, 9];
    let logits = engine.step(&mut sequence, StepInput::Tokens(&text), LogitRows::All).unwrap();
    assert_eq!((logits.rows, logits.vocab), (4, 16));
    for at in 0..4 {
        assert_eq!(best(logits.row(at)), answer(&text[..=at]));
    }
}

#[test]
fn sequences_do_not_meet() {
    let toy = Toy::new();
    let mut engine = toy.load().unwrap();
    let mut texts = [vec![1, 2, 3], vec![9], vec![4, 4]];
    let mut sequences = [(); 3].map(|()| engine.new_sequence().unwrap());
    let mut fed = [0; 3];
    for _ in 0..6 {
        for at in 0..3 {
            let next = say(&mut engine, &mut sequences[at], &texts[at][fed[at]..]);
            assert_eq!(next, answer(&texts[at]));
            fed[at] = texts[at].len();
            texts[at].push(next);
        }
    }
}

#[test]
fn a_plan_that_takes_one_token_a_pass_answers_the_same() {
    let mut toy = Toy::new();
    toy.plan.schedule.prefill_chunk = Some(2);
    let mut engine = toy.load().unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let text = [5, 6, 7, 8, 9];
    let logits = engine.step(&mut sequence, StepInput::Tokens(&text), LogitRows::All).unwrap();
    assert_eq!(logits.rows, 5);
    (0..5).for_each(|at| assert_eq!(best(logits.row(at)), answer(&text[..=at])));
    assert_eq!(engine.telemetry().prefill.count + engine.telemetry().decode.count, 3);
}

#[test]
fn shapes_nobody_knows_are_found_at_the_run() {
    let mut toy = Toy::new();
    toy.plan.partitions[0].outputs[0].shape[1] = Dim::Unknown;
    toy.plan.partitions[1].outputs[0].shape[1] = Dim::Unknown;
    let mut engine = toy.load().unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let mut text = vec![3, 1, 4];
    let mut next = say(&mut engine, &mut sequence, &text);
    for _ in 0..4 {
        assert_eq!(next, answer(&text));
        text.push(next);
        next = say(&mut engine, &mut sequence, &text[text.len() - 1..]);
    }
}

#[test]
fn taps_show_what_crossed() {
    let toy = Toy::new();
    let mut engine = toy.load().unwrap();
    engine.set_taps(["hidden.0"]).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    say(&mut engine, &mut sequence, &[2, 3]);
    assert_eq!(engine.taps()["hidden.0"].to_f32().unwrap(), [2.0, 5.0 + 3.0 * 2.0]);
    engine.set_taps([]).unwrap();
    say(&mut engine, &mut sequence, &[4]);
    assert!(engine.taps().is_empty());
    assert!(matches!(engine.set_taps(["nothing"]), Err(EngineError::WrongOutput { .. })));
}

#[test]
fn bad_steps_are_refused_with_numbers_and_change_nothing() {
    let toy = Toy::new();
    let mut engine = toy.load().unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    say(&mut engine, &mut sequence, &[1, 2]);
    let mut step = |ids: &[u32]| engine.step(&mut sequence, StepInput::Tokens(ids), LogitRows::Last).unwrap_err();
    assert!(matches!(step(&[]), EngineError::EmptyInput));
    let error = step(&[1, 16]);
    assert_eq!(error.to_string(), "token 16 at position 3 is out of range: the model knows ids 0 to 15");
    let error = step(&[1; 63]);
    assert_eq!(error.to_string(), "63 tokens do not fit: the sequence has 2 of a context of 64");
    assert!(error.hint().is_some());
    assert_eq!(say(&mut engine, &mut sequence, &[3]), answer(&[1, 2, 3]));
}

#[test]
fn a_sequence_goes_back_as_far_as_its_states_can() {
    let toy = Toy::new();
    let mut engine = toy.load().unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    say(&mut engine, &mut sequence, &[1, 2, 3]);
    say(&mut engine, &mut sequence, &[4, 5, 6]);
    // The toy has replaced and appended states: it can go back only to the end of the pass before the last.
    assert_eq!(engine.truncate(&mut sequence, 2).unwrap(), None);
    assert_eq!(engine.truncate(&mut sequence, 7).unwrap(), None);
    assert_eq!(engine.truncate(&mut sequence, 6).unwrap(), Some(6));
    assert_eq!(engine.truncate(&mut sequence, 5).unwrap(), Some(3));
    assert_eq!(say(&mut engine, &mut sequence, &[7]), answer(&[1, 2, 3, 7]));
    assert_eq!(engine.truncate(&mut sequence, 3).unwrap(), Some(3));
    assert_eq!(engine.truncate(&mut sequence, 2).unwrap(), None, "only once");
    assert_eq!(say(&mut engine, &mut sequence, &[8]), answer(&[1, 2, 3, 8]));
}

#[test]
fn the_context_is_filled_to_its_last_token() {
    let toy = Toy::new();
    let mut engine = toy.load().unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let text = [1; 64];
    assert_eq!(say(&mut engine, &mut sequence, &text), answer(&text));
    assert_eq!(sequence.room(), 0);
}

#[test]
fn another_context_is_possible_within_the_models() {
    let toy = Toy::new();
    let longer = EngineOptions { context: Some(100), ..Default::default() };
    let mut engine = toy.load_with(longer).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let text = [2; 100];
    assert_eq!(say(&mut engine, &mut sequence, &text), answer(&text));
    for context in [0, 257] {
        let options = EngineOptions { context: Some(context), ..Default::default() };
        assert!(matches!(toy.load_with(options), Err(EngineError::Context { .. })));
    }
}

/// The page of a sequence that starts at token `first`.
fn saved(
    engine: &mut Engine<MockBackend>,
    layout: &PageLayout,
    sequence: &Sequence<MockBackend>,
    first: u64,
) -> Vec<u8> {
    let mut page = vec![0; layout.bytes() as usize];
    engine.save_pages(sequence, vec![PageToSave { layout, first, bytes: &mut page }]).unwrap();
    page
}

#[test]
fn pages_bring_every_kind_of_state_into_another_engine() {
    let toy = Toy::new();
    let mut engine = toy.load().unwrap();
    let layout = engine.page_layout(4).unwrap();
    assert_eq!((layout.bytes(), layout.has_snapshots()), (4 * 4 + 4 + 4 * 4, true));
    let mut sequence = engine.new_sequence().unwrap();
    let text = [3, 1, 4, 1, 5, 9, 2, 6];
    let mut pages = Vec::new();
    for first in [0, 4] {
        say(&mut engine, &mut sequence, &text[first..first + 4]);
        pages.push(saved(&mut engine, &layout, &sequence, first as u64));
    }
    let mut page = vec![0; layout.bytes() as usize];
    for (first, bytes) in [(0, 36), (8, 36), (4, 35)] {
        let page = PageToSave { layout: &layout, first, bytes: &mut page[..bytes] };
        let refused = engine.save_pages(&sequence, vec![page]);
        assert!(matches!(refused, Err(EngineError::WrongInput { .. })), "{first}: {refused:?}");
    }
    let mut other = toy.load().unwrap();
    for count in [1, 2] {
        let some: Vec<(&PageLayout, &[u8])> = pages[..count].iter().map(|page| (&layout, page.as_slice())).collect();
        let mut restored = other.restore_pages(&some).unwrap();
        assert_eq!(restored.len(), 4 * count as u64);
        let mut whole = text[..4 * count].to_vec();
        for token in [7, 11, 2] {
            whole.push(token);
            assert_eq!(say(&mut other, &mut restored, &[token]), answer(&whole));
        }
        assert_eq!(other.truncate(&mut restored, 1).unwrap(), None);
    }
    let too_many = vec![(&layout, pages[0].as_slice()); 17];
    assert!(matches!(other.restore_pages(&too_many), Err(EngineError::WrongInput { .. })));
    assert!(matches!(other.restore_pages(&[(&layout, &[0; 3])]), Err(EngineError::WrongInput { .. })));
}

#[test]
fn a_part_of_a_page_may_follow_whole_pages() {
    let toy = Toy::new();
    let mut engine = toy.load().unwrap();
    let text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5];
    let layout = engine.page_layout(4).unwrap();
    for pages in 0..=2 {
        for tail in 1..=3 {
            let tail_layout = engine.page_layout(tail).unwrap();
            let mut sequence = engine.new_sequence().unwrap();
            let mut records = Vec::new();
            for first in (0..4 * pages).step_by(4) {
                say(&mut engine, &mut sequence, &text[first..first + 4]);
                records.push(saved(&mut engine, &layout, &sequence, first as u64));
            }
            let length = 4 * pages + tail as usize;
            say(&mut engine, &mut sequence, &text[4 * pages..length]);
            records.push(saved(&mut engine, &tail_layout, &sequence, 4 * pages as u64));
            let layouts = std::iter::repeat_n(&layout, pages).chain([&tail_layout]);
            let all: Vec<(&PageLayout, &[u8])> = layouts.zip(records.iter().map(Vec::as_slice)).collect();
            let mut restored = engine.restore_pages(&all).unwrap();
            assert_eq!(restored.len(), length as u64);
            assert_eq!(saved(&mut engine, &tail_layout, &restored, 4 * pages as u64), records[pages]);
            let mut whole = text[..length].to_vec();
            for token in [7, 11, 2] {
                whole.push(token);
                assert_eq!(say(&mut engine, &mut restored, &[token]), answer(&whole), "{pages} pages and {tail}");
            }
            let wrong: Vec<(&PageLayout, &[u8])> = records.iter().map(|page| (&layout, page.as_slice())).collect();
            assert!(matches!(engine.restore_pages(&wrong), Err(EngineError::WrongInput { .. })));
        }
    }
}

#[test]
fn a_window_keeps_its_size_whatever_the_context() {
    let mut toy = Toy::new();
    // The toy's cache is no window, but its buffer shows what size the engine gave it.
    toy.plan.states[0].update = StateUpdate::InPlace { axis: 2, capacity: 32 };
    toy.plan.states[0].bytes = hpp_schema::ByteSize(128);
    let engine_bytes = |context| {
        let options = EngineOptions { context: Some(context), ..Default::default() };
        let mut engine = toy.load_with(options).unwrap();
        engine.new_sequence().unwrap().state_bytes()
    };
    // Window 128, two replaced floats, and two appended buffers that follow the context.
    assert_eq!(engine_bytes(64), 128 + 8 + 2 * 64 * 4);
    assert_eq!(engine_bytes(128), 128 + 8 + 2 * 128 * 4);
}

#[test]
fn cancelling_in_a_run_ends_it_and_the_sequence() {
    let toy = Toy::new();
    let mut engine = toy.load().unwrap();
    let handle = engine.cancel_handle();
    let mut model = second();
    let (kernel, stop) = (model.kernel.clone(), handle.clone());
    model.kernel = std::rc::Rc::new(move |frame| {
        stop.cancel();
        kernel(frame)
    });
    toy.backend.model("cpu_0.onnx", model);
    let mut engine_that_stops =
        toy.load_with(EngineOptions { cancel: Some(handle.clone()), ..Default::default() }).unwrap();
    let mut sequence = engine_that_stops.new_sequence().unwrap();
    let stopped = engine_that_stops.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last);
    assert!(matches!(stopped, Err(EngineError::Cancelled)));
    handle.reset();
    let after = engine_that_stops.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last);
    assert!(matches!(after, Err(EngineError::Interrupted)));
    // The other engine was stopped by the same handle, between steps, and goes on.
    let mut sequence = engine.new_sequence().unwrap();
    handle.cancel();
    let mut logits = Logits::default();
    let refused = engine.step_into(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last, &mut logits);
    assert!(matches!(refused, Err(EngineError::Cancelled)));
    handle.reset();
    assert_eq!(say(&mut engine, &mut sequence, &[1]), answer(&[1]));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// However a text is cut into steps, each answer is that of the whole text so far.
    #[test]
    fn cutting_a_text_changes_nothing(text in prop::collection::vec(0u32..16, 1..60), cuts in prop::collection::vec(1usize..9, 60)) {
        let toy = Toy::new();
        let mut engine = toy.load().unwrap();
        let mut sequence = engine.new_sequence().unwrap();
        let mut fed = 0;
        for cut in cuts {
            let end = (fed + cut).min(text.len());
            if end == fed {
                break;
            }
            prop_assert_eq!(say(&mut engine, &mut sequence, &text[fed..end]), answer(&text[..end]));
            fed = end;
        }
    }
}
