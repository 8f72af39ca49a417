//! Comparing files with what the plan recorded of them, before anything is opened.

use crate::error::EngineError;
use crate::options::Verify;
use crate::reporter::Reporter;
use hpp_schema::{FileRecord, FileRole, Plan, sample_ranges};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// Reports every file that is missing or changed, all at once. Nothing here reads a tokenizer or a chat template: that one is gone is
/// for whoever wants to read it.
pub(crate) fn check(plan: &Plan, dir: &Path, verify: Verify, reporter: &dyn Reporter) -> Result<(), EngineError> {
    reporter.checking_files(plan.files.len());
    let problems: Vec<String> = plan.files.iter().filter_map(|record| problem(record, dir, verify)).collect();
    if problems.is_empty() { Ok(()) } else { Err(EngineError::Files { problems }) }
}

fn problem(record: &FileRecord, dir: &Path, verify: Verify) -> Option<String> {
    let path = dir.join(&record.path);
    let differs = match compare(record, &path, verify) {
        Ok(None) => return None,
        Err(error) if record.role == FileRole::Text && error.kind() == io::ErrorKind::NotFound => return None,
        Ok(Some(differs)) => differs,
        Err(error) => format!("cannot be read: {error}"),
    };
    Some(format!("{}: {differs}", path.display()))
}

fn compare(record: &FileRecord, path: &Path, verify: Verify) -> io::Result<Option<String>> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    if length != record.bytes.0 {
        return Ok(Some(format!("it has {length} bytes, the plan says {}", record.bytes.0)));
    }
    if sampled(&mut file, length)? != record.sampled {
        return Ok(Some("its contents have changed".into()));
    }
    match (&record.blake3, verify) {
        (Some(said), Verify::Full) if *said != whole(&mut file)? => Ok(Some("its contents have changed".into())),
        _ => Ok(None),
    }
}

/// What the plan says of the contents of a partition's file and of all weights, in one line.
pub(crate) fn contents(plan: &Plan, file: &str) -> String {
    let concerns = |record: &&FileRecord| match record.role {
        FileRole::Partition => record.path == file,
        FileRole::Weights | FileRole::Source => true,
        FileRole::Tapped | FileRole::Text => false,
    };
    let hashes: Vec<&str> = plan.files.iter().filter(concerns).map(|record| record.sampled.as_str()).collect();
    hashes.join(" ")
}

/// The hash [`FileRecord::sampled`] holds.
fn sampled(file: &mut File, length: u64) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&length.to_le_bytes());
    let mut buffer = Vec::new();
    for (offset, size) in sample_ranges(length) {
        buffer.resize(size as usize, 0);
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(&mut buffer)?;
        hasher.update(&buffer);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

fn whole(file: &mut File) -> io::Result<String> {
    file.seek(SeekFrom::Start(0))?;
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finalize().to_hex().to_string()),
            size => hasher.update(&buffer[..size]),
        };
    }
}
