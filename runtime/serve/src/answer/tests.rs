//! What answers say, from the events of an engine.

use super::*;
use crate::model::tests::model;

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
