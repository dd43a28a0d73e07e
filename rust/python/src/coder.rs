//! Class `Coder`.

use std::sync::Arc;

use blendstore_codec::frame::Header;
use blendstore_codec::{Cachegen, Codec, Coder as Core, Element, Lossless, Raw, Tables};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::refuse;
use crate::input::Input;

/// A coding of record payloads (immutable): `Coder.raw()`, `Coder.lossless(…)` or `Coder.cachegen(…)`.
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct Coder {
    pub(crate) inner: Arc<dyn Core>,
    name: &'static str,
    cachegen: Option<Cachegen>,
}

#[pymethods]
impl Coder {
    #[staticmethod]
    fn raw() -> Self {
        Self {
            inner: Arc::new(Raw),
            name: "raw",
            cachegen: None,
        }
    }

    #[staticmethod]
    fn lossless(element: Option<&str>, planes: usize) -> PyResult<Self> {
        let element = match element {
            None => None,
            Some("bfloat16") => Some(Element::Bf16),
            Some("float16") => Some(Element::F16),
            Some("float32") => Some(Element::F32),
            Some(other) => {
                return Err(refuse(
                    "element",
                    other,
                    "bfloat16, float16, float32 or None (bytes)",
                ));
            }
        };
        if !(1..=1 << 16).contains(&planes) {
            return Err(refuse("planes", planes, "1 to 65536"));
        }
        Ok(Self {
            inner: Arc::new(Lossless::new(element, planes)),
            name: "lossless",
            cachegen: None,
        })
    }

    #[staticmethod]
    #[pyo3(signature = (tables, *, threads = 1))]
    fn cachegen(py: Python<'_>, tables: &Bound<'_, PyAny>, threads: usize) -> PyResult<Self> {
        let input = Input::new("tables", tables)?;
        let tables = py
            .detach(|| Tables::parse(input.as_slice()))
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let coder = Cachegen::new(Arc::new(tables), threads);
        Ok(Self {
            inner: Arc::new(coder.clone()),
            name: "cachegen",
            cachegen: Some(coder),
        })
    }

    #[getter]
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    #[getter]
    fn table_id<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.cachegen
            .as_ref()
            .map(|coder| PyBytes::new(py, &coder.tables().id()))
    }

    #[pyo3(signature = (payload, *, source_position = 0))]
    fn symbol_counts(
        &self,
        py: Python<'_>,
        payload: &Bound<'_, PyAny>,
        source_position: u32,
    ) -> PyResult<Vec<Vec<u64>>> {
        let payload = Input::<u8>::new("payload", payload)?;
        let coder = self
            .cachegen
            .as_ref()
            .ok_or_else(|| refuse("coder", self.name, "cachegen"))?;
        let bytes = payload.as_slice();
        let counts = py
            .detach(|| coder.symbol_counts(source_position, bytes))
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(counts.chunks(256).map(<[u64]>::to_vec).collect())
    }

    #[pyo3(signature = (payload, ntokens, *, source_position = 0, format = 0))]
    fn encode<'py>(
        &self,
        py: Python<'py>,
        payload: &Bound<'py, PyAny>,
        ntokens: u32,
        source_position: u32,
        format: u16,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let payload = Input::<u8>::new("payload", payload)?;
        let bytes = payload.as_slice();
        let header = header(bytes.len(), ntokens, source_position, format)?;
        let mut coded = vec![];
        py.detach(|| self.inner.encode(&header, &[], bytes, &mut coded))
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(PyBytes::new(py, &coded))
    }

    #[pyo3(signature = (coded, nbytes, ntokens, *, source_position = 0, format = 0))]
    fn decode<'py>(
        &self,
        py: Python<'py>,
        coded: &Bound<'py, PyAny>,
        nbytes: usize,
        ntokens: u32,
        source_position: u32,
        format: u16,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let coded = Input::<u8>::new("coded", coded)?;
        let header = header(nbytes, ntokens, source_position, format)?;
        PyBytes::new_with(py, nbytes, |payload| {
            let bytes = coded.as_slice();
            py.detach(|| self.inner.decode(&header, &[], bytes, payload))
                .map_err(|error| PyValueError::new_err(error.to_string()))
        })
    }

    #[staticmethod]
    fn error_bound(coded: &Bound<'_, PyAny>) -> PyResult<(f32, f32)> {
        let coded = Input::<u8>::new("coded", coded)?;
        let bound = Cachegen::bound(coded.as_slice())
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok((bound.keys, bound.values))
    }

    fn __repr__(&self) -> String {
        format!("<Coder {}>", self.name)
    }
}

/// What a coder reads of a header; the rest is of no importance to it.
fn header(nbytes: usize, ntokens: u32, source_position: u32, format: u16) -> PyResult<Header> {
    let each = nbytes
        .checked_div(ntokens as usize)
        .filter(|each| *each > 0 && each * ntokens as usize == nbytes);
    let bytes_per_token = each.and_then(|each| u32::try_from(each).ok());
    let accepted = "a number of tokens that divides the payload's bytes";
    Ok(Header {
        key: [0; 32],
        parent: [0; 32],
        namespace: [0; 32],
        context: [0; 32],
        ntokens,
        bytes_per_token: bytes_per_token.ok_or_else(|| refuse("ntokens", ntokens, accepted))?,
        source_position,
        segment_offset: 0,
        behind_tokens: 0,
        format,
        codec: Codec::RAW,
        provenance: 0,
        rank: 0,
    })
}
