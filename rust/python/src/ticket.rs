//! Class `Ticket`.

use blendstore_tiers::Ticket as Core;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};

use crate::error::failed;
use crate::store::seconds;

/// Chunks on their way from lower tiers into memory.
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct Ticket(pub(crate) Core);

#[pymethods]
impl Ticket {
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let at_most = seconds("timeout_s", timeout_s)?;
        Ok(py.detach(|| self.0.wait(at_most)))
    }

    fn poll(&self) -> bool {
        self.0.poll()
    }

    fn fileno(&self) -> PyResult<i32> {
        self.0.fd().map_err(|error| failed(&error))
    }

    #[getter]
    fn outcomes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let outcomes: Vec<u8> = self
            .0
            .outcomes()
            .iter()
            .map(|&outcome| outcome as u8)
            .collect();
        PyBytes::new(py, &outcomes)
    }

    fn cancel(&self) {
        self.0.cancel();
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_exc))]
    fn __exit__(&self, _exc: &Bound<'_, PyTuple>) {
        self.cancel();
    }

    fn __repr__(&self) -> String {
        let outcomes = self.0.outcomes();
        let pending = outcomes
            .iter()
            .filter(|&&outcome| outcome as u8 == 0)
            .count();
        format!("Ticket(keys={}, pending={pending})", outcomes.len())
    }
}
