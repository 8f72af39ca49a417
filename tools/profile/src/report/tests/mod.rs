//! The page as a whole: what it contains, what it says it leaves out, how large it may become.

mod browser;
mod nonsense;
mod sample;
mod words;

use super::{ReportInput, Sweep, render};
use sample::{BARE, FULL, Sample};

/// Figures of a page that has everything, in order.
const FIGURES: [&str; 16] = [
    "fig-shares",
    "fig-depth",
    "fig-roofline",
    "fig-fit-decode",
    "fig-fit-prefill",
    "fig-hotness-webgpu",
    "fig-boundaries",
    "fig-influence",
    "fig-attention",
    "fig-experts",
    "fig-hit-rates",
    "fig-neurons",
    "fig-sensitivity",
    "fig-host",
    "fig-links",
    "fig-sweep",
];

/// A dense model with a device, without attention entropy.
const DENSE: Sample = Sample { experts: 0, relu: false, attention: false, ..FULL };

fn page(sample: &Sample) -> String {
    let (profile, work, sweep) = (sample.profile(), sample.work(), sample.sweep());
    render(&ReportInput { profile: &profile, work: &work, sweep: &sweep })
}

fn figure<'a>(page: &'a str, id: &str) -> Option<&'a str> {
    let (_, rest) = page.split_once(&format!("<figure id=\"{id}\">"))?;
    Some(rest.split_once("</figure>")?.0)
}

#[test]
fn every_figure_has_a_drawing_words_and_numbers() {
    let page = page(&FULL);
    for id in FIGURES {
        let figure = figure(&page, id).unwrap_or_else(|| panic!("{id} is missing"));
        for part in ["<svg id=", "role=\"img\"", "<title id=", "<desc id=", "<figcaption>", "<details>", "<td>"] {
            assert!(figure.contains(part), "{id} lacks {part}");
        }
    }
    assert_eq!(page.matches("<figure").count(), FIGURES.len());
}

#[test]
fn what_is_absent_says_why() {
    let page = page(&BARE);
    let shown = ["fig-shares", "fig-depth", "fig-roofline", "fig-fit-decode", "fig-fit-prefill", "fig-host"];
    let there: Vec<&str> = FIGURES.into_iter().filter(|id| figure(&page, id).is_some()).collect();
    assert_eq!(there, shown);
    for why in [
        "no block can gain from one",
        "there are no statistics of activations",
        "there are no statistics of experts",
        "there are no statistics of neurons",
        "hpp-profile --sensitivity measures it",
        "there is no link to measure",
        "no device to plan for",
    ] {
        assert!(page.contains(why), "{why}");
    }
}

#[test]
fn a_dense_model_lacks_only_what_it_does_not_have() {
    let page = page(&DENSE);
    let missing: Vec<&str> = FIGURES.into_iter().filter(|id| figure(&page, id).is_none()).collect();
    assert_eq!(missing, ["fig-attention", "fig-experts", "fig-hit-rates", "fig-neurons"]);
    for why in ["Attention entropy was not requested", "routes no tokens to experts", "have no ReLU"] {
        assert!(page.contains(why), "{why}");
    }
}

#[test]
fn an_empty_profile_is_a_page_too() {
    let mut profile = BARE.profile();
    profile.classes.clear();
    profile.model.blocks.clear();
    profile.machine.curves.clear();
    profile.machine.rates = None;
    let sweep = Sweep::Absent("nothing was measured".into());
    let page = render(&ReportInput { profile: &profile, work: &[], sweep: &sweep });
    assert!(page.contains("No block has a measured time") && !page.contains("<figure"));
}

#[test]
fn numbers_of_the_profile_stand_on_the_page() {
    let page = page(&FULL);
    for text in
        ["sample-0.6b-int4", "Sample CPU @ 2.1 GHz", "11.2 GB/s, 0.18 TFLOP/s", "out of memory: 1.2 GiB asked for"]
    {
        assert!(page.contains(text), "{text}");
    }
    let device = figure(&page, "fig-hotness-webgpu").expect("hotness is there");
    assert!(device.contains("Decode hotness is flat") && device.contains("Crossings:"), "{device}");
}

