//! Checks settings that do not depend on the model, and reports all errors at once.

use crate::cli::{BitsArg, DraftArg, LayerCount, MechanismsArg, ObjectiveArg, QuantizeArgs, SplitArgs};
use crate::input_errors::InputErrors;
use crate::{gpu_experts, split_mode};
use hpp_schema::names_a_file;

/// Largest batch: byte sizes of states and activations of a larger one may overflow 64 bits.
const MAX_BATCH: u64 = 1 << 20;

/// All errors in the settings.
pub fn check(args: &SplitArgs) -> InputErrors {
    let mut errors = InputErrors::default();
    sizes(args, &mut errors);
    streaming(args, &mut errors);
    targets(args, &mut errors);
    sweep(args, &mut errors);
    without_gpus(args, &mut errors);
    check_manual_placement(args, &mut errors);
    active_neurons(args, &mut errors);
    refining(args, &mut errors);
    throughput(args, &mut errors);
    quantizing(args, &mut errors);
    drafting(args, &mut errors);
    split_mode::check(args, &mut errors);
    gpu_experts::check(args, &mut errors);
    provider_options(args, &mut errors);
    errors
}

/// A plan may be moved to another machine or come from someone else: it records no options that name files.
fn provider_options(args: &SplitArgs, errors: &mut InputErrors) {
    for option in &args.planning.ep_option {
        errors.require(
            !names_a_file(&option.key, &option.value),
            format!("--ep-option {option}: a plan may not name files for a provider"),
            "give it to hpp-exec, which takes the same option",
        );
        let listed = args.planning.providers.contains(&option.provider) || args.planning.profile.is_some();
        errors.require(
            listed,
            format!("--ep-option {option}: no partition would list the provider"),
            "name it in --providers, such as --providers openvino,cpu",
        );
    }
}

fn sizes(args: &SplitArgs, errors: &mut InputErrors) {
    errors.require(args.batch > 0, "a batch of 0 sequences computes nothing", "give --batch 1 or more");
    let hint = "give --batch the number of sequences in one pass";
    errors.require(args.batch <= MAX_BATCH, "the largest batch is 1048576 sequences", hint);
    errors.require(
        args.batch == 1 || args.planning.objective != ObjectiveArg::Throughput,
        "--objective throughput chooses how many sequences share passes, and --batch fixes the rows of one tensor",
        "omit one of them",
    );
    errors.require(args.partitions > 0, "0 partitions hold nothing", "give --partitions 1 or more");
    errors.require(args.prompt_tokens > 0, "a prompt of 0 tokens predicts nothing", "give --prompt-tokens 1 or more");
    errors.require(args.new_tokens > 0, "an answer of 0 tokens takes no time", "give --new-tokens 1 or more");
    let vram = args.vram.len() == 1 || args.vram.iter().all(|size| size.0 > 0);
    let hint = "give a size for each GPU to use, or --vram 0 alone to compute on the CPU";
    errors.require(vram, "a VRAM budget of 0 holds nothing", hint);
    let ram = args.ram.is_none_or(|size| size.0 > 0);
    errors.require(ram, "a RAM budget of 0 holds nothing", "give --ram a size, or omit it");
}

fn streaming(args: &SplitArgs, errors: &mut InputErrors) {
    let planning = &args.planning;
    errors.require(
        planning.slots != Some(0),
        "a ring of 0 slots holds nothing",
        "give --slots 1 or more, or leave it out: hpp-split chooses",
    );
    errors.require(
        planning.slots.is_none() || args.may_stream(),
        "--slots applies to weights streamed to a GPU, and nothing is streamed",
        match args.gpu_layers {
            Some(LayerCount::Count(_)) => "omit --slots; or stream layers: with --stream N and fewer --gpu-layers",
            _ => "add --stream auto or --stream N, or omit --slots",
        },
    );
    errors.require(
        matches!(planning.mechanisms, None | Some(MechanismsArg::All)) || !args.names_streamed_blocks(),
        "--mechanisms resident,cpu or resident,cpu,disk plans without streaming weights to a GPU, and --stream or --assign streams some",
        "omit --mechanisms, or give --mechanisms all",
    );
    errors.require(
        planning.stream != Some(LayerCount::Count(0)),
        "--stream 0 streams nothing",
        "give --stream a number of layers, or omit it",
    );
    let (planned, counted) =
        (planning.stream == Some(LayerCount::Auto), matches!(planning.stream, Some(LayerCount::Count(_))));
    errors.require(
        !(planned && matches!(args.gpu_layers, Some(LayerCount::Count(_)))),
        "--stream auto lets the planner decide, and --gpu-layers with a number leaves it nothing to decide",
        "give --stream a number of layers, or omit --gpu-layers",
    );
    errors.require(
        !(counted && args.gpu_layers == Some(LayerCount::Auto)),
        "--gpu-layers auto lets the planner decide, and --stream with a number leaves it nothing to decide",
        "give --gpu-layers a number, or use --stream auto",
    );
}

