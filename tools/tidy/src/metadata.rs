//! The packages of the workspace and their declared dependencies, from `cargo metadata`.

use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

/// One package of the workspace.
#[derive(Debug)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// The directory of its manifest.
    pub dir: PathBuf,
    /// Its dependencies for all targets.
    pub dependencies: Vec<Dependency>,
}

/// One declared dependency.
#[derive(Debug)]
pub struct Dependency {
    /// The package.
    pub name: String,
    /// Whether it is a dev-dependency.
    pub dev: bool,
}

/// All packages of the workspace. Reads manifests only: needs no network and no build.
///
/// # Panics
/// If cargo cannot be run or its output is not as expected.
pub fn packages() -> Vec<Package> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let answer = Command::new(cargo)
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(crate::root())
        .output()
        .expect("cargo can be run");
    assert!(answer.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&answer.stderr));
    let metadata: Value = serde_json::from_slice(&answer.stdout).expect("cargo metadata is JSON");
    list(&metadata["packages"]).iter().map(package).collect()
}

fn package(value: &Value) -> Package {
    let manifest = PathBuf::from(text(&value["manifest_path"]));
    Package {
        name: text(&value["name"]),
        dir: manifest.parent().expect("a manifest is in a directory").to_owned(),
        dependencies: list(&value["dependencies"]).iter().map(dependency).collect(),
    }
}

fn dependency(value: &Value) -> Dependency {
    Dependency { name: text(&value["name"]), dev: value["kind"] == "dev" }
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list").as_slice()
}

fn text(value: &Value) -> String {
    value.as_str().expect("a string").to_owned()
}
