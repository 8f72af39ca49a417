//! Grammars on small vocabularies: exact sets of tokens, complete answers, hostile schemas.

use super::*;
use crate::text::TextTokenizer;
use crate::text::test_tokenizers::{byte_fallback, byte_level, metaspace, with_special};
use crate::text::tools::{ToolFormat, ToolFunction};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// The end token of the byte-level vocabulary.
const END: u32 = 256;

fn source(schema: Value) -> GrammarSource {
    GrammarSource::JsonSchema { schema, lenient: false }
}

fn compile(schema: Value) -> Result<Grammar, GrammarError> {
    GrammarCompiler::new(byte_level(), &[END]).compile(&source(schema))
}

fn start(schema: Value) -> GrammarMatcher {
    GrammarMatcher::new(&compile(schema).unwrap())
}

fn allowed(matcher: &mut GrammarMatcher) -> Vec<u32> {
    let allowed = matcher.allowed(257).unwrap();
    (0..300u32).filter(|token| allowed.contains(*token as usize)).collect()
}

fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn the_set_holds_exactly_what_continues_the_text() {
    let mut matcher = start(json!({"enum": ["ab", "ac", 1, 12]}));
    assert_eq!(allowed(&mut matcher), bytes("\"1"));
    assert_eq!(matcher.count_valid(&bytes("\"acx")), 3);
    for (token, after) in [('"', "a"), ('a', "bc"), ('c', "\"")] {
        matcher.accept(token as u32).unwrap();
        assert_eq!(allowed(&mut matcher), bytes(after), "after {token}");
    }
    assert!(!matcher.is_complete());
    matcher.accept('"'.into()).unwrap();
    assert!(matcher.is_complete(), "nothing may follow, so no end token is needed");

    let mut number = start(json!({"enum": [1, 12]}));
    number.accept('1'.into()).unwrap();
    assert_eq!(allowed(&mut number), ['2' as u32, END], "it may go on or end");
    number.accept(END).unwrap();
    assert!(number.is_complete());
}

#[test]
fn a_token_that_is_not_allowed_is_an_error_and_not_accepted_as_text() {
    let mut matcher = start(json!({"type": "object"}));
    assert!(matches!(matcher.accept('x'.into()), Err(GrammarError::Stuck(_))));
    assert!(!matcher.is_complete());
}

#[test]
fn the_first_space_of_a_text_that_the_decoder_drops_is_allowed() {
    let grammar = GrammarCompiler::new(byte_fallback(), &[END]).compile(&source(json!({"enum": ["a"]}))).unwrap();
    let mut matcher = GrammarMatcher::new(&grammar);
    let allowed = matcher.allowed(260).unwrap();
    let tokens: Vec<usize> = (0..260).filter(|token| allowed.contains(*token)).collect();
    assert_eq!(tokens, [usize::from(b' '), usize::from(b'"'), 259]);
}

#[test]
fn a_vocabulary_that_cannot_spell_the_answer_is_an_error() {
    let grammar = GrammarCompiler::new(metaspace(), &[0]).compile(&source(json!({"enum": ["a"]}))).unwrap();
    let mut matcher = GrammarMatcher::new(&grammar);
    matcher.accept(5).unwrap();
    assert!(matches!(matcher.allowed(6), Err(GrammarError::Stuck(_))));
}

#[test]
fn a_model_with_fewer_or_more_logits_than_tokens_gets_only_tokens_that_exist() {
    let mut matcher = start(json!({"enum": ["ab"]}));
    assert!(!matcher.allowed(9999).unwrap().contains(400));
    assert!(matches!(matcher.allowed(10), Err(GrammarError::Stuck(_))));
}

#[test]
fn an_end_token_with_text_never_continues_a_string() {
    let grammar =
        GrammarCompiler::new(byte_level(), &['b'.into()]).compile(&source(json!({"type": "string"}))).unwrap();
    let mut matcher = GrammarMatcher::new(&grammar);
    matcher.accept('"'.into()).unwrap();
    let allowed = matcher.allowed(257).unwrap();
    assert!(allowed.contains('a' as usize) && !allowed.contains('b' as usize));
}

