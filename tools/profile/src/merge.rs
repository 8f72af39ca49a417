//! `hpp-profile merge`: one profile of a whole corpus, of which several machines have run a part each.

use crate::cli::MergeArgs;
use crate::corpus::{Corpus, MOST_NAMED};
use crate::error::ProfileError;
use crate::store::Store;
use hpp_schema::{CorpusStatistics, Profile, Statistics};
use std::path::Path;

/// Reads the parts, merges their statistics in order and writes the profile.
pub fn run(args: &MergeArgs) -> Result<(), ProfileError> {
    let store = Store::new(&args.out);
    if !args.force {
        store.refuse_to_overwrite()?;
    }
    store.refuse_another_kind()?;
    let whole = Corpus::scan(&args.prompts, None, args.skip_bad)?;
    let parts = args.parts.iter().map(|path| Ok((path.as_path(), Store::new(path).read()?)));
    let parts = parts.collect::<Result<Vec<_>, ProfileError>>()?;
    let hash = hpp_onnx::hash::full(&args.prompts)?;
    let merged = merged(&parts, Whole { hash, prompts: whole.prompts, name: &args.prompts })?;
    store.save(&merged)?;
    store.finish(&merged)?;
    eprintln!("wrote {}", store.path().display());
    Ok(())
}

/// The corpus that the parts make up.
struct Whole<'a> {
    /// BLAKE3 of its file.
    hash: String,
    prompts: u64,
    name: &'a Path,
}

/// The first profile with the statistics of all parts. An error if they are not the parts of this corpus for one model.
fn merged(parts: &[(&Path, Profile)], whole: Whole) -> Result<Profile, ProfileError> {
    let Some((first_path, first)) = parts.first() else {
        return Err(ProfileError::setting("there is nothing to merge", "name the profiles of the parts"));
    };
    let mut all = CorpusStatistics {
        hash: whole.hash,
        prompts_done: 0,
        prompts_in_all: Some(whole.prompts),
        skipped: Vec::new(),
        skipped_in_all: 0,
        statistics: Statistics::default(),
    };
    for (number, (path, part)) in parts.iter().enumerate() {
        let name = path.display();
        if part.model.hash != first.model.hash {
            let why = format!("{name} is of another model than {}", first_path.display());
            return Err(ProfileError::setting(why, "merge profiles of one model"));
        }
        if part.settings.decode_tokens != first.settings.decode_tokens {
            let why = format!(
                "{name} generated {} tokens after each prompt, {} {}",
                part.settings.decode_tokens,
                first_path.display(),
                first.settings.decode_tokens
            );
            return Err(ProfileError::setting(why, "measure all parts with one --decode-tokens"));
        }
        if part.corpus.is_none() {
            let why = format!("{name} has no corpus: it was made without --prompts");
            return Err(ProfileError::setting(why, "merge profiles that hpp-profile made with --prompts"));
        }
        let Some(corpus) = part.corpus.as_ref().filter(|corpus| corpus.prompts_in_all == Some(corpus.prompts_done))
        else {
            return Err(ProfileError::setting(
                format!("{name} has not run all of its corpus"),
                "continue it with --resume, with its part as --prompts",
            ));
        };
        all.statistics.merge(&corpus.statistics)?;
        all.prompts_done += corpus.prompts_done;
        all.skipped_in_all += corpus.skipped_in_all;
        let reasons = corpus.skipped.iter().map(|reason| format!("part {}, {reason}", number + 1));
        let room = MOST_NAMED.saturating_sub(all.skipped.len());
        all.skipped.extend(reasons.take(room));
    }
    if all.prompts_done != whole.prompts {
        let why =
            format!("the parts have {} prompts and {} has {}", all.prompts_done, whole.name.display(), whole.prompts);
        return Err(ProfileError::setting(why, "merge the profiles of all parts of this corpus, each once"));
    }
    Ok(Profile { corpus: Some(all), ..first.clone() })
}
