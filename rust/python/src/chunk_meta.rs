//! Class `ChunkMeta`.

use blendstore_core::Meta;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::namespace::pack;

/// What a record says about itself.
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct ChunkMeta(pub(crate) Meta);

#[pymethods]
impl ChunkMeta {
    #[getter]
    fn key<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.key)
    }

    #[getter]
    fn source_position(&self) -> usize {
        self.0.source_position
    }

    #[getter]
    fn ntokens(&self) -> usize {
        self.0.ntokens
    }

    #[getter]
    fn provenance(&self) -> u8 {
        self.0.provenance
    }

    #[getter]
    fn rank(&self) -> u8 {
        self.0.rank
    }

    #[getter]
    fn context<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.0.context)
    }

    #[getter]
    fn behind<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        pack(py, &self.0.behind)
    }

    #[getter]
    fn behind_tokens(&self) -> usize {
        self.0.behind_tokens
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.nbytes
    }

    #[getter]
    fn segment_offset(&self) -> usize {
        self.0.segment_offset
    }

    fn __repr__(&self) -> String {
        let Meta {
            source_position,
            ntokens,
            provenance,
            rank,
            ..
        } = self.0;
        format!(
            "ChunkMeta(source_position={source_position}, ntokens={ntokens}, provenance={provenance}, rank={rank})"
        )
    }
}