fn refusal(schema: Value) -> String {
    match compile(schema) {
        Err(error) => hpp_schema::error_line(&error),
        Ok(_) => panic!("compiled"),
    }
}

#[test]
fn schemas_that_cannot_be_followed_say_why() {
    for (schema, says) in [
        (json!({"type": "colour"}), "colour"),
        (json!(true), "must be an object"),
        (json!({"$ref": "https://example.com/schema.json"}), "`$ref` must begin with `#/`"),
        (json!({"$ref": "#/$defs/missing"}), "missing"),
        (json!({"if": {"type": "string"}, "then": {"minLength": 3}}), "if"),
        (json!({"oneOf": [{"type": "integer"}, {"type": "number"}]}), "use `anyOf`"),
        (json!({"type": "string", "pattern": "("}), "("),
        (json!({"type": "integer", "minimum": 5, "maximum": 4}), "minimum"),
    ] {
        let error = refusal(schema.clone());
        assert!(error.starts_with("the schema cannot be followed: "), "{error}");
        assert!(error.contains(says) && error.len() < 500, "{schema}: {error}");
        assert!(
            !error.contains("x-guidance") && !error.contains("start:"),
            "it quotes what the client did not write: {error}"
        );
    }
    let lenient = GrammarSource::JsonSchema { schema: json!({"if": {}, "type": "integer"}), lenient: true };
    assert!(GrammarCompiler::new(byte_level(), &[END]).compile(&lenient).is_ok());
}

fn function(name: &str, parameters: Value) -> ToolFunction {
    ToolFunction { name: name.to_owned(), parameters, strict: true }
}

fn calls(format: ToolFormat, several: bool) -> GrammarSource {
    let place = json!({"$defs": {"p": {"enum": ["a", "b"]}}, "type": "object",
                       "properties": {"p": {"$ref": "#/$defs/p"}}, "required": ["p"], "additionalProperties": false});
    let functions = vec![function("near", place), function("now", json!({"type": "object", "properties": {}}))];
    GrammarSource::ToolCalls(ToolCallGrammar { format, functions, several })
}

/// Whether an answer, and each of its starts, is allowed, and whether it is complete then or may end.
fn follows(source: &GrammarSource, answer: &str) -> bool {
    let grammar = GrammarCompiler::new(byte_level(), &[END]).compile(source).unwrap();
    let mut matcher = GrammarMatcher::new(&grammar);
    for token in bytes(answer) {
        if matcher.is_complete() || !matcher.allowed(257).unwrap().contains(token as usize) {
            return false;
        }
        matcher.accept(token).unwrap();
    }
    matcher.is_complete() || matcher.allowed(257).unwrap().contains(END as usize)
}

#[test]
fn calls_are_written_in_the_form_of_the_model() {
    let hermes = "<tool_call>\n{\"name\": \"near\", \"arguments\": {\"p\": \"b\"}}\n</tool_call>";
    let now = "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
    let one = calls(ToolFormat::Hermes, false);
    assert!(follows(&one, hermes) && follows(&one, now));
    assert!(!follows(&one, &hermes.replace("\"b\"", "\"c\"")) && !follows(&one, &hermes.replace("near", "far")));
    let several = calls(ToolFormat::Hermes, true);
    assert!(follows(&several, &format!("{hermes}\n{now}")) && !follows(&one, &format!("{hermes}\n{now}")));
    let llama = "{\"name\": \"near\", \"parameters\": {\"p\": \"a\"}}";
    assert!(follows(&calls(ToolFormat::Llama, true), llama));
    let mistral = "[TOOL_CALLS] [{\"name\": \"now\", \"arguments\": {}}, {\"name\": \"now\", \"arguments\": {}}]";
    assert!(
        follows(&calls(ToolFormat::Mistral, true), mistral) && !follows(&calls(ToolFormat::Mistral, false), mistral)
    );
    let args = "[TOOL_CALLS]near[ARGS]{\"p\": \"a\"}[TOOL_CALLS]now[ARGS]{}";
    assert!(follows(&calls(ToolFormat::MistralArgs, true), args));
    assert!(!follows(&calls(ToolFormat::MistralArgs, false), args));
    let either = GrammarSource::Either(Box::new([GrammarSource::JsonObject, several]));
    assert!(follows(&either, "{\"any\": 3}") && follows(&either, hermes) && !follows(&either, "text"));
}

