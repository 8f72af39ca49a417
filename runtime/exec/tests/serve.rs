//! `hpp-exec serve`: answers equal those of single runs, together, after a kept prefix and streamed; limits, keys, faults, shutdown.

mod support;

#[cfg(target_os = "linux")]
use hpp_schema::{ByteSize, Residency};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
#[cfg(unix)]
use std::process::Command;
use support::PlanDir;
use support::server::{MODEL, Server, chat_plan, user};

fn long_text(words: usize) -> String {
    (0..words).map(|word| format!("word{word} ")).collect()
}

#[test]
fn answers_are_those_of_single_runs() {
    let server = Server::new(&[]);
    let question = "What does Vec::push do?";
    let alone = server.plan.run(&["--chat", "-p", question, "--json", "-n", "40"]).ok().json();
    let request = json!({"messages": user(question), "max_tokens": 40});
    let answer = server.ok("/v1/chat/completions", &request);
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], alone["text"]);
    assert_eq!((&choice["finish_reason"], &choice["message"]["role"]), (&json!("stop"), &json!("assistant")));
    assert_eq!(answer["usage"]["completion_tokens"], json!(alone["tokens"].as_array().unwrap().len()));
    let chunks = server.stream(
        "/v1/chat/completions",
        &json!({
            "messages": user(question), "max_tokens": 40, "stream_options": {"include_usage": true}
        }),
    );
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(json!(text), alone["text"]);
    let (usage, chunks) = chunks.split_last().unwrap();
    assert_eq!(usage["usage"]["total_tokens"], answer["usage"]["total_tokens"]);
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], json!("stop"));
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], json!("assistant"));

    let text =
        server.plan.run(&["-p", "Once upon", "--json", "-n", "12", "--temperature", "0.8", "-s", "5"]).ok().json();
    let answer = server.ok(
        "/v1/completions",
        &json!({
            "prompt": ["Once upon", "Once upon"], "max_tokens": 12, "temperature": 0.8, "seed": 5, "echo": true
        }),
    );
    let expected = format!("Once upon{}", text["text"].as_str().unwrap());
    assert_eq!(answer["choices"][0]["text"], json!(expected));
    assert_eq!(answer["choices"][1]["text"], json!(expected), "the same seed");
    let several = server
        .ok("/v1/completions", &json!({"prompt": "Once", "max_tokens": 9, "temperature": 2.0, "seed": 1, "n": 4}));
    let texts: Vec<&Value> = several["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert!(texts.iter().any(|text| *text != texts[0]), "each answer has a seed of its own: {texts:?}");
    let stopped = server.ok("/v1/completions", &json!({"prompt": "Once upon", "max_tokens": 30, "stop": ["e"]}));
    assert!(!stopped["choices"][0]["text"].as_str().unwrap().contains('e'), "{stopped}");
    assert_eq!(stopped["choices"][0]["finish_reason"], json!("stop"));
}

