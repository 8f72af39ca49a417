//! Models that run once: named tensors in and out.

mod support;

use hpp_engine::HostTensor;
use hpp_exec::tensors::{read_npz, write_npz};
use support::PlanDir;

fn inputs_of(plan: &PlanDir) -> Vec<(String, HostTensor)> {
    part(plan, "input/")
}

fn part(plan: &PlanDir, prefix: &str) -> Vec<(String, HostTensor)> {
    let all = read_npz(&plan.model.dir.join("reference.npz")).unwrap();
    all.into_iter().filter_map(|(name, t)| Some((name.strip_prefix(prefix)?.to_owned(), t))).collect()
}

#[test]
fn recorded_inputs_give_recorded_outputs() {
    for name in ["optimum/bert", "torch/gpt-torchscript-functions"] {
        let plan = PlanDir::new(name, 64);
        let (inputs, outputs) = (plan.file("in.npz"), plan.file("out.npz"));
        write_npz(&inputs, &inputs_of(&plan)).unwrap();
        let args = ["--inputs", inputs.to_str().unwrap(), "--outputs", outputs.to_str().unwrap(), "--json"];
        let same = ["--inputs", inputs.to_str().unwrap(), "--outputs", inputs.to_str().unwrap()];
        plan.run(&same).fails(1, &["--inputs and --outputs name the same file", "--outputs"]);
        let report = plan.run(&args).ok().json();
        let got = read_npz(&outputs).unwrap();
        let want = part(&plan, "output/");
        assert_eq!(report["outputs"].as_array().unwrap().len(), want.len(), "{name}");
        for (output, tensor) in want {
            let (_, ours) = got.iter().find(|(n, _)| *n == output).unwrap_or_else(|| panic!("{name}: no {output}"));
            assert_eq!(ours.shape, tensor.shape, "{name}: {output}");
            let pairs = ours.to_f32().unwrap().into_iter().zip(tensor.to_f32().unwrap());
            let worst = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst < 1e-4, "{name}: {output}: {worst}");
        }
    }
}

#[test]
fn inputs_larger_than_the_plan_s_memory_is_for_are_warned_of() {
    for (context, rows, is_larger) in [(64, 1, false), (2, 1, true), (64, 3, true)] {
        let mut plan = PlanDir::new("optimum/bert", context);
        plan.plan.budgets.ram = Some(hpp_schema::ByteSize(4 << 30));
        // The recorded inputs have two rows.
        plan.plan.budgets.batch = 2;
        plan.save();
        let repeated = |(name, mut tensor): (String, HostTensor)| {
            tensor.bytes = tensor.bytes.repeat(rows);
            tensor.shape[0] *= rows as u64;
            (name, tensor)
        };
        let inputs = plan.file("in.npz");
        write_npz(&inputs, &inputs_of(&plan).into_iter().map(repeated).collect::<Vec<_>>()).unwrap();
        let outputs = plan.file("out.npz");
        let done = plan.run(&["--inputs", inputs.to_str().unwrap(), "--outputs", outputs.to_str().unwrap()]).ok();
        assert_eq!(done.stderr.contains("of host memory are for"), is_larger, "{context}, {rows}: {}", done.stderr);
    }
}

/// A decoder without a cache keeps no state: it is run on tensors too, and gives the logits of every position.
#[test]
fn a_decoder_without_cache_is_run_on_tensors() {
    let plan = PlanDir::new("torch/gpt-dynamo", 64);
    let recorded = |name: &str| part(&plan, name).remove(0).1;
    let mut prompt = recorded("prompt_ids");
    prompt.shape.insert(0, 1);
    let (inputs, outputs) = (plan.file("in.npz"), plan.file("out.npz"));
    write_npz(&inputs, &[("input_ids".into(), prompt)]).unwrap();
    plan.run(&["--inputs", inputs.to_str().unwrap(), "--outputs", outputs.to_str().unwrap()]).ok();
    let (got, want) = (read_npz(&outputs).unwrap().remove(0).1, recorded("prefill_logits_all"));
    assert_eq!(got.shape[1..], [11, 512]);
    let pairs = got.to_f32().unwrap().into_iter().zip(want.to_f32().unwrap());
    assert!(pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) < 1e-4);
}

