//! The buffer type of the engine's ports.

use crate::raw::memory::Memory;
use crate::raw::space::MemorySpace;
use std::rc::Rc;

/// A block of bytes in one memory space.
pub struct OrtBuffer {
    pub(crate) memory: Memory,
    pub(crate) space: Rc<MemorySpace>,
}
