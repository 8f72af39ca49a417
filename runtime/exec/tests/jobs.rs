//! `hpp-exec jobs`: answers equal those of single runs, nothing is lost or repeated, every bad line has its own error.

mod support;

use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;
use support::{PlanDir, Ran, command, hpp_exec};

struct JobFiles {
    plan: PlanDir,
    prompts: PathBuf,
    answers: PathBuf,
}

impl JobFiles {
    fn new(name: &str, lines: &str) -> Self {
        let plan = PlanDir::new(name, 128);
        let (prompts, answers) = (plan.file("prompts.jsonl"), plan.file("answers.jsonl"));
        std::fs::write(&prompts, lines).unwrap();
        Self { plan, prompts, answers }
    }

    fn arguments(&self) -> [String; 6] {
        let path = |path: &PathBuf| path.to_str().unwrap().to_owned();
        let (plan, prompts, answers) = (path(&self.plan.path()), path(&self.prompts), path(&self.answers));
        ["jobs".into(), plan, "--in".into(), prompts, "--out".into(), answers]
    }

    fn run(&self, args: &[&str]) -> Ran {
        let arguments = self.arguments();
        hpp_exec(arguments.iter().map(String::as_str).chain(args.iter().copied()))
    }

    /// The lines of the answers.
    fn lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.answers).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"))).collect()
    }

    /// The answers by id; each id once.
    fn by_id(&self) -> BTreeMap<String, Value> {
        let lines = self.lines();
        let answers: BTreeMap<String, Value> =
            lines.iter().map(|answer| (answer["id"].to_string(), answer.clone())).collect();
        assert_eq!(answers.len(), lines.len(), "an id has two answers");
        answers
    }
}

/// `--system` is the system message of all lines with a chat template, unless they have one of their own.
#[test]
fn a_system_message_of_the_command_is_for_messages_too() {
    let question = json!({"role": "user", "content": "What is Vec?"});
    let own = json!({"role": "system", "content": "You are a poet."});
    let lines = [
        json!({"id": "prompt", "prompt": "What is Vec?", "max_new": 1}),
        json!({"id": "messages", "messages": [question], "max_new": 1}),
        json!({"id": "own", "messages": [own, question], "max_new": 1}),
        json!({"id": "own later", "messages": [question, own, question], "max_new": 1}),
        json!({"id": "tokens", "tokens": [1, 2, 3], "max_new": 1}),
    ];
    let lines = lines.map(|line| line.to_string()).join("\n");
    let plan = support::server::chat_plan(support::server::MODEL);
    let (prompts, answers) = (plan.file("prompts.jsonl"), plan.file("answers.jsonl"));
    std::fs::write(&prompts, lines).unwrap();
    let files = JobFiles { plan, prompts, answers };
    files.run(&["--system", "You are a careful and very brief assistant."]).ok();
    let answers = files.by_id();
    let tokens = |id: &str| answers[&format!("\"{id}\"")]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(tokens("messages"), tokens("prompt"));
    assert_ne!(tokens("own"), tokens("messages"));
    let without = JobFiles { answers: files.plan.file("without.jsonl"), ..files };
    without.run(&[]).ok();
    assert_eq!(without.by_id()["\"own later\""]["prompt_tokens"], answers["\"own later\""]["prompt_tokens"]);
    assert_eq!(tokens("tokens"), 3);
}

#[test]
fn jobs_give_the_answers_of_single_runs() {
    let lines = [
        json!({"id": "long", "tokens": (1..60).collect::<Vec<_>>(), "max_new": 9}),
        json!({"id": 7, "tokens": [5, 6, 7], "max_new": 30, "ignore_eos": true}),
        json!({"id": "random", "tokens": [8, 9], "temperature": 0.9, "seed": -4}),
        json!({"id": "text", "prompt": "Once upon a time", "stop": "e"}),
        json!({"id": "none", "tokens": [1], "max_new": 0}),
    ];
    let files = JobFiles::new(
        "genai/learned-llama-fp32-cpu",
        &lines.iter().fold(String::new(), |mut text, line| {
            writeln!(text, "{line}").unwrap();
            text
        }),
    );
    let summary = files.run(&["--json", "-n", "12", "--max-sequences", "3"]).ok().json();
    assert_eq!((&summary["answers"], &summary["errors"], &summary["sequences"]), (&json!(5), &json!(0), &json!(3)));
    let time = &summary["time"];
    let all_ms = 1e3 * summary["seconds"].as_f64().unwrap();
    let [computing, stalled, rest] = ["compute_ms", "stall_ms", "rest_ms"].map(|part| time[part].as_f64().unwrap());
    assert!(0.0 < computing && computing < all_ms && (0.0..all_ms).contains(&rest) && stalled == 0.0, "{summary}");
    assert!(summary["bytes"]["peak_rss"].as_u64().is_some_and(|bytes| bytes > 0), "{summary}");
    let answers = files.by_id();
    let alone = |args: &[&str]| files.plan.run(&[&["--json"], args].concat()).ok().json();
    let long: Vec<String> = (1..60).map(|token| token.to_string()).collect();
    for (id, args) in [
        ("\"long\"", &["--tokens", &*long.join(","), "-n", "9"][..]),
        ("7", &["--tokens", "5,6,7", "-n", "30", "--ignore-eos"]),
        ("\"random\"", &["--tokens", "8,9", "-n", "12", "--temperature", "0.9", "--seed", "18446744073709551612"]),
        ("\"text\"", &["--prompt", "Once upon a time", "-n", "12", "--stop", "e"]),
    ] {
        let (want, got) = (alone(args), &answers[id]);
        assert_eq!((&got["tokens"], &got["text"]), (&want["tokens"], &want["text"]), "{id}");
        assert_eq!((&got["finish"], &got["seed"]), (&want["finish_reason"], &want["seed"]), "{id}");
    }
    assert_eq!(answers["\"none\""]["tokens"], json!([]));
}

