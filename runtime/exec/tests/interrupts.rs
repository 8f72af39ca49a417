//! Ctrl-C, and a reader of stdout that goes away.

#![cfg(unix)]

mod support;

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use support::{PlanDir, Ran, command};

/// A model without a table of positions, whose text can grow long enough to be interrupted.
fn endless() -> PlanDir {
    PlanDir::new("optimum/llama-with-past", 20_000)
}

fn spawn(plan: &PlanDir, args: &[&str]) -> Child {
    let path = plan.path();
    let mut command = command([path.to_str().unwrap()].into_iter().chain(args.iter().copied()));
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn interrupt(child: &Child) {
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
}

/// Waits until the plan is loaded.
fn loaded(child: &mut Child) -> impl Read + use<> {
    let (mut text, mut byte) = (String::new(), [0]);
    let mut stderr = child.stderr.take().unwrap();
    while !text.contains("plan loaded") {
        stderr.read_exact(&mut byte).unwrap();
        text.push(char::from(byte[0]));
    }
    stderr
}

/// Waits for the first byte of output, so that generation is known to run.
fn first_byte(child: &mut Child) {
    let mut byte = [0];
    child.stdout.as_mut().unwrap().read_exact(&mut byte).unwrap();
}

fn finish(mut child: Child) -> Ran {
    let started = Instant::now();
    drop(child.stdin.take());
    let ran = Ran::of(child.wait_with_output().unwrap());
    assert!(started.elapsed() < Duration::from_secs(20), "it continued");
    ran
}

#[test]
fn the_first_ctrl_c_stops_the_text_and_keeps_it() {
    let plan = endless();
    let logits = plan.file("scores.npy");
    for drafts in [&[][..], &["--speculate", "ngram", "--draft-tokens", "4"]] {
        let args = ["--tokens", "1,2,3", "--ignore-eos", "--logits", logits.to_str().unwrap()];
        let mut child = spawn(&plan, &[&args[..], drafts].concat());
        first_byte(&mut child);
        interrupt(&child);
        let ran = finish(child);
        assert_eq!(ran.code, Some(130), "{}", ran.stderr);
        assert!(!ran.stderr.contains("error") && ran.stderr.contains("tok/s"), "{}", ran.stderr);
        assert!(ran.stderr.contains("generation was interrupted after "), "{}", ran.stderr);
        assert!(hpp_exec::tensors::read_npy(&logits).unwrap().shape[0] >= 1);
    }
}

/// The cancelled pass drops the state, so its size is not known any more.
#[test]
fn ctrl_c_in_the_prompt_says_so_and_shows_no_empty_state() {
    let plan = endless();
    let prompt = vec!["1"; 6_000].join(",");
    let mut child = spawn(&plan, &["--tokens", &prompt, "--ignore-eos", "-v"]);
    let mut stderr = loaded(&mut child);
    // The prompt takes much longer, and begins when the plan is loaded.
    std::thread::sleep(Duration::from_millis(200));
    interrupt(&child);
    let mut said = String::new();
    stderr.read_to_string(&mut said).unwrap();
    let ran = finish(child);
    assert_eq!(ran.code, Some(130), "{said}");
    assert!(said.contains("generation was interrupted before the first token"), "{said}");
    assert!(said.contains("memory: peak RSS") && !said.contains("state 0 B"), "{said}");
}

#[test]
fn json_reports_the_cancellation_and_the_drafts_until_then() {
    let plan = endless();
    let drafts = ["--speculate", "ngram", "--draft-tokens", "4"];
    let child = spawn(&plan, &[&["--tokens", "1,2,3", "--ignore-eos", "--json", "-v"][..], &drafts].concat());
    let mut child = child;
    let _stderr = loaded(&mut child);
    std::thread::sleep(Duration::from_millis(500));
    interrupt(&child);
    let ran = finish(child);
    assert_eq!(ran.code, Some(130));
    let report = ran.json();
    assert_eq!(report["finish_reason"], "cancelled");
    let speculation = &report["timings"]["speculation"];
    let tokens = report["tokens"].as_array().unwrap().len() as u64;
    assert!(speculation["drafted"].as_u64() > Some(0), "{report}");
    // The prompt gives one token; each pass gives those that were accepted, and one more unless it is a near tie.
    let [passes, accepted] = ["passes", "accepted"].map(|key| speculation[key].as_u64().unwrap());
    assert!(accepted > 0 && (accepted + 1..=1 + passes + accepted).contains(&tokens), "{report}");
}

#[test]
fn ctrl_c_before_the_load_ends_the_process() {
    let plan = endless();
    // It waits for a prompt on stdin.
    let child = spawn(&plan, &[]);
    std::thread::sleep(Duration::from_millis(500));
    interrupt(&child);
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
}

#[test]
fn a_reader_that_goes_away_is_not_an_error() {
    let plan = endless();
    let mut child = spawn(&plan, &["--tokens", "1,2,3", "--ignore-eos"]);
    first_byte(&mut child);
    drop(child.stdout.take());
    let ran = finish(child);
    assert_eq!(ran.code, Some(0), "{}", ran.stderr);
    assert!(!ran.stderr.contains("error") && !ran.stderr.contains("panicked"), "{}", ran.stderr);
}

/// A prompt of thousands of tokens in one pass takes seconds. Ctrl-C cancels the pass, so telemetry counts none.
#[test]
fn ctrl_c_ends_a_long_prompt_in_the_middle_of_its_pass() {
    let plan = endless();
    assert_eq!(plan.plan.schedule.prefill_chunk, None);
    let prompt = vec!["1"; 6_000].join(",");
    let mut child = spawn(&plan, &["--tokens", &prompt, "--ignore-eos", "--json", "-v"]);
    let _stderr = loaded(&mut child);
    std::thread::sleep(Duration::from_secs(1));
    interrupt(&child);
    let ran = finish(child);
    assert_eq!(ran.code, Some(130));
    let report = ran.json();
    assert_eq!((&report["finish_reason"], &report["tokens"]), (&"cancelled".into(), &serde_json::json!([])));
    assert!(report["timings"]["prefill_tokens_per_second"].is_null(), "the pass was completed: {report}");
}
