//! Sizes for the symbols of a model's shapes in a pass of so many tokens.

use hpp_schema::{InputRole, ModelInput, Shape, State, StateUpdate, Symbols};

/// A pass to price: `tokens` new ones after `past` old ones, for `batch` sequences.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Sequences.
    pub batch: u64,
    /// Tokens taken in.
    pub tokens: u64,
    /// Tokens already in the state.
    pub past: u64,
}

/// The value of every symbol that the model's inputs and states name.
pub fn symbols(inputs: &[ModelInput], states: &[State], pass: Pass) -> Symbols {
    let mut symbols = Symbols::new();
    let (b, s, total) = (pass.batch, pass.tokens, pass.past + pass.tokens);
    for input in inputs {
        let sizes: &[u64] = match (input.role, input.shape.len()) {
            (InputRole::TokenIds | InputRole::Embeddings | InputRole::TokenTypeIds, _) => &[b, s],
            (InputRole::PositionIds, 3) => &[3, b, s],
            (InputRole::PositionIds, _) => &[b, s],
            (InputRole::AttentionMask, _) => &[b, total],
            (InputRole::LogitPositions, _) => &[1],
            _ => &[b],
        };
        bind(&mut symbols, &input.shape, sizes);
    }
    for state in states {
        let mut sizes: Vec<Option<u64>> = vec![None; state.shape.len()];
        if let Some(first) = sizes.first_mut() {
            *first = Some(b);
        }
        match state.update {
            // The attention reads what is there so far, not the buffer's whole capacity.
            StateUpdate::InPlace { axis, capacity } => sizes[axis] = Some(total.min(capacity)),
            StateUpdate::Append { axis, .. } => sizes[axis] = Some(pass.past),
            StateUpdate::Replace | StateUpdate::ReadOnly => {}
        }
        for (dim, size) in state.shape.iter().zip(sizes) {
            if let (Some(name), Some(size)) = (dim.as_symbol(), size) {
                symbols.entry(name.to_owned()).or_insert(size);
            }
        }
    }
    symbols.entry("total_sequence_length".to_owned()).or_insert(total);
    symbols
}

fn bind(symbols: &mut Symbols, shape: &Shape, sizes: &[u64]) {
    for (dim, size) in shape.iter().zip(sizes) {
        if let Some(name) = dim.as_symbol() {
            symbols.entry(name.to_owned()).or_insert(*size);
        }
    }
}
