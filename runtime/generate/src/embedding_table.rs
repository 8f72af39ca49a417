//! A table of token embeddings, for models that take embeddings instead of token ids.

use hpp_engine::HostTensor;
use hpp_schema::{Dim, ModelInput};

/// Embeddings `[vocab, hidden]` in float32.
pub struct EmbeddingTable {
    vocab: usize,
    hidden: usize,
    data: Vec<f32>,
}

/// Why embeddings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EmbeddingError {
    /// The tensor is not a table of floating-point numbers.
    #[error("the table of embeddings must hold floating-point numbers [vocab, hidden], not {dtype} {shape:?}")]
    NotATable {
        /// The tensor's element type.
        dtype: hpp_schema::DType,
        /// The tensor's shape.
        shape: Vec<u64>,
    },
    /// The rows are not as wide as what the model takes.
    #[error("its rows have {width} numbers, and the model's input {input} takes {needed} for each token")]
    WrongWidth {
        /// Numbers in a row.
        width: u64,
        /// The model's input of embeddings.
        input: String,
        /// Numbers that it takes for each token.
        needed: u64,
    },
    /// A token has no row.
    #[error("token {token} has no embedding: the table has {}", rows(*.vocab))]
    NoRow {
        /// The token.
        token: u32,
        /// Rows of the table.
        vocab: usize,
    },
}

fn rows(vocab: usize) -> String {
    vocab.checked_sub(1).map_or("no rows".to_owned(), |last| format!("rows for tokens 0 to {last}"))
}

impl EmbeddingTable {
    /// A table from a tensor `[vocab, hidden]` of any floating-point type.
    pub fn new(table: &HostTensor) -> Result<Self, EmbeddingError> {
        let not_a_table = || EmbeddingError::NotATable { dtype: table.dtype, shape: table.shape.clone() };
        let [vocab, hidden] = table.shape[..] else { return Err(not_a_table()) };
        let data = table.to_f32().ok_or_else(not_a_table)?;
        Ok(Self { vocab: vocab as usize, hidden: hidden as usize, data })
    }

    /// This table, if its rows are as wide as `input` takes them. An input that declares no width takes any.
    pub fn for_input(self, input: &ModelInput) -> Result<Self, EmbeddingError> {
        let width = self.hidden as u64;
        match input.shape.last().and_then(Dim::as_fixed) {
            Some(needed) if needed != width => {
                Err(EmbeddingError::WrongWidth { width, input: input.name.clone(), needed })
            }
            _ => Ok(self),
        }
    }

    /// Replaces `rows` by the embeddings of these tokens, `[tokens, hidden]`.
    pub fn read_rows(&self, tokens: &[u32], rows: &mut Vec<f32>) -> Result<(), EmbeddingError> {
        rows.clear();
        rows.reserve(tokens.len() * self.hidden);
        for token in tokens {
            let row = *token as usize;
            if row >= self.vocab {
                return Err(EmbeddingError::NoRow { token: *token, vocab: self.vocab });
            }
            rows.extend_from_slice(&self.data[row * self.hidden..(row + 1) * self.hidden]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_wide_as_the_input_takes_them() {
        let check = |width: Dim| {
            let input = ModelInput {
                name: "inputs_embeds".into(),
                dtype: hpp_schema::DType::Float32,
                shape: vec![Dim::Unknown, Dim::Unknown, width],
                role: hpp_schema::InputRole::Embeddings,
            };
            EmbeddingTable::new(&HostTensor::from_f32(&[1, 2], &[0.0, 0.5])).unwrap().for_input(&input)
        };
        assert!(check(Dim::fixed(2)).is_ok() && check(Dim::Unknown).is_ok());
        let says = "its rows have 2 numbers, and the model's input inputs_embeds takes 3 for each token";
        assert_eq!(check(Dim::fixed(3)).err().unwrap().to_string(), says);
    }

    #[test]
    fn tokens_become_their_rows() {
        let table = EmbeddingTable::new(&HostTensor::from_f32(&[3, 2], &[0.0, 0.5, 1.0, 1.5, 2.0, 2.5])).unwrap();
        let mut rows = vec![9.0];
        table.read_rows(&[2, 0], &mut rows).unwrap();
        assert_eq!(rows, [2.0, 2.5, 0.0, 0.5]);
        assert!(matches!(table.read_rows(&[3], &mut rows), Err(EmbeddingError::NoRow { token: 3, vocab: 3 })));
        for tensor in [HostTensor::from_f32(&[2], &[0.0; 2]), HostTensor::from_i64(&[1, 1], &[1])] {
            assert!(matches!(EmbeddingTable::new(&tensor), Err(EmbeddingError::NotATable { .. })));
        }
    }
}
