//! Decoding allocates nothing on this program's heap and maps no memory. The test counts every allocation and every mapping while real
//! models generate tokens, on the CPU and, if `HPP_WEBGPU_TEST` is set (see `tools/scripts/with-webgpu.sh`), on a device.
//!
//! Allocations in ONNX Runtime's own heap are not counted; `docs/RUNTIME.md` says how they were examined.

mod support;

#[cfg(target_os = "linux")]
use hpp_engine::port::{Backend as _, MemoryId};
use hpp_engine::{Engine, EngineOptions, LogitRows, Logits, Silent, StepInput};
use hpp_schema::{ByteSize, Device, DeviceKind, Plan, Provider};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is forwarded to the system's allocator unchanged; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static MAPPINGS: Cell<u64> = const { Cell::new(0) };
}

/// Replaces the system library's function of this name for this program and the libraries it loads.
///
/// # Safety
/// That of the system's function.
#[cfg(target_os = "linux")]
#[unsafe(no_mangle)]
unsafe extern "C" fn mmap(
    address: *mut libc::c_void,
    length: libc::size_t,
    rights: libc::c_int,
    flags: libc::c_int,
    file: libc::c_int,
    offset: libc::off_t,
) -> *mut libc::c_void {
    MAPPINGS.with(|count| count.set(count.get() + 1));
    // SAFETY: the caller's promise.
    unsafe { libc::syscall(libc::SYS_mmap, address, length, rights, flags, file, offset) as *mut libc::c_void }
}

/// Allocations and mappings of this thread in eight decoding steps, after two warm-up steps.
fn counted(model: &support::Recorded, plan: &Plan) -> [u64; 2] {
    let mut engine = Engine::load(plan, &model.dir, &support::backend(), EngineOptions::default(), &Silent).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let mut logits = Logits::default();
    let mut step = |ids: &[u32]| {
        engine.step_into(&mut sequence, StepInput::Tokens(ids), LogitRows::Last, &mut logits).unwrap();
    };
    step(&[1, 2, 3]);
    step(&[4]);
    step(&[5]);
    let now = || [COUNT.with(Cell::get), MAPPINGS.with(Cell::get)];
    let before = now();
    (6..14).for_each(|id| step(&[id]));
    let after = now();
    [after[0] - before[0], after[1] - before[1]]
}

#[test]
#[cfg(target_os = "linux")]
fn mappings_are_counted() {
    let backend = support::backend();
    let before = MAPPINGS.with(Cell::get);
    drop(backend.reserve(MemoryId::HOST, 100).unwrap());
    assert_eq!(MAPPINGS.with(Cell::get) - before, 1);
}

/// Logits are read from the device through host memory that is already allocated.
#[test]
fn decoding_on_a_device_maps_nothing() {
    if std::env::var_os("HPP_WEBGPU_TEST").is_none() {
        println!(
            "SKIPPED: decoding_on_a_device_maps_nothing: HPP_WEBGPU_TEST is not set, see tools/scripts/with-webgpu.sh"
        );
        return;
    }
    let model = support::recorded().into_iter().find(|model| model.dir.ends_with("llama3-fp32-cpu")).unwrap();
    let mut plan = model.plan(64);
    plan.devices = vec![Device::new("gpu0", DeviceKind::Gpu)];
    plan.budgets.vram = vec![ByteSize(1 << 30)];
    plan.partitions[0].device = "gpu0".into();
    plan.partitions[0].providers = vec![Provider::WEBGPU];
    plan.states.iter_mut().for_each(|state| state.device = "gpu0".into());
    assert_eq!(counted(&model, &plan), [0, 0]);
}

#[test]
fn decoding_allocates_nothing() {
    let mut looked_at = 0;
    for model in support::recorded() {
        // Shared caches, windows, recurrent states and appended caches; models without a cache recompute the whole text.
        let carries = matches!(model.kind(), "decoder_kv" | "decoder_merged_if");
        if carries && model.facts["inputs"].as_array().unwrap().iter().any(|input| input["name"] == "input_ids") {
            assert_eq!(counted(&model, &model.plan(64)), [0, 0], "{}", model.name());
            looked_at += 1;
        }
    }
    assert!(looked_at > 3, "{looked_at}");
}