#[test]
fn the_same_request_has_the_same_bits_alone_together_and_after_a_kept_prefix() {
    let server = Server::new(&["--max-sequences", "16"]);
    let prompt = long_text(60);
    let request = json!({"prompt": prompt, "max_tokens": 12, "logprobs": 3});
    let answer = |answer: &Value| answer["choices"][0].clone();
    let first = server.ok("/v1/completions", &request);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], json!(0));
    assert_eq!(first["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 12);
    let passes = || server.metric(&format!("hpp_passes_total{{model=\"{MODEL}\"}}"));
    let before = passes();
    let again = server.ok("/v1/completions", &request);
    assert_eq!(cached_tokens(&again), again["usage"]["prompt_tokens"].as_u64().unwrap(), "all of it: {again}");
    assert_eq!(answer(&again), answer(&first));
    assert_eq!(passes(), before + 11.0, "one for each token but the first, which has its logits");
    // A longer prompt shares whole pages.
    let longer = json!({"prompt": format!("{prompt} And then?"), "max_tokens": 12, "logprobs": 3});
    let cold = Server::new(&[]).ok("/v1/completions", &longer);
    let warm = server.ok("/v1/completions", &longer);
    assert!(cached_tokens(&warm) >= 128 && cached_tokens(&warm).is_multiple_of(128), "{warm}");
    assert_eq!(answer(&warm), answer(&cold));
    // All that both found was in the sequence that the first request had left.
    let whole_pages = |answer: &Value| (answer["usage"]["prompt_tokens"].as_u64().unwrap() - 2) / 128;
    let missing = whole_pages(&first) + whole_pages(&warm) - cached_tokens(&warm) / 128;
    server
        .wait_for(&of_tier("hpp_kv_hits_total", "sequence"), (whole_pages(&again) + cached_tokens(&warm) / 128) as f64);
    server.wait_for(&of_tier("hpp_kv_misses_total", "sequence"), missing as f64);
    server.wait_for(&of_tier("hpp_kv_misses_total", "disk"), missing as f64);
    std::thread::scope(|scope| {
        let asked: Vec<_> = (0..16)
            .map(|number| {
                let (server, request) = (&server, &request);
                scope.spawn(move || {
                    let other =
                        json!({"prompt": format!("{number} {prompt}", prompt = long_text(20)), "max_tokens": 20});
                    if number % 2 == 0 {
                        server.ok("/v1/completions", request)
                    } else {
                        server.ok("/v1/completions", &other)
                    }
                })
            })
            .collect();
        for (number, asked) in asked.into_iter().enumerate() {
            let together = asked.join().unwrap();
            if number % 2 == 0 {
                assert_eq!(answer(&together), answer(&first));
            }
        }
    });
    assert!(server.metric("hpp_cached_tokens_total{model=\"genai/learned-llama-fp32-cpu\"}") >= 128.0);
}

fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn of_tier(metric: &str, tier: &str) -> String {
    format!("{metric}{{model=\"{MODEL}\",tier=\"{tier}\"}}")
}

fn disk_pages(server: &Server) -> f64 {
    server.metric(&format!("hpp_kv_pages{{model=\"{MODEL}\",tier=\"disk\"}}"))
}

#[test]
fn an_equal_prompt_needs_no_pass_after_another_conversation_had_the_only_sequence() {
    let server = Server::new(&["--max-sequences", "1", "--kv-page", "16"]);
    let request = json!({"prompt": long_text(60), "max_tokens": 12, "ignore_eos": true, "logprobs": 3});
    let other = json!({"prompt": format!("Another text: {}", long_text(20)), "max_tokens": 4, "ignore_eos": true});
    let first = server.ok("/v1/completions", &request);
    assert_eq!(cached_tokens(&first), 0);
    server.ok("/v1/completions", &other);
    let end_bytes = format!("hpp_kv_prompt_end_bytes{{model=\"{MODEL}\"}}");
    server.wait_until(&end_bytes, |bytes| bytes > 0.0);
    let passes = || server.metric(&format!("hpp_passes_total{{model=\"{MODEL}\"}}"));
    let before = passes();
    let again = server.ok("/v1/completions", &request);
    let prompt = again["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!((cached_tokens(&again), &again["choices"]), (prompt, &first["choices"]));
    assert_eq!(passes(), before + 11.0, "one for each token but the first, which has its logits");
    let (hits, misses) = (of_tier("hpp_kv_hits_total", "ram"), of_tier("hpp_kv_misses_total", "disk"));
    server.wait_for(&hits, ((prompt - 2) / 16) as f64);
    // Only the first two prompts had pages that were not found.
    let in_other = server.ok("/v1/completions", &other)["usage"]["prompt_tokens"].as_u64().unwrap();
    server.wait_for(&hits, ((prompt - 2) / 16 + (in_other - 2) / 16) as f64);
    server.wait_for(&misses, ((prompt - 2) / 16 + (in_other - 2) / 16) as f64);
}

#[test]
fn states_survive_kill_9_with_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--kv-dir", dir.path().to_str().unwrap(), "--kv-page", "16", "--max-sequences", "2"];
    let request = json!({"prompt": long_text(60), "max_tokens": 12, "logprobs": 3});
    let mut server = Server::new(&args);
    let first = server.ok("/v1/completions", &request);
    let whole_pages = (first["usage"]["prompt_tokens"].as_u64().unwrap() / 16) as f64;
    server.wait_for(&format!("hpp_kv_pages{{model=\"{MODEL}\",tier=\"disk\"}}"), whole_pages);
    server.restart(&args);
    let again = server.ok("/v1/completions", &request);
    assert!(cached_tokens(&again) >= 128, "{again}");
    assert_eq!(again["choices"], first["choices"]);
    let hits = cached_tokens(&again) as f64 / 16.0;
    server.wait_for(&of_tier("hpp_kv_hits_total", "disk"), hits);
    server.wait_for(
        &of_tier("hpp_kv_misses_total", "ram"),
        hits + server.metric(&of_tier("hpp_kv_misses_total", "disk")),
    );
    assert_eq!(server.metric(&of_tier("hpp_kv_restore_seconds_count", "disk")), 1.0);
    // Another process may not write there.
    let path = server.plan.path().to_str().unwrap().to_owned();
    let second = support::hpp_exec(["serve", &path, "--port", "0", args[0], args[1], args[2], args[3]]);
    assert!(second.stderr.contains("another process uses the KV store"), "{}", second.stderr);
    // Broken records cost time and no token.
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let pages = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path().join("pages.kv");
    let mut bytes = std::fs::read(&pages).unwrap();
    bytes.iter_mut().skip(4096 + 11).step_by(2048).for_each(|byte| *byte ^= 64);
    std::fs::write(&pages, bytes).unwrap();
    server.restart(&args);
    let recomputed = server.ok("/v1/completions", &request);
    assert_eq!((&recomputed["choices"], cached_tokens(&recomputed)), (&first["choices"], 0));
}

#[cfg(unix)]
#[test]
fn a_shutdown_saves_the_states_of_conversations() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--kv-dir", dir.path().to_str().unwrap(), "--kv-page", "16"];
    let mut server = Server::new(&args);
    let request = json!({"prompt": long_text(60), "max_tokens": 12, "logprobs": 3});
    let first = server.ok("/v1/completions", &request);
    // At once, so that most pages are not written yet.
    server.stop_and_start(&args);
    let prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    server.wait_for(&of_tier("hpp_kv_pages", "disk"), (prompt / 16) as f64);
    let again = server.ok("/v1/completions", &request);
    assert_eq!((cached_tokens(&again), &again["choices"]), ((prompt - 2) / 16 * 16, &first["choices"]));
}

