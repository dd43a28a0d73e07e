//! Class `Match`.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// A run of prompt tokens that equals rows of one known chunk.
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct Match(pub(crate) blendstore_core::Match);

#[pymethods]
impl Match {
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.key)
    }

    #[getter]
    fn start(&self) -> usize {
        self.0.start
    }

    #[getter]
    fn stop(&self) -> usize {
        self.0.stop
    }

    #[getter]
    fn row(&self) -> usize {
        self.0.row
    }

    fn __repr__(&self) -> String {
        format!(
            "Match(start={}, stop={}, row={})",
            self.0.start, self.0.stop, self.0.row
        )
    }
}
