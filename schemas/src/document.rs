//! Files a person may write or edit by hand: read leniently first, so that everything wrong is named at once and not only
//! the first thing.

mod conform;

use crate::{Finding, Severity};
use conform::Conform;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::options::NonFiniteFloatPolicy;

/// Longest file that is read. A profile of a thousand blocks is a tenth of it.
const MOST_BYTES: usize = 64 << 20;

/// Why a machine file or a profile could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The text is too long to be one.
    #[error("this is no {what}: it has {bytes} bytes, and the longest has {MOST_BYTES}")]
    TooLong {
        /// What it should have been.
        what: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// The text is no YAML.
    #[error("cannot read the {what} as YAML: {why}")]
    Syntax {
        /// What it should have been.
        what: &'static str,
        /// The parser's words.
        why: String,
    },
    /// The text does not say that it is one.
    #[error("this is no {what}: it does not begin with `{header}: {version}`")]
    Other {
        /// What it should have been.
        what: &'static str,
        /// The field that says so.
        header: &'static str,
        /// The version this build reads.
        version: u32,
    },
    /// It is of a version this build does not read.
    #[error("this {what} has version {found}, and this build reads version {version}")]
    Version {
        /// What it is.
        what: &'static str,
        /// What it says.
        found: u64,
        /// The version this build reads.
        version: u32,
    },
    /// Everything that is wrong inside, in the order of the format.
    #[error("the {what} has {}", count(findings))]
    Findings {
        /// What it is.
        what: &'static str,
        /// What is wrong.
        findings: Vec<Finding>,
    },
    /// It cannot be written as YAML.
    #[error("cannot write the {what} as YAML: {why}")]
    Write {
        /// What it is.
        what: &'static str,
        /// Why not.
        why: String,
    },
}

impl DocumentError {
    /// Everything wrong inside, where reading got that far.
    pub fn findings(&self) -> &[Finding] {
        match self {
            DocumentError::Findings { findings, .. } => findings,
            _ => &[],
        }
    }
}

fn count(findings: &[Finding]) -> String {
    match findings.len() {
        1 => "1 mistake".to_owned(),
        many => format!("{many} mistakes"),
    }
}

/// A kind of file: what people call it, its first field and the version this build reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    pub what: &'static str,
    pub header: &'static str,
    pub version: u32,
}

/// Reads a file of this format. `more` finds what the schema cannot say; it sees the text's values whether or not they
/// conform.
pub(crate) fn read<T>(text: &str, format: Format, more: impl Fn(&Value) -> Vec<Finding>) -> Result<T, DocumentError>
where
    T: DeserializeOwned + JsonSchema,
{
    let Format { what, header, version } = format;
    if text.len() > MOST_BYTES {
        return Err(DocumentError::TooLong { what, bytes: text.len() });
    }
    let syntax = |error: serde_saphyr::Error| DocumentError::Syntax { what, why: error.to_string() };
    let value: Value = serde_saphyr::from_str_with_options(text, lenient()).map_err(syntax)?;
    match value.get(header).map(Value::as_u64) {
        None => return Err(DocumentError::Other { what, header, version }),
        Some(Some(found)) if found != u64::from(version) => {
            return Err(DocumentError::Version { what, found, version });
        }
        Some(_) => {}
    }
    let findings = findings::<T>(&value, more);
    if !findings.is_empty() {
        return Err(DocumentError::Findings { what, findings });
    }
    serde_saphyr::from_str(text).map_err(syntax)
}

/// `.nan` becomes text, which is then no number at a place that can be named.
fn lenient() -> serde_saphyr::Options {
    serde_saphyr::options! { non_finite_float_policy: NonFiniteFloatPolicy::AsString }
}

/// Everything wrong with a value made in memory: the same rules as for one that was read.
pub(crate) fn check<T: Serialize + JsonSchema>(document: &T, more: impl Fn(&Value) -> Vec<Finding>) -> Vec<Finding> {
    match serde_json::to_value(document) {
        Ok(value) => findings::<T>(&value, more),
        Err(error) => vec![finding("", error.to_string())],
    }
}

/// Fields in the order of the types, the same bytes for the same document.
pub(crate) fn write<T: Serialize>(document: &T, format: Format) -> Result<String, DocumentError> {
    let failed = |error: serde_saphyr::ser::Error| DocumentError::Write { what: format.what, why: error.to_string() };
    serde_saphyr::to_string(document).map_err(failed)
}

/// The JSON Schema of a type, as the files beside this crate have it.
pub(crate) fn json_schema<T: JsonSchema>() -> String {
    let mut text = serde_json::to_string_pretty(&schemars::schema_for!(T)).unwrap_or_default();
    text.push('\n');
    text
}

fn findings<T: JsonSchema>(value: &Value, more: impl Fn(&Value) -> Vec<Finding>) -> Vec<Finding> {
    let schema = schemars::schema_for!(T).to_value();
    let mut findings = Conform::new(&schema).findings(value);
    for finding in more(value) {
        if !findings.iter().any(|known| known.place == finding.place) {
            findings.push(finding);
        }
    }
    findings
}

/// An error at a place.
pub(crate) fn finding(place: impl Into<String>, message: impl Into<String>) -> Finding {
    Finding { severity: Severity::Error, place: place.into(), message: message.into() }
}
