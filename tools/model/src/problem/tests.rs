//! Compares costs of a real model with hand-computed numbers, and checks the findings for incomplete profiles.

use super::{CostSource, problem, row_batching};
use crate::{Analysis, LogitsMode, Scenario, analyse, avoid_faults};
use hpp_partition::{BlockPlacement, Budget, Mechanisms, Objective, Options, Planner, Problem, RowBatching, plan};
use hpp_schema::*;
use std::collections::BTreeMap;
use std::path::Path;

fn fixture(name: &str) -> Analysis {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name);
    analyse(&path, None, LogitsMode::Requested).unwrap()
}

fn llama() -> Analysis {
    fixture("genai/llama3-fp32-cpu")
}

fn scenario(prompt: u64, chunk: u64) -> Scenario {
    Scenario { batch: 1, context: 512, prompt, new_tokens: 40, prefill_chunk: chunk, threads: 1, divides_prompts: true }
}

fn machine() -> Machine {
    let text = include_str!("../../../../fixtures/machines/rtx4060-laptop.yaml");
    Machine::from_yaml(text).unwrap()
}

fn gpu_budget(vram: u64) -> Budget {
    Budget { vram: vec![vram], ..Budget::default() }
}

fn timing() -> Option<Fit> {
    Some(Fit { constant_ms: 1.0, linear_ms: 0.01, quadratic_ms: 0.0001, worst_relative_error: 0.0, r2: 1.0 })
}

/// A profile of this model in which every class takes the same time under both providers.
fn profile(analysis: &Analysis) -> Profile {
    let mut numbers = BTreeMap::new();
    let blocks: Vec<ProfiledBlock> = (analysis.segmentation.blocks.iter())
        .map(|block| {
            let next = numbers.len() as u32;
            let class = *numbers.entry(block.class).or_insert(next);
            ProfiledBlock { label: block.label.clone(), class, weight_bytes: ByteSize(1) }
        })
        .collect();
    let phase = || PhaseCosts { points: vec![], fit: timing() };
    let costs = |provider, launch| ProviderCosts {
        provider,
        run_length: 1,
        launch_ms: launch,
        decode: phase(),
        prefill: phase(),
        memory: None,
        failure: None,
    };
    let class = |class: u32| {
        let block = blocks.iter().find(|block| block.class == class).unwrap().label.clone();
        let layer = block.starts_with("layers");
        let providers = vec![
            costs(Provider::CPU, Some(if layer { 0.2 } else { 9.0 })),
            costs(Provider::CUDA, layer.then_some(0.3)),
        ];
        ClassCosts { class, block, providers }
    };
    Profile {
        hpp_profile: PROFILE_VERSION,
        classes: (0..numbers.len() as u32).map(class).collect(),
        model: ProfiledModel { name: "m".into(), hash: "0".repeat(64), weight_bytes: ByteSize(1), blocks },
        host: Host {
            cpu: "c".into(),
            cores: 1,
            memory: ByteSize(8 << 30),
            system: "s".into(),
            threads: 1,
            onnxruntime: "1".into(),
            hpp: "1".into(),
            devices: vec![],
        },
        date: "2025-01-01T00:00:00Z".into(),
        settings: ProfileSettings {
            provider_options: Default::default(),
            providers: vec![Provider::CPU, Provider::CUDA],
            contexts: vec![128],
            prefill_tokens: vec![128],
            quick: true,
            all_blocks: false,
            activations: Default::default(),
            decode_tokens: 1,
        },
        machine: MeasuredMachine {
            rates: Some(machine()),
            curves: vec![],
            tflops: None,
            contention: vec![],
            disk_contention: None,
            failures: vec![],
        },
        pass: None,
        corpus: None,
        sensitivity: vec![],
        hotness: vec![],
        others_cpu_share: None,
        notes: vec![],
    }
}

fn places(result: Result<Problem, Vec<Finding>>) -> Vec<String> {
    result.unwrap_err().into_iter().map(|finding| finding.place).collect()
}

