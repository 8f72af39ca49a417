//! A model's chat template: turns a conversation into the text that the model was trained to continue.
//!
//! Renders as Hugging Face's `apply_chat_template` does. Knows no tokens.

use super::jinja;
use super::tools::{ToolCall, ToolFormat};
use super::untrusted::{LimitError, TextLimits, run_limited};
use minijinja::value::{Serde, Value};
use minijinja::{Error, context};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Largest file read; templates have a few kilobytes, a tokenizer's configuration has at most a megabyte.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Limits of compiling or rendering; a real template takes milliseconds and a few megabytes.
const LIMITS: TextLimits = TextLimits { time: Duration::from_secs(30), memory: 512 << 20 };

/// The author of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The user.
    User,
    /// The model.
    Assistant,
    /// The result of a function that the model called.
    Tool,
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Its author.
    pub role: Role,
    /// Its text; empty where a message of the model has calls alone.
    #[serde(default, deserialize_with = "text_or_null")]
    pub content: String,
    /// The functions that the model called.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call of which this is the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of the author, or of the function of which this is the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

fn text_or_null<'de, D: Deserializer<'de>>(source: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(source)?.unwrap_or_default())
}

impl Message {
    /// A message.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into(), tool_calls: Vec::new(), tool_call_id: None, name: None }
    }
}

/// A chat template that compiles. It comes with a model and may be hostile, so it is compiled and rendered under the limits of
/// `untrusted`.
pub struct ChatTemplate {
    source: Arc<str>,
    /// The template for conversations with tools, if it is another one.
    tool_source: Option<Arc<str>>,
    /// `bos_token`, `eos_token` and the other named special tokens, by name.
    special: BTreeMap<String, String>,
    path: PathBuf,
}

/// Why a conversation could not be turned into a prompt.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// A file could not be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system reported.
        source: std::io::Error,
    },
    /// `tokenizer_config.json` is not what it should be.
    #[error("cannot read {} as a tokenizer configuration", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What the parser reported.
        source: serde_json::Error,
    },
    /// The file holds several named templates and none named `default`.
    #[error("{} holds chat templates named {}, but none is named `default`", path.display(), names.join(", "))]
    NoDefault {
        /// The file.
        path: PathBuf,
        /// The names it has.
        names: Vec<String>,
    },
    /// The template does not parse, or it refused the conversation.
    #[error("the chat template in {} cannot be used", path.display())]
    Template {
        /// The file.
        path: PathBuf,
        /// What the template engine, or the template itself, reported.
        source: TemplateRefusal,
    },
    /// The template exceeds its limits or makes the engine panic.
    #[error("the chat template in {} cannot be used", path.display())]
    Limit {
        /// The file.
        path: PathBuf,
        /// Which limit.
        source: LimitError,
    },
}

/// The template engine's message. Only its text is kept: the engine's own error holds the template's values, which may nest too
/// deep to be dropped on a thread with an ordinary stack.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TemplateRefusal(String);

impl ChatTemplate {
    /// The template of a `chat_template.jinja` file, else of a `tokenizer_config.json`. `None` if neither has one.
    pub fn open(template_file: Option<&Path>, config_file: Option<&Path>) -> Result<Option<Self>, TemplateError> {
        let config = config_file.map(Config::read).transpose()?.unwrap_or_default();
        let special = config.special_tokens();
        let (source, tool_source, path) = match (template_file, config.chat_template, config_file) {
            (Some(path), _, _) => (read(path)?, None, path),
            (None, Some(mut templates), Some(path)) => {
                let for_tools = templates.take("tool_use");
                (templates.default_one(path)?, for_tools, path)
            }
            _ => return Ok(None),
        };
        let mut this = Self::compile(&source, special, path.to_owned())?;
        if let Some(source) = tool_source {
            let source = with_unix_line_ends(&source);
            this.check(&source)?;
            this.tool_source = Some(source.into());
        }
        Ok(Some(this))
    }

    fn compile(source: &str, special: BTreeMap<String, String>, path: PathBuf) -> Result<Self, TemplateError> {
        let source = with_unix_line_ends(source);
        let this = Self { source: source.as_str().into(), tool_source: None, special, path };
        this.check(&source)?;
        Ok(this)
    }

    fn check(&self, source: &str) -> Result<(), TemplateError> {
        let source = source.to_owned();
        self.within_limits(move || jinja::check(&source))
    }

