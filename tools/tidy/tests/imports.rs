//! Rules for dependencies between crates: imports point down, and `tools` and `runtime` share only `hpp-schema`,
//! `hpp-io` and `hpp-cli`.

use std::fs;

use hpp_tidy::{Package, packages};

/// Each crate and the crates of the workspace that it may import. Add a line here for a new crate.
const MAY_IMPORT: &[(&str, &[&str])] = &[
    ("hpp-schema", &[]),
    ("hpp-io", &[]),
    ("hpp-graph", &["hpp-schema"]),
    ("hpp-onnx", &["hpp-graph", "hpp-schema", "hpp-io"]),
    ("hpp-partition", &["hpp-schema"]),
    ("hpp-model", &["hpp-onnx", "hpp-partition", "hpp-graph", "hpp-schema", "hpp-io"]),
    ("hpp-split", &["hpp-model", "hpp-onnx", "hpp-partition", "hpp-graph", "hpp-schema", "hpp-io", "hpp-cli"]),
    ("hpp-profile", &["hpp-model", "hpp-onnx", "hpp-partition", "hpp-graph", "hpp-schema", "hpp-io", "hpp-cli"]),
    ("hpp-engine", &["hpp-schema"]),
    ("hpp-backend", &["hpp-engine", "hpp-schema"]),
    ("hpp-kv", &[]),
    ("hpp-generate", &["hpp-engine", "hpp-kv", "hpp-schema", "hpp-io"]),
    ("hpp-serve", &["hpp-generate", "hpp-engine", "hpp-schema"]),
    ("hpp-exec", &["hpp-serve", "hpp-generate", "hpp-engine", "hpp-backend", "hpp-schema", "hpp-io", "hpp-cli"]),
    ("hpp-python", &["hpp-generate", "hpp-engine", "hpp-backend", "hpp-schema"]),
    // What command lines share: it knows clap and no room.
    ("hpp-cli", &[]),
    // The model generator uses the reader's protobuf types. It is a test tool; no crate imports it.
    ("hpp-fixtures", &["hpp-onnx", "hpp-schema", "hpp-cli"]),
    // End-to-end tests use the tools' types to create unusual models, never to compute expected results. One test
    // compares the planner's simulator with the engine on a virtual clock, so it imports both. Another compares the bits of
    // logits of many sequences, which no command reports, so it runs the commands' plans on the engine itself.
    (
        "hpp-end-to-end",
        &[
            "hpp-cli",
            "hpp-onnx",
            "hpp-graph",
            "hpp-schema",
            "hpp-partition",
            "hpp-generate",
            "hpp-engine",
            "hpp-backend",
        ],
    ),
    // The campaigns call what reads hostile input in one process, and the commands as programs.
    (
        "hpp-campaigns",
        &["hpp-split", "hpp-profile", "hpp-exec", "hpp-serve", "hpp-generate", "hpp-engine", "hpp-onnx", "hpp-schema"],
    ),
    ("hpp-tidy", &[]),
];

/// External crates that only some crates may use.
const ONLY_IN: &[(&str, &[&str])] = &[
    ("ort", &["hpp-backend"]),
    ("ort-sys", &["hpp-backend"]),
    ("cudarc", &["hpp-backend"]),
    ("io-uring", &["hpp-backend"]),
    ("prost", &["hpp-onnx", "hpp-fixtures", "hpp-campaigns"]),
    ("prost-types", &["hpp-onnx"]),
    ("prost-build", &["hpp-onnx"]),
    ("protox", &["hpp-onnx"]),
    ("microlp", &["hpp-partition"]),
    ("maud", &["hpp-profile", "hpp-exec"]),
    ("clap", &["hpp-split", "hpp-profile", "hpp-exec", "hpp-fixtures", "hpp-campaigns", "hpp-cli"]),
    ("clap_complete", &["hpp-cli"]),
    ("clap_mangen", &["hpp-cli"]),
    ("indicatif", &["hpp-split", "hpp-profile", "hpp-exec"]),
    ("tokenizers", &["hpp-generate"]),
    ("llguidance", &["hpp-generate"]),
    ("pyo3", &["hpp-python"]),
    ("minijinja", &["hpp-generate"]),
    ("axum", &["hpp-serve"]),
    ("tokio", &["hpp-serve"]),
    ("tower-http", &["hpp-serve"]),
    ("prometheus-client", &["hpp-serve"]),
    // Libraries emit events; the commands install the subscriber through hpp-io.
    ("tracing-subscriber", &["hpp-io"]),
];

/// The only crate that may contain `unsafe` code.
const UNSAFE_CRATE: &str = "hpp-backend";

fn rule<'a>(rules: &'a [(&str, &'a [&'a str])], name: &str) -> Option<&'a [&'a str]> {
    rules.iter().find(|(key, _)| *key == name).map(|(_, allowed)| *allowed)
}

fn forbidden_imports(package: &Package) -> Vec<String> {
    let Some(allowed) = rule(MAY_IMPORT, &package.name) else {
        return vec![format!("{} has no line in MAY_IMPORT", package.name)];
    };
    let is_ours = |name: &str| name.starts_with("hpp-");
    let mut wrong = Vec::new();
    for dependency in &package.dependencies {
        // A crate's own tests may enable a feature of it, such as its mock.
        let is_own_tests = dependency.dev && dependency.name == package.name;
        if is_ours(&dependency.name) && !is_own_tests && !allowed.contains(&dependency.name.as_str()) {
            wrong.push(format!("{} must not import {}", package.name, dependency.name));
        }
        if rule(ONLY_IN, &dependency.name)
            .is_some_and(|rooms| !dependency.dev && !rooms.contains(&package.name.as_str()))
        {
            wrong.push(format!("{} must not know {}", package.name, dependency.name));
        }
    }
    wrong
}

#[test]
fn imports_point_down() {
    let packages = packages();
    assert!(packages.len() > 3, "cargo metadata lists the workspace");
    let wrong: Vec<String> = packages.iter().flat_map(forbidden_imports).collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_check_notices_a_forbidden_import() {
    let dependency = |name: &str| hpp_tidy::Dependency { name: name.into(), dev: false };
    let package = |name: &str, uses: &[&str]| Package {
        name: name.into(),
        dir: hpp_tidy::root(),
        dependencies: uses.iter().map(|name| dependency(name)).collect(),
    };
    assert_eq!(forbidden_imports(&package("hpp-graph", &["hpp-engine"])).len(), 1);
    assert_eq!(forbidden_imports(&package("hpp-engine", &["ort", "hpp-schema"])).len(), 1);
    assert_eq!(forbidden_imports(&package("hpp-new", &[])).len(), 1);
    assert_eq!(forbidden_imports(&package("hpp-exec", &["hpp-engine", "clap"])).len(), 0);
}

#[test]
fn unsafe_stays_in_one_crate() {
    let workspace = fs::read_to_string(hpp_tidy::root().join("Cargo.toml")).expect("the workspace manifest is there");
    assert!(workspace.contains("unsafe_code = \"forbid\""), "the workspace forbids unsafe code");
    for package in packages().iter().filter(|package| package.name != UNSAFE_CRATE) {
        let manifest = fs::read_to_string(package.dir.join("Cargo.toml")).expect("a package has a manifest");
        assert!(manifest.contains("[lints]\nworkspace = true"), "{} must take the workspace's lints", package.name);
    }
}
