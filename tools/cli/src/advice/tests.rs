//! Advice on wrong command lines of a small command.

use super::*;
use clap::{Arg, ArgAction};

const ADVICE: Advice = Advice {
    habits: &[("plan", "planning needs no subcommand"), ("-m", "give the model without -m")],
    second_word: "give a prompt with -p",
};

fn command() -> Command {
    let model = Arg::new("model").required(true);
    let ram = Arg::new("ram").long("ram");
    let bits = Arg::new("bits").long("bits").value_parser(["int4", "int8", "none"]);
    let ahead = Arg::new("ahead").long("ahead").action(ArgAction::SetTrue);
    let on_time = Arg::new("on-time").long("on-time").action(ArgAction::SetTrue).conflicts_with("ahead");
    let serve = Command::new("serve")
        .args([ahead.clone(), on_time.clone()])
        .arg(Arg::new("port").long("port"))
        .arg(Arg::new("workers").long("workers").value_parser(clap::value_parser!(u64)))
        .arg(Arg::new("wide").short('w').action(ArgAction::SetTrue));
    let verify = Command::new("verify").arg(Arg::new("plan"));
    Command::new("hpp-exec")
        .subcommand_negates_reqs(true)
        .args_conflicts_with_subcommands(true)
        .arg(model)
        .arg(ram)
        .arg(bits)
        .args([ahead, on_time])
        .subcommand(serve)
        .subcommand(verify)
}

/// What is printed for a wrong command line.
fn said(line: &str) -> String {
    let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
    let all = std::iter::once("hpp-exec".to_owned()).chain(arguments.clone());
    let error = command().try_get_matches_from(all).expect_err("the line is wrong");
    ADVICE.explain(error, &command(), &arguments).to_string()
}

#[test]
fn a_negative_value_is_refused_as_one() {
    for line in ["m --ram -5M", "m --ram -1"] {
        assert!(said(line).contains("for '--ram': it must not be negative"), "{}", said(line));
    }
    assert!(!said("m --nonsense 5").contains("negative"));
}

#[test]
fn values_that_may_be_meant_are_named() {
    for (value, similar) in [("int5", "some similar values exist: 'int4', 'int8'"), ("q8", "exists: 'int8'")] {
        let said = said(&format!("m --bits {value}"));
        let (before_list, _) = said.split_once("all possible values: int4, int8, none").unwrap();
        assert!(before_list.contains(similar) && !before_list.contains("none"), "{said}");
    }
    assert!(said("m --bits 4").contains("a similar value exists: 'int4'"));
    assert!(said("m --bits non").contains("a similar value exists: 'none'"));
    assert!(!said("m --bits lots").contains("similar"), "{}", said("m --bits lots"));
    assert!(said("m --bits lots").contains("[possible values: int4, int8, none]"));
}

#[test]
fn what_is_no_number_is_answered_with_what_to_write() {
    assert!(said("serve --workers=-1").contains("for '--workers <workers>': it must not be negative"));
    for value in ["8k", "x", "1.5"] {
        let said = said(&format!("serve --workers {value}"));
        assert!(
            said.contains(&format!("invalid value '{value}' for '--workers <workers>': it is a whole number")),
            "{said}"
        );
    }
}

/// After `--` the option would be taken for the model, which is never meant.
#[test]
fn an_unknown_option_is_not_suggested_as_a_value() {
    for line in ["m --lora x", "--lora", "--lora x"] {
        let said = said(line);
        assert!(said.contains("unexpected argument '--lora' found") && !said.contains("tip:"), "{said}");
    }
    assert!(said("m --rams 5").contains("a similar argument exists: '--ram'"));
    assert!(!said("serve --parrot 5").contains("similar argument"), "{}", said("serve --parrot 5"));
    assert!(said("serve --prot 5").contains("a similar argument exists: '--port'"), "{}", said("serve --prot 5"));
}

#[test]
fn a_mistyped_subcommand_is_named() {
    assert!(said("verfiy plan").contains("did you mean 'hpp-exec verify'?"), "{}", said("verfiy plan"));
    assert!(said("srve --port 1").contains("did you mean 'hpp-exec serve'?"));
    assert!(said("plan x y").contains("planning needs no subcommand"));
    assert!(!said("model --nonsense").contains("did you mean"));
}

#[test]
fn a_subcommand_of_another_command_is_named() {
    assert!(said("inspect m").contains("'inspect' is a subcommand of hpp-split: write `hpp-split inspect ...`"));
    assert!(said("merge a b").contains("'merge' is a subcommand of hpp-profile"));
}

/// clap takes a single word for the model.
#[test]
fn a_single_word_that_names_no_path_is_compared_too() {
    let instead_of = |word| ADVICE.instead_of(word, &command());
    assert!(instead_of("srve").is_some_and(|said| said.contains("did you mean 'hpp-exec serve'?")));
    assert_eq!(instead_of("plan").as_deref(), Some("planning needs no subcommand"));
    assert_eq!(instead_of("some-model"), None);
    assert!(instead_of("serve").is_some_and(|said| said.contains("before its options: hpp-exec serve")));
}

#[test]
fn a_second_word_is_not_called_a_subcommand() {
    assert!(
        said("model hello").contains("unexpected argument 'hello': give a prompt with -p"),
        "{}",
        said("model hello")
    );
    let after_model = said("model serve");
    assert!(
        after_model.contains("'serve': write the subcommand first, before its options: hpp-exec serve"),
        "{after_model}"
    );
    assert!(
        said("--ram 5 serve plan").contains("before its options: hpp-exec serve"),
        "{}",
        said("--ram 5 serve plan")
    );
}

#[test]
fn options_of_subcommands_and_of_other_commands_are_named() {
    assert!(said("m --port 80").contains("'--port' is an option of 'hpp-exec serve'"), "{}", said("m --port 80"));
    assert!(said("m -w").contains("'-w' is an option of 'hpp-exec serve'"));
    assert!(said("m --pack").contains("'--pack' is an option of hpp-split"));
    assert!(said("m --split-mode row").contains("'--split-mode' is an option of hpp-split"));
    assert!(said("m --quick").contains("'--quick' is an option of hpp-profile"));
    assert!(said("-m model").contains("give the model without -m"));
    let said_of_ram = said("serve --ram 5");
    assert!(said_of_ram.contains("'--ram' is an option of hpp-exec without a subcommand"), "{said_of_ram}");
    assert!(said_of_ram.contains("Usage: hpp-exec serve"), "{said_of_ram}");
    assert!(said("m --pack").contains("Usage: hpp-exec") && !said("m --pack").contains("to pass '--pack'"));
}

/// Subcommands have it, too, but that is not why it is refused.
#[test]
fn an_option_that_is_refused_beside_another_is_not_called_one_of_another_command() {
    for arguments in ["m --ahead --on-time", "serve --ahead --on-time"] {
        let said = said(arguments);
        assert!(said.contains("cannot be used with") && !said.contains("is an option of"), "{arguments}: {said}");
    }
}

#[test]
fn other_errors_stay_as_they_are() {
    let error = command().try_get_matches_from(["hpp-exec", "m", "--ram"]).unwrap_err();
    let before = error.to_string();
    assert_eq!(ADVICE.explain(error, &command(), &["m".to_owned(), "--ram".to_owned()]).to_string(), before);
}
