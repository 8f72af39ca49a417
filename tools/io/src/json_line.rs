//! Why a line of a file of JSON lines cannot be read.

/// Describes the mistake if the line is not JSON. `None` if it is JSON with other contents than expected. Names only the character, because the
/// parser counts lines within the one line.
pub fn json_line_mistake(error: &serde_json::Error) -> Option<String> {
    if error.is_eof() {
        return Some("not JSON: it ends too early".to_owned());
    }
    (!error.is_data()).then(|| format!("not JSON: a mistake at character {}", error.column()))
}
