//! What a person may have meant by a first word that is neither a model nor a subcommand.

use std::path::Path;

/// Subcommands, and words for what needs none.
const SUBCOMMANDS: [&str; 2] = ["inspect", "help"];
const NEEDS_NONE: [&str; 4] = ["plan", "split", "run", "partition"];

/// What to say beside clap's error, where the first word misleads it.
pub fn subcommand(arguments: &[String]) -> Option<String> {
    let first = arguments.first().filter(|word| !word.starts_with('-') && !Path::new(word).exists())?;
    if NEEDS_NONE.contains(&first.as_str()) {
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
    fn a_wrong_first_word_is_named() {
        let said = |line: &str| subcommand(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        assert!(said("plan no-model").unwrap().contains("`hpp-split MODEL"));
        assert!(said("inspct no-model").unwrap().contains("`hpp-split inspect`"));
        assert_eq!(said("no-model --vram"), None);
        assert_eq!(said("--vram plan"), None);
    }
}
