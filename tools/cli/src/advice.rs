//! Advice on arguments that clap refuses: options of another command, mistyped subcommands and values, negative sizes.

use clap::Command;
use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::path::Path;

/// Options by which people recognise each command. A test compares them with each command's `--help`.
pub const OPTIONS_OF: [(&str, &[&str]); 3] = [
    (
        "hpp-split",
        &[
            "--margin",
            "--batch",
            "--prompt-tokens",
            "--new-tokens",
            "--profile",
            "--machine",
            "--planner",
            "--objective",
            "--at-least",
            "--first-token-within",
            "--stream",
            "--experts",
            "--cpu-moe",
            "--n-cpu-moe",
            "--gpu-experts",
            "--split-mode",
            "--mechanisms",
            "--slots",
            "--explain",
            "--sweep-vram",
            "--trace",
            "--refine",
            "--quantize",
            "--int8-activations",
            "--bits-budget",
            "--force",
            "--pack",
            "--in-place",
            "--dry-run",
            "--assign",
            "--allow-unknown-operators",
            "--movable",
            "--kv",
            "--partitions",
            "--max-partitions",
            "--vram",
            "--ram",
            "--context",
            "--gpu-layers",
        ],
    ),
    (
        "hpp-exec",
        &[
            "-p",
            "--prompt",
            "-f",
            "--prompt-file",
            "--tokens",
            "--chat",
            "--system",
            "-n",
            "--max-new",
            "--temperature",
            "--top-k",
            "--top-p",
            "--min-p",
            "--repetition-penalty",
            "-s",
            "--seed",
            "--stop",
            "--ignore-eos",
            "--speculate",
            "--draft",
            "--draft-tokens",
            "--temp",
            "--replan",
            "--kv-ram",
            "--kv-disk",
            "--logits",
            "--inputs",
            "--outputs",
            "--session",
            "--pinned",
            "-t",
            "--threads",
            "-q",
            "--quiet",
        ],
    ),
    (
        "hpp-profile",
        &[
            "--prompts",
            "--quick",
            "--decode-tokens",
            "--contexts",
            "--prefill-tokens",
            "--sensitivity",
            "--resume",
            "--report",
        ],
    ),
];

/// The subcommands of each command. A test compares them with each command's `--help`.
pub const SUBCOMMANDS_OF: [(&str, &[&str]); 3] = [
    ("hpp-split", &["inspect"]),
    ("hpp-exec", &["devices", "verify", "bench", "jobs", "serve"]),
    ("hpp-profile", &["merge"]),
];

/// A word that users know from another program, and what to write instead.
pub type Habit = (&'static str, &'static str);

/// How a command answers arguments that it does not have.
#[derive(Clone, Copy, Debug)]
pub struct Advice {
    /// Words that users know from other programs.
    pub habits: &'static [Habit],
    /// What to write instead of a second word after the model, which clap takes for a subcommand.
    pub second_word: &'static str,
}

impl Advice {
    /// Adds advice to the error where it can: for a negative value, a value near to a valid one, a mistyped subcommand, a second word, a habit, or
    /// an option of a subcommand or of another command. `arguments` are without the program name.
    pub fn explain(&self, error: clap::Error, command: &Command, arguments: &[String]) -> clap::Error {
        use ErrorKind::{
            ArgumentConflict, InvalidSubcommand, InvalidValue, MissingRequiredArgument, UnknownArgument,
            ValueValidation,
        };
        if error.kind() == InvalidValue {
            return with_similar_values(error);
        }
        if let Some(why) = not_a_number(&error) {
            return command.clone().error(ValueValidation, why);
        }
        if !matches!(error.kind(), ArgumentConflict | InvalidSubcommand | MissingRequiredArgument | UnknownArgument) {
            return error;
        }
        let fresh = |kind: ErrorKind, why: String| command.clone().error(kind, why);
        if let Some((option, value)) = negative_value(&error, arguments) {
            return fresh(InvalidValue, format!("invalid value '{value}' for '{option}': it must not be negative"));
        }
        if let Some(why) = mistyped_subcommand(command, arguments, self.habits) {
            return fresh(InvalidSubcommand, why);
        }
        if let Some(word) = second_word(&error) {
            // A subcommand after options is taken for a path, too, so the words before this one are searched as well.
            let before = arguments.iter().take_while(|argument| **argument != word).map(String::as_str);
            let subcommand = [&*word].into_iter().chain(before).find(|word| command.find_subcommand(word).is_some());
            let why = match subcommand {
                Some(name) => write_first(command, name),
                None => self.second_word.to_owned(),
            };
            return fresh(UnknownArgument, format!("unexpected argument '{word}': {why}"));
        }
        let subcommand = arguments.first().and_then(|word| command.find_subcommand(word)).map(Command::get_name);
        match elsewhere(&error, command, subcommand, self.habits) {
            Some(advice) => with_advice(error, usage(command, subcommand), advice),
            None => without_useless_tips(error, usage(command, subcommand)),
        }
    }

