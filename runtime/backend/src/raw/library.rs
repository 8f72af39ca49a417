//! Versions, device descriptions and built-in providers, as the library reports them.

use super::check;
use ort::AsPointer;
use ort::device::Device;
use ort::environment::Environment;
use ort::sys::OrtKeyValuePairs;
use std::ffi::CStr;
use std::path::Path;
use std::ptr;

/// A provider's version, such as `1.31.1`; that of the CPU provider is the library's own.
pub(crate) fn version(device: &Device<'_>) -> Option<String> {
    // SAFETY: the device belongs to an environment that lives as long as the process.
    unsafe { entry((ort::api().EpDevice_EpMetadata)(device.ptr()), c"version") }
}

/// The name of the provider whose devices a registered library offers. If it offers several names that extend each other, such as `Some`
/// and `Some.AUTO`, the shortest.
pub(crate) fn provider_of_library(environment: &Environment, library: &Path) -> Option<String> {
    let of_library = |device: &Device<'_>| {
        // SAFETY: as in `version`.
        let path = unsafe { entry((ort::api().EpDevice_EpMetadata)(device.ptr()), c"library_path") };
        path.is_some_and(|path| Path::new(&path) == library)
    };
    let names = environment.devices().filter(of_library).filter_map(|device| device.ep().ok().map(str::to_owned));
    names.min_by_key(String::len)
}

/// What a provider says about one of its devices.
pub(crate) fn ep_metadata(device: &Device<'_>, key: &CStr) -> Option<String> {
    // SAFETY: as in `version`.
    unsafe { entry((ort::api().EpDevice_EpMetadata)(device.ptr()), key) }
}

/// A device's name, if its driver reports one.
pub(crate) fn description(device: &Device<'_>) -> Option<String> {
    // SAFETY: as in `version`; a provider's device always has a hardware device.
    unsafe {
        let hardware = (ort::api().EpDevice_Device)(device.ptr());
        entry((ort::api().HardwareDevice_Metadata)(hardware), c"Description")
    }
}

/// # Safety
/// `pairs` must be null or alive during the call.
unsafe fn entry(pairs: *const OrtKeyValuePairs, key: &CStr) -> Option<String> {
    if pairs.is_null() {
        return None;
    }
    // SAFETY: the caller's promise; the returned string lives as long as the pairs, and is copied.
    unsafe {
        let value = (ort::api().GetKeyValue)(pairs, key.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_string_lossy().into_owned())
    }
}

/// The providers that the library was built with.
pub(crate) fn built_in_providers() -> Vec<String> {
    let (mut names, mut count) = (ptr::null_mut(), 0);
    // SAFETY: the call fills both variables; each name is copied before the list is released.
    unsafe {
        let api = ort::api();
        if check((api.GetAvailableProviders)(&mut names, &mut count), || "list providers".into()).is_err() {
            return Vec::new();
        }
        let length = usize::try_from(count).unwrap_or(0);
        let all = (0..length).map(|at| CStr::from_ptr(*names.add(at)).to_string_lossy().into_owned()).collect();
        let _ = check((api.ReleaseAvailableProviders)(names, count), String::new);
        all
    }
}
