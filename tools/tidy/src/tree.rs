//! Finds the text files of the project, without build outputs, downloads and model files.

use std::fs;
use std::path::{Path, PathBuf};

/// A text file of the project.
#[derive(Debug)]
pub struct SourceFile {
    /// Its path from the root, with forward slashes.
    pub path: String,
    /// Its contents.
    pub text: String,
}

const ROOMS: [&str; 6] = ["schemas", "tools", "runtime", "fixtures", "docs", ".ci"];
const ROOT_FILES: [&str; 3] = ["Cargo.toml", "Makefile", "README.md"];
const KINDS: [&str; 7] = ["rs", "toml", "md", "sh", "py", "proto", "json"];

/// The root of the workspace.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the workspace exists")
}

/// Every text file of the project, in a stable order.
pub fn source_files() -> Vec<SourceFile> {
    let root = root();
    let mut found = Vec::new();
    for room in ROOMS {
        walk(&root.join(room), &mut found);
    }
    found.extend(ROOT_FILES.map(|name| root.join(name)));
    found.sort();
    found.iter().filter_map(|path| read(&root, path)).collect()
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        if path.is_dir() {
            if !["target", "models", "__pycache__"].contains(&name.as_ref()) {
                walk(&path, found);
            }
        } else if is_text(&path) {
            found.push(path);
        }
    }
}

fn is_text(path: &Path) -> bool {
    path.extension().is_none_or(|kind| KINDS.iter().any(|known| kind == *known))
}

fn read(root: &Path, path: &Path) -> Option<SourceFile> {
    let text = fs::read_to_string(path).ok()?;
    let path = path.strip_prefix(root).expect("found below the root").to_string_lossy().replace('\\', "/");
    Some(SourceFile { path, text })
}
