//! Plans that stream weights to a GPU, by hand and by the planner: written files and refusals.

use crate::support::{LLAMA, copied, fixture, machine, places, planned, split};
use hpp_onnx::proto::tensor_shape_proto::dimension::Value as Dimension;
use hpp_onnx::proto::type_proto::Value as TypeValue;
use hpp_onnx::{Model, Storage};
use hpp_schema::*;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Every model of this repository.
fn models() -> Vec<PathBuf> {
    let below = |dir: &Path| fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path()).collect::<Vec<_>>();
    let mut models: Vec<PathBuf> = below(&fixture("")).iter().flat_map(|exporter| below(exporter)).collect();
    models.sort();
    assert!(models.len() > 20, "only {}", models.len());
    models
}

/// Splits into `dir` and reads the plan.
#[track_caller]
fn written(model: &Path, out: &Path, more: &[&str]) -> Plan {
    let arguments = [&[model.to_str().unwrap(), "--out", out.to_str().unwrap()], more].concat();
    split(&arguments).success();
    let plan = Plan::from_yaml(&fs::read_to_string(out.join("plan.yaml")).unwrap()).unwrap();
    let errors: Vec<Finding> = plan.check().into_iter().filter(|found| found.severity == Severity::Error).collect();
    assert_eq!(errors, [], "{}", model.display());
    plan
}

/// The bytes of a weight input.
fn bytes(out: &Path, partition: &Partition, weight: &WeightInput) -> Vec<u8> {
    let file = fs::read(out.join(&partition.weights_dir).join(&weight.file)).unwrap();
    file[weight.offset as usize..][..weight.bytes().unwrap() as usize].to_vec()
}

/// The bytes of every weight of a model, by name.
fn of_model(path: &Path) -> BTreeMap<String, Vec<u8>> {
    let model = Model::open(path).unwrap();
    let files: Vec<Vec<u8>> = model.weights().files.iter().map(|file| fs::read(&file.path).unwrap()).collect();
    let tensors = model.graph_proto().initializer.iter().zip(&model.weights().storage);
    let read = |(tensor, storage): (&hpp_onnx::proto::TensorProto, &Storage)| {
        let bytes = match storage {
            Storage::Embedded => tensor.raw_data().to_vec(),
            Storage::External(span) => files[span.file][span.offset as usize..][..span.length as usize].to_vec(),
        };
        (tensor.name().to_owned(), bytes)
    };
    tensors.map(read).collect()
}

fn streamed(plan: &Plan) -> Vec<&Partition> {
    plan.partitions.iter().filter(|p| p.is_streamed()).collect()
}

fn ring(plan: &Plan, device: &str) -> Option<Ring> {
    plan.devices.iter().find(|other| other.name == device)?.ring
}

#[test]
fn every_model_streams_all_its_layers() {
    for model in models() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("plan");
        let plan = written(&model, &out, &["--stream", "all"]);
        let name = model.display();
        let layers: usize = streamed(&plan).iter().map(|p| p.blocks.iter().filter(|b| *b != "embedding").count()).sum();
        assert_eq!(layers, plan.model.layers as usize, "{name}");
        let slot: u64 = plan.slot("gpu0").iter().sum();
        assert_eq!(ring(&plan, "gpu0"), Some(Ring { slots: 3, slot_bytes: ByteSize(slot) }), "{name}");
        let weights = of_model(&model);
        for partition in streamed(&plan) {
            inputs_fit(&out, partition);
            for weight in &partition.weights {
                assert_eq!(bytes(&out, partition, weight), weights[&weight.name], "{name}: {}", weight.name);
                assert!(weight.file != "slots.bin" || weight.offset.is_multiple_of(16));
            }
            // A machine without the device uses a file with constants.
            let host_file = partition.host_file.as_deref().unwrap();
            let plain = Model::open(&out.join(host_file)).unwrap().graph().unwrap();
            assert_eq!(plain.inputs.len(), partition.inputs.len(), "{name}");
        }
        let files: BTreeSet<&str> = plan.files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(files.len(), plan.files.len());
        for entry in fs::read_dir(&out).unwrap().flatten() {
            let file = entry.file_name().into_string().unwrap();
            assert!(file == "plan.yaml" || files.contains(file.as_str()), "{name}: {file} is not recorded");
        }
    }
}

