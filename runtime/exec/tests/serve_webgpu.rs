//! `hpp-exec serve` with a model and its states on a WebGPU device: answers are those of the CPU, alone, together, after a kept prefix, after
//! another conversation took the place on the device, and after kill -9.

mod support;

use serde_json::{Value, json};
use support::PlanDir;
use support::server::{MODEL, Server};

/// Whether there is a device; otherwise prints the name of the skipped test.
fn has_device(test: &str) -> bool {
    let has = std::env::var_os("HPP_WEBGPU_TEST").is_some();
    if !has {
        assert!(std::env::var_os("HPP_WEBGPU_REQUIRED").is_none(), "CI skips nothing");
        eprintln!("SKIPPED: {test}: HPP_WEBGPU_TEST is not set");
    }
    has
}

/// A request for six tokens after a prompt of this many words.
fn request(words: usize, more: &str) -> Value {
    let text: String = (0..words).map(|word| format!("word{word} ")).collect();
    json!({"prompt": format!("{text}{more}"), "max_tokens": 6, "ignore_eos": true})
}

fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

fn text(answer: &Value) -> &Value {
    &answer["choices"][0]["text"]
}

#[test]
fn conversations_on_a_device_survive_other_conversations_and_kill_9() {
    if !has_device("conversations_on_a_device_survive_other_conversations_and_kill_9") {
        return;
    }
    let requests = [request(60, ""), request(60, "And then?"), request(20, "Another text"), request(30, "A third")];
    let on_cpu = Server::start(PlanDir::new(MODEL, 512), &[]);
    let expected: Vec<Value> =
        requests.iter().map(|request| text(&on_cpu.ok("/v1/completions", request)).clone()).collect();
    drop(on_cpu);
    let dir = tempfile::tempdir().unwrap();
    // Two places on the device for four conversations.
    let args = ["--kv-dir", dir.path().to_str().unwrap(), "--kv-page", "16", "--max-sequences", "2"];
    let plan = PlanDir::new(MODEL, 512).for_gpu(vec![hpp_schema::Provider::WEBGPU]);
    let mut server = Server::start(plan, &args);
    let models: Value = server.get("/v1/models").body_mut().read_json().unwrap();
    let stage = &models["data"][0]["placement"][0];
    assert_eq!((&stage["device"], &stage["planned_device"]), (&json!("gpu0"), &Value::Null), "{models}");

    let first = server.ok("/v1/completions", &requests[0]);
    assert_eq!((text(&first), cached_tokens(&first)), (&expected[0], 0));
    let longer = server.ok("/v1/completions", &requests[1]);
    assert!(cached_tokens(&longer) >= 128, "{longer}");
    assert_eq!(text(&longer), &expected[1], "after a kept prefix");
    // Keys and values of 4 layers with 2 heads of 32, fp32, for 512 tokens of one sequence.
    let states = |tier| server.metric(&format!("hpp_state_bytes{{model=\"{MODEL}\",tier=\"{tier}\"}}"));
    assert_eq!(["device", "ram", "disk"].map(states), [f64::from(2 * 4 * 2 * 32 * 4 * 512), 0.0, 0.0]);
    let found = format!("hpp_kv_hits_total{{model=\"{MODEL}\",tier=\"sequence\"}}");
    server.wait_for(&found, (cached_tokens(&longer) / 16) as f64);
    std::thread::scope(|scope| {
        let server = &server;
        let ask = |request| scope.spawn(move || server.ok("/v1/completions", request));
        let answers: Vec<_> = requests.iter().map(ask).collect();
        for (answer, expected) in answers.into_iter().zip(&expected) {
            assert_eq!(text(&answer.join().unwrap()), expected, "together");
        }
    });
    // The last two conversations have the places on the device now.
    for request in &requests[2..] {
        server.ok("/v1/completions", request);
    }
    let from_ram = server.ok("/v1/completions", &requests[0]);
    assert!(cached_tokens(&from_ram) >= 128, "{from_ram}");
    assert_eq!(text(&from_ram), &expected[0], "after other conversations");
    let pages = server.metric(&format!("hpp_kv_pages{{model=\"{MODEL}\",tier=\"ram\"}}"));
    server.wait_for(&format!("hpp_kv_pages{{model=\"{MODEL}\",tier=\"disk\"}}"), pages);
    server.restart(&args);
    for (request, expected) in requests[..2].iter().zip(&expected) {
        let restored = server.ok("/v1/completions", request);
        assert!(cached_tokens(&restored) >= 128, "{restored}");
        assert_eq!(text(&restored), expected, "after kill -9");
    }
}
