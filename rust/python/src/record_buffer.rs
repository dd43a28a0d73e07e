//! Class `RecordBuffer`: memory of the arena as a Python buffer and as a DLPack tensor, without a copy.
//!
//! The view inside holds a pin; every `memoryview`, array or tensor made from it keeps that view alive, so the memory is
//! not used for anything else below it.

use std::ffi::{CStr, c_int, c_void};
use std::sync::Arc;

use blendstore_core::{View, ViewMut};
use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::dlpack::{self, DataType};

/// Type of a buffer's items.
pub(crate) struct Items {
    format: &'static CStr,
    size: usize,
    data_type: DataType,
}

impl Items {
    /// KV payload.
    pub(crate) const BYTES: Self = Self {
        format: c"B",
        size: 1,
        data_type: DataType::unsigned(8),
    };
    /// Tokens.
    pub(crate) const TOKENS: Self = Self {
        format: c"I",
        size: 4,
        data_type: DataType::unsigned(32),
    };
    /// Per-token scores.
    pub(crate) const SCORES: Self = Self {
        format: c"f",
        size: 4,
        data_type: DataType::float(32),
    };
}

/// Pinned memory.
pub(crate) enum Pinned {
    Read(View),
    Write(ViewMut),
}

impl Pinned {
    fn start(&self) -> *mut u8 {
        match self {
            Self::Read(view) => view.as_ptr().cast_mut(),
            Self::Write(view) => view.as_mut_ptr(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Read(view) => view.len(),
            Self::Write(view) => view.len(),
        }
    }
}

/// Buffer-protocol and DLPack view of arena memory; holds a pin (or the reservation) while any view lives.
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct RecordBuffer {
    pinned: Arc<Pinned>,
    items: &'static Items,
    shape: [ffi::Py_ssize_t; 1],
    strides: [ffi::Py_ssize_t; 1],
}

impl RecordBuffer {
    /// A view of a published record.
    pub(crate) fn read_only(view: View, items: &'static Items) -> Self {
        Self::new(Pinned::Read(view), items)
    }

    /// A view of a payload that is being written.
    pub(crate) fn writable(view: ViewMut) -> Self {
        Self::new(Pinned::Write(view), &Items::BYTES)
    }

    fn new(pinned: Pinned, items: &'static Items) -> Self {
        let count = pinned.len() / items.size;
        Self {
            pinned: Arc::new(pinned),
            items,
            shape: [count as ffi::Py_ssize_t],
            strides: [items.size as ffi::Py_ssize_t],
        }
    }

    fn is_read_only(&self) -> bool {
        matches!(*self.pinned, Pinned::Read(_))
    }
}

#[pymethods]
impl RecordBuffer {
    fn __len__(&self) -> usize {
        self.shape[0] as usize
    }

    /// Fills `view` for the interpreter.
    ///
    /// # Safety
    /// `view` is null or points to a `Py_buffer` to be filled, as the interpreter's buffer protocol has it.
    unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no Py_buffer was given"));
        }
        let this = slf.get();
        let read_only = this.is_read_only();
        if read_only && flags & ffi::PyBUF_WRITABLE == ffi::PyBUF_WRITABLE {
            // SAFETY: not null; a refusal leaves no owner behind.
            unsafe { (*view).obj = std::ptr::null_mut() };
            return Err(PyBufferError::new_err(
                "a published record is read-only: ask for a read-only buffer, or copy it",
            ));
        }
        let asked = |flag: c_int| flags & flag == flag;
        let some = |wanted: bool, field: &[ffi::Py_ssize_t; 1]| {
            if wanted {
                field.as_ptr().cast_mut()
            } else {
                std::ptr::null_mut()
            }
        };
        let format = if asked(ffi::PyBUF_FORMAT) {
            this.items.format.as_ptr().cast_mut()
        } else {
            std::ptr::null_mut()
        };
        let buffer = ffi::Py_buffer {
            buf: this.pinned.start().cast::<c_void>(),
            len: this.pinned.len() as ffi::Py_ssize_t,
            itemsize: this.items.size as ffi::Py_ssize_t,
            readonly: read_only.into(),
            ndim: 1,
            format,
            shape: some(asked(ffi::PyBUF_ND), &this.shape),
            strides: some(asked(ffi::PyBUF_STRIDES), &this.strides),
            suboffsets: std::ptr::null_mut(),
            internal: std::ptr::null_mut(),
            obj: slf.clone().into_ptr(),
        };
        // SAFETY: not null. `obj` owns a reference to this object, which is frozen and holds shape, strides and the pin.
        unsafe { view.write(buffer) };
        Ok(())
    }

    /// A capsule with a tensor of one dimension in CPU memory. A read-only record is marked so for consumers that know
    /// DLPack 1.0; older consumers are trusted not to write.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<i64>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() {
            return Err(PyBufferError::new_err("stream must be None for CPU memory"));
        }
        if dl_device.is_some_and(|device| device != dlpack::CPU) {
            return Err(PyBufferError::new_err(
                "dl_device must be (1, 0): records lie in CPU memory",
            ));
        }
        if copy == Some(true) {
            return Err(PyBufferError::new_err(
                "copy=True is not supported: records are exported without a copy",
            ));
        }
        let tensor = dlpack::Vector {
            data: self.pinned.start().cast(),
            len: self.shape[0] as i64,
            data_type: self.items.data_type,
            read_only: self.is_read_only(),
            owner: self.pinned.clone(),
        };
        tensor.into_capsule(py, max_version.is_some_and(|(major, _)| major >= 1))
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::CPU
    }

    fn __repr__(&self) -> String {
        let access = if self.is_read_only() {
            "read-only"
        } else {
            "writable"
        };
        format!(
            "RecordBuffer({} items of {} bytes, {access})",
            self.shape[0], self.items.size
        )
    }
}
