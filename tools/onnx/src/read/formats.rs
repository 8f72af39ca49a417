//! Models in other formats than ONNX, by what is in them, and the command that exports what HPP reads.

use std::fmt;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

/// A format that is not ONNX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// llama.cpp's.
    Gguf,
    /// One file of Hugging Face weights.
    Safetensors,
    /// Weights pickled by torch.
    Torch,
    /// A directory as Hugging Face has it.
    HuggingFace,
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Format::Gguf => "a GGUF file (llama.cpp)",
            Format::Safetensors => "a safetensors file (weights without a graph)",
            Format::Torch => "a PyTorch file (weights without a graph)",
            Format::HuggingFace => "a Hugging Face checkpoint",
        })
    }
}

impl Format {
    /// Told by how a file begins.
    pub fn of_file(path: &Path) -> Option<Format> {
        let mut begin = Vec::new();
        File::open(path).ok()?.take(9).read_to_end(&mut begin).ok()?;
        match begin.as_slice() {
            [b'G', b'G', b'U', b'F', ..] => Some(Format::Gguf),
            // The length of a header in JSON, then the header.
            [length @ .., b'{'] if length.len() == 8 => {
                let length = u64::from_le_bytes(length.try_into().ok()?);
                (2..=100 << 20).contains(&length).then_some(Format::Safetensors)
            }
            // A zip archive, or a pickle of protocol 2 and later, under the names torch gives.
            [b'P', b'K', 3, 4, ..] | [0x80, 2..=5, ..] => {
                let is_torch =
                    path.extension().is_some_and(|e| ["bin", "pt", "pth", "ckpt"].iter().any(|name| e == *name));
                is_torch.then_some(Format::Torch)
            }
            _ => None,
        }
    }

    /// Told by the files of a directory without an ONNX file: a checkpoint as a whole, or the one file that is there.
    pub fn of_directory(dir: &Path) -> Option<(PathBuf, Format)> {
        let mut files: Vec<PathBuf> = fs::read_dir(dir).ok()?.flatten().map(|entry| entry.path()).collect();
        files.sort();
        let mut found = files.iter().filter_map(|path| Some((path, Format::of_file(path)?)));
        let (path, format) = found.next()?;
        match format {
            Format::Safetensors | Format::Torch if dir.join("config.json").is_file() => {
                Some((dir.to_owned(), Format::HuggingFace))
            }
            _ => Some((path.clone(), format)),
        }
    }

    /// The command that makes a model HPP reads.
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
                 {packages} gguf); a quantised GGUF cannot be exported: give the builder the Hugging Face checkpoint it was \
                 made from, -i CHECKPOINT instead of -m NAME -i FILE"
            ),
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
    fn files_are_told_by_how_they_begin_whatever_their_name() {
        let cases: [(&str, &[u8], Option<Format>); 7] = [
            ("a.onnx", b"GGUF\x03\0\0\0", Some(Format::Gguf)),
            ("b", SAFETENSORS, Some(Format::Safetensors)),
            ("pytorch_model.bin", b"PK\x03\x04....", Some(Format::Torch)),
            ("notes.zip", b"PK\x03\x04....", None),
            ("short", b"GG", None),
            ("empty", b"", None),
            // An ONNX model: its IR version, then its producer.
            ("model.onnx", b"\x08\x0a\x12\x07pytorch", None),
        ];
        for (name, bytes, format) in cases {
            let dir = dir_with(&[(name, bytes)]);
            assert_eq!(Format::of_file(&dir.path().join(name)), format, "{name}");
        }
    }

    #[test]
    fn a_checkpoint_is_told_as_a_whole() {
        let checkpoint = dir_with(&[("config.json", b"{}"), ("model-00001-of-00002.safetensors", SAFETENSORS)]);
        assert_eq!(Format::of_directory(checkpoint.path()), Some((checkpoint.path().to_owned(), Format::HuggingFace)));
        let gguf = dir_with(&[("README.md", b"# A model"), ("model-q4.gguf", b"GGUF....")]);
        assert_eq!(Format::of_directory(gguf.path()), Some((gguf.path().join("model-q4.gguf"), Format::Gguf)));
        assert_eq!(Format::of_directory(dir_with(&[("config.json", b"{}")]).path()), None);
    }
}
