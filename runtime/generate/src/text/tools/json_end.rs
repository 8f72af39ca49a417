//! Finds the end of a JSON object or list in a stream of text.

/// The position within an object or list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JsonEnd {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

impl JsonEnd {
    /// Reads more of the object or list, which begins with `{` or `[`. If it ends within `text`, returns how many bytes of `text` belong to
    /// it.
    pub fn push(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' if self.in_string => self.escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(at + 1);
                    }
                }
                _ => {}
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brackets_in_texts_do_not_count() {
        let text = r#"{"a}": ["]", "\"}", {"b": "\\"}]} rest"#;
        assert_eq!(JsonEnd::default().push(text), text.find(" rest"));
        let mut end = JsonEnd::default();
        let ends: Vec<_> = text.split_inclusive(['"', '\\']).map(|piece| end.push(piece)).collect();
        assert_eq!(ends.iter().flatten().count(), 1);
    }
}
