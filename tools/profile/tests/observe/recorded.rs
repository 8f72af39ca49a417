//! Real exports, through the cache, against what one whole pass of plain ONNX Runtime shows (`expected.py`).

use crate::child::{Probe, tokens};
use hpp_model::{Analysis, LogitsMode, analyse};
use hpp_profile::taps::{self, TapError, Tapped, Wanted};
use hpp_schema::probe::{ChatTurn, ObserveProbe, Prompt, PromptContent, Reply, Request};
use hpp_schema::{ExpertStatistics, Statistics};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models"))
}

pub fn analysis(name: &str, context: u64) -> Analysis {
    analyse(&fixtures().join(name), Some(context), LogitsMode::Requested).unwrap()
}

fn write(analysis: &Analysis, dir: &Path) -> Tapped {
    taps::write(analysis, Wanted { attention: true }, dir).unwrap()
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

pub fn recorded_prompt(name: &str) -> Vec<u32> {
    let reference = json(&fixtures().join(name).join("reference.json"));
    reference["prompt_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn matches_expected(name: &str) {
    let short = name.split('/').next_back().unwrap();
    let file = format!("{}/tests/observe/expected/{short}.json", env!("CARGO_MANIFEST_DIR"));
    let expected = json(Path::new(&file));
    let analysis = analysis(name, 64);
    let dir = tempfile::tempdir().unwrap();
    let tapped = write(&analysis, dir.path());
    let generated = expected["generated"].as_u64().unwrap();
    let prompt = recorded_prompt(name);
    let shown = Probe::start().observe(&tapped.plan, &tapped.taps, std::slice::from_ref(&prompt), generated);
    assert_eq!((shown.prompts, shown.prompt_tokens, shown.generated_tokens), (1, prompt.len() as u64, generated));
    compare(&shown, &expected);
}

/// Rounding of float32 kernels that see one token or all at once.
fn close(have: f64, want: &Value) {
    let want = want.as_f64().unwrap();
    assert!((have - want).abs() <= 2e-4 * (1e-3 + want.abs()), "{have} instead of {want}");
}

fn compare(shown: &Statistics, expected: &Value) {
    let boundaries = expected["boundaries"].as_array().unwrap();
    assert_eq!(shown.boundaries.len(), boundaries.len());
    for (have, want) in shown.boundaries.iter().zip(boundaries) {
        assert_eq!((have.elements, have.not_finite), (want["elements"].as_u64().unwrap(), 0));
        close(have.mean_abs, &want["mean_abs"]);
        close(have.variance().unwrap(), &want["variance"]);
        close(have.max_abs, &want["max_abs"]);
        assert!((have.mean - want["mean"].as_f64().unwrap()).abs() < 1e-4 * have.mean_abs, "{have:?}");
    }
    let influence = expected["influence"].as_array().unwrap();
    assert_eq!(shown.influence.len(), influence.len());
    for (have, want) in shown.influence.iter().zip(influence) {
        assert_eq!(have.tokens, expected["tokens"].as_u64().unwrap());
        close(have.mean, want);
    }
    let named = |kind: &str| expected[kind].as_object().unwrap().clone();
    assert_eq!(shown.experts.len(), named("experts").len());
    shown.experts.iter().for_each(|have| compare_experts(have, &expected["experts"][&have.block]));
    assert_eq!(shown.neurons.len(), named("neurons").len());
    for have in &shown.neurons {
        assert_eq!(have.active, ints(&expected["neurons"][&have.block]), "{}", have.block);
    }
    assert_eq!(shown.attention.len(), named("attention").len());
    for have in &shown.attention {
        let want = &expected["attention"][&have.block];
        assert_eq!(have.rows, want["rows"].as_u64().unwrap(), "{}", have.block);
        close(have.mean, &want["mean"]);
    }
}

fn compare_experts(have: &ExpertStatistics, want: &Value) {
    assert_eq!(have.counts, ints(&want["counts"]), "{}", have.block);
    assert_eq!(have.first_visits, want["first_visits"].as_u64().unwrap(), "{}", have.block);
    assert_eq!(have.oracle_hits, ints(&want["oracle_hits"]), "{}", have.block);
    for (size, hits) in (1..).zip(ints(&want["lru_hits"])) {
        assert_eq!(have.lru_hit_rate(size), Some(hits as f64 / have.visits() as f64), "{} {size}", have.block);
    }
}

fn ints(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

#[test]
fn a_fused_mixture_of_experts() {
    matches_expected("genai/gpt-oss-int4-cpu");
}

#[test]
fn attention_taken_apart() {
    matches_expected("optimum/llama-with-past");
}

#[test]
fn a_router_taken_apart() {
    matches_expected("optimum/mixtral-with-past");
}

#[test]
fn a_relu_network() {
    matches_expected("optimum/opt-with-past");
}

/// Every model that can generate is tapped at every boundary, and its tapped plan runs; others are refused with a hint.
#[test]
fn every_fixture_is_observed_or_refused() {
    let root = fixtures();
    let mut probe = Probe::start();
    let mut observed = 0;
    for exporter in std::fs::read_dir(root).unwrap().flatten() {
        for model in std::fs::read_dir(exporter.path()).unwrap().flatten().map(|e| e.path()).filter(|p| p.is_dir()) {
            let analysis = analyse(&model, Some(48), LogitsMode::Requested).unwrap();
            let dir = tempfile::tempdir().unwrap();
            let tapped = match taps::write(&analysis, Wanted { attention: true }, dir.path()) {
                Ok(tapped) => tapped,
                Err(error) => {
                    assert!(matches!(error, TapError::NotALanguageModel(_) | TapError::TakesEmbeddings(_)), "{error}");
                    assert!(error.hint().is_some());
                    continue;
                }
            };
            let shown = probe.observe(&tapped.plan, &tapped.taps, &[vec![1, 2, 3], vec![7; 9]], 2);
            let blocks = analysis.segmentation.blocks.len();
            assert_eq!(shown.boundaries.len(), blocks - 1, "{}: {:?}", model.display(), tapped.not_observed);
            assert_eq!((shown.prompts, shown.prompt_tokens), (2, 12), "{}", model.display());
            // A trained model may end a text before its second token.
            let tokens = shown.prompt_tokens + shown.generated_tokens;
            assert!((14..=16).contains(&tokens), "{}: {tokens} tokens", model.display());
            let hidden = shown.boundaries[0].elements / tokens;
            assert!(shown.boundaries.iter().all(|b| b.elements == hidden * tokens), "{}: {shown:?}", model.display());
            let layers = analysis.segmentation.layer_count();
            let unseen = tapped.not_observed.iter().filter(|why| why.contains("the attention of")).count();
            assert_eq!(shown.attention.len() + unseen, layers, "{}", model.display());
            observed += 1;
        }
    }
    assert!(observed > 10, "{observed}");
}

#[test]
fn requests_add_up_and_bad_prompts_show_nothing() {
    let analysis = analysis("genai/gpt-oss-int4-cpu", 16);
    let dir = tempfile::tempdir().unwrap();
    let tapped = write(&analysis, dir.path());
    let mut probe = Probe::start();
    let prompts = [vec![3, 1, 4, 1, 5], vec![9, 2], vec![6; 12]];
    let mut sum = Statistics::default();
    for prompt in &prompts {
        sum.merge(&probe.observe(&tapped.plan, &tapped.taps, std::slice::from_ref(prompt), 4)).unwrap();
    }
    let all = probe.observe(&tapped.plan, &tapped.taps, &prompts, 4);
    assert_eq!(all.experts, sum.experts);
    all.boundaries
        .iter()
        .zip(&sum.boundaries)
        .for_each(|(a, b)| assert!((a.squares - b.squares).abs() < 1e-9 * a.squares));

    let line = |line, content| Prompt { line, content };
    let turn = ChatTurn { role: "user".into(), content: "hi".into() };
    let mixed = vec![
        line(1, PromptContent::Tokens(vec![1; 13])),
        line(2, PromptContent::Tokens(vec![5000])),
        line(3, PromptContent::Text(String::new())),
        line(4, PromptContent::Tokens(prompts[0].clone())),
        line(5, PromptContent::Text("one two".into())),
        line(6, PromptContent::Messages(vec![turn])),
    ];
    let request =
        ObserveProbe { plan: tapped.plan.clone(), prompts: mixed, decode_tokens: 4, taps: tapped.taps.clone() };
    let replies = probe.ask(&Request::Observe(request));
    let failed: Vec<(u64, &str)> = replies
        .iter()
        .filter_map(
            |r| if let Reply::PromptFailed { line, reason } = r { Some((*line, reason.as_str())) } else { None },
        )
        .collect();
    for (line, says) in [(1, "13 tokens and 4 generated"), (2, "token 5000"), (6, "chat template")] {
        assert!(failed.iter().any(|(at, why)| *at == line && why.contains(says)), "{line} {says}: {failed:?}");
    }
    assert!(failed.iter().all(|(line, _)| [1, 2, 3, 6].contains(line)), "{failed:?}");
    let Some(Reply::Observed { statistics }) = replies.iter().rev().nth(1) else { panic!("{replies:?}") };
    assert_eq!(statistics.prompts, 6 - failed.len() as u64);
    assert_eq!(replies.last(), Some(&Reply::Done));
}

#[test]
fn a_plan_that_is_not_there_fails_and_the_next_request_is_answered() {
    let analysis = analysis("optimum/llama-with-past", 16);
    let dir = tempfile::tempdir().unwrap();
    let tapped = write(&analysis, dir.path());
    let mut probe = Probe::start();
    let plan = dir.path().join("none.yaml");
    let request = |plan: PathBuf, taps| {
        Request::Observe(ObserveProbe { plan, prompts: tokens(&[vec![1]]), decode_tokens: 0, taps })
    };
    let replies = probe.ask(&request(plan, tapped.taps.clone()));
    assert!(matches!(&replies[..], [Reply::Failed { reason }] if reason.contains("none.yaml")), "{replies:?}");
    let mut unknown = tapped.taps.clone();
    unknown[0].name = "no such tensor".into();
    let replies = probe.ask(&request(tapped.plan.clone(), unknown));
    assert!(matches!(&replies[..], [Reply::Failed { reason }] if reason.contains("no such tensor")), "{replies:?}");
    assert_eq!(probe.observe(&tapped.plan, &tapped.taps, &[vec![1]], 0).prompts, 1);
}

#[test]
fn the_tapped_plan_leaves_weights_where_they_are() {
    let dir = tempfile::tempdir().unwrap();
    write(&analysis("genai/llama3-fp32-cpu", 16), dir.path());
    let mut names: Vec<String> =
        std::fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["cpu_0.onnx", "plan.yaml"]);
    assert!(std::fs::metadata(dir.path().join("cpu_0.onnx")).unwrap().len() < 200_000);
}

/// A prompt gives the same counts in passes of one token and in one pass.
#[test]
fn the_cache_changes_nothing() {
    let analysis = analysis("genai/llama3-fp32-cpu", 64);
    let dir = tempfile::tempdir().unwrap();
    let tapped = write(&analysis, dir.path());
    let plan = std::fs::read_to_string(&tapped.plan).unwrap();
    let mut chunked = hpp_schema::Plan::from_yaml(&plan).unwrap();
    chunked.schedule.prefill_chunk = Some(1);
    let single = tapped.plan.with_file_name("single.yaml");
    std::fs::write(&single, chunked.to_yaml().unwrap()).unwrap();
    let mut probe = Probe::start();
    let prompt: Vec<u32> = (1..40).map(|i| i * 7 % 500).collect();
    let whole = probe.observe(&tapped.plan, &tapped.taps, std::slice::from_ref(&prompt), 0);
    let through_cache = probe.observe(&single, &tapped.taps, &[prompt], 0);
    assert_eq!(whole.boundaries.len(), 5);
    let same = |a: f64, b: f64| assert!((a - b).abs() <= 1e-5 * (1e-3 + a.abs()), "{a} {b}");
    for (a, b) in whole.boundaries.iter().zip(&through_cache.boundaries) {
        assert_eq!(a.elements, b.elements);
        same(a.mean_abs, b.mean_abs);
        same(a.squares, b.squares);
        same(a.max_abs, b.max_abs);
    }
    whole.influence.iter().zip(&through_cache.influence).for_each(|(a, b)| same(a.mean, b.mean));
    whole.attention.iter().zip(&through_cache.attention).for_each(|(a, b)| {
        assert_eq!(a.rows, b.rows);
        same(a.mean, b.mean);
    });
}
