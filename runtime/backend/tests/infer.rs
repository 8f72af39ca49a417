//! Single runs from named inputs to named outputs, and decoders that take embeddings.

mod support;

use hpp_engine::{Engine, EngineError, EngineOptions, HostTensor, LogitRows, NamedTensors, Silent, StepInput};
use support::{Recorded, backend, error, recorded};

fn load(model: &Recorded) -> Engine<hpp_backend::OrtBackend> {
    Engine::load(&model.plan(64), &model.dir, &backend(), EngineOptions::default(), &Silent).unwrap()
}

/// The arrays of `reference.npz` under `input/` or `output/`.
fn arrays(model: &Recorded, side: &str) -> NamedTensors {
    let facts = model.facts["arrays"].as_object().unwrap();
    let names = facts.keys().filter_map(|name| Some((name, name.strip_prefix(side)?.strip_prefix('/')?)));
    names.map(|(name, short)| (short.to_owned(), model.array(name))).collect()
}

#[test]
fn single_run_models_give_the_recorded_outputs() {
    let mut looked_at = 0;
    for model in recorded().iter().filter(|model| model.kind() == "single_run") {
        let mut engine = load(model);
        let outputs = engine.infer(&arrays(model, "input")).unwrap();
        for (name, want) in arrays(model, "output") {
            let have = &outputs[&name];
            assert_eq!((have.dtype, &have.shape), (want.dtype, &want.shape), "{} {name}", model.name());
            let error = error(&have.to_f32().unwrap(), &want.to_f32().unwrap());
            assert!(error < 1e-5, "{} {name}: {error}", model.name());
            looked_at += 1;
        }
    }
    assert!(looked_at > 0);
}

#[test]
fn a_decoder_runs_once_if_all_inputs_are_given() {
    let model = find("llama-with-past");
    let mut engine = load(&model);
    let prompt: Vec<i64> = model.prompt().iter().map(|id| i64::from(*id)).collect();
    let length = prompt.len() as u64;
    let mut inputs = NamedTensors::from([
        ("input_ids".to_owned(), HostTensor::from_i64(&[1, length], &prompt)),
        ("attention_mask".to_owned(), HostTensor::from_i64(&[1, length], &vec![1; prompt.len()])),
        ("position_ids".to_owned(), HostTensor::from_i64(&[1, length], &(0..prompt.len() as i64).collect::<Vec<_>>())),
    ]);
    let plan = engine.plan().clone();
    for state in &plan.states {
        let size = |axis: usize| state.shape[axis].as_fixed().unwrap_or(1);
        inputs.insert(state.past.clone(), HostTensor::from_f32(&[1, size(1), 0, size(3)], &[]));
    }
    let outputs = engine.infer(&inputs).unwrap();
    let want = model.floats("prefill_logits_all").unwrap();
    assert!(error(&outputs["logits"].to_f32().unwrap(), &want) < 1e-5);
    assert_eq!(outputs[&plan.states[0].present].shape[2], length);
}

#[test]
fn wrong_inputs_are_named() {
    let model = recorded().into_iter().find(|model| model.kind() == "single_run").unwrap();
    let mut engine = load(&model);
    let good = arrays(&model, "input");
    let (name, tensor) = good.iter().next().map(|(name, tensor)| (name.clone(), tensor.clone())).unwrap();
    let mut missing = good.clone();
    missing.remove(&name);
    assert!(matches!(engine.infer(&missing), Err(EngineError::MissingInput { name: n, .. }) if n == name));
    let mut surplus = good.clone();
    surplus.insert("surplus".into(), tensor.clone());
    assert!(matches!(engine.infer(&surplus), Err(EngineError::WrongInput { name: n, .. }) if n == "surplus"));
    let mut flat = good.clone();
    flat.insert(name.clone(), HostTensor { shape: vec![tensor.shape.iter().product()], ..tensor.clone() });
    assert!(matches!(engine.infer(&flat), Err(EngineError::WrongInput { name: n, .. }) if n == name));
    let mut short = good.clone();
    short.get_mut(&name).unwrap().bytes.pop();
    assert!(matches!(engine.infer(&short), Err(EngineError::WrongInput { name: n, .. }) if n == name));
    engine.infer(&good).unwrap();
}

#[test]
fn a_single_run_has_no_steps() {
    let model = recorded().into_iter().find(|model| model.kind() == "single_run").unwrap();
    let mut engine = load(&model);
    let mut sequence = engine.new_sequence().unwrap();
    let error = engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap_err();
    assert!(matches!(error, EngineError::Unsupported(_)), "{error}");
}

#[test]
fn a_decoder_takes_embeddings() {
    let model = find("llama3-fp32-cpu-noembed");
    // The same model including its embedding: a table of 512 rows of 64 at the start of its weights.
    let weights = std::fs::read(find("llama3-fp32-cpu-hidden").dir.join("model.onnx.data")).unwrap();
    let table: Vec<f32> =
        weights[..512 * 64 * 4].chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    let row = |id: u32| &table[id as usize * 64..(id as usize + 1) * 64];
    let mut engine = load(&model);
    let mut sequence = engine.new_sequence().unwrap();
    let prompt: Vec<f32> = model.prompt().iter().flat_map(|id| row(*id).to_vec()).collect();
    let input = StepInput::Embeddings { tokens: model.prompt().len(), data: &prompt };
    let mut logits = engine.step(&mut sequence, input, LogitRows::Last).unwrap();
    let want = model.floats("step_logits").unwrap();
    for (step, token) in model.tokens().into_iter().enumerate() {
        let error = error(logits.last(), &want[step * 512..(step + 1) * 512]);
        assert!(error < 1e-5, "step {step}: {error}");
        let input = StepInput::Embeddings { tokens: 1, data: row(token) };
        engine.step_into(&mut sequence, input, LogitRows::Last, &mut logits).unwrap();
    }
    let tokens = engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap_err();
    assert!(matches!(tokens, EngineError::MissingInput { .. }), "{tokens}");
}

fn find(name: &str) -> Recorded {
    recorded().into_iter().find(|model| model.dir.ends_with(name)).unwrap_or_else(|| panic!("no fixture {name}"))
}