#[test]
fn tensors_that_do_not_fit_are_listed_with_the_expected_inputs() {
    let plan = PlanDir::new("optimum/bert", 64);
    let mut tensors = inputs_of(&plan);
    tensors.retain(|(name, _)| name != "attention_mask");
    tensors[0].1 = HostTensor::from_f32(&[3], &[0.0; 3]);
    tensors.push(("surprise".into(), HostTensor::from_f32(&[], &[1.0])));
    let inputs = plan.file("in.npz");
    write_npz(&inputs, &tensors).unwrap();
    let args = ["--inputs", inputs.to_str().unwrap(), "--outputs", "out.npz"];
    plan.run(&args).fails(
        1,
        &[
            "surprise: the model has no such input",
            "attention_mask: it is missing",
            "not int64",
            "the model takes:",
            "hint:",
        ],
    );
    plan.run(&["--inputs", "none.npz", "--outputs", "o.npz"]).fails(1, &["none.npz"]);
}

#[test]
fn files_that_are_no_archives_get_a_hint_at_both_ends() {
    let plan = PlanDir::new("optimum/bert", 64);
    let inputs = plan.file("in.npy");
    std::fs::write(&inputs, b"\x93NUMPY\x01\x00 and one array").unwrap();
    let run = |outputs: &str| plan.run(&["--inputs", inputs.to_str().unwrap(), "--outputs", outputs]);
    run("o.npz")
        .fails(1, &["in.npy as a NumPy archive", "hint: --inputs reads named arrays as numpy.savez writes them"]);
    run("o.npy").fails(1, &["--outputs writes an archive", "not o.npy", "hint: give it a name that ends in .npz"]);
}

#[test]
fn a_token_that_the_model_lacks_is_reported_with_its_input_and_the_range() {
    let plan = PlanDir::new("optimum/bert", 64);
    let mut tensors = inputs_of(&plan);
    let ids = &mut tensors.iter_mut().find(|(name, _)| name == "input_ids").unwrap().1;
    let last = ids.bytes.len() - 8;
    ids.bytes[last..].copy_from_slice(&99_999i64.to_le_bytes());
    let (inputs, outputs) = (plan.file("in.npz"), plan.file("out.npz"));
    write_npz(&inputs, &tensors).unwrap();
    let failed = plan.run(&["--inputs", inputs.to_str().unwrap(), "--outputs", outputs.to_str().unwrap()]);
    let failed = failed.fails(1, &["input \"input_ids\" does not fit: it holds 99999", "a table with rows 0 to 511"]);
    assert!(!failed.stderr.contains("Gather"), "{}", failed.stderr);
}

/// A run that fails says why once. Here any of the inputs may be the cause.
#[test]
fn a_token_that_the_model_lacks_is_reported_once() {
    let plan = PlanDir::new("optimum/bert", 64);
    let mut tensors = inputs_of(&plan);
    for (_, tensor) in &mut tensors {
        let count = tensor.shape.iter().product::<u64>() as usize;
        *tensor = HostTensor::from_i64(&tensor.shape, &vec![99_999; count]);
    }
    let (inputs, outputs) = (plan.file("in.npz"), plan.file("out.npz"));
    write_npz(&inputs, &tensors).unwrap();
    let failed = plan.run(&["--inputs", inputs.to_str().unwrap(), "--outputs", outputs.to_str().unwrap()]);
    let failed = failed.fails(1, &["failed while running", "idx=99999"]);
    assert_eq!(failed.stderr.matches("idx=99999").count(), 1, "{}", failed.stderr);
}

/// The model has 512 positions.
#[test]
fn inputs_longer_than_the_model_s_positions_get_a_hint() {
    let plan = PlanDir::new("optimum/bert", 512);
    let long = |(name, _)| (name, HostTensor::from_i64(&[1, 2000], &[1; 2000]));
    let (inputs, outputs) = (plan.file("in.npz"), plan.file("out.npz"));
    write_npz(&inputs, &inputs_of(&plan).into_iter().map(long).collect::<Vec<_>>()).unwrap();
    let failed = plan.run(&["--inputs", inputs.to_str().unwrap(), "--outputs", outputs.to_str().unwrap()]);
    failed.fails(1, &["512 by 2000", "hint: ", "inputs are longer than the model has positions"]);
}

#[test]
fn language_models_and_models_that_run_once_are_distinguished() {
    let once = PlanDir::new("optimum/bert", 64);
    once.run(&["--tokens", "1,2"]).fails(1, &["generates no text", "--inputs"]);
    let text = PlanDir::new("genai/llama3-fp32-cpu", 64);
    text.run(&["--inputs", "a.npz", "--outputs", "b.npz"]).fails(1, &["generates text", "hint:"]);
    // Without a prompt, too, the missing file comes first.
    text.run(&["--inputs", "a.npz"]).fails(1, &["a.npz"]);
    let nothing = text.file("nothing.npz");
    write_npz(&nothing, &[]).unwrap();
    text.run(&["--inputs", nothing.to_str().unwrap()])
        .fails(1, &["the prompt is empty", "it needs one beside --inputs"]);
}
