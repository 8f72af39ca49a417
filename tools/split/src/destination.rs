//! The destination of a plan's files: a staging directory, or memory in a dry run. Both give the same plan, with the
//! same sizes and hashes; a dry run writes no file.

use crate::error::SplitError;
use crate::output::{OutputDir, create_dir, write_synced};
use crate::tell::is_quiet;
use hpp_onnx::proto::ModelProto;
use hpp_onnx::{
    LinkOutcome, Model, PackProgress, VirtualFile, VirtualFiles, Weights, WriteError, encode, externalise,
    externalise_virtually, link, pack, pack_virtually, predict_link, write_model,
};
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::sync::LazyLock;

/// Every progress bar, so that lines can be printed above them.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// Receives the files of a plan.
pub struct Destination {
    /// The directory that files are written to before they are moved into place; `None` in a dry run.
    staging: Option<PathBuf>,
    /// The final plan directory, symlinks resolved: relative paths in the plan start here.
    base: PathBuf,
    /// The files of a dry run, by path in the plan, and weights that are computed when they are copied.
    dry_files: VirtualFiles,
}

/// A weight file that can be neither cloned nor linked into the plan directory.
pub struct NotLinkable {
    /// Its name in the model.
    pub location: String,
    /// The reason.
    pub why: String,
}

impl Destination {
    /// Writes to the staging directory of `output`, or to memory without it.
    pub fn new(target: &Path, output: Option<&OutputDir>) -> Result<Self, SplitError> {
        let io = |source| SplitError::Io { action: "resolve", path: target.to_owned(), source };
        let target = std::path::absolute(target).map_err(io)?;
        let staging = output.map(|output| output.staging().to_owned());
        Ok(Destination { staging, base: resolved(&target), dry_files: VirtualFiles::new() })
    }

    /// Writes to an existing directory, for files that are used while this process runs.
    pub fn at(directory: &Path) -> Self {
        let (staging, base) = (Some(directory.to_owned()), resolved(directory));
        Destination { staging, base, dry_files: VirtualFiles::new() }
    }

    /// A directory in this one. In a dry run its files are known here once they are [adopted](Self::adopt).
    pub fn directory(&self, name: &str) -> Result<Self, SplitError> {
        let staging = self.staging.as_ref().map(|staging| staging.join(name));
        staging.iter().try_for_each(|staging| create_dir(staging))?;
        Ok(Destination { staging, base: self.base.join(name), dry_files: VirtualFiles::new() })
    }

    /// Takes over a file that was written to a [directory](Self::directory) of this one.
    pub fn adopt(&mut self, directory: &Destination, name: &str, file: &str) {
        if let Some(contents) = directory.dry_files.get(file) {
            self.dry_files.insert(format!("{name}/{file}"), contents.clone());
        }
    }

    /// The files of a dry run, by location.
    pub fn dry_files(&self) -> &VirtualFiles {
        &self.dry_files
    }

    /// Directory that holds the weights of `weights_dir` while the plan is written; in a dry run, the model's own
    /// directory.
    pub fn weights_dir(&self, weights_dir: &str, model: &Model) -> PathBuf {
        match &self.staging {
            Some(staging) => staging.join(weights_dir),
            None => model.dir().to_owned(),
        }
    }

    /// Moves large embedded weights of a model to a file `location`; returns the model that refers to it.
    pub fn externalise(&mut self, model: &Model, location: &str) -> Result<Model, SplitError> {
        let failed = |error| SplitError::Weights(Box::new(error));
        match &self.staging {
            Some(staging) => externalise(model, staging, location).map_err(failed),
            None => {
                let (moved, contents) = externalise_virtually(model, &self.base, location).map_err(failed)?;
                self.dry_files.insert(location.to_owned(), contents);
                Ok(moved)
            }
        }
    }

    /// Makes a file that does not exist on disk available to [`Destination::pack`].
    pub fn add_virtual(&mut self, location: &str, contents: VirtualFile) {
        self.dry_files.insert(location.to_owned(), contents);
    }

    /// Copies all weights that `models` read into one file and points the models to it.
    pub fn pack(&mut self, models: &mut [ModelProto], weights: &Weights, location: &str) -> Result<(), SplitError> {
        let failed = |error| SplitError::Weights(Box::new(error));
        match &self.staging {
            Some(staging) => {
                let bar = progress_bar("packing weights");
                let mut report = |p: PackProgress| {
                    bar.set_length(p.total);
                    bar.set_position(p.done);
                };
                pack(models, weights, &self.dry_files, staging, location, &mut report).map_err(failed)?;
                bar.finish_and_clear();
            }
            None => {
                let contents = pack_virtually(models, weights, &self.dry_files, location).map_err(failed)?;
                self.dry_files.insert(location.to_owned(), contents);
            }
        }
        Ok(())
    }

    /// Removes an intermediate file.
    pub fn remove(&mut self, name: &str) {
        self.dry_files.remove(name);
        if let Some(staging) = &self.staging {
            let _ = fs::remove_file(staging.join(name));
        }
    }

