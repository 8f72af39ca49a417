//! Suggestions for a first argument that is neither a model nor a subcommand.

use std::path::Path;

/// Subcommands.
const SUBCOMMANDS: [&str; 2] = ["inspect", "help"];
/// Words that users try for splitting, which has no subcommand.
const SPLIT_WORDS: [&str; 4] = ["plan", "split", "run", "partition"];

/// A hint beside clap's error if the first argument looks like a mistyped subcommand.
pub fn subcommand(arguments: &[String]) -> Option<String> {
    let first = arguments.first().filter(|word| !word.starts_with('-') && !Path::new(word).exists())?;
    if SPLIT_WORDS.contains(&first.as_str()) {
        return Some(format!(
            "there is no subcommand {first:?}: splitting needs none, write `hpp-split MODEL [OPTIONS]`"
        ));
    }
    let nearest = SUBCOMMANDS.iter().min_by_key(|known| strsim::damerau_levenshtein(known, first))?;
    let is_near = strsim::damerau_levenshtein(nearest, first) <= 2;
    is_near.then(|| format!("there is no subcommand {first:?}: did you mean `hpp-split {nearest}`?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_subcommand_is_named() {
        let said = |line: &str| subcommand(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(said("plan no-model").unwrap().contains("`hpp-split MODEL"));
        assert!(said("inspct no-model").unwrap().contains("`hpp-split inspect`"));
        assert_eq!(said("no-model --vram"), None);
        assert_eq!(said("--vram plan"), None);
    }
}
