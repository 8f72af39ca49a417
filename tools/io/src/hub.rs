//! Recognises names of models on the Hugging Face Hub, which people give where a path is wanted.

use std::path::Path;

/// A hint for a missing path that looks like OWNER/NAME on the Hugging Face Hub.
pub fn hub_hint(missing: &Path) -> Option<String> {
    let text = missing.to_str()?;
    if text.to_lowercase().contains("gguf") {
        return Some(format!(
            "HPP runs ONNX models and no GGUF files: export the Hugging Face checkpoint that {text} was made from: python -m \
             onnxruntime_genai.models.builder -m OWNER/NAME -o model-onnx -p int4 -e cpu (first: pip install onnxruntime-genai \
             onnxruntime onnx-ir torch transformers)"
        ));
    }
    let (owner, name) = text.split_once('/')?;
    let is_name = |part: &str| {
        part.starts_with(|c: char| c.is_ascii_alphanumeric())
            && part.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
    };
    let is_file = [".onnx", ".gguf", ".safetensors", ".yaml"].iter().any(|end| name.ends_with(end));
    if !is_name(owner) || !is_name(name) || is_file || Path::new(owner).exists() {
        return None;
    }
    Some(format!(
        "for the model {text} on Hugging Face, export it first: python -m onnxruntime_genai.models.builder -m {text} -o model-onnx \
         -p int4 -e cpu (first: pip install onnxruntime-genai onnxruntime onnx-ir torch transformers), or, if it has ONNX files, \
         download it: hf download {text} --local-dir model-onnx"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_names_are_recognised_and_paths_are_not() {
        for name in ["meta-llama/Llama-3.2-1B", "Qwen/Qwen2.5-0.5B-Instruct"] {
            assert!(hub_hint(Path::new(name)).is_some_and(|hint| hint.contains(&format!("-m {name} -o"))));
        }
        let here = env!("CARGO_MANIFEST_DIR");
        for path in ["model", "./a/b", "/a/b", "a/b/c", "../a", "a/b.onnx", "a b/c", here, ""] {
            assert_eq!(hub_hint(Path::new(path)), None, "{path}");
        }
        for name in ["a/b.gguf", "TheBloke/Llama-2-7B-GGUF", "llama.Q4_K_M.gguf"] {
            assert!(hub_hint(Path::new(name)).is_some_and(|hint| hint.contains("no GGUF")), "{name}");
        }
        // The tests of a crate run in its directory, which has `src`.
        assert_eq!(hub_hint(Path::new("src/nothing")), None);
    }
}
