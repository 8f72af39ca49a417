//! Properties: symbolic and concrete inference agree, hostile nodes cause no panic, and a second pass changes nothing.

use super::Net;
use super::operators::OPERATORS;
use crate::infer::infer;
use crate::{Attribute, Constant, Graph, ValueId};
use hpp_schema::{DType, Dim, Symbols};
use proptest::prelude::*;

/// A random chain of shape arithmetic and tensor operations on one symbolic input.
fn program(net: &mut Net, dims: &str, steps: &[(u8, i64)]) {
    let x = net.input(DType::Float32, dims);
    let (mut tensor, mut sizes) = (x, net.node("Shape", &[x], &[]));
    for (op, number) in steps {
        let small = net.list(&[number.rem_euclid(3) + 1]);
        let axis = net.list(&[0]);
        match op % 10 {
            0 => sizes = net.node("Add", &[sizes, small], &[]),
            1 => sizes = net.node("Mul", &[sizes, small], &[]),
            2 => {
                let end = net.list(&[2]);
                sizes = net.node("Slice", &[sizes, axis, end], &[]);
            }
            3 => sizes = net.node("Concat", &[sizes, small], &[("axis", Attribute::Int(0))]),
            4 => {
                let one = net.weight(DType::Float32, &[1]);
                tensor = net.node("Expand", &[one, sizes], &[]);
            }
            5 => tensor = net.node("ConstantOfShape", &[sizes], &[]),
            6 => tensor = net.node("Concat", &[tensor, tensor], &[("axis", Attribute::Int(-1))]),
            7 => tensor = net.node("Unsqueeze", &[tensor, axis], &[]),
            8 => tensor = net.node("Transpose", &[tensor], &[]),
            _ => sizes = net.node("Shape", &[tensor], &[]),
        }
    }
}

/// Evaluated symbolic dimensions equal those of inference with concrete sizes.
fn agree(symbolic: &Graph, concrete: &Graph, symbols: &Symbols) -> Result<(), TestCaseError> {
    for id in symbolic.value_ids() {
        let (Some(with), Some(without)) = (&symbolic.value(id).shape, &concrete.value(id).shape) else { continue };
        prop_assert_eq!(with.len(), without.len());
        for (with, without) in with.iter().zip(without) {
            if let (Some(with), Some(without)) = (with.eval(symbols), without.as_fixed()) {
                prop_assert_eq!(with, without, "{}", symbolic.value(id).name);
            }
        }
    }
    Ok(())
}

fn number() -> impl Strategy<Value = i64> {
    prop_oneof![-3i64..6, Just(i64::MAX), Just(i64::MIN), any::<i64>()]
}

fn attribute() -> impl Strategy<Value = Attribute> {
    prop_oneof![
        number().prop_map(Attribute::Int),
        prop::collection::vec(number(), 0..6).prop_map(Attribute::Ints),
        "[a-c.,> -]{0,12}".prop_map(|text| Attribute::String(text.into_bytes())),
        prop::sample::select(vec!["SAME_UPPER", "VALID", "none", "a...b,b->a"])
            .prop_map(|text| Attribute::String(text.into())),
        prop::collection::vec(number(), 0..4).prop_map(|ints| Attribute::Tensor(Constant {
            dtype: DType::Int64,
            dims: vec![ints.len() as u64],
            ints: Some(ints),
            content: 0,
            is_zero: false,
            bytes: 8,
        })),
    ]
}

/// Attributes that rules read.
const ATTRIBUTES: &[&str] = &[
    "axis",
    "axes",
    "perm",
    "value",
    "to",
    "dtype",
    "keepdims",
    "split",
    "pads",
    "strides",
    "dilations",
    "kernel_shape",
    "auto_pad",
    "group",
    "equation",
    "num_heads",
    "kv_num_heads",
    "q_num_heads",
    "hidden_size",
    "N",
    "K",
    "bits",
    "k",
    "blocksize",
    "batch_dims",
    "start",
    "end",
    "starts",
    "ends",
    "shape",
    "output_shape",
    "num_scan_inputs",
    "ceil_mode",
    "qkv_hidden_sizes",
    "num_branches",
    "gather_axis",
    "transA",
    "transB",
    "state_window",
    "output_padding",
    "layout",
];

fn input() -> impl Strategy<Value = (u8, Vec<i64>)> {
    (any::<u8>(), prop::collection::vec(number(), 0..5))
}

fn feed(net: &mut Net, kind: u8, numbers: &[i64]) -> Option<ValueId> {
    let dtypes = [DType::Float32, DType::Int64, DType::Uint8, DType::Bool];
    match kind % 5 {
        0 => None,
        1 => Some(net.list(numbers)),
        2 => numbers.first().map(|n| net.scalar(*n)),
        _ => {
            let names = ["b", "s", "past + s", "?", "0", "1", "4*s + 3"];
            let dims: Vec<&str> = numbers.iter().map(|n| names[n.rem_euclid(7) as usize]).collect();
            Some(net.input(dtypes[usize::from(kind / 5) % 4], &dims.join(",")))
        }
    }
}

proptest! {
    #[test]
    fn symbols_and_numbers_agree(
        steps in prop::collection::vec((any::<u8>(), any::<i64>()), 1..14), b in 1u64..5, s in 2u64..7,
    ) {
        let mut symbolic = Net::new(18);
        program(&mut symbolic, "b, s, 4", &steps);
        symbolic.infer();
        let mut concrete = Net::new(18);
        program(&mut concrete, &format!("{b}, {s}, 4"), &steps);
        concrete.infer();
        let symbols = Symbols::from([("b".to_owned(), b), ("s".to_owned(), s)]);
        agree(&symbolic.graph, &concrete.graph, &symbols)?;
    }

    /// Any operator with any inputs and attributes: no panic, no absurd shape, and a second pass changes nothing.
    #[test]
    fn hostile_nodes_do_not_panic(
        op in prop::sample::select(OPERATORS),
        inputs in prop::collection::vec(input(), 0..7),
        attributes in prop::collection::vec((prop::sample::select(ATTRIBUTES), attribute()), 0..6),
        outputs in 0usize..5,
        opset in 1i64..28,
    ) {
        let mut net = Net::new(opset);
        let inputs: Vec<_> = inputs.iter().map(|(kind, numbers)| feed(&mut net, *kind, numbers)).collect();
        net.many(op, &inputs, &attributes, outputs);
        net.infer();
        for dim in net.graph.values.iter().filter_map(|v| v.shape.as_ref()).flatten() {
            prop_assert!(dim.as_fixed().is_some() || *dim == Dim::Unknown || !dim.symbols().is_empty());
        }
        let symbols = Symbols::from([("b".to_owned(), 2), ("s".to_owned(), u64::MAX), ("past".to_owned(), 0)]);
        for node in net.graph.node_ids() {
            crate::infer::flops(&net.graph, node, &symbols);
            crate::infer::bytes_read(&net.graph, node, &symbols);
        }
        let before: Vec<String> = net.graph.value_ids().map(|id| net.fact(id)).collect();
        infer(&mut net.graph);
        let after: Vec<String> = net.graph.value_ids().map(|id| net.fact(id)).collect();
        prop_assert_eq!(before, after);
    }
}
