//! Recognises models in other formats than ONNX by their contents, and suggests a command that exports them.

use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// How a Git LFS pointer begins.
const LFS: &[u8] = b"version https://git-lfs";

/// Whether a file is a Git LFS pointer.
pub fn is_lfs_pointer(path: &Path) -> bool {
    first_bytes(path).is_some_and(|begin| begin.starts_with(LFS))
}

/// Enough bytes to recognise a format.
fn first_bytes(path: &Path) -> Option<Vec<u8>> {
    let mut begin = Vec::new();
    File::open(path).ok()?.take(256).read_to_end(&mut begin).ok()?;
    Some(begin)
}

/// A format that is not ONNX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// The format of llama.cpp.
    Gguf,
    /// A file of weights in safetensors format.
    Safetensors,
    /// A file of weights pickled by PyTorch.
    Torch,
    /// A directory with a Hugging Face checkpoint.
    HuggingFace,
    /// What git leaves in the place of a large file without Git LFS.
    LfsPointer,
    /// Arrays of NumPy.
    Numpy,
    /// An archive that may hold a model.
    Archive,
    /// A JSON file, such as a tokenizer or a configuration.
    Json(JsonFile),
    /// A text, such as a page saved in the place of a download.
    Text,
}

/// What a JSON file beside a model holds, by its usual name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JsonFile {
    /// `tokenizer.json` and what belongs to it.
    Tokenizer,
    /// `config.json`.
    Configuration,
    /// `generation_config.json`.
    GenerationSettings,
    /// `genai_config.json`.
    GenaiConfiguration,
    /// `model.safetensors.index.json`, `pytorch_model.bin.index.json`.
    WeightIndex,
    /// Any other name.
    Other,
}

impl JsonFile {
    fn of_name(name: &str) -> Self {
        match name {
            "tokenizer.json"
            | "tokenizer_config.json"
            | "special_tokens_map.json"
            | "added_tokens.json"
            | "vocab.json" => Self::Tokenizer,
            "config.json" => Self::Configuration,
            "generation_config.json" => Self::GenerationSettings,
            "genai_config.json" => Self::GenaiConfiguration,
            _ if name.ends_with(".index.json") => Self::WeightIndex,
            _ => Self::Other,
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Gguf => "a GGUF file (llama.cpp)",
            Format::Safetensors => "a safetensors file (weights without a graph)",
            Format::Torch => "a PyTorch file (weights without a graph)",
            Format::HuggingFace => "a Hugging Face checkpoint",
            Format::LfsPointer => "a Git LFS pointer (the file itself was not downloaded)",
            Format::Numpy => "a file of NumPy arrays",
            Format::Archive => "an archive",
            Format::Json(JsonFile::Tokenizer) => "a part of a model's tokenizer",
            Format::Json(JsonFile::Configuration) => "a model's configuration",
            Format::Json(JsonFile::GenerationSettings) => "a model's settings of text generation",
            Format::Json(JsonFile::GenaiConfiguration) => "the configuration of ONNX Runtime GenAI",
            Format::Json(JsonFile::WeightIndex) => "the index of a checkpoint's weight files",
            Format::Json(JsonFile::Other) => "a JSON file",
            Format::Text => "a text file",
        })
    }
}

/// Whether a byte can be a part of a text. A model begins with a tag that is a control character.
fn is_text(byte: &u8) -> bool {
    byte.is_ascii_graphic() || byte.is_ascii_whitespace() || !byte.is_ascii()
}

impl Format {
    /// The format of a file that is given as a model, from its first bytes; `None` if it may be ONNX.
    pub fn of_file(path: &Path) -> Option<Format> {
        let begin = first_bytes(path)?;
        let of_weights = Format::of_weights(path, &begin);
        if of_weights.is_some() || begin.is_empty() || !begin.iter().all(is_text) {
            return of_weights;
        }
        let is_json = matches!(begin.trim_ascii_start(), [b'{' | b'[', ..]);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // A file with a model's name that holds text is a failed download, even if the text is JSON.
        let in_place_of_a_model = path.extension().is_some_and(|extension| extension == "onnx");
        Some(if is_json && !in_place_of_a_model { Format::Json(JsonFile::of_name(&name)) } else { Format::Text })
    }

