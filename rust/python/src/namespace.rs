//! Class `Namespace`.

use blendstore_core::key::{HEAD_ROOT, SEGMENT_ROOT};
use blendstore_core::{Key, Namespace as Core};
use pyo3::prelude::*;
use pyo3::pybacked::{PyBackedBytes, PyBackedStr};
use pyo3::types::PyBytes;

use crate::error::{raise, refuse};
use crate::input::{self, Input};

/// Identity of interchangeable KV bytes: length-framed fields keyed by the tenant salt (immutable, hashable).
#[pyclass(frozen, eq, hash, module = "blendstore._core")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Namespace(pub(crate) Core);

#[pymethods]
impl Namespace {
    #[new]
    #[pyo3(signature = (fields, *, salt = &[] as &[u8]), text_signature = "(fields, *, salt=b'')")]
    fn new(fields: Vec<(PyBackedStr, PyBackedBytes)>, salt: &[u8]) -> Self {
        Self(Core::new(&fields, salt))
    }

    #[getter]
    fn digest<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.digest())
    }

    fn content_id<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let tokens = Input::new("tokens", tokens)?;
        let id = py.detach(|| self.0.content_id(tokens.as_slice()));
        Ok(PyBytes::new(py, &id))
    }

    #[pyo3(signature = (tokens, *, chunk_size = 256, head = false, parent = None))]
    fn chain_keys<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        chunk_size: i64,
        head: bool,
        parent: Option<&[u8]>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let tokens = Input::new("tokens", tokens)?;
        let chunk_size = chunk_tokens(chunk_size)?;
        let parent = match parent {
            Some(_) if head => {
                return Err(refuse(
                    "head",
                    "True",
                    "False with a parent: a chain has one root",
                ));
            }
            Some(parent) => input::key("parent", parent)?,
            None if head => HEAD_ROOT,
            None => SEGMENT_ROOT,
        };
        let keys = py.detach(|| self.0.chain_keys(tokens.as_slice(), chunk_size, &parent));
        Ok(pack(py, &keys))
    }

    #[pyo3(signature = (tokens, bounds, *, chunk_size = 256, head = false))]
    fn segment_keys<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        bounds: &Bound<'py, PyAny>,
        chunk_size: i64,
        head: bool,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let tokens = Input::new("tokens", tokens)?;
        let bounds = input::bounds(bounds)?;
        let chunk_size = chunk_tokens(chunk_size)?;
        let keys = py.detach(|| {
            self.0
                .segment_keys(tokens.as_slice(), &bounds, chunk_size, head)
        });
        Ok(pack(py, &keys.map_err(raise)?))
    }

    fn context_digests<'py>(
        &self,
        py: Python<'py>,
        tokens: &Bound<'py, PyAny>,
        positions: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let tokens = Input::new("tokens", tokens)?;
        let positions = input::positions(positions)?;
        let digests = py.detach(|| self.0.context_digests(tokens.as_slice(), &positions));
        Ok(pack(py, &digests.map_err(raise)?))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

fn chunk_tokens(chunk_size: i64) -> PyResult<usize> {
    match usize::try_from(chunk_size) {
        Ok(tokens) if tokens > 0 => Ok(tokens),
        _ => Err(refuse("chunk_size", chunk_size, "at least one token")),
    }
}

/// Keys as packed bytes.
pub(crate) fn pack<'py>(py: Python<'py>, keys: &[Key]) -> Bound<'py, PyBytes> {
    PyBytes::new(py, keys.as_flattened())
}
