//! Reads the configuration files beside a model: tokenizer, chat template, end-of-text tokens, context length,
//! sampling.
//!
//! Supports the layouts of ONNX Runtime GenAI (`genai_config.json`) and Hugging Face (`config.json`,
//! `generation_config.json`). Missing files are ignored; unreadable ones are errors.

use crate::task;
use hpp_schema::SamplingDefaults;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// Files that describe a model beside its ONNX file.
pub const CONFIG_FILES: [&str; 3] = ["genai_config.json", "config.json", "generation_config.json"];

/// Size limit of a configuration file, bytes. Real ones have a few kilobytes, a megabyte with class labels.
const MAX_BYTES: u64 = 16 << 20;

/// Configuration of a model; `None` where no file says.
#[derive(Clone, Debug, Default)]
pub struct ModelConfig {
    /// The directory that it was read from.
    pub dir: PathBuf,
    /// Longest supported sequence, tokens.
    pub context_length: Option<u64>,
    /// Size of the vocabulary.
    pub vocab_size: Option<u64>,
    /// Channels of one attention head.
    pub head_size: Option<u64>,
    /// Whether ONNX Runtime GenAI exported the model for CUDA.
    pub is_for_cuda: bool,
    /// Whether the model generates text.
    pub generates: Option<bool>,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// Token that begins a text.
    pub bos_token_id: Option<u32>,
    /// Recommended sampling parameters.
    pub sampling: SamplingDefaults,
    /// `tokenizer.json`.
    pub tokenizer: Option<PathBuf>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<PathBuf>,
    /// `chat_template.jinja`.
    pub chat_template: Option<PathBuf>,
}

/// A configuration file that cannot be read or parsed.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {}", path.display())]
pub struct ConfigError {
    path: PathBuf,
    source: Box<dyn std::error::Error + Send + Sync>,
}

impl ModelConfig {
    /// Reads the configuration files of the model whose ONNX file is in `model_dir`: those in this directory, or those above it if it is
    /// the directory `onnx` of a repository for Transformers.js.
    pub fn read(model_dir: &Path) -> Result<Self, ConfigError> {
        let above = above_onnx(model_dir);
        let dir = above.as_deref().unwrap_or(model_dir);
        let mut config = ModelConfig {
            dir: dir.to_owned(),
            tokenizer: existing(dir, "tokenizer.json"),
            tokenizer_config: existing(dir, "tokenizer_config.json"),
            chat_template: existing(dir, "chat_template.jinja"),
            ..ModelConfig::default()
        };
        // Precedence: generation settings, then the exporter's, then the architecture's.
        if let Some(json) = json(dir, "generation_config.json")? {
            config.take_generation(&json);
        }
        if let Some(json) = json(dir, "genai_config.json")? {
            config.take_genai(&json);
        }
        if let Some(json) = json(dir, "config.json")? {
            config.take_architecture(&json);
            if let Some(text) = json.get("text_config") {
                config.take_architecture(text);
            }
        }
        Ok(config)
    }

    fn take_generation(&mut self, json: &Value) {
        self.take_tokens(json);
        self.take_sampling(json);
    }

    fn take_genai(&mut self, json: &Value) {
        let model = &json["model"];
        self.take_tokens(model);
        self.take_sampling(&json["search"]);
        self.context_length = self.context_length.or_else(|| model["context_length"].as_u64());
        self.vocab_size = self.vocab_size.or_else(|| model["vocab_size"].as_u64());
        self.head_size = self.head_size.or_else(|| model["decoder"]["head_size"].as_u64());
        let providers = model["decoder"]["session_options"]["provider_options"].as_array();
        self.is_for_cuda = providers.is_some_and(|all| all.iter().any(|options| options.get("cuda").is_some()));
    }

    fn take_architecture(&mut self, json: &Value) {
        let first = |names: &[&str]| names.iter().find_map(|name| json[*name].as_u64());
        self.take_tokens(json);
        self.context_length = (self.context_length)
            .or_else(|| first(&["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"]));
        self.vocab_size = self.vocab_size.or_else(|| first(&["vocab_size"]));
        self.generates = self.generates.or_else(|| task::generates(json));
        self.head_size = self.head_size.or_else(|| {
            first(&["head_dim"]).or_else(|| {
                let heads = first(&["num_attention_heads", "n_head", "num_heads", "n_heads"]).filter(|n| *n > 0)?;
                Some(first(&["hidden_size", "n_embd", "d_model"])? / heads)
            })
        });
    }

