//! Both operators against sums of products, for few and many tokens.

use super::element::Element;
use super::gate::GateProduct;
use super::rows::RowsProduct;
use half::f16;

/// Numbers in -1 to 1; the same seed gives the same.
fn numbers<T: Element>(count: usize, seed: u64) -> Vec<T> {
    let mut state = seed | 1;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        T::narrow((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// Numbers of which about a share of one in `every` is not 0.
fn sparse<T: Element>(count: usize, every: usize, seed: u64) -> Vec<T> {
    let keep = |(at, number): (usize, T)| if (at * 7 + at / 5).is_multiple_of(every) { number } else { T::narrow(0.0) };
    numbers::<T>(count, seed).into_iter().enumerate().map(keep).collect()
}

fn in_turn(tasks: usize, task: &(dyn Fn(usize) + Send + Sync)) -> ort::Result<()> {
    (0..tasks).rev().for_each(task);
    Ok(())
}

/// The number of tokens, of neurons, the width, and how many of the activations are not 0: one in so many.
const SHAPES: [(usize, usize, usize, usize); 8] = [
    (1, 64, 16, 3),
    (1, 131, 700, 5),
    (3, 130, 513, 4),
    (8, 70, 33, 2),
    (9, 300, 520, 6),
    (20, 257, 40, 1),
    (9, 1100, 40, 3),
    (2, 5, 3, 1000),
];

fn close<T: Element>(found: &[T], wanted: &[f64], tolerance: f64) {
    let scale = wanted.iter().fold(1e-3f64, |most, number| most.max(number.abs()));
    for (found, wanted) in T::wide(found).iter().zip(wanted) {
        assert!((f64::from(*found) - wanted).abs() <= tolerance * scale, "{found} instead of {wanted}");
    }
}

fn rows_are_products<T: Element>(tolerance: f64) {
    for (tokens, neurons, width, every) in SHAPES {
        let activations = sparse::<T>(tokens * neurons, every, 3);
        let weights = numbers::<T>(neurons * width, 5);
        let (a, w) = (T::wide(&activations), T::wide(&weights));
        let wanted: Vec<f64> = (0..tokens * width)
            .map(|at| (at / width, at % width))
            .map(|(token, column)| {
                (0..neurons).map(|n| f64::from(a[token * neurons + n]) * f64::from(w[n * width + column])).sum()
            })
            .collect();
        let mut found = numbers::<T>(tokens * width, 9);
        RowsProduct { activations: &activations, weights: &weights, neurons, width }
            .compute(&mut found, &in_turn)
            .unwrap();
        close(&found, &wanted, tolerance);
    }
}

fn gates_are_products<T: Element>(tolerance: f64) {
    for (count, neurons, width, every) in SHAPES {
        let gate = sparse::<T>(count * neurons, every, 3);
        let (tokens, weights) = (numbers::<T>(count * width, 4), numbers::<T>(neurons * width, 5));
        let (g, t, w) = (T::wide(&gate), T::wide(&tokens), T::wide(&weights));
        let wanted: Vec<f64> = (0..count * neurons)
            .map(|at| (at / neurons, at % neurons))
            .map(|(token, neuron)| {
                let product = (0..width).map(|n| f64::from(t[token * width + n]) * f64::from(w[neuron * width + n]));
                f64::from(g[token * neurons + neuron]) * product.sum::<f64>()
            })
            .collect();
        let mut found = numbers::<T>(count * neurons, 9);
        GateProduct { gate: &gate, tokens: &tokens, weights: &weights, neurons, width }
            .compute(&mut found, &in_turn)
            .unwrap();
        close(&found, &wanted, tolerance);
    }
}

#[test]
fn both_operators_are_products_for_few_and_many_tokens() {
    rows_are_products::<f32>(1e-6);
    rows_are_products::<f16>(1e-3);
    gates_are_products::<f32>(1e-6);
    gates_are_products::<f16>(1e-3);
}

/// The weights of inactive neurons are not read, so not even numbers that are none count.
#[test]
fn the_weights_of_inactive_neurons_do_not_count() {
    let (neurons, width) = (40, 24);
    for tokens in [1, 2, 12] {
        // The same neurons are active for all tokens.
        let one = sparse::<f32>(neurons, 4, 3);
        let activations = one.repeat(tokens);
        let weights = numbers::<f32>(neurons * width, 5);
        let mut without = weights.clone();
        for (row, activation) in without.chunks_mut(width).zip(&one) {
            if *activation == 0.0 {
                row.fill(f32::NAN);
            }
        }
        let hidden = numbers::<f32>(tokens * width, 4);
        let compute = |weights: &[f32]| {
            let (mut rows, mut gated) = (vec![0.0; tokens * width], vec![1.0; tokens * neurons]);
            let product = RowsProduct { activations: &activations, weights, neurons, width };
            product.compute(&mut rows, &in_turn).unwrap();
            let product = GateProduct { gate: &activations, tokens: &hidden, weights, neurons, width };
            product.compute(&mut gated, &in_turn).unwrap();
            (rows, gated)
        };
        assert_eq!(compute(&weights), compute(&without));
    }
}

/// The numbers of a token are the same bits in every pass of few tokens, and in every pass of many.
#[test]
fn a_token_does_not_depend_on_the_others_of_its_pass() {
    let (neurons, width) = (700, 40);
    let weights = numbers::<f32>(neurons * width, 5);
    let (token, hidden) = (sparse::<f32>(neurons, 6, 3), numbers::<f32>(width, 4));
    let first_row = |others: usize, every: usize| {
        let activations = [token.clone(), sparse::<f32>(others * neurons, every, 11)].concat();
        let tokens = [hidden.clone(), numbers::<f32>(others * width, 7)].concat();
        let (mut rows, mut gated) = (vec![0.0; (others + 1) * width], vec![0.0; (others + 1) * neurons]);
        let product = RowsProduct { activations: &activations, weights: &weights, neurons, width };
        product.compute(&mut rows, &in_turn).unwrap();
        let product = GateProduct { gate: &activations, tokens: &tokens, weights: &weights, neurons, width };
        product.compute(&mut gated, &in_turn).unwrap();
        rows.truncate(width);
        gated.truncate(neurons);
        (rows, gated)
    };
    for others in [1, 3, 7] {
        assert_eq!(first_row(others, 4), first_row(0, 1), "{others}");
    }
    for (others, every) in [(9, 2), (20, 5), (20, 1)] {
        assert_eq!(first_row(others, every), first_row(8, 100_000), "{others}");
    }
}
