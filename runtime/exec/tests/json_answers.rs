//! Answers that follow a JSON schema: from the server, in jobs and in single runs; alone, together, drafted; schemas that are refused.

mod support;

use serde_json::{Value, json};
use std::time::{Duration, Instant};
use support::server::{MODEL, Server, user};
use support::{PlanDir, hpp_exec};

const CHAT: &str = "/v1/chat/completions";

/// A schema whose answers are never long.
fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "kind": {"enum": ["function", "method", "macro"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 999},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2}
        },
        "required": ["kind", "count", "tags"],
        "additionalProperties": false
    })
}

fn format(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}})
}

#[track_caller]
fn assert_follows(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let fields: Vec<&String> = value.as_object().unwrap().keys().collect();
    assert_eq!(fields, ["kind", "count", "tags"], "in the order of the schema: {text}");
    assert!(["function", "method", "macro"].contains(&value["kind"].as_str().unwrap()), "{text}");
    assert!((0..=999).contains(&value["count"].as_i64().unwrap()), "{text}");
    let tags = value["tags"].as_array().unwrap();
    assert!(tags.len() <= 2 && tags.iter().all(|tag| tag.as_str().unwrap().chars().count() <= 6), "{text}");
}

#[test]
fn every_answer_follows_its_schema_greedy_or_sampled() {
    let server = Server::new(&[]);
    let question = user("What does Vec::push do?");
    let ask = |more: Value| {
        let mut request = json!({"messages": question, "max_tokens": 200, "response_format": format(&schema())});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.ok(CHAT, &request)
    };
    let greedy = ask(json!({}));
    let text = greedy["choices"][0]["message"]["content"].as_str().unwrap();
    assert_follows(text);
    assert_eq!(greedy["choices"][0]["finish_reason"], json!("stop"));
    let several = ask(json!({"temperature": 3.0, "top_k": 20, "seed": 1, "n": 6, "ignore_eos": true}));
    let texts: Vec<&str> =
        several["choices"].as_array().unwrap().iter().map(|c| c["message"]["content"].as_str().unwrap()).collect();
    texts.iter().for_each(|text| assert_follows(text));
    assert!(texts.iter().any(|text| *text != texts[0]), "each has a seed of its own: {texts:?}");
    let streamed =
        server.stream(CHAT, &json!({"messages": question, "max_tokens": 200, "response_format": format(&schema())}));
    let joined: String = streamed.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(joined, text);
    let object = server
        .ok("/v1/completions", &json!({"prompt": "{", "max_tokens": 3, "response_format": {"type": "json_object"}}));
    assert!(object["choices"][0]["text"].as_str().unwrap().starts_with('{'), "{object}");
    let plain = json!({"messages": question, "max_tokens": 20, "response_format": {"type": "text"}});
    assert!(!server.ok(CHAT, &plain)["choices"][0]["message"]["content"].as_str().unwrap().starts_with('{'));
}

#[test]
fn drafts_and_other_requests_do_not_change_an_answer() {
    // A list that repeats itself gives the drafter something to draft.
    let items = json!({"type": "array", "items": {"enum": ["a Vec", "a String"]}, "minItems": 8, "maxItems": 8});
    let request = json!({"messages": user("What is a Vec?"), "max_tokens": 100, "response_format": format(&items)});
    let answers = [&[][..], &["--ngram"]].map(|args| {
        let server = Server::new(args);
        let alone = server.ok(CHAT, &request)["choices"].clone();
        let other = json!({"messages": user("What is ownership?"), "max_tokens": 60});
        std::thread::scope(|scope| {
            let beside = scope.spawn(|| server.ok(CHAT, &other));
            assert_eq!(server.ok(CHAT, &request)["choices"], alone);
            beside.join().unwrap();
        });
        alone
    });
    assert_eq!(answers[0], answers[1]);
    let list: Value = serde_json::from_str(answers[0][0]["message"]["content"].as_str().unwrap()).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 8);
}

#[test]
fn schemas_that_cannot_be_followed_are_refused_and_the_server_goes_on() {
    let server = Server::new(&[]);
    let nested = (0..60).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
    let names: Vec<String> = (0..3000).map(|name| format!("name {name}")).collect();
    for format in [
        json!("json_object"),
        json!({"type": "xml"}),
        json!({"type": "json_schema"}),
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": []}}),
        format(&json!({"type": "colour"})),
        format(&json!({"$ref": "https://example.com/schema.json"})),
        format(&json!({"type": "string", "pattern": "("})),
        format(&json!({"allOf": [{"minimum": 3}, {"maximum": 2}], "type": "integer"})),
    ] {
        let started = Instant::now();
        let request = json!({"messages": user("x"), "max_tokens": 5, "response_format": format});
        let (status, error) = server.refused(CHAT, &request);
        assert_eq!((status, &error["param"]), (400, &json!("response_format")), "{format}: {error}");
        assert_eq!(error["type"], json!("invalid_request_error"));
        assert!(started.elapsed() < Duration::from_secs(30), "{format}");
    }
    for large in [nested, json!({"enum": names})] {
        server.ok(CHAT, &json!({"messages": user("x"), "max_tokens": 5, "response_format": format(&large)}));
    }
}

