//! What operators an ONNX file uses and what its weights are, read without the weights: enough to decide whether packing them
//! ahead pays.
//!
//! ONNX Runtime can copy weights into a layout its kernels like better. For 4-bit and 8-bit weights that is a hundred times
//! faster, so a partition that has some is packed. For 32-bit ones it gains a tenth, takes seconds per gigabyte at load and needs
//! the memory for the copy; without it, weights stay mapped from their file and may be evicted. The two ways round differently,
//! so of a partition with 32-bit weights alone the unsplit model decides, and the size of its weights: a model computes the same
//! numbers whole and in partitions.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

/// What loading a file needs to know of its operators and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Whether it has weights that must be packed ahead, whatever that takes.
    pub needs_packing: bool,
    /// An operator whose packed weights are not known to come back as they were when they are written to a file and mapped
    /// again, if there is one. ONNX Runtime offers it for all; products of 2 to 8 bits and mixtures of experts have been tried.
    pub unsaved: Option<&'static str>,
    /// Whether it has a mixture of 4-bit experts. On the host its kernel takes weights that are constants in whatever layout they
    /// come, and weights that are inputs in one: of a model that was made for CUDA it then computes something else, without a word.
    pub narrow_experts: bool,
}

/// Reads a file's operators and weight types. Files that cannot be read are left to the loader to complain of.
pub(crate) fn facts(file: &Path) -> Facts {
    let unreadable = Facts { needs_packing: true, unsaved: None, narrow_experts: false };
    look(file).map_or(unreadable, |scan| scan.facts)
}

/// Whether a model has weights that must be packed ahead, whatever that takes.
pub fn needs_packing(model: &Path) -> bool {
    facts(model).needs_packing
}

fn look(model: &Path) -> io::Result<Scan> {
    let file = File::open(model)?;
    let end = file.metadata()?.len();
    let facts = Facts { needs_packing: false, unsaved: None, narrow_experts: false };
    let mut scan = Scan { file: BufReader::new(file), facts };
    scan.message(Kind::Model, end, 0)?;
    Ok(scan)
}

/// Operators whose packed weights come back as they were.
const SAVED: [&str; 6] =
    ["DequantizeLinear", "DynamicQuantizeMatMul", "MatMulInteger", "MatMulIntegerToFloat", "MatMulNBits", "QMoE"];

/// Operators whose kernels pack narrow weights, or convolutions, which have layouts of their own.
const PACKED: [&str; 18] = [
    "Conv",
    "ConvInteger",
    "ConvTranspose",
    "DequantizeLinear",
    "DynamicQuantizeLSTM",
    "DynamicQuantizeMatMul",
    "GRU",
    "LSTM",
    "MatMulBnb4",
    "MatMulFpQ4",
    "MatMulInteger",
    "MatMulIntegerToFloat",
    "MatMulNBits",
    "QAttention",
    "QGemm",
    "QLinearConv",
    "QLinearMatMul",
    "QMoE",
];

/// Messages of the ONNX IR that lead to operators and weights.
#[derive(Clone, Copy)]
enum Kind {
    Model,
    Graph,
    Function,
    Node,
    Attribute,
    Weight,
}

/// What a field of such a message is.
enum Field {
    Message(Kind),
    Operator,
    ElementType,
    Other,
}

impl Kind {
    fn field(self, number: u64) -> Field {
        match (self, number) {
            (Kind::Model, 7) | (Kind::Attribute, 6 | 11) => Field::Message(Kind::Graph),
            (Kind::Model, 25) => Field::Message(Kind::Function),
            (Kind::Graph, 1) | (Kind::Function, 7) => Field::Message(Kind::Node),
            (Kind::Graph, 5) | (Kind::Attribute, 5) => Field::Message(Kind::Weight),
            (Kind::Node, 5) => Field::Message(Kind::Attribute),
            (Kind::Node, 4) => Field::Operator,
            (Kind::Weight, 2) => Field::ElementType,
            _ => Field::Other,
        }
    }
}

struct Scan {
    file: BufReader<File>,
    facts: Facts,
}

/// Deepest nesting that is followed.
const DEEPEST: u32 = 64;

