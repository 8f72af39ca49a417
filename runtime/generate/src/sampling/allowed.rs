//! The tokens that may come next, where something other than the model restricts them.

/// A set of token ids.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedTokens {
    /// A bit for each id, 32 to a word. Ids beyond the last word are not in the set.
    words: Vec<u32>,
}

impl AllowedTokens {
    /// The set with these bits, 32 ids to a word.
    pub fn from_words(words: &[u32]) -> Self {
        Self { words: words.to_vec() }
    }

    /// Whether the set holds a token.
    pub fn contains(&self, token: usize) -> bool {
        self.words.get(token / 32).is_some_and(|word| (word >> (token % 32)) & 1 == 1)
    }

    /// Whether the set holds none of the first `count` tokens.
    pub fn is_empty_below(&self, count: usize) -> bool {
        !(0..count.min(self.words.len() * 32)).any(|token| self.contains(token))
    }

    /// Makes the logits of all other tokens minus infinity.
    pub(super) fn mask(&self, logits: &mut [f32]) {
        for (token, logit) in logits.iter_mut().enumerate() {
            if !self.contains(token) {
                *logit = f32::NEG_INFINITY;
            }
        }
    }
}

impl FromIterator<u32> for AllowedTokens {
    fn from_iter<I: IntoIterator<Item = u32>>(tokens: I) -> Self {
        let mut words = Vec::new();
        for token in tokens {
            let at = token as usize / 32;
            if words.len() <= at {
                words.resize(at + 1, 0);
            }
            words[at] |= 1 << (token % 32);
        }
        Self { words }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_tokens_of_the_set_keep_their_logits() {
        let set: AllowedTokens = [1, 33].into_iter().collect();
        let mut logits = vec![1.0; 70];
        set.mask(&mut logits);
        let kept: Vec<usize> = (0..70).filter(|token| logits[*token] == 1.0).collect();
        assert_eq!(kept, [1, 33]);
        assert!(set.is_empty_below(1) && !set.is_empty_below(2) && !set.contains(9999));
        assert_eq!(AllowedTokens::from_words(&[2, 2]), set);
    }
}