    fn take_tokens(&mut self, json: &Value) {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        if self.eos_token_ids.is_empty() {
            self.eos_token_ids = match &json["eos_token_id"] {
                Value::Array(ids) => ids.iter().filter_map(id).collect(),
                one => id(one).into_iter().collect(),
            };
        }
        self.bos_token_id = self.bos_token_id.or_else(|| id(&json["bos_token_id"]));
    }

    fn take_sampling(&mut self, json: &Value) {
        let s = &mut self.sampling;
        s.do_sample = s.do_sample.or_else(|| json["do_sample"].as_bool());
        s.temperature = s.temperature.or_else(|| json["temperature"].as_f64());
        s.top_k = s.top_k.or_else(|| json["top_k"].as_u64().and_then(|k| u32::try_from(k).ok()));
        s.top_p = s.top_p.or_else(|| json["top_p"].as_f64());
        s.min_p = s.min_p.or_else(|| json["min_p"].as_f64());
        s.repetition_penalty = s.repetition_penalty.or_else(|| json["repetition_penalty"].as_f64());
    }
}

/// The directory above a directory `onnx` that has no configuration of its own.
fn above_onnx(model_dir: &Path) -> Option<PathBuf> {
    let has_any = |dir: &Path| CONFIG_FILES.into_iter().chain(["tokenizer.json"]).any(|name| dir.join(name).is_file());
    let dir = std::path::absolute(model_dir).ok().filter(|dir| dir.ends_with("onnx") && !has_any(dir))?;
    dir.parent().filter(|above| has_any(above)).map(Path::to_owned)
}

fn existing(dir: &Path, name: &str) -> Option<PathBuf> {
    Some(dir.join(name)).filter(|path| path.is_file())
}

fn json(dir: &Path, name: &str) -> Result<Option<Value>, ConfigError> {
    let Some(path) = existing(dir, name) else { return Ok(None) };
    let error = |source| ConfigError { path: path.clone(), source };
    let text = hpp_io::read_text(&path, MAX_BYTES).map_err(|e| error(Box::new(e)))?;
    serde_json::from_str(&text).map(Some).map_err(|e| error(Box::new(e)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn dir(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn an_empty_directory_gives_an_empty_configuration() {
        let config = ModelConfig::read(dir(&[]).path()).unwrap();
        assert!(config.eos_token_ids.is_empty() && config.context_length.is_none() && config.tokenizer.is_none());
    }

    #[test]
    fn generation_settings_take_precedence() {
        let dir = dir(&[
            ("generation_config.json", r#"{"eos_token_id": [7, 8], "temperature": 0.6, "do_sample": true}"#),
            ("config.json", r#"{"eos_token_id": 1, "n_positions": 64, "n_embd": 96, "n_head": 4, "vocab_size": 10}"#),
        ]);
        let config = ModelConfig::read(dir.path()).unwrap();
        assert_eq!(config.eos_token_ids, [7, 8]);
        assert_eq!((config.context_length, config.head_size, config.vocab_size), (Some(64), Some(24), Some(10)));
        assert_eq!((config.sampling.temperature, config.sampling.do_sample), (Some(0.6), Some(true)));
    }

    #[test]
    fn configurations_above_a_directory_onnx_are_read() {
        let repository = dir(&[("config.json", r#"{"n_positions": 64}"#), ("tokenizer.json", "{}")]);
        let (onnx, other) = (repository.path().join("onnx"), repository.path().join("other"));
        for dir in [&onnx, &other] {
            fs::create_dir(dir).unwrap();
        }
        let config = ModelConfig::read(&onnx).unwrap();
        assert_eq!((config.context_length, config.dir.as_path()), (Some(64), repository.path()));
        assert_eq!(config.tokenizer, Some(repository.path().join("tokenizer.json")));
        assert_eq!(ModelConfig::read(&other).unwrap().context_length, None);
        fs::write(onnx.join("config.json"), r#"{"n_positions": 32}"#).unwrap();
        let config = ModelConfig::read(&onnx).unwrap();
        assert_eq!((config.context_length, config.tokenizer), (Some(32), None));
    }

    #[test]
    fn a_byte_order_mark_is_no_error() {
        let dir = dir(&[("config.json", "\u{feff}{\"n_positions\": 64}\r\n")]);
        assert_eq!(ModelConfig::read(dir.path()).unwrap().context_length, Some(64));
    }

    #[test]
    fn an_error_names_the_invalid_file() {
        let dir = dir(&[("genai_config.json", "{")]);
        assert!(ModelConfig::read(dir.path()).unwrap_err().to_string().contains("genai_config.json"));
    }
}