    /// Clones or links the weight files of a model into the plan directory; returns the last one for which neither is
    /// possible.
    pub fn link_weights(&mut self, model: &Model) -> Result<Option<NotLinkable>, SplitError> {
        let mut not_linkable = None;
        let mut hard_link = None;
        for file in &model.weights().files {
            let outcome = match &self.staging {
                Some(staging) => link(file, staging).map_err(|e| SplitError::Weights(Box::new(e)))?,
                None if self.dry_files.contains_key(&file.location) => LinkOutcome::AlreadyThere,
                None => predict_link(file, &self.base),
            };
            tracing::debug!(file = file.location, bytes = file.bytes, placed = ?outcome, "weight file placed");
            match outcome {
                LinkOutcome::NotLinkable { why } => {
                    not_linkable = Some(NotLinkable { location: file.location.clone(), why })
                }
                LinkOutcome::HardLink if self.staging.is_some() => hard_link = Some(&file.location),
                LinkOutcome::AlreadyThere | LinkOutcome::Clone if self.staging.is_some() => {}
                LinkOutcome::AlreadyThere => {}
                LinkOutcome::HardLink | LinkOutcome::Clone => self.refer(&file.location, &file.path)?,
            }
        }
        if let Some(file) = hard_link {
            tracing::info!(
                file,
                "a hard link to the model's own file: while both exist, Python's onnx.load refuses the model and the plan's \
                 partitions (ONNX Runtime opens them); --pack copies the weights"
            );
        }
        Ok(not_linkable)
    }

    /// Writes a file.
    pub fn write(&mut self, name: &str, bytes: Vec<u8>) -> Result<(), SplitError> {
        tracing::debug!(name, bytes = bytes.len(), dry_run = self.staging.is_none(), "file written");
        match &self.staging {
            Some(staging) => write_synced(&staging.join(name), &bytes)?,
            None => drop(self.dry_files.insert(name.to_owned(), bytes.into())),
        }
        Ok(())
    }

    /// Writes a model.
    pub fn write_model(&mut self, name: &str, model: &ModelProto) -> Result<(), WriteError> {
        let nodes = model.graph.as_ref().map(|graph| graph.node.len());
        tracing::debug!(name, nodes, dry_run = self.staging.is_none(), "model written");
        match &self.staging {
            Some(staging) => write_model(&staging.join(name), model).map(drop),
            None => {
                let bytes = encode(&self.base.join(name), model)?;
                self.dry_files.insert(name.to_owned(), bytes.into());
                Ok(())
            }
        }
    }

    /// Copies a file.
    pub fn copy(&mut self, name: &str, from: &Path) -> Result<(), SplitError> {
        let io = |source| SplitError::Io { action: "copy", path: from.to_owned(), source };
        match &self.staging {
            Some(staging) => fs::copy(from, staging.join(name)).map(drop).map_err(io),
            None => self.refer(name, from),
        }
    }

    /// In a dry run, makes `name` stand for an existing file.
    fn refer(&mut self, name: &str, from: &Path) -> Result<(), SplitError> {
        let io = |source| SplitError::Io { action: "read", path: from.to_owned(), source };
        self.dry_files.insert(name.to_owned(), VirtualFile::of_file(from).map_err(io)?);
        Ok(())
    }

    /// Resolves a path of the plan. The staging directory is a sibling of the final one, so relative paths that lead
    /// out of it resolve alike; in a dry run neither directory need exist, so `..` is resolved lexically.
    pub fn resolve(&self, path: &str) -> PathBuf {
        match &self.staging {
            Some(staging) => staging.join(path),
            None => normalised(&self.base.join(path)),
        }
    }

    /// A path as the plan records it: relative to the plan, with forward slashes.
    pub fn relative(&self, path: &Path) -> String {
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let relative = pathdiff::diff_paths(&real, &self.base).unwrap_or(real);
        let parts: Vec<_> = relative.components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
        if parts.is_empty() { ".".to_owned() } else { parts.join("/") }
    }
}

/// A progress bar in bytes on stderr, drawn only on a terminal.
fn progress_bar(what: &'static str) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {bar:32} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
    let bar = if is_quiet() { ProgressBar::hidden() } else { ProgressBar::new(0) };
    let bar = bar.with_message(what).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    BARS.add(bar)
}

/// Prints a line to stderr, above the progress bar if one is drawn.
pub fn print_above_bars(line: &str) {
    BARS.suspend(|| hpp_io::line_to_stderr(line));
}

/// `target` with symlinks resolved in the part of the path that exists.
fn resolved(target: &Path) -> PathBuf {
    let Some((parent, name)) = target.parent().zip(target.file_name()) else { return target.to_owned() };
    let existing = parent.ancestors().find_map(|above| Some((above, fs::canonicalize(above).ok()?)));
    let Some((above, real)) = existing else { return target.to_owned() };
    real.join(parent.strip_prefix(above).unwrap_or(parent)).join(name)
}

/// A path with `.` and `..` removed lexically.
fn normalised(path: &Path) -> PathBuf {
    let mut normalised = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(normalised.pop()),
            Component::CurDir => {}
            other => normalised.push(other),
        }
    }
    normalised
}
