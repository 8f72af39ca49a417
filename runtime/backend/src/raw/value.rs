//! OrtValues: tensor handles over memory of this crate ([`Memory`]) or memory that ONNX Runtime allocated.

use super::check;
use super::dtype::{from_ort, to_ort};
use super::lock::DeviceLock;
use super::memory::Memory;
use super::space::MemorySpace;
use hpp_engine::BackendError;
use hpp_engine::port::{Dims, MemoryId};
use hpp_schema::DType;
use ort::sys::{OrtMemoryInfo, OrtValue};
use std::ptr::{self, NonNull};

/// A tensor. A view keeps its [`Memory`] alive.
pub(crate) struct Value {
    ptr: NonNull<OrtValue>,
    /// `None` if ONNX Runtime allocated the tensor: the value itself owns that memory.
    memory: Option<Memory>,
    pub dtype: DType,
    pub dims: Dims,
    /// The memory space of the tensor.
    pub space: MemoryId,
    /// Taken to copy the tensor, and to free it if ONNX Runtime allocated it.
    pub lock: DeviceLock,
}

impl Value {
    /// A view of the first bytes of a memory block of `space`. An error if the tensor is larger than the block.
    pub fn view(memory: &Memory, space: &MemorySpace, dtype: DType, shape: &[u64]) -> Result<Self, BackendError> {
        let doing = || format!("view memory as {dtype} {shape:?}");
        let (address, have) = (memory.address(), memory.len());
        let need = shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        let need = need.and_then(|elements| dtype.bytes_for(elements)).filter(|need| *need <= have);
        let need = need.ok_or_else(|| BackendError::Misfit {
            what: format!("{dtype} {shape:?}"),
            why: format!("the buffer has {have} bytes"),
        })?;
        let sizes: smallvec::SmallVec<[i64; 6]> = shape.iter().map(|size| *size as i64).collect();
        // SAFETY: the memory information describes the space of `address`, `need` bytes are there (checked above), and the value keeps
        // the memory alive. The sizes fit i64, since their product in bytes fits the buffer, or one of them is zero.
        let ptr = unsafe { create(space.info(), address, need as usize, &sizes, dtype, doing) }?;
        let (dims, lock) = (Dims::from_slice(shape), space.lock.clone());
        Ok(Value { ptr, memory: Some(memory.clone()), dtype, dims, space: space.id, lock })
    }

    /// The same tensor in host memory under another description; `None` if ONNX Runtime allocated it.
    ///
    /// A provider that computes on the processor may describe host memory as a device of its own, and ONNX Runtime copies tensors with
    /// another description. It copies inputs only when they are bound, so later writes to them would be missed.
    ///
    /// # Safety
    /// `info` must be null or describe host memory, and be alive during the call.
    pub unsafe fn described_as(&self, info: *const OrtMemoryInfo) -> Result<Option<Self>, BackendError> {
        let Some(memory) = self.memory.as_ref().filter(|_| !info.is_null() && self.space == MemoryId::HOST) else {
            return Ok(None);
        };
        let sizes: smallvec::SmallVec<[i64; 6]> = self.dims.iter().map(|size| *size as i64).collect();
        let doing = || "describe host memory as a provider does".to_owned();
        // SAFETY: the caller's promise about `info`; the tensor fits its memory (`view` checked it), which the new value keeps alive.
        let ptr = unsafe { create(info, memory.address(), self.size() as usize, &sizes, self.dtype, doing) }?;
        let (dims, lock) = (self.dims.clone(), self.lock.clone());
        Ok(Some(Value { ptr, memory: Some(memory.clone()), dtype: self.dtype, dims, space: self.space, lock }))
    }

    /// A view of `bytes` at `offset` of host memory, pinned or not.
    pub fn part(memory: &Memory, space: &MemorySpace, offset: u64, bytes: u64) -> Result<Self, BackendError> {
        let (address, have) = (memory.address().cast::<u8>(), memory.len());
        let end = offset.checked_add(bytes).filter(|end| *end <= have && space.id == MemoryId::HOST);
        let misfit = || BackendError::Misfit {
            what: format!("{bytes} bytes at {offset}"),
            why: format!("the buffer has {have} bytes, in memory {}", space.id.0),
        };
        end.ok_or_else(misfit)?;
        let (doing, shape) = (|| "view a part of host memory".to_owned(), [bytes as i64]);
        // SAFETY: the range lies within the memory (checked above), which is host memory, so that address arithmetic is valid; the
        // value keeps it alive.
        let ptr = unsafe {
            create(space.info(), address.add(offset as usize).cast(), bytes as usize, &shape, DType::Uint8, doing)
        }?;
        let (dims, lock) = (Dims::from_slice(&[bytes]), space.lock.clone());
        Ok(Value { ptr, memory: Some(memory.clone()), dtype: DType::Uint8, dims, space: space.id, lock })
    }

