//! Corpora with the usual mistakes.

use super::*;
use hpp_schema::probe::{ChatTurn, PromptContent};
use std::io::Write;
use tempfile::TempDir;

fn corpus(name: &str, bytes: &[u8]) -> (TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

fn prompts(path: &Path) -> Vec<(u64, PromptContent)> {
    let corpus = Corpus::scan(path, None, true).unwrap();
    corpus.prompts_after(0).unwrap().map(|p| p.unwrap()).map(|p| (p.line, p.content)).collect()
}

fn text(words: &str) -> PromptContent {
    PromptContent::Text(words.into())
}

#[test]
fn each_kind_of_line_is_read() {
    let (_dir, path) = corpus(
        "c.jsonl",
        b"\xef\xbb\xbf{\"prompt\": \"a\", \"id\": 7}\r\n\n{\"text\": \"b\"}\n\
          {\"messages\": [{\"role\": \"user\", \"content\": \"c\"}]}\n{\"tokens\": [5, 9], \"id\": 1}",
    );
    let chat = PromptContent::Messages(vec![ChatTurn { role: "user".into(), content: "c".into() }]);
    let tokens = PromptContent::Tokens(vec![5, 9]);
    assert_eq!(prompts(&path), [(1, text("a")), (3, text("b")), (4, chat), (5, tokens)]);
    let (_dir, path) = corpus("c.txt", b"one \r\n   \n\n{\"two\"\nthree");
    assert_eq!(prompts(&path), [(1, text("one ")), (4, text("{\"two\"")), (5, text("three"))]);
}

#[test]
fn prompts_become_conversations_as_in_jobs() {
    let lines = [
        "{\"prompt\": \"a\", \"chat\": true}",
        "{\"text\": \"b\", \"system\": \"s\", \"max_new\": 4}",
        "{\"prompt\": \"c\", \"chat\": false, \"system\": null}",
    ];
    let (_dir, path) = corpus("c.jsonl", lines.join("\n").as_bytes());
    let turn = |role: &str, content: &str| ChatTurn { role: role.into(), content: content.into() };
    let chat = |turns| PromptContent::Messages(turns);
    let expected = [chat(vec![turn("user", "a")]), chat(vec![turn("system", "s"), turn("user", "b")]), text("c")];
    assert_eq!(prompts(&path).into_iter().map(|(_, content)| content).collect::<Vec<_>>(), expected);
    let bad = ["{\"prompt\": \"a\", \"chat\": 1}", "{\"prompt\": \"a\", \"chat\": false, \"system\": \"s\"}"];
    let (_dir, path) = corpus("bad.jsonl", bad.join("\n").as_bytes());
    let said = Corpus::scan(&path, None, false).unwrap_err().to_string();
    assert!(said.contains("`chat` is neither true nor false") && said.contains("`system` needs `chat`"), "{said}");
}

#[test]
fn every_bad_line_is_named_at_once() {
    let lines = [
        "{\"prompt\": \"good\"}",
        "{\"prompt\": ",
        "[1]",
        "{\"question\": \"why\"}",
        "{\"prompt\": 5}",
        "{\"prompt\": \"a\", \"text\": \"b\"}",
        "{\"messages\": []}",
        "{\"messages\": [{\"role\": \"user\"}]}",
        "{\"text\": \"\"}",
        "{\"tokens\": []}",
        "{\"tokens\": [3, -1]}",
    ];
    let (_dir, path) = corpus("c.jsonl", lines.join("\n").as_bytes());
    let error = Corpus::scan(&path, None, false).unwrap_err();
    let said = error.to_string();
    for words in [
        "10 lines of the corpus",
        "line 2: it is not JSON: EOF",
        "line 3: it is not a JSON object",
        "line 4: it has none of `prompt`, `text`, `messages` and `tokens`, but `question`",
        "line 5: its `prompt` is not text",
        "line 6: it has `prompt` and `text`, and only one",
        "line 7: its `messages` are empty",
        "line 8: its message 1 has no text in `content`",
        "line 9: its `text` is empty",
        "line 10: its `tokens` are empty",
        "line 11: its token 2 is not a token's number",
    ] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    assert!(error.hint().unwrap().contains("--skip-bad"));
    let skipping = Corpus::scan(&path, None, true).unwrap();
    assert_eq!((skipping.prompts, skipping.bad, skipping.reasons.len()), (1, 10, 10));
}

#[test]
fn a_long_list_of_bad_lines_is_cut_and_counted() {
    let (_dir, path) = corpus("c.jsonl", "no\n".repeat(1000).as_bytes());
    let error = Corpus::scan(&path, None, false).unwrap_err();
    assert!(error.to_string().ends_with("and 980 more"), "{error}");
    assert_eq!(error.to_string().lines().count(), MOST_NAMED + 2);
    // Nothing is left when all are skipped.
    assert!(matches!(Corpus::scan(&path, None, true), Err(CorpusError::AllBad { bad: 1000, .. })));
}

#[test]
fn what_is_not_utf8_is_a_bad_line() {
    let (_dir, path) = corpus("c.txt", b"fine\nab\xff\xfe\nfine too\n");
    let error = Corpus::scan(&path, None, false).unwrap_err().to_string();
    assert!(error.contains("line 2: it is not UTF-8 at byte 3"), "{error}");
    assert_eq!(prompts(&path).len(), 2);
}

#[test]
fn nothing_is_refused() {
    for (name, bytes) in [("c.txt", &b""[..]), ("c.txt", b"\n \n"), ("c.jsonl", b"\n\n")] {
        let (_dir, path) = corpus(name, bytes);
        assert!(matches!(Corpus::scan(&path, None, false), Err(CorpusError::Empty { .. })), "{bytes:?}");
    }
    let (_dir, path) = corpus("c.csv", b"a,b");
    assert!(matches!(Corpus::scan(&path, None, false), Err(CorpusError::Format { .. })));
    let missing = Corpus::scan(Path::new("none.txt"), None, false).unwrap_err();
    assert!(missing.to_string().contains("none.txt"));
    assert!(matches!(Corpus::scan(tempfile::tempdir().unwrap().path(), None, false), Err(CorpusError::Format { .. })));
}

#[cfg(unix)]
#[test]
fn a_device_without_an_end_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.txt");
    std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
    let error = Corpus::scan(&path, None, true).unwrap_err();
    assert!(matches!(error, CorpusError::Read { .. }) && error.hint().is_some(), "{error}");
}