/// The file has the inputs that the plan lists, then the weights, in this order and of these types.
fn inputs_fit(out: &Path, partition: &Partition) {
    let file = Model::open(&out.join(&partition.file)).unwrap();
    let graph = file.graph().unwrap();
    let types = |ids: &[hpp_graph::ValueId]| ids.iter().map(|id| graph.value(*id).dtype).collect::<Vec<_>>();
    let inputs = partition.inputs.iter().map(|i| i.dtype).chain(partition.weights.iter().map(|w| w.dtype));
    assert_eq!(types(&graph.inputs), inputs.map(Some).collect::<Vec<_>>());
    let (_, weights) = graph.inputs.split_at(partition.inputs.len());
    for (id, weight) in weights.iter().zip(&partition.weights) {
        let shape: Vec<Dim> = weight.shape.iter().map(|size| Dim::fixed(*size)).collect();
        assert_eq!(graph.value(*id).shape, Some(shape), "{}", weight.name);
    }
    assert_eq!(graph.outputs.len(), partition.outputs.len());
}

#[test]
fn identical_layers_share_a_file() {
    let files = |model: &str| {
        let dir = tempfile::tempdir().unwrap();
        let plan = written(&fixture(model), &dir.path().join("plan"), &["--stream", "all"]);
        streamed(&plan).iter().map(|p| p.file.clone()).collect::<Vec<_>>().join(" ").replace(".onnx", "")
    };
    assert_eq!(files(LLAMA), "class_0 class_1 class_1 class_2");
    assert_eq!(files("genai/llama3-int4-cpu"), "class_0 class_1 class_1 class_2");
    assert_eq!(files("optimum/opt-with-past"), "class_0 class_1 class_1 class_1");
    assert_eq!(files("torch/gpt-dynamo"), "class_0 class_1 class_1 class_1");
    assert_eq!(files("optimum-legacy/gpt2-merged"), "class_0 class_0 class_0 class_0");
}

#[test]
fn a_packed_plan_that_streams_holds_the_same_weights() {
    for model in [LLAMA, "optimum/llama-with-past", "torch/gpt-dynamo", "genai/llama3-tied-int4-cpu-shared"] {
        let dir = tempfile::tempdir().unwrap();
        let (plain, packed) = (dir.path().join("plain"), dir.path().join("packed"));
        let a = written(&fixture(model), &plain, &["--stream", "all"]);
        let b = written(&fixture(model), &packed, &["--stream", "all", "--pack"]);
        assert!(b.files.iter().all(|file| !file.path.contains("..")), "{model}: it is self-contained");
        assert_eq!(streamed(&a).len(), streamed(&b).len());
        for (a, b) in streamed(&a).into_iter().zip(streamed(&b)) {
            assert_eq!((&a.file, a.weights.len()), (&b.file, b.weights.len()));
            for (mine, theirs) in a.weights.iter().zip(&b.weights) {
                assert_eq!(mine.name, theirs.name);
                assert_eq!(bytes(&plain, a, mine), bytes(&packed, b, theirs), "{model}: {}", mine.name);
            }
        }
    }
}