#[test]
fn answers_share_a_given_seed_and_have_seeds_of_their_own_with_minus_one() {
    let seeds = |seed: &str| -> Vec<Value> {
        let jobs = JobFiles::new("genai/llama3-fp32-cpu", &many(3));
        jobs.run(&["--temperature", "1", "--seed", seed]).ok();
        jobs.by_id().values().map(|answer| answer["seed"].clone()).collect()
    };
    assert_eq!(seeds("5"), [json!(5), json!(5), json!(5)]);
    let greedy = JobFiles::new("genai/llama3-fp32-cpu", &many(1)).run(&["--temperature", "0", "--seed", "5"]).ok();
    assert!(greedy.stderr.contains("change nothing at temperature 0"), "{}", greedy.stderr);
    let new = seeds("-1");
    assert!(new[0] != new[1] && new[1] != new[2] && new[0] != new[2], "{new:?}");
}

/// The summary counts the drafts of all answers, as that of a single run does.
#[test]
fn the_summary_counts_accepted_drafts() {
    let text = "Repeat the text.\\nThe vector is a growable array. The vector is a growable array. The vector is a";
    let line = |id: u32| format!("{{\"id\": {id}, \"prompt\": \"{text}\"}}\n");
    let files = JobFiles::new("genai/learned-llama-fp32-cpu", &(line(1) + &line(2)));
    let done = files.run(&["-n", "32", "--ignore-eos", "--json", "--speculate", "ngram"]).ok();
    let counts = &done.json()["speculation"];
    let (drafted, accepted) = (counts["drafted"].as_u64().unwrap(), counts["accepted"].as_u64().unwrap());
    assert!(0 < drafted && accepted <= drafted, "{counts}");
    let words = format!("speculation: {accepted} of {drafted} drafted tokens accepted");
    assert!(done.stderr.contains(&words), "{}", done.stderr);
    std::fs::remove_file(&files.answers).unwrap();
    let plain = files.run(&["-n", "4", "--json"]).ok();
    assert!(plain.json().get("speculation").is_none() && !plain.stderr.contains("speculation"), "{}", plain.stderr);
}

