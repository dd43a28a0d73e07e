//! `blendstore._core`: thin conversions between Python and `blendstore-core`, one file per exported class.
//!
//! `python/blendstore/_core.pyi` is the documentation and the contract; this crate adds no behaviour of its own.

mod attention;
mod chunk_meta;
mod coder;
mod dlpack;
mod error;
mod event;
mod input;
mod lease;
mod logging;
mod matches;
mod namespace;
mod record_buffer;
mod reservation;
mod rows;
mod store;
mod ticket;
mod tier;
mod trace;

use pyo3::prelude::*;

/// Rust core of blendstore: namespaces, the chunk store, leases, reservations and the matcher.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("StoreError", module.py().get_type::<error::StoreError>())?;
    module.add(
        "LeaseExpired",
        module.py().get_type::<error::LeaseExpired>(),
    )?;
    module.add_class::<namespace::Namespace>()?;
    module.add_class::<chunk_meta::ChunkMeta>()?;
    module.add_class::<lease::Lease>()?;
    module.add_class::<record_buffer::RecordBuffer>()?;
    module.add_class::<reservation::Reservation>()?;
    module.add_class::<matches::Match>()?;
    module.add_class::<event::Event>()?;
    module.add_class::<coder::Coder>()?;
    module.add_function(wrap_pyfunction!(attention::attend, module)?)?;
    module.add_function(wrap_pyfunction!(rows::place_rows, module)?)?;
    module.add_class::<tier::Tier>()?;
    module.add_function(wrap_pyfunction!(tier::remote_url_fault, module)?)?;
    module.add_function(wrap_pyfunction!(tier::redacted_url, module)?)?;
    module.add_class::<ticket::Ticket>()?;
    logging::install();
    blendstore_blend::settle();
    module.add_class::<store::Store>()?;
    module.add_class::<trace::Trace>()
}
