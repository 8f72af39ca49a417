//! `/v1/embeddings`: the recorded hidden state of the last token, of length one; alone, in batches and beside answers.

mod support;

use serde_json::{Value, json};
use support::PlanDir;
use support::server::Server;

const HIDDEN: &str = "genai/llama3-fp32-cpu-hidden";
const PATH: &str = "/v1/embeddings";

fn vector(entry: &Value) -> Vec<f32> {
    serde_json::from_value(entry["embedding"].clone()).unwrap()
}

fn embed(server: &Server, input: &Value) -> Vec<Vec<f32>> {
    let answer = server.ok(PATH, &json!({"input": input}));
    assert_eq!(answer["object"], json!("list"));
    let data = answer["data"].as_array().unwrap();
    for (index, entry) in data.iter().enumerate() {
        assert_eq!((&entry["index"], &entry["object"]), (&json!(index), &json!("embedding")));
    }
    data.iter().map(vector).collect()
}

#[test]
fn an_embedding_is_the_recorded_hidden_state_of_the_last_token() {
    let plan = PlanDir::new(HIDDEN, 256);
    let prompt = plan.model.prompt();
    let recorded = plan.model.floats("prefill_other/hidden_states").unwrap();
    let last = &recorded[recorded.len() - 64..];
    let length = last.iter().map(|value| value * value).sum::<f32>().sqrt();
    let server = Server::start(plan, &["--kv-page", "16", "--max-sequences", "2"]);
    let alone = embed(&server, &json!(prompt));
    assert_eq!((alone.len(), alone[0].len()), (1, 64));
    for (ours, theirs) in alone[0].iter().zip(last) {
        assert!((ours - theirs / length).abs() < 1e-5, "{ours} {}", theirs / length);
    }
    // Several chunks; a second one of the same tokens has the same bits, also beside answers.
    let long: Vec<u32> = prompt.iter().copied().cycle().take(100).collect();
    let both = embed(&server, &json!([long, prompt, long]));
    assert_eq!((&both[1], &both[0]), (&alone[0], &both[2]));
    assert_ne!(both[0], both[1]);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (server, prompt) = (&server, &prompt);
            let generate = json!({"prompt": prompt, "max_tokens": 60, "ignore_eos": true});
            scope.spawn(move || server.ok("/v1/completions", &generate));
        }
        assert_eq!(embed(&server, &json!([long, prompt])), both[..2]);
    });
    // As a client that asks for base64 reads it.
    let encoded = server.ok(PATH, &json!({"input": prompt, "encoding_format": "base64"}));
    let text = encoded["data"][0]["embedding"].as_str().unwrap();
    assert_eq!(text.len(), (64usize * 4).div_ceil(3) * 4);
    assert_eq!(decode(text), alone[0]);
    assert_eq!(encoded["usage"], json!({"prompt_tokens": prompt.len(), "total_tokens": prompt.len()}));
    let text = embed(&server, &json!(["a text", "another"]));
    assert!(text.iter().all(|vector| (vector.iter().map(|v| v * v).sum::<f32>() - 1.0).abs() < 1e-5));
}

fn decode(text: &str) -> Vec<f32> {
    let digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let bits: Vec<u8> = text
        .bytes()
        .filter(|digit| *digit != b'=')
        .flat_map(|digit| {
            let value = digits.bytes().position(|other| other == digit).unwrap();
            (0..6).rev().map(move |bit| (value >> bit & 1) as u8)
        })
        .collect();
    let bytes: Vec<u8> = bits.chunks_exact(8).map(|byte| byte.iter().fold(0, |sum, bit| sum << 1 | bit)).collect();
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
}

#[test]
fn a_request_with_more_texts_than_places_in_the_queue_is_answered() {
    let server = Server::start(PlanDir::new(HIDDEN, 64), &["--queue", "1"]);
    let texts: Vec<Value> = (1..20).map(|token| json!([token, 2, 3])).collect();
    assert_eq!(embed(&server, &json!(texts)).len(), texts.len());
}

#[test]
fn what_has_no_embedding_is_refused_by_name() {
    let server = Server::start(PlanDir::new(HIDDEN, 64), &[]);
    for (body, param) in [
        (json!({}), "input"),
        (json!({"input": []}), "input"),
        (json!({"input": {"a": 1}}), "input"),
        (json!({"input": vec![1; 100]}), "input"),
        (json!({"input": [9_999_999]}), "input"),
        (json!({"input": "x", "encoding_format": "xml"}), "encoding_format"),
        (json!({"input": "x", "dimensions": 8}), "dimensions"),
        (json!({"input": "x", "timeout": -1}), "timeout"),
    ] {
        let (status, error) = server.refused(PATH, &body);
        assert_eq!((status, &error["param"]), (400, &json!(param)), "{error}");
    }
    let answered = || server.metric(&format!("hpp_requests_total{{model=\"{HIDDEN}\",outcome=\"stop\"}}"));
    assert_eq!(answered(), 0.0, "nothing was computed for them");
    assert_eq!(embed(&server, &json!("x")).len(), 1, "and it goes on");
    assert_eq!(answered(), 1.0);
    // Its scores are those of the last token of a pass.
    let scored = json!({"prompt": [1, 2, 3], "max_tokens": 0, "echo": true, "logprobs": 1});
    let (status, error) = server.refused("/v1/completions", &scored);
    assert_eq!((status, &error["param"]), (400, &json!("echo")), "{error}");
    let without = Server::new(&[]);
    let (status, error) = without.refused(PATH, &json!({"input": "x"}));
    assert_eq!((status, &error["param"]), (400, &json!("model")));
    assert!(error["message"].as_str().unwrap().contains("include_hidden_states"), "{error}");
}
