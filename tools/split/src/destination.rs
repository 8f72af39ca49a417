//! Where the files of a plan go: into a directory that is moved into place when all of it is there, or nowhere, for a dry run,
//! which says the same of every file without writing one.

use crate::error::SplitError;
use crate::output::Output;
use crate::progress;
use hpp_onnx::proto::ModelProto;
use hpp_onnx::{
    LinkOutcome, Model, PackProgress, VirtualFile, VirtualFiles, Weights, WriteError, encode, externalise,
    externalise_virtually, link, pack, pack_virtually, predict_link, write_model,
};
use std::fs;
use std::path::{Component, Path, PathBuf};

/// Where files go.
pub struct Destination {
    /// The directory being written; `None` in a dry run.
    output: Option<Output>,
    /// Where relative paths in the plan begin, symlinks resolved.
    base: PathBuf,
    /// What would be written in a dry run, by path in the plan.
    made: VirtualFiles,
    /// Weight files that have a second name now.
    hard_links: Vec<String>,
}

impl Destination {
    /// A directory to be written, or one that only would be.
    pub fn new(target: &Path, output: Option<Output>) -> Result<Self, SplitError> {
        let io = |source| SplitError::Io { action: "resolve", path: target.to_owned(), source };
        let target = std::path::absolute(target).map_err(io)?;
        Ok(Destination { output, base: resolved(&target), made: VirtualFiles::new(), hard_links: vec![] })
    }

    /// The directory being written, unless this is a dry run, and weight files that have a second name now.
    pub fn finish(self) -> (Option<Output>, Vec<String>) {
        (self.output, self.hard_links)
    }

    /// Files that are not written, by location.
    pub fn made(&self) -> &VirtualFiles {
        &self.made
    }

    /// The directory that a plan's `weights_dir` is while it is written: in a dry run, where the model's own weights are.
    pub fn weights_dir(&self, weights_dir: &str, model: &Model) -> PathBuf {
        match &self.output {
            Some(output) => output.staging().join(weights_dir),
            None => model.dir().to_owned(),
        }
    }

    /// The model with no large weights inside its file: they go to `location`.
    pub fn externalise(&mut self, model: &Model, location: &str) -> Result<Model, SplitError> {
        let failed = |error| SplitError::Weights(Box::new(error));
        match &self.output {
            Some(output) => externalise(model, output.staging(), location).map_err(failed),
            None => {
                let (moved, contents) = externalise_virtually(model, &self.base, location).map_err(failed)?;
                self.made.insert(location.to_owned(), contents);
                Ok(moved)
            }
        }
    }

    /// Gathers the weights that models need in one file.
    pub fn pack(&mut self, models: &mut [ModelProto], weights: &Weights, location: &str) -> Result<(), SplitError> {
        let failed = |error| SplitError::Weights(Box::new(error));
        match &self.output {
            Some(output) => {
                let bar = progress::bytes("packing weights");
                let mut report = |p: PackProgress| {
                    bar.set_length(p.total);
                    bar.set_position(p.done);
                };
                pack(models, weights, output.staging(), location, &mut report).map_err(failed)?;
                bar.finish_and_clear();
            }
            None => {
                let contents = pack_virtually(models, weights, &self.made, location).map_err(failed)?;
                self.made.insert(location.to_owned(), contents);
            }
        }
        Ok(())
    }

    /// Forgets a file that was needed on the way.
    pub fn remove(&mut self, name: &str) {
        self.made.remove(name);
        if let Some(output) = &self.output {
            let _ = fs::remove_file(output.staging().join(name));
        }
    }

    /// Makes the weight files of a model visible beside the partitions; gives the last one that cannot be, and why.
    pub fn place(&mut self, model: &Model) -> Result<Option<(String, String)>, SplitError> {
        let mut refused = None;
        for file in &model.weights().files {
            let placed = match &self.output {
                Some(output) => link(file, output.staging()).map_err(|e| SplitError::Weights(Box::new(e)))?,
                None if self.made.contains_key(&file.location) => LinkOutcome::AlreadyThere,
                None => predict_link(file, &self.base),
            };
            match placed {
                LinkOutcome::NotLinkable { why } => refused = Some((file.location.clone(), why)),
                LinkOutcome::HardLink if self.output.is_some() => self.hard_links.push(file.location.clone()),
                LinkOutcome::AlreadyThere | LinkOutcome::Clone if self.output.is_some() => {}
                LinkOutcome::AlreadyThere => {}
                LinkOutcome::HardLink | LinkOutcome::Clone => self.refer(&file.location, &file.path)?,
            }
        }
        Ok(refused)
    }

    /// Writes a file.
    pub fn write(&mut self, name: &str, bytes: Vec<u8>) -> Result<(), SplitError> {
        match &self.output {
            Some(output) => output.write(name, &bytes)?,
            None => drop(self.made.insert(name.to_owned(), bytes.into())),
        }
        Ok(())
    }

    /// Writes a model.
    pub fn write_model(&mut self, name: &str, model: &ModelProto) -> Result<(), WriteError> {
        match &self.output {
            Some(output) => write_model(&output.staging().join(name), model).map(drop),
            None => {
                let bytes = encode(&self.base.join(name), model)?;
                self.made.insert(name.to_owned(), bytes.into());
                Ok(())
            }
        }
    }

    /// Copies a file.
    pub fn copy(&mut self, name: &str, from: &Path) -> Result<(), SplitError> {
        let io = |source| SplitError::Io { action: "copy", path: from.to_owned(), source };
        match &self.output {
            Some(output) => fs::copy(from, output.staging().join(name)).map(drop).map_err(io),
            None => self.refer(name, from),
        }
    }

    /// A file of the plan is another one that is there.
    fn refer(&mut self, name: &str, from: &Path) -> Result<(), SplitError> {
        let io = |source| SplitError::Io { action: "read", path: from.to_owned(), source };
        self.made.insert(name.to_owned(), VirtualFile::of_file(from).map_err(io)?);
        Ok(())
    }

    /// Where a file is that the plan calls so. The directory being written lies beside the one it becomes, so the same relative
    /// paths lead out of it; in a dry run neither may be there.
    pub fn find(&self, path: &str) -> PathBuf {
        match &self.output {
            Some(output) => output.staging().join(path),
            None => plain(&self.base.join(path)),
        }
    }

    /// A path as the plan writes it: relative to the plan, with forward slashes.
    pub fn relative(&self, path: &Path) -> String {
        let real = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let relative = pathdiff::diff_paths(&real, &self.base).unwrap_or(real);
        let parts: Vec<_> = relative.components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
        if parts.is_empty() { ".".to_owned() } else { parts.join("/") }
    }
}

/// A directory that may not be there yet, symlinks on the way to it resolved.
fn resolved(target: &Path) -> PathBuf {
    let Some((parent, name)) = target.parent().zip(target.file_name()) else { return target.to_owned() };
    let there = parent.ancestors().find_map(|above| Some((above, fs::canonicalize(above).ok()?)));
    let Some((above, real)) = there else { return target.to_owned() };
    real.join(parent.strip_prefix(above).unwrap_or(parent)).join(name)
}

/// A path without `..`, whatever of it is there.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}
