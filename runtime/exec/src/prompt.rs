//! What the model reads: from a source of text or tokens to the tokens of the prompt.

use crate::console::Console;
use crate::error::ExecError;
use crate::plan_file::PlanFile;
use crate::settings::PromptSource;
use crate::text::{Around, ChatTemplate, Message, Role, TextTokenizer};
use hpp_schema::error_line;
use std::io;
use std::path::{Path, PathBuf};

/// Longest prompt read: some ten million tokens.
const MOST_BYTES: u64 = 64 << 20;

/// Why there is nothing to read.
#[derive(Debug, thiserror::Error)]
pub enum PromptError {
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    Empty,
    /// The file cannot be read.
    #[error("cannot read the prompt from {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Standard input cannot be read.
    #[error("cannot read the prompt from stdin")]
    Stdin(#[source] io::Error),
    /// The model came without a tokenizer.
    #[error("this plan has no tokenizer, so text cannot be turned into tokens")]
    NoTokenizer,
    /// The model came without a chat template.
    #[error("this model has no chat template")]
    NoTemplate,
    /// The model is not one that reads text.
    #[error("this model generates no text")]
    NotALanguageModel,
    /// More tokens than fit.
    #[error("the prompt has {tokens} tokens and the context holds {context}")]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that fit.
        context: u64,
    },
}

impl PromptError {
    /// The next step for a person.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            PromptError::Empty => "give --prompt TEXT, --prompt-file FILE or --tokens 1,2,3",
            PromptError::File { source, .. } | PromptError::Stdin(source)
                if source.kind() == io::ErrorKind::FileTooLarge =>
            {
                "give a file of text that is shorter; no model's context holds as much"
            }
            PromptError::File { .. } | PromptError::Stdin(_) => return None,
            PromptError::NoTokenizer => {
                "give --tokens 1,2,3, or put tokenizer.json beside the model and split it again"
            }
            PromptError::NoTemplate => "leave --chat out to send the prompt as it is",
            PromptError::NotALanguageModel => "run it on tensors: hpp-exec PLAN --inputs in.npz --outputs out.npz",
            PromptError::TooLong { .. } => {
                "shorten the prompt, give a longer --context, or split again with a longer --context"
            }
        })
    }
}

/// A model's text files, opened.
pub struct TextFiles {
    /// The tokenizer, where there is one.
    pub tokenizer: Option<TextTokenizer>,
    /// The chat template, where there is one.
    pub template: Option<ChatTemplate>,
}

impl TextFiles {
    /// Opens what the plan names. `template` says whether the chat template will be needed.
    pub fn open(plan: &PlanFile, template: bool) -> Result<Self, ExecError> {
        let Some(generation) = &plan.plan.generation else { return Ok(Self { tokenizer: None, template: None }) };
        let path = |file: &Option<String>| file.as_ref().map(|f| plan.resolve(f));
        let tokenizer = path(&generation.tokenizer).map(|p| TextTokenizer::open(&p)).transpose()?;
        let (file, config) = (path(&generation.chat_template), path(&generation.tokenizer_config));
        let template = if template { ChatTemplate::open(file.as_deref(), config.as_deref())? } else { None };
        Ok(Self { tokenizer, template })
    }

    /// The same for a prompt of tokens, which needs no tokenizer: one that cannot be read is told, and no text is shown.
    pub fn open_for_tokens(plan: &PlanFile, console: &Console) -> Self {
        let file = plan.plan.generation.as_ref().and_then(|generation| generation.tokenizer.as_ref());
        let tokenizer = file.map(|file| TextTokenizer::open(&plan.resolve(file))).transpose();
        let tokenizer = tokenizer.unwrap_or_else(|error| {
            console.warn(&format!("{}: tokens go in and out, and no text", error_line(&error)));
            None
        });
        Self { tokenizer, template: None }
    }

    /// The tokenizer, or why there is none.
    pub fn tokenizer(&self) -> Result<&TextTokenizer, PromptError> {
        self.tokenizer.as_ref().ok_or(PromptError::NoTokenizer)
    }

