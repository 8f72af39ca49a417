//! Where the prompt comes from: the command line, a file, stdin or the terminal.

use std::io;
use std::path::{Path, PathBuf};

/// Largest prompt read: about ten million tokens.
const MAX_BYTES: u64 = 64 << 20;

/// Where the prompt comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PromptSource {
    /// Text to be read.
    Text(TextSource),
    /// Token ids from the command line.
    Tokens(Vec<u32>),
    /// A conversation in the terminal.
    Terminal,
}

/// Where text comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextSource {
    /// The command line.
    Argument(String),
    /// A file.
    File(PathBuf),
    /// Standard input.
    Stdin,
    /// Standard input, followed by this text from the command line.
    StdinThenArgument(String),
}

/// Why a prompt cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum PromptReadError {
    /// The file cannot be read.
    #[error("cannot read the prompt from {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What the system reported.
        source: io::Error,
    },
    /// Standard input cannot be read.
    #[error("cannot read the prompt from stdin")]
    Stdin(#[source] io::Error),
}

impl PromptReadError {
    /// What the user can do next.
    pub fn hint(&self) -> Option<&'static str> {
        let (PromptReadError::File { source, .. } | PromptReadError::Stdin(source)) = self;
        let too_large = source.kind() == io::ErrorKind::FileTooLarge;
        too_large.then_some("give a shorter file of text; no model's context holds as much")
    }
}

impl PromptSource {
    /// Whether the prompt, or a part of it, comes from stdin.
    pub fn reads_stdin(&self) -> bool {
        matches!(self, PromptSource::Text(TextSource::Stdin | TextSource::StdinThenArgument(_)))
    }

    /// A note if the text is `@` and the name of a file, a form by which other programs read the file.
    pub fn file_note(&self) -> Option<String> {
        let PromptSource::Text(TextSource::Argument(text) | TextSource::StdinThenArgument(text)) = self else {
            return None;
        };
        let file = text.strip_prefix('@').filter(|file| Path::new(file).is_file())?;
        Some(format!("note: the prompt is the text {text:?}, not what is in the file; -f {file:?} reads the file"))
    }
}

impl TextSource {
    /// Reads a message: like [`read`](Self::read), but removes the line break at the end of a file or of piped text without a text behind it.
    pub fn read_message(&self) -> Result<String, PromptReadError> {
        let mut text = self.read()?;
        if matches!(self, TextSource::File(_) | TextSource::Stdin) && text.ends_with('\n') {
            text.pop();
            text.truncate(text.strip_suffix('\r').unwrap_or(&text).len());
        }
        Ok(text)
    }

    /// Reads the text; waits for the end of stdin if it comes from there.
    pub fn read(&self) -> Result<String, PromptReadError> {
        match self {
            TextSource::Argument(text) => Ok(text.clone()),
            TextSource::File(path) => read_file(path),
            TextSource::Stdin => read_stdin(),
            TextSource::StdinThenArgument(text) => Ok(join(read_stdin()?, text)),
        }
    }
}

fn read_file(path: &Path) -> Result<String, PromptReadError> {
    hpp_io::read_text(path, MAX_BYTES).map_err(|source| PromptReadError::File { path: path.to_owned(), source })
}

fn read_stdin() -> Result<String, PromptReadError> {
    hpp_io::read_text_from(io::stdin().lock(), MAX_BYTES).map_err(PromptReadError::Stdin)
}

/// Whether stdin is a pipe or a file, as in `command | hpp-exec` and `hpp-exec < FILE`. A terminal, socket or device may stay open
/// without sending anything, so it is not read.
#[cfg(unix)]
pub fn stdin_is_piped() -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileTypeExt;
    let stdin = io::stdin().as_fd().try_clone_to_owned().map(std::fs::File::from);
    let file_type = stdin.and_then(|file| file.metadata()).map(|metadata| metadata.file_type());
    file_type.is_ok_and(|file_type| file_type.is_fifo() || file_type.is_file())
}

/// Whether stdin is anything but a terminal.
#[cfg(not(unix))]
pub fn stdin_is_piped() -> bool {
    use std::io::IsTerminal;
    !io::stdin().is_terminal()
}

/// Joins piped text, a line break and the prompt: the question follows the text that it is about, as in `ollama run`.
fn join(piped: String, prompt: &str) -> String {
    let separator = if piped.is_empty() || piped.ends_with('\n') { "" } else { "\n" };
    piped + separator + prompt
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_lose_the_line_break_at_the_end_of_a_file() {
        let dir = tempfile::tempdir().unwrap();
        for (written, message) in [("a\n", "a"), ("a\r\n", "a"), ("a\n\n", "a\n"), ("a", "a"), ("", "")] {
            let path = dir.path().join("prompt");
            std::fs::write(&path, written).unwrap();
            let source = TextSource::File(path);
            assert_eq!((source.read_message().unwrap().as_str(), source.read().unwrap().as_str()), (message, written));
        }
        assert_eq!(TextSource::Argument("a\n".into()).read_message().unwrap(), "a\n");
    }

    #[test]
    fn a_file_after_an_at_sign_is_noted_and_nothing_else_is() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("notes.txt");
        std::fs::write(&file, "x").unwrap();
        let text = |text: String| PromptSource::Text(TextSource::Argument(text));
        let (file, dir) = (file.to_str().unwrap(), dir.path().to_str().unwrap());
        let at = format!("@{file}");
        for source in [text(at.clone()), PromptSource::Text(TextSource::StdinThenArgument(at))] {
            let note = source.file_note().unwrap();
            assert!(note.contains(&format!("-f \"{file}\"")), "{note}");
        }
        for plain in
            [file.to_owned(), format!("@{dir}"), format!("@{file}.none"), "@".to_owned(), "@all: hi".to_owned()]
        {
            assert_eq!(text(plain).file_note(), None);
        }
        assert_eq!(PromptSource::Text(TextSource::File(file.into())).file_note(), None);
        assert_eq!(PromptSource::Tokens(vec![1]).file_note(), None);
    }

    #[test]
    fn piped_text_goes_before_the_prompt_on_lines_of_its_own() {
        let cases = [("", "p"), ("notes", "notes\np"), ("notes\n", "notes\np")];
        for (piped, whole) in cases {
            assert_eq!(join(piped.to_owned(), "p"), whole);
        }
    }
}