#[test]
fn a_plan_with_states_on_disk_saves_and_restores_pages() {
    let request = json!({"prompt": long_text(60), "max_tokens": 12, "logprobs": 3});
    let expected = Server::new(&["--kv-page", "16"]).ok("/v1/completions", &request)["choices"].clone();
    let (dir, states) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut plan = chat_plan(MODEL);
    plan.plan.states.iter_mut().for_each(|state| state.on_disk = true);
    plan.save();
    let [kv, states] = [&dir, &states].map(|dir| dir.path().to_str().unwrap());
    let args = ["--kv-dir", kv, "--kv-page", "16", "--state-dir", states, "--max-sequences", "2"];
    let mut server = Server::start(plan, &args);
    let first = server.ok("/v1/completions", &request);
    assert_eq!(first["choices"], expected, "the same bits as with states in memory");
    let whole_pages = first["usage"]["prompt_tokens"].as_u64().unwrap() / 16;
    server.wait_for(&of_tier("hpp_kv_pages", "disk"), whole_pages as f64);
    server.restart(&args);
    let again = server.ok("/v1/completions", &request);
    assert!(cached_tokens(&again) >= 128, "{again}");
    assert_eq!(again["choices"], expected);
    // Beside another request, whose prompt begins alike.
    let other = json!({"prompt": format!("{}and more", long_text(50)), "max_tokens": 20});
    std::thread::scope(|scope| {
        let other = scope.spawn(|| server.ok("/v1/completions", &other));
        assert_eq!(server.ok("/v1/completions", &request)["choices"], expected);
        assert!(cached_tokens(&other.join().unwrap()) >= 128);
    });
}

#[test]
fn a_prefetch_reads_pages_and_says_how_many_tokens_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--kv-dir", dir.path().to_str().unwrap(), "--kv-page", "16", "--max-sequences", "2"];
    let mut server = Server::new(&args);
    let (pages_in_ram, hits) = (of_tier("hpp_kv_pages", "ram"), of_tier("hpp_kv_hits_total", "ram"));
    let request = json!({"prompt": long_text(60), "max_tokens": 6, "logprobs": 2});
    let prefetch = json!({"prompt": long_text(60), "prefetch": true});
    let unknown = server.ok("/v1/completions", &prefetch);
    assert_eq!((cached_tokens(&unknown), &unknown["choices"][0]["text"]), (0, &json!("")), "{unknown}");
    assert_eq!(server.metric(&format!("hpp_passes_total{{model=\"{MODEL}\"}}")), 0.0, "nothing is computed");
    let first = server.ok("/v1/completions", &request);
    let found = cached_tokens(&server.ok("/v1/completions", &prefetch));
    assert!(found >= 128, "{found} tokens in the kept sequence");
    server.wait_for(&of_tier("hpp_kv_pages", "disk"), (first["usage"]["prompt_tokens"].as_u64().unwrap() / 16) as f64);
    server.restart(&args);
    assert_eq!(server.metric(&pages_in_ram), 0.0);
    let prefetched = server.ok("/v1/completions", &prefetch);
    assert_eq!((cached_tokens(&prefetched), &prefetched["usage"]["completion_tokens"]), (found, &json!(0)));
    assert_eq!(prefetched["choices"][0]["finish_reason"], json!("length"));
    server.wait_for(&pages_in_ram, (found / 16) as f64);
    let again = server.ok("/v1/completions", &request);
    assert_eq!((cached_tokens(&again), &again["choices"]), (found, &first["choices"]));
    server.wait_for(&hits, (found / 16) as f64);
    server.wait_for(&of_tier("hpp_kv_restore_seconds_count", "ram"), 1.0);
    assert_eq!(server.metric(&of_tier("hpp_kv_restore_seconds_count", "disk")), 0.0);
    let bytes_of_a_page =
        |tier: &str| server.metric(&of_tier("hpp_kv_bytes", tier)) / server.metric(&of_tier("hpp_kv_pages", tier));
    assert!(bytes_of_a_page("ram") > 4096.0 && bytes_of_a_page("ram") == bytes_of_a_page("disk"));
    let passes = server.metric(&format!("hpp_passes_total{{model=\"{MODEL}\"}}"));
    assert!(passes >= 6.0);
    assert_eq!(server.metric(&format!("hpp_items_per_pass_count{{model=\"{MODEL}\"}}")), passes);
    // A conversation, streamed.
    let chat = json!({"messages": user("x"), "prefetch": true, "stream_options": {"include_usage": true}});
    let chunks = server.stream("/v1/chat/completions", &chat);
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], json!(0), "{chunks:?}");
    assert_eq!(server.refused("/v1/completions", &json!({"prompt": "x", "prefetch": true, "park": true})).0, 400);
    let (status, error) = server.refused("/v1/completions", &json!({"prompt": ""}));
    assert!(status == 400 && error.to_string().contains("`prompt` is empty"), "{error}");
}

#[test]
fn a_session_goes_on_after_its_answer_and_survives_kill_9_and_parking() {
    let turn = |role: &str, content: &Value| json!({"role": role, "content": content});
    let first_turn = json!({"messages": user(&long_text(20)), "max_tokens": 60, "ignore_eos": true});
    let second_turn = |first: &Value, more: Value| {
        let answer = &first["choices"][0]["message"]["content"];
        let talk = [turn("user", &json!(long_text(20))), turn("assistant", answer), turn("user", &json!("And then?"))];
        let mut request = json!({"messages": talk, "max_tokens": 10, "logprobs": true});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        request
    };
    let with = |more: Value| {
        let mut request = first_turn.clone();
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        request
    };
    let chat = "/v1/chat/completions";
    let mut answers = Vec::new();
    for parks in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let args = ["--kv-dir", dir.path().to_str().unwrap(), "--kv-page", "16"];
        let mut server = Server::new(&args);
        let first = server.ok(chat, &with(json!({"session_id": "a", "park": parks})));
        let prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
        let stored = ((prompt + 59) / 16) as f64;
        server.wait_for(&format!("hpp_kv_pages{{model=\"{MODEL}\",tier=\"disk\"}}"), stored);
        if parks {
            server.wait_for(&format!("hpp_kv_pages{{model=\"{MODEL}\",tier=\"ram\"}}"), 0.0);
            server.restart(&args);
        }
        let other = server.ok(chat, &second_turn(&first, json!({"session_id": "b"})));
        assert!(cached_tokens(&other) <= prompt, "another session does not see its answer: {other}");
        let second = server.ok(chat, &second_turn(&first, json!({"session_id": "a"})));
        assert!(cached_tokens(&second) > prompt, "{second}");
        assert!(disk_pages(&server) >= stored);
        answers.push((first["choices"].clone(), second["choices"].clone(), other["choices"].clone()));
    }
    assert_eq!(answers[0], answers[1], "parked, killed and resumed, or never parked: the same bits");
}

