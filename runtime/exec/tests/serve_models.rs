//! `hpp-exec serve a=PLAN b=PLAN`: models that are loaded on demand take turns where memory does not hold all of them.

#![cfg(unix)]

mod support;

use hpp_schema::{ByteSize, Provider};
use serde_json::{Value, json};
use std::process::Command;
use std::time::{Duration, Instant};
use support::PlanDir;
use support::server::{MODEL, Server, WAIT, chat_plan, user};

const OTHER: &str = "genai/learned-llama-int4-cpu";
const CHAT: &str = "/v1/chat/completions";
/// So that a model needs little beside its weights.
const SMALL: [&str; 4] = ["--max-sequences", "2", "--kv-ram", "2M"];

/// A server of `MODEL` and of `b`.
fn serve(b: &PlanDir, args: &[&str]) -> Server {
    let b = format!("b={}", b.path().display());
    let args: Vec<&str> = [b.as_str()].iter().chain(&SMALL).chain(args).copied().collect();
    Server::start(chat_plan(MODEL), &args)
}

/// What `/v1/models` says about a model.
fn model(server: &Server, name: &str) -> Value {
    let list: Value = server.get("/v1/models").body_mut().read_json().unwrap();
    let models = list["data"].as_array().unwrap();
    models.iter().find(|model| model["id"] == name).unwrap().clone()
}

fn state(server: &Server, name: &str) -> String {
    model(server, name)["state"].as_str().unwrap().to_owned()
}

