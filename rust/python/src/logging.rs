//! Lines that the Rust side logs, on their way to Python's `logging`, as `blendstore.tiers`.

use log::{Level, LevelFilter, Log, Metadata, Record};
use pyo3::prelude::*;

struct ToPython;

static TO_PYTHON: ToPython = ToPython;

impl Log for ToPython {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn && metadata.target().starts_with("blendstore")
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let line = record.args().to_string();
        // While the interpreter ends there is nobody to tell, and a logger that raises is no business of a tier.
        let _ = Python::try_attach(|py| -> PyResult<()> {
            let logger = py
                .import("logging")?
                .call_method1("getLogger", ("blendstore.tiers",))?;
            logger.call_method1("warning", ("%s", line))?;
            Ok(())
        });
    }

    fn flush(&self) {}
}

/// Once a process; later calls change nothing.
pub(crate) fn install() {
    if log::set_logger(&TO_PYTHON).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}