#[test]
fn layers_that_differ_are_not_called_flat() {
    let mut profile = FULL.profile();
    profile.hotness[3].decode.ms_per_gib *= 4.0;
    let (work, sweep) = (FULL.work(), FULL.sweep());
    let page = render(&ReportInput { profile: &profile, work: &work, sweep: &sweep });
    let figure = figure(&page, "fig-hotness-webgpu").expect("hotness is there");
    assert!(!figure.contains("flat") && figure.contains("Hottest in decode is layers.2"), "{figure}");
}

#[test]
fn a_rate_above_its_bound_is_explained() {
    assert!(!page(&BARE).contains("caches hold what is read"));
    let mut profile = BARE.profile();
    profile.machine.rates.as_mut().expect("the sample has rates").cpu.memory_gb_per_s = 2.0;
    let (work, sweep) = (BARE.work(), BARE.sweep());
    let page = render(&ReportInput { profile: &profile, work: &work, sweep: &sweep });
    assert_eq!(page.matches("caches hold what is read").count(), 2, "in the summary and under the roofline");
}

/// Caches can explain a bandwidth above its bound, but not an arithmetic rate.
#[test]
fn arithmetic_above_its_bound_has_its_own_explanation() {
    let mut profile = BARE.profile();
    profile.machine.rates.as_mut().expect("the sample has rates").cpu.tflops = 1e-6;
    let (work, sweep) = (BARE.work(), BARE.sweep());
    let page = render(&ReportInput { profile: &profile, work: &work, sweep: &sweep });
    assert!(page.contains("of the arithmetic in") && page.contains("one product of float32 matrices"));
    assert!(!page.contains("caches hold what is read"));
}

#[test]
fn a_device_that_gains_nothing_is_not_recommended() {
    let mut profile = FULL.profile();
    for (at, entry) in profile.hotness.iter_mut().enumerate() {
        entry.decode.ms_per_gib = -1.0 - at as f64;
    }
    let (work, sweep) = (FULL.work(), FULL.sweep());
    let page = render(&ReportInput { profile: &profile, work: &work, sweep: &sweep });
    assert!(
        figure(&page, "fig-hotness-webgpu").is_some_and(|figure| figure.contains("No block gains from this device"))
    );
}

#[test]
fn a_profile_that_should_not_be_relied_on_says_so() {
    let (work, sweep) = (FULL.work(), FULL.sweep());
    let page = |share: f64| {
        let mut profile = FULL.profile();
        profile.others_cpu_share = Some(share);
        render(&ReportInput { profile: &profile, work: &work, sweep: &sweep })
    };
    assert!(page(0.93).contains("other programs took 93 % of the CPU time"));
    assert!(!page(0.01).contains("other programs took"));
}

#[test]
fn a_sweep_says_what_memory_buys() {
    let rising = page(&FULL);
    assert!(rising.contains("GiB buys nothing in decode") && rising.contains("1 budget is too small for any plan"));
    let (profile, work) = (FULL.profile(), FULL.work());
    let Sweep::Done { mut points, load, gpu } = FULL.sweep() else { unreachable!("the sample has a device") };
    for point in &mut points {
        point.vram >>= 10;
        if let Ok(solution) = &mut point.solution {
            solution.decode_ms = 10.0;
        }
    }
    let sweep = Sweep::Done { points, load, gpu };
    let page = render(&ReportInput { profile: &profile, work: &work, sweep: &sweep });
    assert!(page.contains("makes no difference in decode: 100 tokens per second from 0.5 to 5 MiB"));
}

#[test]
fn the_same_profile_gives_the_same_page() {
    assert_eq!(page(&FULL), page(&FULL));
}

#[test]
fn a_large_model_makes_a_page_that_can_be_mailed() {
    let page = page(&Sample { layers: 128, experts: 256, ..FULL });
    assert!(page.len() < 3_000_000, "{} bytes", page.len());
    let wide = self::page(&Sample { layers: 160, experts: 1024, ..FULL });
    assert!(wide.len() < 3_000_000, "{} bytes", wide.len());
    assert!(wide.contains("Each cell is the mean of 4 experts") && wide.contains("One layer in 2 is drawn"));
}
