//! Class `Reservation`.

use blendstore_core::Reservation as Core;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::error::raise;
use crate::input::{Input, count};
use crate::namespace::pack;
use crate::record_buffer::RecordBuffer;

/// Room for the chunks of one segment. Aborted on drop; each chunk is published whole or not at all.
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct Reservation(pub(crate) Core);

#[pymethods]
impl Reservation {
    fn __len__(&self) -> usize {
        self.0.len()
    }

    #[getter]
    fn keys<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        pack(py, self.0.keys())
    }

    #[getter]
    fn wanted<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.wanted())
    }

    fn bounds(&self, index: i64) -> PyResult<(usize, usize)> {
        let bounds = self.0.bounds(count("index", index)?).map_err(raise)?;
        Ok((bounds.start, bounds.end))
    }

    fn buffer(&self, index: i64) -> PyResult<RecordBuffer> {
        let view = self.0.payload(count("index", index)?).map_err(raise)?;
        Ok(RecordBuffer::writable(view))
    }

    fn set_scores(&self, py: Python<'_>, index: i64, scores: &Bound<'_, PyAny>) -> PyResult<()> {
        let index = count("index", index)?;
        let scores = Input::new("scores", scores)?;
        py.detach(|| self.0.set_scores(index, scores.as_slice()))
            .map_err(raise)
    }

    #[pyo3(signature = (mask = None))]
    fn commit(&self, py: Python<'_>, mask: Option<&[u8]>) -> PyResult<usize> {
        py.detach(|| self.0.commit(mask)).map_err(raise)
    }

    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.0.abort());
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exc))]
    fn __exit__(&self, py: Python<'_>, _exc: &Bound<'_, PyTuple>) {
        self.abort(py);
    }

    fn __repr__(&self) -> String {
        let wanted = self
            .0
            .wanted()
            .iter()
            .filter(|&&wanted| wanted != 0)
            .count();
        format!("Reservation(chunks={}, wanted={wanted})", self.0.len())
    }
}
