//! Class `Lease`.

use blendstore_core::Lease as Core;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::chunk_meta::ChunkMeta;
use crate::error::raise;
use crate::input::{Output, count};
use crate::record_buffer::{Items, RecordBuffer};

/// Pins on the chunks of one lookup. Released on `release()`, `with` exit, drop or time-out.
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct Lease(pub(crate) Core);

#[pymethods]
impl Lease {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    #[getter]
    fn hits<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.hits())
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.nbytes()
    }

    fn meta(&self, index: i64) -> PyResult<Option<ChunkMeta>> {
        Ok(self
            .0
            .meta(count("index", index)?)
            .map_err(raise)?
            .map(ChunkMeta))
    }

    fn buffer(&self, index: i64) -> PyResult<RecordBuffer> {
        let view = self.0.payload(count("index", index)?).map_err(raise)?;
        Ok(RecordBuffer::read_only(view, &Items::BYTES))
    }

    fn tokens(&self, index: i64) -> PyResult<RecordBuffer> {
        let view = self.0.tokens(count("index", index)?).map_err(raise)?;
        Ok(RecordBuffer::read_only(view, &Items::TOKENS))
    }

    fn scores(&self, index: i64) -> PyResult<Option<RecordBuffer>> {
        let view = self.0.scores(count("index", index)?).map_err(raise)?;
        Ok(view.map(|view| RecordBuffer::read_only(view, &Items::SCORES)))
    }

    fn read_into(
        &self,
        py: Python<'_>,
        index: i64,
        destination: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let index = count("index", index)?;
        let mut destination = Output::new("destination", destination)?;
        py.detach(|| self.0.read_into(index, destination.as_mut_slice()))
            .map_err(raise)
    }

    fn release(&self, py: Python<'_>) {
        py.detach(|| self.0.release());
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exc))]
    fn __exit__(&self, py: Python<'_>, _exc: &Bound<'_, PyTuple>) {
        self.release(py);
    }

    fn __repr__(&self) -> String {
        let hits = self.0.hits().iter().filter(|&&hit| hit != 0).count();
        format!(
            "Lease(keys={}, hits={hits}, nbytes={})",
            self.0.len(),
            self.0.nbytes()
        )
    }
}