#[test]
fn a_marker_that_is_a_special_token_is_that_token() {
    let tokenizer = with_special("[TOOL_CALLS]");
    let grammar = GrammarCompiler::new(tokenizer, &[]).compile(&calls(ToolFormat::Mistral, false)).unwrap();
    let allowed = GrammarMatcher::new(&grammar).allowed(257).unwrap();
    assert_eq!((0..257).filter(|token| allowed.contains(*token)).collect::<Vec<_>>(), [END as usize]);
}

#[test]
fn arguments_have_the_declared_properties_and_no_others_unless_the_schema_lets_them() {
    let says = |parameters: Value, arguments: Value| {
        let functions = vec![function("f", parameters)];
        let source = GrammarSource::ToolCalls(ToolCallGrammar { format: ToolFormat::Llama, functions, several: false });
        follows(&source, &format!("{{\"name\": \"f\", \"parameters\": {arguments}}}"))
    };
    let (more, mut open) =
        (json!({"a": "x", "b": 1}), json!({"type": "object", "properties": {"a": {"type": "string"}}}));
    assert!(says(open.clone(), json!({"a": "x"})) && !says(open.clone(), more.clone()));
    let inner =
        json!({"type": "object", "properties": {"l": {"type": "array", "items": open.clone()}, "o": open.clone()}});
    assert!(says(inner.clone(), json!({"l": [{"a": "x"}], "o": {"a": "y"}})));
    assert!(!says(inner.clone(), json!({"l": [more.clone()]})) && !says(inner, json!({"o": more.clone()})));
    open["additionalProperties"] = json!({"type": "integer"});
    assert!(says(open, more.clone()));
    let undeclared = json!({"type": "object", "properties": {"a": {}}, "required": ["b"]});
    assert!(says(undeclared, more.clone()), "closed, nothing could follow it");
    let parts = json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}], "type": "object"});
    assert!(says(parts, more.clone()) && says(json!({"type": "object"}), more));
}

#[test]
fn a_function_whose_arguments_cannot_be_followed_is_named() {
    let functions = vec![function("bad", json!({"type": "colour"}))];
    let source = GrammarSource::ToolCalls(ToolCallGrammar { format: ToolFormat::Hermes, functions, several: false });
    assert!(matches!(GrammarCompiler::new(byte_level(), &[END]).compile(&source), Err(GrammarError::Schema(_))));
}

