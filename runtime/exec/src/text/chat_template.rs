//! A model's chat template: a conversation becomes the one text the model was trained to continue.
//!
//! Rendered the way Hugging Face's `apply_chat_template` renders it. Knows no tokens.

use super::python_json;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, Error, ErrorKind, context};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Instructions a template may spend; no honest template comes near, a hostile one stops here.
const FUEL: u64 = 50_000_000;

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

/// A template ready to be rendered.
pub struct ChatTemplate {
    environment: Environment<'static>,
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
        source: Box<Error>,
    },
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
        let mut environment = environment();
        environment
            .add_template_owned("chat", without_generation_tags(source))
            .map_err(|e| TemplateError::Template { path: path.clone(), source: Box::new(e) })?;
        Ok(Self { environment, special, path })
    }

    /// The text to continue: the conversation and the opening of the assistant's next turn.
    pub fn render(&self, messages: &[Message]) -> Result<String, TemplateError> {
        let special = Value::from(Serde(&self.special));
        let values = context! {
            messages => Value::from(Serde(messages)),
            add_generation_prompt => true,
            // Templates ask `tools is not none`: absent would be something else.
            tools => Value::from(()),
            documents => Value::from(()),
            ..special
        };
        self.environment
            .get_template("chat")
            .and_then(|template| template.render(values))
            .map_err(|e| TemplateError::Template { path: self.path.clone(), source: Box::new(e) })
    }
}

fn read(path: &Path) -> Result<String, TemplateError> {
    std::fs::read_to_string(path).map_err(|source| TemplateError::Read { path: path.to_owned(), source })
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

/// Jinja as `transformers` sets it up.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        env.set_syntax(syntax);
    }
    env.set_fuel(Some(FUEL));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.add_function("raise_exception", raise_exception);
    env.add_function("strftime_now", strftime_now);
    env.add_filter("tojson", tojson);
    env
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now())
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}")))
}

fn tojson(value: &Value, indent: Option<usize>, options: Kwargs) -> Result<Value, Error> {
    let indent = match indent {
        Some(width) => Some(width),
        None => options.get("indent")?,
    };
    // The other arguments `json.dumps` takes; templates set them to what they are anyway.
    for known in ["ensure_ascii", "separators", "sort_keys"] {
        let _: Option<Value> = options.get(known)?;
    }
    options.assert_all_used()?;
    python_json::dumps(value, indent)
        .map(Value::from_safe_string)
        .map_err(|e| Error::new(ErrorKind::InvalidOperation, format!("tojson: {e}")))
}

/// `{% generation %}` marks what to train on; for a prompt its body is ordinary text.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(length) = rest[open..].find("%}") else { break };
        let (tag, close) = (&rest[open..open + length + 2], open + length + 2);
        let word = tag[2..length].trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        out.push_str(&rest[..open]);
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[close..];
    }
    out + rest
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
}
