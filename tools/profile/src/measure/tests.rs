//! Measuring with children that misbehave, played by shell scripts: one measurement is lost, the others are not.

#![cfg(unix)]

use super::*;
use crate::child::Launcher;
use crate::corpus::Corpus;
use crate::derive::{PHASES, phase_costs};
use crate::interrupt::Interrupt;
use crate::sample;
use crate::taps::Wanted;
use hpp_io::CpuMonitor;
use hpp_schema::Provider;
use std::time::Duration;
use tempfile::TempDir;

const MODEL: &str = "genai/llama3-fp32-cpu";
const READY: &str = r#"echo '{"reply":"ready","version":4,"host":{"cpu":"c","cores":1,"memory":"1 GiB","system":"s","threads":1,"onnxruntime":"1","hpp":"0","devices":[]}}'"#;

/// Measures with a child that runs this script for each line that it reads.
struct Bench {
    dir: TempDir,
    analysis: Analysis,
    store: Store,
    interrupt: Interrupt,
    script: String,
}

impl Bench {
    fn new(each_line: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::new(&dir.path().join("profile.yaml"));
        let script = format!("cd {}\n{READY}\nwhile read -r line; do\n{each_line}\ndone", dir.path().display());
        Bench { dir, analysis: sample::analysis(MODEL), store, interrupt: Interrupt::default(), script }
    }

    fn measure(&self, providers: &[Provider]) -> ProfilingRun<'_> {
        let launcher = Launcher {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), self.script.clone().into()],
            reply_timeout: Duration::from_millis(1500),
        };
        let profile = sample::profile(&self.analysis, sample::settings(providers));
        ProfilingRun {
            cpu_share: CpuMonitor::start(None),
            share_before: None,
            analysis: &self.analysis,
            profile,
            store: &self.store,
            prober: Prober::new(launcher, self.interrupt.clone()),
            progress: Progress::new(true),
            effort: Effort::Quick,
            estimate: RooflineEstimator::new(&self.analysis, Effort::Quick, 0),
            cache: 1 << 20,
            work_dir: self.dir.path(),
        }
    }

    fn corpus(&self, lines: &[&str]) -> Corpus {
        let path = self.dir.path().join("corpus.txt");
        std::fs::write(&path, lines.join("\n")).unwrap();
        Corpus::scan(&path, None, false).unwrap()
    }
}

fn run(corpus: &Corpus) -> CorpusRun<'_> {
    CorpusRun { corpus, hash: "h".into(), is_cut: false, wanted: Wanted::default() }
}

/// Answers the cases of a request with one millisecond each.
const TIME_ALL: &str = r#"
    echo '{"reply":"loaded","load_ms":1,"processor":"p"}'
    echo "$line" | grep -o '"name":"[dp][a-z]* [0-9]*"' | sed 's/"name":"\(.*\)"/\1/' | while read -r case; do
        echo "{\"reply\":\"measured\",\"case\":\"$case\",\"timing\":{\"runs\":3,\"median_ms\":1,\"p10_ms\":1,\"p90_ms\":1},\"peak_resident\":null}"
    done"#;
const DONE: &str = r#"echo '{"reply":"done"}'"#;

