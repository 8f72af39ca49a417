//! The NVIDIA driver: its list of GPUs, and streams on them. Without a driver nothing is called.

pub(crate) mod feeder;
pub(crate) mod streams;
#[cfg(all(test, unix))]
mod tests;

use cudarc::driver::{CudaContext, sys};

/// A GPU.
pub(crate) struct Card {
    pub name: String,
    pub total: u64,
    pub free: u64,
}

/// The newest CUDA version that the driver runs, as `major.minor`, and its GPUs in the driver's order; `None` without a driver.
pub(crate) fn cards() -> Option<(String, Vec<Card>)> {
    // SAFETY: opens the driver's library, whose initialisers have no preconditions. Every other call panics without it.
    if !unsafe { sys::is_culib_present() } {
        return None;
    }
    let count = CudaContext::device_count().ok()?;
    let cards = (0..usize::try_from(count).ok()?).filter_map(card).collect();
    Some((version()?, cards))
}

fn card(number: usize) -> Option<Card> {
    let context = CudaContext::new(number).ok()?;
    let (free, total) = context.mem_get_info().ok()?;
    Some(Card { name: context.name().ok()?, total: total as u64, free: free as u64 })
}

fn version() -> Option<String> {
    let mut number = 0;
    // SAFETY: `number` has room for one integer; `cards` checked that the library is loaded.
    unsafe { sys::cuDriverGetVersion(&mut number) }.result().ok()?;
    Some(format!("{}.{}", number / 1000, number % 1000 / 10))
}
