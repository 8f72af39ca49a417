//! Unusual functions and merged decoders.

use crate::build::{self, body, int, model, node, open, opset, reference, refusal, tensor, untyped, value, with};
use hpp_graph::Graph;
use hpp_onnx::{Note, proto::*};
use hpp_schema::DType;

fn function(name: &str, inputs: &[&str], outputs: &[&str], nodes: Vec<NodeProto>) -> FunctionProto {
    FunctionProto {
        name: Some(name.into()),
        domain: Some("local".into()),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: outputs.iter().map(|s| s.to_string()).collect(),
        node: nodes,
        opset_import: vec![opset("", 21), opset("local", 1)],
        ..FunctionProto::default()
    }
}

fn call(name: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        domain: Some("local".into()),
        name: Some(format!("call {}", outputs[0])),
        ..node(name, inputs, outputs)
    }
}

fn calling(nodes: Vec<NodeProto>, functions: Vec<FunctionProto>) -> ModelProto {
    let graph = GraphProto {
        node: nodes,
        input: vec![value("x", DType::Float32, &["4"])],
        output: vec![untyped("y")],
        ..GraphProto::default()
    };
    let mut source = model(graph);
    source.opset_import.push(opset("local", 1));
    source.functions = functions;
    source
}

/// `op(inputs)->outputs` for each node.
fn lines(graph: &Graph) -> Vec<String> {
    let name = |v: &Option<hpp_graph::ValueId>| v.map_or("", |v| graph.value(v).name.as_str()).to_owned();
    let list = |vs: &[Option<hpp_graph::ValueId>]| vs.iter().map(name).collect::<Vec<_>>().join(",");
    graph.nodes.iter().map(|n| format!("{}({})->{}", n.op_type, list(&n.inputs), list(&n.outputs))).collect()
}

fn read(source: &ModelProto) -> (Vec<String>, Vec<Note>) {
    let model = open(source).unwrap_or_else(|e| panic!("{}", build::chain(&e)));
    (lines(&model.graph().unwrap()), model.notes().to_vec())
}

#[test]
fn nested_calls_do_not_collide() {
    let inner = function("Inner", &["a"], &["b"], vec![node("Exp", &["a"], &["t"]), node("Neg", &["t"], &["b"])]);
    let outer = function("Outer", &["a"], &["t"], vec![call("Inner", &["a"], &["u"]), call("Inner", &["u"], &["t"])]);
    let source = calling(vec![call("Outer", &["x"], &["t"]), call("Inner", &["t"], &["y"])], vec![inner, outer]);
    let (lines, notes) = read(&source);
    assert_eq!(
        lines,
        [
            "Exp(x)->call t/call call t/u/t",
            "Neg(call t/call call t/u/t)->call t/u",
            "Exp(call t/u)->call t/call t/t",
            "Neg(call t/call t/t)->t",
            "Exp(t)->call y/t",
            "Neg(call y/t)->y",
        ]
        .map(|line| line.replace("call call t/u", "call u"))
    );
    assert_eq!(notes, [Note::InlinedFunctions { functions: 2, calls: 4 }]);
}

#[test]
fn attributes_come_from_the_call_or_the_default() {
    let mut scaled = function(
        "Scaled",
        &["a"],
        &["b"],
        vec![with(with(node("Op", &["a"], &["b"]), reference("axis", "dim")), reference("keep", "keep"))],
    );
    scaled.attribute = vec!["keep".into()];
    scaled.attribute_proto = vec![int("dim", 7)];
    let source = calling(
        vec![with(call("Scaled", &["x"], &["t"]), int("dim", 3)), with(call("Scaled", &["t"], &["y"]), int("keep", 1))],
        vec![scaled],
    );
    let graph = open(&source).unwrap().graph().unwrap();
    assert_eq!((graph.nodes[0].int("axis"), graph.nodes[0].int("keep")), (Some(3), None));
    assert_eq!((graph.nodes[1].int("axis"), graph.nodes[1].int("keep")), (Some(7), Some(1)));
}

#[test]
fn omitted_outputs_and_outputs_that_are_inputs() {
    let f =
        function("F", &["a", "b"], &["a", "c", "d"], vec![node("Neg", &["a"], &["c"]), node("Abs", &["b"], &["d"])]);
    let source = calling(vec![call("F", &["x"], &["t", "", "u"]), node("Add", &["t", "u"], &["y"])], vec![f]);
    let (lines, _) = read(&source);
    assert_eq!(lines, ["Identity(x)->t", "Neg(x)->call t/c", "Abs()->u", "Add(t,u)->y"]);
}

#[test]
fn overloads_are_distinguished() {
    let one = FunctionProto {
        overload: Some("one".into()),
        ..function("F", &["a"], &["b"], vec![node("Neg", &["a"], &["b"])])
    };
    let two = FunctionProto {
        overload: Some("two".into()),
        ..function("F", &["a"], &["b"], vec![node("Abs", &["a"], &["b"])])
    };
    let pick = |overload: &str, input: &str, output: &str| NodeProto {
        overload: Some(overload.into()),
        ..call("F", &[input], &[output])
    };
    let (lines, _) = read(&calling(vec![pick("two", "x", "t"), pick("one", "t", "y")], vec![one.clone(), two]));
    assert_eq!(lines, ["Abs(x)->t", "Neg(t)->y"]);
    let twice = refusal(&calling(vec![pick("one", "x", "y")], vec![one.clone(), one]));
    assert!(twice.contains("defines the function local.F (one) twice"), "{twice}");
}

