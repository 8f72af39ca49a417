//! Compiles grammars for the vocabulary of one model.

use super::error::GrammarError;
use super::json_rule::json_rule;
use super::matcher::{Grammar, GrammarMatcher};
use super::tool_calls::{self, ToolCallGrammar};
use crate::text::untrusted::{TextLimits, run_limited};
use crate::text::{TextTokenizer, TokenBytes};
use llguidance::api::TopLevelGrammar;
use llguidance::earley::SlicedBiasComputer;
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Longest token that may continue a grammar, in bytes; the library takes no longer ones.
const MAX_TOKEN_BYTES: usize = 1000;
/// Limits of compiling; a real schema takes milliseconds.
const COMPILE_LIMITS: TextLimits = TextLimits { time: Duration::from_secs(20), memory: 1 << 30 };
/// Limits of reading a vocabulary.
const VOCABULARY_LIMITS: TextLimits = TextLimits { time: Duration::from_secs(60), memory: 2 << 30 };

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum GrammarSource {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema describes.
    JsonSchema {
        /// The schema: an object.
        schema: Value,
        /// Whether to ignore keywords that cannot be followed; else they are errors.
        lenient: bool,
    },
    /// Calls of functions.
    ToolCalls(ToolCallGrammar),
    /// One of two.
    Either(Box<[GrammarSource; 2]>),
}

/// Compiles grammars for one model. Cheap to clone; clones share what they have read.
#[derive(Clone)]
pub struct GrammarCompiler {
    tokenizer: TextTokenizer,
    eos_token_ids: Arc<[u32]>,
    vocabulary: Arc<OnceLock<Result<Vocabulary, String>>>,
}

/// What compiling needs of a vocabulary.
#[derive(Clone)]
struct Vocabulary {
    factory: Arc<ParserFactory>,
    drops_first_space: bool,
}

impl GrammarCompiler {
    /// A compiler for a model with this tokenizer, whose texts end with one of these tokens. Reads the vocabulary with the first grammar.
    pub fn new(tokenizer: TextTokenizer, eos_token_ids: &[u32]) -> Self {
        Self { tokenizer, eos_token_ids: eos_token_ids.into(), vocabulary: Arc::default() }
    }

    /// Compiles a grammar.
    ///
    /// # Errors
    /// The schema is invalid, not supported or too large, or nothing is known about the bytes of the tokens.
    pub fn compile(&self, source: &GrammarSource) -> Result<Grammar, GrammarError> {
        let vocabulary = self.vocabulary.get_or_init(|| self.read()).clone().map_err(GrammarError::Vocabulary)?;
        let (lark, size) =
            (self.lark(source, vocabulary.drops_first_space)?, vocabulary.factory.tok_env().tok_trie().vocab_size());
        let compile = move || {
            let parser = vocabulary.factory.create_parser(TopLevelGrammar::from_lark(lark));
            parser.map(|parser| Matcher::new(Ok(parser))).map_err(|error| reason(&format!("{error:#}")))
        };
        let matcher = run_limited(COMPILE_LIMITS, compile).map_err(GrammarError::Limit)?;
        let grammar = Grammar { matcher: matcher.map_err(GrammarError::Schema)?, vocabulary: size };
        // A schema that only refers to itself compiles, but no answer can follow it.
        let starts = GrammarMatcher::new(&grammar).allowed(size);
        starts.map_err(|_| GrammarError::Schema("no answer can follow it".to_owned()))?;
        Ok(grammar)
    }

    /// The grammar as the library reads it.
    fn lark(&self, source: &GrammarSource, drops_first_space: bool) -> Result<String, GrammarError> {
        // The decoder drops the first space of a text, so an answer may begin with one.
        let start = if drops_first_space { "start: \" \"? answer" } else { "start: answer" };
        Ok(format!("{start}\n{}", self.rules("answer", source)?))
    }