#[test]
fn each_bad_line_has_an_error_of_its_own_and_the_others_go_on() {
    let bad = "\
        {\"id\": 1, \"tokens\": [1, 2], \"max_new\": 3}\n\
        no json\n\
        {\"id\": 2, \"tokens\": []}\n\
        {\"id\": 3, \"tokens\": [4000000000]}\n\
        {\"id\": 1, \"tokens\": [3]}\n\
        {\"id\": 4, \"tokens\": [1], \"max_new\": 2, \"tempreature\": 1}\n\
        {\"id\": 5, \"messages\": [{\"role\": \"user\", \"content\": \"hi\"}]}\n\
        {\"id\": 6, \"tokens\": [1], \"max_new\": 3}\n";
    let files = JobFiles::new("genai/llama3-fp32-cpu", &(bad.to_owned() + &long_prompt()));
    files.run(&[]).ok();
    let lines = files.lines();
    let error = |matches: &dyn Fn(&Value) -> bool| {
        let found: Vec<&Value> = lines.iter().filter(|answer| matches(answer)).collect();
        assert_eq!(found.len(), 1, "{found:?}");
        found[0]["error"].as_str().unwrap_or_default().to_owned()
    };
    assert!(error(&|answer| answer["line"] == 2).contains("one JSON object"));
    assert!(error(&|answer| answer["id"] == 2).contains("empty"));
    assert!(error(&|answer| answer["id"] == 3).contains("4000000000"));
    assert!(error(&|answer| answer["line"] == 5).contains("another line"));
    assert!(error(&|answer| answer["id"] == 4).contains("tempreature"));
    assert!(
        error(&|answer| answer["id"] == 5).contains("tokenizer")
            || error(&|answer| answer["id"] == 5).contains("template")
    );
    assert!(error(&|answer| answer["id"] == "long").contains("128"));
    for id in [1, 6] {
        let good = lines.iter().find(|answer| answer["id"] == id && answer["line"].is_null()).unwrap();
        assert_eq!((good["tokens"].as_array().unwrap().len(), &good["finish"]), (3, &json!("length")));
    }
    // Everything is answered, errors included.
    let before = std::fs::read(&files.answers).unwrap();
    let done = files.run(&["--json"]).ok();
    assert!(done.stderr.contains("has an answer already"));
    let summary = done.json();
    assert_eq!((&summary["answers"], &summary["errors"]), (&json!(0), &json!(0)));
    assert_eq!(summary["earlier_answers"], 2);
    assert_eq!(summary["earlier_errors"], lines.len() - 2);
    assert_eq!(std::fs::read(&files.answers).unwrap(), before);
    // A line that was mended has no answer yet, though the file has as many answers as lines.
    std::fs::write(&files.prompts, bad.replace("no json", "{\"id\": 9, \"tokens\": [1], \"max_new\": 1}")).unwrap();
    let said = files.run(&[]).ok().stderr;
    assert!(said.contains(&format!("has {} answers already: lines with one are skipped", lines.len())), "{said}");
    assert!(files.lines().iter().any(|answer| answer["id"] == 9 && answer["finish"] == "length"));
}

fn long_prompt() -> String {
    json!({"id": "long", "tokens": vec![1; 129]}).to_string()
}

/// Prompts whose answers take a moment.
fn many(count: usize) -> String {
    (0..count).fold(String::new(), |mut text, id| {
        let line = json!({"id": id, "tokens": [id % 100, 7, 9], "max_new": 40, "ignore_eos": true});
        writeln!(text, "{line}").unwrap();
        text
    })
}