    /// How the model writes calls of tools. `None` if the template takes no tools.
    pub fn tool_format(&self) -> Option<ToolFormat> {
        let source = self.source_for_tools();
        source.contains("tools").then(|| ToolFormat::of_template(source))
    }

    fn source_for_tools(&self) -> &Arc<str> {
        self.tool_source.as_ref().unwrap_or(&self.source)
    }

    /// The prompt: the conversation and the start of the assistant's next message.
    pub fn render(&self, messages: &[Message]) -> Result<String, TemplateError> {
        self.render_with_tools(messages, &[])
    }

    /// Like [`render`](Self::render), but for a model that may call these tools, which are JSON as in OpenAI's API.
    pub fn render_with_tools(
        &self,
        messages: &[Message],
        tools: &[serde_json::Value],
    ) -> Result<String, TemplateError> {
        let source = if tools.is_empty() { &self.source } else { self.source_for_tools() };
        let (source, special) = (Arc::clone(source), self.special.clone());
        let (messages, tools) = (messages.to_vec(), tools.to_vec());
        self.within_limits(move || {
            let values = context! {
                messages => Value::from(Serde(&messages)),
                add_generation_prompt => true,
                // Templates test `tools is not none`, and an undefined variable is not none.
                tools => if tools.is_empty() { Value::from(()) } else { Value::from(Serde(&tools)) },
                documents => Value::from(()),
                ..Value::from(Serde(&special))
            };
            jinja::render(&source, values, messages.len() + tools.len())
        })
    }

    fn within_limits<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, TemplateError> {
        run_limited(LIMITS, || work().map_err(|error| TemplateRefusal(hpp_schema::error_line(&error))))
            .map_err(|source| TemplateError::Limit { path: self.path.clone(), source })?
            .map_err(|source| TemplateError::Template { path: self.path.clone(), source })
    }
}

/// A template's source as Jinja2 sees it, which Hugging Face uses: all line ends are `\n`. (git may write others on Windows.)
fn with_unix_line_ends(source: &str) -> String {
    source.replace("\r\n", "\n").replace('\r', "\n")
}

fn read(path: &Path) -> Result<String, TemplateError> {
    hpp_io::read_text(path, MAX_FILE_BYTES).map_err(|source| TemplateError::Read { path: path.to_owned(), source })
}

/// The fields of `tokenizer_config.json` that chat templates need.
#[derive(Default, Deserialize)]
struct Config {
    #[serde(default)]
    chat_template: Option<Templates>,
    #[serde(flatten)]
    rest: BTreeMap<String, serde_json::Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

impl Config {
    fn read(path: &Path) -> Result<Self, TemplateError> {
        serde_json::from_str(&read(path)?).map_err(|source| TemplateError::Config { path: path.to_owned(), source })
    }

    /// The `*_token` entries, each a string or an object with the string as `content`.
    fn special_tokens(&self) -> BTreeMap<String, String> {
        let text =
            |value: &serde_json::Value| Some(value.as_str().or_else(|| value.get("content")?.as_str())?.to_owned());
        self.rest
            .iter()
            .filter(|(name, _)| name.ends_with("_token"))
            .filter_map(|(name, value)| Some((name.clone(), text(value)?)))
            .collect()
    }
}

impl Templates {
    /// Takes the template of a name out, if others remain.
    fn take(&mut self, name: &str) -> Option<String> {
        let Templates::Named(named) = self else { return None };
        let at = named.iter().position(|template| template.name == name).filter(|_| named.len() > 1)?;
        Some(named.remove(at).template)
    }

