//! NumPy files: tensors in from `.npy` and `.npz`, out to `.npz`, and the scores of each step to `.npy`.
//!
//! Element types are matched by name, never converted. NumPy has no bfloat16: two-byte raw (`V2`, as `ml_dtypes`
//! writes it) is read as bfloat16, and bfloat16 is written as `uint16` holding the bits. Our own reader, because the
//! one there is (npyz) panics on hostile headers.

mod npy;
mod npy_header;
mod npz;
mod score_file;

pub use npy::{NpyError, read_npy};
pub use npz::{NpzError, read_npz, write_npz};
pub use score_file::ScoreFile;