#[cfg(unix)]
#[test]
fn a_session_that_takes_over_an_equal_prompt_finds_its_own_pages_again() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--kv-dir", dir.path().to_str().unwrap(), "--kv-page", "16"];
    let mut server = Server::new(&args);
    // One token more than whole pages: the last page is not fed as one chunk, so each session has its own.
    let prompt: Vec<u64> = (0..49).map(|at| at * 7 % 400 + 10).collect();
    let ask = |server: &Server, tokens: &[u64], session: &str| {
        let request =
            json!({"prompt": tokens, "max_tokens": 40, "ignore_eos": true, "logprobs": 1, "session_id": session});
        server.ok("/v1/completions", &request)
    };
    let first = ask(&server, &prompt, "a");
    let second = ask(&server, &prompt, "b");
    assert_eq!((cached_tokens(&second), &second["choices"]), (49, &first["choices"]));
    let answer = server
        .plan
        .run(&[
            "--tokens",
            &prompt.iter().map(u64::to_string).collect::<Vec<_>>().join(","),
            "--json",
            "-n",
            "40",
            "--ignore-eos",
        ])
        .ok()
        .json();
    let answer = answer["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap());
    let longer: Vec<u64> = prompt.iter().copied().chain(answer).chain([11, 12, 13]).collect();
    server.stop_and_start(&args);
    let next = ask(&server, &longer, "b");
    assert!(cached_tokens(&next) >= 80, "pages of its answer, too: {next}");
}

#[test]
fn a_shared_start_is_found_beside_a_longer_conversation() {
    let server = Server::new(&["--kv-page", "16", "--max-sequences", "4"]);
    let start = long_text(8);
    let ask = |text: &str| server.ok("/v1/completions", &json!({"prompt": text, "max_tokens": 2, "ignore_eos": true}));
    let prompt_tokens = |answer: &Value| answer["usage"]["prompt_tokens"].as_u64().unwrap();
    let long = ask(&format!("{start}{}", "and so on ".repeat(60)));
    let short = ask(&format!("{start}what is it?"));
    assert!(prompt_tokens(&long) > 2 * prompt_tokens(&short), "{long} {short}");
    assert!(cached_tokens(&short) >= 16, "{short}");
    let again = ask(&format!("{start}{}", "and so on ".repeat(60)));
    assert!(cached_tokens(&again) + 32 > prompt_tokens(&again), "the longer one is not lost: {again}");
}

#[test]
fn echo_with_logprobs_reports_the_tokens_of_the_prompt() {
    let server = Server::new(&[]);
    let path = "/v1/completions";
    let alone = server.plan.run(&["-p", &long_text(60), "--json", "-n", "6", "--ignore-eos"]).ok().json();
    let ids = |name: &str| alone[name].as_array().unwrap().clone();
    let (prompt, answer) = (ids("prompt_token_ids"), ids("tokens"));
    let request = json!({"prompt": prompt, "max_tokens": 6, "ignore_eos": true, "logprobs": 2});
    let generated = server.ok(path, &request);
    // What was an answer is a prompt now, whose start is kept from the first request.
    let all: Vec<Value> = prompt.iter().chain(&answer).cloned().collect();
    let scored = json!({"prompt": all, "max_tokens": 0, "echo": true, "logprobs": 2});
    let echoed = server.ok(path, &scored);
    let numbers = |answer: &Value, name: &str| answer["choices"][0]["logprobs"][name].as_array().unwrap().clone();
    let scores = numbers(&echoed, "token_logprobs");
    assert_eq!((scores.len(), &scores[0]), (all.len(), &Value::Null), "the first token has no probability");
    assert!(prompt.len() > 128, "several chunks");
    assert_eq!(echoed["usage"]["completion_tokens"], json!(0));
    assert_eq!(cached_tokens(&echoed), 0, "each token is computed");
    assert_eq!(numbers(&echoed, "tokens")[0], json!("<|bos|>"));
    assert_eq!(numbers(&echoed, "top_logprobs")[0], Value::Null);
    for (ours, theirs) in scores[prompt.len()..].iter().zip(numbers(&generated, "token_logprobs")) {
        assert!((ours.as_f64().unwrap() - theirs.as_f64().unwrap()).abs() < 1e-3, "{ours} {theirs}");
    }
    assert_eq!(server.ok(path, &scored)["choices"], echoed["choices"], "the same bits again");
    // With an answer, too; the answer is that without the prompt.
    let mut both = request.clone();
    both["echo"] = json!(true);
    let both = server.ok(path, &both);
    assert_eq!(numbers(&both, "tokens").len(), prompt.len() + 6);
    assert_eq!(numbers(&both, "tokens")[prompt.len()..], numbers(&generated, "tokens")[..]);
    assert_eq!(numbers(&both, "token_logprobs")[1..prompt.len()], scores[1..prompt.len()]);
    assert_eq!(server.ok(path, &request)["choices"], generated["choices"], "the logits of echoes are not reused");
    let text = both["choices"][0]["text"].as_str().unwrap();
    assert!(text.ends_with(generated["choices"][0]["text"].as_str().unwrap()) && text.contains("word59"), "{text}");
    let ended = json!({"prompt": "What is ownership?", "max_tokens": 40, "echo": true, "logprobs": 0});
    let ended = server.ok(path, &ended);
    assert_eq!(numbers(&ended, "tokens").len() as u64, ended["usage"]["total_tokens"].as_u64().unwrap(), "{ended}");
    // The text of these tokens is empty.
    let special = server.ok(path, &json!({"prompt": [1, 6], "max_tokens": 5, "echo": true, "logprobs": 0}));
    assert_eq!(special["choices"][0]["finish_reason"], "stop");
    assert_eq!(
        numbers(&special, "tokens").len() as u64,
        special["usage"]["total_tokens"].as_u64().unwrap(),
        "{special}"
    );
    let ended_at_once = server.ok(path, &json!({"prompt": [1, 6], "max_tokens": 5, "logprobs": 0}));
    assert_eq!(ended_at_once["choices"][0]["logprobs"]["tokens"], json!([]), "{ended_at_once}");
    // Where an end token ends nothing, it is an entry as any other.
    let beyond = json!({"prompt": "What is ownership?", "max_tokens": 60, "logprobs": 0, "ignore_eos": true});
    let beyond = server.ok(path, &beyond);
    assert_eq!(numbers(&beyond, "tokens").len(), 60, "{beyond}");
    assert!(numbers(&beyond, "tokens").contains(&json!("<|endoftext|>")), "{beyond}");
    let streamed = server.stream(path, &scored);
    let in_chunks: Vec<Value> = streamed
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["token_logprobs"].as_array())
        .flatten()
        .cloned()
        .collect();
    assert_eq!(in_chunks, scores);
}