#[test]
fn the_same_input_gives_the_same_bytes() {
    for more in [&["--stream", "2"][..], &["--stream", "2", "--pack"], &["--gpu-layers", "2", "--movable"]] {
        let (dir, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let files = |dir: &Path| {
            let out = dir.join("plan");
            written(&fixture("torch/gpt-dynamo"), &out, more);
            let entries = fs::read_dir(&out).unwrap().flatten();
            let file = |entry: fs::DirEntry| (entry.file_name(), fs::read(entry.path()).unwrap());
            entries.filter(|entry| entry.file_name() != "plan.yaml").map(file).collect::<BTreeMap<_, _>>()
        };
        assert_eq!(files(dir.path()), files(other.path()), "{more:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("plan");
    let text = |more: &[&str]| {
        written(&fixture(LLAMA), &out, more);
        fs::read_to_string(out.join("plan.yaml")).unwrap()
    };
    assert_eq!(text(&["--stream", "2"]), text(&["--stream", "2", "--force"]));
}

/// `cpu gpu0~ gpu0`: where each partition computes while decoding, `~` where it is streamed.
fn kinds(plan: &Plan) -> String {
    let kind = |p: &Partition| match p.residency {
        Residency::Streamed => format!("{}~", p.device),
        _ => p.device.clone(),
    };
    plan.partitions.iter().map(kind).collect::<Vec<_>>().join(" ")
}

#[test]
fn layers_are_streamed_by_hand() {
    let two = planned(&["--stream", "2"]);
    assert_eq!(places(&two), "cpu:embedding+layers.0 gpu0:layers.1 cpu:layers.2 gpu0:layers.3 cpu:head");
    assert_eq!(kinds(&two), "cpu gpu0~ cpu gpu0~ cpu");
    let beside = planned(&["--gpu-layers", "1", "--stream", "1", "--slots", "2"]);
    assert_eq!(places(&beside), "cpu:embedding+layers.0+layers.1 gpu0:layers.2 gpu0:layers.3 cpu:head");
    assert_eq!(kinds(&beside), "cpu gpu0~ gpu0 cpu");
    assert_eq!(ring(&beside, "gpu0").unwrap().slots, 2);
    let all = planned(&["--stream", "99"]);
    assert_eq!(kinds(&all), "cpu gpu0~ gpu0~ gpu0~ gpu0~ cpu");
    assert_eq!(kinds(&planned(&["--stream", "all"])), kinds(&all));
    let named = planned(&["--assign", "layers.0-1=stream,head=gpu1:stream,layers.3=gpu"]);
    assert_eq!(kinds(&named), "cpu gpu0~ gpu0~ cpu gpu0 gpu1~");
    assert_eq!((ring(&named, "gpu0").unwrap().slots, ring(&named, "gpu1").unwrap().slots), (3, 3));
    let over = planned(&["--stream", "all", "--assign", "layers.1=cpu,embedding=stream"]);
    assert_eq!(kinds(&over), "gpu0~ gpu0~ cpu gpu0~ gpu0~ cpu");
    assert!(over.partitions.iter().all(|p| p.reason == "placed manually"));
}

#[test]
fn a_table_that_embedding_and_head_share_is_streamed_to_each() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture("genai/llama3-tied-int4-cpu-shared");
    let plan = written(&model, &dir.path().join("plan"), &["--assign", "all=stream"]);
    let largest = |p: &Partition| p.weights.iter().max_by_key(|weight| weight.bytes()).unwrap().clone();
    let (first, last) = (&plan.partitions[0], plan.partitions.last().unwrap());
    assert_eq!((&first.blocks[0], &last.blocks[0]), (&"embedding".to_owned(), &"head".to_owned()));
    // Each has it in its own shape, from the same bytes.
    let bytes = |weight: WeightInput| (weight.bytes(), weight.file, weight.offset);
    assert_ne!(largest(first).shape, largest(last).shape);
    assert_eq!(bytes(largest(first)), bytes(largest(last)));
    // Weights that several layers share stay constants.
    let caches = |p: &Partition| p.weights.iter().filter(|weight| weight.name.ends_with("_cache")).count();
    assert_eq!(plan.partitions.iter().map(caches).sum::<usize>(), 0);
    let one = written(&model, &dir.path().join("one"), &["--assign", "layers.1=stream", "--partitions", "3"]);
    assert!(streamed(&one)[0].weights.iter().all(|weight| !weight.name.ends_with("_cache")));
}

/// Streaming pays off for the prompt and not for tokens: the partition has two variants.
#[test]
fn a_partition_may_stream_for_the_prompt_only() {
    let dir = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(machine("rtx4060-laptop.yaml")).unwrap();
    let text = text.replace("tflops: 0.55", "tflops: 0.01").replace("launch_us: 80", "launch_us: 1");
    let text = text.replace("latency_us: 10", "latency_us: 0.1");
    let path = dir.path().join("machine.yaml");
    fs::write(&path, text).unwrap();
    let out = dir.path().join("plan");
    let more = ["--machine", path.to_str().unwrap(), "--vram", "3500K", "--margin", "1B", "--stream", "auto"];
    let plan = written(&fixture(LLAMA), &out, &more);
    let both: Vec<&Partition> = plan.partitions.iter().filter(|p| p.prefill.is_some()).collect();
    assert!(!both.is_empty() && both.len() < streamed(&plan).len(), "{}", kinds(&plan));
    for partition in both {
        let prefill = partition.prefill_variant();
        assert_eq!((partition.device.as_str(), prefill.device), ("cpu", "gpu0"));
        assert_eq!((partition.file.clone(), partition.weights.len()), (format!("{}.onnx", partition.name), 0));
        assert!(prefill.file.starts_with("class_") && prefill.residency == Residency::Streamed);
        assert_eq!((prefill.providers[0], &partition.providers[..]), (Provider::CUDA, &[Provider::CPU][..]));
        // Inputs of its own file are matched by name; those of the shared file are in the plan's order.
        let as_prompt = Partition { file: prefill.file.into(), weights: prefill.weights.to_vec(), ..partition.clone() };
        inputs_fit(&out, &as_prompt);
        let own = Model::open(&out.join(&partition.file)).unwrap().graph().unwrap();
        let names: BTreeSet<&str> = own.inputs.iter().map(|id| own.value(*id).name.as_str()).collect();
        assert_eq!(names, partition.inputs.iter().map(|input| input.name.as_str()).collect());
    }
}

/// A plan within the smallest budget that a refusal names predicts the speed of one sequence.
#[test]
fn the_smallest_budget_with_movable_layers_has_a_predicted_speed() {
    let model = fixture("genai/learned-llama-fp32-cpu");
    let run = |vram: &str| {
        let settings = ["--movable", "--stream", "2", "--gpu-layers", "2", "--dry-run", "--json", "--vram", vram];
        split(&[&[model.to_str().unwrap()], &settings[..]].concat())
    };
    let refusal = run("8M").refusal(&["the smallest sufficient --vram"]).stderr;
    let (_, bytes) = refusal.split_once("the smallest sufficient --vram is ").unwrap();
    let bytes = bytes.split_once('(').unwrap().1.split_once(" bytes").unwrap().0;
    let plan: Plan = serde_json::from_str(&run(bytes).success().stdout).unwrap();
    let throughput = plan.predictions.throughput.unwrap();
    assert!(throughput.sequences == 1 && throughput.tokens_per_second > 0.0, "{throughput:?}");
}

#[test]
fn movable_layers_are_partitions_with_weights_in_slots_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let whole = ["--gpu-layers", "99"];
    let plan = written(&fixture(LLAMA), &dir.path().join("plan"), &[&whole[..], &["--movable"]].concat());
    let blocks: Vec<String> = plan.partitions.iter().map(|p| p.blocks.join("+")).collect();
    assert_eq!(blocks, ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "head"]);
    assert_eq!(kinds(&plan), "gpu0 gpu0 gpu0 gpu0 gpu0 gpu0");
    assert!(plan.partitions.iter().all(|p| !p.weights.is_empty() && p.file.starts_with("class_")));
    assert_eq!(ring(&plan, "gpu0"), None);
    // Each costs a launch.
    let fused = planned(&whole);
    assert_eq!(fused.partitions.len(), 1);
    assert!(plan.predictions.decode_ms > 1.5 * fused.predictions.decode_ms);
    // Nothing changes on the host.
    assert_eq!(planned(&["--gpu-layers", "0", "--movable"]).partitions.len(), 1);
}