/// Kernels of 16-bit and 4-bit weights give rows the bits of single ones, also from disk; those of float32 weights only in memory.
#[test]
fn rows_are_batched_where_they_have_the_bits_of_single_ones() {
    for (model, expected) in [
        ("genai/llama3-fp32-cpu", RowBatching::InMemory),
        ("genai/llama3-int4-cpu", RowBatching::Always),
        ("genai/llama3-fp16-webgpu", RowBatching::Always),
        ("genai/gpt-oss-int4-cpu", RowBatching::Never),
        ("torch/llama-dynamo-kv", RowBatching::Never),
    ] {
        assert_eq!(row_batching(&fixture(model)), expected, "{model}");
    }
}

#[test]
fn machine_files_give_roofline_costs() {
    let (analysis, mut machine) = (llama(), machine());
    machine.disk.as_mut().unwrap().contention = Some(DiskContention { compute: 1.4, read: 1.1 });
    let problem = problem(&analysis, scenario(100, 64), CostSource::Machine(&machine), gpu_budget(1 << 30)).unwrap();
    assert_eq!(problem.load.passes, [64, 36]);
    let layer = &problem.blocks[1];
    let weights: u64 = layer.weights.iter().map(|(_, bytes)| bytes).sum();
    // Two heads of 32 channels, keys and values, four bytes each; a generated token has a context of 100 + 40 / 2
    // tokens.
    let state = 120 * 2 * 32 * 2 * 4;
    // Rotary tables are read by the row, all other weights completely.
    assert!(layer.decode.bytes > state && layer.decode.bytes <= weights + state, "{:?}", layer.decode);
    let ms = layer.decode.bytes as f64 / 60e6;
    assert!(
        (problem.cpu[1].decode_ms - ms).abs() < 1e-12,
        "memory bandwidth is the limit: {}",
        problem.cpu[1].decode_ms
    );
    let ms = layer.decode.bytes as f64 / 205e6;
    assert!((problem.gpus[0].blocks[1].decode_ms - ms).abs() < 1e-12);
    assert_eq!((problem.cpu_launch_ms, problem.gpus[0].launch_ms, problem.gpus[0].latency_ms), (0.08, 0.08, 0.01));
    assert_eq!((problem.gpus[0].to_device, problem.disk_bytes_per_ms), (12.5e6, Some(4.8e6)));
    assert_eq!(problem.gpus[0].compute_contention, 1.26);
    assert_eq!((problem.disk_contention.compute, problem.disk_contention.transfer), (1.4, 1.1));
}

/// Two layers of four experts, one with three times the visits of the other.
#[test]
fn hit_rates_of_expert_caches_come_from_the_corpus_of_a_profile() {
    let analysis = llama();
    let mut profile = profile(&analysis);
    let hits = |profile: &Profile| {
        let (scenario, source) = (scenario(100, 512), CostSource::Profile(profile));
        problem(&analysis, scenario, source, Budget::default()).unwrap().expert_hits
    };
    assert!(hits(&profile).is_empty());
    let layer = |visits: u64, reuse_distances: [u64; 4]| ExpertStatistics {
        block: "layers.0".into(),
        top_k: 1,
        tokens: visits,
        counts: vec![visits / 4; 4],
        reuse_distances: reuse_distances.to_vec(),
        first_visits: visits - reuse_distances.iter().sum::<u64>(),
        oracle_hits: vec![0; 4],
    };
    profile.corpus = Some(CorpusStatistics {
        hash: String::new(),
        prompts_hash: None,
        prompts_done: 1,
        prompts_in_all: None,
        skipped: vec![],
        skipped_in_all: 0,
        statistics: Statistics {
            experts: vec![layer(40, [4, 8, 8, 16]), layer(120, [30, 0, 60, 18])],
            ..Statistics::default()
        },
    });
    let by_sequences = hits(&profile);
    let found = &by_sequences[0];
    // With room for 0, 1, 2, 3 and 4 of the four.
    let at = [0, 8, 16, 24, 32].map(|step| (found[step] * 160.0).round() as u64);
    assert_eq!((found.len(), at), (33, [0, 34, 42, 110, 144]));
    // With 1, 2, 4, ... 64 sequences in turn.
    assert_eq!(by_sequences.len(), 7);
    let of_two = profile.corpus.as_ref().unwrap().statistics.experts.iter();
    let of_two = of_two.map(|layer| layer.shared_lru_hit_rates(2, &[2]).unwrap()[0] * layer.visits() as f64 / 160.0);
    assert!((by_sequences[1][16] - of_two.sum::<f64>()).abs() < 1e-9, "{by_sequences:?}");
}