#[test]
fn bodies_inside_functions_see_the_right_names() {
    let inside = GraphProto {
        node: vec![node("Add", &["a", "t"], &["o"])],
        output: vec![untyped("o")],
        ..GraphProto::default()
    };
    let f = function(
        "F",
        &["a"],
        &["b"],
        vec![node("Exp", &["a"], &["t"]), with(node("Loop", &["", "", "a"], &["b"]), body("body", inside))],
    );
    let source = calling(vec![node("Neg", &["x"], &["t"]), call("F", &["t"], &["y"])], vec![f]);
    let graph = open(&source).unwrap().graph().unwrap();
    let names: Vec<&str> = graph.nodes[2].captures.iter().map(|v| graph.value(*v).name.as_str()).collect();
    assert_eq!(names, ["t", "call y/t"]);
}

#[test]
fn functions_of_another_operator_set_are_kept() {
    let mut old = function("Old", &["a"], &["b"], vec![node("Neg", &["a"], &["b"])]);
    old.opset_import = vec![opset("", 9)];
    let source = calling(vec![call("Old", &["x"], &["y"])], vec![old]);
    let model = open(&source).unwrap();
    assert_eq!(model.notes(), [Note::KeptFunction { function: "local.Old".into() }]);
    assert_eq!(model.proto().functions.len(), 1);
    assert_eq!(lines(&model.graph().unwrap()), ["Old(x)->y"]);
}

/// A runtime that has an operator of the name computes its own; another one computes the function.
#[test]
fn functions_with_the_name_of_an_operator_are_kept() {
    let fallback = || function("Fused", &["a"], &["b"], vec![node("Neg", &["a"], &["b"])]);
    let other = function("Other", &["a"], &["b"], vec![call("Fused", &["a"], &["c"]), node("Exp", &["c"], &["b"])]);
    let source = calling(vec![call("Other", &["x"], &["y"])], vec![fallback(), other]);
    let dir = tempfile::tempdir().unwrap();
    let path = build::save(dir.path(), &source);
    let lines_for = |has: &dyn Fn(&str, &str) -> bool| {
        let model = hpp_onnx::Model::open_for(&path, has).unwrap();
        let kept: Vec<String> = model.proto().functions.iter().map(|function| function.name().to_owned()).collect();
        (lines(&model.graph().unwrap()), kept)
    };
    let (kept, functions) = lines_for(&|domain, operator| (domain, operator) == ("local", "Fused"));
    assert!(kept[0].starts_with("Fused(x)->") && kept[1].starts_with("Exp("), "{kept:?}");
    assert_eq!(functions, ["Fused"]);
    let (inlined, functions) = lines_for(&|domain, _| domain == "com.microsoft");
    assert!(inlined[0].starts_with("Neg(x)->") && functions.is_empty(), "{inlined:?}");
}

/// ONNX Runtime crashes on some nodes whose last input is an empty name.
#[test]
fn inputs_that_a_call_omits_at_the_end_are_left_out() {
    let nodes = vec![node("LayerNormalization", &["a", "scale", "bias"], &["b"])];
    let norm = function("Norm", &["a", "scale", "bias"], &["b"], nodes);
    let source = calling(vec![call("Norm", &["x", "x"], &["y"])], vec![norm]);
    let (lines, _) = read(&source);
    assert_eq!(lines, ["LayerNormalization(x,x)->y"]);
}

#[test]
fn endless_functions_are_refused() {
    let recursive = function("F", &["a"], &["b"], vec![call("G", &["a"], &["b"])]);
    let back = function("G", &["a"], &["b"], vec![call("F", &["a"], &["b"])]);
    let error = refusal(&calling(vec![call("F", &["x"], &["y"])], vec![recursive, back]));
    assert!(error.contains("calls itself"), "{error}");

    // Each function calls the next ten times: ten to the twelfth nodes from a kilobyte.
    let laughs = (0..12).map(|i| {
        let calls = (0..10).map(|k| call(&format!("F{}", i + 1), &["a"], &[&format!("b{k}")]));
        function(&format!("F{i}"), &["a"], &["b0"], calls.collect())
    });
    let last = function("F12", &["a"], &["b"], vec![node("Neg", &["a"], &["b"])]);
    let error = refusal(&calling(vec![call("F0", &["x"], &["y"])], laughs.chain([last]).collect()));
    assert!(error.contains("more than"), "{error}");

    let stray = function("F", &["a"], &["b"], vec![node("Add", &["a", "x"], &["b"])]);
    let error = refusal(&calling(vec![call("F", &["x"], &["y"])], vec![stray]));
    assert!(error.contains("reads \"x\", which it does not define"), "{error}");
    let greedy = function("F", &["a"], &["b"], vec![node("Neg", &["a"], &["b"])]);
    let error = refusal(&calling(vec![call("F", &["x", "x"], &["y"])], vec![greedy]));
    assert!(error.contains("takes 1 inputs but is called with 2"), "{error}");
}

