//! Compares merging with counting everything at once, and checks findings for contradictory numbers.

use super::*;
use proptest::prelude::*;

/// Statistics of some elements, computed directly.
fn of(values: &[f64]) -> Statistics {
    let n = values.len() as f64;
    let mean = if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / n };
    let boundary = BoundaryStatistics {
        block: "layers.0".into(),
        elements: values.len() as u64,
        not_finite: 1,
        mean_abs: if values.is_empty() { 0.0 } else { values.iter().map(|v| v.abs()).sum::<f64>() / n },
        mean,
        squares: values.iter().map(|v| (v - mean) * (v - mean)).sum(),
        max_abs: values.iter().fold(0.0, |most, v| most.max(v.abs())),
    };
    let influence = BlockInfluence { block: "layers.0".into(), tokens: values.len() as u64, mean: mean.abs().min(2.0) };
    Statistics { prompts: 1, boundaries: vec![boundary], influence: vec![influence], ..Statistics::default() }
}

fn experts(counts: Vec<u64>, reuse: Vec<u64>, first: u64, oracle: Vec<u64>) -> ExpertStatistics {
    ExpertStatistics {
        block: "layers.1".into(),
        top_k: 1,
        tokens: counts.iter().sum(),
        counts,
        reuse_distances: reuse,
        first_visits: first,
        oracle_hits: oracle,
    }
}

fn merged(parts: &[&Statistics]) -> Statistics {
    let mut all = Statistics::default();
    parts.iter().for_each(|part| all.merge(part).unwrap());
    all
}

fn close(a: f64, b: f64) -> bool {
    (a - b).abs() <= 1e-9 * (1.0 + a.abs().max(b.abs()))
}

fn assert_same(a: &Statistics, b: &Statistics) {
    let (x, y) = (&a.boundaries[0], &b.boundaries[0]);
    assert_eq!((a.prompts, x.elements, x.not_finite, x.max_abs), (b.prompts, y.elements, y.not_finite, y.max_abs));
    assert!(close(x.mean, y.mean) && close(x.mean_abs, y.mean_abs) && close(x.squares, y.squares), "{x:?} {y:?}");
}

fn values() -> impl Strategy<Value = Vec<f64>> {
    proptest::collection::vec(-1e3..1e3f64, 0..20)
}

proptest! {
    #[test]
    fn merging_equals_counting_everything_at_once(a in values(), b in values()) {
        let mut all = of(&[a.clone(), b.clone()].concat());
        all.prompts = 2;
        all.boundaries[0].not_finite = 2;
        assert_same(&merged(&[&of(&a), &of(&b)]), &all);
    }

    #[test]
    fn merging_is_associative(a in values(), b in values(), c in values()) {
        let (a, b, c) = (of(&a), of(&b), of(&c));
        let right = merged(&[&b, &c]);
        assert_same(&merged(&[&a, &b, &c]), &merged(&[&a, &right]));
        let (left, right) = (merged(&[&a, &b, &c]), merged(&[&a, &right]));
        prop_assert!(close(left.influence[0].mean, right.influence[0].mean));
    }
}

#[test]
fn counts_add_up_exactly() {
    let with = |experts: ExpertStatistics, active: Vec<u64>| Statistics {
        experts: vec![experts],
        neurons: vec![NeuronStatistics { block: "layers.1".into(), tokens: 9, active }],
        ..Statistics::default()
    };
    let a = with(experts(vec![3, 0, 1], vec![2], 2, vec![2, 2, 2]), vec![9, 0]);
    let b = with(experts(vec![0, 2, 0], vec![0, 1], 1, vec![0, 1, 1]), vec![1, 2]);
    let all = merged(&[&a, &b]);
    assert_eq!(all, merged(&[&b, &a]));
    let e = &all.experts[0];
    assert_eq!((e.tokens, &e.counts[..], &e.reuse_distances[..]), (6, &[3, 2, 1][..], &[2, 1][..]));
    assert_eq!((e.first_visits, &e.oracle_hits[..]), (3, &[2, 3, 3][..]));
    assert_eq!((all.neurons[0].tokens, &all.neurons[0].active[..]), (18, &[10, 2][..]));
    assert!(all.check("s").is_empty(), "{:?}", all.check("s"));
}

#[test]
fn statistics_of_another_model_change_nothing() {
    let mine = of(&[1.0]);
    let mut other = of(&[2.0]);
    other.influence[0].block = "layers.7".into();
    let mut merged = mine.clone();
    let error = merged.merge(&other).unwrap_err().to_string();
    assert!(error.contains("influence") && error.contains("layers.7"), "{error}");
    assert_eq!(merged, mine);
    let mut few = Statistics { experts: vec![experts(vec![1], vec![], 1, vec![0])], ..Statistics::default() };
    let many = Statistics { experts: vec![experts(vec![1, 0], vec![], 1, vec![0, 0])], ..Statistics::default() };
    assert!(few.merge(&many).unwrap_err().to_string().contains("1 experts in one and 2"));
}

#[test]
fn rates_follow_from_counts() {
    let e = experts(vec![5, 1, 4], vec![4, 3], 3, vec![5, 7, 7]);
    assert_eq!((e.lru_hit_rate(0), e.lru_hit_rate(1), e.lru_hit_rate(9)), (Some(0.0), Some(0.4), Some(0.7)));
    assert_eq!(experts(vec![0], vec![], 0, vec![]).lru_hit_rate(1), None);
    let n = NeuronStatistics { block: "b".into(), tokens: 4, active: vec![4, 1, 0, 3] };
    assert_eq!((n.frequency(1), n.frequency(4), n.density()), (Some(0.25), None, Some(0.5)));
    assert_eq!((n.coverage(1), n.coverage(2), n.coverage(8)), (Some(0.5), Some(0.875), Some(1.0)));
    assert_eq!(of(&[1.0, 3.0]).boundaries[0].variance(), Some(1.0));
    assert_eq!(of(&[]).boundaries[0].variance(), None);
}

#[test]
fn all_contradictions_are_found_at_once() {
    let mut s = of(&[1.0, -2.0]);
    assert_eq!(s.check("s"), []);
    s.boundaries[0].mean_abs = -1.0;
    s.boundaries[0].squares = f64::NAN;
    s.influence[0].mean = 3.0;
    s.influence.push(s.influence[0].clone());
    s.experts = vec![experts(vec![2, 2], vec![1, 1, 1], 2, vec![3, 1])];
    s.experts[0].top_k = 3;
    s.neurons = vec![NeuronStatistics { block: String::new(), tokens: 1, active: vec![0, 2] }];
    let places: Vec<String> = s.check("s").into_iter().map(|f| f.place).collect();
    for place in [
        "s.boundaries[0].mean_abs",
        "s.boundaries[0].squares",
        "s.boundaries[0].mean",
        "s.influence[1].block",
        "s.influence[0].mean",
        "s.experts[0].top_k",
        "s.experts[0].counts",
        "s.experts[0].reuse_distances",
        "s.experts[0].oracle_hits",
        "s.neurons[0].block",
        "s.neurons[0].active[1]",
    ] {
        assert!(places.iter().any(|p| p == place), "{place} is not among {places:?}");
    }
}
