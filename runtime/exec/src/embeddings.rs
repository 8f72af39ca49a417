//! A table of token embeddings, for models that take embeddings instead of token ids.

use crate::tensors::{NpyError, read_npy};
use std::path::{Path, PathBuf};

/// Rows of numbers, one for each token id.
pub struct Embeddings {
    vocab: usize,
    hidden: usize,
    data: Vec<f32>,
    path: PathBuf,
}

/// Why embeddings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddingsError {
    /// The file cannot be read.
    #[error(transparent)]
    Npy(#[from] NpyError),
    /// The array is not a table of floating-point numbers.
    #[error("{} is no table of embeddings: it holds {dtype} {shape:?}, where floating-point [vocab, hidden] is wanted", path.display())]
    NotATable {
        /// The file.
        path: PathBuf,
        /// Its element type.
        dtype: hpp_schema::DType,
        /// Its shape.
        shape: Vec<u64>,
    },
    /// A token has no row.
    #[error("token {token} has no embedding: {} has rows for tokens 0 to {}", path.display(), vocab.saturating_sub(1))]
    NoRow {
        /// The token.
        token: u32,
        /// Rows there are.
        vocab: usize,
        /// The file.
        path: PathBuf,
    },
}

impl Embeddings {
    /// Reads a `.npy` table.
    pub fn open(path: &Path) -> Result<Self, EmbeddingsError> {
        let table = read_npy(path)?;
        let not_a_table =
            || EmbeddingsError::NotATable { path: path.to_owned(), dtype: table.dtype, shape: table.shape.clone() };
        let [vocab, hidden] = table.shape[..] else { return Err(not_a_table()) };
        let data = table.to_f32().ok_or_else(not_a_table)?;
        Ok(Self { vocab: vocab as usize, hidden: hidden as usize, data, path: path.to_owned() })
    }

    /// The embeddings of these tokens, one after the other.
    pub fn rows(&self, tokens: &[u32]) -> Result<Vec<f32>, EmbeddingsError> {
        let mut rows = Vec::with_capacity(tokens.len() * self.hidden);
        for token in tokens {
            let at = *token as usize;
            if at >= self.vocab {
                return Err(EmbeddingsError::NoRow { token: *token, vocab: self.vocab, path: self.path.clone() });
            }
            rows.extend_from_slice(&self.data[at * self.hidden..(at + 1) * self.hidden]);
        }
        Ok(rows)
    }
}
