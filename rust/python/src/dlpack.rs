//! DLPack export of one-dimensional CPU memory, in both layouts of the exchange: before 1.0 and from 1.0 on.
//!
//! The structs are those of `dlpack.h`. A capsule owns the tensor until a consumer renames it and calls the deleter.

use std::ffi::{CStr, c_void};

use pyo3::ffi;
use pyo3::prelude::*;

/// Device of host memory: (kDLCPU, 0).
pub(crate) const CPU: (i32, i32) = (1, 0);

const READ_ONLY: u64 = 1;

/// Item type of a tensor.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

impl DataType {
    pub(crate) const fn unsigned(bits: u8) -> Self {
        Self {
            code: 1,
            bits,
            lanes: 1,
        }
    }

    pub(crate) const fn float(bits: u8) -> Self {
        Self {
            code: 2,
            bits,
            lanes: 1,
        }
    }
}

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: (i32, i32),
    ndim: i32,
    data_type: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct ManagedVersioned {
    version: [u32; 2],
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: Tensor,
}

/// The two layouts.
trait Layout: Sized {
    const NAME: &'static CStr;
    fn new(tensor: Tensor, read_only: bool, deleter: unsafe extern "C" fn(*mut Self)) -> Self;
    fn tensor(&mut self) -> &mut Tensor;
}

impl Layout for Managed {
    const NAME: &'static CStr = c"dltensor";

    fn new(tensor: Tensor, _read_only: bool, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        Self {
            tensor,
            context: std::ptr::null_mut(),
            deleter: Some(deleter),
        }
    }

    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

impl Layout for ManagedVersioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn new(tensor: Tensor, read_only: bool, deleter: unsafe extern "C" fn(*mut Self)) -> Self {
        let flags = if read_only { READ_ONLY } else { 0 };
        Self {
            version: [1, 0],
            context: std::ptr::null_mut(),
            deleter: Some(deleter),
            flags,
            tensor,
        }
    }

    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

/// A tensor with what its pointers lead to. The managed struct comes first, so a pointer to it is a pointer to this.
#[repr(C)]
struct Export<L, O> {
    managed: L,
    shape: [i64; 1],
    strides: [i64; 1],
    _owner: O,
}

/// Memory to export.
pub(crate) struct Vector<O> {
    pub(crate) data: *mut c_void,
    pub(crate) len: i64,
    pub(crate) data_type: DataType,
    pub(crate) read_only: bool,
    /// Keeps the memory; may be dropped on any thread, with or without the GIL.
    pub(crate) owner: O,
}

impl<O: Send + Sync + 'static> Vector<O> {
    /// The capsule, `versioned` for consumers of DLPack 1.0 and later.
    pub(crate) fn into_capsule(
        self,
        py: Python<'_>,
        versioned: bool,
    ) -> PyResult<Bound<'_, PyAny>> {
        if versioned {
            self.export::<ManagedVersioned>(py)
        } else {
            self.export::<Managed>(py)
        }
    }

    fn export<L: Layout>(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        let tensor = Tensor {
            data: self.data,
            device: CPU,
            ndim: 1,
            data_type: self.data_type,
            shape: std::ptr::null_mut(),
            strides: std::ptr::null_mut(),
            byte_offset: 0,
        };
        let export = Box::into_raw(Box::new(Export {
            managed: L::new(tensor, self.read_only, delete::<L, O>),
            shape: [self.len],
            strides: [1],
            _owner: self.owner,
        }));
        // SAFETY: just made, and nobody else has it. The capsule's destructor gets the name and pointer it is made with;
        // when no capsule comes to be, the export is taken back.
        unsafe {
            let tensor = (*export).managed.tensor();
            tensor.shape = (&raw mut (*export).shape).cast();
            tensor.strides = (&raw mut (*export).strides).cast();
            let capsule =
                ffi::PyCapsule_New(export.cast(), L::NAME.as_ptr(), Some(discard::<L, O>));
            Bound::from_owned_ptr_or_err(py, capsule).inspect_err(|_| drop(Box::from_raw(export)))
        }
    }
}

/// Deleter that the consumer calls.
unsafe extern "C" fn delete<L, O>(managed: *mut L) {
    // SAFETY: `managed` is the first field of the boxed export that it was made in, and is deleted once.
    drop(unsafe { Box::from_raw(managed.cast::<Export<L, O>>()) });
}

/// Destructor of the capsule: deletes a tensor that nobody has consumed (a consumer renames the capsule).
unsafe extern "C" fn discard<L: Layout, O>(capsule: *mut ffi::PyObject) {
    // SAFETY: called by the interpreter with the capsule; the name tells that the pointer is still ours.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, L::NAME.as_ptr()) == 1 {
            delete::<L, O>(ffi::PyCapsule_GetPointer(capsule, L::NAME.as_ptr()).cast());
        }
    }
}
