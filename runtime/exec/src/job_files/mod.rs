//! The files of `hpp-exec jobs`: prompts in, answers out, one JSON object per line.

mod answers;
mod prompts;

pub use answers::{Answer, Answers, AnswersError};
pub use prompts::{Answered, BadLine, Job, JobId, OneOrMany, PromptReader};
