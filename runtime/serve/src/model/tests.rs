//! A model without an engine: what its tokenizer and template make of requests.

use super::*;
use crate::engine_pool::{MemoryNeeds, PoolSettings};
use hpp_generate::text::{ChatTemplate, Role};
use serde_json::json;

/// A chat template that renders tools, calls and messages without text.
const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}\
    {% for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}";

/// A model of this name with a tokenizer (the contents of its file) and [`TEMPLATE`]. It is never loaded.
pub(crate) fn model(tokenizer: &Value, context: u64) -> ServedModel {
    let dir = tempfile::tempdir().unwrap();
    let (path, template) = (dir.path().join("tokenizer.json"), dir.path().join("chat_template.jinja"));
    std::fs::write(&path, tokenizer.to_string()).unwrap();
    std::fs::write(&template, TEMPLATE).unwrap();
    let encoder = PromptEncoder {
        tokenizer: Some(TextTokenizer::open(&path).unwrap()),
        template: ChatTemplate::open(Some(&template), None).unwrap(),
    };
    let settings = ModelSettings {
        name: "toy".to_owned(),
        encoder,
        sampling: SamplingDefaults::default(),
        eos_token_ids: vec![],
        context,
        placement: vec![],
        scores_all_positions: true,
        gives_hidden_states: false,
        hidden_size: None,
    };
    let pool = PoolSettings { budget: MemoryNeeds::default(), allowed: None, idle_timeout: None, queue: 4 };
    ServedModel::new(settings, EnginePool::start(vec![], pool, std::sync::Arc::default()).unwrap(), 0)
}

/// A tokenizer of words in which `\u{2581}` stands for a space.
pub(crate) fn words(vocabulary: Value) -> Value {
    let space = json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": space, "post_processor": null, "decoder": space,
        "model": {"type": "WordLevel", "unk_token": "\u{2581}x", "vocab": vocabulary}
    })
}

#[test]
fn all_of_a_conversation_counts_before_it_is_turned_into_tokens() {
    // Twice sixteen tokens of at most four bytes.
    let model = model(&words(json!({"\u{2581}x": 0})), 16);
    let user = |text: &str| Message::new(Role::User, text);
    assert!(model.encode_conversation(&[user("a b")], &[]).is_ok());
    let long = "b".repeat(200);
    let tool = json!({"type": "function", "function": {"name": "f", "description": long}});
    let call = json!({"role": "assistant", "content": null, "tool_calls": [{
        "id": "1", "type": "function", "function": {"name": "f", "arguments": json!({"a": long}).to_string()}
    }]});
    let call: Message = serde_json::from_value(call).unwrap();
    let empty = vec![user(""); 40];
    for (messages, tools) in
        [(vec![user(&long)], vec![]), (vec![user("a")], vec![tool]), (vec![call], vec![]), (empty, vec![])]
    {
        let error = model.encode_conversation(&messages, &tools).unwrap_err().to_string();
        assert!(error.starts_with("the text has "), "{error}");
    }
}
