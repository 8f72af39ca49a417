//! Profiles edited into nonsense: the page shows what it can and never panics.

use super::sample::{FULL, Sample};
use crate::report::{ReportInput, render};
use hpp_schema::Profile;
use proptest::prelude::*;
use serde_json::Value;

const ODD: [f64; 10] = [0.0, -1.0, 1.0, 1e-320, 1e300, -1e300, f64::MAX, f64::MIN_POSITIVE, 0.5, 1e9];
const ODD_COUNTS: [u64; 5] = [0, 1, 2, 1 << 20, u32::MAX as u64];

/// Replaces numbers by odd ones and drops entries of lists. `choices` decides which.
fn spoil(value: &mut Value, choices: &mut impl Iterator<Item = u32>) {
    match value {
        Value::Number(number) => {
            let Some(choice) = choices.next().filter(|choice| *choice % 3 == 0) else { return };
            *value = match number.is_u64() {
                true => ODD_COUNTS[choice as usize / 3 % ODD_COUNTS.len()].into(),
                false => ODD[choice as usize / 3 % ODD.len()].into(),
            };
        }
        Value::Array(list) => {
            if let Some(choice) = choices.next().filter(|choice| *choice % 7 == 0) {
                list.truncate(choice as usize % (list.len() + 1));
            }
            list.iter_mut().for_each(|entry| spoil(entry, choices));
        }
        Value::Object(fields) => fields.values_mut().for_each(|field| spoil(field, choices)),
        _ => {}
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nonsense_does_not_panic(choices in proptest::collection::vec(any::<u32>(), 1..200)) {
        let sample = Sample { layers: 3, experts: 5, ..FULL };
        let mut value = serde_json::to_value(sample.profile()).expect("a profile is data");
        spoil(&mut value, &mut choices.iter().copied().cycle());
        let profile: Profile = serde_json::from_value(value).expect("the shape is kept");
        let page = render(&ReportInput { profile: &profile, work: &sample.work(), sweep: &sample.sweep() });
        prop_assert!(page.len() < 3_000_000);
        prop_assert!(!page.contains("NaN"));
    }
}

#[test]
fn numbers_that_no_file_holds_are_drawn_around() {
    let mut profile = FULL.profile();
    let odd = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY];
    for (at, class) in profile.classes.iter_mut().enumerate() {
        for point in class.providers.iter_mut().flat_map(|costs| &mut costs.decode.points) {
            point.ms = Some(odd[at]);
        }
    }
    let seen = &mut profile.corpus.as_mut().expect("the sample has a corpus").statistics;
    seen.boundaries.iter_mut().for_each(|boundary| boundary.max_abs = f64::NAN);
    seen.influence.iter_mut().for_each(|block| block.mean = f64::INFINITY);
    profile.machine.curves.iter_mut().for_each(|curve| curve.points[0].gb_per_s = f64::NAN);
    profile.hotness.iter_mut().for_each(|entry| entry.decode.ms_per_gib = f64::NAN);
    let page = render(&ReportInput { profile: &profile, work: &FULL.work(), sweep: &FULL.sweep() });
    assert!(!page.contains("NaN") && page.contains("fig-boundaries"));
}
