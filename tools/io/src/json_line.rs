//! Why a line of a file of JSON lines cannot be read.

/// The mistake, if the line is not JSON; `None` if it is JSON with other contents than expected. A line of such a file has no line numbers of
/// its own, so only the character is named.
pub fn json_line_mistake(error: &serde_json::Error) -> Option<String> {
    if error.is_eof() {
        return Some("not JSON: it ends too early".to_owned());
    }
    (!error.is_data()).then(|| format!("not JSON: a mistake at character {}", error.column()))
}