#[test]
fn the_embedding_reads_a_row_and_a_longer_context_costs_more() {
    let analysis = llama();
    let with_prompt =
        |prompt| problem(&analysis, scenario(prompt, 512), CostSource::Assumed, Budget::default()).unwrap();
    let (short, long) = (with_prompt(16), with_prompt(400));
    let table: u64 = short.blocks[0].weights.iter().map(|(_, bytes)| bytes).sum();
    assert!(short.blocks[0].decode.bytes < table / 100);
    assert!(short.cpu[1].decode_ms < long.cpu[1].decode_ms);
    assert!(short.cpu[1].prefill_ms[0] < long.cpu[1].prefill_ms[0]);
}

/// One token uses `top_k` experts; a long prompt uses all of them.
#[test]
fn a_mixture_of_experts_reads_only_the_experts_in_use() {
    let analysis = fixture("genai/gpt-oss-int4-cpu");
    let problem = problem(&analysis, scenario(256, 512), CostSource::Assumed, Budget::default()).unwrap();
    let layer = &problem.blocks[1];
    let node = analysis.graph.nodes.iter().find(|node| node.op_type == "QMoE").unwrap();
    let experts = |id: &hpp_graph::ValueId| analysis.graph.value(*id).shape.as_ref()?.first()?.as_fixed();
    let of_experts = node.inputs[2..].iter().flatten();
    let bytes: u64 = of_experts.clone().filter_map(|id| analysis.graph.weight(*id)).map(|weight| weight.bytes).sum();
    let all = of_experts.clone().find_map(experts).unwrap();
    let visited = u64::try_from(node.int("k").unwrap()).unwrap();
    assert!(visited < all && bytes > 0);
    let whole: u64 = layer.weights.iter().map(|(_, bytes)| bytes).sum();
    let rest = whole - bytes;
    let state = layer.kv_bytes;
    let decode = layer.decode.bytes;
    assert!(decode >= bytes * visited / all && decode <= bytes * visited / all + rest + state, "{decode} of {bytes}");
    assert!(layer.prefill.bytes >= bytes, "{} of {bytes}", layer.prefill.bytes);
}

#[test]
fn all_budgets_beyond_the_machine_are_reported_with_numbers() {
    let (analysis, machine) = (llama(), machine());
    let budget = Budget { vram: vec![9 << 30, 1 << 30], ram: Some(64 << 30), ..Budget::default() };
    let findings = problem(&analysis, scenario(100, 64), CostSource::Machine(&machine), budget).unwrap_err();
    let text: Vec<String> = findings.iter().map(ToString::to_string).collect();
    assert_eq!(text.len(), 3, "{text:#?}");
    assert!(text[0].contains("64 GiB") && text[0].contains("32 GiB"), "{}", text[0]);
    assert!(text[1].contains("2 GPUs") && text[1].contains("has 1"), "{}", text[1]);
    assert!(text[2].contains("9 GiB") && text[2].contains("8 GiB"), "{}", text[2]);
}

/// Time outside partitions is the measured one, or assumed if the profile lacks it.
#[test]
fn time_outside_partitions_is_the_measured_one() {
    let analysis = llama();
    let mut profile = profile(&analysis);
    let ms =
        |source: CostSource| problem(&analysis, scenario(100, 64), source, Budget::default()).unwrap().pass_overhead_ms;
    let (assumed, machine) = (ms(CostSource::Assumed), machine());
    // Eight states and 512 scores.
    assert!((0.004..0.012).contains(&assumed), "{assumed}");
    assert!((super::assumed_pass_overhead_ms(48.0, 32e3) - 0.092).abs() < 0.001);
    assert_eq!((ms(CostSource::Profile(&profile)), ms(CostSource::Machine(&machine))), (assumed, assumed));
    profile.pass = Some(PassCosts { timing: None, failure: Some("it hung".into()) });
    assert_eq!(ms(CostSource::Profile(&profile)), assumed);
    let timing = TimingStats { runs: 9, median_ms: 0.25, p10_ms: 0.2, p90_ms: 0.3 };
    profile.pass = Some(PassCosts { timing: Some(timing), failure: None });
    assert_eq!(ms(CostSource::Profile(&profile)), 0.25);
}

