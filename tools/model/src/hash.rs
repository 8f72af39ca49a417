//! The hash that ties a profile to a model.

use hpp_onnx::{Model, hash};
use std::fs;

/// Model files up to this size, bytes, get a full hash; larger ones contain their weights, and samples of them are
/// hashed.
const FULL_HASH_BYTES: u64 = 64 << 20;

/// BLAKE3 (64 hexadecimal digits) over the model file and, for each weight file in the model's order, its location and
/// the same samples as in a plan's file records. Reads a few hundred kilobytes of each weight file.
pub fn model_hash(model: &Model) -> Result<String, hash::HashError> {
    let path = model.path();
    let failed = |source| hash::HashError { path: path.to_owned(), source };
    let whole = fs::metadata(path).map_err(failed)?.len() <= FULL_HASH_BYTES;
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
    fn the_hash_depends_on_contents_and_not_on_the_directory() {
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
