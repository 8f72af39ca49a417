//! Children that misbehave, played by shell scripts.

#![cfg(unix)]

use super::*;
use hpp_schema::probe::MachineProbe;
use std::time::Instant;

const READY: &str = r#"echo '{"reply":"ready","version":4,"host":{"cpu":"c","cores":1,"memory":"1 GiB","system":"s","threads":1,"onnxruntime":"1","hpp":"0","devices":[]}}'"#;

/// A child that runs this script after it said that it is ready.
fn prober(script: &str, timeout_ms: u64) -> Prober {
    bare(&format!("{READY}; {script}"), timeout_ms)
}

fn bare(script: &str, timeout_ms: u64) -> Prober {
    let launcher = Launcher {
        program: "/bin/sh".into(),
        arguments: vec!["-c".into(), script.into()],
        reply_timeout: Duration::from_millis(timeout_ms),
    };
    Prober::new(launcher, Interrupt::default())
}

fn request() -> Request {
    Request::Machine(MachineProbe::Arithmetic)
}

/// Every reply, then how it ended.
fn answers(prober: &mut Prober) -> (Vec<Reply>, Result<(), RequestError>) {
    let mut replies = Vec::new();
    if let Err(trouble) = prober.ask(&request()) {
        return (replies, Err(trouble));
    }
    loop {
        match prober.answer() {
            Ok(Some(reply)) => replies.push(reply),
            Ok(None) => return (replies, Ok(())),
            Err(trouble) => return (replies, Err(trouble)),
        }
    }
}

fn lost(prober: &mut Prober) -> String {
    match answers(prober).1 {
        Err(RequestError::Lost(how)) => how,
        other => panic!("{other:?}"),
    }
}

const TFLOPS: &str = r#"{"reply":"arithmetic","tflops":0.5}"#;

#[test]
fn requests_are_answered_one_after_another_by_one_child() {
    let script =
        format!(r#"n=0; while read line; do n=$((n+1)); echo '{TFLOPS}'; echo; echo '{{"reply":"done"}}'; done"#);
    let mut prober = prober(&script, 5000);
    assert_eq!(prober.host().unwrap().cpu, "c");
    for _ in 0..3 {
        let (replies, end) = answers(&mut prober);
        assert_eq!(replies, [Reply::Arithmetic { tflops: 0.5 }]);
        end.unwrap();
    }
}

#[test]
fn a_refusal_leaves_the_child_alive() {
    // The second answer counts lines, which only the same process can.
    let script = r#"read a; echo '{"reply":"failed","reason":"no device"}'; read b; echo '{"reply":"arithmetic","tflops":2}'; echo '{"reply":"done"}'"#;
    let mut prober = prober(script, 5000);
    assert!(matches!(answers(&mut prober).1, Err(RequestError::Refused(why)) if why == "no device"));
    assert_eq!(answers(&mut prober).0, [Reply::Arithmetic { tflops: 2.0 }]);
}

#[test]
fn a_crash_is_told_with_the_last_words() {
    let how = lost(&mut prober("read a; echo 'device on fire' >&2; kill -SEGV $$", 5000));
    assert!(how.contains("signal 11 (segmentation fault)") && how.contains("device on fire"), "{how}");
    let how = lost(&mut prober("read a; kill -KILL $$", 5000));
    assert!(how.contains("memory runs out (signal 9)"), "{how}");
    let how = lost(&mut prober(
        "read a; echo 1 >&2; echo 2 >&2; echo 3 >&2; echo 4 >&2; echo 5 >&2; echo 6 >&2; exit 7",
        5000,
    ));
    assert!(how.contains("exit code 7") && how.ends_with("2 / 3 / 4 / 5 / 6"), "{how}");
}

#[test]
fn what_was_answered_before_a_crash_counts_and_the_next_child_is_fresh() {
    let dir = tempfile::tempdir().unwrap();
    let flag = dir.path().join("crashed");
    let (flag, done) = (flag.display(), r#"{"reply":"done"}"#);
    let script =
        format!("read a; echo '{TFLOPS}'; if [ ! -e {flag} ]; then touch {flag}; kill -ABRT $$; fi; echo '{done}'");
    let mut prober = prober(&script, 5000);
    let (replies, end) = answers(&mut prober);
    assert_eq!(replies.len(), 1);
    assert!(matches!(end, Err(RequestError::Lost(how)) if how.contains("signal 6")));
    answers(&mut prober).1.unwrap();
}

#[test]
fn a_hang_is_ended() {
    let begun = Instant::now();
    let how = lost(&mut prober("read a; sleep 60", 300));
    assert!(how.contains("no answer for 0.3 s"), "{how}");
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn the_timeout_restarts_with_each_reply() {
    let script =
        format!("read a; for i in 1 2 3 4; do sleep 0.4; echo '{TFLOPS}'; done; echo '{{\"reply\":\"done\"}}'");
    let (replies, end) = answers(&mut prober(&script, 1200));
    assert_eq!(replies.len(), 4);
    end.unwrap();
}

#[test]
fn garbage_is_not_believed() {
    let how = lost(&mut prober("read a; echo 'I like ONNX'; sleep 5", 5000));
    assert!(how.contains("I like ONNX"), "{how}");
    let how = lost(&mut prober(r#"read a; echo '{"reply":"arithmetic","tflops":"many"}'"#, 5000));
    assert!(how.contains("many"), "{how}");
}

#[test]
fn a_child_that_is_never_ready_is_an_error_with_a_reason() {
    let error = |script: &str| match bare(script, 500).host() {
        Err(RequestError::Start(error)) => error,
        other => panic!("{other:?}"),
    };
    let gone = error("echo 'no library' >&2; exit 1").to_string();
    assert!(gone.contains("exit code 1") && gone.contains("no library"), "{gone}");
    assert!(error("sleep 60").to_string().contains("nothing for 0.5 s"));
    assert!(error("echo hello").to_string().contains("hello"));
    assert!(error(&format!("echo '{TFLOPS}'")).to_string().contains("Arithmetic"));
    let newer = error(&READY.replace("\"version\":4", "\"version\":9"));
    assert!(matches!(newer, ChildError::Version { found: 9, .. }) && newer.hint().is_some());
    let launcher = Launcher::beside(Path::new("/nowhere/hpp-profile"), None, Duration::from_secs(1));
    let missing = Prober::new(launcher, Interrupt::default()).host().unwrap_err();
    assert!(missing.to_string().contains("/nowhere/hpp-exec"), "{missing}");
}

#[test]
fn the_environment_names_another_program() {
    let launcher =
        |named: &str| Launcher::beside(Path::new("/a/hpp-profile"), Some(named.into()), Duration::ZERO).program;
    assert_eq!(launcher("/b/exec"), Path::new("/b/exec"));
    assert_eq!(launcher(""), Path::new("/a/hpp-exec"));
}

#[test]
fn ctrl_c_ends_the_child() {
    let mut prober = prober("read a; sleep 60", 60_000);
    prober.host().unwrap();
    prober.ask(&request()).unwrap();
    let pid = prober.child.as_ref().unwrap().id();
    prober.interrupt.request();
    let begun = Instant::now();
    assert!(matches!(prober.answer(), Err(RequestError::Interrupted)));
    assert!(begun.elapsed() < Duration::from_secs(5));
    assert!(!Path::new(&format!("/proc/{pid}")).exists());
}
