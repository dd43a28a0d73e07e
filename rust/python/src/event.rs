//! Class `Event`.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// Something that happened to a chunk.
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct Event(pub(crate) blendstore_core::Event);

#[pymethods]
impl Event {
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind.as_str()
    }

    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.key)
    }

    #[getter]
    fn sequence(&self) -> u64 {
        self.0.sequence
    }

    fn __repr__(&self) -> String {
        format!(
            "Event(kind='{}', sequence={})",
            self.kind(),
            self.0.sequence
        )
    }
}
