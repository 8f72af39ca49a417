//! Inputs made up from a seed: the same seed and model give the same tensors. For comparing and measuring, not for
//! meaning.

use super::InputsError;
use half::{bf16, f16};
use hpp_engine::{HostTensor, NamedTensors};
use hpp_schema::{DType, Dim, InputRole, Model, ModelInput, Symbols};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Size given to a dimension nobody fixed.
const SIZE: u64 = 16;

/// Largest tensor made up.
const MOST_BYTES: u64 = 1 << 30;

/// Ids below this exist in every vocabulary, for models that do not say how many they have.
const SAFE_IDS: u64 = 100;

/// Token ids, each one the model knows.
pub fn made_up_tokens(count: u64, vocab: Option<u64>, seed: u64) -> Vec<u32> {
    let mut random = ChaCha12Rng::seed_from_u64(seed);
    let ids = vocab.unwrap_or(SAFE_IDS).clamp(1, 1 << 32);
    (0..count).map(|_| (random.next_u64() % ids) as u32).collect()
}

/// A tensor for every input of a model that runs once.
pub fn made_up_inputs(model: &Model, seed: u64) -> Result<NamedTensors, InputsError> {
    let mut random = ChaCha12Rng::seed_from_u64(seed);
    let sizes = sizes(model);
    let wanted = model.inputs.iter().filter(|input| super::is_wanted(input, super::Wanted::All));
    wanted.map(|input| Ok((input.name.clone(), tensor(input, model, &sizes, &mut random)?))).collect()
}

/// One sequence, and the same size for every other dimension without one.
fn sizes(model: &Model) -> Symbols {
    let symbols = model.inputs.iter().flat_map(|input| &input.shape).flat_map(Dim::symbols);
    let mut sizes: Symbols = symbols.map(|name| (name.to_owned(), SIZE)).collect();
    let firsts = model.inputs.iter().filter_map(|input| input.shape.first()?.as_symbol());
    for name in firsts.filter(|name| name.to_lowercase().contains("batch") || *name == "N") {
        sizes.insert(name.to_owned(), 1);
    }
    sizes
}

fn tensor(
    input: &ModelInput,
    model: &Model,
    sizes: &Symbols,
    random: &mut ChaCha12Rng,
) -> Result<HostTensor, InputsError> {
    let cannot = |why: String| InputsError::CannotMakeUp { name: input.name.clone(), why };
    let shape: Vec<u64> = input.shape.iter().map(|dim| dim.eval(sizes).unwrap_or(SIZE)).collect();
    let count = shape.iter().try_fold(1u64, |n, size| n.checked_mul(*size));
    let count = count.filter(|n| input.dtype.bytes_for(*n).is_some_and(|bytes| bytes <= MOST_BYTES));
    let count = count.ok_or_else(|| cannot(format!("{} {shape:?} is too large", input.dtype)))?;
    let mut bytes = Vec::new();
    for _ in 0..count {
        let draw = random.next_u64();
        let known = match input.role {
            InputRole::TokenIds => whole(input.dtype, draw % model.vocab_size.unwrap_or(SAFE_IDS).max(1), &mut bytes),
            InputRole::AttentionMask => whole(input.dtype, 1, &mut bytes),
            InputRole::TokenTypeIds | InputRole::PositionIds => whole(input.dtype, 0, &mut bytes),
            _ if input.dtype.is_float() => real(input.dtype, draw, &mut bytes),
            _ => whole(input.dtype, draw % 2, &mut bytes),
        };
        known.ok_or_else(|| cannot(format!("there is no rule for {}", input.dtype)))?;
    }
    if input.role == InputRole::PositionIds {
        number_positions(input.dtype, &shape, &mut bytes);
    }
    Ok(HostTensor { dtype: input.dtype, shape, bytes })
}

/// Writes 0, 1, 2, ... along the last axis.
fn number_positions(dtype: DType, shape: &[u64], bytes: &mut Vec<u8>) {
    let length = shape.last().copied().unwrap_or(1).max(1);
    let count = shape.iter().product::<u64>();
    let mut out = Vec::with_capacity(bytes.len());
    if (0..count).all(|at| whole(dtype, at % length, &mut out).is_some()) {
        *bytes = out;
    }
}

/// A whole number as an element of any ordinary type.
fn whole(dtype: DType, value: u64, out: &mut Vec<u8>) -> Option<()> {
    match dtype {
        DType::Bool | DType::Int8 | DType::Uint8 => out.push(value as u8),
        DType::Int16 | DType::Uint16 => out.extend((value as u16).to_le_bytes()),
        DType::Int32 | DType::Uint32 => out.extend((value as u32).to_le_bytes()),
        DType::Int64 | DType::Uint64 => out.extend(value.to_le_bytes()),
        _ => return float(dtype, value as f64, out),
    }
    Some(())
}

/// A number in `[-1, 1)`.
fn real(dtype: DType, draw: u64, out: &mut Vec<u8>) -> Option<()> {
    float(dtype, (draw >> 11) as f64 / (1u64 << 52) as f64 - 1.0, out)
}

fn float(dtype: DType, value: f64, out: &mut Vec<u8>) -> Option<()> {
    match dtype {
        DType::Float16 => out.extend(f16::from_f64(value).to_le_bytes()),
        DType::Bfloat16 => out.extend(bf16::from_f64(value).to_le_bytes()),
        DType::Float32 => out.extend((value as f32).to_le_bytes()),
        DType::Float64 => out.extend(value.to_le_bytes()),
        _ => return None,
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::super::tests::model;
    use super::super::{Wanted, fit};
    use super::*;

    #[test]
    fn what_is_made_up_fits_and_repeats() {
        let inputs = made_up_inputs(&model(), 3).unwrap();
        assert_eq!(inputs["image"].shape, [1, 3, 4]);
        assert_eq!(inputs["input_ids"].shape, [1, 16]);
        assert_eq!(inputs, made_up_inputs(&model(), 3).unwrap());
        assert_ne!(inputs, made_up_inputs(&model(), 4).unwrap());
        assert!(fit(inputs.into_iter().collect(), &model(), Wanted::All, "x".into()).is_ok());
    }

    #[test]
    fn tokens_stay_in_the_vocabulary() {
        assert!(made_up_tokens(500, Some(7), 1).iter().all(|t| *t < 7));
        assert_eq!(made_up_tokens(3, None, 1).len(), 3);
    }

    #[test]
    fn positions_count_up() {
        let mut bytes = vec![];
        number_positions(DType::Int64, &[2, 3], &mut bytes);
        let values: Vec<i64> = bytes.chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(values, [0, 1, 2, 0, 1, 2]);
    }
}
