//! The provider that ONNX Runtime assigned each node of a session to.

use super::check;
use hpp_engine::BackendError;
use ort::AsPointer;
use ort::session::Session;
use std::ffi::{CStr, c_char};
use std::ptr;

/// A node and its provider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Assigned {
    pub provider: String,
    pub name: String,
    pub operator: String,
}

/// Every node of a session that was created with `session.record_ep_graph_assignment_info=1`.
pub(crate) fn assigned(session: &Session) -> Result<Vec<Assigned>, BackendError> {
    let doing = || "list the provider of each node".to_owned();
    let api = ort::api();
    let (mut groups, mut count) = (ptr::null(), 0usize);
    let mut all = Vec::new();
    // SAFETY: the session owns the lists and is alive throughout; each list is read up to the length returned with it, and every string
    // is copied.
    unsafe {
        check((api.Session_GetEpGraphAssignmentInfo)(session.ptr(), &mut groups, &mut count), doing)?;
        for group in 0..count {
            let group = *groups.add(group);
            let mut provider = ptr::null();
            check((api.EpAssignedSubgraph_GetEpName)(group, &mut provider), doing)?;
            let (mut nodes, mut length) = (ptr::null(), 0usize);
            check((api.EpAssignedSubgraph_GetNodes)(group, &mut nodes, &mut length), doing)?;
            for node in 0..length {
                let node = *nodes.add(node);
                let (mut name, mut operator) = (ptr::null(), ptr::null());
                check((api.EpAssignedNode_GetName)(node, &mut name), doing)?;
                check((api.EpAssignedNode_GetOperatorType)(node, &mut operator), doing)?;
                all.push(Assigned { provider: text(provider), name: text(name), operator: text(operator) });
            }
        }
    }
    Ok(all)
}

/// # Safety
/// `text` must be null or a NUL-terminated string.
unsafe fn text(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
