//! The page in a real browser: headless Chromium, which `HPP_CHROMIUM` names (`tools/scripts/deps.sh chromium` finds or fetches
//! one). Without it these tests say that they are skipped; under `CI=true` that is a failure.

use super::page;
use super::sample::{BARE, FULL, Sample};
use super::words::hostile;
use crate::report::palette::{AXIS, GRID};
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A browser that takes longer than this hangs.
const PATIENCE: Duration = Duration::from_secs(120);
const POLICY_TAG: &str = "<meta http-equiv=\"Content-Security-Policy\"";

/// What `measure.js` saw.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Seen {
    figures: Vec<SeenFigure>,
    ids: Vec<String>,
    links: Vec<String>,
    foreign: usize,
    requests: Vec<String>,
    too_wide: Vec<String>,
    changed: String,
}

#[derive(Debug, Deserialize)]
struct SeenFigure {
    id: String,
    caption: usize,
    drawings: Vec<SeenDrawing>,
}

#[derive(Debug, Deserialize)]
struct SeenDrawing {
    id: String,
    /// Shapes with an extent that are neither grid nor axis.
    marks: usize,
    /// The largest of them, square pixels.
    area: f64,
    /// Marks that leave the drawing.
    outside: usize,
    words: usize,
    /// Words that leave the drawing.
    cut: Vec<String>,
    /// Colour of the words, as the browser shows it.
    ink: String,
    named: bool,
    width: f64,
    height: f64,
}

/// The browser, or `None` after saying that the test is skipped.
fn browser(test: &str) -> Option<PathBuf> {
    let path = std::env::var_os("HPP_CHROMIUM").map(PathBuf::from);
    if path.is_none() {
        let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
        assert!(!ci, "{test} needs a browser, and CI requires it: see tools/scripts/deps.sh chromium");
        println!("SKIPPED: {test}: HPP_CHROMIUM is not set, see tools/scripts/deps.sh chromium");
    }
    path
}

/// What a run of the browser produced: the page after its script ran, and what the browser printed.
struct Run {
    dom: String,
    log: String,
}

