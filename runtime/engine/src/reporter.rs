//! Progress and warnings of the engine. The engine reports them; the binary decides what to draw and where.

use hpp_schema::Provider;
use std::path::Path;

/// Receives progress, warnings and the reasons of fallbacks. Every method may be ignored.
pub trait Reporter: Send + Sync {
    /// Files are being compared with what the plan recorded.
    fn checking_files(&self, _files: usize) {}
    /// Every byte of a file is being compared with the plan.
    fn comparing(&self, _file: &str, _bytes: u64) {}
    /// Partition `index` of `count` is being loaded.
    fn loading(&self, _partition: &str, _index: usize, _count: usize) {}
    /// The weights of a partition that is being loaded are written to `dir` in the layout that kernels want, once for all later
    /// starts. `bytes`: about what all partitions will take there.
    fn preparing(&self, _partition: &str, _dir: &Path, _about: u64) {}
    /// A partition runs on another provider than the plan prefers.
    fn fallback(&self, _partition: &str, _wanted: Provider, _got: Provider, _reason: &str) {}
    /// Something a person should know, once.
    fn warning(&self, _message: &str) {}
}

/// Discards all reports.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Reporter for Silent {}

/// Names for people, separated by commas. Of three or more with consecutive numbers (`gpu_0`, `gpu_1`, `gpu_2`) only the first and
/// last are listed.
pub fn listed<S: AsRef<str>>(names: &[S]) -> String {
    let counts_on = |a: &S, b: &S| {
        let (Some((own, a)), Some((same, b))) = (numbered(a.as_ref()), numbered(b.as_ref())) else { return false };
        own == same && a.checked_add(1) == Some(b)
    };
    let runs = names.chunk_by(counts_on).flat_map(|run| match run {
        [first, _, .., last] => vec![format!("{} to {}", first.as_ref(), last.as_ref())],
        few => few.iter().map(|name| name.as_ref().to_owned()).collect(),
    });
    runs.collect::<Vec<_>>().join(", ")
}

/// A name and the number it ends with.
fn numbered(name: &str) -> Option<(&str, u64)> {
    let text = name.trim_end_matches(|letter: char| letter.is_ascii_digit());
    Some((text, name[text.len()..].parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_count_on_are_their_first_and_last() {
        assert_eq!(listed(&["gpu_9", "gpu_10", "gpu_11", "cpu_12"]), "gpu_9 to gpu_11, cpu_12");
        assert_eq!(listed(&["gpu_0", "gpu_1", "gpu_3", "head"]), "gpu_0, gpu_1, gpu_3, head");
        assert_eq!(listed(&["2", "3", "4", "4"]), "2 to 4, 4");
        assert_eq!(listed::<&str>(&[]), "");
    }
}