    /// What to write instead of a word that was taken for a path but names none: the subcommand that was probably meant, or the replacement for a
    /// word of another program. `None` if the word resembles neither.
    pub fn instead_of(&self, word: &str, command: &Command) -> Option<String> {
        match command.find_subcommand(word) {
            Some(_) => Some(write_first(command, word)),
            None => mistyped_subcommand(command, &[word.to_owned()], self.habits),
        }
    }
}

/// Says where to write a subcommand.
fn write_first(command: &Command, subcommand: &str) -> String {
    format!("write the subcommand first, before its options: {} {subcommand}", command.get_name())
}

/// What to write instead of a value that the parsers of numbers refused; their own words say what they saw, not what to write.
fn not_a_number(error: &clap::Error) -> Option<String> {
    let kinds = [
        (&["invalid digit found", "cannot parse integer"][..], "a whole number"),
        (&["invalid float literal", "cannot parse float"][..], "a number"),
    ];
    let said = error.to_string();
    let (_, kind) = kinds.iter().find(|(words, _)| words.iter().any(|word| said.contains(word)))?;
    let text = |kind: ContextKind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let (option, value) = (text(ContextKind::InvalidArg)?, text(ContextKind::InvalidValue)?);
    let is_negative = value.strip_prefix('-').is_some_and(|rest| rest.parse::<f64>().is_ok());
    let why = if is_negative { "it must not be negative".to_owned() } else { format!("it is {kind}") };
    Some(format!("invalid value '{value}' for '{option}': {why}"))
}

/// The usage of a command, or of a subcommand of it.
fn usage(command: &Command, subcommand: Option<&str>) -> StyledStr {
    let mut command = command.clone();
    // `build` gives subcommands their full names.
    command.build();
    match subcommand.and_then(|name| command.find_subcommand_mut(name)) {
        Some(subcommand) => subcommand.render_usage(),
        None => command.render_usage(),
    }
}

fn with_advice(mut error: clap::Error, usage: StyledStr, advice: String) -> clap::Error {
    for kind in [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand] {
        error.remove(kind);
    }
    error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![advice.into()]));
    error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
    error
}

/// Removes clap's tips that never help: to write an unknown option after `--`, where it would be a model or a prompt, and to use options whose
/// names have little in common.
fn without_useless_tips(mut error: clap::Error, usage: StyledStr) -> clap::Error {
    let text = |kind: ContextKind| match error.get(kind) {
        Some(ContextValue::String(text)) => text.split('=').next().map(str::to_owned),
        _ => None,
    };
    if let (Some(refused), Some(similar)) = (text(ContextKind::InvalidArg), text(ContextKind::SuggestedArg))
        && nearest(&refused, [similar.as_str()]).is_none()
    {
        error.remove(ContextKind::SuggestedArg);
        error.insert(ContextKind::Usage, ContextValue::StyledStr(usage));
    }
    if let Some(ContextValue::StyledStrs(mut tips)) = error.remove(ContextKind::Suggested) {
        tips.retain(|tip| !tip.to_string().contains("as a value, use"));
        if !tips.is_empty() {
            error.insert(ContextKind::Suggested, ContextValue::StyledStrs(tips));
        }
    }
    error
}

/// Lists the values that were probably meant first, then all values. clap suggests only one of several equally near values, and none for a mere
/// number.
fn with_similar_values(mut error: clap::Error) -> clap::Error {
    let similar = similar_values(&error);
    if !similar.is_empty() {
        error.insert(ContextKind::SuggestedValue, ContextValue::Strings(similar));
    }
    if error.get(ContextKind::SuggestedValue).is_some()
        && let Some(ContextValue::Strings(all)) = error.remove(ContextKind::ValidValue)
    {
        // clap prints `Suggested` after the similar values. It would print its own list before them.
        let list = format!("all possible values: {}", all.join(", "));
        error.insert(ContextKind::Suggested, ContextValue::StyledStrs(vec![list.into()]));
    }
    error
}