fn targets(args: &SplitArgs, errors: &mut InputErrors) {
    let is_positive = |value: Option<f64>| value.is_none_or(|value| value.is_finite() && value > 0.0);
    errors.require(
        is_positive(args.planning.at_least),
        "--at-least is not a valid speed",
        "give tokens per second above 0",
    );
    let hint = "give milliseconds above 0";
    errors.require(is_positive(args.planning.first_token_within), "--first-token-within is not a valid time", hint);
    let has_target = args.planning.at_least.is_some() || args.planning.first_token_within.is_some();
    errors.require(
        args.planning.sweep_vram.is_none() || !has_target,
        "--sweep-vram shows the speed of each size, and --at-least and --first-token-within are for one plan",
        "omit one of them",
    );
}

fn sweep(args: &SplitArgs, errors: &mut InputErrors) {
    let is_unequal = args.vram.windows(2).any(|pair| pair[0] != pair[1]);
    errors.require(
        args.planning.sweep_vram.is_none() || !is_unequal,
        "--sweep-vram gives every GPU the same size, and --vram gives them different ones",
        "give --vram as many equal sizes as there are GPUs, or omit it",
    );
}

fn without_gpus(args: &SplitArgs, errors: &mut InputErrors) {
    let excluded = args.vram.len() == 1 && args.vram[0].0 == 0;
    let requested = matches!(args.gpu_layers, Some(LayerCount::Count(1..))) || args.planning.stream.is_some();
    errors.require(
        !(excluded && requested),
        "--vram 0 plans without a GPU, and --gpu-layers or --stream requests one",
        "give --vram the size of the GPU, or omit the other options",
    );
}

fn active_neurons(args: &SplitArgs, errors: &mut InputErrors) {
    errors.require(
        !args.active_neurons || args.quantize.quantize.is_none(),
        "--active-neurons leaves out rows of float32 and float16 matrices, and --quantize stores the numbers of several rows together",
        "omit one of them",
    );
    errors.require(
        !args.active_neurons || !args.in_place,
        "--active-neurons may need transposed copies of weights, and --in-place writes no weights",
        "omit one of them",
    );
}

fn check_manual_placement(args: &SplitArgs, errors: &mut InputErrors) {
    let is_manual = args.has_manual_placement();
    let planning = &args.planning;
    let what = "there is nothing to plan: blocks are placed manually";
    let hint = "omit either --gpu-layers, --stream and --assign, or --sweep-vram and --refine";
    errors.require(!is_manual || (planning.sweep_vram.is_none() && planning.refine.is_none()), what, hint);
}

fn throughput(args: &SplitArgs, errors: &mut InputErrors) {
    let planning = &args.planning;
    let is_for_one = planning.refine.is_some()
        || planning.sweep_vram.is_some()
        || planning.at_least.is_some()
        || planning.first_token_within.is_some();
    errors.require(
        planning.objective != ObjectiveArg::Throughput || !is_for_one,
        "--objective throughput plans for many sequences, and --refine, --sweep-vram, --at-least and --first-token-within \
         are for one",
        "omit one of them",
    );
}