#[test]
fn a_profile_gives_each_block_the_costs_of_its_class() {
    let analysis = llama();
    let profile = profile(&analysis);
    let problem = problem(&analysis, scenario(100, 64), CostSource::Profile(&profile), gpu_budget(1 << 30)).unwrap();
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
    for block in 0..problem.blocks.len() {
        near(problem.cpu[block].decode_ms, 1.0 + 1.2 + 1.44);
        near(problem.cpu[block].prefill_ms[0], 1.0 + 0.64 + 0.4096);
        // 36 tokens after 64: the CPU computes the whole rectangle; CUDA skips half of the square, so the past weighs
        // twice as much.
        near(problem.cpu[block].prefill_ms[1], 1.0 + 0.36 + 0.1296 + 0.2304);
        near(problem.gpus[0].blocks[block].prefill_ms[1], 1.0 + 0.36 + 0.1296 + 2.0 * 0.2304);
    }
    assert_eq!(
        (problem.cpu_launch_ms, problem.gpus[0].launch_ms),
        (0.2, 0.3),
        "the launch time of layers is preferred"
    );
    assert_eq!(problem.gpus[0].to_device, 12.5e6);
}

#[test]
fn halves_of_a_layer_share_its_measured_times() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/genai/gpt-oss-int4-cpu");
    let whole = analyse(&path, None, LogitsMode::Requested).unwrap();
    let profile = profile(&whole);
    let apart = analyse(&path, None, LogitsMode::Requested).unwrap().with_experts_apart(1).unwrap();
    let planned = |analysis: &Analysis| {
        problem(analysis, scenario(100, 64), CostSource::Profile(&profile), gpu_budget(1 << 30)).unwrap()
    };
    let (whole, apart) = (planned(&whole), planned(&apart));
    let at = |label: &str| apart.blocks.iter().position(|block| block.label == label).unwrap();
    let (rest, experts) = (at("layers.0"), at("layers.0.experts"));
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
    near(apart.cpu[rest].decode_ms + apart.cpu[experts].decode_ms, whole.cpu[rest].decode_ms);
    near(apart.cpu[rest].prefill_ms[0] + apart.cpu[experts].prefill_ms[0], whole.cpu[rest].prefill_ms[0]);
    // A token is limited by the bytes of memory that it reads.
    let [of_rest, of_experts] = [rest, experts].map(|block| apart.blocks[block].decode.bytes as f64);
    near(apart.cpu[experts].decode_ms / apart.cpu[rest].decode_ms, of_experts / of_rest);
    assert!(apart.gpus[0].blocks[rest].decode_ms < whole.gpus[0].blocks[rest].decode_ms);
    // Other layers are whole.
    near(apart.cpu[experts + 1].decode_ms, whole.cpu[rest + 1].decode_ms);
}

#[test]
fn short_passes_cost_what_was_measured() {
    let analysis = llama();
    let mut profile = profile(&analysis);
    let point = |(tokens, ms)| CostPoint { tokens, ms: Some(ms), single: None, run: None, failure: None };
    for costs in profile.classes.iter_mut().flat_map(|class| &mut class.providers) {
        costs.prefill.points = [(2, 1.5), (8, 3.0), (64, 9.0)].map(point).into();
    }
    let problem = problem(&analysis, scenario(100, 64), CostSource::Profile(&profile), gpu_budget(1 << 30)).unwrap();
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-9, "{a} is not {b}");
    // After 120 tokens; each token reads the state, 0.01 ms for each of its tokens.
    let state = |tokens: f64| 0.01 * 120.0 * tokens;
    let costs = [&problem.cpu[1], &problem.gpus[0].blocks[1]];
    for cost in costs {
        near(cost.short_pass_ms[0], 1.5 + state(2.0));
        near(cost.short_pass_ms[1], 1.5 + 1.5 * 2.0 / 6.0 + state(4.0));
        near(cost.short_pass_ms[2], 3.0 + state(8.0));
        near(cost.short_pass_ms[3], 3.0 + 6.0 * 8.0 / 56.0 + state(16.0));
    }
}

