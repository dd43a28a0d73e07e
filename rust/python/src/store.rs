//! Class `Store`.

use std::time::Duration;

use blendstore_core::{Options, Request, Store as Core};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::{raise, refuse};
use crate::event::Event;
use crate::input::{self, Input, byte, count};
use crate::lease::Lease;
use crate::matches::Match;
use crate::namespace::Namespace;
use crate::reservation::Reservation;

/// Chunk store in memory. Thread safe; reads never take a lock.
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct Store(Core);

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (
        *, capacity_bytes, chunk_size = 256, policy = "s3-fifo", max_chunks = None, lease_timeout_s = 60.0,
        reserve_wait_s = 0.05, events_capacity = 4096,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of the Python class")]
    fn new(
        py: Python<'_>,
        capacity_bytes: i64,
        chunk_size: i64,
        policy: &str,
        max_chunks: Option<i64>,
        lease_timeout_s: f64,
        reserve_wait_s: f64,
        events_capacity: i64,
    ) -> PyResult<Self> {
        let options = Options {
            capacity_bytes: count("capacity_bytes", capacity_bytes)?,
            chunk_size: count("chunk_size", chunk_size)?,
            policy: policy.parse().map_err(raise)?,
            max_chunks: max_chunks
                .map(|chunks| count("max_chunks", chunks))
                .transpose()?,
            lease_timeout: seconds("lease_timeout_s", lease_timeout_s)?,
            reserve_wait: seconds("reserve_wait_s", reserve_wait_s)?,
            events_capacity: count("events_capacity", events_capacity)?,
        };
        py.detach(|| Core::open(options)).map(Self).map_err(raise)
    }

    fn lookup(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Lease> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        Ok(Lease(py.detach(|| self.0.lookup(keys))))
    }

    #[pyo3(signature = (namespace, tokens, bounds, *, head = false))]
    fn lookup_segments(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        tokens: &Bound<'_, PyAny>,
        bounds: &Bound<'_, PyAny>,
        head: bool,
    ) -> PyResult<Lease> {
        let tokens = Input::new("tokens", tokens)?;
        let bounds = input::bounds(bounds)?;
        let lease = py.detach(|| {
            self.0
                .lookup_segments(&namespace.0, tokens.as_slice(), &bounds, head)
        });
        lease.map(Lease).map_err(raise)
    }

    fn contains<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        let found = py.detach(|| self.0.contains(keys));
        Ok(PyBytes::new(py, &found))
    }

    #[pyo3(
        signature = (
            namespace, tokens, *, bytes_per_token, source_position, provenance, rank, contexts = None,
            behind = &[] as &[u8], behind_tokens = 0, head = false, parent = None, parent_offset = 0,
            with_scores = false, save_unfull_chunk = true,
        ),
        text_signature = "($self, namespace, tokens, *, bytes_per_token, source_position, provenance, rank, contexts=None, \
            behind=b'', behind_tokens=0, head=False, parent=None, parent_offset=0, with_scores=False, \
            save_unfull_chunk=True)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords of the Python method")]
    fn reserve(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        tokens: &Bound<'_, PyAny>,
        bytes_per_token: i64,
        source_position: i64,
        provenance: i64,
        rank: i64,
        contexts: Option<&[u8]>,
        behind: &[u8],
        behind_tokens: i64,
        head: bool,
        parent: Option<&[u8]>,
        parent_offset: i64,
        with_scores: bool,
        save_unfull_chunk: bool,
    ) -> PyResult<Reservation> {
        let tokens = Input::new("tokens", tokens)?;
        let request = Request {
            bytes_per_token: count("bytes_per_token", bytes_per_token)?,
            source_position: count("source_position", source_position)?,
            provenance: byte("provenance", provenance)?,
            rank: byte("rank", rank)?,
            contexts: contexts
                .map(|contexts| input::keys("contexts", contexts))
                .transpose()?,
            behind: input::keys("behind", behind)?,
            behind_tokens: count("behind_tokens", behind_tokens)?,
            head,
            parent: parent
                .map(|parent| input::key("parent", parent))
                .transpose()?,
            parent_offset: count("parent_offset", parent_offset)?,
            with_scores,
            save_unfull_chunk,
        };
        let reservation = py.detach(|| self.0.reserve(&namespace.0, tokens.as_slice(), &request));
        reservation.map(Reservation).map_err(raise)
    }

    #[pyo3(name = "match", signature = (namespace, tokens, *, min_tokens = 32))]
    fn matches(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        tokens: &Bound<'_, PyAny>,
        min_tokens: i64,
    ) -> PyResult<Vec<Match>> {
        let tokens = Input::new("tokens", tokens)?;
        let min_tokens = count("min_tokens", min_tokens)?;
        let found = py.detach(|| self.0.matches(&namespace.0, tokens.as_slice(), min_tokens));
        Ok(found.into_iter().map(Match).collect())
    }

    fn touch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        py.detach(|| self.0.touch(keys));
        Ok(())
    }

    fn pin(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        Ok(py.detach(|| self.0.pin(keys)))
    }

    fn unpin(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        Ok(py.detach(|| self.0.unpin(keys)))
    }

    #[pyo3(signature = (namespace = None))]
    fn clear(&self, py: Python<'_>, namespace: Option<&Namespace>) -> usize {
        let namespace = namespace.map(|namespace| &namespace.0);
        py.detach(|| self.0.clear(namespace))
    }

    #[pyo3(signature = (limit = 1024))]
    fn events(&self, py: Python<'_>, limit: i64) -> PyResult<(Vec<Event>, u64)> {
        let limit = count("limit", limit)?;
        let (events, lost) = py.detach(|| self.0.events(limit));
        Ok((events.into_iter().map(Event).collect(), lost))
    }

    #[getter]
    fn arena(&self) -> (usize, usize) {
        let (start, bytes) = self.0.arena();
        (start.expose_provenance(), bytes)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.0.stats());
        let dict = PyDict::new(py);
        for (name, value) in stats.rows() {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.0.close());
    }
}

fn seconds(name: &'static str, value: f64) -> PyResult<Duration> {
    if value == f64::INFINITY {
        return Ok(Duration::MAX);
    }
    Duration::try_from_secs_f64(value)
        .map_err(|_| refuse(name, value, "seconds, a number that is not negative"))
}
