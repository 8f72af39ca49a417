//! A conversation in a pseudoterminal.

#![cfg(unix)]

mod support;

use rexpect::process::{Signal, WaitStatus};
use rexpect::session::{PtySession, spawn_command};
use serde_json::json;
use std::io::Read;
use std::process::{Command, Stdio};
use support::PlanDir;

fn begin(plan: &PlanDir, args: &[&str]) -> PtySession {
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpp-exec"));
    command.arg(plan.path()).args(args).env("TERM", "xterm");
    spawn_command(command, Some(60_000)).unwrap()
}

/// A conversation that has begun.
fn talk(plan: &PlanDir, args: &[&str]) -> PtySession {
    let mut session = begin(plan, args);
    session.exp_string("/help shows the commands").unwrap();
    session
}

fn say(session: &mut PtySession, line: &str) {
    session.exp_string("> ").unwrap();
    session.send_line(line).unwrap();
}

fn left(session: PtySession) -> Option<i32> {
    match session.process().wait().unwrap() {
        WaitStatus::Exited(_, code) => Some(code),
        _ => None,
    }
}

#[test]
fn turns_reuse_the_conversation_until_the_user_leaves() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 128);
    let mut session = talk(&plan, &["--max-new", "4", "--ignore-eos"]);
    say(&mut session, "hello");
    session.exp_string("[4 tokens").unwrap();
    session.exp_string(" 0 tokens of the conversation reused").unwrap();
    say(&mut session, "again");
    // The tokens of the first turn and of its answer are reused.
    session.exp_regex(r" [1-9][0-9]* tokens? of the conversation reused").unwrap();
    say(&mut session, "/reset");
    say(&mut session, "third");
    session.exp_string(" 0 tokens of the conversation reused").unwrap();
    say(&mut session, "/nonsense");
    session.exp_string("there is no command /nonsense").unwrap();
    say(&mut session, "/bye now");
    session.exp_string("/bye takes no more words").unwrap();
    say(&mut session, "/help");
    session.exp_string("Ctrl-C").unwrap();
    say(&mut session, "/bye");
    assert_eq!(left(session), Some(0));
}

#[test]
fn ctrl_d_leaves_and_ctrl_c_stops_only_the_answer() {
    let plan = PlanDir::new("optimum/llama-with-past", 20_000);
    let mut session = talk(&plan, &["--ignore-eos"]);
    say(&mut session, "hello");
    std::thread::sleep(std::time::Duration::from_millis(500));
    session.send_control('c').unwrap();
    session.exp_string("stopped]").unwrap();
    session.exp_string("> ").unwrap();
    session.send_control('c').unwrap();
    session.exp_string("to leave, press Ctrl-D or type /bye").unwrap();
    session.exp_string("> ").unwrap();
    session.send_control('d').unwrap();
    assert_eq!(left(session), Some(0));
}

#[test]
fn lines_that_were_pasted_or_typed_ahead_are_answered_in_turn() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 256);
    let mut session = talk(&plan, &["--max-new", "2", "--ignore-eos"]);
    session.exp_string("> ").unwrap();
    session.send("one\rtwo\rthree\r").unwrap();
    session.flush().unwrap();
    for _ in 0..3 {
        session.exp_string("[2 tokens").unwrap();
    }
    say(&mut session, "/bye");
    assert_eq!(left(session), Some(0));
}

/// Ended by a service manager, or because nobody reads the answer any more: what was said until then is kept.
#[test]
fn a_conversation_that_is_ended_saves_its_answer() {
    let plan = PlanDir::new("optimum/llama-with-past", 20_000);
    let template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    std::fs::write(plan.file("tokenizer_config.json"), json!({ "chat_template": template }).to_string()).unwrap();
    let kv = tempfile::tempdir().unwrap();
    let kept = ["--session", "ended", "--kv-dir", kv.path().to_str().unwrap(), "--ignore-eos"];
    let mut session = talk(&plan, &kept);
    say(&mut session, "hello");
    std::thread::sleep(std::time::Duration::from_millis(500));
    session.process_mut().signal(Signal::SIGTERM).unwrap();
    session.exp_string("stopped]").unwrap();
    assert_eq!(left(session), Some(130));
    let mut session = begin(&plan, &kept);
    session.exp_string("continuing the conversation after 2 messages").unwrap();
    say(&mut session, "/bye");
    assert_eq!(left(session), Some(0));
    let mut command = Command::new(env!("CARGO_BIN_EXE_hpp-exec"));
    let command =
        command.arg(plan.path()).args(kept).args(["-p", "again"]).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut answering = command.spawn().unwrap();
    let mut stdout = answering.stdout.take().unwrap();
    stdout.read_exact(&mut [0]).unwrap();
    // Writes fail from now on, as those to a closed terminal do.
    drop(stdout);
    answering.wait().unwrap();
    let mut session = begin(&plan, &kept);
    session.exp_string("continuing the conversation after 4 messages").unwrap();
    session.exp_string("> ").unwrap();
    // There is nothing to keep at the prompt.
    session.process_mut().signal(Signal::SIGTERM).unwrap();
    assert_eq!(left(session), Some(143));
}

#[test]
fn a_message_that_is_too_long_is_reported_and_the_conversation_continues() {
    let plan = PlanDir::new("genai/llama3-fp32-cpu", 32);
    let template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    std::fs::write(plan.file("tokenizer_config.json"), json!({ "chat_template": template }).to_string()).unwrap();
    let mut session = talk(&plan, &["--max-new", "2", "--ignore-eos"]);
    say(&mut session, &"far too long ".repeat(20));
    session.exp_string("the context holds 32").unwrap();
    session.exp_string("hint: shorten the prompt").unwrap();
    say(&mut session, "hi");
    session.exp_string("[2 tokens").unwrap();
    // What helps a conversation that is too long comes first.
    say(&mut session, &"far too long ".repeat(20));
    session.exp_string("with this message the conversation has").unwrap();
    session.exp_string("hint: /reset starts a new conversation; or shorten the message").unwrap();
    // A conversation that fills the context leaves no room for a short message either.
    let refused = (0..8).find_map(|_| {
        say(&mut session, "hi");
        let (_, said) = session.exp_regex("[0-9] tok/s|hint: [^\r\n]*").unwrap();
        said.strip_prefix("hint: ").map(str::to_owned)
    });
    assert_eq!(refused.as_deref(), Some("/reset starts a new conversation"));
    say(&mut session, "/exit");
    assert_eq!(left(session), Some(0));
}
