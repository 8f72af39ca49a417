//! Hotness, and the conclusions if all layers are equally hot.

use super::*;
use crate::derive::derive;
use crate::effort::Effort;
use crate::rates::rates;
use crate::sample;
const CPU: Provider = Provider::CPU;
const WEBGPU: Provider = Provider::WEBGPU;

#[test]
fn each_term_is_kept_and_the_quotient_is_theirs() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(&[CPU, WEBGPU]));
    sample::time_all(&mut profile, CPU, 2.0);
    let roofline = RooflineEstimator::new(&analysis, Effort::Quick, 0);
    derive(&mut profile);
    assert_eq!(hotness(&profile, &roofline), [], "the device is not measured yet");
    sample::time_all(&mut profile, WEBGPU, 0.5);
    derive(&mut profile);
    let found = hotness(&profile, &roofline);
    assert_eq!(found.len(), profile.model.blocks.len());
    let layer = found.iter().find(|entry| entry.block == "layers.2").unwrap();
    let HotnessTerms { cpu_ms, gpu_ms, weight_bytes, kv_bytes, ms_per_gib } = layer.decode;
    // The longest context is 200 tokens: 1.2 times the time of none.
    assert!((cpu_ms - 2.4).abs() < 1e-9 && (gpu_ms - 0.6).abs() < 1e-9, "{layer:?}");
    assert!(weight_bytes > 600_000 && kv_bytes > 0, "{layer:?}");
    let gib = (weight_bytes + kv_bytes) as f64 / (1u64 << 30) as f64;
    assert!((ms_per_gib - 1.8 / gib).abs() < 1e-6 * ms_per_gib);
    assert!((layer.prefill.cpu_ms - 20.0).abs() < 1e-9);
    profile.hotness = found;
    assert_eq!(profile.check(), []);
}

#[test]
fn a_dense_model_is_flat_and_told_what_decides() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(&[CPU]));
    assert_eq!(verdict(&profile), None, "nothing is measured");
    sample::time_all(&mut profile, CPU, 2.0);
    derive(&mut profile);
    let curve = |gb_per_s| hpp_schema::BandwidthCurve {
        path: hpp_schema::BandwidthPath::RamRead,
        points: vec![hpp_schema::BandwidthPoint { bytes: 1 << 28, gb_per_s }],
    };
    (profile.machine.tflops, profile.machine.curves) = (Some(0.2), vec![curve(20.0)]);
    profile.machine.rates = rates(&profile, &RooflineEstimator::new(&analysis, Effort::Quick, 0));
    let flat = verdict(&profile).unwrap();
    assert!(flat.evenness == Evenness::Flat && flat.provider.is_none() && flat.spread < 1e-6, "{flat:?}");
    let text = flat.lines.join("\n");
    assert!(text.contains("6 MiB of weights") && text.contains("20.0 GB/s"), "{text}");
    // One layer three times as slow per byte.
    for entry in profile.classes.iter_mut().filter(|entry| entry.block == "layers.0") {
        entry.providers[0].decode.fit.as_mut().unwrap().constant_ms = 6.0;
    }
    let uneven = verdict(&profile).unwrap();
    assert!(
        uneven.evenness == Evenness::Uneven && uneven.spread > 1.0 && uneven.lines[0].contains("differ"),
        "{uneven:?}"
    );
}

#[test]
fn disturbed_measurements_do_not_decide_whether_layers_differ() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(&[CPU]));
    sample::time_all(&mut profile, CPU, 2.0);
    derive(&mut profile);
    let slow = profile.classes.iter().position(|entry| entry.block == "layers.0").unwrap();
    profile.classes[slow].providers[0].decode.fit.as_mut().unwrap().constant_ms = 6.0;
    assert_eq!(verdict(&profile).unwrap().evenness, Evenness::Uneven);

    let mut busy = profile.clone();
    busy.others_cpu_share = Some(0.4);
    assert_eq!(verdict(&busy).unwrap().evenness, Evenness::Unknown);

    let mut varying = profile.clone();
    let single = varying.classes[slow].providers[0].decode.points[0].single.as_mut().unwrap();
    single.p90_ms = 64.0 * single.median_ms;
    for (quick, why) in [(true, "the few runs of --quick vary"), (false, "the measurements were disturbed")] {
        varying.settings.quick = quick;
        let verdict = verdict(&varying).unwrap();
        assert!(verdict.evenness == Evenness::Unknown && verdict.lines[0].contains(why), "{verdict:?}");
    }
}
