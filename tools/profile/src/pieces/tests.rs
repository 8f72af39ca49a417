//! Every block of every model here can be measured alone, with inputs that fit it.

use super::*;
use crate::derive::PHASES;
use crate::sample;
use hpp_partition::Phase;
use hpp_schema::probe::{Case, Fill};
use hpp_schema::{DType, ModelKind};

const REPEATS: Repeats = Repeats { warmup: 1, min: 2, max: 3, budget_ms: 4.0 };

fn models() -> Vec<String> {
    let root = sample::fixture("");
    let below = |dir: &Path| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path());
        let mut dirs: Vec<PathBuf> = entries.filter(|path| path.is_dir()).collect();
        dirs.sort();
        dirs
    };
    let models = below(&root).into_iter().flat_map(|exporter| below(&exporter));
    models.map(|path| path.strip_prefix(&root).unwrap().to_string_lossy().into_owned()).collect()
}

fn case(model: &str, blocks: Range<usize>, phase: Phase, tokens: u64) -> Result<Case, String> {
    let analysis = sample::analysis(model);
    let dir = tempfile::tempdir().unwrap();
    let pieces = Pieces::open(&analysis, dir.path(), 64).unwrap();
    let piece = pieces.piece(blocks).unwrap();
    pieces.case(&piece, phase, tokens, REPEATS, 5)
}

fn feed<'c>(case: &'c Case, name: &str) -> &'c hpp_schema::probe::Feed {
    let names: Vec<&str> = case.inputs.iter().map(|feed| feed.name.as_str()).collect();
    case.inputs.iter().find(|feed| feed.name == name).unwrap_or_else(|| panic!("{name} is not in {names:?}"))
}

#[test]
fn every_block_of_every_model_has_inputs() {
    let mut without = Vec::new();
    for model in models() {
        let analysis = sample::analysis(&model);
        let dir = tempfile::tempdir().unwrap();
        let pieces = Pieces::open(&analysis, dir.path(), 16).unwrap();
        for block in 0..analysis.segmentation.blocks.len() {
            let piece = pieces
                .piece(block..block + 1)
                .unwrap_or_else(|e| panic!("{model} {block}: {}", hpp_schema::error_line(&e)));
            for phase in PHASES {
                if let Err(why) = pieces.case(&piece, phase, 16, REPEATS, 0) {
                    without.push(format!("{model} {}: {why}", analysis.segmentation.blocks[block].label));
                }
            }
        }
    }
    // The caller brings a paged cache, and nothing says how many pages it has.
    without.retain(|line| !line.contains("paged"));
    assert!(without.is_empty(), "{}", without.join("\n"));
}

#[test]
fn a_decoded_token_meets_a_buffer_that_holds_the_context() {
    let case = case("genai/llama3-fp32-cpu", 1..2, Phase::Decode, 40).unwrap();
    assert_eq!(feed(&case, "attention_mask").shape, [1, 40]);
    assert_eq!(feed(&case, "attention_mask").fill, Fill::Ones);
    let past = feed(&case, "past_key_values.0.key");
    assert_eq!((past.shape[0], past.shape[2]), (1, 64), "a buffer as long as the longest case needs");
    assert!(matches!(past.fill, Fill::PartlyNormal { axis: 2, filled: 39, .. }), "{:?}", past.fill);
    assert!(case.carried.iter().all(|carried| carried.in_place) && case.carried.len() == 2);
    assert!(case.outputs.iter().all(|fact| !fact.name.starts_with("present")), "presents share their past's buffer");
    assert!(case.outputs.iter().all(|fact| fact.shape[..2] == [1, 1]), "{:?}", case.outputs);
    assert_eq!((case.evict_bytes, case.warmup, case.min_runs, case.max_runs), (5, 1, 2, 3));
}

#[test]
fn a_state_that_is_appended_to_grows() {
    let decode = case("optimum/llama-with-past", 1..2, Phase::Decode, 40).unwrap();
    let (past, present) = (&decode.carried[0].past, &decode.carried[0].present);
    let length = |case: &Case| {
        let fact = case.outputs.iter().find(|fact| fact.name == *present).unwrap();
        (feed(case, past).shape[2], fact.shape[2])
    };
    assert_eq!(length(&decode), (39, 40));
    assert!(!decode.carried[0].in_place);
    let prefill = case("optimum/llama-with-past", 1..2, Phase::Prefill, 40).unwrap();
    assert_eq!(length(&prefill), (0, 40));
}

