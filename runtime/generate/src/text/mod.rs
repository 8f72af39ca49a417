//! Text on both sides of a model: tokenizer, streaming detokenizer, chat template, calls of tools, stop strings.
//!
//! Reads the tokenizer and template files that come with a model. Knows no engine and no sampling.

mod chat_template;
mod conversation;
mod detokenizer;
mod jinja;
mod python_json;
mod stop_strings;
#[cfg(test)]
pub(crate) mod test_tokenizers;
mod token_bytes;
mod tokenizer;
pub mod tools;
pub(crate) mod untrusted;

pub use chat_template::{ChatTemplate, Message, Role, TemplateError, TemplateRefusal};
pub use conversation::{ChatMessage, ConversationError, conversation};
pub use detokenizer::Detokenizer;
pub use stop_strings::{StopFilter, StopMatch};
pub use token_bytes::{TokenBytes, VocabularyBytes};
pub use tokenizer::{SpecialTokens, TextTokenizer, TokenizerError};
pub use untrusted::{LimitError, abandoned_threads};
