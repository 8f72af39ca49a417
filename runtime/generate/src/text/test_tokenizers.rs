//! Small tokenizers of the three common kinds, for tests. Token `n` of the byte tokenizers is byte `n`.

use super::TextTokenizer;
use serde_json::{Map, Value, json};

fn build(value: &Value) -> TextTokenizer {
    let file = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(file.path(), value.to_string()).expect("a tokenizer file");
    TextTokenizer::open(file.path()).expect("a tokenizer")
}

fn end_token(id: u32) -> Value {
    special_token(id, "<|end|>")
}

fn special_token(id: u32, name: &str) -> Value {
    json!([{ "id": id, "content": name, "single_word": false, "lstrip": false, "rstrip": false,
             "normalized": false, "special": true }])
}

/// The printable character that GPT-2's vocabulary uses for a byte.
fn stand_in(byte: u8) -> char {
    let printable = |b: u8| matches!(b, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if printable(byte) {
        return char::from(byte);
    }
    let nth = (0..byte).filter(|b| !printable(*b)).count();
    char::from_u32(256 + u32::try_from(nth).expect("a byte")).expect("a character")
}

/// GPT-2 style: 256 byte tokens, token 256 is special.
pub fn byte_level() -> TextTokenizer {
    with_special("<|end|>")
}

/// Like [`byte_level`], but the special token has this name.
pub fn with_special(name: &str) -> TextTokenizer {
    let vocab: Map<String, Value> = (0..=255u8).map(|b| (stand_in(b).to_string(), json!(b))).collect();
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    build(&json!({
        "version": "1.0", "added_tokens": special_token(256, name), "normalizer": null, "pre_tokenizer": bytes,
        "post_processor": null, "decoder": bytes,
        "model": { "type": "BPE", "vocab": vocab, "merges": [] }
    }))
}

/// Llama-2 style: 256 `<0xNN>` tokens, token 256 is special, 257 to 259 are words.
pub fn byte_fallback() -> TextTokenizer {
    let mut vocab: Map<String, Value> = (0..=255u8).map(|b| (format!("<0x{b:02X}>"), json!(b))).collect();
    // An added token that the vocabulary lacks would get the next free id, whatever the file says.
    vocab.extend([
        ("<|end|>".to_owned(), json!(256)),
        ("▁a".to_owned(), json!(257)),
        ("b".to_owned(), json!(258)),
        ("▁".to_owned(), json!(259)),
    ]);
    build(&json!({
        "version": "1.0", "added_tokens": end_token(256), "normalizer": null, "pre_tokenizer": null,
        "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [
            { "type": "Replace", "pattern": { "String": "▁" }, "content": " " },
            { "type": "ByteFallback" }, { "type": "Fuse" }, { "type": "Strip", "content": " ", "start": 1, "stop": 0 } ] },
        "model": { "type": "BPE", "byte_fallback": true, "fuse_unk": true, "unk_token": null, "vocab": vocab, "merges": [] }
    }))
}

/// SentencePiece style: whole words with the space in front; token 0 is special, 5 is a space alone.
pub fn metaspace() -> TextTokenizer {
    let space = json!({ "type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true });
    build(&json!({
        "version": "1.0", "added_tokens": end_token(0), "normalizer": null, "pre_tokenizer": space,
        "post_processor": { "type": "TemplateProcessing",
            "single": [{ "SpecialToken": { "id": "<|end|>", "type_id": 0 } }, { "Sequence": { "id": "A", "type_id": 0 } }],
            "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 1 } }],
            "special_tokens": { "<|end|>": { "id": "<|end|>", "ids": [0], "tokens": ["<|end|>"] } } },
        "decoder": space,
        "model": { "type": "WordLevel", "unk_token": "▁x",
                   "vocab": { "<|end|>": 0, "▁one": 1, "▁two": 2, "▁three": 3, "▁x": 4, "▁": 5 } }
    }))
}
