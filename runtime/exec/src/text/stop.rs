//! Stop texts: text is held back for as long as it could still become one of them. Knows no tokens.

/// Watches a text for stop strings.
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

/// What may be shown after a piece of text, and whether a stop string ended it.
#[derive(Debug, PartialEq, Eq)]
pub enum Stopped {
    /// No stop string so far; this much more text is certain to be wanted.
    No(String),
    /// A stop string was found; this is the text before it that was not shown yet.
    Yes(String),
}

impl StopFilter {
    /// A filter for these stop strings; empty ones never match.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self { stops: stops.into_iter().filter(|s| !s.is_empty()).collect(), held: String::new() }
    }

    /// Takes more text.
    pub fn push(&mut self, piece: &str) -> Stopped {
        self.held.push_str(piece);
        if let Some(at) = self.stops.iter().filter_map(|stop| self.held.find(stop.as_str())).min() {
            self.held.truncate(at);
            return Stopped::Yes(std::mem::take(&mut self.held));
        }
        let keep = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        Stopped::No(std::mem::replace(&mut self.held, rest))
    }

    /// Ends the text and returns what was held back in vain.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

/// Length of the longest end of `text` that is a beginning of `stop`.
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
    fn holds_back_what_may_become_a_stop() {
        let mut f = filter(&["</s>", "stop"]);
        assert_eq!(f.push("a<"), Stopped::No("a".into()));
        assert_eq!(f.push("/s"), Stopped::No("".into()));
        assert_eq!(f.push("x"), Stopped::No("</sx".into()));
        assert_eq!(f.push("b</"), Stopped::No("b".into()));
        assert_eq!(f.push("s>c"), Stopped::Yes("".into()));
    }

    #[test]
    fn the_earliest_stop_wins() {
        assert_eq!(filter(&["b", "ab"]).push("xab"), Stopped::Yes("x".into()));
    }

    #[test]
    fn the_end_gives_back_what_was_held() {
        let mut f = filter(&["stop"]);
        assert_eq!(f.push("sto"), Stopped::No("".into()));
        assert_eq!(f.finish(), "sto");
    }

    #[test]
    fn an_empty_stop_never_matches() {
        assert_eq!(filter(&[""]).push("a"), Stopped::No("a".into()));
    }

    proptest! {
        #[test]
        fn shows_exactly_the_text_before_the_first_stop(
            pieces in prop::collection::vec("[abé]{0,3}", 0..12),
            stops in prop::collection::vec("[abé]{1,4}", 0..3),
        ) {
            let mut f = StopFilter::new(stops.clone());
            let (mut shown, mut ended) = (String::new(), false);
            for piece in &pieces {
                match f.push(piece) {
                    Stopped::No(text) => shown.push_str(&text),
                    Stopped::Yes(text) => { shown.push_str(&text); ended = true; break; }
                }
            }
            if !ended { shown.push_str(&f.finish()); }
            let whole = pieces.concat();
            let first = stops.iter().filter_map(|s| whole.find(s.as_str())).min();
            prop_assert_eq!(ended, first.is_some());
            // A stop may be seen in an earlier piece than one that starts before it, so compare where only one fits.
            if let Some(at) = first {
                prop_assert!(whole.starts_with(&shown));
                if stops.len() == 1 { prop_assert_eq!(shown.len(), at); }
            } else {
                prop_assert_eq!(shown, whole);
            }
        }
    }
}