fn failures(profile: &Profile) -> Vec<String> {
    let costs = profile.classes.iter().flat_map(|entry| &entry.providers);
    costs
        .flat_map(|costs| {
            let points = PHASES.into_iter().flat_map(|phase| &phase_costs(costs, phase).points);
            costs.failure.iter().chain(points.filter_map(|point| point.failure.as_ref())).cloned().collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn every_case_is_asked_for_and_saved() {
    let bench = Bench::new(&format!("{TIME_ALL}\n{DONE}"));
    let mut measure = bench.measure(&[Provider::CPU]);
    measure.blocks().unwrap();
    assert_eq!(failures(&measure.profile), [] as [String; 0]);
    let costs = measure.profile.classes.iter().map(|entry| &entry.providers[0]);
    assert!(costs.clone().all(|costs| costs.decode.points.len() == 2 && costs.prefill.points.len() == 1));
    assert!(costs.clone().all(|costs| costs.decode.fit.is_some() && costs.prefill.fit.is_some()));
    let saved = bench.store.read().unwrap();
    assert_eq!(saved, measure.profile);
    assert_eq!(saved.check(), []);
}

/// The share of other programs is that of measurements: none are made here.
#[test]
fn an_unusable_provider_leaves_the_cpu_share_of_other_programs_as_it_was() {
    let bench = Bench::new(DONE);
    let mut measure = bench.measure(&[Provider::CUDA]);
    measure.profile.others_cpu_share = Some(0.25);
    measure.share_before = Some(0.5);
    measure.blocks().unwrap();
    assert!(!failures(&measure.profile).is_empty());
    assert_eq!(bench.store.read().unwrap().others_cpu_share, Some(0.25));
}

#[test]
fn what_a_token_costs_beside_its_partitions_is_asked_once_and_a_failure_is_kept() {
    let answer = r#"echo '{"reply":"pass","timing":{"runs":3,"median_ms":0.2,"p10_ms":0.1,"p90_ms":0.3}}'"#;
    for (says, failure) in [(answer, None), ("kill -KILL $$", Some("memory runs out")), ("", Some("did not answer"))] {
        let bench = Bench::new(&format!("echo x >> asked\n{says}\n{DONE}"));
        let mut measure = bench.measure(&[Provider::CPU]);
        assert!(measure.pass_seconds() > 0.0);
        measure.pass().unwrap();
        measure.pass().unwrap();
        assert_eq!(std::fs::read_to_string(bench.dir.path().join("asked")).unwrap(), "x\n");
        let pass = bench.store.read().unwrap().pass.unwrap();
        assert_eq!(pass.timing.map(|timing| timing.median_ms), failure.is_none().then_some(0.2));
        assert_eq!(measure.pass_seconds(), 0.0);
        match failure {
            None => assert_eq!(pass.failure, None),
            Some(why) => assert!(pass.failure.unwrap().contains(why), "{why}"),
        }
        crate::begin::clear_failures(&mut measure.profile);
        assert_eq!(measure.pass_seconds() > 0.0, failure.is_some(), "a failure is tried again, a time is kept");
    }
}

#[test]
fn a_crash_costs_the_case_it_came_in() {
    // Times the first case of a request and dies in the second.
    let bench = Bench::new(&format!("{TIME_ALL} | head -n 1\nkill -KILL $$"));
    let mut measure = bench.measure(&[Provider::CPU]);
    measure.blocks().unwrap();
    for entry in &measure.profile.classes {
        let costs = &entry.providers[0];
        assert!(costs.failure.is_none() && costs.decode.points[0].single.is_some(), "{entry:?}");
        let second = &costs.decode.points[1];
        assert!(second.single.is_none() && second.failure.as_ref().unwrap().contains("memory runs out"), "{second:?}");
        assert!(costs.prefill.points[0].single.is_some(), "a fresh child goes on: {costs:?}");
    }
    assert_eq!(measure.profile.check(), []);
}

#[test]
fn a_provider_that_dies_while_loading_loses_its_times_and_no_others() {
    let bench = Bench::new(&format!("case $line in *webgpu*) kill -SEGV $$;; esac\n{TIME_ALL}\n{DONE}"));
    let mut measure = bench.measure(&[Provider::CPU, Provider::WEBGPU]);
    measure.blocks().unwrap();
    for entry in &measure.profile.classes {
        assert!(entry.providers[0].decode.fit.is_some());
        let failure = entry.providers[1].failure.as_ref().unwrap();
        assert!(failure.contains("segmentation fault"), "{failure}");
    }
}

#[test]
fn a_hang_and_a_refusal_are_recorded() {
    let bench = Bench::new(&format!(
        r#"case $line in *blocks_0_0*) sleep 30;; *blocks_5_5*) echo '{{"reply":"failed","reason":"no kernel"}}'; continue;; esac
        {TIME_ALL}
        {DONE}"#
    ));
    let mut measure = bench.measure(&[Provider::CPU]);
    measure.blocks().unwrap();
    let failure = |block: &str| {
        let entry = measure.profile.classes.iter().find(|entry| entry.block == block).unwrap();
        entry.providers[0].failure.clone()
    };
    assert!(failure("embedding").unwrap().contains("no answer for 1.5 s"));
    assert_eq!(failure("head").as_deref(), Some("no kernel"));
    assert_eq!(failure("layers.1"), None);
}

#[test]
fn a_run_that_fails_leaves_the_single_block_its_time() {
    let bench = Bench::new(&format!(
        r#"case $line in *blocks_2_3*) echo '{{"reply":"failed","reason":"too big"}}'; continue;; esac
        {TIME_ALL}
        {DONE}"#
    ));
    let mut measure = bench.measure(&[Provider::CPU]);
    measure.blocks().unwrap();
    let entry = measure.profile.classes.iter().find(|entry| entry.block == "layers.1").unwrap();
    let point = &entry.providers[0].decode.points[0];
    assert_eq!(point.ms, Some(1.0), "without a run no launch is known");
    assert!(point.failure.as_ref().unwrap().starts_with("2 blocks in one partition: too big"), "{point:?}");
}

#[test]
fn times_that_cannot_be_are_no_times() {
    let nonsense = TIME_ALL.replace("\\\"median_ms\\\":1", "\\\"median_ms\\\":-5");
    let bench = Bench::new(&format!("{nonsense}\n{DONE}"));
    let mut measure = bench.measure(&[Provider::CPU]);
    measure.blocks().unwrap();
    assert!(failures(&measure.profile).iter().all(|failure| failure.contains("cannot have been measured")));
    assert_eq!(measure.profile.check(), []);
    // A child that never answers is not asked forever.
    let silent = Bench::new(DONE);
    let mut measure = silent.measure(&[Provider::CPU]);
    measure.blocks().unwrap();
    assert!(failures(&measure.profile).iter().all(|failure| failure.contains("did not answer")));
}

#[test]
fn what_was_done_before_an_interrupt_is_kept_and_not_done_again() {
    // The second request hangs, as a long measurement does.
    let bench = Bench::new(&format!("if [ -e began ]; then sleep 30; fi\ntouch began\n{TIME_ALL}\n{DONE}"));
    let mut measure = bench.measure(&[Provider::CPU]);
    measure.prober = Prober::new(
        Launcher {
            program: "/bin/sh".into(),
            arguments: vec!["-c".into(), bench.script.clone().into()],
            reply_timeout: Duration::from_secs(60),
        },
        bench.interrupt.clone(),
    );
    let ask = bench.interrupt.clone();
    let path = bench.store.path().to_owned();
    std::thread::spawn(move || {
        // A profile with one class done is there before the second request hangs.
        while !std::fs::read_to_string(&path).is_ok_and(|text| text.matches("median_ms").count() >= 3) {
            std::thread::sleep(Duration::from_millis(10));
        }
        ask.request();
    });
    assert!(matches!(measure.blocks(), Err(ProfileError::Interrupted)));
    let saved = bench.store.read().unwrap();
    let done: Vec<&str> =
        saved.classes.iter().filter(|e| e.providers[0].decode.points.len() == 2).map(|e| e.block.as_str()).collect();
    assert_eq!(done.len(), 1, "{done:?}");
    assert!(
        crate::missing::missing_measurements(&saved, &measure.estimate)
            .iter()
            .all(|job| saved.classes[job.class].block != done[0] || job.scope == crate::missing::BlockCount::Several)
    );
}

#[test]
fn the_machine_is_measured_once_and_what_fails_is_said() {
    let bench = Bench::new(
        r#"echo x >> asked
        case $line in
            *ram_read*) echo '{"reply":"bandwidth","curves":[{"path":{"kind":"ram_read"},"points":[{"bytes":9,"gb_per_s":20},{"bytes":5,"gb_per_s":30}]}]}';;
            *decompress*) echo '{"reply":"bandwidth","curves":[{"path":{"kind":"decompress"},"points":[{"bytes":5,"gb_per_s":3}]}]}';;
            *disk_read*) echo '{"reply":"bandwidth","curves":[{"path":{"kind":"disk_read"},"points":[{"bytes":5,"gb_per_s":-3}]}]}';;
            *arithmetic*) echo '{"reply":"arithmetic","tflops":0.5}';;
            *contention*) echo '{"reply":"contention","compute":1.2,"link":1.1}';;
            *link*) kill -ABRT $$;;
        esac
        echo '{"reply":"done"}'"#,
    );
    let mut measure = bench.measure(&[Provider::CPU, Provider::WEBGPU]);
    measure.machine().unwrap();
    let machine = &measure.profile.machine;
    assert_eq!((machine.tflops, machine.contention[0].compute), (Some(0.5), 1.2));
    assert_eq!(machine.curves[0].points[0].bytes, 5, "in order");
    assert_eq!(machine.failures.len(), 2, "{:?}", machine.failures);
    assert!(machine.failures[0].starts_with("reading the disk: a bandwidth that cannot"), "{:?}", machine.failures);
    assert!(machine.failures[1].contains("webgpu") && machine.failures[1].contains("abort"), "{:?}", machine.failures);
    assert_eq!(measure.profile.check(), []);
    let asked = || std::fs::read_to_string(bench.dir.path().join("asked")).unwrap().lines().count();
    assert_eq!(machine.disk_contention.map(|both| (both.compute, both.read)), Some((1.2, 1.1)));
    assert_eq!(asked(), 7);
    measure.machine().unwrap();
    assert_eq!(asked(), 7, "nothing is measured twice");
}

