//! `--draft`: a quantized draft of the model inside its plan.

use crate::support::{copied, fixture, split};
use hpp_schema::{FileRole, Plan, Residency};
use std::fs;
use std::path::Path;

const LEARNED: &str = "genai/learned-llama-fp32-cpu";

fn read(path: &Path) -> Plan {
    Plan::from_sealed_yaml(&fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn a_draft_is_a_plan_inside_the_plan_and_maps_the_models_own_embedding() {
    let dir = tempfile::tempdir().unwrap();
    let model = copied(LEARNED, dir.path());
    let (model, out) = (model.to_str().unwrap(), dir.path().join("plan"));
    let at = out.to_str().unwrap();
    // Files linked, packed, and left where they are; the model with one file of its own too.
    for (options, shared) in
        [(&[][..], ".."), (&["--pack"], ".."), (&["--in-place"], "../../genai/learned-llama-fp32-cpu")]
    {
        let arguments = [&[model, "--draft", "int4", "--ram", "90M", "--out", at], options].concat();
        let dry = split(&[&arguments[..], &["--dry-run", "--json"]].concat()).success();
        let said = split(&arguments).success().stderr;
        assert!(said.contains("draft: quantizing ") && said.contains("of host memory"), "{said}");
        let (plan, own) = (read(&out.join("plan.yaml")), read(&out.join("draft/plan.yaml")));
        let planned: Plan = serde_json::from_str(&dry.stdout).unwrap();
        assert_eq!(planned.to_yaml().unwrap(), plan.to_yaml().unwrap(), "{options:?}: a dry run gives the same plan");
        let draft = plan.draft.as_ref().unwrap();
        assert_eq!((draft.plan.as_str(), draft.bits), ("draft/plan.yaml", 4));
        // The model that it is compared with is the exported one.
        assert_eq!(
            (own.model.source.clone(), own.model.rounded_by.clone()),
            (format!("../{}", plan.model.source), vec![])
        );
        let [table, rest] = &own.partitions[..] else { panic!("{:?}", own.partitions) };
        assert_eq!((table.residency, table.weights_dir.as_str()), (Residency::Mapped, shared), "{options:?}");
        assert_eq!((rest.residency, rest.weights_dir.as_str()), (Residency::Resident, "."), "{options:?}");
        // The embedding, 1.5 MiB, is neither in its file nor in its memory.
        let weights = fs::metadata(out.join("draft/weights.bin")).unwrap().len();
        let workspace = own.partitions.iter().map(|partition| partition.bytes.workspace.0).max().unwrap();
        let without_table = weights + weights / 2 + draft.sequence_memory.0 + workspace;
        assert!(weights < 1 << 21 && draft.host_memory.0 < without_table, "{weights} bytes, {draft:?}");
        assert_eq!(draft.sequence_memory.0, own.states.iter().map(|state| state.bytes.0).sum::<u64>());
        assert_eq!((own.budgets.context, own.model.vocab_size), (plan.budgets.context, plan.model.vocab_size));
        for record in &own.files {
            let file = out.join("draft").join(&record.path);
            assert_eq!(fs::metadata(&file).unwrap().len(), record.bytes.0, "{options:?}: {}", file.display());
        }
        assert!(own.files.iter().any(|file| file.role == FileRole::Weights && file.path.starts_with("..")));
        fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn the_memory_of_a_draft_is_part_of_the_budget() {
    let model = fixture(LEARNED).to_str().unwrap().to_owned();
    let dry = |ram: &str, more: &[&str]| {
        split(&[&[&*model, "--context", "64", "--ram", ram, "--dry-run", "--json"], more].concat())
    };
    let refused = |more: &[&str]| {
        dry("66M", more).refusal(&["does not fit in host memory", "the smallest sufficient --ram"]).stderr
    };
    let smallest = |more: &[&str]| -> u64 {
        let said = refused(more);
        let bytes = said.rsplit_once(" bytes)").unwrap().0.rsplit_once('(').unwrap().1;
        bytes.parse().unwrap()
    };
    let draft = ["--draft", "int4"];
    let (alone, with) = (smallest(&[]), smallest(&draft));
    let plan: Plan = serde_json::from_str(&dry("120M", &draft).success().stdout).unwrap();
    let host_memory = plan.draft.unwrap().host_memory.0;
    assert_eq!(with - alone, host_memory);
    // The error names it apart from the process.
    let process = |said: &str| said.rsplit_once(", process ").unwrap().1.lines().next().unwrap().to_owned();
    let (without, said) = (refused(&[]), refused(&draft));
    assert_eq!(process(&said), process(&without));
    assert!(said.contains(", draft ") && !without.contains("draft"), "{said}{without}");
    // Rows of 192 weights are blocks of 64 too: 4.5 instead of 5 bits a weight.
    let large_blocks = [&draft[..], &["--draft-block", "64"]].concat();
    let plan: Plan = serde_json::from_str(&dry("120M", &large_blocks).success().stdout).unwrap();
    let saved = host_memory.saturating_sub(plan.draft.unwrap().host_memory.0);
    assert!(saved > host_memory / 100 && saved < host_memory / 6, "{saved} of {host_memory}");
    assert_eq!(plan.budgets.ram.unwrap().0, 120 << 20, "the budget is that of both");
    dry(&format!("{with}B"), &draft).success();
}

#[test]
fn models_that_cannot_draft_for_themselves_are_refused() {
    let path = |name: &str| fixture(name).to_str().unwrap().to_owned();
    let refused = |model: &str, more: &[&str], words: &[&str]| {
        split(&[&[&*path(model), "--draft", "int4", "--dry-run"], more].concat()).refusal(words);
    };
    refused(
        "genai/learned-llama-int4-cpu",
        &[],
        &["cannot make a draft", "the model is quantized already", "hint: omit --draft"],
    );
    refused("genai/llama3-fp32-cpu-noembed", &[], &["token ids only", "inputs_embeds"]);
    refused(LEARNED, &["--quantize", "int4"], &["more bits than the draft"]);
    refused(LEARNED, &["--batch", "2"], &["passes of one sequence"]);
    refused(LEARNED, &["--sweep-vram", "5M..6M:1M"], &["writes no plan"]);
    split(&[&path(LEARNED), "--quantize", "int8", "--draft", "int4", "--dry-run"]).success();
}

/// A killed run leaves its staging directory; the next one keeps the draft's weights and nothing else of it.
#[test]
fn a_draft_is_continued_and_other_files_are_written_anew() {
    let dir = tempfile::tempdir().unwrap();
    let model = copied(LEARNED, dir.path());
    let (model, out) = (model.to_str().unwrap(), dir.path().join("plan"));
    let arguments = [model, "--draft", "int4", "--out", out.to_str().unwrap()];
    split(&arguments).success();
    let want = fs::read(out.join("draft/weights.bin")).unwrap();
    let staging = dir.path().join(".plan.partial");
    fs::rename(&out, &staging).unwrap();
    let half = staging.join("draft/weights.bin.partial");
    fs::rename(staging.join("draft/weights.bin"), &half).unwrap();
    fs::File::options().write(true).open(&half).unwrap().set_len(want.len() as u64 / 2).unwrap();
    fs::write(staging.join("cpu_9.onnx"), b"of another plan").unwrap();
    fs::remove_file(staging.join("model.onnx.data")).unwrap();
    fs::write(staging.join("model.onnx.data"), b"of another model").unwrap();
    split(&arguments).success();
    assert!(!staging.exists() && !out.join("cpu_9.onnx").exists() && !out.join("draft/weights.bin.partial").exists());
    assert_eq!(fs::read(out.join("draft/weights.bin")).unwrap(), want);
    assert_eq!(fs::metadata(out.join("model.onnx.data")).unwrap().len(), 7_936_768);
}