#[test]
fn more_layers_to_stream_than_there_are_is_noted_once() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("plan");
    let model = fixture(LLAMA);
    let more = ["--stream", "99", "--vram", "600K", "--margin", "1B", "--dry-run"];
    let refused = split(&[&[model.to_str().unwrap(), "--out", out.to_str().unwrap()], &more[..]].concat())
        .refusal(&["smallest sufficient --vram"]);
    assert_eq!(refused.stderr.matches("note: --stream 99: only").count(), 1, "{}", refused.stderr);
}

#[test]
fn a_budget_smaller_than_a_slot_is_refused_with_numbers() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("plan");
    let model = fixture(LLAMA);
    let run = |vram: &str, slots: &str| {
        let more = ["--stream", "all", "--vram", vram, "--margin", "1B", "--slots", slots, "--dry-run"];
        split(&[&[model.to_str().unwrap(), "--out", out.to_str().unwrap()], &more[..]].concat())
    };
    let mut enough = vec![];
    for slots in ["1", "3"] {
        let done = run("600K", slots).refusal(&["gpu0", "600 KiB", "slot ring", "smallest sufficient --vram"]);
        assert!(!done.stderr.contains("--slots"), "no number of them fits: {}", done.stderr);
        let bytes = done.stderr.split('(').next_back().and_then(|rest| rest.split(' ').next()).unwrap().to_owned();
        run(&bytes, slots).success();
        let less = bytes.parse::<u64>().unwrap() - 1;
        run(&less.to_string(), slots).refusal(&["smallest sufficient --vram"]);
        enough.push(bytes);
    }
    // Fewer slots are offered where they fit.
    run(&enough[0], "3").refusal(&["or give --slots 1, which fits"]);
    let less = enough[1].parse::<u64>().unwrap() - 1;
    run(&less.to_string(), "3").refusal(&["or give --slots 2, which fits"]);
    run(&less.to_string(), "2").success();
}

