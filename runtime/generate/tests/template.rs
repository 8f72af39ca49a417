//! A template with every construct that real chat templates use gives the text that Python's Jinja2 gives with the settings of
//! `transformers` (`data/every_construct.txt`).

use hpp_generate::text::{ChatTemplate, Message, Role};
use std::path::Path;

fn messages() -> Vec<Message> {
    vec![
        Message::new(Role::System, "be <b>brief</b>"),
        Message::new(Role::User, "hi\n"),
        Message::new(Role::Assistant, "<think>\nhm\n</think>\n\nhello"),
        Message::new(Role::User, "  more? "),
    ]
}

fn template() -> ChatTemplate {
    let config = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(config.path(), r#"{ "bos_token": "<s>", "eos_token": "</s>" }"#).unwrap();
    let file = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/every_construct.jinja"));
    ChatTemplate::open(Some(file), Some(config.path())).unwrap().unwrap()
}

#[test]
fn renders_what_python_renders() {
    assert_eq!(template().render(&messages()).unwrap(), include_str!("data/every_construct.txt"));
}

#[test]
fn an_error_raised_by_the_template_keeps_its_message() {
    let error = template().render(&messages()[2..]).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("roles must alternate"), "{cause}");
}