    /// Takes ownership of a value that ONNX Runtime allocated.
    ///
    /// # Safety
    /// `ptr` must be a value that nothing else releases, in the memory space `space`.
    pub unsafe fn take(ptr: NonNull<OrtValue>, space: MemoryId, lock: DeviceLock) -> Result<Self, BackendError> {
        let mut value = Value { ptr, memory: None, dtype: DType::Uint8, dims: Dims::new(), space, lock };
        let doing = || "ask for the shape of an output".to_owned();
        let mut info = ptr::null_mut();
        // SAFETY: `ptr` is a live value, and `info` has room for one pointer. For values that are not tensors the call returns an error.
        unsafe { check((ort::api().GetTensorTypeAndShape)(ptr.as_ptr(), &mut info), doing) }?;
        let mut kind = ort::sys::ONNXTensorElementDataType::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
        let mut rank = 0;
        let mut sizes = smallvec::SmallVec::<[i64; 6]>::new();
        // SAFETY: `info` was just made and is released once, below; `sizes` has room for `rank` numbers before `GetDimensions` writes them.
        let shape = unsafe {
            let api = ort::api();
            check((api.GetTensorElementType)(info, &mut kind), doing)
                .and_then(|()| check((api.GetDimensionsCount)(info, &mut rank), doing))
                .and_then(|()| {
                    sizes.resize(rank, 0);
                    check((api.GetDimensions)(info, sizes.as_mut_ptr(), rank), doing)
                })
        };
        // SAFETY: made above, not used after.
        unsafe { (ort::api().ReleaseTensorTypeAndShapeInfo)(info) };
        shape?;
        value.dtype = from_ort(kind).ok_or_else(|| BackendError::Runtime {
            doing: doing(),
            cause: format!("element type {kind:?} is unknown to this build"),
        })?;
        value.dims = sizes.iter().map(|size| size.unsigned_abs()).collect();
        Ok(value)
    }

    pub fn as_ptr(&self) -> *mut OrtValue {
        self.ptr.as_ptr()
    }

    /// The memory that must live as long as anything that refers to this value.
    pub fn memory(&self) -> Option<&Memory> {
        self.memory.as_ref()
    }

    /// Address and length of a tensor in host memory, pinned or not; null and 0 for other tensors.
    pub fn host_bytes(&self) -> (*mut u8, usize) {
        let mut data = ptr::null_mut();
        if self.space != MemoryId::HOST || self.dtype == DType::String {
            return (ptr::null_mut(), 0);
        }
        // SAFETY: a live tensor value of numbers.
        let found = unsafe { check((ort::api().GetTensorMutableData)(self.as_ptr(), &mut data), String::new) };
        if found.is_ok() { (data.cast(), self.size() as usize) } else { (ptr::null_mut(), 0) }
    }

    /// Zeroes a tensor in host memory and lets `fill` write it; `None` if it is not in host memory.
    pub fn fill_host<T>(&mut self, fill: impl FnOnce(&mut [u8]) -> T) -> Option<T> {
        let (address, length) = self.host_bytes();
        if address.is_null() {
            return None;
        }
        // SAFETY: `length` bytes are there and live as long as `self`; no run is using them (see `Memory`), and they are initialised
        // before a reference to them exists.
        let bytes = unsafe {
            ptr::write_bytes(address, 0, length);
            std::slice::from_raw_parts_mut(address, length)
        };
        Some(fill(bytes))
    }

    /// The size of the tensor in bytes.
    pub fn size(&self) -> u64 {
        let elements = self.dims.iter().try_fold(1u64, |product, size| product.checked_mul(*size));
        elements.and_then(|elements| self.dtype.bytes_for(elements)).unwrap_or(0)
    }

    /// Copies bytes out of a tensor in host memory, from `offset` on.
    pub fn read_host(&self, offset: u64, bytes: &mut [u8]) -> Result<(), BackendError> {
        if let Some(Memory::Host(host)) = &self.memory {
            return host.read(offset, bytes);
        }
        let end = offset.checked_add(bytes.len() as u64).filter(|end| *end <= self.size());
        if end.is_none() || self.dtype == DType::String {
            let what = format!("{} bytes at {offset}", bytes.len());
            let why = format!("the tensor is {} {:?}", self.dtype, self.dims.as_slice());
            return Err(BackendError::Misfit { what, why });
        }
        let mut data = ptr::null_mut();
        // SAFETY: a live tensor of numbers in host memory (the caller checked `space`), and the range lies in it.
        unsafe {
            check((ort::api().GetTensorMutableData)(self.as_ptr(), &mut data), || "read an output".into())?;
            ptr::copy_nonoverlapping(data.cast::<u8>().add(offset as usize), bytes.as_mut_ptr(), bytes.len());
        }
        Ok(())
    }
}

/// # Safety
/// `info` must describe the memory space of `address`, where `bytes` bytes must outlive the value.
unsafe fn create(
    info: *const OrtMemoryInfo,
    address: *mut std::ffi::c_void,
    bytes: usize,
    shape: &[i64],
    dtype: DType,
    doing: impl FnOnce() -> String,
) -> Result<NonNull<OrtValue>, BackendError> {
    let mut value = ptr::null_mut();
    // SAFETY: the caller's promise; the shape's pointer and length are those of one slice.
    let status = unsafe {
        (ort::api().CreateTensorWithDataAsOrtValue)(
            info,
            address,
            bytes,
            shape.as_ptr(),
            shape.len(),
            to_ort(dtype),
            &mut value,
        )
    };
    // SAFETY: fresh from the call above.
    unsafe { check(status, doing) }?;
    NonNull::new(value).ok_or_else(|| BackendError::Runtime {
        doing: "make a tensor".into(),
        cause: "ONNX Runtime returned nothing".into(),
    })
}

impl Drop for Value {
    fn drop(&mut self) {
        // This frees a device block that ONNX Runtime allocated; a view owns no block.
        let _lock = if self.memory.is_none() { self.lock.acquire() } else { None };
        // SAFETY: this is the only owner; bindings hold references of their own.
        unsafe { (ort::api().ReleaseValue)(self.ptr.as_ptr()) };
    }
}