impl Scan {
    /// Reads one message that ends at `end`.
    fn message(&mut self, kind: Kind, end: u64, depth: u32) -> io::Result<()> {
        if depth > DEEPEST {
            return Err(damaged());
        }
        while self.file.stream_position()? < end {
            let tag = self.varint()?;
            let field = kind.field(tag >> 3);
            match tag & 7 {
                0 => {
                    let value = self.varint()?;
                    if matches!(field, Field::ElementType) {
                        self.element_type(value);
                    }
                }
                1 => self.skip(8)?,
                5 => self.skip(4)?,
                2 => {
                    let length = self.varint()?;
                    let inner = self.file.stream_position()?.checked_add(length).filter(|inner| *inner <= end);
                    let inner = inner.ok_or_else(damaged)?;
                    match field {
                        Field::Message(kind) => self.message(kind, inner, depth + 1)?,
                        Field::Operator if length < 256 => self.operator(length as usize)?,
                        _ => self.skip(length)?,
                    }
                }
                _ => return Err(damaged()),
            }
        }
        Ok(())
    }

    /// Floating-point weights narrower than 32 bits are widened at load, and then packed or not like any others.
    fn element_type(&mut self, number: u64) {
        let dtype = i32::try_from(number).ok().and_then(hpp_schema::DType::from_onnx);
        self.facts.needs_packing |=
            dtype.is_some_and(|dtype| dtype.is_float() && dtype.bits().is_some_and(|bits| bits < 32));
    }

    fn operator(&mut self, length: usize) -> io::Result<()> {
        let mut name = vec![0; length];
        self.file.read_exact(&mut name)?;
        let packed = PACKED.iter().find(|packed| packed.as_bytes() == name);
        let facts = &mut self.facts;
        facts.needs_packing |= packed.is_some();
        facts.narrow_experts |= name == b"QMoE";
        facts.unsaved = facts.unsaved.or(packed.copied().filter(|packed| !SAVED.contains(packed)));
        Ok(())
    }

    fn varint(&mut self) -> io::Result<u64> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let mut byte = [0];
            self.file.read_exact(&mut byte)?;
            value |= u64::from(byte[0] & 0x7f).checked_shl(shift).unwrap_or(0);
            if byte[0] & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(damaged())
    }

    fn skip(&mut self, length: u64) -> io::Result<()> {
        match i64::try_from(length) {
            Ok(length) => self.file.seek_relative(length),
            Err(_) => self.file.seek(SeekFrom::End(0)).map(|_| ()),
        }
    }
}

fn damaged() -> io::Error {
    io::Error::from(io::ErrorKind::InvalidData)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fixture(name: &str) -> bool {
        let models = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models"));
        let model = models.join(name).join("model.onnx");
        assert!(model.is_file(), "{}", model.display());
        needs_packing(&model)
    }

    #[test]
    fn narrow_weights_gain_and_wide_ones_do_not() {
        assert!(!fixture("genai/llama3-fp32-cpu"));
        assert!(!fixture("optimum/llama-with-past"));
        assert!(fixture("genai/llama3-int4-cpu"));
        assert!(fixture("genai/gpt-oss-int4-cpu"));
        assert!(fixture("optimum/llama-with-past-fp16"));
    }

    #[test]
    fn what_is_not_known_to_come_back_is_not_saved() {
        let models = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models"));
        let model = |name: &str| models.join(name).join("model.onnx");
        for name in ["genai/gpt-oss-int4-cpu", "genai/llama3-int4-cpu", "genai/llama3-fp32-cpu"] {
            assert_eq!(facts(&model(name)).unsaved, None, "{name}");
        }
        // A model with a graph with a node of this operator.
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), b"\x3a\x07\x0a\x05\x22\x03GRU").unwrap();
        assert_eq!(facts(file.path()).unsaved, Some("GRU"));
        let experts = |name: &str| facts(&model(name)).narrow_experts;
        assert!(experts("genai/gpt-oss-int4-cpu") && !experts("genai/llama3-int4-cpu"));
    }

    #[test]
    fn what_cannot_be_read_is_left_to_the_loader() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for bytes in [&b"\xff\xff\xff"[..], b"\x3a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"not a model"] {
            std::fs::write(file.path(), bytes).unwrap();
            assert!(needs_packing(file.path()));
        }
        assert!(needs_packing(Path::new("no/such/file")));
    }
}
