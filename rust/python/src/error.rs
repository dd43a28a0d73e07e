//! Exceptions: `StoreError` and `LeaseExpired`.

use std::fmt::Display;

use blendstore_blend::Refused;
use blendstore_core::Error;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    blendstore._core,
    StoreError,
    PyException,
    "Base of the errors of this module: wrong use, never a miss."
);
create_exception!(
    blendstore._core,
    LeaseExpired,
    StoreError,
    "The lease was released, or its time-out ran out, before its bytes were read."
);

/// The exception for an error of the core.
pub(crate) fn raise(error: Error) -> PyErr {
    match error {
        Error::LeaseExpired => LeaseExpired::new_err(error.to_string()),
        _ => StoreError::new_err(error.to_string()),
    }
}

/// The exception for an argument with a value that can't be taken.
pub(crate) fn refuse(
    name: &'static str,
    value: impl Display,
    accepted: impl Into<String>,
) -> PyErr {
    raise(Error::Argument {
        name,
        value: value.to_string(),
        accepted: accepted.into(),
    })
}

/// The same for one that blending refuses.
pub(crate) fn refused(refused: Refused) -> PyErr {
    refuse(refused.name, refused.value, refused.accepted)
}

/// The exception for what the operating system refuses.
pub(crate) fn failed(error: &std::io::Error) -> PyErr {
    StoreError::new_err(error.to_string())
}
