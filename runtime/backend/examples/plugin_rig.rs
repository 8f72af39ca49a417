//! A plug-in provider for tests. The variable `HPP_PLUGIN_RIG` says what it is:
//!
//! - `intel=PATH`: the plug-in at PATH, which is told that every device of this machine is Intel's. OpenVINO's plug-in computes on other
//!   vendors' processors too, but offers them no device.
//! - `newer`: a plug-in that was built for a newer ONNX Runtime, and says so.
//! - anything else: a plug-in without any provider.
//!
//! `tools/scripts/with-openvino.sh` uses the first.

#![allow(non_snake_case, reason = "ONNX Runtime's names")]
#![allow(missing_docs, reason = "ONNX Runtime's functions")]
#![cfg(unix)]

use ort::sys::{OrtApi, OrtApiBase, OrtErrorCode, OrtHardwareDevice};
use std::ffi::{CStr, CString, OsString, c_char, c_void};
use std::os::unix::ffi::OsStringExt;
use std::ptr;
use std::sync::OnceLock;

type Status = *mut c_void;
type CreateFactories = unsafe extern "C" fn(
    *const c_char,
    *const OrtApiBase,
    *const c_void,
    *mut *mut c_void,
    usize,
    *mut usize,
) -> Status;
type ReleaseFactory = unsafe extern "C" fn(*mut c_void) -> Status;

const INTEL: u32 = 0x8086;
const INTEL_NAME: &CStr = c"GenuineIntel";
/// An API version that no ONNX Runtime has yet.
const NEWER_API: u32 = 9_999;

/// ONNX Runtime's tables, and the plug-in behind this one.
struct Rig {
    real: OrtApiBase,
    shown: OrtApiBase,
    /// A copy of the functions in which devices are Intel's; null until the plug-in asks for them.
    functions: OnceLock<usize>,
}

static RIG: OnceLock<Rig> = OnceLock::new();

fn mode() -> OsString {
    std::env::var_os("HPP_PLUGIN_RIG").unwrap_or_default()
}

unsafe extern "system" fn vendor_id(_: *const OrtHardwareDevice) -> u32 {
    INTEL
}

unsafe extern "system" fn vendor(_: *const OrtHardwareDevice) -> *const c_char {
    INTEL_NAME.as_ptr()
}

/// The functions of a version, copied once with two replaced.
unsafe extern "system" fn functions(version: u32) -> *const OrtApi {
    let Some(rig) = RIG.get() else { return ptr::null() };
    // SAFETY: the table's own function, with any version.
    let real = unsafe { (rig.real.GetApi)(version) };
    if real.is_null() {
        return real;
    }
    let copy = || {
        // SAFETY: versions share one table, which has all functions that this build knows: HPP refuses older libraries. Functions are
        // plain pointers, so that a bitwise copy is a table too. It is never freed.
        let mut copy = Box::new(unsafe { ptr::read(real) });
        copy.HardwareDevice_VendorId = vendor_id;
        copy.HardwareDevice_Vendor = vendor;
        Box::into_raw(copy) as usize
    };
    *rig.functions.get_or_init(copy) as *const OrtApi
}

/// A function of the plug-in behind this one.
fn symbol(name: &CStr) -> Option<*mut c_void> {
    let mode = mode().into_vec();
    let path = CString::new(mode.strip_prefix(b"intel=")?).ok()?;
    // SAFETY: both strings end with NUL; opening a library runs its initialisers, which is what a plug-in is for.
    let found = unsafe { libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL), name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// # Safety
/// As ONNX Runtime calls it: `base` is alive for the process, and the other pointers are valid during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn CreateEpFactories(
    name: *const c_char,
    base: *const OrtApiBase,
    logger: *const c_void,
    factories: *mut *mut c_void,
    most: usize,
    count: *mut usize,
) -> Status {
    // SAFETY: the caller's promise; tables are plain pointers.
    let rig = RIG.get_or_init(|| unsafe {
        let (real, mut shown) = (ptr::read(base), ptr::read(base));
        shown.GetApi = functions;
        Rig { real, shown, functions: OnceLock::new() }
    });
    if mode() == "newer" {
        // SAFETY: as above; the message ends with NUL and is copied.
        unsafe {
            if (rig.real.GetApi)(NEWER_API).is_null() {
                let api = &*(rig.real.GetApi)(ort::sys::ORT_API_VERSION);
                let message = c"this plug-in needs ORT API version 9999";
                return (api.CreateStatus)(OrtErrorCode::ORT_FAIL, message.as_ptr()).0.cast();
            }
        }
    }
    match symbol(c"CreateEpFactories") {
        Some(real) => {
            // SAFETY: plug-ins export this function with this type; the pointers are passed on.
            unsafe {
                let create: CreateFactories = std::mem::transmute(real);
                create(name, &rig.shown, logger, factories, most, count)
            }
        }
        None => {
            // SAFETY: the caller's promise.
            unsafe { *count = 0 };
            ptr::null_mut()
        }
    }
}

/// # Safety
/// As ONNX Runtime calls it: a factory of the plug-in.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ReleaseEpFactory(factory: *mut c_void) -> Status {
    let Some(real) = symbol(c"ReleaseEpFactory") else { return ptr::null_mut() };
    // SAFETY: plug-ins export this function with this type.
    unsafe {
        let release: ReleaseFactory = std::mem::transmute(real);
        release(factory)
    }
}
