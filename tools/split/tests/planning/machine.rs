//! Plans for this machine and for presets.

#[cfg(unix)]
use crate::support::split_with;
use crate::support::{Done, LLAMA, fixture, machine, planned, split};
#[cfg(unix)]
use std::fs;
use std::path::Path;

fn run(more: &[&str]) -> Done {
    let model = fixture(LLAMA);
    split(&[&[model.to_str().unwrap(), "--dry-run"], more].concat())
}

#[test]
fn presets_are_found_by_name() {
    let file = machine("rtx4090-desktop.yaml");
    let by_file = planned(&["--machine", &file]);
    assert_eq!(planned(&["--machine", "rtx4090-desktop"]), by_file);
    assert_eq!(planned(&["--machine", "rtx4090"]), by_file);
    let list = split(&["--machine", "list"]).success().stdout;
    assert!(list.lines().count() == 4 && list.contains("rtx4060-laptop") && list.contains("24 GiB"), "{list}");
    split(&["--machine", "rtx4090"]).refusal(&["no model was given"]);
}

/// Prompt and answer that do not fit the context together are planned shorter.
#[test]
fn shortened_texts_are_noted() {
    let notes = |more: &[&str]| {
        let model = fixture("genai/learned-llama-int4-cpu");
        let stderr = split(&[&[model.to_str().unwrap(), "--vram", "0", "--ram", "1G", "--dry-run"], more].concat())
            .success()
            .stderr;
        stderr
            .lines()
            .filter(|line| line.contains("predictions assume"))
            .map(str::to_owned)
            .collect::<Vec<_>>()
            .join("|")
    };
    let both = "predictions assume a prompt of 384 tokens, not 500, and 128 new tokens, not 300: together, no more fit in 512 tokens of context";
    for (given, note) in [
        (&["--prompt-tokens", "500", "--new-tokens", "300"][..], both),
        (
            &["--new-tokens", "500"],
            "predictions assume 128 new tokens, not 500: with a prompt of 384 tokens, no more fit",
        ),
        (
            &["--prompt-tokens", "500"],
            "predictions assume a prompt of 384 tokens, not 500: with 128 new tokens, no more fit",
        ),
    ] {
        assert!(notes(given).contains(note), "{given:?}: {}", notes(given));
    }
    assert_eq!(notes(&["--prompt-tokens", "100", "--new-tokens", "300"]), "");
    assert_eq!(notes(&[]), "");
}

#[test]
fn default_budgets_are_noted_in_one_line() {
    let notes = |done: &Done| done.stderr.matches("planning for this machine: ").count();
    let here = Path::new("/proc/meminfo").exists();
    assert_eq!(notes(&run(&["--vram", "6M"]).success()), usize::from(here));
    assert_eq!(notes(&run(&["--vram", "6M", "--ram", "1G"]).success()), 0);
    assert_eq!(notes(&run(&["--machine", "mini-pc"]).success()), 0);
    // A model that fits gets no limit, so that its plan is the same on every machine.
    assert_eq!(planned(&["--vram", "0"]).budgets.ram, None);
    let most = run(&["--ram", "1000T"]).success();
    assert!(!here || most.stderr.contains("--ram 1000 TiB is more than this machine has free"), "{}", most.stderr);
}

/// One size for a machine of two GPUs plans for one of them, and says so.
#[test]
fn gpus_that_vram_leaves_out_are_noted() {
    let dir = tempfile::tempdir().unwrap();
    let preset = std::fs::read_to_string(machine("rtx4060-laptop.yaml")).unwrap();
    let (before, gpu) = preset.split_once("gpus:\n").unwrap();
    let (gpu, after) = gpu.split_once("disk:").unwrap();
    let two = dir.path().join("two.yaml");
    std::fs::write(&two, format!("{before}gpus:\n{gpu}{gpu}disk:{after}")).unwrap();
    let noted = |vram: &[&str]| {
        let done = run(&[&["--machine", two.to_str().unwrap()], vram].concat()).success();
        done.stderr.contains("note: --vram uses 1 of the machine's 2 GPUs; --vram SIZE,SIZE plans for all")
    };
    assert!(noted(&["--vram", "6M"]));
    assert!(!noted(&["--vram", "6MiB,6MiB"]) && !noted(&["--vram", "0"]) && !noted(&[]));
}

/// A script in place of hpp-exec that reports these devices.
#[cfg(unix)]
fn fake_exec(dir: &Path, text: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path = dir.join("hpp-exec");
    fs::write(&path, format!("#!/bin/sh\n[ \"$*\" = \"devices --json\" ] || exit 3\ncat <<'END'\n{text}\nEND\n"))
        .unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.to_str().unwrap().to_owned()
}

#[cfg(unix)]
#[test]
fn gpus_of_this_machine_are_the_default() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture(LLAMA);
    let with = |text: &str, more: &[&str]| {
        let exec = fake_exec(dir.path(), text);
        split_with(&[("HPP_EXEC", &exec)], &[&[model.to_str().unwrap(), "--dry-run", "--json"], more].concat())
    };
    let gpu = |free: &str| {
        format!(
            r#"{{"providers":[{{"name":"CUDA","usable":true,"devices":[{{"plan_name":"gpu0","description":"Card","memory_free":{free}}}]}}]}}"#
        )
    };
    let vram = |done: &Done| done.json()["budgets"]["vram"].clone();
    let found = with(&gpu("8589934592"), &[]).success();
    assert_eq!(vram(&found), serde_json::json!(["8 GiB"]));
    assert!(found.stderr.contains("8 GiB of Card"), "{}", found.stderr);
    assert_eq!(vram(&with(&gpu("8589934592"), &["--vram", "0"]).success()), serde_json::json!([]));
    let more = with(&gpu("8589934592"), &["--vram", "24G"]).success();
    assert!(more.stderr.contains("--vram 24 GiB is more than gpu0 (Card) has free: 8 GiB"), "{}", more.stderr);
    // Missing information gives no GPU.
    let unknown = with(&gpu("null"), &[]).success();
    assert!(vram(&unknown) == serde_json::json!([]) && unknown.stderr.contains("the free memory of Card is unknown"));
    assert_eq!(vram(&with("no JSON", &[]).success()), serde_json::json!([]));
}