/// A small merged decoder: both branches hold a model, and `then` also reads the past.
fn merged(then: GraphProto, otherwise: GraphProto) -> ModelProto {
    let branches = with(node("If", &["use_past"], &["logits", "present"]), body("then_branch", then));
    model(GraphProto {
        node: vec![node("Neg", &["w"], &["shared"]), with(branches, body("else_branch", otherwise))],
        input: vec![
            value("ids", DType::Float32, &["4"]),
            value("past", DType::Float32, &["4"]),
            value("use_past", DType::Bool, &["1"]),
        ],
        output: vec![value("logits", DType::Float32, &["4"]), value("present", DType::Float32, &["4"])],
        initializer: vec![tensor("w", DType::Float32, &[4])],
        ..GraphProto::default()
    })
}

fn branch(nodes: Vec<NodeProto>, outputs: [&str; 2]) -> GraphProto {
    GraphProto { node: nodes, output: outputs.map(untyped).to_vec(), ..GraphProto::default() }
}

#[test]
fn the_branch_that_reads_state_becomes_the_graph() {
    let with_past = || {
        let mut graph =
            branch(vec![node("Add", &["ids", "past"], &["sum"]), node("Mul", &["sum", "own"], &["o"])], ["o", "past"]);
        graph.initializer.push(tensor("own", DType::Float32, &[4]));
        graph.value_info.push(value("sum", DType::Float32, &["4"]));
        graph
    };
    let without =
        || branch(vec![node("Add", &["ids", "shared"], &["sum"]), node("Abs", &["sum"], &["o"])], ["o", "sum"]);
    let expected = ["Neg(w)->shared", "Add(ids,past)->sum", "Mul(sum,own)->logits", "Identity(past)->present"];
    for (source, value) in [(merged(with_past(), without()), true), (merged(without(), with_past()), false)] {
        let model = open(&source).unwrap();
        let choice = model.branch().expect("a merged decoder");
        assert_eq!((choice.condition.as_str(), choice.value), ("use_past", value));
        let dropped: Vec<_> = choice.dropped_inputs.iter().map(|input| (&*input.name, input.dtype)).collect();
        assert_eq!(choice.state_inputs, ["past"]);
        assert_eq!(dropped, [("use_past", Some(DType::Bool))]);
        let graph = model.graph().unwrap();
        assert_eq!(lines(&graph), expected);
        assert!(graph.weight(graph.find("own").unwrap()).is_some());
        assert!(graph.value(graph.find("sum").unwrap()).dtype.is_some());
    }
}

#[test]
fn inner_names_are_renamed_on_collision() {
    // `shared` is an outer value that the branch shadows with one of its own.
    let with_past =
        branch(vec![node("Add", &["ids", "past"], &["shared"]), node("Neg", &["shared"], &["o"])], ["o", "shared"]);
    let without = branch(vec![node("Abs", &["ids"], &["o"])], ["o", "ids"]);
    let graph = open(&merged(with_past, without)).unwrap().graph().unwrap();
    assert_eq!(lines(&graph), ["Neg(w)->shared", "Add(ids,past)->present", "Neg(present)->logits"]);
}

#[test]
fn an_if_within_a_model_stays() {
    // Both branches read the same inputs, so the branch for generation is unknown.
    let make_branch = || branch(vec![node("Add", &["ids", "past"], &["o"])], ["o", "past"]);
    let two = branch(vec![node("Sub", &["ids", "past"], &["o"])], ["o", "past"]);
    let model = open(&merged(make_branch(), two)).unwrap();
    assert!(model.branch().is_none());
    assert!(model.graph().unwrap().nodes.iter().any(|n| n.op_type == "If"));

    // The condition is computed: a part of the model, not a choice of model.
    let mut computed = merged(make_branch(), branch(vec![node("Abs", &["ids"], &["o"])], ["o", "ids"]));
    let graph = computed.graph.get_or_insert_default();
    graph.node[1].input[0] = "decided".into();
    graph.node.insert(0, node("Not", &["use_past"], &["decided"]));
    assert!(open(&computed).unwrap().branch().is_none());
}

#[test]
fn nested_ifs_on_the_condition_take_the_same_branch() {
    let deep = |op: &str| branch(vec![node(op, &["ids", "past"], &["i"])], ["i", "past"]);
    let inner = with(node("If", &["use_past"], &["a", "b"]), body("then_branch", deep("Add")));
    let inner = with(inner, body("else_branch", deep("Sub")));
    let with_past = branch(vec![inner, node("Neg", &["a"], &["o"])], ["o", "b"]);
    let without = branch(vec![node("Abs", &["ids"], &["o"])], ["o", "ids"]);
    let graph = open(&merged(with_past, without)).unwrap().graph().unwrap();
    let ops: Vec<&str> = graph.nodes.iter().map(|n| n.op_type.as_str()).collect();
    assert_eq!(ops, ["Neg", "Add", "Identity", "Neg"]);
}
