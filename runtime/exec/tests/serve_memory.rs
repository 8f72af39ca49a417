//! `hpp-exec serve` whose memory limit is lowered and raised while it runs, in a control group of its own.

#![cfg(target_os = "linux")]

#[allow(dead_code)]
#[path = "../../../fixtures/end-to-end/src/control_group.rs"]
mod control_group;
mod support;

use control_group::MemoryGroup;
use serde_json::{Value, json};
use support::server::{MODEL, Server, chat_plan};

const TEXT: &str = "/v1/completions";
/// What the process is taken to need without a model.
const PROCESS: u64 = 64 << 20;
const KV_RAM: u64 = 16 << 20;

fn prompt(of: u32) -> Vec<u32> {
    (0..300).map(|at| 5 + (at * 7 + of * 131) % 400).collect()
}

fn request(of: u32) -> Value {
    json!({"prompt": prompt(of), "max_tokens": 100, "ignore_eos": true, "logprobs": 1})
}

fn of_model(metric: &str, labels: &str) -> String {
    format!("{metric}{{model=\"{MODEL}\"{labels}}}")
}

fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[test]
fn a_control_groups_limit_that_falls_and_rises_is_followed_and_answers_stay_the_same() {
    let group = match MemoryGroup::new(2 << 30) {
        Ok(group) => group,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "CI skips nothing: {error}");
            return println!("skipped: no control group can be made here ({error})");
        }
    };
    let kv = tempfile::tempdir().unwrap();
    let (dir, ram) = (kv.path().to_str().unwrap(), format!("{KV_RAM}"));
    let args = ["--kv-dir", dir, "--kv-ram", &ram, "--kv-page", "32", "--max-sequences", "48", "--memory", "1G"];
    let server = Server::after(&group.join(), chat_plan(MODEL), &args);
    let expected: Vec<Value> = (0..4).map(|of| server.ok(TEXT, &request(of))).collect();
    let (pages, on_disk) = (of_model("hpp_kv_pages", ",tier=\"ram\""), of_model("hpp_kv_pages", ",tier=\"disk\""));
    let reclaimed = of_model("hpp_memory_reclaimed_bytes", "");
    server.wait_until(&on_disk, |pages| pages == 36.0);
    assert!(server.metric(&pages) == 36.0 && server.metric(&reclaimed) == 0.0);
    let models: Value = server.get("/v1/models").body_mut().read_json().unwrap();
    let needs = models["data"][0]["memory"]["host"].as_u64().unwrap();

    std::thread::scope(|scope| {
        // An answer that runs while there is less and less memory.
        let long = scope.spawn(|| server.ok(TEXT, &request(9)));
        group.set_limit(PROCESS + needs - KV_RAM).expect("the server takes less than it may");
        server.wait_until(&reclaimed, |bytes| bytes >= KV_RAM as f64);
        server.wait_until(&pages, |pages| pages == 0.0);
        assert!(long.join().unwrap()["choices"][0]["text"].is_string());
    });
    assert!(server.metric("hpp_memory_limit_bytes{memory=\"host\"}") <= (needs - KV_RAM) as f64);
    // Nothing is found in RAM, which holds no page, and every answer is the same.
    let rounds = |what: &str| {
        for (of, expected) in expected.iter().enumerate() {
            let again = server.ok(TEXT, &request(of as u32));
            assert_eq!(again["choices"], expected["choices"], "{what}, {of}");
        }
    };
    rounds("with less memory");
    assert_eq!(server.metric(&pages), 0.0);

    group.set_limit(2 << 30).unwrap();
    server.wait_until(&reclaimed, |bytes| bytes == 0.0);
    rounds("with more memory again");
    let last = server.ok(TEXT, &request(9));
    assert!(cached_tokens(&last) > 0, "{last}");
    let new = server.ok(TEXT, &request(5));
    assert_eq!(cached_tokens(&new), 0);
    server.wait_until(&pages, |pages| pages > 0.0);

    // Pages are found by a server with another limit, as long as kernels take the weights in the same form.
    drop(server);
    group.set_limit(1 << 30).unwrap();
    let server = Server::after(&group.join(), chat_plan(MODEL), &args);
    let again = server.ok(TEXT, &request(0));
    assert!(cached_tokens(&again) > 0, "{again}");
    assert_eq!(again["choices"], expected[0]["choices"]);
}