    fn default_one(self, path: &Path) -> Result<String, TemplateError> {
        let mut named = match self {
            Templates::One(template) => return Ok(template),
            Templates::Named(named) => named,
        };
        match named.iter().position(|t| t.name == "default") {
            Some(at) => Ok(named.swap_remove(at).template),
            None if named.len() == 1 => Ok(named.swap_remove(0).template),
            None => Err(TemplateError::NoDefault {
                path: path.to_owned(),
                names: named.into_iter().map(|t| t.name).collect(),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(json: &str) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), json).unwrap();
        file
    }

    fn template(source: &str) -> ChatTemplate {
        let special = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
        ChatTemplate::compile(source, special, "x".into()).unwrap()
    }

    fn hello() -> [Message; 2] {
        [Message::new(Role::System, "be <b>brief</b>"), Message::new(Role::User, " hi ")]
    }

    #[test]
    fn renders_as_transformers_does() {
        let source = "{{ bos_token }}\n{% for m in messages %}\n    {% if loop.first and m['role'] == 'system' %}\n\
            [{{ m.content }}]\n    {% continue %}\n    {% endif %}\n<{{ m['role'] }}>{{ m['content'].strip() | upper }}\n\
            {% endfor %}\n{% if add_generation_prompt and tools is none %}<assistant>{% endif %}\n";
        assert_eq!(template(source).render(&hello()).unwrap(), "<s>\n[be <b>brief</b>]\n<user>HI\n<assistant>");
    }

    #[test]
    fn line_ends_of_windows_render_as_those_of_unix() {
        let source = "{% for m in messages %}\n<{{ m.role }}>\n{{ m.content + '\n' }}{% endfor %}\n";
        let expected = template(source).render(&hello()).unwrap();
        assert!(expected.contains('\n') && !expected.contains('\r'), "{expected}");
        for line_end in ["\r\n", "\r"] {
            assert_eq!(template(&source.replace('\n', line_end)).render(&hello()).unwrap(), expected);
        }
    }

    #[test]
    fn a_templates_own_error_message_is_reported() {
        let t = template("{{ raise_exception('Roles must alternate') }}");
        let TemplateError::Template { source, .. } = t.render(&hello()).unwrap_err() else { panic!("another error") };
        assert!(source.to_string().contains("Roles must alternate"));
    }

    #[test]
    fn tojson_prints_python_json() {
        let t = template("{{ messages[0] | tojson }}{{ [1, 2] | tojson(indent=1) }}");
        assert_eq!(
            t.render(&hello()).unwrap(),
            "{\"role\": \"system\", \"content\": \"be <b>brief</b>\"}[\n 1,\n 2\n]"
        );
    }

    #[test]
    fn generation_tags_keep_their_whitespace_control() {
        let t = template("a {%- generation -%} b {%- endgeneration %} c");
        assert_eq!(t.render(&hello()).unwrap(), "ab c");
    }

    #[test]
    fn the_year_is_a_number() {
        assert!(template("{{ strftime_now('%Y') }}").render(&[]).unwrap().parse::<u32>().unwrap() > 2020);
    }

    #[test]
    fn a_template_that_never_ends_is_stopped() {
        let loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        assert!(template(loops).render(&[]).is_err());
    }

    #[test]
    fn special_tokens_are_strings_or_objects() {
        let file = config(
            r#"{ "bos_token": {"content": "<B>", "lstrip": false}, "eos_token": "<E>", "pad_token": null,
                 "chat_template": [{"name": "tool_use", "template": "t"},
                                   {"name": "default", "template": "{{bos_token}}{{eos_token}}{{pad_token}}"}] }"#,
        );
        let t = ChatTemplate::open(None, Some(file.path())).unwrap().unwrap();
        assert_eq!(t.render(&[]).unwrap(), "<B><E>");
    }

