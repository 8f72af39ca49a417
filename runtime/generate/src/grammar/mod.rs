//! Answers that follow a grammar: which tokens may come next, and when the answer is complete.
//!
//! A grammar restricts the tokens that sampling chooses from. The set is exact: it holds a token if and only if the text with it is the
//! start of a text of the grammar. Schemas come from clients and may be hostile, so they are compiled under the limits of `untrusted`, and
//! the library bounds the work for each token.

mod compiler;
mod error;
mod json_rule;
mod matcher;
mod response_format;
#[cfg(test)]
mod tests;
mod tool_calls;

pub use compiler::{GrammarCompiler, GrammarSource};
pub use error::{GrammarError, SCHEMA_HINT};
pub use matcher::{Grammar, GrammarMatcher};
pub use response_format::{FormatError, ResponseFormat};
pub use tool_calls::ToolCallGrammar;
