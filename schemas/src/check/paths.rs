//! Paths are relative and leave the plan's directory only where their purpose requires it.
//!
//! Partition files are in the plan's directory. The source model, its weights and its tokenizer may be beside or above
//! it, so their paths may start with `..`. No path may be absolute, or contain `..` after a name.

use super::Findings;
use crate::{FileRole, Partition, Plan};

pub(super) fn check(plan: &Plan, found: &mut Findings) {
    upward(found, "model.source", &plan.model.source);
    upward(found, "model.weights_dir", &plan.model.weights_dir);
    if let Some(tapped) = &plan.model.tapped {
        inside(found, "model.tapped", tapped);
        recorded(plan, found, "model.tapped", tapped);
    }
    recorded(plan, found, "model.source", &plan.model.source);
    for (at, partition) in plan.partitions.iter().enumerate() {
        partition_paths(plan, found, &format!("partitions[{at}]"), partition);
    }
    for (at, file) in plan.files.iter().enumerate() {
        let place = format!("files[{at}]");
        match file.role {
            FileRole::Source | FileRole::Weights | FileRole::Text => upward(found, &place, &file.path),
            FileRole::Partition | FileRole::Tapped | FileRole::Draft => inside(found, &place, &file.path),
        }
        hash(found, &format!("{place}.sampled"), &file.sampled);
        if let Some(full) = &file.blake3 {
            hash(found, &format!("{place}.blake3"), full);
        }
    }
    if let Some(draft) = &plan.draft {
        inside(found, "draft.plan", &draft.plan);
        let known = plan.files.iter().any(|file| file.path == draft.plan && file.role == FileRole::Draft);
        let message = format!("{:?} is missing from files with the role draft, so it cannot be verified", draft.plan);
        found.require(known, "draft.plan", message);
    }
    let Some(text) = &plan.generation else { return };
    for (what, path) in [
        ("generation.tokenizer", &text.tokenizer),
        ("generation.tokenizer_config", &text.tokenizer_config),
        ("generation.chat_template", &text.chat_template),
    ] {
        if let Some(path) = path {
            upward(found, what, path);
        }
    }
}

fn partition_paths(plan: &Plan, found: &mut Findings, place: &str, partition: &Partition) {
    upward(found, &format!("{place}.weights_dir"), &partition.weights_dir);
    for (variant, field) in partition.variants().zip(["", ".prefill"]) {
        let file_place = format!("{place}{field}.file");
        // In the plan of an unsplit model, the file of the only partition is the source model.
        match field.is_empty() && variant.file == plan.model.source {
            true => upward(found, &file_place, variant.file),
            false => inside(found, &file_place, variant.file),
        }
        recorded(plan, found, &file_place, variant.file);
        if let Some(file) = variant.host_file {
            let place = format!("{place}{field}.host_file");
            inside(found, &place, file);
            recorded(plan, found, &place, file);
        }
        for (number, weight) in variant.weights.iter().enumerate() {
            inside(found, &format!("{place}{field}.weights[{number}].file"), &weight.file);
        }
    }
}

/// Checks that the path stays in the plan's directory.
fn inside(found: &mut Findings, place: &str, path: &str) {
    let climbs = path.split('/').any(|part| part == "..");
    found.require(!climbs, place, format!("{path:?} leads out of the plan's directory"));
    upward(found, place, path);
}

/// Checks that the path is relative and has `..` only at its start.
fn upward(found: &mut Findings, place: &str, path: &str) {
    let mut parts = path.split('/').skip_while(|part| matches!(*part, ".." | "."));
    found.require(!parts.any(|part| part == ".."), place, format!("{path:?} has .. after a name"));
    let drive = path.as_bytes().get(1) == Some(&b':');
    let absolute = path.starts_with('/') || drive;
    found.require(!absolute, place, format!("{path:?} is absolute; paths are relative to the plan"));
    let clean = !path.is_empty() && !path.contains(['\\', '\0']);
    found.require(clean, place, format!("{path:?} is not a path: give names separated by /"));
}

/// Checks that the plan has a record of the file.
fn recorded(plan: &Plan, found: &mut Findings, place: &str, path: &str) {
    let known = plan.files.iter().any(|file| file.path == path);
    found.require(known, place, format!("{path:?} is missing from files, so it cannot be verified"));
}

fn hash(found: &mut Findings, place: &str, text: &str) {
    let is_hash = text.len() == 64 && text.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
    found.require(is_hash, place, "a hash is 64 lower-case hexadecimal digits");
}
