//! Words of a profile are shown as text and never interpreted.

use super::sample::FULL;
use crate::report::{ReportInput, Sweep, render};

/// Words that try to break out of the place where they are shown.
const HOSTILE: [&str; 6] = [
    "<script>window.changed = 1</script>",
    "\"><img src=x onerror=\"window.changed = 2\">",
    "'><svg onload='window.changed = 3'>",
    "</title></style></svg></figure><iframe src=\"http://localhost:9/\">",
    "&lt;script&gt;window.changed = 4",
    "\u{0}\u{1b}[31m\u{202e}]]><!--",
];

/// A page of a profile in which every word is hostile.
pub fn hostile() -> String {
    let mut profile = FULL.profile();
    let mut turn = 0;
    let mut word = |text: &mut String| {
        *text = format!("{text}{}", HOSTILE[turn % HOSTILE.len()]);
        turn += 1;
    };
    let mut renamed = Vec::new();
    for block in &mut profile.model.blocks {
        let old = block.label.clone();
        word(&mut block.label);
        renamed.push((old, block.label.clone()));
    }
    for text in [&mut profile.model.name, &mut profile.model.hash, &mut profile.date] {
        word(text);
    }
    let host = &mut profile.host;
    for text in [&mut host.cpu, &mut host.system, &mut host.onnxruntime, &mut host.hpp, &mut host.devices[0].name] {
        word(text);
    }
    profile.machine.failures.iter_mut().for_each(&mut word);
    profile.machine.rates.as_mut().expect("the sample has rates").gpus.iter_mut().for_each(|gpu| word(&mut gpu.name));
    profile.classes.iter_mut().flat_map(|class| &mut class.providers).for_each(|costs| {
        let mut why = String::new();
        word(&mut why);
        costs.failure = Some(why);
    });
    profile.notes = HOSTILE.map(str::to_owned).into();
    let name = |label: &mut String| {
        *label = renamed.iter().find(|(old, _)| old == label).map_or_else(|| label.clone(), |(_, new)| new.clone());
    };
    profile.classes.iter_mut().for_each(|class| name(&mut class.block));
    profile.hotness.iter_mut().for_each(|entry| name(&mut entry.block));
    profile.sensitivity.iter_mut().for_each(|entry| name(&mut entry.block));
    let corpus = profile.corpus.as_mut().expect("the sample has a corpus");
    corpus.skipped = HOSTILE.map(str::to_owned).into();
    let seen = &mut corpus.statistics;
    seen.boundaries.iter_mut().for_each(|entry| name(&mut entry.block));
    seen.influence.iter_mut().for_each(|entry| name(&mut entry.block));
    seen.attention.iter_mut().for_each(|entry| name(&mut entry.block));
    seen.experts.iter_mut().for_each(|entry| name(&mut entry.block));
    seen.neurons.iter_mut().for_each(|entry| name(&mut entry.block));
    let mut work = FULL.work();
    work.iter_mut().for_each(|entry| name(&mut entry.block));
    let Sweep::Done { points, load, mut gpu } = FULL.sweep() else { unreachable!("the sample has a device") };
    word(&mut gpu);
    let sweep = Sweep::Done { points, load, gpu };
    render(&ReportInput { profile: &profile, work: &work, sweep: &sweep })
}

#[test]
fn no_word_becomes_markup() {
    let page = hostile();
    for tag in ["<script", "<img", "<iframe", "<svg onload", "<!--"] {
        assert!(!page.contains(tag), "{tag} got through");
    }
    let count = |html: &str, tag: &str| html.matches(tag).count();
    let friendly = super::page(&FULL);
    for tag in ["</style>", "</title>", "</figure>", "</svg>", "<svg", "<figure"] {
        assert_eq!(count(&page, tag), count(&friendly, tag), "{tag}");
    }
    assert!(page.contains("&lt;script&gt;window.changed"), "words are shown all the same");
    assert!(!page.contains('\u{0}') && !page.contains('\u{1b}'), "control characters are not");
}
