//! What every file keeps: a size one can read, a name that says something, a first sentence, no path of one machine.

use hpp_tidy::{SourceFile, source_files};

const MOST_LINES: usize = 800;

/// File names that say nothing about what is inside.
const EMPTY_NAMES: [&str; 4] = ["utils.rs", "util.rs", "common.rs", "helpers.rs"];

/// Where home folders and checkouts lie on somebody's machine; pieced together so that this file passes its own test.
const MACHINE_PATHS: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/Us", "ers/")];

/// What is left behind by work that is not done; pieced together likewise.
const UNFINISHED: [&str; 3] = [concat!("to", "do!("), concat!("unimple", "mented!("), concat!("db", "g!(")];

fn rust(files: &[SourceFile]) -> impl Iterator<Item = &SourceFile> {
    files.iter().filter(|file| file.path.ends_with(".rs"))
}

fn assert_none(wrong: Vec<String>) {
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn files_stay_readable() {
    let files = source_files();
    assert!(rust(&files).count() > 10, "the walk finds the sources");
    let too_long = rust(&files).filter(|file| file.text.lines().count() > MOST_LINES);
    assert_none(too_long.map(|file| format!("{} is longer than {MOST_LINES} lines", file.path)).collect());
}

#[test]
fn names_say_something() {
    let files = source_files();
    let empty = rust(&files).filter(|file| EMPTY_NAMES.iter().any(|name| file.path.ends_with(&format!("/{name}"))));
    assert_none(empty.map(|file| format!("{} needs a name that says what it holds", file.path)).collect());
}

#[test]
fn modules_begin_with_a_sentence() {
    let files = source_files();
    let silent = rust(&files).filter(|file| !file.text.starts_with("//! "));
    assert_none(silent.map(|file| format!("{} does not begin with a //! sentence", file.path)).collect());
}

#[test]
fn no_paths_of_one_machine() {
    assert_none(lines_with(&source_files(), &MACHINE_PATHS));
}

#[test]
fn nothing_is_left_unfinished() {
    assert_none(lines_with(&source_files(), &UNFINISHED));
}

fn lines_with(files: &[SourceFile], words: &[&str]) -> Vec<String> {
    let lines = files.iter().flat_map(|file| file.text.lines().enumerate().map(move |line| (file, line)));
    let wrong = lines.filter(|(_, (_, line))| words.iter().any(|word| line.contains(word)));
    wrong.map(|(file, (number, line))| format!("{}:{}: {}", file.path, number + 1, line.trim())).collect()
}
