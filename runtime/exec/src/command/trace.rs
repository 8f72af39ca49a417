//! `--trace FILE`: the timeline of an engine in the Chrome trace format.

use hpp_io::{FileWriteError, OutputFile};
use hpp_schema::{TRACE_START, Timeline};
use std::io::Write;
use std::path::{Path, PathBuf};

/// A trace file that is created before the work starts, so that a path that cannot be written fails early. If the work fails, no file is left.
pub struct TraceFile {
    file: OutputFile,
    path: PathBuf,
}

impl TraceFile {
    /// Creates the file, if one is wanted.
    pub fn create(path: Option<&Path>) -> Result<Option<Self>, FileWriteError> {
        path.map(|path| {
            Ok(TraceFile { file: OutputFile::create_as(path, TRACE_START.as_bytes())?, path: path.to_owned() })
        })
        .transpose()
    }

    /// Writes a timeline.
    pub fn write(mut self, timeline: &Timeline) -> Result<(), FileWriteError> {
        let written = self.file.file().write_all(timeline.to_chrome_trace().as_bytes());
        written.map_err(|source| FileWriteError { path: self.path, source })?;
        self.file.finish()
    }
}
