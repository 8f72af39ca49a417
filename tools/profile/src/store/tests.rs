//! Profiles written to streams and through links.

use super::*;

/// A stream receives the profile once, at the end; a symbolic link to a file stays a link.
#[test]
fn streams_get_one_profile_and_links_stay() {
    let dir = tempfile::tempdir().unwrap();
    let (link, fifo) = (dir.path().join("link"), dir.path().join("fifo"));
    std::os::unix::fs::symlink("profile.yaml", &link).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let analysis = crate::sample::analysis("genai/llama3-fp32-cpu");
    let profile = crate::sample::profile(&analysis, crate::sample::settings(&[hpp_schema::Provider::CPU]));
    let (file, stream) = (Store::new(&link), Store::new(&fifo));
    stream.refuse_to_overwrite().unwrap();
    stream.save(&profile).unwrap();
    file.save(&profile).unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert!(file.refuse_to_overwrite().is_err());
    let reader = std::thread::spawn(move || fs::read_to_string(fifo).unwrap());
    stream.finish(&profile).unwrap();
    assert_eq!(reader.join().unwrap(), fs::read_to_string(link).unwrap());
}

/// The hint for a directory must not be to resume or to replace it: that would fail, too.
#[test]
fn a_directory_is_refused_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let is_directory =
        |refused: Result<(), ProfileStoreError>| matches!(refused, Err(ProfileStoreError::Directory { .. }));
    assert!(is_directory(Store::new(dir.path()).check_creatable()));
    assert!(is_directory(check_writable(dir.path(), b"<!DOCTYPE html>")), "a report");
    Store::new(&dir.path().join("new.yaml")).check_creatable().unwrap();
}