    /// The format of a file with weights, or of a Git LFS pointer to it.
    fn of_weights(path: &Path, begin: &[u8]) -> Option<Format> {
        if begin.starts_with(LFS) {
            return Some(Format::LfsPointer);
        }
        match &begin[..begin.len().min(9)] {
            [b'G', b'G', b'U', b'F', ..] => Some(Format::Gguf),
            // The length of a JSON header, then the header.
            [length @ .., b'{'] if length.len() == 8 => {
                let length = u64::from_le_bytes(length.try_into().ok()?);
                (2..=100 << 20).contains(&length).then_some(Format::Safetensors)
            }
            // A zip archive, or a pickle of protocol 2 or later, with a file name that PyTorch uses.
            [b'P', b'K', 3, 4, ..] | [0x80, 2..=5, ..] => {
                let is_torch =
                    path.extension().is_some_and(|e| ["bin", "pt", "pth", "ckpt"].iter().any(|name| e == *name));
                match begin[0] {
                    _ if is_torch => Some(Format::Torch),
                    b'P' if path.extension().is_some_and(|extension| extension == "npz") => Some(Format::Numpy),
                    b'P' => Some(Format::Archive),
                    _ => None,
                }
            }
            [0x93, b'N', b'U', b'M', b'P', b'Y', ..] => Some(Format::Numpy),
            // gzip, xz, 7-Zip, Zstandard.
            [0x1f, 0x8b, 8, ..]
            | [0xfd, b'7', b'z', b'X', b'Z', ..]
            | [b'7', b'z', 0xbc, 0xaf, ..]
            | [0x28, 0xb5, 0x2f, 0xfd, ..] => Some(Format::Archive),
            _ => None,
        }
    }

    /// The format of a directory without an ONNX file: a checkpoint as a whole, even without weights, or else its first recognised file with
    /// weights. Text files are ignored, because every model directory has some.
    pub fn of_directory(dir: &Path) -> Option<(PathBuf, Format)> {
        let mut files: Vec<PathBuf> = fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
        files.sort();
        let found = files.iter().filter_map(|path| Some((path, Format::of_weights(path, &first_bytes(path)?)?)));
        // Files of these formats may lie beside any model.
        let mut found = found.filter(|(_, format)| !matches!(format, Format::Numpy | Format::Archive));
        let has_config = dir.join("config.json").is_file();
        let Some((path, format)) = found.next() else {
            let has_onnx = files.iter().any(|path| path.extension().is_some_and(|e| e == "onnx"));
            return (has_config && !has_onnx).then(|| (dir.to_owned(), Format::HuggingFace));
        };
        match format {
            Format::Safetensors | Format::Torch | Format::LfsPointer if has_config => {
                Some((dir.to_owned(), if format == Format::LfsPointer { format } else { Format::HuggingFace }))
            }
            _ => Some((path.clone(), format)),
        }
    }