#[test]
fn text_offsets_say_where_tokens_begin() {
    let server = Server::new(&[]);
    let path = "/v1/completions";
    // Of characters, not of bytes; tokens of the model's vocabulary are bytes of the last ones.
    let prompt = "Rust \u{e9}\u{4f60} ownership: ";
    let request = json!({"prompt": prompt, "max_tokens": 8, "ignore_eos": true, "logprobs": 0});
    let with_echo = json!({"prompt": prompt, "max_tokens": 8, "ignore_eos": true, "logprobs": 0, "echo": true});
    let offsets = |answer: &Value| -> Vec<usize> {
        serde_json::from_value(answer["choices"][0]["logprobs"]["text_offset"].clone()).unwrap()
    };
    let check = |answer: &Value| {
        let choice = &answer["choices"][0];
        let text: Vec<char> = choice["text"].as_str().unwrap().chars().collect();
        let mut ends = offsets(answer)[1..].to_vec();
        let mut compared = 0;
        ends.push(text.len());
        for ((token, start), end) in
            choice["logprobs"]["tokens"].as_array().unwrap().iter().zip(offsets(answer)).zip(ends)
        {
            let token = token.as_str().unwrap();
            let is_text = !token.starts_with("<|") && !token.contains('\u{fffd}');
            if is_text {
                assert_eq!(text[start..end].iter().collect::<String>(), token, "{choice}");
                compared += 1;
            }
        }
        assert!(compared >= 8, "{choice}");
    };
    let (answer, echoed) = (server.ok(path, &request), server.ok(path, &with_echo));
    check(&answer);
    check(&echoed);
    assert_eq!(offsets(&answer)[0], 0);
    let (length, tokens) = (prompt.chars().count(), offsets(&echoed).len() - 8);
    let later: Vec<usize> = offsets(&answer).iter().map(|offset| offset + length).collect();
    assert_eq!(offsets(&echoed)[tokens..], later, "the answer begins where the prompt ends");
    for (request, whole) in [(&request, &answer), (&with_echo, &echoed)] {
        let chunks = server.stream(path, request);
        let lists = chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"]["text_offset"].as_array());
        let streamed: Vec<usize> = lists.flatten().map(|offset| offset.as_u64().unwrap() as usize).collect();
        assert_eq!(streamed, offsets(whole));
    }
}

#[test]
fn drafts_do_not_change_answers() {
    let server = Server::new(&["--ngram"]);
    let question = "What does Vec::push do?";
    let alone = server.plan.run(&["--chat", "-p", question, "--json", "-n", "40"]).ok().json();
    let turn = |role: &str, content: &Value| json!({"role": role, "content": content});
    let first = server.ok("/v1/chat/completions", &json!({"messages": user(question), "max_tokens": 40}));
    let text = &first["choices"][0]["message"]["content"];
    assert_eq!(text, &alone["text"]);
    let talk = json!([turn("user", &json!(question)), turn("assistant", text), turn("user", &json!(question))]);
    let second = server.ok("/v1/chat/completions", &json!({"messages": talk, "max_tokens": 40}));
    let without = Server::new(&[]).ok("/v1/chat/completions", &json!({"messages": talk, "max_tokens": 40}));
    assert_eq!(second["choices"], without["choices"]);
}

