//! `--json-schema FILE`: reads the schema that answers follow.

use crate::error::ExecError;
use hpp_generate::grammar::GrammarSource;
use serde_json::Value;
use std::path::Path;

/// Largest file read.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The grammar of the schema in a file, if one is given.
pub fn read_schema(path: Option<&Path>) -> Result<Option<GrammarSource>, ExecError> {
    let Some(path) = path else { return Ok(None) };
    let failed = |source| ExecError::JsonSchema { path: path.to_owned(), source };
    let bytes = hpp_io::read(path, MAX_FILE_BYTES).map_err(failed)?;
    let schema: Value = serde_json::from_slice(&bytes).map_err(|error| failed(error.into()))?;
    Ok(Some(GrammarSource::JsonSchema { schema, lenient: false }))
}