/// Each asks for far more memory, time or stack than a real schema.
#[test]
fn hostile_schemas_are_compiled_or_refused_soon() {
    let deep = (0..100).fold(json!({"type": "string"}), |inner, _| json!({"type": "array", "items": inner}));
    let chain: serde_json::Map<String, Value> =
        (0..5000).map(|n| (format!("d{n}"), json!({"$ref": format!("#/$defs/d{}", n + 1)}))).collect();
    let product: Vec<Value> =
        (0..14).map(|n| json!({"anyOf": [{"required": [format!("a{n}")]}, {"required": [format!("b{n}")]}]})).collect();
    let names: Vec<String> = (0..20_000).map(|n| format!("value {n}")).collect();
    let schemas = [
        deep,
        json!({"$defs": chain, "$ref": "#/$defs/d0"}),
        json!({"allOf": product, "type": "object"}),
        json!({"enum": names}),
        json!({"type": "string", "pattern": "^((((a{9}){99}){99}){99}){99}$"}),
        json!({"type": "string", "pattern": "^(.*a.{20})*$"}),
        json!({"type": "string", "minLength": 4_000_000, "maxLength": 4_000_001}),
        json!({"type": "array", "items": {"$ref": "#"}, "minItems": 3}),
        json!({"type": "array", "items": {"type": "integer"}, "maxItems": 50_000_000}),
        json!({"$ref": "#"}),
        json!({"allOf": [{"$ref": "#"}]}),
        json!({"type": "object", "x-guidance": {"whitespace_pattern": "x{1,999999}"}}),
    ];
    for schema in schemas {
        let started = Instant::now();
        let compiled = compile(schema.clone());
        let text = schema.to_string();
        let start = &text[..text.len().min(80)];
        if let Ok(grammar) = &compiled {
            let mut matcher = GrammarMatcher::new(grammar);
            for _ in 0..20 {
                let Ok(allowed) = matcher.allowed(257) else { break };
                let Some(token) = (0..257).find(|token| allowed.contains(*token as usize)) else { break };
                if matcher.accept(token).is_err() {
                    break;
                }
            }
        }
        let took = started.elapsed();
        assert!(took < Duration::from_secs(60), "{start}: {took:?}");
    }
}

/// Walks a grammar: `choices` say which allowed token comes next. Returns the text once it is complete.
fn walk(matcher: &mut GrammarMatcher, tokenizer: &TextTokenizer, choices: &[u16]) -> Option<String> {
    let mut tokens = Vec::new();
    for choice in choices {
        let allowed = allowed(matcher);
        let token = allowed[usize::from(*choice) % allowed.len()];
        matcher.accept(token).unwrap();
        tokens.push(token);
        if matcher.is_complete() {
            return Some(tokenizer.decode(&tokens).unwrap());
        }
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn every_complete_answer_is_json_of_the_schema(choices in prop::collection::vec(any::<u16>(), 400)) {
        let schema = json!({
            "type": "object",
            "properties": {
                "n": {"type": "integer", "minimum": -5, "maximum": 20},
                "s": {"type": "string", "maxLength": 4},
                "l": {"type": "array", "items": {"enum": ["x", null, 7]}, "maxItems": 2}
            },
            "required": ["n", "s"],
            "additionalProperties": false
        });
        if let Some(text) = walk(&mut start(schema), &byte_level(), &choices) {
            let value: Value = serde_json::from_str(&text).unwrap();
            let fields = value.as_object().unwrap();
            prop_assert!(fields.keys().all(|key| ["n", "s", "l"].contains(&key.as_str())), "{}", text);
            // `-0` is an integer too.
            let n = value["n"].as_f64().unwrap();
            prop_assert!((-5.0..=20.0).contains(&n) && n.fract() == 0.0, "{}", text);
            prop_assert!(value["s"].as_str().unwrap().chars().count() <= 4, "{}", text);
            for item in value["l"].as_array().into_iter().flatten() {
                prop_assert!(["\"x\"", "null", "7"].contains(&item.to_string().as_str()), "{}", text);
            }
        }
    }

    #[test]
    fn any_json_of_the_schema_can_be_said(value: i64, text in "[a-zé你\"\\\\ \n]{0,12}", pretty: bool) {
        let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
                            "required": ["a", "b"]});
        let answer = json!({"a": value, "b": text});
        let spelled = if pretty { serde_json::to_string_pretty(&answer) } else { serde_json::to_string(&answer) };
        let mut matcher = start(schema);
        for token in bytes(&spelled.unwrap()) {
            prop_assert!(matcher.allowed(257).unwrap().contains(token as usize));
            matcher.accept(token).unwrap();
        }
        prop_assert!(matcher.is_complete());
    }
}
