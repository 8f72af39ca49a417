//! NumPy files: reads tensors from `.npy` and `.npz`, writes tensors to `.npz` and the logits of each step to `.npy`.
//!
//! Element types are matched by name, never converted. NumPy has no bfloat16: raw elements of two bytes (`V2`, as `ml_dtypes` writes them) are read
//! as bfloat16, and bfloat16 is written as the same bits in `uint16`. The npyz crate is not used, because it panics on hostile headers.

mod logits_file;
mod npy;
mod npy_header;
mod npz;

pub use logits_file::LogitsFile;
pub use npy::{NpyError, read_npy};
pub use npz::{NpzError, check_npz, read_npz, write_npz};
