//! Replays routes through the cache, beside the least recently used policy and the best one, which knows the future (Belady, "A study of
//! replacement algorithms for a virtual-storage computer", IBM Systems Journal 5, 1966).

use super::*;
use std::collections::{BTreeMap, BTreeSet};

const STAGES: usize = 4;
const EXPERTS: usize = 64;
const ACTIVE: usize = 4;
const PASSES: usize = 400;
/// What the trained mixture of this repository (16 experts in each of 4 layers, 4 active) selected while it wrote eight answers; by
/// fixtures/train/routes.py.
const LEARNED: &str = include_str!("../../../testdata/learned-routes.txt");
const LEARNED_EXPERTS: usize = 16;

/// The experts that each pass selects, by stage.
type Routes = Vec<Vec<Vec<u32>>>;

/// How routers choose: scores are the sum of a part for each expert, a part that drifts from token to token, and noise of variance 1.
#[derive(Clone, Copy, Debug)]
struct Routing {
    /// Standard deviation of the constant part.
    skew: f64,
    /// Standard deviation of the drifting part, of which a token keeps 95 %: a text stays with a topic.
    drift: f64,
}

struct Random(u64);

impl Random {
    /// Nearly normal, variance 1.
    fn normal(&mut self) -> f64 {
        let mut unit = || {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (self.0 >> 11) as f64 / (1_u64 << 53) as f64
        };
        (0..12).map(|_| unit()).sum::<f64>() - 6.0
    }
}

fn routes(routing: Routing) -> Routes {
    routes_of(routing, 7)
}

fn routes_of(Routing { skew, drift }: Routing, seed: u64) -> Routes {
    let mut random = Random(seed);
    let kept = 0.95_f64;
    let constant: Vec<f64> = (0..STAGES * EXPERTS).map(|_| skew * random.normal()).collect();
    let mut drifting = vec![0.0; STAGES * EXPERTS];
    let mut pass = || {
        for value in &mut drifting {
            *value = kept * *value + drift * (1.0 - kept * kept).sqrt() * random.normal();
        }
        let scores: Vec<f64> = constant.iter().zip(&drifting).map(|(a, b)| a + b + random.normal()).collect();
        let best = |scores: &[f64]| {
            let mut order: Vec<u32> = (0..EXPERTS as u32).collect();
            order.sort_by(|a, b| scores[*b as usize].total_cmp(&scores[*a as usize]));
            order[..ACTIVE].to_vec()
        };
        scores.chunks(EXPERTS).map(best).collect::<Vec<_>>()
    };
    (0..PASSES).map(|_| pass()).collect()
}

/// The experts that passes of this many sequences select: each expert that any of the sequences selects, in order.
fn routes_together(routing: Routing, sequences: u64) -> Routes {
    let each: Vec<Routes> = (0..sequences).map(|sequence| routes_of(routing, 7 + sequence)).collect();
    let of_stage = |pass: usize, stage: usize| -> Vec<u32> {
        each.iter().flat_map(|routes| routes[pass][stage].clone()).collect::<BTreeSet<_>>().into_iter().collect()
    };
    (0..PASSES).map(|pass| (0..STAGES).map(|stage| of_stage(pass, stage)).collect()).collect()
}

fn learned_routes() -> Routes {
    let experts = |word: &str| word.chars().map(|letter| letter.to_digit(16).expect("a hexadecimal digit")).collect();
    let tokens = LEARNED.lines().filter(|line| !line.is_empty());
    tokens.map(|line| line.split(' ').map(experts).collect()).collect()
}

/// Hits of the cache as the disk tier uses it.
fn of_the_cache(routes: &Routes, experts: usize, room: usize) -> usize {
    let stages = (0..STAGES).map(|stage| (StageId::new(stage), vec![1; experts]));
    let mut cache = ExpertCache::new(room as u64, stages);
    let mut hits = 0;
    for pass in routes {
        cache.start_pass();
        for (stage, selected) in pass.iter().enumerate() {
            let stage = StageId::new(stage);
            for &expert in selected {
                let id = ExpertId { stage, expert };
                if cache.touch(id) {
                    hits += 1;
                    continue;
                }
                while !cache.fits(1) {
                    let victim = cache.victim(|id| id.stage == stage && selected.contains(&id.expert));
                    cache.remove(victim.unwrap());
                }
                cache.insert(id);
            }
        }
    }
    hits
}

