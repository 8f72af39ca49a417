//! Logits for requested positions: applied where it is provably correct, refused with a reason elsewhere.

use crate::build::{int, model, node, open, tensor, value, with};
use crate::models;
use hpp_graph::{Graph, infer};
use hpp_onnx::{HeadReason, Model, POSITIONS_DIM, gather_logit_positions, proto::*};
use hpp_schema::{DType, Dim};

const POSITIONS: &str = "hpp.logit_positions";

fn known(model: &Model) -> Graph {
    let mut graph = model.graph().unwrap();
    infer::infer(&mut graph);
    graph
}

fn rewrite(model: &Model) -> Result<(Model, Graph), HeadReason> {
    let graph = known(model);
    let logits = graph.find("logits").unwrap_or(graph.outputs[0]);
    let rewritten = gather_logit_positions(model, &graph, logits, POSITIONS)?;
    let graph = known(&rewritten);
    Ok((rewritten, graph))
}

#[test]
fn every_decoder_gets_a_positions_input() {
    let mut decoders = 0;
    for path in models::all() {
        let model = Model::open(&path).unwrap();
        let has_logits = model.graph().unwrap().find("logits").is_some();
        if !has_logits {
            continue;
        }
        match rewrite(&model) {
            Ok((_, graph)) => {
                decoders += 1;
                let logits = graph.value(graph.find("logits").unwrap());
                assert_eq!(logits.shape.as_ref().unwrap()[1], Dim::symbol(POSITIONS_DIM), "{}", path.display());
                let positions = graph.find(POSITIONS).unwrap();
                assert_eq!(graph.inputs.last(), Some(&positions));
                assert_eq!(graph.value(positions).consumers.len(), 1);
            }
            Err(reason) => {
                // Returns the last position; takes one token; packs all sequences into one row; classifies images.
                let expected = [
                    ("-hidden", HeadReason::OnePosition),
                    ("/t5/", HeadReason::OnePosition),
                    ("-paged", HeadReason::Rank(Some(2))),
                    ("/resnet", HeadReason::Rank(Some(2))),
                ];
                let known = expected.iter().any(|(name, why)| path.to_string_lossy().contains(name) && reason == *why);
                assert!(known, "{}: {reason}", path.display());
            }
        }
    }
    assert!(decoders > 8, "{decoders}");
}

fn decoder(tail: Vec<NodeProto>) -> ModelProto {
    let mut nodes = vec![node("Gather", &["table", "ids"], &["hidden"])];
    nodes.extend(tail);
    model(GraphProto {
        node: nodes,
        input: vec![value("ids", DType::Int64, &["batch", "sequence"])],
        output: vec![value("logits", DType::Float32, &["batch", "sequence", "16"])],
        initializer: vec![
            tensor("table", DType::Float32, &[16, 4]),
            tensor("head", DType::Float32, &[4, 16]),
            tensor("bias", DType::Float32, &[16]),
            tensor("cap", DType::Float32, &[]),
            tensor("per_position", DType::Float32, &[7, 16]),
        ],
        ..GraphProto::default()
    })
}

fn outcome(tail: Vec<NodeProto>) -> Result<Vec<String>, HeadReason> {
    let model = open(&decoder(tail)).unwrap();
    let (_, graph) = rewrite(&model)?;
    Ok(graph.nodes.iter().map(|n| n.op_type.clone()).collect())
}

#[test]
fn the_gather_precedes_the_projection() {
    let plain = outcome(vec![node("MatMul", &["hidden", "head"], &["logits"])]);
    assert_eq!(plain.unwrap(), ["Gather", "Gather", "MatMul"]);
    let tied = outcome(vec![
        with(node("Transpose", &["table"], &["t"]), int("unused", 0)),
        node("MatMul", &["hidden", "t"], &["raw"]),
        node("Add", &["bias", "raw"], &["biased"]),
        node("Div", &["biased", "cap"], &["small"]),
        node("Tanh", &["small"], &["bent"]),
        node("Mul", &["bent", "cap"], &["capped"]),
        node("Cast", &["capped"], &["logits"]),
    ]);
    assert_eq!(tied.unwrap()[1..4], ["Transpose", "Gather", "MatMul"]);
}

#[test]
fn other_readers_keep_every_position() {
    let mut source = decoder(vec![node("MatMul", &["hidden", "head"], &["logits"])]);
    source.graph.get_or_insert_default().output.push(value("hidden", DType::Float32, &["batch", "sequence", "4"]));
    let (_, graph) = rewrite(&open(&source).unwrap()).unwrap();
    let hidden = graph.value(graph.find("hidden").unwrap());
    assert_eq!(hidden.shape.as_ref().unwrap()[1], Dim::symbol("sequence"));
}

#[test]
fn unproved_cases_are_left_unchanged() {
    let mixing = outcome(vec![
        node("MatMul", &["hidden", "head"], &["raw"]),
        node("LayerNormalization", &["raw", "bias"], &["logits"]),
    ]);
    assert!(matches!(mixing, Err(HeadReason::Operator(_))), "{mixing:?}");
    let positional = outcome(vec![
        node("MatMul", &["hidden", "head"], &["raw"]),
        node("Add", &["raw", "per_position"], &["logits"]),
    ]);
    assert!(matches!(positional, Err(HeadReason::Operand(_))), "{positional:?}");
    let twice = outcome(vec![
        node("MatMul", &["hidden", "head"], &["raw"]),
        node("ReduceMax", &["raw"], &["m"]),
        node("Sub", &["raw", "bias"], &["logits"]),
    ]);
    assert!(matches!(&twice, Err(HeadReason::Shared(name)) if name == "raw"), "{twice:?}");
    let activations = outcome(vec![node("MatMul", &["hidden", "hidden"], &["logits"])]);
    assert!(matches!(activations, Err(HeadReason::Operand(_))), "{activations:?}");
    let softmax = outcome(vec![
        node("MatMul", &["hidden", "head"], &["raw"]),
        with(node("Softmax", &["raw"], &["logits"]), int("axis", 1)),
    ]);
    assert!(matches!(softmax, Err(HeadReason::Operator(_))), "{softmax:?}");

    let reshaped = |dims: &[&str]| {
        let mut source = decoder(vec![node("MatMul", &["hidden", "head"], &["logits"])]);
        source.graph.get_or_insert_default().output[0] = value("logits", DType::Float32, dims);
        let model = open(&source).unwrap();
        let graph = model.graph().unwrap();
        gather_logit_positions(&model, &graph, graph.find("logits").unwrap(), POSITIONS).map(drop)
    };
    assert_eq!(reshaped(&["tokens", "16"]), Err(HeadReason::Rank(Some(2))));
    assert_eq!(reshaped(&["sequence", "batch", "16"]), Err(HeadReason::Axis("batch".into())));
    assert_eq!(reshaped(&["batch", "1", "16"]), Err(HeadReason::OnePosition));
}