#[test]
fn everything_missing_in_a_profile_is_reported_at_once() {
    let analysis = llama();
    let mut profile = profile(&analysis);
    let last = profile.classes.len() - 1;
    profile.classes[0].providers.retain(|costs| costs.provider == Provider::CPU);
    profile.classes[1].providers[0].prefill.fit = None;
    profile.classes.remove(last);
    profile.model.blocks[2].label = "layers.77".into();
    let found = places(problem(&analysis, scenario(100, 64), CostSource::Profile(&profile), gpu_budget(1 << 30)));
    for place in [
        "classes.0.cuda".to_owned(),
        "classes.1.cpu.prefill".to_owned(),
        format!("classes.{last}"),
        "model.blocks.layers.77".to_owned(),
        format!("model.blocks.{}", analysis.segmentation.blocks[2].label),
    ] {
        assert!(found.contains(&place), "{place} in {found:?}");
    }
    assert_eq!(found.len(), 5, "{found:?}");
}

#[test]
fn a_profile_that_was_interrupted_is_one_finding() {
    let analysis = llama();
    let mut profile = profile(&analysis);
    profile.classes[1].providers[0].prefill = PhaseCosts::default();
    profile.classes[1].providers[0].decode = PhaseCosts::default();
    profile.classes.truncate(2);
    let problem =
        |profile: &Profile, budget| problem(&analysis, scenario(100, 64), CostSource::Profile(profile), budget);
    let found = problem(&profile, Budget::default()).unwrap_err();
    assert!(found.len() == 1 && found[0].message.contains("hpp-profile --resume"), "{found:?}");
    // Resuming does not add a provider.
    profile.settings.providers = vec![Provider::CPU];
    profile.classes[0].providers.retain(|costs| costs.provider == Provider::CPU);
    assert!(places(problem(&profile, gpu_budget(1 << 30))).contains(&"classes.0.cuda".to_owned()));
}

#[test]
fn a_block_that_failed_on_a_gpu_costs_infinity_there() {
    let analysis = llama();
    let mut profile = profile(&analysis);
    profile.classes[1].providers[1].failure = Some("out of memory".into());
    let problem =
        super::problem(&analysis, scenario(100, 64), CostSource::Profile(&profile), gpu_budget(1 << 30)).unwrap();
    assert!(problem.gpus[0].blocks[1].decode_ms.is_infinite() && problem.cpu[1].decode_ms.is_finite());
    profile.classes[1].providers[0].failure = Some("crashed".into());
    profile.classes[1].providers[0].decode.fit = None;
    let found =
        super::problem(&analysis, scenario(100, 64), CostSource::Profile(&profile), gpu_budget(1 << 30)).unwrap_err();
    assert!(found[0].message.contains("crashed"), "{found:?}");
}

#[test]
fn a_profile_without_rates_is_enough_for_the_host() {
    let analysis = llama();
    let mut profile = profile(&analysis);
    profile.machine.rates = None;
    assert!(problem(&analysis, scenario(100, 64), CostSource::Profile(&profile), Budget::default()).is_ok());
    let found = places(problem(&analysis, scenario(100, 64), CostSource::Profile(&profile), gpu_budget(1 << 30)));
    assert_eq!(found, ["machine.rates"]);
    let batch = Scenario { batch: 2, ..scenario(100, 64) };
    assert_eq!(places(problem(&analysis, batch, CostSource::Profile(&profile), Budget::default())), ["--batch"]);
}

/// A decoder without a cache recomputes the whole sequence for each token.
#[test]
fn without_a_cache_a_token_costs_a_pass_over_the_sequence() {
    let analysis = fixture("torch/gpt-dynamo");
    let mut profile = profile(&analysis);
    for costs in profile.classes.iter_mut().flat_map(|class| &mut class.providers) {
        costs.decode.fit = None;
        costs.prefill.fit = Some(Fit { linear_ms: 0.5, ..timing().unwrap() });
    }
    let scenario = Scenario { context: analysis.context, ..scenario(12, 512) };
    let problem = problem(&analysis, scenario, CostSource::Profile(&profile), Budget::default()).unwrap();
    let tokens = scenario.decode_context() as f64;
    assert_eq!(problem.cpu[1].decode_ms, 1.0 + 0.5 * tokens + 0.0001 * tokens * tokens);
    // Counted work grows with the sequence too.
    let flops_with_new_tokens = |new_tokens| {
        let scenario = Scenario { new_tokens, ..scenario };
        super::problem(&analysis, scenario, CostSource::Assumed, Budget::default()).unwrap().blocks[1].decode.flops
    };
    assert!(
        flops_with_new_tokens(4) > flops_with_new_tokens(2),
        "{} {}",
        flops_with_new_tokens(4),
        flops_with_new_tokens(2)
    );
}