    #[test]
    fn tools_calls_and_results_are_rendered_and_tools_have_a_template_of_their_own() {
        let source = "{% if tools %}{{ tools | tojson }}{% else %}none{% endif %}{% for m in messages %}|{{ m.role }}:{{ m.content }}\
            {% for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}{{ call.id }}{% endfor %}\
            {% if 'tool_call_id' in m %}={{ m.tool_call_id }}{% endif %}{% endfor %}";
        let tool = serde_json::json!({"type": "function", "function": {"name": "f", "description": "d"}});
        let talk = r#"[{"role": "user", "content": "?"},
            {"role": "assistant", "content": null, "tool_calls": [{"id": "1", "type": "function",
                "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": 2}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "3"}]"#;
        let talk: Vec<Message> = serde_json::from_str(talk).unwrap();
        let t = template(source);
        assert_eq!(
            t.render_with_tools(&talk, &[tool]).unwrap(),
            r#"[{"type": "function", "function": {"name": "f", "description": "d"}}]|user:?|assistant:f{"b": 1, "a": 2}1|tool:3=1"#
        );
        assert!(t.render(&talk).unwrap().starts_with("none|user:?"));
        assert_eq!((t.tool_format(), template("x").tool_format()), (Some(ToolFormat::Hermes), None));
        let file = config(
            r#"{ "chat_template": [{"name": "tool_use", "template": "{{ tools[0].a }}[TOOL_CALLS]"},
                                   {"name": "default", "template": "plain"}] }"#,
        );
        let t = ChatTemplate::open(None, Some(file.path())).unwrap().unwrap();
        assert_eq!(t.tool_format(), Some(ToolFormat::Mistral));
        assert_eq!(t.render(&[]).unwrap(), "plain");
        assert_eq!(t.render_with_tools(&[], &[serde_json::json!({"a": "b"})]).unwrap(), "b[TOOL_CALLS]");
    }

    #[test]
    fn several_templates_without_a_default_are_listed() {
        let file = config(r#"{ "chat_template": [{"name": "a", "template": ""}, {"name": "b", "template": ""}] }"#);
        let error = ChatTemplate::open(None, Some(file.path())).err().unwrap();
        assert!(error.to_string().contains("named a, b"), "{error}");
    }

    #[test]
    fn no_template_is_not_an_error() {
        assert!(ChatTemplate::open(None, Some(config("{}").path())).unwrap().is_none());
        assert!(ChatTemplate::open(None, None).unwrap().is_none());
    }

    #[test]
    fn the_template_file_takes_precedence_over_the_configuration() {
        let (file, conf) = (config("from the file"), config(r#"{ "chat_template": "from the config" }"#));
        let t = ChatTemplate::open(Some(file.path()), Some(conf.path())).unwrap().unwrap();
        assert_eq!(t.render(&[]).unwrap(), "from the file");
    }

    /// Without limits, each of these takes gigabytes, never ends, or crashes the process.
    #[test]
    fn templates_that_exceed_the_limits_are_errors() {
        let deep = |open: &str, count: usize| format!("{{{{ {}true }}}}", open.repeat(count));
        let double =
            "{% set ns = namespace(s='x' * 1000000) %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
        let capture =
            "{% set s %}{% for i in range(99999) %}".to_owned() + &"x".repeat(100_000) + "{% endfor %}{% endset %}";
        let hostile = [
            double.to_owned(),
            double.replace('~', "+"),
            "{% for i in range(99999) %}{{ 'x' * 99999999 }}{% endfor %}".to_owned(),
            capture,
            "{{ '%99999999999d' | format(1) }}".to_owned(),
            "{{ '%.99999999999f' | format(1.5) }}".to_owned(),
            "{{ '%*d' | format(99999999999, 1) }}".to_owned(),
            "{{ '{:99999999999}'.format(1) }}".to_owned(),
            "{{ '{:>{}}'.format(1, 99999999999) }}".to_owned(),
            "{{ 'a' | indent(99999999999, true) }}".to_owned(),
            "{{ 'a' | indent(width=99999999999, first=true) }}".to_owned(),
            "{{ [1] | tojson(indent=99999999999) }}".to_owned(),
            "{{ strftime_now('%99999999999Y') }}".to_owned(),
            deep("not ", 50_000),
            deep("-", 50_000),
            deep("[", 50_000),
            format!("{{{{ 1{} }}}}", "+1".repeat(50_000)),
            "{{ 1 }}".repeat(200_000),
            "x".repeat(2 << 20),
        ];
        for source in hostile {
            let rendered =
                ChatTemplate::compile(&source, BTreeMap::new(), "t.jinja".into()).and_then(|t| t.render(&hello()));
            let start = &source[..source.len().min(60)];
            let error = rendered.err().unwrap_or_else(|| panic!("{start}... was rendered"));
            assert!(error.to_string().contains("t.jinja"), "{start}: {error}");
        }
    }

    /// Nested as deep as the limits allow: parsing, compiling, printing and dropping take stack.
    #[test]
    fn templates_within_the_limits_do_not_overflow_the_stack() {
        let nest = "{% set ns = namespace(l=[]) %}{% for i in range(99999) %}{% for j in range(9) %}\
                    {% set ns.l = [ns.l] %}{% endfor %}{% endfor %}";
        let built = nest.replacen("99999", "12000", 1);
        let sources = [
            format!("{{{{ {}true }}}}", "not ".repeat(4_000)),
            format!("{{{{ {}1 }}}}", "-".repeat(16_000)),
            format!("{{{{ 1{} }}}}", "+1".repeat(8_000)),
            format!("{{{{ x{} }}}}", ".a".repeat(8_000)),
            format!("{{{{ 'x'{} }}}}", "|e".repeat(8_000)),
            format!("{{% if false %}}{}{{% endif %}}", "{% elif false %}".repeat(15_000)),
            nest.to_owned(),
            format!("{built}{{{{ ns.l }}}}"),
            format!("{built}{{{{ ns.l | tojson }}}}"),
        ];
        for source in sources {
            let rendered = ChatTemplate::compile(&source, BTreeMap::new(), "t".into()).and_then(|t| t.render(&hello()));
            drop(rendered);
        }
    }
}
