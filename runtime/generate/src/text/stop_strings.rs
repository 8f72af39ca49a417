//! Stop strings: finds the first stop string in streamed text and holds text back while it may be the start of one.

/// Searches streamed text for stop strings.
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

/// The text that [`StopFilter::push`] releases, and whether a stop string ended it.
#[derive(Debug, PartialEq, Eq)]
pub enum StopMatch {
    /// No stop string so far: this text is in front of any that may come.
    NotFound(String),
    /// A stop string was found: the text before it that was not released yet.
    Found(String),
}

impl StopFilter {
    /// A filter for these stop strings. Empty strings never match.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self { stops: stops.into_iter().filter(|s| !s.is_empty()).collect(), held: String::new() }
    }

    /// Adds text and releases what cannot be part of a stop string.
    pub fn push(&mut self, piece: &str) -> StopMatch {
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return StopMatch::Found(std::mem::take(&mut self.held));
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        StopMatch::NotFound(std::mem::replace(&mut self.held, rest))
    }

    /// Ends the text and returns what was held back.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length in bytes of the longest suffix of `text` that is a prefix of `stop`.
fn overlap(text: &str, stop: &str) -> usize {
    let longest = text.len().min(stop.len());
    (1..=longest).rev().find(|n| stop.is_char_boundary(*n) && text.ends_with(&stop[..*n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn filter(stops: &[&str]) -> StopFilter {
        StopFilter::new(stops.iter().map(|s| (*s).to_owned()))
    }

    #[test]
    fn holds_back_a_possible_start_of_a_stop_string() {
        let mut f = filter(&["</s>", "stop"]);
        assert_eq!(f.push("a<"), StopMatch::NotFound("a".into()));
        assert_eq!(f.push("/s"), StopMatch::NotFound("".into()));
        assert_eq!(f.push("x"), StopMatch::NotFound("</sx".into()));
        assert_eq!(f.push("b</"), StopMatch::NotFound("b".into()));
        assert_eq!(f.push("s>c"), StopMatch::Found("".into()));
    }

    #[test]
    fn the_earliest_stop_string_wins() {
        assert_eq!(filter(&["b", "ab"]).push("xab"), StopMatch::Found("x".into()));
    }

    #[test]
    fn finish_returns_the_text_held_back() {
        let mut f = filter(&["stop"]);
        assert_eq!(f.push("sto"), StopMatch::NotFound("".into()));
        assert_eq!(f.finish(), "sto");
    }

    #[test]
    fn an_empty_stop_string_never_matches() {
        assert_eq!(filter(&[""]).push("a"), StopMatch::NotFound("a".into()));
    }

    proptest! {
        #[test]
        fn releases_exactly_the_text_before_the_first_stop_string(
            pieces in prop::collection::vec("[abé]{0,3}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..3),
        ) {
            let mut f = StopFilter::new(stops.clone());
            let (mut shown, mut ended) = (String::new(), false);
            for piece in &pieces {
                match f.push(piece) {
                    StopMatch::NotFound(text) => shown.push_str(&text),
                    StopMatch::Found(text) => { shown.push_str(&text); ended = true; break; }
                }
            }
            if !ended { shown.push_str(&f.finish()); }
            let whole = pieces.concat();
            let first = stops.iter().filter_map(|s| whole.find(s.as_str())).min();
            prop_assert_eq!(ended, first.is_some());
            // A later stop string may complete in an earlier piece, so lengths are compared with a single stop string only.
            if let Some(at) = first {
                prop_assert!(whole.starts_with(&shown));
                if stops.len() == 1 { prop_assert_eq!(shown.len(), at); }
            } else {
                prop_assert_eq!(shown, whole);
            }
        }
    }
}