/// A slot has one piece per weight position: a block with one large weight and one with many small ones need more
/// together than either alone.
#[test]
fn different_blocks_share_slots_piece_by_piece() {
    let dir = tempfile::tempdir().unwrap();
    let model = fixture(LLAMA);
    let more = ["--assign", "layers.0-3=stream,head=stream", "--margin", "1B", "--slots", "3"];
    let roomy = written(&model, &dir.path().join("roomy"), &more);
    let slot = ring(&roomy, "gpu0").unwrap().slot_bytes.0;
    let largest = streamed(&roomy).iter().map(|p| p.weights.iter().filter_map(WeightInput::bytes).sum::<u64>()).max();
    assert!(largest.unwrap() < slot, "{largest:?} {slot}");
    let vram = smallest(&model, &more);
    let tight = written(&model, &dir.path().join("tight"), &[&["--vram", &vram], &more[..]].concat());
    assert_eq!((tight.check(), ring(&tight, "gpu0")), (vec![], ring(&roomy, "gpu0")));
}

/// The smallest sufficient budget that a refusal names, bytes.
fn smallest(model: &Path, more: &[&str]) -> String {
    let tiny = split(&[&[model.to_str().unwrap(), "--vram", "64K", "--dry-run"], more].concat()).refusal(&[]);
    tiny.stderr.split('(').next_back().and_then(|rest| rest.split(' ').next()).unwrap().to_owned()
}

/// A model whose embedding reads the length of the first layer's cache, with a mask whose length does not tell it: both blocks are one partition.
fn inseparable(dir: &Path) -> PathBuf {
    let model = copied("optimum-legacy/gpt2-merged", dir);
    let file = model.join("decoder_model_merged.onnx");
    let mut proto = Model::open(&file).unwrap().proto().clone();
    let inputs = &mut proto.graph.as_mut().unwrap().input;
    let mask = inputs.iter_mut().find(|input| input.name() == "attention_mask").unwrap();
    let Some(TypeValue::TensorType(tensor)) = mask.r#type.as_mut().unwrap().value.as_mut() else { panic!() };
    tensor.shape.as_mut().unwrap().dim[1].value = Some(Dimension::DimValue(16));
    hpp_onnx::write_model(&file, &proto).unwrap();
    model
}

/// The planner knows that a slot holds blocks that share a state together, and with `--movable` each block that stays on the GPU: the smallest
/// sufficient budget that it names is enough.
#[test]
fn slots_are_as_large_as_planned() {
    let dir = tempfile::tempdir().unwrap();
    let all = ["--assign", "all=stream", "--margin", "1B"];
    let movable = ["--assign", "layers.0=stream,layers.1-3=gpu,head=gpu", "--movable", "--margin", "1B"];
    let models = [(inseparable(dir.path()), &all[..]), (fixture(LLAMA), &movable[..])];
    for (at, (model, more)) in models.into_iter().enumerate() {
        for slots in ["1", "3"] {
            let more = [more, &["--slots", slots]].concat();
            let vram = smallest(&model, &more);
            let out = dir.path().join(format!("{at}-{slots}"));
            let plan = written(&model, &out, &[&more[..], &["--vram", &vram]].concat());
            let slot: u64 = plan.slot("gpu0").iter().sum();
            let ring = Ring { slots: slots.parse().unwrap(), slot_bytes: ByteSize(slot) };
            assert_eq!(self::ring(&plan, "gpu0"), Some(ring), "{}", model.display());
        }
    }
}

