//! Separation of launch costs from times of blocks.

use super::*;
use crate::sample;
use hpp_schema::Provider;

const CPU: Provider = Provider::CPU;

fn near(a: Option<f64>, b: f64) -> bool {
    a.is_some_and(|a| (a - b).abs() < 1e-9)
}

fn costs<'p>(profile: &'p Profile, block: &str) -> &'p ProviderCosts {
    &profile.classes.iter().find(|entry| entry.block == block).unwrap().providers[0]
}

/// embedding, layers.0, layers.1 with its like layers.2, layers.3, head.
fn llama() -> Profile {
    let profile = sample::profile(&sample::analysis("genai/llama3-fp32-cpu"), sample::settings(&[CPU]));
    assert_eq!(costs(&profile, "layers.1").run_length, 2);
    profile
}

#[test]
fn equal_blocks_tell_what_a_launch_takes() {
    let mut profile = llama();
    // A launch of 0.3 and blocks of 2 ms: 2.3 alone, 4.3 together.
    sample::time(&mut profile, "layers.1", CPU, (Phase::Decode, 100), (2.3, Some(4.3)));
    sample::time(&mut profile, "layers.1", CPU, (Phase::Decode, 200), (3.3, Some(6.3)));
    sample::time(&mut profile, "layers.1", CPU, (Phase::Prefill, 10), (9.5, Some(18.0)));
    sample::time(&mut profile, "head", CPU, (Phase::Decode, 100), (5.3, None));
    sample::time(&mut profile, "embedding", CPU, (Phase::Decode, 100), (0.2, None));
    derive(&mut profile);
    let layer = costs(&profile, "layers.1");
    assert!(near(layer.launch_ms, 0.3), "{:?}", layer.launch_ms);
    assert!(near(layer.decode.points[0].ms, 2.0) && near(layer.decode.points[1].ms, 3.0));
    assert!(near(layer.prefill.points[0].ms, 8.5), "a pass has a launch of its own: masks grow with it");
    assert!(near(Some(layer.decode.fit.unwrap().ms(300)), 4.0));
    assert!(near(costs(&profile, "head").decode.points[0].ms, 5.0));
    assert_eq!(costs(&profile, "head").launch_ms, None);
    assert!(near(costs(&profile, "embedding").decode.points[0].ms, 0.0), "no time is negative");
}

#[test]
fn layers_of_two_kinds_in_turn_tell_it_together() {
    let mut profile = llama();
    // As if no two neighbours were alike: runs of different blocks.
    for (entry, length) in [("layers.0", 2), ("layers.1", 1)] {
        let entry = profile.classes.iter_mut().find(|class| class.block == entry).unwrap();
        entry.providers[0].run_length = length;
    }
    sample::time(&mut profile, "layers.0", CPU, (Phase::Decode, 100), (1.4, Some(3.4)));
    sample::time(&mut profile, "layers.1", CPU, (Phase::Decode, 100), (2.4, None));
    derive(&mut profile);
    assert!(near(costs(&profile, "layers.0").launch_ms, 0.4));
    assert!(near(costs(&profile, "layers.0").decode.points[0].ms, 1.0));
    assert!(near(costs(&profile, "layers.1").decode.points[0].ms, 2.0), "it pays the launch its neighbours show");
}

#[test]
fn noise_makes_no_negative_times() {
    for (run, most) in [(0.5, 1.0), (3.0, 2.0)] {
        let mut profile = llama();
        sample::time(&mut profile, "layers.1", CPU, (Phase::Decode, 100), (1.0, Some(run)));
        derive(&mut profile);
        let layer = costs(&profile, "layers.1");
        let (launch, ms) = (layer.launch_ms.unwrap(), layer.decode.points[0].ms.unwrap());
        assert!((0.0..=1.0).contains(&launch) && (0.0..=most).contains(&ms), "{launch} {ms}");
        assert_eq!(profile.check(), []);
    }
}

#[test]
fn a_block_that_is_warmer_alone_is_told_from_the_run() {
    let mut profile = llama();
    sample::time(&mut profile, "layers.1", CPU, (Phase::Decode, 100), (1.0, Some(2.5)));
    derive(&mut profile);
    assert_eq!(costs(&profile, "layers.1").launch_ms, Some(0.0));
    assert!(near(costs(&profile, "layers.1").decode.points[0].ms, 1.5));
}

#[test]
fn what_is_half_measured_says_what_it_can() {
    let mut profile = llama();
    derive(&mut profile);
    assert!(profile.classes.iter().all(|entry| entry.providers[0].decode.fit.is_none()));
    sample::time(&mut profile, "head", CPU, (Phase::Decode, 100), (5.0, None));
    derive(&mut profile);
    assert!(near(costs(&profile, "head").decode.points[0].ms, 5.0), "no launch is known yet");
    let once = profile.clone();
    derive(&mut profile);
    assert_eq!(once, profile, "again changes nothing");
}

#[test]
fn the_middle_of_some_numbers() {
    assert_eq!(median(vec![]), None);
    assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
    assert_eq!(median(vec![4.0, 1.0]), Some(2.5));
}