/// Returns the number of a request's prompts as its statistics; crashes at a prompt with the word poison.
const OBSERVE: &str = r#"
    case $line in *poison*) kill -KILL $$;; esac
    n=$(echo "$line" | grep -o '"content":' | wc -l)
    echo "$n" >> requests
    echo "{\"reply\":\"observed\",\"statistics\":{\"prompts\":$n,\"prompt_tokens\":$n,\"generated_tokens\":0}}"
    echo '{"reply":"done"}'"#;

#[test]
fn prompts_are_added_up_and_one_that_kills_costs_itself() {
    let bench = Bench::new(OBSERVE);
    let corpus = bench.corpus(&["a", "b", "poison", "d", "e", "f", "g", "h", "i", "j"]);
    let mut measure = bench.measure(&[Provider::CPU]);
    measure.corpus(&run(&corpus)).unwrap();
    let found = measure.profile.corpus.as_ref().unwrap();
    assert_eq!((found.statistics.prompts, found.prompts_done, found.prompts_in_all), (9, 10, Some(10)));
    assert_eq!(found.skipped_in_all, 1);
    assert!(found.skipped[0].starts_with("line 3: it was killed"), "{:?}", found.skipped);
    assert_eq!(bench.store.read().unwrap(), measure.profile);
    let requests = || std::fs::read_to_string(bench.dir.path().join("requests")).unwrap().lines().count();
    let before = requests();
    measure.corpus(&run(&corpus)).unwrap();
    assert_eq!(requests(), before, "nothing is run twice");
}