/// With `all_blocks`, a block's own entry takes precedence over its class.
#[test]
fn a_blocks_own_entry_takes_precedence() {
    let analysis = llama();
    let mut profile = profile(&analysis);
    profile.settings.all_blocks = true;
    let mut own = profile.classes[1].clone();
    own.block = analysis.segmentation.blocks[3].label.clone();
    own.providers[0].decode.fit =
        Some(Fit { constant_ms: 7.0, linear_ms: 0.0, quadratic_ms: 0.0, ..timing().unwrap() });
    profile.classes.push(own);
    let problem = problem(&analysis, scenario(100, 64), CostSource::Profile(&profile), Budget::default()).unwrap();
    assert_eq!(problem.cpu[3].decode_ms, 7.0);
    assert!(problem.cpu[2].decode_ms < 7.0);
}

/// WebGPU computes mixtures of 4-bit experts wrongly; other providers may compute the same blocks.
#[test]
fn no_plan_places_a_block_on_a_provider_that_computes_it_wrongly() {
    let analysis = fixture("genai/gpt-oss-int4-cpu");
    let on_gpu = |provider| {
        let mut machine = machine();
        machine.gpus[0].provider = provider;
        let source = CostSource::Machine(&machine);
        let mut problem = problem(&analysis, scenario(100, 512), source, gpu_budget(1 << 30)).unwrap();
        avoid_faults(&mut problem, &analysis, source);
        let (planner, objective, mechanisms) = (Planner::Exact, Objective::Mixed, Mechanisms::All);
        let options = Options { planner, objective, mechanisms, slots: None };
        let placements = plan(&problem, &options).unwrap().placements;
        let blocks = problem.blocks.iter().zip(placements);
        let on_gpu =
            |placement: BlockPlacement| [placement.prefill, placement.decode].iter().any(|place| place.gpu().is_some());
        blocks.filter(|(_, placement)| on_gpu(*placement)).map(|(block, _)| block.label.clone()).collect::<Vec<_>>()
    };
    let count_layers = |labels: Vec<String>| labels.iter().filter(|label| label.starts_with("layers")).count();
    assert_eq!(count_layers(on_gpu(Provider::CUDA)), 4, "a GPU is faster");
    assert_eq!(count_layers(on_gpu(Provider::WEBGPU)), 0);
}

/// 64 KiB in 0.025 ms, of which the bytes take 0.02 ms at the rate of large reads.
#[test]
fn the_cost_of_a_request_comes_from_the_smallest_reads_of_a_profile() {
    let mut profile = profile(&llama());
    let bytes = |gb_per_s: f64, ms: f64| (gb_per_s * 1e6 * ms) as u64;
    let point = |bytes: u64, ms: f64| BandwidthPoint { bytes, gb_per_s: bytes as f64 / ms / 1e6 };
    let rate = CostSource::Profile(&profile).disk_reads().unwrap().bytes_per_ms / 1e6;
    let of = |profile: &Profile| CostSource::Profile(profile).disk_reads().unwrap().request_ms;
    let assumed = of(&profile);
    let small = bytes(rate, 0.02);
    let points = vec![point(bytes(rate, 1.0), 1.0), point(small, 0.025)];
    profile.machine.curves.retain(|curve| curve.path != BandwidthPath::DiskRead);
    profile.machine.curves.push(BandwidthCurve { path: BandwidthPath::DiskRead, points });
    assert!((of(&profile) - 0.005).abs() < 1e-6 && assumed > 0.0, "{}", of(&profile));
    // Small reads that are faster than large ones cost nothing, not less.
    profile.machine.curves.last_mut().unwrap().points[1] = point(small, 0.01);
    assert_eq!(of(&profile), 0.0);
}