fn wait_for_state(server: &Server, name: &str, wanted: &str) {
    let started = Instant::now();
    while state(server, name) != wanted {
        assert!(started.elapsed() < WAIT, "{name} stays {}", state(server, name));
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A limit of memory that holds either model and not both.
fn room_for_one(server: &Server) -> String {
    let host = |name| model(server, name)["memory"]["host"].as_u64().unwrap();
    let (a, b) = (host(MODEL), host("b"));
    // 64 MiB for the process itself.
    format!("{}", (64 << 20) + a.max(b) + a.min(b) / 2)
}

fn request(model: &str, question: &str) -> Value {
    json!({"model": model, "messages": user(question), "max_tokens": 30, "logprobs": true})
}

#[test]
fn models_take_turns_where_memory_holds_one() {
    let plan = chat_plan(OTHER);
    let server = serve(&plan, &[]);
    assert_eq!((state(&server, MODEL), state(&server, "b")), ("loaded".to_owned(), "loaded".to_owned()));
    let questions = ["What does Vec::push do?", "What is ownership?", "How do I open a file?"];
    let asked: Vec<Value> =
        questions.iter().flat_map(|question| [request(MODEL, question), request("b", question)]).collect();
    let expected: Vec<Value> = asked.iter().map(|request| server.ok(CHAT, request)["choices"].clone()).collect();
    assert_ne!(expected[0], expected[1], "the models differ");
    let memory = room_for_one(&server);
    drop(server);

    let server = serve(&plan, &["--memory", &memory]);
    assert_eq!((state(&server, MODEL), state(&server, "b")), ("loaded".to_owned(), "unloaded".to_owned()));
    assert_eq!(server.ok(CHAT, &asked[1])["choices"], expected[1]);
    assert_eq!((state(&server, MODEL), state(&server, "b")), ("unloaded".to_owned(), "loaded".to_owned()));
    std::thread::scope(|scope| {
        for (request, expected) in asked.iter().zip(&expected) {
            let server = &server;
            scope.spawn(move || assert_eq!(&server.ok(CHAT, request)["choices"], expected));
        }
    });
    let loads = |name: &str| server.metric(&format!("hpp_model_loads_total{{model=\"{name}\"}}"));
    assert!(loads(MODEL) >= 2.0 && loads("b") >= 1.0);
    let loaded = |name: &str| server.metric(&format!("hpp_model_loaded{{model=\"{name}\"}}"));
    assert_eq!(loaded(MODEL) + loaded("b"), 1.0);
    let path = server.plan.path().to_str().unwrap().to_owned();
    let too_little = support::hpp_exec(["serve", &path, "--memory", "80M", "--kv-ram", "40M"]);
    too_little.fails(
        1,
        &[
            "needs about",
            "40 MiB of it for KV pages",
            "and --memory allows 80 MiB",
            "--kv-ram",
            "hpp-split with a smaller --ram",
        ],
    );
    support::hpp_exec(["serve", &path, "--memory", "10M"]).fails(1, &["--memory 10 MiB is less than the 64 MiB"]);
}

/// KV pages that the user asks for come on top of what a model needs, also if its plan has a limit of its own; their usual share does not.
#[test]
fn kv_pages_count_although_the_plan_has_a_limit() {
    let mut plan = PlanDir::new(MODEL, 64);
    plan.plan.budgets.ram = Some(ByteSize(200 << 20));
    plan.save();
    let path = plan.path().display().to_string();
    let serve = |memory: &str, pages: &str| {
        support::hpp_exec(["serve", &path, "--port", "0", "--memory", memory, "--kv-ram", pages])
    };
    serve("200M", "1G")
        .fails(1, &["needs about 1.", "1 GiB of it for KV pages", "--memory allows 200 MiB", "less --kv-ram"]);
    let too_little = serve("200M", "8K");
    too_little.fails(1, &["the KV store may take 8K, and one page has", "with 0"]);
    // The first model is accepted with a warning; the second ends the command before anything is loaded.
    let mut other = PlanDir::new(OTHER, 64);
    other.plan.partitions[0].bytes.weights = ByteSize(8 << 30);
    other.save();
    let (a, b) = (format!("a={path}"), format!("b={}", other.path().display()));
    let both = |pages: &str| support::hpp_exec(["serve", &a, &b, "--port", "0", "--memory", "4G", "--kv-ram", pages]);
    both("1G")
        .fails(1, &["warning: with --kv-ram 1 GiB this model takes up to 1.", "made for 200 MiB", "b needs about"]);
    assert!(!both("1M").fails(1, &["b needs about"]).stderr.contains("warning: with --kv-ram"));
}

/// States count as long as the context of the server, not as long as planned.
#[test]
fn a_shorter_context_takes_less_memory() {
    let mut long = PlanDir::new(MODEL, 512);
    long.plan.states.iter_mut().for_each(|state| state.bytes = ByteSize(1 << 30));
    long.save();
    let mut large = PlanDir::new(OTHER, 64);
    large.plan.partitions[0].bytes.weights = ByteSize(1 << 40);
    large.save();
    let (long, large) = (format!("long={}", long.path().display()), format!("large={}", large.path().display()));
    let states = PlanDir::new(MODEL, 512).plan.states.len() as u64;
    let memory = format!("{}", (states + 1) << 28);
    // The command ends because of the second model, before anything is loaded.
    let serve = |context: &str| {
        let args = ["--port", "0", "--memory", &memory, "--kv-ram", "0", "--context", context];
        support::hpp_exec([&["serve", &long, &large][..], &args].concat())
    };
    serve("512").fails(1, &["error: long needs about"]);
    serve("64").fails(1, &["error: large needs about"]);
}

#[test]
fn a_model_whose_gpu_is_missing_counts_as_host_memory() {
    // Says that it is large, so that only its weights matter.
    let large = || {
        let mut plan = chat_plan(OTHER);
        plan.plan.partitions[0].bytes.weights = ByteSize(1 << 30);
        plan.save();
        plan
    };
    // Its one partition must be in memory as a whole, whatever the plan allows.
    let mut with_limit = large().for_gpu(vec![Provider::CUDA]);
    with_limit.plan.budgets.ram = Some(ByteSize(200 << 20));
    with_limit.save();
    for plan in [large(), large().for_gpu(vec![Provider::CUDA]), with_limit] {
        let path = plan.path().display().to_string();
        let too_little = support::hpp_exec(["serve", &path, "--port", "0", "--memory", "500M", "--kv-ram", "1M"]);
        too_little.fails(1, &["needs about 1.0", "GiB", "--memory allows 500 MiB"]);
    }
}

#[test]
fn a_session_of_an_unloaded_model_goes_on_with_the_same_bits() {
    let plan = chat_plan(OTHER);
    let first = json!({"model": MODEL, "messages": user("What is ownership?"), "max_tokens": 60, "ignore_eos": true,
        "session_id": "a"});
    let second = |answer: &Value| {
        let text = &answer["choices"][0]["message"]["content"];
        let talk = json!([{"role": "user", "content": "What is ownership?"}, {"role": "assistant", "content": text},
            {"role": "user", "content": "And then?"}]);
        json!({"model": MODEL, "messages": talk, "max_tokens": 10, "logprobs": true, "session_id": "a"})
    };
    let mut answers = Vec::new();
    let mut memory = "1T".to_owned();
    for is_unloaded in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let server = serve(&plan, &["--kv-dir", dir.path().to_str().unwrap(), "--kv-page", "16", "--memory", &memory]);
        let answer = server.ok(CHAT, &first);
        if is_unloaded {
            server.ok(CHAT, &request("b", "What is ownership?"));
            assert_eq!(state(&server, MODEL), "unloaded");
        }
        let next = server.ok(CHAT, &second(&answer));
        let cached = next["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        assert!(cached > answer["usage"]["prompt_tokens"].as_u64().unwrap(), "{next}");
        answers.push((answer["choices"].clone(), next["choices"].clone()));
        memory = room_for_one(&server);
    }
    assert_eq!(answers[0], answers[1]);
}

#[test]
fn a_load_that_fails_is_an_error_of_its_requests_only() {
    let plan = chat_plan(OTHER);
    let server = serve(&plan, &["--on-demand"]);
    assert_eq!((state(&server, MODEL), state(&server, "b")), ("unloaded".to_owned(), "unloaded".to_owned()));
    // The plan was replaced since the server read it.
    let weights = std::fs::read(plan.file("model.onnx.data")).unwrap();
    std::fs::write(plan.file("model.onnx.data"), &weights[..weights.len() / 2]).unwrap();
    for streams in [false, true] {
        let mut asked = request("b", "What is ownership?");
        asked["stream"] = json!(streams);
        let (status, error) = server.refused(CHAT, &asked);
        let message = error["message"].as_str().unwrap();
        assert_eq!((status, &error["type"]), (503, &json!("server_error")), "{error}");
        assert!(message.contains("\"b\" cannot be loaded") && message.contains("model.onnx.data"), "{message}");
    }
    assert!(model(&server, "b")["error"].as_str().unwrap().contains("model.onnx.data"));
    assert_eq!(server.metric("hpp_model_load_errors_total{model=\"b\"}"), 2.0);
    // A valid plan in its place is not served either: context and template are those of the old one.
    std::fs::write(plan.file("model.onnx.data"), &weights).unwrap();
    let file = plan.file("plan.yaml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replacen("context: ", "context: 1", 1)).unwrap();
    let (status, error) = server.refused(CHAT, &request("b", "What is ownership?"));
    let message = error["message"].as_str().unwrap();
    assert!(status == 503 && message.contains("was replaced since the server started"), "{status} {message}");
    std::fs::write(&file, text).unwrap();
    server.ok(CHAT, &request(MODEL, "What is ownership?"));
    std::fs::write(plan.file("model.onnx.data"), &weights).unwrap();
    server.ok(CHAT, &request("b", "What is ownership?"));
    assert_eq!(model(&server, "b")["error"], Value::Null);
}

#[test]
fn a_plan_that_is_replaced_while_it_serves_is_loaded_again() {
    let plan = chat_plan(OTHER);
    let server = serve(&plan, &[]);
    let asked = request("b", "What is ownership?");
    let first = server.ok(CHAT, &asked);
    let path = plan.file("model.onnx.data");
    let weights = std::fs::read(&path).unwrap();
    // The same inode, so that the server's mapping changes too.
    let longer: Vec<u8> = weights.iter().copied().chain([0; 64]).collect();
    std::fs::write(&path, &longer).unwrap();
    let (status, error) = server.refused(CHAT, &asked);
    assert_eq!(status, 500);
    assert!(error["message"].as_str().unwrap().contains("model.onnx.data"), "{error}");
    wait_for_state(&server, "b", "unloaded");
    let (status, error) = server.refused(CHAT, &asked);
    assert_eq!(status, 503, "{error}");
    server.ok(CHAT, &request(MODEL, "What is ownership?"));
    std::fs::write(&path, &weights).unwrap();
    assert_eq!(server.ok(CHAT, &asked)["choices"], first["choices"]);
}

#[test]
fn idle_models_are_unloaded_and_a_shutdown_ends_a_server_without_models() {
    let plan = chat_plan(OTHER);
    let mut server = serve(&plan, &["--idle-timeout", "1"]);
    let first = server.ok(CHAT, &request("b", "What is ownership?"));
    wait_for_state(&server, MODEL, "unloaded");
    wait_for_state(&server, "b", "unloaded");
    assert_eq!(server.ok(CHAT, &request("b", "What is ownership?"))["choices"], first["choices"]);
    assert_eq!((state(&server, MODEL), state(&server, "b")), ("unloaded".to_owned(), "loaded".to_owned()));
    wait_for_state(&server, "b", "unloaded");
    assert!(Command::new("kill").args(["-TERM", &server.child.id().to_string()]).status().unwrap().success());
    assert!(server.child.wait().unwrap().success());
}