#[test]
fn a_client_that_leaves_frees_its_place() {
    const ANSWERS: f64 = 30.0;
    let (running, waiting) =
        (format!("hpp_requests_running{{model=\"{MODEL}\"}}"), format!("hpp_requests_waiting{{model=\"{MODEL}\"}}"));
    let server = Server::new(&["--max-sequences", "1", "--queue", "30"]);
    let long = json!({"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": true, "stream": true});
    let mut many = long.clone();
    many["n"] = json!(ANSWERS as u64);
    let answers = server.post("/v1/completions", &many);
    server.wait_for(&running, 1.0);
    // One runs and 29 wait, for as long as the others take: a second request for 30 finds no places.
    let mut refused = server.post("/v1/completions", &many);
    assert_eq!(refused.status(), 429);
    assert!(refused.headers().contains_key("retry-after"));
    let error: Value = refused.body_mut().read_json().unwrap();
    assert_eq!(error["error"]["type"], json!("rate_limit_error"));
    many["n"] = json!(31);
    let (status, error) = server.refused("/v1/completions", &many);
    assert_eq!(status, 400, "it would never find places: {error}");
    let responses = |path: &str, status: u16| {
        server.metric(&format!("hpp_http_responses_total{{path=\"{path}\",status=\"{status}\"}}"))
    };
    assert_eq!([429, 400].map(|status| responses("/v1/completions", status)), [1.0, 1.0]);
    let (status, _) = server.refused("/v1/nothing", &json!({}));
    assert_eq!((status, responses("other", 404)), (404, 1.0));
    drop(answers);
    // The connection is closed now; the server notices before its next pass.
    server.wait_for(&waiting, 0.0);
    server.wait_for(&running, 0.0);
    let generated = server.metric(&format!("hpp_generated_tokens_total{{model=\"{MODEL}\"}}"));
    assert!(generated < ANSWERS * 400.0, "all {ANSWERS} answers were generated");
    let answer = server.ok("/v1/completions", &json!({"prompt": "Once upon", "max_tokens": 3, "ignore_eos": true}));
    assert_eq!(answer["usage"]["completion_tokens"], json!(3));
    server.wait_for(&running, 0.0);
    server.wait_for(&waiting, 0.0);
}

#[test]
fn what_cannot_be_answered_is_refused_by_name() {
    let server = Server::new(&["--max-body", "64K"]);
    let chat = "/v1/chat/completions";
    for (body, status, param) in [
        (json!({"messages": []}), 400, json!("messages")),
        (json!({"messages": user("x"), "temperature": -1}), 400, json!("temperature")),
        (json!({"messages": user("x"), "n": 0}), 400, json!("n")),
        (json!({"messages": user("x"), "tools": [{"type": "function"}]}), 400, json!("tools[0]")),
        (json!({"messages": user("x"), "response_format": {"type": "xml"}}), 400, json!("response_format")),
        (json!({"messages": user("x"), "top_logprobs": 3}), 400, json!("top_logprobs")),
        (json!({"messages": user("x"), "model": "other"}), 404, json!("model")),
        (json!({"messages": "x"}), 400, json!("messages")),
        (json!({"messages": [{"role": "user", "content": 3}]}), 400, json!("messages[0].content")),
        (json!({"messages": user("x"), "max_tokens": "many"}), 400, json!("max_tokens")),
        (
            json!({"messages": user("x"), "stream_options": {"include_usage": 3}}),
            400,
            json!("stream_options.include_usage"),
        ),
        (json!({}), 400, json!("messages")),
        (json!({"messages": user(&long_text(2000))}), 400, json!("messages")),
        (json!({"messages": user(&"x".repeat(70 << 10))}), 413, Value::Null),
    ] {
        let (found, error) = server.refused(chat, &body);
        assert_eq!((found, &error["param"]), (status, &param), "{error}");
    }
    for prompt in [json!([9_999_999]), json!({"a": 1}), json!(long_text(2000)), json!([])] {
        let (status, error) = server.refused("/v1/completions", &json!({"prompt": prompt}));
        assert_eq!((status, &error["param"]), (400, &json!("prompt")), "{error}");
    }
    assert_eq!(server.refused("/tokenize", &json!({})).1["param"], json!("content"));
    for tokens in [json!("x"), json!([1, 9_999_999])] {
        assert_eq!(server.refused("/detokenize", &json!({"tokens": tokens})).1["param"], json!("tokens"));
    }
    let best_of = |number: u64| json!({"prompt": "a", "max_tokens": 1, "best_of": number, "n": 2});
    assert_eq!(server.refused("/v1/completions", &best_of(3)).1["param"], json!("best_of"));
    assert_eq!(server.ok("/v1/completions", &best_of(2))["choices"].as_array().unwrap().len(), 2);
    assert_eq!(server.refused("/../etc/passwd", &json!({})).0, 404);
    for path in ["/", "/health", "/metrics", "/v1/models"] {
        let (status, error) = server.refused(path, &json!({}));
        assert!(status == 405 && error["message"].is_string(), "{path}: {error}");
    }
    let answer = server.ok(chat, &json!({"messages": user("x"), "max_tokens": 1}));
    assert_eq!(answer["usage"]["completion_tokens"], json!(1), "and it goes on");
    let mut late = server.post(chat, &json!({"messages": user("x"), "timeout": 1e-9, "max_tokens": 400}));
    assert_eq!(late.status(), 504, "{}", late.body_mut().read_to_string().unwrap());
}

