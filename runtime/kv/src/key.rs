//! Keys of pages: chained hashes of tokens.

use std::fmt;

/// A hash of everything that decides the bits of a model's states apart from the tokens: weights, plan, provider, library, threads, page
/// size.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 32]);

impl Fingerprint {
    /// The hash of named facts, in this order.
    pub fn of<'a>(facts: impl IntoIterator<Item = (&'a str, &'a str)>) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("hpp 2026-11 KV fingerprint");
        for part in facts.into_iter().flat_map(|(name, value)| [name, value]) {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
        }
        Fingerprint(*hasher.finalize().as_bytes())
    }

    /// Sixteen hexadecimal digits of it: the name of a directory.
    pub fn short(&self) -> String {
        self.0[..8].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The name of a page: a hash of its tokens and of all pages before it.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageKey(pub(crate) [u8; 32]);

impl PageKey {
    /// The parent of the first page of each sequence.
    pub fn root(fingerprint: &Fingerprint) -> Self {
        PageKey(fingerprint.0)
    }

    /// The key of the page of these tokens that follows this page. Tokens that were generated have states with other bits than tokens of a prompt:
    /// their pages are found only under the name of their session.
    pub fn child(&self, tokens: &[u32], session: Option<&str>) -> Self {
        let mut hasher = self.hasher(tokens);
        if let Some(session) = session {
            hasher.update(b"session").update(session.as_bytes());
        }
        PageKey(*hasher.finalize().as_bytes())
    }

    /// The key of the end of a prompt: the prompt's last tokens, which follow this page. It never equals the key of a page. It contains a session
    /// only if this page's key does: then only that session finds it.
    pub fn prompt_end(&self, tokens: &[u32]) -> Self {
        let mut hasher = self.hasher(tokens);
        hasher.update(b"prompt end");
        PageKey(*hasher.finalize().as_bytes())
    }

    /// A hasher that has hashed this key and the tokens that follow.
    fn hasher(&self, tokens: &[u32]) -> blake3::Hasher {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&(tokens.len() as u64).to_le_bytes());
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        hasher
    }
}

impl fmt::Debug for PageKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PageKey({:02x}{:02x}{:02x}{:02x}...)", self.0[0], self.0[1], self.0[2], self.0[3])
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({})", self.short())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_depend_on_everything_before_and_on_the_session() {
        let model = Fingerprint::of([("weights", "a"), ("threads", "2")]);
        assert_ne!(model, Fingerprint::of([("weights", "a"), ("threads", "4")]));
        assert_ne!(model, Fingerprint::of([("weightsa", ""), ("threads", "2")]));
        let root = PageKey::root(&model);
        let (first, other) = (root.child(&[1, 2], None), root.child(&[1, 3], None));
        assert_eq!(first, root.child(&[1, 2], None));
        let seconds = [first.child(&[4, 5], None), other.child(&[4, 5], None), first.child(&[4, 5], Some(""))];
        assert!(seconds[0] != seconds[1] && seconds[0] != seconds[2]);
        assert_ne!(first.child(&[4], Some("a")), first.child(&[4], Some("b")));
    }

    #[test]
    fn the_end_of_a_prompt_has_no_pages_key() {
        let root = PageKey::root(&Fingerprint::of([("weights", "a")]));
        let (end, page) = (root.prompt_end(&[1, 2]), root.child(&[1, 2], None));
        assert_eq!(end, root.prompt_end(&[1, 2]));
        let others = [None, Some(""), Some("prompt end"), Some("a")].map(|session| root.child(&[1, 2], session));
        assert!(!others.contains(&end));
        let ends = [root.prompt_end(&[1]), root.prompt_end(&[1, 3]), root.prompt_end(&[]), page.prompt_end(&[1, 2])];
        assert!(!ends.contains(&end));
        // The end belongs to a session because the page before it does.
        assert_ne!(page.prompt_end(&[3]), root.child(&[1, 2], Some("a")).prompt_end(&[3]));
    }
}
