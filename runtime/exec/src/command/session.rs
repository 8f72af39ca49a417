//! Saved conversations: `DIR/sessions/NAME.json`, beside their saved states.

use crate::cli::KvArgs;
use crate::error::ExecError;
use etcetera::BaseStrategy;
use hpp_generate::kv::private_directories;
use hpp_generate::text::Message;
use hpp_io::{read, write_file};
use serde::{Deserialize, Serialize};
use std::fs::{File, TryLockError};
use std::io;
use std::path::PathBuf;

/// Largest file that is read, bytes.
const MOST_BYTES: u64 = 256 << 20;

/// The directory of sessions and their states.
pub fn directory(args: &KvArgs) -> Result<PathBuf, ExecError> {
    let default = || Some(etcetera::choose_base_strategy().ok()?.data_dir().join("hpp"));
    args.kv_dir.clone().or_else(default).ok_or_else(|| ExecError::Usage {
        message: "this user has no data directory".to_owned(),
        hint: "name one for the session with --kv-dir".to_owned(),
    })
}

/// The messages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conversation {
    /// Messages for the chat template, the system message first if there is one.
    #[serde(default)]
    pub messages: Vec<Message>,
    /// The text so far, for a model without a chat template.
    #[serde(default)]
    pub text: String,
}

/// The file of a conversation. It is locked against other processes as long as this exists.
pub struct SessionFile {
    path: PathBuf,
    _lock: File,
}

impl SessionFile {
    /// Opens the session of a name. Returns its conversation, unless it is new.
    pub fn open(directory: PathBuf, name: &str) -> Result<(Self, Option<Conversation>), ExecError> {
        let folder = directory.join("sessions");
        let failed = |path: PathBuf| move |source: io::Error| ExecError::Session { path, source };
        private_directories().create(&folder).map_err(failed(folder.clone()))?;
        let lock_path = folder.join(format!("{name}.lock"));
        let open = File::options().create(true).truncate(false).write(true).open(&lock_path);
        let lock = open.map_err(failed(lock_path.clone()))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(ExecError::Usage {
                    message: format!("the session {name:?} is open in another process"),
                    hint: "end that one, or use another name".to_owned(),
                });
            }
            Err(TryLockError::Error(source)) => return Err(ExecError::Session { path: lock_path, source }),
        }
        let path = folder.join(format!("{name}.json"));
        let file = SessionFile { path: path.clone(), _lock: lock };
        if !path.exists() {
            return Ok((file, None));
        }
        let text = read(&path, MOST_BYTES).map_err(failed(path.clone()))?;
        let conversation = serde_json::from_slice(&text)
            .map_err(|error| ExecError::Session { path, source: io::Error::new(io::ErrorKind::InvalidData, error) })?;
        Ok((file, Some(conversation)))
    }

    /// Writes the conversation in one step.
    pub fn save(&self, conversation: &Conversation) -> Result<(), ExecError> {
        let text = serde_json::to_vec_pretty(conversation).map_err(io::Error::other);
        let text = text.map_err(|source| ExecError::Session { path: self.path.clone(), source })?;
        write_file(&self.path, &text).map_err(|error| match error.source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                ExecError::Session { path: self.path.clone(), source: error.source }
            }
            _ => error.into(),
        })
    }
}
