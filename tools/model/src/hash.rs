//! Which model this is, in one line of hexadecimal: what ties a profile to a model.

use hpp_onnx::{Model, hash};
use std::fs;

/// Model files up to this size are hashed whole; larger ones hold their weights inside and are sampled.
const HASH_WHOLE: u64 = 64 << 20;

/// BLAKE3 over the model file and, for each weight file in the order the model names them, its location and the samples
/// that a plan's file records hash too. Reads a few hundred kilobytes of each weight file, whatever its size.
pub fn model_hash(model: &Model) -> Result<String, hash::HashError> {
    let path = model.path();
    let failed = |source| hash::HashError { path: path.to_owned(), source };
    let whole = fs::metadata(path).map_err(failed)?.len() <= HASH_WHOLE;
    let mut hasher = blake3::Hasher::new();
    hasher.update(if whole { hash::full(path)? } else { hash::sampled(path)? }.as_bytes());
    for file in &model.weights().files {
        hasher.update(&(file.location.len() as u64).to_le_bytes());
        hasher.update(file.location.as_bytes());
        hasher.update(hash::sampled(&file.path)?.as_bytes());
    }
    Ok(hasher.finalize().to_hex().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn copy() -> tempfile::TempDir {
        let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/genai/llama3-fp32-cpu");
        let dir = tempfile::tempdir().unwrap();
        for name in ["model.onnx", "model.onnx.data"] {
            fs::write(dir.path().join(name), fs::read(from.join(name)).unwrap()).unwrap();
        }
        dir
    }

    fn hash_of(dir: &Path) -> String {
        model_hash(&Model::open(dir).unwrap()).unwrap()
    }

    #[test]
    fn a_model_is_the_same_wherever_it_lies_and_another_once_changed() {
        let (a, b) = (copy(), copy());
        let hash = hash_of(a.path());
        assert_eq!(hash.len(), 64);
        assert_eq!(hash, hash_of(b.path()));
        let weights = b.path().join("model.onnx.data");
        let mut bytes = fs::read(&weights).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&weights, bytes).unwrap();
        assert_ne!(hash, hash_of(b.path()));
    }
}