    /// The rules of a grammar. `name` is the name of the first rule.
    fn rules(&self, name: &str, source: &GrammarSource) -> Result<String, GrammarError> {
        Ok(match source {
            GrammarSource::JsonObject => format!("{name}: {}\n", json_rule(&json!({"type": "object"}), false)?),
            GrammarSource::JsonSchema { schema, lenient } => format!("{name}: {}\n", json_rule(schema, *lenient)?),
            GrammarSource::ToolCalls(calls) => tool_calls::rules(name, calls, &self.tokenizer)?,
            GrammarSource::Either(both) => {
                let [first, second] = [format!("{name}_a"), format!("{name}_b")];
                let rules = [self.rules(&first, &both[0])?, self.rules(&second, &both[1])?];
                format!("{name}: {first} | {second}\n{}", rules.concat())
            }
        })
    }

    fn read(&self) -> Result<Vocabulary, String> {
        let (tokenizer, ends) = (self.tokenizer.clone(), Arc::clone(&self.eos_token_ids));
        let read = move || read_vocabulary(&tokenizer, &ends);
        run_limited(VOCABULARY_LIMITS, read).map_err(|error| error.to_string())?
    }
}

/// Builds the trie of a vocabulary.
fn read_vocabulary(tokenizer: &TextTokenizer, ends: &[u32]) -> Result<Vocabulary, String> {
    let bytes = tokenizer.vocabulary_bytes()?;
    let drops_first_space = bytes.drops_first_space;
    let special = |name: &str| [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat();
    let mut words: Vec<Vec<u8>> = (0u32..)
        .zip(bytes.tokens)
        .map(|(id, token)| match token {
            // A token that ends the text never continues it, whatever its name is.
            _ if ends.contains(&id) => special(&format!("<end {id}>")),
            TokenBytes::Text(bytes) if bytes.len() <= MAX_TOKEN_BYTES => bytes,
            TokenBytes::Special(name) if name.len() <= MAX_TOKEN_BYTES => special(&name),
            TokenBytes::Text(_) | TokenBytes::Special(_) | TokenBytes::None => Vec::new(),
        })
        .collect();
    let mut ends: Vec<u32> = ends.iter().copied().filter(|id| (*id as usize) < words.len()).collect();
    if ends.is_empty() {
        // The library needs an end token: it gets an id that the model does not have.
        ends.push(u32::try_from(words.len()).map_err(|error| error.to_string())?);
        words.push(special("<end>"));
    }
    let size = u32::try_from(words.len()).map_err(|error| error.to_string())?;
    let trie = TokTrie::from(&TokRxInfo::new(size, ends[0]), &words).with_eos_tokens(&ends);
    // Which tokens spell a text is left to the model, so that no tokenizer is called.
    let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let slices = SlicedBiasComputer::json_slices();
    let factory = ParserFactory::new(&environment, InferenceCapabilities::default(), &slices);
    let mut factory = factory.map_err(|error| format!("{error:#}"))?;
    factory.quiet();
    factory.limits_mut().verbose_errors = false;
    Ok(Vocabulary { factory: Arc::new(factory), drops_first_space })
}

/// The cause of a failure: what the library says, without the lines that quote the grammar.
fn reason(text: &str) -> String {
    const LONGEST: usize = 300;
    let cause = text.rsplit_once("failed to compile JSON schema: ").map_or(text, |(_, cause)| cause);
    let is_quote = |line: &&str| line.split_once(" | ").is_some_and(|(number, _)| number.trim().parse::<u32>().is_ok());
    let lines = cause.lines().take_while(|line| !is_quote(line)).map(str::trim).filter(|line| !line.is_empty());
    let mut cause = lines.collect::<Vec<_>>().join("; ");
    if let Some((end, _)) = cause.char_indices().nth(LONGEST) {
        cause.truncate(end);
        cause.push_str("...");
    }
    if let Some((_, reference)) = cause.split_once("without 'referencing' feature; ref ") {
        return format!("`$ref` must begin with `#/`, other documents are not read: {reference}");
    }
    if cause.contains("oneOf") && cause.contains("coerce_one_of") {
        return "`oneOf` whose cases overlap is not supported: use `anyOf`".to_owned();
    }
    cause
}
