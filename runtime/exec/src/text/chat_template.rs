//! A model's chat template: a conversation becomes the one text the model was trained to continue.
//!
//! Rendered the way Hugging Face's `apply_chat_template` renders it. Knows no tokens.

use super::jinja;
use super::untrusted::{Failure, Limits, run};
use minijinja::value::{Serde, Value};
use minijinja::{Error, context};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// Longest file read; templates have a few kilobytes, the configuration beside a tokenizer a megabyte at most.
const MOST_BYTES: u64 = 16 << 20;

/// What rendering may take; an honest template takes milliseconds and a few megabytes.
const LIMITS: Limits = Limits { time: Duration::from_secs(30), memory: 512 << 20 };

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions for the whole conversation.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said.
    pub content: String,
}

impl Message {
    /// One turn.
    pub fn new(role: Role, content: impl Into<String>) -> Self {
        Self { role, content: content.into() }
    }
}

/// A template that parses. It comes with a model: it is compiled and rendered within limits (see `untrusted`).
pub struct ChatTemplate {
    source: Arc<str>,
    /// `bos_token`, `eos_token` and their like.
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
        /// What the system said.
        source: std::io::Error,
    },
    /// `tokenizer_config.json` is not what it should be.
    #[error("cannot read {} as a tokenizer configuration", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// What the reader said.
        source: serde_json::Error,
    },
    /// Several named templates, none of them the one for ordinary chat.
    #[error("{} holds chat templates named {}, but none is named `default`", path.display(), names.join(", "))]
    NoDefault {
        /// The file.
        path: PathBuf,
        /// What there is.
        names: Vec<String>,
    },
    /// The template does not parse, or it refused the conversation.
    #[error("the chat template in {} cannot be used", path.display())]
    Template {
        /// The file.
        path: PathBuf,
        /// What the template engine, or the template itself, said.
        source: Refusal,
    },
    /// The template takes too much, or breaks the engine.
    #[error("the chat template in {} cannot be used", path.display())]
    Failed {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        source: Failure,
    },
}

/// What the template engine said, in words alone: its own error keeps the template's values, which may nest too deep to be
/// dropped on any other thread than the one that made them.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refusal(String);

impl TemplateError {
    /// The next step for a person.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            TemplateError::Template { .. } | TemplateError::Failed { .. } => Some(
                "leave --chat out to send the prompt as it is, or take the template anew from where the model came from",
            ),
            _ => None,
        }
    }
}

impl ChatTemplate {
    /// The template of a `chat_template.jinja` file, else of a `tokenizer_config.json`; `None` where neither has one.
    pub fn open(template_file: Option<&Path>, config_file: Option<&Path>) -> Result<Option<Self>, TemplateError> {
        let config = config_file.map(Config::read).transpose()?.unwrap_or_default();
        let special = config.special_tokens();
        let from_config = || {
            let Some(templates) = config.chat_template else { return Ok(None) };
            let path = config_file.unwrap_or(Path::new("tokenizer_config.json"));
            Ok(Some((templates.default_one(path)?, path.to_owned())))
        };
        let found = match template_file {
            Some(path) => Some((read(path)?, path.to_owned())),
            None => from_config()?,
        };
        found.map(|(source, path)| Self::compile(&source, special, path)).transpose()
    }

    fn compile(source: &str, special: BTreeMap<String, String>, path: PathBuf) -> Result<Self, TemplateError> {
        let this = Self { source: source.into(), special, path };
        let source = Arc::clone(&this.source);
        this.within_limits(move || jinja::check(&source))?;
        Ok(this)
    }

    /// The text to continue: the conversation and the opening of the assistant's next turn.
    pub fn render(&self, messages: &[Message]) -> Result<String, TemplateError> {
        let (source, special, messages) = (Arc::clone(&self.source), self.special.clone(), messages.to_vec());
        self.within_limits(move || {
            let values = context! {
                messages => Value::from(Serde(&messages)),
                add_generation_prompt => true,
                // Templates ask `tools is not none`: absent would be something else.
                tools => Value::from(()),
                documents => Value::from(()),
                ..Value::from(Serde(&special))
            };
            jinja::render(&source, values, messages.len())
        })
    }

    fn within_limits<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, TemplateError> {
        let path = || self.path.clone();
        run(LIMITS, || work().map_err(|error| Refusal(hpp_schema::error_line(&error))))
            .map_err(|source| TemplateError::Failed { path: path(), source })?
            .map_err(|source| TemplateError::Template { path: path(), source })
    }
}

fn read(path: &Path) -> Result<String, TemplateError> {
    hpp_io::read_text(path, MOST_BYTES).map_err(|source| TemplateError::Read { path: path.to_owned(), source })
}

/// The parts of `tokenizer_config.json` that matter here.
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
    NamedTensors(Vec<NamedTemplate>),
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

    /// `*_token` entries: a string, or an object that holds it as `content`.
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
    fn default_one(self, path: &Path) -> Result<String, TemplateError> {
        let mut named = match self {
            Templates::One(template) => return Ok(template),
            Templates::NamedTensors(named) => named,
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
    fn a_template_may_refuse_in_its_own_words() {
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
    fn the_file_wins_over_the_configuration() {
        let (file, conf) = (config("from the file"), config(r#"{ "chat_template": "from the config" }"#));
        let t = ChatTemplate::open(Some(file.path()), Some(conf.path())).unwrap().unwrap();
        assert_eq!(t.render(&[]).unwrap(), "from the file");
    }

    /// Each of these took gigabytes, forever, or the process with it.
    #[test]
    fn templates_that_want_everything_are_errors() {
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
            assert!(error.to_string().contains("t.jinja") && error.hint().is_some(), "{start}: {error}");
        }
    }

    /// As deep as the limits let them nest: parsing, compiling, showing and dropping them takes stack.
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
