//! Text on both sides of the model: tokens from text, text from tokens, conversations to prompts.
//!
//! Knows the files a tokenizer comes in. Knows no model, no sampling and no terminal.

mod chat_template;
mod jinja;
mod pieces;
mod python_json;
mod stop;
#[cfg(test)]
mod test_tokenizers;
mod tokenizer;
mod untrusted;

pub use chat_template::{ChatTemplate, Message, Refusal, Role, TemplateError};
pub use pieces::Pieces;
pub use stop::{StopFilter, Stopped};
pub use tokenizer::{Around, TextTokenizer, TokenizerError};
pub use untrusted::Failure;
