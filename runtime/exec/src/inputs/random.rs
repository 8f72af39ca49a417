//! Random inputs from a seed, for comparing and measuring: the same seed and model give the same tensors.

use super::InputsError;
use half::{bf16, f16};
use hpp_engine::{HostTensor, NamedTensors};
use hpp_schema::{DType, Dim, InputRole, ModelInput, Symbols};
use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Size of the model's symbolic dimensions.
const DEFAULT_SIZE: u64 = 16;

/// Largest random tensor.
const MAX_BYTES: u64 = 1 << 30;

/// Vocabulary size assumed if the model does not state it; every real vocabulary is larger.
const ASSUMED_VOCAB: u64 = 100;

/// Random token ids below the vocabulary size.
pub fn random_tokens(count: u64, vocab: Option<u64>, seed: u64) -> Vec<u32> {
    let mut random = ChaCha12Rng::seed_from_u64(seed);
    let ids = vocab.unwrap_or(ASSUMED_VOCAB).clamp(1, 1 << 32);
    (0..count).map(|_| (random.next_u64() % ids) as u32).collect()
}

/// A random tensor for each input. Token ids are below the vocabulary size.
pub fn random_inputs(inputs: &[ModelInput], vocab: Option<u64>, seed: u64) -> Result<NamedTensors, InputsError> {
    let mut random = ChaCha12Rng::seed_from_u64(seed);
    let (sizes, vocab) = (sizes(inputs), vocab.unwrap_or(ASSUMED_VOCAB).max(1));
    inputs.iter().map(|input| Ok((input.name.clone(), tensor(input, vocab, &sizes, &mut random)?))).collect()
}

/// Sizes of the symbolic dimensions: 1 for the batch, the default for all others.
fn sizes(inputs: &[ModelInput]) -> Symbols {
    let symbols = inputs.iter().flat_map(|input| &input.shape).flat_map(Dim::symbols);
    let mut sizes: Symbols = symbols.map(|name| (name.to_owned(), DEFAULT_SIZE)).collect();
    let firsts = inputs.iter().filter_map(|input| input.shape.first()?.as_symbol());
    for name in firsts.filter(|name| name.to_lowercase().contains("batch") || *name == "N") {
        sizes.insert(name.to_owned(), 1);
    }
    sizes
}

fn tensor(
    input: &ModelInput,
    vocab: u64,
    sizes: &Symbols,
    random: &mut ChaCha12Rng,
) -> Result<HostTensor, InputsError> {
    let cannot = |why: String| InputsError::NoRandomValue { name: input.name.clone(), why };
    let shape: Vec<u64> = input.shape.iter().map(|dim| dim.eval(sizes).unwrap_or(DEFAULT_SIZE)).collect();
    let count = shape.iter().try_fold(1u64, |n, size| n.checked_mul(*size));
    let count = count.filter(|n| input.dtype.bytes_for(*n).is_some_and(|bytes| bytes <= MAX_BYTES));
    let count = count.ok_or_else(|| cannot(format!("{} {shape:?} is too large", input.dtype)))?;
    let mut bytes = Vec::new();
    for _ in 0..count {
        let draw = random.next_u64();
        let written = match input.role {
            InputRole::TokenIds => write_integer(input.dtype, draw % vocab, &mut bytes),
            InputRole::AttentionMask => write_integer(input.dtype, 1, &mut bytes),
            InputRole::TokenTypeIds | InputRole::PositionIds => write_integer(input.dtype, 0, &mut bytes),
            _ if input.dtype.is_float() => write_unit(input.dtype, draw, &mut bytes),
            _ => write_integer(input.dtype, draw % 2, &mut bytes),
        };
        written.ok_or_else(|| cannot(format!("its element type is {}", input.dtype)))?;
    }
    if input.role == InputRole::PositionIds {
        write_positions(input.dtype, &shape, &mut bytes);
    }
    Ok(HostTensor { dtype: input.dtype, shape, bytes })
}

/// Replaces `bytes` by positions: 0, 1, 2, ... along the last axis.
fn write_positions(dtype: DType, shape: &[u64], bytes: &mut Vec<u8>) {
    let length = shape.last().copied().unwrap_or(1).max(1);
    let count = shape.iter().product::<u64>();
    let mut out = Vec::with_capacity(bytes.len());
    if (0..count).all(|element| write_integer(dtype, element % length, &mut out).is_some()) {
        *bytes = out;
    }
}

/// Appends an integer as an element of this type. `None` if the type is not supported.
fn write_integer(dtype: DType, value: u64, out: &mut Vec<u8>) -> Option<()> {
    match dtype {
        DType::Bool | DType::Int8 | DType::Uint8 => out.push(value as u8),
        DType::Int16 | DType::Uint16 => out.extend((value as u16).to_le_bytes()),
        DType::Int32 | DType::Uint32 => out.extend((value as u32).to_le_bytes()),
        DType::Int64 | DType::Uint64 => out.extend(value.to_le_bytes()),
        _ => return write_float(dtype, value as f64, out),
    }
    Some(())
}

/// Appends a number in `[-1, 1)`.
fn write_unit(dtype: DType, draw: u64, out: &mut Vec<u8>) -> Option<()> {
    write_float(dtype, (draw >> 11) as f64 / (1u64 << 52) as f64 - 1.0, out)
}

fn write_float(dtype: DType, value: f64, out: &mut Vec<u8>) -> Option<()> {
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
    use super::super::check_inputs;
    use super::super::tests::inputs as model_inputs;
    use super::*;

    #[test]
    fn random_inputs_fit_the_model_and_repeat() {
        let inputs = random_inputs(&model_inputs(), Some(10), 3).unwrap();
        assert_eq!(inputs["image"].shape, [1, 3, 4]);
        assert_eq!(inputs["input_ids"].shape, [1, 16]);
        assert_eq!(inputs, random_inputs(&model_inputs(), Some(10), 3).unwrap());
        assert_ne!(inputs, random_inputs(&model_inputs(), Some(10), 4).unwrap());
        let inputs = inputs.into_iter().collect();
        assert!(check_inputs(inputs, &model_inputs(), std::path::Path::new("x")).is_ok());
    }

    #[test]
    fn tokens_stay_in_the_vocabulary() {
        assert!(random_tokens(500, Some(7), 1).iter().all(|t| *t < 7));
        assert_eq!(random_tokens(3, None, 1).len(), 3);
    }

    #[test]
    fn positions_count_up() {
        let mut bytes = vec![];
        write_positions(DType::Int64, &[2, 3], &mut bytes);
        let values: Vec<i64> = bytes.chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect();
        assert_eq!(values, [0, 1, 2, 0, 1, 2]);
    }
}