/// A corpus in which the neurons of the first layer were active as often.
fn corpus_of_neurons(tokens: u64, active: Vec<u64>) -> CorpusStatistics {
    let layer = NeuronStatistics { block: "layers.0".into(), tokens, active };
    CorpusStatistics {
        hash: String::new(),
        prompts_hash: None,
        prompts_done: 1,
        prompts_in_all: None,
        skipped: vec![],
        skipped_in_all: 0,
        statistics: Statistics { neurons: vec![layer], ..Statistics::default() },
    }
}

#[test]
fn active_neurons_are_those_of_the_corpus() {
    let mut profile = profile(&llama());
    let active = |profile: &Profile, block: &str| CostSource::Profile(profile).active_neurons(block);
    assert_eq!(active(&profile, "layers.0"), None);
    profile.corpus = Some(corpus_of_neurons(10, vec![1, 0, 4, 5]));
    assert_eq!((active(&profile, "layers.0"), active(&profile, "layers.1")), (Some(0.25), None));
}

/// An OPT in float16: a third of each layer's weights belong to neurons, and of these a tenth is active for a token.
#[test]
fn inactive_neurons_shorten_decoding_and_their_weights_are_not_widened_on_a_host_without_gpus() {
    let mut analysis = fixture("optimum/learned-opt-fp16");
    let mut profile = profile(&analysis);
    profile.settings.providers = vec![Provider::CPU];
    profile.corpus = Some(corpus_of_neurons(100, vec![10; 8]));
    let planned = |analysis: &Analysis, profile: &Profile, vram: &[u64]| {
        let budget = Budget { vram: vram.to_vec(), ..Budget::default() };
        problem(analysis, scenario(100, 512), CostSource::Profile(profile), budget).unwrap()
    };
    let plain = planned(&analysis, &profile, &[]);
    let plain_of_gpu = planned(&analysis, &profile, &[1 << 30]);
    analysis.compute_active_neurons().unwrap();
    let active = planned(&analysis, &profile, &[]);
    let layer = active.blocks.iter().position(|block| block.label == "layers.0").unwrap();
    let ratio = |at: usize, ms: fn(&hpp_partition::Cost) -> f64| ms(&active.cpu[at]) / ms(&plain.cpu[at]);
    let of_token = ratio(layer, |cost| cost.decode_ms);
    assert!((0.7..0.8).contains(&of_token), "{of_token}");
    let of_two_tokens = ratio(layer, |cost| cost.short_pass_ms[0]);
    assert!(of_two_tokens > of_token && of_two_tokens < 1.0, "{of_two_tokens}");
    let of_prompt = ratio(layer, |cost| cost.prefill_ms[0]);
    assert!((1.15..1.3).contains(&of_prompt), "{of_prompt}");
    assert_eq!(ratio(layer + 1, |cost| cost.decode_ms), 1.0, "a layer that the corpus does not know");
    let growth = |problem: &Problem| problem.budget.packing.growth_permille;
    // A third of the weights of four layers are not widened.
    assert!(growth(&plain) == 1000 && (700..800).contains(&growth(&active)), "{} {}", growth(&active), growth(&plain));
    // The second matrix is as large as the first, which is still widened.
    assert_eq!(active.blocks[layer].widened_bytes, plain.blocks[layer].widened_bytes);
    let of_gpu = planned(&analysis, &profile, &[1 << 30]);
    assert_eq!((&of_gpu.cpu, growth(&of_gpu)), (&plain_of_gpu.cpu, growth(&plain_of_gpu)), "a GPU may compute parts");
    profile.settings.providers.push(Provider::OPENVINO);
    assert_eq!(growth(&planned(&analysis, &profile, &[])), growth(&plain), "OpenVINO may compute parts");
    profile.settings.providers = vec![Provider::CPU];
    // Without states each token computes the whole sequence, in which nearly all neurons are active.
    analysis.states.clear();
    let of_token = planned(&analysis, &profile, &[]).cpu[layer].decode_ms;
    analysis.active_neurons = None;
    assert!(of_token > planned(&analysis, &profile, &[]).cpu[layer].decode_ms);
}