fn refining(args: &SplitArgs, errors: &mut InputErrors) {
    let planning = &args.planning;
    if planning.refine.is_none() {
        return;
    }
    // The first token comes from the prompt's pass.
    errors.require(
        planning.refine.is_none_or(|tokens| tokens > 1),
        "--refine with fewer than 2 tokens measures no decoding",
        "give --refine 8 or more",
    );
    errors.require(
        planning.machine.is_none(),
        "--refine runs plans on this machine, and --machine plans for another one",
        "omit one of them",
    );
    let writes_nothing = args.dry_run || planning.sweep_vram.is_some();
    let hint = "omit --refine, or --dry-run and --sweep-vram";
    errors.require(
        !writes_nothing,
        "--refine writes plans and runs them, and --dry-run and --sweep-vram write nothing",
        hint,
    );
    errors.require(
        !planning.requests_streaming(),
        "--refine measures compute times, and the time of a streamed partition includes waits for its weights",
        "omit --refine, or --stream and --mechanisms all",
    );
}

/// Whether a profile is refused whatever it holds.
pub fn refuses_profile(args: &SplitArgs) -> bool {
    args.quantize.quantize.is_some() && args.planning.profile.is_some() && !args.quantize.is_auto()
}

fn quantizing(args: &SplitArgs, errors: &mut InputErrors) {
    errors.require(
        !refuses_profile(args),
        "--profile holds times of the model as it is, and --quantize changes them",
        "split without --profile first, then profile the whole.onnx of that plan and split it with the profile",
    );
    let options = &args.quantize;
    limits_of_auto(options, errors);
    let uncalibrated = match options.quantize {
        _ if options.draft == Some(DraftArg::Int4) => None,
        None => Some("--calibration is for weights that are quantized, and --quantize was not given"),
        Some(BitsArg::Int8) => Some("--calibration is for weights of 4 bits: with 8 there is little to gain"),
        Some(_) => None,
    };
    errors.require(
        options.calibration.is_none() || uncalibrated.is_none(),
        uncalibrated.unwrap_or_default(),
        "omit it, or give --quantize int4, --quantize auto or --draft int4",
    );
    errors.require(
        !options.is_auto() || (!options.quantize_asymmetric && options.quantize_block == 32),
        "--quantize auto chooses the blocks, and its formats are symmetric",
        "omit --quantize-block and --quantize-asymmetric, or give --quantize int4 or int8",
    );
}

/// `--bits-budget` and `--max-kl` mean something only where `--quantize auto` chooses.
fn limits_of_auto(options: &QuantizeArgs, errors: &mut InputErrors) {
    let why = match options.quantize {
        None => "which was not given".to_owned(),
        Some(bits) => format!("and --quantize {} chooses nothing", bits.name()),
    };
    if let Some(size) = options.bits_budget {
        let what = format!("--bits-budget {} limits what --quantize auto chooses, {why}", size.human());
        errors.require(options.is_auto(), what, "give --quantize auto, or omit --bits-budget");
    }
    let Some(most) = options.max_kl else { return };
    errors.require(
        most.is_finite() && most > 0.0,
        format!("--max-kl {most} is no divergence that rounded weights can stay below"),
        "give nats above 0, such as 0.02",
    );
    errors.require(
        options.is_auto(),
        format!("--max-kl {most} limits what --quantize auto chooses, {why}"),
        "give --quantize auto with --calibration PROMPTS.jsonl, or omit --max-kl",
    );
    // Without --quantize auto the error above names both.
    errors.require(
        options.calibration.is_some() || !options.is_auto(),
        format!("--max-kl {most} limits a divergence that is measured with --calibration, which was not given"),
        "give --quantize auto with --calibration PROMPTS.jsonl, or omit --max-kl",
    );
}

fn drafting(args: &SplitArgs, errors: &mut InputErrors) {
    let Some(draft) = args.quantize.draft else { return };
    let bits = args.quantize.options().map(|options| options.format.bits.count());
    errors.require(
        !args.quantize.is_auto() && bits.is_none_or(|bits| bits > draft.bits().count()),
        "--draft is for a model with more bits than the draft, and --quantize leaves no more",
        "omit --quantize, or combine --quantize int8 with --draft int4",
    );
    errors.require(
        args.planning.sweep_vram.is_none(),
        "--sweep-vram writes no plan, so it has no draft",
        "omit --draft or --sweep-vram",
    );
    errors.require(args.batch == 1, "a draft is for passes of one sequence", "omit --draft, or --batch");
}
