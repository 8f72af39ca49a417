//! Decoders on a WebGPU device: software Vulkan if there is no GPU. Needs `HPP_WEBGPU_TEST`, which `tools/scripts/with-webgpu.sh` sets;
//! otherwise each test reports by name that it was skipped.

mod support;

use hpp_backend::OrtBackend;
use hpp_engine::port::{Backend, MemoryId};
use hpp_engine::{Engine, EngineOptions, Fallback, LogitRows, Silent, StepInput};
use hpp_schema::{ByteSize, DType, Device, DeviceKind, Plan, Provider};
use support::{Recorded, backend, recorded};

fn skipped(test: &str) -> bool {
    let skip = std::env::var_os("HPP_WEBGPU_TEST").is_none();
    if skip {
        println!("SKIPPED: {test}: HPP_WEBGPU_TEST is not set, see tools/scripts/with-webgpu.sh");
    }
    skip
}

/// `plan` with everything on the first GPU.
fn on_gpu(mut plan: Plan) -> Plan {
    plan.devices = vec![Device::new("gpu0", DeviceKind::Gpu)];
    plan.budgets.vram = vec![ByteSize(1 << 30)];
    plan.partitions[0].device = "gpu0".into();
    plan.partitions[0].providers = vec![Provider::WEBGPU];
    plan.states.iter_mut().for_each(|state| state.device = "gpu0".into());
    plan
}

/// Feeds the recorded tokens and returns the largest error relative to the largest logit.
fn follow(model: &Recorded, options: EngineOptions) -> Result<f32, String> {
    let say = |error: hpp_engine::EngineError| {
        format!("{error}: {:?}", std::error::Error::source(&error).map(|source| source.to_string()))
    };
    let plan = on_gpu(model.plan(64));
    let mut engine = Engine::load(&plan, &model.dir, &backend(), options, &Silent).map_err(say)?;
    let mut sequence = engine.new_sequence().map_err(say)?;
    let want = model.floats("step_logits").unwrap();
    let mut logits = engine.step(&mut sequence, StepInput::Tokens(&model.prompt()), LogitRows::Last).map_err(say)?;
    let mut worst = 0f32;
    for (step, token) in model.tokens().iter().enumerate() {
        let recorded = &want[step * logits.vocab..(step + 1) * logits.vocab];
        worst = worst.max(support::error(logits.last(), recorded));
        engine.step_into(&mut sequence, StepInput::Tokens(&[*token]), LogitRows::Last, &mut logits).map_err(say)?;
    }
    let telemetry = engine.telemetry();
    assert_eq!(telemetry.stages[0].provider, Provider::WEBGPU);
    Ok(worst)
}

#[test]
fn decoders_run_on_the_device() {
    if skipped("decoders_run_on_the_device") {
        return;
    }
    let mut failed = Vec::new();
    let wanted = std::env::var("HPP_WEBGPU_MODELS").unwrap_or("llama3-fp32-cpu,llama3-int4-cpu,llama-with-past".into());
    for model in recorded() {
        let name = model.name();
        if !wanted.split(',').any(|wanted| name.ends_with(&format!("/{wanted}"))) {
            continue;
        }
        let started = std::time::Instant::now();
        match follow(&model, EngineOptions { fallback: Fallback::Report, ..Default::default() }) {
            Ok(error) if error < 5e-2 => println!("{name:45} error {error:e} in {:?}", started.elapsed()),
            Ok(error) => failed.push(format!("{name}: error {error}")),
            Err(why) => failed.push(format!("{name}: {why}")),
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// A device has one allocator in a process: the memory of a backend is usable after another has come and gone.
#[test]
fn two_backends_share_the_allocator_of_a_device() {
    if skipped("two_backends_share_the_allocator_of_a_device") {
        return;
    }
    const BYTES: u64 = 1 << 20;
    let kept = backend();
    let reserved = |backend: &OrtBackend| {
        let memory = backend.device_memory(Provider::WEBGPU, "gpu0").unwrap();
        backend.reserve(memory, BYTES).unwrap()
    };
    let before = reserved(&kept);
    for _ in 0..3 {
        let other = backend();
        drop(reserved(&other));
    }
    let after = reserved(&kept);
    for (buffer, byte) in [(&before, 1u8), (&after, 2)] {
        let host = kept.reserve(MemoryId::HOST, BYTES).unwrap();
        kept.write(&host, 0, &[byte; BYTES as usize]).unwrap();
        let view = |buffer| kept.view(buffer, DType::Uint8, &[BYTES]).unwrap();
        kept.copy(&view(&host), &view(buffer)).unwrap();
        let mut read = [0u8; BYTES as usize];
        kept.read(&view(buffer), 0, &mut read).unwrap();
        assert!(read.iter().all(|found| *found == byte));
    }
}