    /// The tokens of a conversation.
    pub fn conversation(&self, messages: &[Message]) -> Result<Vec<u32>, ExecError> {
        let template = self.template.as_ref().ok_or(PromptError::NoTemplate)?;
        Ok(self.tokenizer()?.encode(&template.render(messages)?, Around::Nothing)?)
    }
}

/// The tokens to continue.
pub fn tokens(source: &PromptSource, files: &TextFiles, chat: Option<&Chat>) -> Result<Vec<u32>, ExecError> {
    if let PromptSource::Tokens(tokens) = source {
        return Ok(tokens.clone());
    }
    // Before stdin is waited for.
    files.tokenizer()?;
    let text = match source {
        PromptSource::Text(text) => text.clone(),
        PromptSource::File(path) => read_file(path)?,
        PromptSource::Stdin => read_stdin()?,
        PromptSource::StdinAnd(text) => joined(read_stdin()?, text),
        PromptSource::Tokens(_) | PromptSource::Terminal => return Err(PromptError::Empty.into()),
    };
    match chat {
        Some(chat) => files.conversation(&chat.messages(text)),
        None => Ok(files.tokenizer()?.encode(&text, Around::SpecialTokens)?),
    }
}

/// The conversation a prompt is put into.
pub struct Chat {
    /// The system message, where there is one.
    pub system: Option<String>,
}

impl Chat {
    /// The system message and the user's turn.
    pub fn messages(&self, text: String) -> Vec<Message> {
        let system = self.system.iter().map(|s| Message::new(Role::System, s.clone()));
        system.chain([Message::new(Role::User, text)]).collect()
    }
}

/// Whether the prompt is there and fits.
pub fn check(prompt: &[u32], context: u64) -> Result<(), PromptError> {
    match prompt.len() {
        0 => Err(PromptError::Empty),
        tokens if tokens as u64 > context => Err(PromptError::TooLong { tokens, context }),
        _ => Ok(()),
    }
}

fn read_file(path: &Path) -> Result<String, PromptError> {
    hpp_io::read_text(path, MOST_BYTES).map_err(|source| PromptError::File { path: path.to_owned(), source })
}

fn read_stdin() -> Result<String, PromptError> {
    hpp_io::read_text_from(io::stdin().lock(), MOST_BYTES).map_err(PromptError::Stdin)
}

/// Whether text may wait on stdin: a pipe or a file, as `command | hpp-exec` and `hpp-exec < FILE` make it. Terminals, sockets
/// and devices may stay open without a word, and are not waited for.
#[cfg(unix)]
pub fn stdin_is_piped() -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileTypeExt;
    let stdin = io::stdin().as_fd().try_clone_to_owned().map(std::fs::File::from);
    let kind = stdin.and_then(|file| file.metadata()).map(|about| about.file_type());
    kind.is_ok_and(|kind| kind.is_fifo() || kind.is_file())
}

#[cfg(not(unix))]
pub fn stdin_is_piped() -> bool {
    use std::io::IsTerminal;
    !io::stdin().is_terminal()
}

/// Piped text and then the prompt, as `ollama run` has it: the question follows what it is about.
fn joined(piped: String, prompt: &str) -> String {
    let between = if piped.is_empty() || piped.ends_with('\n') { "" } else { "\n" };
    piped + between + prompt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn piped_text_goes_before_the_prompt_on_lines_of_its_own() {
        let cases = [("", "p"), ("notes", "notes\np"), ("notes\n", "notes\np")];
        for (piped, whole) in cases {
            assert_eq!(joined(piped.to_owned(), "p"), whole);
        }
    }

    #[test]
    fn a_prompt_must_be_there_and_fit() {
        assert!(matches!(check(&[], 8), Err(PromptError::Empty)));
        assert!(matches!(check(&[1; 9], 8), Err(PromptError::TooLong { tokens: 9, context: 8 })));
        assert!(check(&[1; 8], 8).is_ok());
    }

    #[test]
    fn text_without_a_tokenizer_points_to_tokens() {
        let files = TextFiles { tokenizer: None, template: None };
        let error = tokens(&PromptSource::Text("x".into()), &files, None).unwrap_err();
        assert!(error.hint().unwrap().contains("--tokens"));
        assert_eq!(tokens(&PromptSource::Tokens(vec![3]), &files, None).unwrap(), [3]);
    }
}
