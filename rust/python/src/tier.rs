//! Class `Tier`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use blendstore_tiers::{Disk, DiskOptions, Level, remote};
use pyo3::prelude::*;

use crate::coder::Coder;
use crate::error::{StoreError, failed};
use crate::input::count;

/// A place for records below memory, to be given to a `Store`.
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct Tier {
    level: Level,
    description: String,
}

impl Tier {
    pub(crate) fn level(&self) -> Level {
        self.level.clone()
    }
}

#[pymethods]
impl Tier {
    #[staticmethod]
    #[pyo3(signature = (directories, *, capacity_bytes, direct = true, io_uring = true))]
    fn disk(
        py: Python<'_>,
        directories: Vec<PathBuf>,
        capacity_bytes: i64,
        direct: bool,
        io_uring: bool,
    ) -> PyResult<Self> {
        let options = DiskOptions {
            directories,
            capacity_bytes: count("capacity_bytes", capacity_bytes)? as u64,
            direct,
            io_uring,
            segment_bytes: None,
        };
        let disk = py
            .detach(|| Disk::open(&options))
            .map_err(|error| failed(&error))?;
        let description = disk.describe();
        Ok(Self {
            level: Level::raw(Arc::new(disk)),
            description,
        })
    }

    fn with_coder(&self, coder: &Coder) -> Self {
        Self {
            level: Level {
                coder: coder.inner.clone(),
                ..self.level.clone()
            },
            description: format!("{}, {}", self.description, coder.name()),
        }
    }

    #[staticmethod]
    #[pyo3(signature = (url, *, timeout_ms = 1000))]
    fn remote(py: Python<'_>, url: &str, timeout_ms: i64) -> PyResult<Self> {
        let timeout = Duration::from_millis(count("timeout_ms", timeout_ms)? as u64);
        let tier = py
            .detach(|| remote::open(url, timeout))
            .map_err(StoreError::new_err)?;
        Ok(Self {
            level: Level::raw(tier),
            description: remote::redacted(url),
        })
    }

    #[getter]
    fn name(&self) -> &str {
        self.level.tier.name()
    }

    fn __repr__(&self) -> String {
        format!("Tier({}: {})", self.name(), self.description)
    }
}

/// Why a text is no `remote_url`, without its secrets; `None` when it is one.
#[pyfunction]
pub(crate) fn remote_url_fault(url: &str) -> Option<String> {
    remote::RemoteUrl::parse(url).err().map(|error| error.0)
}

/// A `remote_url`, or what was meant as one, without its secrets.
#[pyfunction]
pub(crate) fn redacted_url(url: &str) -> String {
    remote::redacted(url)
}
