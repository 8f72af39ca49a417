//! JSON as Python's `json.dumps(..., ensure_ascii=False)` prints it, as `tojson` does in Hugging Face's chat templates.
//!
//! Jinja's own `tojson` escapes HTML and omits the spaces, which would give other tokens.

use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};
use std::io::{self, Write};

/// `json.dumps(value, ensure_ascii=False, indent=indent)`.
pub fn dumps(value: &impl Serialize, indent: Option<usize>) -> Result<String, serde_json::Error> {
    let mut out = Vec::new();
    match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut out, OneLine))?,
        Some(width) => {
            let spaces = b" ".repeat(width);
            value.serialize(&mut Serializer::with_formatter(&mut out, PrettyFormatter::with_indent(&spaces)))?;
        }
    }
    String::from_utf8(out).map_err(serde::ser::Error::custom)
}

/// `{"a": 1, "b": [1, 2]}`.
struct OneLine;

impl Formatter for OneLine {
    fn begin_array_value<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { w.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn spaces_and_characters_as_python_prints_them() {
        let value = json!({ "a": [1, 2.5, null, true], "b": "é <tag> \"q\" \n", "e": {}, "l": [] });
        assert_eq!(
            dumps(&value, None).unwrap(),
            r#"{"a": [1, 2.5, null, true], "b": "é <tag> \"q\" \n", "e": {}, "l": []}"#
        );
        assert_eq!(dumps(&json!({ "a": [1] }), Some(2)).unwrap(), "{\n  \"a\": [\n    1\n  ]\n}");
    }
}