#[test]
fn invalid_streaming_settings_are_refused() {
    let model = fixture(LLAMA);
    let run = |more: &[&str]| split(&[&[model.to_str().unwrap(), "--out", "never-written"], more].concat());
    for (more, words) in [
        (&["--stream", "2", "--slots", "0"][..], &["ring of 0"][..]),
        (&["--stream", "0"], &["--stream 0"]),
        (&["--stream", "auto", "--gpu-layers", "2"], &["--stream auto", "--gpu-layers"]),
        (&["--stream", "2", "--gpu-layers", "auto", "--vram", "1G"], &["--gpu-layers auto"]),
        (&["--stream", "2", "--gpu-layers", "4"], &["there are none", "--gpu-layers"]),
        (&["--stream", "2", "--sweep-vram", "1M..2M"], &["manually", "--stream"]),
        (&["--assign", "head=gpu1:stream", "--vram", "1G"], &["gpu1", "has 1 GPU"]),
        (&["--stream", "auto", "--refine", "8"], &["--refine"]),
        (&["--assign", "layers.1=stream", "--mechanisms", "resident,cpu"], &["--assign", "omit --mechanisms"]),
        (&["--stream", "2", "--mechanisms", "resident,cpu,disk"], &["--stream", "omit --mechanisms"]),
        (&["--slots", "2", "--gpu-layers", "all"], &["nothing is streamed", "omit --slots"]),
    ] {
        run(more).refusal(words);
    }
    for usage in [&["--stream", "some"][..], &["--stream", "-1"], &["--assign", "head=cpu:stream"]] {
        assert_eq!(run(usage).status, Some(2), "{usage:?}");
    }
    assert!(!Path::new("never-written").exists());
}

/// With states in host memory the planner does not stream weights; the user may.
#[test]
fn assigned_blocks_are_streamed_with_states_in_host_memory_too() {
    let dir = tempfile::tempdir().unwrap();
    let options = ["--vram", "1G", "--kv", "cpu", "--assign", "layers.1=stream"];
    let plan = written(&fixture(LLAMA), &dir.path().join("plan"), &options);
    assert_eq!(streamed(&plan).iter().map(|partition| &*partition.blocks).collect::<Vec<_>>(), [["layers.1"]]);
}

/// Weight files on another file system are referred to by path; embedded weights would need a file beside the plan.
#[cfg(target_os = "linux")]
#[test]
fn a_plan_on_another_file_system() {
    use std::os::unix::fs::MetadataExt;
    let (here, shm) = (tempfile::tempdir().unwrap(), Path::new("/dev/shm"));
    let device = |path: &Path| fs::metadata(path).map(|about| about.dev()).ok();
    if device(shm).is_none() || device(shm) == device(here.path()) {
        return eprintln!("SKIPPED: a_plan_on_another_file_system: there is none");
    }
    let elsewhere = tempfile::tempdir_in(shm).unwrap();
    let out = elsewhere.path().join("plan");
    let model = copied(LLAMA, here.path());
    let dry = ["--stream", "all", "--dry-run", "--json"];
    let imagined = split(&[&[model.to_str().unwrap(), "--out", out.to_str().unwrap()], &dry[..]].concat()).success();
    let plan = written(&model, &out, &["--stream", "all"]);
    assert_eq!(serde_json::from_str::<Plan>(&imagined.stdout).unwrap(), plan);
    let partition = streamed(&plan)[0];
    assert!(partition.weights_dir.starts_with(".."), "{}", partition.weights_dir);
    let weights = of_model(&fixture(LLAMA));
    assert_eq!(bytes(&out, partition, &partition.weights[0]), weights[&partition.weights[0].name]);
    let dynamo = copied("torch/gpt-dynamo", here.path());
    let out = elsewhere.path().join("second");
    let arguments = [dynamo.to_str().unwrap(), "--stream", "all", "--out", out.to_str().unwrap()];
    split(&arguments).refusal(&["embedded weights", "--out on the model's file system", "--pack"]);
    assert!(!out.exists());
    written(&dynamo, &out, &["--stream", "all", "--pack"]);
}