#[test]
fn jobs_that_are_killed_continue_without_losing_or_repeating_an_answer() {
    let whole = JobFiles::new("genai/llama3-fp32-cpu", &many(60));
    whole.run(&["--max-sequences", "4"]).ok();
    let files = JobFiles::new("genai/llama3-fp32-cpu", &many(60));
    let mut runs = 0;
    loop {
        runs += 1;
        let arguments = files.arguments();
        let mut child = command(arguments.iter().map(String::as_str).chain(["--max-sequences", "4"]));
        let mut child = child.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let before = std::fs::metadata(&files.answers).map_or(0, |file| file.len());
        let ended = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            let written = std::fs::metadata(&files.answers).map_or(0, |file| file.len());
            if written > before + 200 * runs && runs < 4 {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        if let Some(status) = ended {
            assert!(status.success());
            break;
        }
        // What a torn write would leave.
        let mut text = std::fs::read(&files.answers).unwrap();
        text.extend_from_slice(b"{\"id\":59,\"tok");
        std::fs::write(&files.answers, text).unwrap();
    }
    assert!(runs >= 2, "it was never killed");
    assert_eq!(files.by_id(), whole.by_id());
}

#[test]
fn two_jobs_cannot_write_the_same_answers() {
    let files = JobFiles::new("optimum/llama-with-past", &many(3000));
    let arguments = files.arguments();
    let mut first =
        command(arguments.iter().map(String::as_str)).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    while files.lines().is_empty() {
        std::thread::sleep(Duration::from_millis(5));
    }
    files.run(&[]).fails(1, &["another process writes answers", "give another --out"]);
    first.kill().unwrap();
    first.wait().unwrap();
}

#[test]
fn files_that_hold_something_else_are_refused_and_kept() {
    let files = JobFiles::new("genai/llama3-fp32-cpu", &many(2));
    std::fs::write(&files.answers, "notes of mine\n").unwrap();
    files.run(&[]).fails(1, &["line 1 of", "is not an answer", "give another --out"]);
    assert_eq!(std::fs::read_to_string(&files.answers).unwrap(), "notes of mine\n");
    let nowhere = files.plan.file("no-such-directory/answers.jsonl");
    let nowhere = JobFiles { answers: nowhere, prompts: files.prompts.clone(), plan: files.plan };
    nowhere.run(&[]).fails(1, &["cannot write answers", "create it"]);
    let files = nowhere;
    let same = JobFiles { answers: files.prompts.clone(), prompts: files.prompts.clone(), plan: files.plan };
    same.run(&[]).fails(1, &["the same file"]);
    // A timeline is written at the end and would replace the answers.
    let new = same.plan.file("new.jsonl");
    let traced = JobFiles { answers: new.clone(), prompts: same.prompts.clone(), plan: same.plan };
    let link = traced.plan.file("link.jsonl");
    std::os::unix::fs::symlink(&new, &link).unwrap();
    for trace in [&new, &link] {
        traced
            .run(&["--trace", trace.to_str().unwrap()])
            .fails(1, &["--out and --trace name the same file", "--trace"]);
        assert!(!new.exists());
    }
    let same = traced;
    let missing = JobFiles { prompts: "/no/prompts.jsonl".into(), answers: same.plan.file("other"), plan: same.plan };
    missing.run(&[]).fails(1, &["cannot read prompts from /no/prompts.jsonl", "one JSON object a line"]);
    let pipe = JobFiles { prompts: "/dev/null".into(), ..missing };
    pipe.run(&[]).fails(1, &["cannot read prompts from /dev/null", "not a regular file"]);
    let stdin = JobFiles { prompts: "-".into(), ..pipe };
    stdin.run(&[]).fails(1, &["cannot read prompts from -", "save them in a file first"]);
}

#[cfg(unix)]
#[test]
fn a_pipe_for_the_answers_is_refused() {
    let files = JobFiles::new("genai/llama3-fp32-cpu", "{\"id\": 1, \"tokens\": [1]}\n");
    let (plan, prompts) = (files.plan.path(), files.prompts.clone());
    let piped = hpp_exec(["jobs", plan.to_str().unwrap(), "--in", prompts.to_str().unwrap(), "--out", "/dev/stdout"]);
    assert_eq!(piped.code, Some(1));
    assert!(piped.stderr.contains("is not a regular file") && piped.stderr.contains("--out"), "{}", piped.stderr);
}

#[test]
fn a_full_disk_under_the_answers_ends_the_run_and_the_next_continues() {
    let files = JobFiles::new("genai/llama3-fp32-cpu", &many(40));
    // The largest file this shell and its children may write, in blocks; and no signal beyond it, but an error.
    let script = "trap '' XFSZ; ulimit -f 4; exec \"$0\" \"$@\"";
    let limited = Command::new("bash")
        .args(["-c", script, env!("CARGO_BIN_EXE_hpp-exec")])
        .args(files.arguments())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Ran::of(limited).fails(1, &["cannot write answers to", "run the same command again"]);
    let kept = files.by_id().len();
    assert!((1..40).contains(&kept), "{kept} answers");
    files.run(&[]).ok();
    assert_eq!(files.by_id().len(), 40);
}

#[test]
fn a_hundred_thousand_lines_are_read_one_by_one() {
    let mut lines = String::new();
    for id in 0..100_000 {
        match id % 1000 {
            0 => writeln!(lines, "{{\"id\": {id}, \"tokens\": [{}], \"max_new\": 1}}", id % 100).unwrap(),
            _ => writeln!(lines, "{{\"id\": {id}}}").unwrap(),
        }
    }
    let files = JobFiles::new("genai/llama3-fp32-cpu", &lines);
    let summary = files.run(&["--json"]).ok().json();
    assert_eq!((&summary["answers"], &summary["errors"]), (&json!(100), &json!(99_900)));
    assert_eq!(files.by_id().len(), 100_000);
}

/// Jobs that the model refuses in their first pass are no sequences.
#[test]
fn refused_jobs_do_not_count_as_sequences() {
    let lines = "{\"id\": 1, \"tokens\": [1, 99999]}\n{\"id\": 2, \"tokens\": [99999]}\n{\"id\": 3, \"tokens\": [1, 2], \"max_new\": 3}\n";
    let summary = JobFiles::new("genai/llama3-fp32-cpu", lines).run(&["--json"]).ok().json();
    assert_eq!((&summary["answers"], &summary["errors"], &summary["sequences"]), (&json!(1), &json!(2), &json!(1)));
}

#[test]
fn sequences_that_do_not_fit_wait() {
    let files = JobFiles::new("genai/llama3-fp32-cpu", &many(12));
    let summary = files.run(&["--json", "--max-sequences", "5"]).ok().json();
    assert_eq!((&summary["sequences"], &summary["answers"]), (&json!(5), &json!(12)));
    let tokens = summary["tokens"].as_f64().unwrap();
    assert!(tokens / summary["passes"].as_f64().unwrap() > 3.0, "{summary}");
}