#[test]
fn jobs_and_single_runs_follow_schemas_too() {
    let plan = PlanDir::new(MODEL, 256);
    let file = plan.file("answer.schema.json");
    std::fs::write(&file, schema().to_string()).unwrap();
    let file = file.to_str().unwrap();
    let question = "What does Vec::push do?";
    let alone = plan.run(&["-p", question, "--json-schema", file, "--json", "-n", "200"]).ok().json();
    assert_follows(alone["text"].as_str().unwrap());
    assert_eq!(alone["finish_reason"], json!("grammar"));
    let cut = plan.run(&["-p", question, "--json-schema", file, "-n", "3"]).ok().stderr;
    assert!(cut.contains("before its JSON is complete; give a larger --max-new"), "{cut}");
    let context = (alone["prompt_tokens"].as_u64().unwrap() + 3).to_string();
    let full = plan.run(&["-p", question, "--json-schema", file, "--context", &context]).ok().stderr;
    assert!(full.contains("fill the context") && full.contains("before its JSON is complete\n"), "{full}");
    let drafted = ["-p", question, "--json-schema", file, "--json", "-n", "200", "--speculate", "ngram"];
    assert_eq!(plan.run(&drafted).ok().json()["tokens"], alone["tokens"]);

    let (prompts, answers) = (plan.file("prompts.jsonl"), plan.file("answers.jsonl"));
    let lines = [
        json!({"id": 1, "prompt": question, "response_format": format(&schema())}),
        json!({"id": 2, "prompt": question}),
        json!({"id": 3, "prompt": question, "response_format": {"type": "text"}, "max_new": 8}),
        json!({"id": 4, "prompt": question, "response_format": format(&json!({"type": "colour"}))}),
        json!({"id": 5, "prompt": question, "response_format": {"type": "xml"}}),
    ];
    std::fs::write(&prompts, lines.map(|line| line.to_string()).join("\n")).unwrap();
    let path = plan.path();
    let (plan_path, prompts, answers_path) =
        (path.to_str().unwrap(), prompts.to_str().unwrap(), answers.to_str().unwrap());
    let args = ["jobs", plan_path, "--in", prompts, "--out", answers_path, "--json-schema", file, "-n", "200"];
    hpp_exec(args).ok();
    let text = std::fs::read_to_string(&answers).unwrap();
    let mut lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.sort_by_key(|line| line["id"].as_i64());
    assert_eq!((&lines[0]["text"], &lines[0]["finish"]), (&alone["text"], &json!("grammar")));
    assert_eq!(lines[1]["text"], alone["text"], "the command's schema");
    assert!(!lines[2]["text"].as_str().unwrap().starts_with('{'));
    assert!(lines[3]["error"].as_str().unwrap().contains("colour"), "{}", lines[3]);
    assert!(lines[4]["error"].as_str().unwrap().contains("`response_format`"), "{}", lines[4]);
}

#[test]
fn schemas_that_are_none_are_refused_with_an_example() {
    let plan = PlanDir::new(MODEL, 64);
    let given = |schema: &str| plan.run(&["-p", "x", "--json-schema", schema]);
    let example = "hint: write a JSON schema (json-schema.org), such as {\"type\": \"object\"";
    let file = plan.file("answer.schema.json");
    for text in ["", "{\"type\": ", "type: object"] {
        std::fs::write(&file, text).unwrap();
        given(file.to_str().unwrap()).fails(1, &["answer.schema.json as a JSON schema", example]);
    }
    for text in ["[]", "{\"type\": \"colour\"}"] {
        std::fs::write(&file, text).unwrap();
        given(file.to_str().unwrap()).fails(1, &["the schema cannot be followed", example]);
    }
    let long = format!("{{\"type\": \"object\", \"title\": {:?}}}", "x".repeat(300));
    for missing in ["missing.json", "{\"type\": \"object\"}", &long] {
        given(missing).fails(1, &[missing, "JSON schema", "hint: --json-schema takes a file"]);
    }
}
