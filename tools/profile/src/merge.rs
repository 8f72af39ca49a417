//! `hpp-profile merge`: makes one profile of a whole corpus from the profiles of several machines, each of which ran a part.

use crate::cli::MergeArgs;
use crate::corpus::{Corpus, MOST_NAMED, PromptsHash};
use crate::error::ProfileError;
use crate::store::{ProfileStoreError, Store};
use hpp_schema::{CorpusStatistics, Profile, Statistics};
use std::path::Path;

const PARTS_HINT: &str = "name the profiles of all parts of this corpus in its order, each once; --quick runs only the first prompts of a part, unless \
                          --max-prompts allows more";

/// Reads the parts, merges their statistics in order and writes the profile.
pub fn run(args: &MergeArgs) -> Result<(), ProfileError> {
    let store = Store::new(&args.out);
    store.check_creatable()?;
    if !args.force && store.refuse_to_overwrite().is_err() {
        let why = format!("{} is there already", args.out.display());
        return Err(ProfileError::setting(why, "replace it with --force, or choose another --out"));
    }
    store.refuse_another_kind()?;
    let whole = Corpus::scan(&args.prompts, None, args.skip_bad)?;
    let parts = args.parts.iter().map(|path| Ok((path.as_path(), part(path)?)));
    let parts = parts.collect::<Result<Vec<_>, ProfileError>>()?;
    let timed = timed(&parts, args.times.as_deref())?;
    let hash = hpp_onnx::hash::full(&args.prompts)?;
    let corpus = merged(&parts, &whole, hash)?;
    check_prompts(&parts, &whole)?;
    let merged = Profile { corpus: Some(corpus), ..timed };
    store.save(&merged)?;
    store.finish(&merged)?;
    hpp_io::line_to_stderr(&format!("wrote {}", store.path().display()));
    Ok(())
}

/// Reads the profile of a part.
fn part(path: &Path) -> Result<Profile, ProfileError> {
    Store::new(path).read().map_err(|error| match error {
        ProfileStoreError::Missing { path } => ProfileError::setting(
            format!("there is no {}", path.display()),
            "name the profiles that hpp-profile wrote for the parts of the corpus",
        ),
        other => other.into(),
    })
}

/// The part whose times and rates the profile has.
fn timed(parts: &[(&Path, Profile)], times: Option<&Path>) -> Result<Profile, ProfileError> {
    let wanted = |(path, _): &&(&Path, Profile)| times.is_none_or(|times| times == *path);
    parts.iter().find(wanted).map(|(_, part)| part.clone()).ok_or_else(|| {
        let times = times.unwrap_or(Path::new("")).display();
        ProfileError::setting(
            format!("--times {times} is not one of the profiles"),
            "name one of them as it is given there",
        )
    })
}

/// Checks that the parts ran these prompts, in order. Profiles of older versions do not record which prompts they ran and are not checked.
fn check_prompts(parts: &[(&Path, Profile)], whole: &Corpus) -> Result<(), ProfileError> {
    let mut prompts = whole.prompts_after(0)?;
    let mut before = 0;
    for (path, part) in parts {
        let Some(corpus) = &part.corpus else { continue };
        let mut hash = PromptsHash::default();
        for prompt in prompts.by_ref().take(usize::try_from(corpus.prompts_done).unwrap_or(usize::MAX)) {
            hash.add(&prompt?.content);
        }
        let (first, last) = (before + 1, before + corpus.prompts_done);
        before = last;
        if last <= whole.prompts && corpus.prompts_hash.as_ref().is_some_and(|ran| *ran != hash.finish()) {
            let why = format!("{} did not run prompts {first} to {last} of {}", path.display(), whole.path().display());
            return Err(ProfileError::setting(why, PARTS_HINT));
        }
    }
    Ok(())
}

/// The statistics of all parts. `hash` is that of the whole corpus's file. Fails if the parts are of different models or do not add up to the
/// corpus.
fn merged(parts: &[(&Path, Profile)], whole: &Corpus, hash: String) -> Result<CorpusStatistics, ProfileError> {
    let Some((first_path, first)) = parts.first() else {
        return Err(ProfileError::setting("there is nothing to merge", "name the profiles of the parts"));
    };
    let mut all = CorpusStatistics {
        hash,
        prompts_hash: Some(whole.prompts_hash.clone()),
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
        if part.settings.activations != first.settings.activations {
            let why = format!("one of {name} and {} was measured with --int8-activations", first_path.display());
            return Err(ProfileError::setting(why, "measure all parts with it, or none"));
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
            format!("the parts ran {} prompts and {} has {}", all.prompts_done, whole.path().display(), whole.prompts);
        return Err(ProfileError::setting(why, PARTS_HINT));
    }
    Ok(all)
}