/// The valid values with the same number as the refused one (`int4` for `4` or `q4`); without such values, the nearest ones.
fn similar_values(error: &clap::Error) -> Vec<String> {
    let Some(ContextValue::String(refused)) = error.get(ContextKind::InvalidValue) else { return vec![] };
    let Some(ContextValue::Strings(valid)) = error.get(ContextKind::ValidValue) else { return vec![] };
    let number = |value: &str| value.chars().filter(char::is_ascii_digit).collect::<String>();
    let refused_number = number(refused);
    let same: Vec<String> = valid.iter().filter(|value| number(value) == refused_number).cloned().collect();
    if !refused_number.is_empty() && !same.is_empty() {
        return same;
    }
    let Some(nearest) = nearest(refused, valid.iter().map(String::as_str)) else { return vec![] };
    let distance = |value: &str| strsim::damerau_levenshtein(value, refused);
    valid.iter().filter(|value| distance(value) == distance(nearest)).cloned().collect()
}

/// A word after the model, which clap takes for a subcommand.
fn second_word(error: &clap::Error) -> Option<String> {
    let text = error.to_string();
    Some(text.split_once("the subcommand '")?.1.split('\'').next()?.to_owned())
}

/// An option and its negative value, if clap took the value for a short option.
fn negative_value<'a>(error: &clap::Error, arguments: &'a [String]) -> Option<(&'a str, &'a str)> {
    let ContextValue::String(refused) = error.get(ContextKind::InvalidArg)? else { return None };
    let is_number = refused.strip_prefix('-').is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let pair = arguments.windows(2).find(|pair| pair[0].starts_with('-') && pair[1].starts_with(refused.as_str()))?;
    is_number.then(|| (pair[0].as_str(), pair[1].as_str()))
}

/// Advice for a first argument that is not a path and looks like a subcommand.
fn mistyped_subcommand(command: &Command, arguments: &[String], habits: &[Habit]) -> Option<String> {
    let first = arguments.first().filter(|word| !word.starts_with('-') && !Path::new(word).exists())?;
    let names = || command.get_subcommands().filter(|known| !known.is_hide_set()).map(Command::get_name);
    if names().any(|name| name == first) {
        return None;
    }
    if let Some((_, advice)) = habits.iter().find(|(word, _)| word == first) {
        return Some((*advice).to_owned());
    }
    if let Some((other, _)) = SUBCOMMANDS_OF.iter().find(|(_, subcommands)| subcommands.contains(&first.as_str())) {
        return Some(format!("'{first}' is a subcommand of {other}: write `{other} {first} ...`"));
    }
    let nearest = nearest(first, names())?;
    Some(format!("there is no subcommand '{first}'; did you mean '{} {nearest}'?", command.get_name()))
}

/// The name that a mistyped word most likely stands for.
pub fn nearest<'a>(word: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |name: &str| strsim::damerau_levenshtein(name, word);
    let nearest = names.into_iter().min_by_key(|name| distance(name))?;
    let allowed = if nearest.len() > 4 { 2 } else { 1 };
    (distance(nearest) <= allowed).then_some(nearest)
}

/// Advice for an option that the given subcommand does not have, but `habits`, the command itself, another subcommand or another command has. `None`
/// if the subcommand has the option: then it is refused beside another one.
fn elsewhere(error: &clap::Error, command: &Command, subcommand: Option<&str>, habits: &[Habit]) -> Option<String> {
    let ContextValue::String(option) = error.get(ContextKind::InvalidArg)? else { return None };
    let option = option.split('=').next()?;
    if let Some((_, advice)) = habits.iter().find(|(word, _)| *word == option) {
        return Some((*advice).to_owned());
    }
    let has = |command: &Command| command.get_arguments().any(|argument| is_called(argument, option));
    let asked = subcommand.and_then(|name| command.find_subcommand(name)).unwrap_or(command);
    if has(asked) {
        return None;
    }
    let ours = command.get_name();
    if subcommand.is_some() && has(command) {
        return Some(format!("'{option}' is an option of {ours} without a subcommand"));
    }
    let mut known = command.get_subcommands().filter(|known| !known.is_hide_set());
    if let Some(subcommand) = known.find(|known| has(known)) {
        return Some(format!("'{option}' is an option of '{ours} {}'", subcommand.get_name()));
    }
    let mut others = OPTIONS_OF.iter().filter(|(name, _)| *name != ours);
    let (other, _) = others.find(|(_, options)| options.contains(&option))?;
    Some(format!("'{option}' is an option of {other}"))
}

fn is_called(argument: &clap::Arg, option: &str) -> bool {
    let long = option.strip_prefix("--").filter(|name| argument.get_long() == Some(*name));
    let short = option
        .strip_prefix('-')
        .filter(|name| argument.get_short().is_some_and(|c| name.starts_with(c) && name.len() == 1));
    long.or(short).is_some()
}

#[cfg(test)]
mod tests;
