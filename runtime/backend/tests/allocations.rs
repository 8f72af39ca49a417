//! Decoding allocates nothing on this program's heap: every allocation is counted while real models make tokens.
//!
//! What ONNX Runtime allocates in its own heap is another matter; `docs/RUNTIME.md` says how that was looked at.

mod support;

use hpp_engine::{Engine, EngineOptions, LogitRows, Logits, Silent, StepInput};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise, passed on.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations in eight steps of decoding, after two.
fn counted(model: &support::Recorded) -> u64 {
    let mut engine =
        Engine::load(&model.plan(64), &model.dir, &support::backend(), EngineOptions::default(), &Silent).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let mut logits = Logits::default();
    let mut step = |ids: &[u32]| {
        engine.step_into(&mut sequence, StepInput::Tokens(ids), LogitRows::Last, &mut logits).unwrap();
    };
    step(&[1, 2, 3]);
    step(&[4]);
    step(&[5]);
    let before = COUNT.with(Cell::get);
    (6..14).for_each(|id| step(&[id]));
    COUNT.with(Cell::get) - before
}

#[test]
fn decoding_allocates_nothing() {
    let mut looked_at = 0;
    for model in support::recorded() {
        // Shared caches, windows, carried states and caches that are appended to; no-cache models compute all again.
        let carries = matches!(model.kind(), "decoder_kv" | "decoder_merged_if");
        if carries && model.facts["inputs"].as_array().unwrap().iter().any(|input| input["name"] == "input_ids") {
            assert_eq!(counted(&model), 0, "{}", model.name());
            looked_at += 1;
        }
    }
    assert!(looked_at > 3, "{looked_at}");
}