#[test]
fn a_pass_computes_the_scores_of_its_last_token() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let head = analysis.segmentation.blocks.len() - 1;
    let case = case("genai/llama3-fp32-cpu", head..head + 1, Phase::Prefill, 24).unwrap();
    assert_eq!(feed(&case, hpp_model::LOGIT_POSITIONS).fill, Fill::Values { values: vec![23] });
    let logits = case.outputs.iter().find(|fact| fact.name == "logits").unwrap();
    assert_eq!(logits.shape, [1, 1, analysis.vocab_size.unwrap()]);
    assert!(case.inputs.iter().any(|feed| feed.dtype.is_float() && feed.shape[..2] == [1, 24]), "{:?}", case.inputs);
}

#[test]
fn tokens_stay_in_the_vocabulary_and_positions_go_on() {
    let whole = case("torch/gpt-dynamo", 0..1, Phase::Decode, 9).unwrap();
    let ids = whole.inputs.iter().find(|feed| matches!(feed.fill, Fill::Integers { .. })).unwrap();
    let vocabulary = sample::analysis("torch/gpt-dynamo").vocab_size.unwrap();
    assert!(matches!(ids.fill, Fill::Integers { below, .. } if below == vocabulary));
    let decode = case("optimum/llama-with-past", 1..2, Phase::Decode, 9).unwrap();
    assert!(decode.inputs.iter().any(|feed| feed.fill == Fill::Positions { start: 8 }), "{:?}", decode.inputs);
}

#[test]
fn a_window_keeps_its_size() {
    let analysis = sample::analysis("genai/gpt-oss-int4-cpu");
    let windows: Vec<u64> = analysis
        .states
        .iter()
        .filter_map(|s| match s.state.update {
            hpp_schema::StateUpdate::InPlace { capacity, .. } if capacity != analysis.context => Some(capacity),
            _ => None,
        })
        .collect();
    let Some(window) = windows.first() else { panic!("gpt-oss has sliding windows") };
    let cases: Vec<Case> = (1..analysis.segmentation.blocks.len() - 1)
        .map(|block| case("genai/gpt-oss-int4-cpu", block..block + 1, Phase::Decode, 60).unwrap())
        .collect();
    let lengths: Vec<u64> = cases.iter().map(|case| feed(case, &case.carried[0].past).shape[2]).collect();
    assert!(lengths.contains(window) && lengths.contains(&64), "{lengths:?}");
}

#[test]
fn a_model_without_a_cache_computes_everything_again() {
    let analysis = sample::analysis("torch/gpt-dynamo");
    assert_eq!(analysis.kind, ModelKind::DecoderWithoutCache);
    let case = case("torch/gpt-dynamo", 0..1, Phase::Decode, 12).unwrap();
    let ids = case.inputs.iter().find(|feed| matches!(feed.fill, Fill::Integers { .. })).unwrap();
    assert_eq!(ids.shape, [1, 12]);
}

#[test]
fn weights_inside_the_model_are_written_once() {
    let analysis = sample::analysis("optimum/llama-with-past");
    let dir = tempfile::tempdir().unwrap();
    let pieces = Pieces::open(&analysis, dir.path(), 16).unwrap();
    assert_eq!(pieces.weights_dir(), dir.path());
    let bytes = std::fs::metadata(dir.path().join(WEIGHTS_FILE)).unwrap().len();
    let piece = pieces.piece(1..2).unwrap();
    assert!(std::fs::metadata(&piece.file).unwrap().len() < bytes / 4, "a piece is graph and little else");
}

#[test]
fn half_precision_is_fed_half_precision() {
    let case = case("optimum/llama-with-past-fp16", 2..3, Phase::Prefill, 8).unwrap();
    let half: Vec<_> = case.inputs.iter().filter(|feed| feed.dtype == DType::Float16).collect();
    assert!(half.len() == 2 && half.iter().all(|feed| matches!(feed.fill, Fill::Normal { .. })), "{:?}", case.inputs);
    assert!(case.outputs.iter().filter(|fact| fact.dtype == DType::Float16).count() >= 2);
}