/// Hits of a policy that evicts the expert with the smallest `rank`, given the number of the present use and of the next.
fn of_policy(routes: &Routes, room: usize, rank: fn(usize, usize) -> i64) -> usize {
    let uses: Vec<(usize, u32)> = routes
        .iter()
        .flat_map(|pass| {
            pass.iter().enumerate().flat_map(|(stage, all)| all.iter().map(move |expert| (stage, *expert)))
        })
        .collect();
    let (mut next, mut last) = (vec![usize::MAX; uses.len()], BTreeMap::new());
    for (at, id) in uses.iter().enumerate().rev() {
        next[at] = last.insert(*id, at).unwrap_or(usize::MAX);
    }
    let (mut ranks, mut order) = (BTreeMap::new(), BTreeSet::new());
    let mut hits = 0;
    for (at, id) in uses.into_iter().enumerate() {
        match ranks.get(&id) {
            Some(rank) => {
                order.remove(&(*rank, id));
                hits += 1;
            }
            None if order.len() == room => {
                let (_, victim) = order.pop_first().unwrap();
                ranks.remove(&victim);
            }
            None => {}
        }
        let rank = rank(at, next[at]);
        ranks.insert(id, rank);
        order.insert((rank, id));
    }
    hits
}

/// The shares of uses that hit with room for this share of all experts: of the cache, of LRU, with foresight.
fn shares_of_hits(routes: &Routes, experts: usize, percent: usize) -> [f64; 3] {
    let room = STAGES * experts * percent / 100;
    let all = routes.iter().flatten().map(Vec::len).sum::<usize>() as f64;
    let ours = of_the_cache(routes, experts, room);
    let lru = of_policy(routes, room, |now, _| now as i64);
    let best = of_policy(routes, room, |_, next| -(next.min(1 << 40) as i64));
    [ours, lru, best].map(|hits| hits as f64 / all)
}

#[test]
fn the_policy_hits_as_often_as_lru_and_nearly_as_often_as_with_foresight() {
    for (skew, drift) in [(1.5, 0.0), (1.0, 1.0), (0.5, 1.5)] {
        let routes = routes(Routing { skew, drift });
        for percent in [25, 50] {
            let [ours, lru, best] = shares_of_hits(&routes, EXPERTS, percent);
            eprintln!(
                "skew {skew}, drift {drift}, room for {percent} %: {ours:.3}, LRU {lru:.3}, with foresight {best:.3}"
            );
            assert!(ours >= 0.995 * lru, "{ours} hits, LRU has {lru}");
            assert!(ours >= 0.85 * best, "{ours} hits, with foresight {best}");
        }
    }
}

#[test]
fn experts_of_a_pass_that_exceed_the_room_stay_until_the_next_pass() {
    for (skew, drift) in [(1.5, 0.0), (1.0, 1.0), (0.5, 1.5)] {
        let routes = routes_together(Routing { skew, drift }, 8);
        for (percent, least) in [(25, 0.55), (50, 0.8)] {
            let [ours, lru, best] = shares_of_hits(&routes, EXPERTS, percent);
            eprintln!(
                "eight sequences, skew {skew}, drift {drift}, room for {percent} %: {ours:.3}, LRU {lru:.3}, with foresight {best:.3}"
            );
            assert!(ours >= lru && ours >= least * best, "{ours} hits, LRU has {lru}, with foresight {best}");
        }
    }
}

#[test]
fn on_the_routes_of_a_trained_mixture_the_policy_hits_more_often_than_lru() {
    let routes = learned_routes();
    for (percent, least) in [(25, 0.62), (40, 0.72), (50, 0.78), (75, 0.9)] {
        let [ours, lru, best] = shares_of_hits(&routes, LEARNED_EXPERTS, percent);
        eprintln!("trained, room for {percent} %: {ours:.3}, LRU {lru:.3}, with foresight {best:.3}");
        assert!(ours >= lru && ours >= least * best, "{ours} hits, LRU has {lru}, with foresight {best}");
    }
}