    /// The command that exports a model in this format to ONNX.
    pub fn export(self, path: &Path) -> String {
        const BUILDER: &str = "python -m onnxruntime_genai.models.builder";
        let packages = "pip install onnxruntime-genai onnxruntime onnx-ir torch transformers";
        let path = path.display();
        match self {
            Format::HuggingFace => format!(
                "export it: {BUILDER} -i {path} -o model-onnx -p int4 -e cpu (first: {packages}), or, for architectures the \
                 builder does not know: optimum-cli export onnx --model {path} model-onnx (first: pip install optimum-onnx)"
            ),
            Format::Gguf => format!(
                "the builder reads GGUF in float16 or float32: {BUILDER} -m NAME -i {path} -o model-onnx -p int4 -e cpu (first: \
                 {packages} gguf); a quantized GGUF cannot be exported: give the builder the Hugging Face checkpoint it was \
                 made from, -i CHECKPOINT instead of -m NAME -i FILE"
            ),
            Format::LfsPointer => "download the file: git lfs install, then git lfs pull".to_owned(),
            Format::Archive => "unpack it, and give the directory with the .onnx file".to_owned(),
            Format::Json(_) | Format::Numpy => {
                "give the directory of the model, which an exporter wrote, or its .onnx file".to_owned()
            }
            Format::Text => "download the model again, and look at what this file says".to_owned(),
            Format::Safetensors | Format::Torch => format!(
                "export the whole checkpoint, config.json and tokenizer included: {BUILDER} -i DIRECTORY -o model-onnx -p int4 -e \
                 cpu (first: {packages})"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dir_with(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            fs::write(dir.path().join(name), bytes).unwrap();
        }
        dir
    }

    const SAFETENSORS: &[u8] = b"\x02\0\0\0\0\0\0\0{}";

    #[test]
    fn the_first_bytes_decide_not_the_name() {
        let cases: [(&str, &[u8], Option<Format>); 17] = [
            ("a.onnx", b"GGUF\x03\0\0\0", Some(Format::Gguf)),
            ("b", SAFETENSORS, Some(Format::Safetensors)),
            ("pytorch_model.bin", b"PK\x03\x04....", Some(Format::Torch)),
            ("notes.zip", b"PK\x03\x04....", Some(Format::Archive)),
            ("model.onnx", b"PK\x03\x04....", Some(Format::Archive)),
            ("model.tar.gz", b"\x1f\x8b\x08\x00", Some(Format::Archive)),
            ("logits.npy", b"\x93NUMPY\x01\x00", Some(Format::Numpy)),
            ("inputs.npz", b"PK\x03\x04....", Some(Format::Numpy)),
            ("short", b"\x08", None),
            ("empty", b"", None),
            // An ONNX model: its IR version, then its producer.
            ("model.onnx", b"\x08\x0a\x12\x07pytorch", None),
            ("config.json", b"{\n  \"model_type\"", Some(Format::Json(JsonFile::Configuration))),
            ("model.safetensors.index.json", b"{\"metadata\"", Some(Format::Json(JsonFile::WeightIndex))),
            ("prompts.jsonl", b"\n[1]", Some(Format::Json(JsonFile::Other))),
            ("model.pb", b"<!DOCTYPE html>", Some(Format::Text)),
            // A server's answer in the place of the model.
            ("model.onnx", b"{\"error\": 404}", Some(Format::Text)),
            ("config.json", b"version https://git-lfs.github.com/spec/v1", Some(Format::LfsPointer)),
        ];
        for (name, bytes, format) in cases {
            let dir = dir_with(&[(name, bytes)]);
            assert_eq!(Format::of_file(&dir.path().join(name)), format, "{name}");
        }
    }

    #[test]
    fn a_checkpoint_is_recognised_as_a_directory() {
        let checkpoint = dir_with(&[("config.json", b"{}"), ("model-00001-of-00002.safetensors", SAFETENSORS)]);
        assert_eq!(Format::of_directory(checkpoint.path()), Some((checkpoint.path().to_owned(), Format::HuggingFace)));
        let gguf = dir_with(&[("README.md", b"# A model"), ("model-q4.gguf", b"GGUF....")]);
        assert_eq!(Format::of_directory(gguf.path()), Some((gguf.path().join("model-q4.gguf"), Format::Gguf)));
        let without_weights = dir_with(&[("config.json", b"{}")]);
        let found = Format::of_directory(without_weights.path());
        assert_eq!(found, Some((without_weights.path().to_owned(), Format::HuggingFace)));
        assert_eq!(Format::of_directory(dir_with(&[("config.json", b"{}"), ("a.onnx", b"\x08")]).path()), None);
        let with_arrays = dir_with(&[("a.npz", b"PK\x03\x04...."), ("config.json", b"{}")]);
        let found = Format::of_directory(with_arrays.path());
        assert_eq!(found, Some((with_arrays.path().to_owned(), Format::HuggingFace)));
    }
}