#[test]
fn hostile_clients_get_errors_and_harm_nobody() {
    let server = Server::new(&[]);
    let address = server.url.strip_prefix("http://").unwrap();
    let connect = || TcpStream::connect(address).unwrap();
    let send = |body: &[u8]| -> u16 {
        let mut stream = connect();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        // The server may refuse a body before it has read all of it.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        let answer = String::from_utf8_lossy(&answer);
        answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0)
    };
    let deep = "[".repeat(200_000);
    let stops: Vec<String> = (0..5000).map(|stop| format!("stop {stop}")).collect();
    let bodies: [(&str, Vec<u8>); 9] = [
        ("deep JSON", format!("{{\"prompt\": {deep}").into_bytes()),
        ("deep field", format!("{{\"prompt\": \"x\", \"user\": {deep}}}").into_bytes()),
        ("huge number", b"{\"prompt\": \"x\", \"max_tokens\": 1e999}".to_vec()),
        ("negative number", b"{\"prompt\": \"x\", \"max_tokens\": -5}".to_vec()),
        ("bad UTF-8", b"{\"prompt\": \"\xff\xfe\"}".to_vec()),
        ("thousands of stops", json!({"prompt": "x", "stop": stops}).to_string().into_bytes()),
        ("too many prompts", json!({"prompt": vec!["x"; 5000]}).to_string().into_bytes()),
        ("unknown token", b"{\"prompt\": [4294967295]}".to_vec()),
        ("empty", Vec::new()),
    ];
    for (what, body) in bodies {
        assert_eq!(send(&body), 400, "{what}");
    }
    assert!([0, 413].contains(&send(&vec![b' '; 10 << 20])), "a body of 10 MB");
    // Connections that say nothing, say half of something, or nonsense, while others are served.
    let silent: Vec<TcpStream> = (0..200).map(|_| connect()).collect();
    let mut halves: Vec<TcpStream> = (0..50).map(|_| connect()).collect();
    for stream in &mut halves {
        stream
            .write_all(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n\r\n{\"pro")
            .unwrap();
    }
    for stream in &halves[..25] {
        stream.shutdown(Shutdown::Write).unwrap();
    }
    connect().write_all(&[0xff; 4096]).unwrap();
    let answer = server.ok("/v1/completions", &json!({"prompt": "Once upon", "max_tokens": 3, "ignore_eos": true}));
    assert_eq!(answer["usage"]["completion_tokens"], json!(3));
    drop((silent, halves));
    assert_eq!(server.get("/health").status(), 200);
}

#[test]
fn keys_models_tokens_and_health() {
    let server = Server::new(&["--api-key", "secret"]);
    let without = |path: &str| server.agent.get(format!("{}{path}", server.url)).call().unwrap().status().as_u16();
    assert_eq!((without("/health"), without("/v1/models"), without("/metrics")), (200, 401, 401));
    let models: Value = server.get("/v1/models").body_mut().read_json().unwrap();
    assert_eq!(models["data"][0]["id"], json!(MODEL));
    assert_eq!(models["data"][0]["placement"][0]["device"], json!("cpu"));
    assert_eq!(server.get("/v1/models/genai/learned-llama-fp32-cpu").status(), 200);
    let tokens = server.ok("/tokenize", &json!({"content": "Once upon a time"}));
    let text = server.ok("/detokenize", &tokens);
    assert!(text["content"].as_str().unwrap().ends_with("Once upon a time"), "{text}");
}

#[test]
fn an_empty_key_is_refused() {
    let plan = PlanDir::new(MODEL, 64);
    let path = plan.path().to_str().unwrap().to_owned();
    // A server that took the key would fail to listen, instead of running on.
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let serve = ["serve", &path, "--port", &taken.local_addr().unwrap().port().to_string()];
    support::hpp_exec(serve.into_iter().chain(["--api-key", ""])).fails(1, &["--api-key is empty", "hint: "]);
    let from_environment = support::command(serve).env("HPP_API_KEY", "").output().unwrap();
    let errors = String::from_utf8_lossy(&from_environment.stderr);
    assert!(!from_environment.status.success() && errors.contains("HPP_API_KEY is empty"), "{errors}");
}

#[test]
fn a_model_whose_gpu_is_missing_is_shown_where_it_is() {
    let plan = PlanDir::new(MODEL, 64).for_gpu(vec![hpp_schema::Provider::CUDA]);
    let server = Server::start(plan, &["--on-demand"]);
    let placement = || {
        let models: Value = server.get("/v1/models").body_mut().read_json().unwrap();
        models["data"][0]["placement"].clone()
    };
    let planned = placement();
    assert_eq!(
        (&planned[0]["device"], &planned[0]["planned_device"]),
        (&json!("gpu0"), &Value::Null),
        "not loaded yet"
    );
    server.ok("/v1/completions", &json!({"prompt": [1, 2], "max_tokens": 1}));
    let loaded = placement();
    assert_eq!((&loaded[0]["device"], &loaded[0]["planned_device"]), (&json!("cpu"), &json!("gpu0")), "{loaded}");
    assert_eq!((&loaded[0]["weights"], &loaded[0]["bytes"]), (&json!("resident"), &planned[0]["bytes"]), "{loaded}");
}

