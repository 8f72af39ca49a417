//! Tools: the functions that a conversation offers to the model, and the calls of them in its answers.

mod call;
mod format;
mod json_end;
mod parser;

pub use call::{FunctionCall, ToolCall, ToolFunction};
pub use format::ToolFormat;
pub use parser::{AnswerPart, ToolCallParser};
