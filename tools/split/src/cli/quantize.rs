//! Options of quantization.

use clap::{Args, ValueEnum};
use hpp_onnx::{Bits, BlockFormat, Choice, QuantizeOptions, ScaleRule};
use hpp_schema::ByteSize;
use std::path::PathBuf;

/// Quantization of weights.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Quantization")]
pub struct QuantizeArgs {
    /// Round the weights of MatMul and Gemm to 4 or 8 bits, in blocks with a scale each; the plan holds a copy of all
    /// weights, as with --pack. `hpp-exec verify PLAN --kl FILE --against MODEL` measures what it costs.
    /// `auto` chooses for each matrix among 4 bits in blocks of 16 to 128, 8 bits in blocks of 32, and floats, so that all
    /// weights have at most --bits-budget bytes and cost little: the sum of their squared errors, or with --calibration the
    /// measured divergence.
    #[arg(long, value_enum, value_name = "int4|int8|auto")]
    pub quantize: Option<BitsArg>,
    /// Bytes that all weights of the model may have, with `--quantize auto` [default: as many as --ram and --vram hold without streaming].
    #[arg(long, value_name = "SIZE", value_parser = ByteSize::typed)]
    pub bits_budget: Option<ByteSize>,
    /// Prompts like those the model is for, one JSON object a line as for `hpp-exec verify --kl`. hpp-exec observes with them what
    /// matrices multiply, so that errors of 4-bit weights compensate each other (GPTQ), which is kept if it measures better. With
    /// `--quantize auto` it also measures how much each matrix matters and which choice of bits is best; without it a --profile with
    /// --sensitivity says how much each block matters, and else squared errors decide.
    /// A draft of 4 bits (--draft int4) is rounded so too.
    #[arg(long, value_name = "PROMPTS.jsonl")]
    pub calibration: Option<PathBuf>,
    /// With `--quantize auto` and --calibration, the smallest weights whose mean KL divergence from the original stays below this, nats.
    #[arg(long, value_name = "NATS", value_parser = nats, allow_negative_numbers = true)]
    pub max_kl: Option<f64>,
    /// Weights that share a scale.
    #[arg(long, value_name = "N", default_value = "32", requires = "quantize", value_parser = block)]
    pub quantize_block: usize,
    /// Give each block a zero point: smaller errors where its weights are not around 0.
    #[arg(long, requires = "quantize")]
    pub quantize_asymmetric: bool,
    /// Bits of the head.
    #[arg(long, value_enum, value_name = "int4|int8|none|same", default_value = "same", requires = "quantize")]
    pub quantize_head: ChoiceArg,
    /// Bits of the embedding table. It is read row by row, so this saves memory rather than time [default: none; same with
    /// `--quantize auto`, whose budget counts it].
    #[arg(long, value_enum, value_name = "int4|int8|none|same", requires = "quantize")]
    pub quantize_embedding: Option<ChoiceArg>,
    /// Write a draft of the model beside the plan: its own weights rounded to 4 or 8 bits, for speculative decoding without
    /// another model. It stays in host memory, within --ram. hpp-exec drafts with it unless told otherwise.
    #[arg(long, value_enum, value_name = "int4|int8")]
    pub draft: Option<DraftArg>,
    /// Weights of the draft that share a scale. Larger blocks take less memory, and the draft is right less often.
    #[arg(long, value_name = "N", default_value = "32", requires = "draft", value_parser = block)]
    pub draft_block: usize,
}

/// `--draft`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DraftArg {
    /// 4 bits.
    Int4,
    /// 8 bits.
    Int8,
}

impl DraftArg {
    /// The bits.
    pub fn bits(self) -> Bits {
        match self {
            DraftArg::Int4 => Bits::Four,
            DraftArg::Int8 => Bits::Eight,
        }
    }

    /// How the draft is quantized: in blocks of this size, symmetric, the embedding not at all, so that its bytes are those of the model.
    pub fn options(self, block_size: usize) -> QuantizeOptions {
        QuantizeOptions {
            format: BlockFormat { bits: self.bits(), block_size, asymmetric: false, scale: ScaleRule::Extremes },
            budget: None,
            formats: None,
            head: Choice::Same,
            embedding: Choice::None,
            moments: None,
        }
    }
}

/// `--quantize`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BitsArg {
    /// 4 bits.
    Int4,
    /// 8 bits.
    Int8,
    /// As many as a budget allows, by matrix.
    Auto,
}

impl BitsArg {
    /// As the option has it.
    pub fn name(self) -> &'static str {
        match self {
            BitsArg::Int4 => "int4",
            BitsArg::Int8 => "int8",
            BitsArg::Auto => "auto",
        }
    }
}

/// `--quantize-head` and `--quantize-embedding`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ChoiceArg {
    /// 4 bits.
    Int4,
    /// 8 bits.
    Int8,
    /// Not quantized.
    None,
    /// As all other weights.
    Same,
}

impl BitsArg {
    fn bits(self) -> Bits {
        match self {
            BitsArg::Int4 | BitsArg::Auto => Bits::Four,
            BitsArg::Int8 => Bits::Eight,
        }
    }
}

impl ChoiceArg {
    fn choice(self) -> Choice {
        match self {
            ChoiceArg::Int4 => Choice::Bits(Bits::Four),
            ChoiceArg::Int8 => Choice::Bits(Bits::Eight),
            ChoiceArg::None => Choice::None,
            ChoiceArg::Same => Choice::Same,
        }
    }
}

impl QuantizeArgs {
    /// Whether the bits of each matrix are chosen.
    pub fn is_auto(&self) -> bool {
        self.quantize == Some(BitsArg::Auto)
    }

    /// Whether the bits are chosen and no option limits them.
    pub fn needs_budget(&self) -> bool {
        self.is_auto() && self.bits_budget.is_none() && self.max_kl.is_none()
    }

    /// Whether formats or compensation are chosen by measurements, which take minutes, before anything is planned.
    pub fn takes_long(&self) -> bool {
        self.is_auto() || self.calibration.is_some()
    }

    /// The options; `None` without `--quantize`.
    pub fn options(&self) -> Option<QuantizeOptions> {
        let bits = self.quantize?.bits();
        let embedding = if self.is_auto() { ChoiceArg::Same } else { ChoiceArg::None };
        Some(QuantizeOptions {
            format: BlockFormat {
                bits,
                block_size: self.quantize_block,
                asymmetric: self.quantize_asymmetric,
                scale: ScaleRule::Extremes,
            },
            budget: self.bits_budget.filter(|_| self.is_auto()).map(|size| size.0),
            formats: None,
            head: self.quantize_head.choice(),
            embedding: self.quantize_embedding.unwrap_or(embedding).choice(),
            moments: None,
        })
    }
}

fn nats(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "it is a number of nats, such as 0.02".to_owned())
}

/// Parses a block size that ONNX Runtime's kernels take.
fn block(text: &str) -> Result<usize, String> {
    let sizes = [16, 32, 64, 128, 256];
    let error = || "give 16, 32, 64, 128 or 256".to_owned();
    text.parse().ok().filter(|size| sizes.contains(size)).ok_or_else(error)
}
