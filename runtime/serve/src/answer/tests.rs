//! What answers say, from the events of an engine.

use super::*;
use crate::model::tests::model;
use hpp_generate::{GenerationTimings, TokenUsage};
use tokio::sync::mpsc::unbounded_channel;

/// A model whose tokens are words and bytes: 0 is ` a`, 1 is `b`, 2 to 5 are the bytes of an emoji.
fn bytes_and_words() -> Arc<ServedModel> {
    let vocabulary = json!({"\u{2581}a": 0, "b": 1, "<0xF0>": 2, "<0x9F>": 3, "<0x98>": 4, "<0x80>": 5});
    let decoders = json!([
        {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    ]);
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "byte_fallback": true, "unk_token": null, "vocab": vocabulary, "merges": []}
    });
    Arc::new(model(&tokenizer, 64))
}

fn reported(id: u32, top: &[(u32, f64)]) -> ReportedToken {
    let top = top.iter().map(|(id, logprob)| Scored { id: *id, logprob: *logprob }).collect();
    ReportedToken { id, offset: None, logprobs: Some(TokenLogprobs { chosen: Scored { id, logprob: -1.0 }, top }) }
}

#[test]
fn tokens_of_one_character_are_reported_as_their_bytes() {
    let model = bytes_and_words();
    let tokens: Vec<ReportedToken> = [1, 0, 2, 3, 4, 5].map(|id| reported(id, &[(id, -1.0)])).into();
    let logprobs = ApiFormat::Chat.logprobs(&model, &tokens);
    let content = logprobs["content"].as_array().unwrap();
    let bytes: Vec<u8> =
        content.iter().flat_map(|token| serde_json::from_value::<Vec<u8>>(token["bytes"].clone()).unwrap()).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), "b a\u{1f600}");
    assert_eq!(content[1]["token"], json!(" a"), "the space at its start is a part of it");
    assert_eq!((&content[2]["token"], &content[2]["bytes"]), (&json!("\u{fffd}"), &json!([0xf0])));
    assert_eq!(content[2]["top_logprobs"][0]["bytes"], json!([0xf0]));
}

#[test]
fn tokens_with_one_text_have_the_probability_of_the_most_likely() {
    let model = bytes_and_words();
    let logprobs = ApiFormat::Text.logprobs(&model, &[reported(2, &[(2, -1.0), (1, -2.0), (3, -3.0)])]);
    assert_eq!(logprobs["top_logprobs"], json!([{"\u{fffd}": -1.0, "b": -2.0}]));
    assert_eq!(logprobs["tokens"], json!(["\u{fffd}"]));
}

/// An answer with this many tokens to a prompt of ten tokens, four of them found in the cache. With 0 tokens, an answer that failed.
fn ended(completion_tokens: usize) -> AnswerChoice {
    let (sender, events) = unbounded_channel();
    let usage = TokenUsage { prompt_tokens: 10, reused_tokens: 4, completion_tokens };
    let (text, finish_reason, timings) = (Some(String::new()), FinishReason::Length, GenerationTimings::default());
    let generated = Generated { tokens: vec![], text, finish_reason, usage, timings, speculation: None };
    sender
        .send(match completion_tokens {
            0 => RequestEvent::Failed(ApiError::Timeout),
            _ => RequestEvent::Finished(Box::new(generated)),
        })
        .unwrap();
    AnswerChoice { events, echo: String::new(), calls: None, has_logprobs: false, reports_end_tokens: false }
}

/// An answer to such a prompt that fails after this many tokens.
fn failed_after(tokens: usize) -> AnswerChoice {
    let (sender, events) = unbounded_channel();
    let usage = TokenUsage { prompt_tokens: 10, reused_tokens: 4, completion_tokens: 0 };
    let token = |_| RequestEvent::Token { id: 2, logprobs: None };
    let events_before = std::iter::once(RequestEvent::Started(usage)).chain((0..tokens).map(token));
    let all = events_before.chain([RequestEvent::Failed(ApiError::Timeout)]);
    all.for_each(|event| sender.send(event).unwrap());
    AnswerChoice { events, echo: String::new(), calls: None, has_logprobs: false, reports_end_tokens: false }
}

/// The usage at the end of a stream with these answers, two to each prompt.
fn streamed_usage(completion_tokens: &[usize]) -> Value {
    usage_of_stream(completion_tokens.iter().map(|tokens| ended(*tokens)).collect())
}

fn usage_of_stream(choices: Vec<AnswerChoice>) -> Value {
    let answers = Answers::new(bytes_and_words(), ApiFormat::Text, 2, choices);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let bytes = async { axum::body::to_bytes(answers.stream(true).into_body(), usize::MAX).await.unwrap() };
    let bytes = runtime.block_on(bytes);
    let chunks = String::from_utf8(bytes.to_vec()).unwrap();
    let usages = chunks.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    usages.map(|chunk| chunk["usage"].clone()).rfind(|usage| !usage.is_null()).unwrap()
}

#[test]
fn streamed_usage_counts_each_prompt_once_though_answers_fail() {
    let usage = |prompt: usize, completion: usize, cached: usize| {
        json!({
            "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached}
        })
    };
    assert_eq!(streamed_usage(&[3, 5, 1, 1]), usage(20, 10, 8));
    assert_eq!(streamed_usage(&[0, 5, 1, 1]), usage(20, 7, 8), "one of two to the first prompt");
    assert_eq!(streamed_usage(&[0, 0, 0, 1]), usage(10, 1, 4), "nothing is known of the first prompt");
}

#[test]
fn the_usage_of_a_stream_that_fails_counts_the_tokens_so_far() {
    let usage = usage_of_stream(vec![failed_after(3), ended(5), failed_after(0), ended(0)]);
    assert_eq!([&usage["prompt_tokens"], &usage["completion_tokens"], &usage["total_tokens"]], [20, 8, 28]);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 8);
}