/// A plan may lock more than the memory of a server has room for, beside its sequences and KV pages.
#[cfg(target_os = "linux")]
#[test]
fn locked_weights_are_those_that_the_server_locked() {
    let mut plan = chat_plan(MODEL);
    let weights = ByteSize(std::fs::metadata(plan.file("model.onnx.data")).unwrap().len());
    let partition = &mut plan.plan.partitions[0];
    partition.bytes.weights = weights;
    let planned = partition.bytes.weights.0 - (1 << 20);
    (partition.residency, partition.bytes.locked) = (Residency::Streamed, Some(ByteSize(planned)));
    plan.plan.devices[0].window = Some(weights);
    plan.plan.budgets.ram = Some(ByteSize(105 << 20));
    plan.save();
    let server = Server::start(plan, &["--kv-ram", "16M", "--max-sequences", "1"]);
    let models: Value = server.get("/v1/models").body_mut().read_json().unwrap();
    let place = &models["data"][0]["placement"][0];
    let status = std::fs::read_to_string(format!("/proc/{}/status", server.child.id())).unwrap();
    let locked = status.lines().find_map(|line| line.strip_prefix("VmLck:")).unwrap();
    let locked = 1024 * locked.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
    let said = place["locked_bytes"].as_u64().unwrap();
    assert!(
        said < planned && said.abs_diff(locked) < 1 << 20,
        "{said} said, {locked} locked, {planned} planned: {place}"
    );
}

/// Requests that can start before the next pass take no place in the queue.
#[test]
fn free_sequences_are_no_places_of_the_queue() {
    let server = Server::new(&["--queue", "1", "--max-sequences", "3"]);
    let request = json!({"prompt": "The vector", "max_tokens": 4, "ignore_eos": true});
    for _ in 0..5 {
        server.wait_for(&format!("hpp_requests_running{{model=\"{MODEL}\"}}"), 0.0);
        std::thread::scope(|scope| {
            let asked: Vec<_> =
                (0..4).map(|_| scope.spawn(|| server.post("/v1/completions", &request).status())).collect();
            for asked in asked {
                assert_eq!(asked.join().unwrap(), 200);
            }
        });
    }
}

#[cfg(unix)]
#[test]
fn a_shutdown_lets_requests_finish() {
    let mut server = Server::new(&["--grace", "60"]);
    let mut running = server.post(
        "/v1/completions",
        &json!({
            "prompt": "Once upon a time", "max_tokens": 200, "temperature": 1.0, "seed": 3, "stream": true
        }),
    );
    let mut start = [0; 8];
    let mut stream = running.body_mut().as_reader();
    stream.read_exact(&mut start).unwrap();
    assert!(Command::new("kill").args(["-TERM", &server.child.id().to_string()]).status().unwrap().success());
    let mut rest = String::new();
    stream.read_to_string(&mut rest).unwrap();
    assert!(rest.trim_end().ends_with("[DONE]") && rest.contains("finish_reason"), "{rest}");
    drop(running);
    assert!(server.child.wait().unwrap().success());
}

#[test]
fn a_model_without_a_tokenizer_is_warned_of_at_the_start() {
    let mut plan = PlanDir::new(MODEL, 64);
    // Refused after the warning, so that no server runs on.
    let serve = |plan: &PlanDir| plan.command("serve", &["--port", "0", "--speculate", "draft"]);
    let with = serve(&plan).fails(1, &["hint: ", "if the model's weights are floats, split it with --draft int4"]);
    assert!(!with.stderr.contains("tokenizer"), "{}", with.stderr);
    plan.plan.generation.as_mut().unwrap().tokenizer = None;
    plan.save();
    let says = ["warning: ", "has no tokenizer", "`prompt` of /v1/completions", "put tokenizer.json beside the model"];
    serve(&plan).fails(1, &says);
    let server = Server::start(plan, &[]);
    let (status, error) = server.refused("/v1/chat/completions", &json!({"messages": user("hi")}));
    assert_eq!(status, 400, "{error}");
    let answer = server.ok("/v1/completions", &json!({"prompt": [1, 2], "max_tokens": 2, "ignore_eos": true}));
    assert_eq!((&answer["choices"][0]["text"], &answer["usage"]["completion_tokens"]), (&json!(""), &json!(2)));
}

#[test]
fn a_model_without_a_chat_template_is_warned_of_at_the_start() {
    let serve = |plan: &PlanDir| plan.command("serve", &["--port", "0", "--speculate", "draft"]);
    let with = serve(&chat_plan(MODEL)).fails(1, &["hint: "]);
    assert!(!with.stderr.contains("chat template"), "{}", with.stderr);
    let plan = PlanDir::new(MODEL, 64);
    serve(&plan).fails(1, &["warning: ", "has no chat template: chats are refused", "chat_template.jinja"]);
    let server = Server::start(plan, &[]);
    let (status, error) = server.refused("/v1/chat/completions", &json!({"messages": user("hi")}));
    assert!(status == 400 && error["message"].to_string().contains("chat template"), "{error}");
    server.ok("/v1/completions", &json!({"prompt": "Once", "max_tokens": 2}));
}

#[test]
fn two_models_of_one_name_or_a_used_port_are_errors() {
    let plan = PlanDir::new(MODEL, 64);
    let path = plan.path().to_str().unwrap().to_owned();
    let twice = support::hpp_exec(["serve", &path, &path]);
    assert!(twice.stderr.contains("two models have the name") && twice.stderr.contains("a=PLAN"), "{}", twice.stderr);
    let [a, b] = ["a", "b"].map(|name| format!("{name}={path}"));
    let kv = plan.file("kv");
    let stored = support::hpp_exec(["serve", &a, &b, "--kv-dir", kv.to_str().unwrap()]);
    stored.fails(1, &["a and b are the same plan", "one name"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let busy = support::hpp_exec(["serve", &path, "--port", &port]);
    assert!(busy.stderr.contains("cannot listen on 127.0.0.1"), "{}", busy.stderr);
}
