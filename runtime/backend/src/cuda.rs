//! The NVIDIA driver: what it says of its cards, and streams on them. Asks nothing where there is no driver.

pub(crate) mod feeder;
pub(crate) mod streams;
#[cfg(all(test, unix))]
mod tests;

use cudarc::driver::{CudaContext, sys};

/// A card.
pub(crate) struct Card {
    pub name: String,
    pub total: u64,
    pub free: u64,
}

/// The driver's version, as `major.minor` of the newest CUDA it runs, and its cards in its own order.
pub(crate) fn cards() -> Option<(String, Vec<Card>)> {
    // SAFETY: tries to open the driver's library, whose initialisers have no preconditions. Every other call panics without it.
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
    // SAFETY: a place for one integer; the library is there, as `cards` checked.
    unsafe { sys::cuDriverGetVersion(&mut number) }.result().ok()?;
    Some(format!("{}.{}", number / 1000, number % 1000 / 10))
}
