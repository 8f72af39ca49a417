//! Values of the symbolic dimensions of a model for a pass of given size.

use hpp_schema::{InputRole, ModelInput, Shape, State, StateUpdate, Symbols};

/// The size of a pass.
#[derive(Clone, Copy, Debug)]
pub struct PassSize {
    /// Sequences.
    pub batch: u64,
    /// New tokens per sequence.
    pub tokens: u64,
    /// Tokens per sequence that the states already hold.
    pub past: u64,
}

/// Values of all symbols in the shapes of inputs and states.
pub fn symbol_values(inputs: &[ModelInput], states: &[State], pass: PassSize) -> Symbols {
    let mut symbols = Symbols::new();
    let (b, s, total) = (pass.batch, pass.tokens, pass.past + pass.tokens);
    for input in inputs {
        let sizes: &[u64] = match (input.role, input.shape.len()) {
            (InputRole::TokenIds | InputRole::TokenTypeIds | InputRole::PositionIds, 1) => &[s],
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
            // Attention reads the filled part of the buffer, not its whole capacity.
            StateUpdate::InPlace { axis, capacity } => sizes[axis] = Some(total.min(capacity)),
            StateUpdate::Append { axis, .. } => sizes[axis] = Some(pass.past),
            StateUpdate::Sliding { axis, capacity } => sizes[axis] = Some(pass.past.min(capacity)),
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