#[test]
fn a_corpus_that_never_runs_is_abandoned() {
    let bench = Bench::new("echo x >> asked; kill -KILL $$");
    let lines: Vec<String> = (0..100).map(|n| n.to_string()).collect();
    let corpus = bench.corpus(&lines.iter().map(String::as_str).collect::<Vec<_>>());
    let mut measure = bench.measure(&[Provider::CPU]);
    measure.corpus(&run(&corpus)).unwrap();
    let asked = std::fs::read_to_string(bench.dir.path().join("asked")).unwrap().lines().count();
    assert_eq!(asked, 4, "the first few together, then three by themselves");
    assert!(measure.profile.notes.iter().any(|note| note.contains("abandoned")), "{:?}", measure.profile.notes);
}

#[test]
fn rounding_is_compared_block_by_block() {
    let bench = Bench::new(
        r#"case $line in *'"request":"compare"'*) echo '{"reply":"compared","positions":4,"kl":0.5,"top1_changed":0.25}';; esac
        echo '{"reply":"done"}'"#,
    );
    let corpus = bench.corpus(&["a", "b"]);
    let prompts: Vec<_> = corpus.prompts_after(0).unwrap().map(|p| p.unwrap()).collect();
    let mut measure = bench.measure(&[Provider::CPU]);
    measure.sensitivity(&prompts).unwrap();
    let found = &measure.profile.sensitivity;
    assert_eq!(found.len(), 2 * measure.profile.model.blocks.len());
    let layer = found.iter().find(|s| s.block == "layers.2" && s.bits == 4).unwrap();
    assert_eq!((layer.positions, layer.kl, layer.top1_changed), (4, Some(0.5), Some(0.25)));
    assert_eq!(bench.store.read().unwrap().check(), []);
}
