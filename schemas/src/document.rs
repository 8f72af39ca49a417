//! Reads and checks YAML files that users may edit (machine files, profiles). Parses leniently first, so that all
//! errors are reported at once.

mod conform;

use crate::Finding;
use conform::Conform;
use schemars::JsonSchema;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_saphyr::options::NonFiniteFloatPolicy;

/// Size limit, bytes. A profile of a thousand blocks has a tenth of it.
const MAX_BYTES: usize = 64 << 20;

/// Why a machine file or a profile could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum DocumentError {
    /// The text exceeds the size limit.
    #[error("the {what} is too large: {bytes} bytes, limit {MAX_BYTES}")]
    TooLong {
        /// The kind of file.
        what: &'static str,
        /// Its length.
        bytes: usize,
    },
    /// The text is not valid YAML.
    #[error("cannot read the {what} as YAML: {why}")]
    Syntax {
        /// The kind of file.
        what: &'static str,
        /// The parser's message.
        why: String,
    },
    /// The text lacks the header of this kind of file.
    #[error("this is not a {what}: it has no line `{header}: {version}`")]
    Other {
        /// The kind of file.
        what: &'static str,
        /// The header field.
        header: &'static str,
        /// The version that this build reads.
        version: u32,
    },
    /// The file has another version.
    #[error("this {what} has version {found}, and this build reads version {version}")]
    Version {
        /// The kind of file.
        what: &'static str,
        /// The version in the file.
        found: u64,
        /// The version that this build reads.
        version: u32,
    },
    /// The file has errors, in the order of the format.
    #[error("the {what} has {}", count(findings))]
    Findings {
        /// The kind of file.
        what: &'static str,
        /// The errors.
        findings: Vec<Finding>,
    },
    /// The value cannot be written as YAML.
    #[error("cannot write the {what} as YAML: {why}")]
    Write {
        /// The kind of file.
        what: &'static str,
        /// The reason.
        why: String,
    },
}

impl DocumentError {
    /// The errors in the file; empty for other kinds of error.
    pub fn findings(&self) -> &[Finding] {
        match self {
            DocumentError::Findings { findings, .. } => findings,
            _ => &[],
        }
    }
}

fn count(findings: &[Finding]) -> String {
    match findings.len() {
        1 => "1 error".to_owned(),
        many => format!("{many} errors"),
    }
}

/// A kind of file: its name in messages, its header field, and the version that this build reads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DocumentFormat {
    pub what: &'static str,
    pub header: &'static str,
    pub version: u32,
}

/// Reads a file of this format. `more` checks rules that the schema cannot express. It gets the parsed value even if
/// the value violates the schema.
pub(crate) fn read<T>(
    text: &str,
    format: DocumentFormat,
    more: impl Fn(&Value) -> Vec<Finding>,
) -> Result<T, DocumentError>
where
    T: DeserializeOwned + JsonSchema,
{
    let DocumentFormat { what, header, version } = format;
    if text.len() > MAX_BYTES {
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

/// Parses `.nan` as text, so that the schema check reports its place.
fn lenient() -> serde_saphyr::Options {
    serde_saphyr::options! { non_finite_float_policy: NonFiniteFloatPolicy::AsString }
}

/// Checks a value in memory by the same rules as [`read`].
pub(crate) fn check<T: Serialize + JsonSchema>(document: &T, more: impl Fn(&Value) -> Vec<Finding>) -> Vec<Finding> {
    match serde_json::to_value(document) {
        Ok(value) => findings::<T>(&value, more),
        Err(error) => vec![Finding::error("", error.to_string())],
    }
}

/// Writes YAML with fields in the order of the types. Equal values give equal bytes.
pub(crate) fn write<T: Serialize>(document: &T, format: DocumentFormat) -> Result<String, DocumentError> {
    let failed = |error: serde_saphyr::ser::Error| DocumentError::Write { what: format.what, why: error.to_string() };
    serde_saphyr::to_string(document).map_err(failed)
}

/// The JSON Schema of a type, as committed in `schemas/`.
pub(crate) fn json_schema<T: JsonSchema>() -> String {
    let mut schema = schemars::schema_for!(T).to_value();
    // Properties in alphabetical order; the type of schemas then writes keywords in their usual order.
    schema.sort_all_objects();
    let schema = schemars::Schema::try_from(schema);
    let mut text = schema.and_then(|schema| serde_json::to_string_pretty(&schema)).unwrap_or_default();
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