/// Opens a page in an isolated browser: no name resolves, nothing is updated, its profile directory is new.
fn open(browser: &Path, html: &str, flags: &[&str]) -> Run {
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let path_of = |name: &str| dir.path().join(name);
    fs::write(path_of("page.html"), html).expect("the page can be written");
    let file = |name: &str| File::create(path_of(name)).expect("a file can be made");
    let mut child = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--no-default-browser-check"])
        .args(["--disable-background-networking", "--disable-component-update", "--disable-sync"])
        .args(["--disable-default-apps", "--disable-extensions", "--host-resolver-rules=MAP * ~NOTFOUND"])
        .arg(format!("--user-data-dir={}", path_of("profile").display()))
        .args(["--window-size=1200,1000", "--enable-logging=stderr"])
        .args(flags)
        .arg("--dump-dom")
        .arg(format!("file://{}", path_of("page.html").display()))
        .stdin(Stdio::null())
        .stdout(file("dom"))
        .stderr(file("log"))
        .spawn()
        .expect("the browser starts");
    let begun = Instant::now();
    while child.try_wait().expect("the browser can be waited for").is_none() {
        if begun.elapsed() > PATIENCE {
            child.kill().expect("the browser can be ended");
            panic!("the browser hangs");
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let read = |name: &str| String::from_utf8_lossy(&fs::read(path_of(name)).expect("it was written")).into_owned();
    Run { dom: read("dom"), log: read("log") }
}

/// Lines that the page itself caused on the console: errors, and what the policy blocked.
fn console(run: &Run) -> Vec<&str> {
    run.log.lines().filter(|line| line.contains("CONSOLE")).collect()
}

/// Opens a copy of the page with `measure.js` in it.
fn measure(browser: &Path, html: &str, flags: &[&str]) -> Seen {
    let quiet = format!("[\"{GRID}\", \"{AXIS}\"]");
    let script =
        format!("<script id=\"measure\">{}</script></body>", include_str!("measure.js").replace("QUIET", &quiet));
    let copy = html.replacen(POLICY_TAG, "<meta name=\"policy\"", 1).replacen("</body>", &script, 1);
    let run = open(browser, &copy, flags);
    let seen = run.dom.split_once("<pre id=\"seen\">").and_then(|(_, rest)| rest.split_once("</pre>"));
    let (seen, _) = seen.unwrap_or_else(|| panic!("the script left nothing: {}", run.log));
    let seen = seen.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    serde_json::from_str(&seen).expect("the script writes what is read here")
}

/// Checks what must hold for every page in a browser, whatever it shows.
fn assert_whole(seen: &Seen) {
    for drawing in seen.figures.iter().flat_map(|figure| &figure.drawings) {
        assert!(drawing.marks > 0 && drawing.area > 10.0, "{} shows nothing: {drawing:?}", drawing.id);
        assert!(drawing.width > 100.0 && drawing.height > 60.0, "{} has no room: {drawing:?}", drawing.id);
        assert!(drawing.words > 2 && drawing.named, "{} has no words: {drawing:?}", drawing.id);
        assert_eq!((drawing.outside, &drawing.cut), (0, &vec![]), "{} leaves its frame", drawing.id);
    }
    assert!(seen.figures.iter().all(|figure| figure.caption > 40 && !figure.drawings.is_empty()), "{seen:?}");
    let ids: BTreeSet<&String> = seen.ids.iter().collect();
    assert_eq!(ids.len(), seen.ids.len(), "an id stands for one thing");
    let broken = seen.links.iter().find(|link| !link.strip_prefix('#').is_some_and(|id| ids.contains(&id.to_owned())));
    assert_eq!(broken, None, "a link leads nowhere");
    assert_eq!((seen.foreign, &seen.requests, &seen.too_wide), (0, &vec![], &vec![]));
    assert_eq!(seen.changed, "");
}

fn figure_ids(seen: &Seen) -> Vec<&str> {
    seen.figures.iter().map(|figure| figure.id.as_str()).collect()
}

#[test]
fn every_figure_is_drawn_in_a_browser() {
    let Some(browser) = browser("every_figure_is_drawn_in_a_browser") else { return };
    let html = page(&FULL);
    let light = measure(&browser, &html, &["--blink-settings=preferredColorScheme=1"]);
    assert_whole(&light);
    assert_eq!(figure_ids(&light), super::FIGURES);
    let dark = measure(&browser, &html, &["--blink-settings=preferredColorScheme=0"]);
    assert_whole(&dark);
    let ink = |seen: &Seen| seen.figures[1].drawings[0].ink.clone();
    assert_eq!(
        [ink(&light), ink(&dark)],
        ["rgb(91, 102, 114)", "rgb(163, 174, 186)"],
        "words follow the page's colours"
    );
}

#[test]
fn large_and_small_models_are_drawn_in_a_browser() {
    let Some(browser) = browser("large_and_small_models_are_drawn_in_a_browser") else { return };
    for sample in [BARE, super::DENSE, Sample { layers: 1, ..FULL }, Sample { layers: 128, experts: 256, ..FULL }] {
        assert_whole(&measure(&browser, &page(&sample), &[]));
    }
}

#[test]
fn the_page_asks_for_nothing_and_complains_of_nothing() {
    let Some(browser) = browser("the_page_asks_for_nothing_and_complains_of_nothing") else { return };
    let html = page(&FULL);
    let clean = open(&browser, &html, &[]);
    assert!(clean.dom.contains("</figure>"), "the page was opened");
    assert_eq!(console(&clean), [""; 0]);
    // The checks notice a request and a script if the page has one.
    let image = html.replacen("<main>", "<main><img src=\"http://localhost:9/x.png\">", 1);
    assert_eq!(console(&open(&browser, &image, &[])).len(), 1);
    let script = html.replacen("<main>", "<main><script>document.title = ''</script>", 1);
    assert_eq!(console(&open(&browser, &script, &[])).len(), 1);
}

#[test]
fn hostile_words_do_nothing_in_a_browser() {
    let Some(browser) = browser("hostile_words_do_nothing_in_a_browser") else { return };
    let html = hostile();
    assert_whole(&measure(&browser, &html, &[]));
    assert_eq!(console(&open(&browser, &html, &[])), [""; 0]);
}