#[test]
fn no_more_is_read_than_was_asked_for() {
    let (_dir, path) = corpus("c.jsonl", b"{\"prompt\": \"a\"}\n{\"prompt\": \"b\"}\nnonsense\n");
    assert_eq!(Corpus::scan(&path, Some(2), false).unwrap().prompts, 2);
    assert!(Corpus::scan(&path, Some(3), false).is_err());
}

#[test]
fn reading_goes_on_where_it_ended() {
    let (_dir, path) = corpus("c.jsonl", b"{\"prompt\": \"a\"}\nbad\n{\"prompt\": \"b\"}\n{\"prompt\": \"c\"}\n");
    let corpus = Corpus::scan(&path, Some(2), true).unwrap();
    let rest: Vec<u64> = corpus.prompts_after(1).unwrap().map(|p| p.unwrap().line).collect();
    assert_eq!(rest, [3]);
    assert_eq!(corpus.prompts_after(2).unwrap().count(), 0);
}

#[test]
fn a_line_without_end_is_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.txt");
    let mut file = File::create(&path).unwrap();
    for _ in 0..40 {
        file.write_all(&vec![b'x'; 1 << 20]).unwrap();
    }
    file.write_all(b"\nshort\n").unwrap();
    let corpus = Corpus::scan(&path, None, true).unwrap();
    assert_eq!((corpus.prompts, corpus.bad), (1, 1));
    assert!(corpus.reasons[0].contains("longer than 16 MiB"));
    assert_eq!(corpus.prompts_after(0).unwrap().next().unwrap().unwrap().line, 2);
}

/// Most bytes this process has had in memory.
#[cfg(target_os = "linux")]
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
}

/// A hundred thousand lines, 100 MB, take no memory that a hundred would not.
#[cfg(target_os = "linux")]
#[test]
fn memory_does_not_grow_with_the_corpus() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c.jsonl");
    let mut file = io::BufWriter::new(File::create(&path).unwrap());
    let words = "word ".repeat(200);
    for line in 0..100_000 {
        let bad = if line % 3 == 0 { "" } else { "\"" };
        writeln!(file, "{{\"prompt\": \"{line} {words}{bad}}}").unwrap();
    }
    drop(file);
    let before = peak();
    let corpus = Corpus::scan(&path, None, true).unwrap();
    assert_eq!((corpus.prompts, corpus.bad), (66_666, 33_334));
    assert_eq!(corpus.prompts_after(0).unwrap().count(), 66_666);
    // Other tests may run in this process, none of which needs so much.
    assert!(peak() - before < 48 << 20, "{} MiB more", (peak() - before) >> 20);
}
