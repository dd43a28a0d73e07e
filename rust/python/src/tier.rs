//! Class `Tier`.

use std::path::PathBuf;
use std::sync::Arc;

use blendstore_tiers::{Disk, DiskOptions, Level};
use pyo3::prelude::*;

use crate::coder::Coder;
use crate::error::failed;
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

    #[getter]
    fn name(&self) -> &str {
        self.level.tier.name()
    }

    fn __repr__(&self) -> String {
        format!("Tier({}: {})", self.name(), self.description)
    }
}
