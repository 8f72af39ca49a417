//! Reads and writes ONNX files: reads models without loading weights, flattens them, extracts partitions, and writes
//! partitions and weight files.
//!
//! Handles protobuf, files and hostile input. Does not know devices or plans.

mod active_neurons;
mod conditional;
mod divide_experts;
mod extract;
mod flatten;
mod gather;
pub mod hash;
mod head;
mod lift;
mod model;
mod names;
mod note;
pub mod proto;
mod quantize;
mod read;
mod reshaped;
mod rows;
mod samples;
mod set_attribute;
mod shorten;
mod state_shape;
mod store;
mod tensor;
mod typed;
mod virtual_file;
pub mod walk;
mod weight_source;
mod weights;
mod write;
mod zero_input;

pub use active_neurons::{ActiveNeurons, ActiveNeuronsError};
pub use conditional::compute_selected_experts;
pub use divide_experts::{DividedMixtures, ExpertDivision, ExpertDivisionError, divide_experts};
pub use extract::{ExtractError, Extractor};
pub use flatten::FunctionError;
pub use head::{HeadReason, POSITIONS_DIM, gather_logit_positions};
pub use lift::{Lifted, LiftedWeight, WeightBytes, lift};
pub use model::Model;
pub use note::{BranchChoice, DroppedInput, Note};
pub use quantize::{
    Bits, BlockFormat, Candidate, Candidates, Choice, Form, InputMoments, LeftReason, MIN_ELEMENTS, MeasureProgress,
    NotFiniteError, NothingReason, QuantizeError, QuantizeOptions, QuantizeSummary, Quantized, Roles, ScaleRule,
    check_quantizable, choose_formats, moment_bytes, product_inputs, quantize,
};
pub use read::{GraphError, LocateError, NEWEST_IR, OrderError, ReadError, WireError, locate, passed_over};
pub use reshaped::store_reshaped;
pub use rows::{RowSplit, RowSplitError, split_rows};
pub use samples::{SampledNumbers, looks_widened, sample_numbers};
pub use set_attribute::set_int_attribute;
pub use shorten::keep_rows;
pub use state_shape::{StateShape, derive_state_shapes};
pub use store::{
    ExternaliseError, LinkError, LinkOutcome, PackError, PackProgress, PackStats, RangeReadError, RoundError, Rounding,
    embed_structure, externalise, externalise_virtually, link, needs_externalising, pack, pack_virtually, predict_link,
    round,
};
pub use tensor::{TensorError, TensorProblem, TensorShape, is_external};
pub use virtual_file::{VirtualFile, VirtualFiles};
pub use weights::{
    EXPERTS_FILE, FileRange, NEURONS_FILE, QUANTIZED_FILE, ROWS_FILE, Storage, WeightError, WeightFile, Weights,
};
pub use write::{WriteError, encode, write_bytes, write_model};
pub use zero_input::zero_input;
