//! A compiled grammar, and the position of one answer in it.

use super::error::GrammarError;
use crate::sampling::AllowedTokens;
use crate::text::untrusted::catch_panic;
use llguidance::Matcher;
use std::fmt;

/// A compiled grammar at its start. Clones share the automaton.
#[derive(Clone)]
pub struct Grammar {
    pub(super) matcher: Matcher,
    /// Tokens that it knows.
    pub(super) vocabulary: usize,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("vocabulary", &self.vocabulary).finish_non_exhaustive()
    }
}

/// Follows one answer through its grammar.
pub struct GrammarMatcher {
    matcher: Matcher,
    /// Tokens that the grammar knows.
    vocabulary: usize,
}

impl GrammarMatcher {
    /// A matcher at the start of a grammar.
    pub fn new(grammar: &Grammar) -> Self {
        Self { matcher: grammar.matcher.clone(), vocabulary: grammar.vocabulary }
    }

    /// The tokens that may come next, of a model with `vocabulary` tokens. Never empty.
    pub fn allowed(&mut self, vocabulary: usize) -> Result<AllowedTokens, GrammarError> {
        let mask =
            catch_panic(|| self.matcher.compute_mask()).map_err(|error| GrammarError::Stuck(error.to_string()))?;
        let mask = mask.map_err(|error| GrammarError::Stuck(first_line(&error.to_string())))?;
        let allowed = AllowedTokens::from_words(mask.as_slice());
        if allowed.is_empty_below(vocabulary) {
            return Err(GrammarError::Stuck("no token of the vocabulary continues it".to_owned()));
        }
        Ok(allowed)
    }

    /// Takes the token that was chosen, which must be allowed.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        catch_panic(|| self.matcher.consume_token(token))
            .map_err(|error| GrammarError::Stuck(error.to_string()))?
            .map_err(|error| GrammarError::Stuck(first_line(&error.to_string())))
    }

    /// Whether the answer is complete and nothing may follow.
    pub fn is_complete(&self) -> bool {
        self.matcher.is_stopped() && !self.matcher.is_error()
    }

    /// How many of these tokens, from the first on, may follow one another. Changes nothing.
    pub fn count_valid(&mut self, tokens: &[u32]) -> usize {
        let known = tokens.iter().take_while(|token| (**token as usize) < self.vocabulary).count();
        let count = catch_panic(|| self.matcher.validate_tokens(&tokens[..known]));
        count.ok().and_then(Result::ok).unwrap_or(0)
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}
