//! Generating text: recorded tokens, streamed text, the JSON report, saved logits.

mod support;

use hpp_exec::tensors::{LogitsFile, read_npy};
use hpp_generate::text::TextTokenizer;
use hpp_schema::ByteSize;
use serde_json::json;
use std::io::Write;
use std::process::Stdio;
use support::{PlanDir, Ran, command, recorded, tokens};

const LLAMA: &str = "genai/llama3-fp32-cpu";

#[test]
fn every_decoder_generates_its_recorded_tokens() {
    let mut failed = vec![];
    for model in recorded().into_iter().filter(|m| m.kind().starts_with("decoder")) {
        let takes_tokens = model.facts["inputs"].as_array().unwrap().iter().any(|i| i["name"] == "input_ids");
        if !takes_tokens {
            continue;
        }
        let plan = PlanDir::of(model, 64);
        let ran = plan.run(&["--tokens", &plan.prompt(), "--max-new", "16", "--ignore-eos", "--json"]);
        if ran.code != Some(0) || tokens(&ran.json()) != plan.model.tokens() {
            failed.push(format!("{}: {}{}", plan.model.name(), ran.stdout, ran.stderr));
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// Each pass needs slightly larger pieces of memory than all before: what those used must not add up.
#[cfg(target_os = "linux")]
#[test]
fn a_long_prompt_takes_the_memory_of_its_longest_pass() {
    let mut plan = PlanDir::new("torch/llama-dynamo-kv", 3000);
    plan.plan.schedule.prefill_chunk = Some(64);
    plan.save();
    let peak = |tokens: usize| {
        let prompt = (0..tokens).map(|at| (5 + at % 400).to_string()).collect::<Vec<_>>().join(",");
        let ran = plan.run(&["--tokens", &prompt, "-n", "1", "--ignore-eos", "--json"]).ok();
        ran.json()["bytes"]["peak_rss"].as_u64().unwrap()
    };
    // The scores of the last pass take 64 x 2900 x 8 heads x 4 bytes: 6 MiB.
    let grown = peak(2900).saturating_sub(peak(64));
    assert!(grown < 48 << 20, "{} MiB", grown >> 20);
}

#[test]
fn logits_are_saved_for_each_step() {
    let plan = PlanDir::new(LLAMA, 64);
    let file = plan.file("scores.npy");
    let logits = file.to_str().unwrap();
    plan.run(&["--tokens", &plan.prompt(), "--max-new", "16", "--ignore-eos", "--logits", logits]).ok();
    let saved = read_npy(&file).unwrap();
    assert_eq!(saved.shape, [16, 512]);
    let recorded = plan.model.floats("step_logits").unwrap();
    let worst = saved.to_f32().unwrap().iter().zip(&recorded).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    let largest = recorded.iter().map(|v| v.abs()).fold(0.0, f32::max);
    assert!(worst < 1e-5 * largest, "{worst} of {largest}");
}

#[test]
fn embeddings_are_looked_up_for_models_that_take_them() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu-noembed", 64);
    let (prompt, table) = (plan.prompt(), plan.file("embed_tokens.npy"));
    let table = ["--embeddings", table.to_str().unwrap()];
    let over_itself = [&["--tokens", &*prompt, "--logits", table[1]], &table[..]].concat();
    plan.run(&over_itself).fails(1, &["--embeddings and --logits name the same file"]);
    plan.run(&["--tokens", &prompt]).fails(1, &["takes embeddings", "--embeddings"]);
    plan.command("serve", &["--port", "0"]).fails(1, &["takes embeddings instead of token ids, and cannot be served"]);
    let ran =
        plan.run(&[&["--tokens", &prompt, "--max-new", "16", "--ignore-eos", "--json"][..], &table].concat()).ok();
    assert_eq!(tokens(&ran.json()), plan.model.tokens());
    plan.run(&[&["--tokens", "512"][..], &table].concat()).fails(1, &["512", "no embedding"]);
    plan.command("verify", &table).ok();
    plan.command("bench", &[&["--prompt-tokens", "8", "--new-tokens", "2", "--runs", "1"][..], &table].concat()).ok();
}

#[test]
fn a_table_of_embeddings_of_another_width_is_refused_before_anything_runs() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu-noembed", 64);
    let (narrow, jobs) = (plan.file("narrow.npy"), plan.file("jobs.jsonl"));
    let mut rows = LogitsFile::create(&narrow).unwrap();
    (0..512).for_each(|_| rows.push(&[0.0; 63]).unwrap());
    rows.finish(63).unwrap();
    std::fs::write(&jobs, r#"{"id": 1, "tokens": [1, 2, 3]}"#).unwrap();
    let table = ["--embeddings", narrow.to_str().unwrap()];
    let says = ["narrow.npy", "63 numbers", "inputs_embeds takes 64", "--embeddings"];
    plan.run(&[&["--tokens", "1,2,3", "-n", "4"][..], &table].concat()).fails(1, &says);
    plan.command("verify", &table).fails(1, &says);
    let (jobs, answers) = (jobs.to_str().unwrap(), plan.file("answers.jsonl"));
    let files = ["--in", jobs, "--out", answers.to_str().unwrap()];
    plan.command("jobs", &[&files[..], &table].concat()).fails(1, &says);
}

#[test]
fn the_log_shows_how_a_plan_is_loaded_and_no_token() {
    let plan = PlanDir::new(LLAMA, 64);
    let (path, prompt) = (plan.path(), plan.prompt());
    let events = |new_tokens| {
        let args = ["--tokens", &prompt, "-n", new_tokens, "--ignore-eos", "--json"];
        let mut command = command([path.to_str().unwrap()].into_iter().chain(args));
        let ran = Ran::of(command.env("HPP_LOG", "hpp=trace").output().unwrap()).ok();
        assert!(ran.json()["tokens"].as_array().unwrap().len() > 1);
        ran.stderr.lines().filter(|line| line.contains(" hpp_")).map(str::to_owned).collect::<Vec<_>>()
    };
    let events = [events("2"), events("24")];
    for event in ["ONNX Runtime loaded", "files of the plan verified", "session loaded", "plan loaded"] {
        assert!(events[0].iter().any(|line| line.contains(event)), "{event}: {events:?}");
    }
    assert_eq!(events[0].len(), events[1].len(), "{events:?}");
}

#[test]
fn streamed_text_is_the_reported_text_and_the_tokenizers() {
    let plan = PlanDir::new(LLAMA, 64);
    let args = ["--prompt", "hello there", "--max-new", "20", "--ignore-eos"];
    let streamed = plan.run(&args).ok();
    let report = plan.run(&[&args[..], &["--json"]].concat()).ok().json();
    assert_eq!(report["text"], json!(streamed.stdout));
    let tokenizer = TextTokenizer::open(&plan.file("tokenizer.json")).unwrap();
    assert_eq!(tokenizer.decode(&tokens(&report)).unwrap(), streamed.stdout);
    assert!(streamed.stderr.contains("tok/s") && streamed.stderr.contains("memory:"), "{}", streamed.stderr);
    let nothing = plan.run(&["--prompt", "x", "-n", "0"]).ok();
    assert!(nothing.stderr.contains("no pass was run") && !nothing.stderr.contains("tok/s"), "{}", nothing.stderr);
}

#[test]
fn quiet_prints_only_the_text() {
    let plan = PlanDir::new(LLAMA, 64);
    let ran = plan.run(&["--prompt", "hello", "--max-new", "3", "-q"]).ok();
    assert_eq!(ran.stderr, "");
}

#[test]
fn the_report_has_all_fields() {
    let plan = PlanDir::new(LLAMA, 64);
    let report = plan.run(&["--tokens", &plan.prompt(), "--max-new", "5", "--ignore-eos", "--json"]).ok().json();
    assert_eq!(report["prompt_tokens"], json!(plan.model.prompt().len()));
    assert_eq!(report["prompt_token_ids"], json!(plan.model.prompt()));
    assert_eq!(report["finish_reason"], json!("length"));
    for field in ["load_ms", "time_to_first_token_ms", "prefill_ms", "decode_ms", "decode_tokens_per_second"] {
        assert!(report["timings"][field].as_f64().unwrap() > 0.0, "{field}: {report}");
    }
    let stage = &report["timings"]["stages"][0];
    assert_eq!((&stage["partition"], &stage["provider"]), (&json!("whole"), &json!("CPU")));
    assert!(report["bytes"]["state"].as_u64().unwrap() > 0);
    if cfg!(target_os = "linux") {
        assert!(report["bytes"]["peak_rss"].as_u64().unwrap() > 1 << 20);
    }
}

#[test]
fn texts_end_for_the_reason_given() {
    let mut plan = PlanDir::new(LLAMA, 64);
    let prompt = plan.prompt();
    let base = ["--tokens", &prompt, "--max-new", "16", "--json"];
    let recorded = plan.model.tokens();

    // The third token ends the text once the plan says so.
    plan.plan.generation.as_mut().unwrap().eos_token_ids = vec![recorded[2]];
    plan.save();
    let report = plan.run(&base).ok().json();
    assert_eq!((&report["finish_reason"], tokens(&report).len()), (&json!("eos"), 3));

    let whole = plan.run(&[&base[..], &["--ignore-eos"]].concat()).ok().json();
    let text = whole["text"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(4).take(3).collect();
    let report = plan.run(&[&base[..], &["--ignore-eos", "--stop", &stop]].concat()).ok().json();
    assert_eq!(report["finish_reason"], json!("stop"));
    assert_eq!(report["text"].as_str().unwrap(), &text[..text.find(&stop).unwrap()]);

    // 11 tokens of prompt and 3 of the answer are a context of 14.
    // A prompt that fills the context gets one token more, and the warning says so.
    for (context, answer, warning) in [
        ("14", 3, "prompt and answer fill the context of 14"),
        ("12", 1, "prompt and answer fill the context of 12"),
        ("11", 1, "the prompt alone fills the context of 11, so only one token follows it"),
    ] {
        let done = plan.run(&[&base[..], &["--ignore-eos", "--context", context]].concat()).ok();
        assert!(done.stderr.contains(warning), "{}", done.stderr);
        let report = done.json();
        assert_eq!((&report["finish_reason"], tokens(&report).len()), (&json!("length"), answer));
    }
}

/// A text that the trained model continues by copying, so that drafts are accepted.
const COPIED: &str =
    "Repeat the text.\nThe vector is a growable array. The vector is a growable array. The vector is a";

#[test]
fn drafts_change_neither_stop_texts_nor_saved_logits() {
    let plan = PlanDir::new("genai/learned-llama-fp32-cpu", 256);
    let logits = |name: &str| plan.file(name).to_str().unwrap().to_owned();
    let run = |options: &[&str]| {
        plan.run(&[&["-p", COPIED, "-n", "32", "--ignore-eos", "--json"], options].concat()).ok().json()
    };
    let drafts = ["--speculate", "ngram", "--draft-tokens", "6"];
    let (alone, drafted) = (logits("alone.npy"), logits("drafted.npy"));
    let whole = run(&["--logits", &alone]);
    let report = run(&[&drafts[..], &["--logits", &drafted]].concat());
    assert!(report["timings"]["speculation"]["accepted"].as_u64() > Some(3), "{report}");
    assert_eq!(report["tokens"], whole["tokens"]);
    let [alone, drafted] = [alone, drafted].map(|file| read_npy(file.as_ref()).unwrap());
    assert_eq!((&drafted.shape, drafted.shape[0]), (&alone.shape, 32));
    let [alone, drafted] = [alone, drafted].map(|rows| rows.to_f32().unwrap());
    let largest = alone.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
    let difference = alone.iter().zip(&drafted).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(difference <= 1e-5 * largest, "{difference} of {largest}");

    // Within a pass of several tokens, in the middle of a token's text.
    let text = whole["text"].as_str().unwrap();
    let stop: String = text.chars().skip(21).take(5).collect();
    let ends = |options: &[&str]| {
        let report = run(&[options, &["--stop", &stop]].concat());
        ["tokens", "text", "finish_reason"].map(|key| report[key].clone())
    };
    let stopped = ends(&drafts);
    assert_eq!(stopped, ends(&[]));
    assert_eq!((stopped[1].as_str(), &stopped[2]), (text.split(&stop).next(), &json!("stop")));
}

#[test]
fn the_same_seed_repeats_the_text() {
    let plan = PlanDir::new(LLAMA, 64);
    let run = |seed: &str| {
        let args = ["--prompt", "hello", "--max-new", "12", "--ignore-eos", "--temperature", "1.5", "--seed", seed];
        plan.run(&[&args[..], &["--json"]].concat()).ok().json()
    };
    let (one, again, other) = (run("1"), run("1"), run("2"));
    assert_eq!(one["tokens"], again["tokens"]);
    assert_ne!(one["tokens"], other["tokens"]);
    assert_eq!(one["seed"], json!(1));
}

#[test]
fn prompts_come_from_files_and_stdin_too() {
    let plan = PlanDir::new(LLAMA, 64);
    let rest = ["--max-new", "8", "--ignore-eos"];
    let direct = plan.run(&[&["--prompt", "hello"][..], &rest].concat()).ok().stdout;
    let file = plan.file("prompt.txt");
    std::fs::write(&file, "hello").unwrap();
    assert_eq!(plan.run(&[&["--prompt-file", file.to_str().unwrap()][..], &rest].concat()).ok().stdout, direct);

    assert_eq!(piped(&plan, &rest, "hello").ok().stdout, direct);
}

/// Runs the plan with this text on stdin.
fn piped(plan: &PlanDir, args: &[&str], text: &str) -> Ran {
    let path = plan.path();
    let mut child = command([path.to_str().unwrap()].into_iter().chain(args.iter().copied()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(text.as_bytes()).unwrap();
    Ran::of(child.wait_with_output().unwrap())
}

#[test]
fn piped_text_goes_before_the_prompt() {
    let plan = PlanDir::new(LLAMA, 64);
    let rest = ["--max-new", "8", "--ignore-eos", "--json"];
    let ids = |ran: Ran| ran.ok().json()["prompt_token_ids"].clone();
    let direct = ids(plan.run(&[&["--prompt", "some notes\nwhat do they say?"][..], &rest].concat()));
    let prompt = ["--prompt", "what do they say?"];
    assert_eq!(ids(piped(&plan, &[&prompt[..], &rest].concat(), "some notes")), direct);
    let alone = ids(plan.run(&[&prompt[..], &rest].concat()));
    assert_eq!(ids(piped(&plan, &[&prompt[..], &rest].concat(), "")), alone, "an empty pipe adds nothing");
    let template = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
    std::fs::write(plan.file("tokenizer_config.json"), json!({ "chat_template": template }).to_string()).unwrap();
    let line = ["-p", "What is ownership?\n", "--chat"];
    let alone = ids(plan.run(&[&line[..], &rest].concat()));
    assert_eq!(
        ids(piped(&plan, &[&line[..], &rest].concat(), "")),
        alone,
        "nor does it take the line break of a message"
    );
}

#[test]
fn a_directory_means_the_plan_inside_it() {
    let plan = PlanDir::new(LLAMA, 64);
    let dir = plan.path();
    let ran = support::hpp_exec([dir.parent().unwrap().to_str().unwrap(), "--prompt", "hi", "--max-new", "2"]);
    ran.ok();
}

#[test]
fn the_name_of_a_file_after_an_at_sign_is_a_prompt_with_a_note() {
    let plan = PlanDir::new(LLAMA, 512);
    let file = plan.file("notes.txt");
    std::fs::write(&file, "hi").unwrap();
    let prompt = format!("@{}", file.display());
    for (prompt, is_noted) in [(prompt.as_str(), true), ("@nobody", false)] {
        let ran = plan.run(&["--prompt", prompt, "--max-new", "1"]).ok();
        assert_eq!(ran.stderr.contains("note: the prompt is the text \"@"), is_noted, "{}", ran.stderr);
    }
    let ran = plan.command("verify", &["--prompt", &prompt, "--steps", "1"]).ok();
    assert!(ran.stderr.contains("reads the file"), "{}", ran.stderr);
}

#[test]
fn without_a_tokenizer_tokens_go_in_and_out() {
    let mut plan = PlanDir::new(LLAMA, 64);
    plan.plan.generation.as_mut().unwrap().tokenizer = None;
    plan.save();
    let ran = plan.run(&["--tokens", &plan.prompt(), "--max-new", "16", "--ignore-eos"]).ok();
    let printed: Vec<u32> = ran.stdout.trim().split(',').map(|t| t.parse().unwrap()).collect();
    assert_eq!(printed, plan.model.tokens());
    plan.run(&["--prompt", "hi"]).fails(1, &["no tokenizer", "--tokens"]);
    plan.run(&["--tokens", "1", "--stop", "x"]).fails(1, &["--stop needs a tokenizer"]);
}

#[test]
fn end_tokens_that_the_model_cannot_choose_are_a_warning() {
    let mut plan = PlanDir::new(LLAMA, 64);
    let vocabulary = plan.plan.model.vocabulary().unwrap();
    let warning = format!("no end token of the plan (999999, 999998) is in the vocabulary of {vocabulary} tokens");
    for (ends, is_warned) in [(vec![999_999, 999_998], true), (vec![999_999, 2], false), (vec![], false)] {
        plan.plan.generation.as_mut().unwrap().eos_token_ids = ends;
        plan.save();
        let stderr = plan.run(&["--tokens", "1,2,3", "--max-new", "2"]).ok().stderr;
        assert_eq!(stderr.contains(&warning), is_warned, "{stderr}");
    }
}

/// Only text needs it.
#[test]
fn a_missing_tokenizer_is_a_warning_for_a_prompt_of_tokens() {
    let plan = PlanDir::new(LLAMA, 64);
    std::fs::remove_file(plan.file("tokenizer.json")).unwrap();
    let ran = plan.run(&["--tokens", &plan.prompt(), "--max-new", "16", "--ignore-eos"]).ok();
    let printed: Vec<u32> = ran.stdout.trim().split(',').map(|t| t.parse().unwrap()).collect();
    assert_eq!(printed, plan.model.tokens());
    assert!(ran.stderr.contains("warning: cannot read the tokenizer"), "{}", ran.stderr);
    plan.command("verify", &["--tokens", "1,2,3", "--steps", "2"]).ok();
    plan.run(&["--prompt", "hi"]).fails(1, &["error: cannot read the tokenizer"]);
    plan.run(&["--tokens", "1", "--stop", "x"]).fails(1, &["error: cannot read the tokenizer"]);
}

/// A model may have more token ids than its tokenizer. The text leaves them out, and one warning reports it.
#[test]
fn tokens_that_the_tokenizer_does_not_know_are_counted_in_a_warning() {
    let mut plan = PlanDir::new(LLAMA, 64);
    let prompt = plan.prompt();
    let args = ["--tokens", &prompt, "--max-new", "16", "--ignore-eos"];
    let mut tokenizer: serde_json::Value =
        serde_json::from_slice(&std::fs::read(plan.file("tokenizer.json")).unwrap()).unwrap();
    let smallest = 300;
    tokenizer["model"]["vocab"].as_object_mut().unwrap().retain(|_, id| id.as_u64().unwrap() < smallest);
    tokenizer["model"]["merges"] = json!([]);
    let unknown = plan.model.tokens().iter().filter(|token| u64::from(**token) >= smallest).count();
    assert!(unknown > 0);
    std::fs::write(plan.file("tokenizer.json"), tokenizer.to_string()).unwrap();
    plan.plan.files.retain(|file| file.path != "tokenizer.json");
    plan.save();
    let stderr = plan.run(&args).ok().stderr;
    let warning = format!("warning: the tokenizer does not know {unknown} of 16 new tokens");
    assert_eq!(stderr.matches(&warning).count(), 1, "{stderr}");
}

#[test]
fn chat_goes_through_the_template() {
    let plan = PlanDir::new(LLAMA, 64);
    plan.run(&["--chat", "--prompt", "hi"]).fails(1, &["no chat template", "hint:"]);
    let config = plan.file("tokenizer_config.json");
    let template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]";
    std::fs::write(&config, json!({ "chat_template": template }).to_string()).unwrap();
    let rest = ["--max-new", "2", "--json"];
    let chat = plan.run(&[&["--chat", "--system", "be brief", "--prompt", "hi"][..], &rest].concat()).ok().json();
    let plain = ["--prompt", "[system] be brief[user] hi[assistant]"];
    let plain = plan.run(&[&plain[..], &rest].concat()).ok().json();
    assert_eq!(chat["prompt_token_ids"], plain["prompt_token_ids"]);
}

#[test]
fn an_empty_answer_of_a_chat_model_comes_with_a_hint() {
    let mut plan = PlanDir::new(LLAMA, 64);
    let first = plan.model.tokens()[0];
    let generation = plan.plan.generation.get_or_insert_default();
    (generation.eos_token_ids, generation.chat_template) = (vec![first], Some("tokenizer_config.json".into()));
    plan.save();
    let ran = plan.run(&["--tokens", &plan.prompt(), "-n", "4"]).ok();
    assert!(ran.stderr.contains("hint: the model ended the text at once; --chat"), "{}", ran.stderr);
    let longer = plan.run(&["--tokens", &plan.prompt(), "-n", "4", "--ignore-eos"]).ok();
    assert!(!longer.stderr.contains("--chat"), "{}", longer.stderr);
}

#[test]
fn a_draft_length_without_drafts_and_a_kv_directory_that_is_a_file_are_pointed_out() {
    let plan = PlanDir::new("genai/learned-llama-fp32-cpu", 64);
    let one = ["-p", "What", "-n", "1", "--draft-tokens", "3"];
    assert!(plan.run(&one).ok().stderr.contains("--draft-tokens has no effect"));
    let drafted = plan.run(&[&one[..], &["--speculate", "ngram"]].concat()).ok();
    assert!(!drafted.stderr.contains("no effect"), "{}", drafted.stderr);
    let forgotten = plan.run(&["-p", "What", "-n", "1", "--kv-dir", "kv"]);
    forgotten.fails(1, &["--kv-policy and --kv-page are for --session", "hint: add --session NAME"]);
    for (option, value) in [("--kv-page", "64"), ("--kv-disk", "1G"), ("--kv-policy", "lru")] {
        plan.run(&["-p", "What", "-n", "1", option, value]).fails(1, &["--kv-page are for --session"]);
    }
    let kv = plan.file("kv-told");
    let untold = plan
        .run(&["--session", "told", "--kv-dir", kv.to_str().unwrap(), "--system", "Be kind", "-p", "What", "-n", "1"])
        .ok();
    assert!(untold.stderr.contains("--system has no effect: this model has no chat template"), "{}", untold.stderr);
    let characters = || {
        let more = ["--session", "told", "--kv-dir", kv.to_str().unwrap(), "-p", "What", "-n", "1"];
        let said = plan.run(&more).ok().stderr;
        let (_, rest) = said.split_once("continuing the conversation after ").expect("it continues");
        let (count, _) = rest.split_once(" characters").expect("text has no messages");
        count.parse::<usize>().unwrap()
    };
    let (first, second) = (characters(), characters());
    assert!(first >= 4 && second >= first + 4, "{first}, then {second}");
    let file = plan.file("a-file");
    std::fs::write(&file, "").unwrap();
    let taken = file.to_str().unwrap();
    plan.run(&["--session", "a", "--kv-dir", taken, "-p", "What", "-n", "1"]).fails(1, &[taken, "hint: give --kv-dir"]);
    std::fs::create_dir_all(plan.file("kv/sessions")).unwrap();
    std::fs::write(plan.file("kv/sessions/a.json"), "{").unwrap();
    let damaged = plan.file("kv");
    let args = ["--session", "a", "--kv-dir", damaged.to_str().unwrap(), "-p", "What", "-n", "1"];
    plan.run(&args).fails(1, &["a.json", "hint: the file is damaged: remove it"]);
}

#[test]
fn a_session_goes_on_in_another_process() {
    let mut plan = PlanDir::new("genai/learned-llama-fp32-cpu", 512);
    plan.plan.generation.as_mut().unwrap().chat_template = Some("chat_template.jinja".into());
    plan.save();
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path().to_str().unwrap();
    let say = |name: &str, text: &str| {
        plan.run(&["--session", name, "--kv-dir", dir, "--kv-page", "16", "-n", "60", "-p", text])
    };
    let reused = |ran: &Ran| -> u64 {
        let words: Vec<&str> = ran.stderr.split_whitespace().collect();
        let at = words.windows(4).position(|words| words[1..] == ["tokens", "of", "the"]).unwrap();
        words[at].parse().unwrap()
    };
    let first = say("talk", "What does Vec::push do?").ok();
    assert!(!first.stderr.contains("continuing the conversation") && reused(&first) == 0, "{}", first.stderr);
    assert!(first.stderr.contains("in whole KV pages of 16 tokens"), "{}", first.stderr);
    let prompt =
        plan.run(&["--chat", "-p", "Why?", "-n", "1", "--json"]).ok().json()["prompt_tokens"].as_u64().unwrap();
    for (new, left) in [(1, 511 - prompt), (511 - prompt, 1), (512 - prompt, 0)] {
        let (name, new) = (format!("n{new}"), new.to_string());
        let args = ["--session", &name, "--kv-dir", dir, "-n", &new, "--ignore-eos", "-p", "Why?"];
        let said = plan.run(&args).ok().stderr;
        let wanted = match left {
            0 => "the context is full".to_owned(),
            1 => ", 1 token left in the context".to_owned(),
            left => format!(", {left} tokens left in the context"),
        };
        assert!(said.contains(&wanted), "{wanted}: {said}");
    }
    for limit in ["--kv-disk", "--kv-ram"] {
        let args = ["--session", "unsaved", "--kv-dir", dir, limit, "0", "-n", "4", "-p", "Hello"];
        let said = plan.run(&args).ok().stderr;
        assert!(said.contains(" of the conversation reused, ") && !said.contains("keeps pages"), "{said}");
    }
    let second = say("talk", "And what does pop do?").ok();
    assert!(second.stderr.contains("continuing the conversation after 2 messages"), "{}", second.stderr);
    assert!(reused(&second) >= 32, "the states of its answer, too: {}", second.stderr);
    assert_eq!(reused(&say("other", "Why?").ok()), 0);
    // Without states the conversation is computed again.
    let json = format!("{dir}/sessions/talk.json");
    let said: serde_json::Value = serde_json::from_slice(&std::fs::read(&json).unwrap()).unwrap();
    assert_eq!(said["messages"].as_array().unwrap().len(), 4);
    for entry in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if entry.join("pages.kv").exists() {
            std::fs::remove_dir_all(entry).unwrap();
        }
    }
    let third = say("talk", "Thanks.").ok();
    assert!(
        third.stderr.contains("continuing the conversation after 4 messages") && reused(&third) == 0,
        "{}",
        third.stderr
    );
    std::fs::write(&json, "{").unwrap();
    say("talk", "x").fails(1, &["cannot use the session"]);
    say("../talk", "x").fails(2, &["a name has 1 to 64 letters"]);
    plan.run(&["--session", "a", "--json", "-p", "x"]).fails(1, &["--session keeps a conversation of text", "hint:"]);
}

#[test]
fn a_session_says_what_kv_pages_take_beyond_the_memory_limit_of_the_plan() {
    let mut plan = PlanDir::new("genai/learned-llama-fp32-cpu", 512);
    plan.plan.generation.as_mut().unwrap().chat_template = Some("chat_template.jinja".into());
    let dir = tempfile::tempdir().unwrap();
    let mut say = |limit: u64, args: &[&str]| {
        plan.plan.budgets.ram = Some(ByteSize(limit));
        plan.save();
        let args: Vec<&str> = ["--session", "talk", "--kv-dir", dir.path().to_str().unwrap(), "-n", "2", "-p", "Why?"]
            .iter()
            .chain(args)
            .copied()
            .collect();
        plan.run(&args).ok().stderr
    };
    let pages = ["--kv-ram", "300M"];
    let said = say(200 << 20, &pages);
    assert!(
        said.contains("warning: with --kv-ram 300 MiB this model takes up to") && said.contains("made for 200 MiB"),
        "{said}"
    );
    let is_silent = |said: &str| !said.contains("--kv-ram") && said.contains(" of the conversation reused");
    for (limit, args) in [(2 << 30, &pages[..]), (200 << 20, &[])] {
        let said = say(limit, args);
        assert!(is_silent(&said), "{said}");
    }
    // The weights alone take more: by default there are no pages, and the conversation goes on.
    let said = say(1 << 20, &[]);
    assert!(
        said.contains("no KV pages are kept, on disk neither: one takes") && said.contains("--kv-ram allows more"),
        "{said}"
    );
}
