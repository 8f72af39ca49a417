//! Rules for every file: a maximum length, a meaningful name, a module comment, no path of a particular machine.

use hpp_tidy::{SourceFile, source_files};

const MAX_LINES: usize = 800;

/// File names that do not describe the contents.
const EMPTY_NAMES: [&str; 4] = ["utils.rs", "util.rs", "common.rs", "helpers.rs"];

/// Prefixes of home directories and checkouts. Concatenated, so that this file passes its own test.
const MACHINE_PATHS: [&str; 4] =
    [concat!("/wo", "rk/"), concat!("/ro", "ot/"), concat!("/ho", "me/"), concat!("/Us", "ers/")];

/// Macros that mark unfinished work. Concatenated for the same reason.
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
    let too_long = rust(&files).filter(|file| file.text.lines().count() > MAX_LINES);
    assert_none(too_long.map(|file| format!("{} is longer than {MAX_LINES} lines", file.path)).collect());
}

#[test]
fn names_describe_the_contents() {
    let files = source_files();
    let empty = rust(&files).filter(|file| EMPTY_NAMES.iter().any(|name| file.path.ends_with(&format!("/{name}"))));
    assert_none(empty.map(|file| format!("{} needs a name that describes its contents", file.path)).collect());
}

#[test]
fn modules_begin_with_a_sentence() {
    let files = source_files();
    // Generated code is included into a module that has one.
    let written = rust(&files).filter(|file| !file.path.contains("/generated/"));
    let undocumented = written.filter(|file| !file.text.starts_with("//! "));
    assert_none(undocumented.map(|file| format!("{} does not begin with a //! sentence", file.path)).collect());
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
