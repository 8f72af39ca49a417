//! Prefetching of weights into the processor's cache. The rows of active neurons lie apart in memory, so the processor's own prefetcher, which
//! stops at the end of a page, fetches few of them in time.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks the processor to fetch these numbers into its cache, without waiting for them. Does nothing on processors other than x86-64.
#[inline]
pub(super) fn prefetch<T>(numbers: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for offset in (0..size_of_val(numbers)).step_by(LINE) {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has the instruction; the address lies within `numbers`, and a prefetch of any address has no effect
        // but on the cache.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(numbers.as_ptr().cast::<i8>().add(offset)) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (numbers, LINE);
}
