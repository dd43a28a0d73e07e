//! Class `Store`.

use std::time::Duration;

use blendstore_core::{Options, Request, Store as Memory};
use blendstore_tiers::{Options as TierOptions, TieredStore};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyTuple};

use crate::error::{failed, raise, refuse};
use crate::event::Event;
use crate::input::{self, Input, byte, count};
use crate::lease::Lease;
use crate::matches::Match;
use crate::namespace::Namespace;
use crate::reservation::Reservation;
use crate::ticket::Ticket;
use crate::tier::Tier;

/// Chunk store in memory, with tiers below it. Thread safe; reads of memory never take a lock.
#[pyclass(frozen, weakref, module = "blendstore._core")]
pub(crate) struct Store(Option<TieredStore>);

impl Store {
    fn core(&self) -> &TieredStore {
        self.0.as_ref().expect("there until drop")
    }
}

impl Drop for Store {
    /// Ending a tier waits for its threads, which may be waiting for the GIL to log a line.
    fn drop(&mut self) {
        let store = self.0.take();
        if store.as_ref().is_some_and(TieredStore::has_tiers) {
            let mut store = Some(store);
            Python::try_attach(|py| py.detach(|| drop(store.take())));
        }
    }
}

#[pymethods]
impl Store {
    #[new]
    #[pyo3(signature = (
        *, capacity_bytes, chunk_size = 256, policy = "adaptive", tenant_share = 1.0, max_chunks = None, lease_timeout_s = 60.0,
        reserve_wait_s = 0.05, events_capacity = 4096, prefill_tokens_per_s = 10_000.0, tiers = Vec::new(),
    ), text_signature = "(*, capacity_bytes, chunk_size=256, policy='adaptive', tenant_share=1.0, max_chunks=None, lease_timeout_s=60.0, reserve_wait_s=0.05, events_capacity=4096, prefill_tokens_per_s=10000.0, tiers=())")]
    #[expect(clippy::too_many_arguments, reason = "keywords of the Python class")]
    fn new(
        py: Python<'_>,
        capacity_bytes: i64,
        chunk_size: i64,
        policy: &str,
        tenant_share: f64,
        max_chunks: Option<i64>,
        lease_timeout_s: f64,
        reserve_wait_s: f64,
        events_capacity: i64,
        prefill_tokens_per_s: f64,
        tiers: Vec<Py<Tier>>,
    ) -> PyResult<Self> {
        let options = Options {
            capacity_bytes: count("capacity_bytes", capacity_bytes)?,
            chunk_size: count("chunk_size", chunk_size)?,
            policy: policy.parse().map_err(raise)?,
            tenant_share,
            max_chunks: max_chunks
                .map(|chunks| count("max_chunks", chunks))
                .transpose()?,
            lease_timeout: seconds("lease_timeout_s", lease_timeout_s)?,
            reserve_wait: seconds("reserve_wait_s", reserve_wait_s)?,
            events_capacity: count("events_capacity", events_capacity)?,
            prefill_speed: prefill_tokens_per_s,
        };
        let levels = tiers.iter().map(|tier| tier.get().level()).collect();
        let opened = py.detach(|| {
            let memory = Memory::open(options).map_err(raise)?;
            TieredStore::new(memory, levels, &TierOptions::default())
                .map_err(|error| failed(&error))
        });
        Ok(Self(Some(opened?)))
    }

    fn lookup(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<Lease> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        Ok(Lease(py.detach(|| self.core().lookup(keys))))
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
            self.core()
                .lookup_segments(&namespace.0, tokens.as_slice(), &bounds, head)
        });
        lease.map(Lease).map_err(raise)
    }

    fn set_prefill_speed(&self, py: Python<'_>, tokens_per_s: f64) -> PyResult<()> {
        py.detach(|| self.core().set_prefill_speed(tokens_per_s))
            .map_err(raise)
    }

    fn contains<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        let found = py.detach(|| self.core().contains(keys));
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
        let reservation = py.detach(|| {
            self.core()
                .reserve(&namespace.0, tokens.as_slice(), &request)
        });
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
        let found = py.detach(|| {
            self.core()
                .matches(&namespace.0, tokens.as_slice(), min_tokens)
        });
        Ok(found.into_iter().map(Match).collect())
    }

    fn prefetch(
        &self,
        py: Python<'_>,
        namespace: &Namespace,
        keys: &Bound<'_, PyAny>,
    ) -> PyResult<Ticket> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        Ok(Ticket(
            py.detach(|| self.core().prefetch(&namespace.0, keys)),
        ))
    }

    fn tier_of<'py>(
        &self,
        py: Python<'py>,
        keys: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        let places = py.detach(|| self.core().tier_of(keys));
        Ok(PyBytes::new(py, &places))
    }

    fn flush(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let at_most = seconds("timeout_s", timeout_s)?;
        Ok(py.detach(|| self.core().flush(at_most)))
    }

    #[getter]
    fn tiers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.core().tiers())
    }

    fn tier_stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (tiers, loads) = py.detach(|| (self.core().tier_stats(), self.core().load_stats()));
        let all = PyDict::new(py);
        for (name, stats) in tiers {
            let dict = PyDict::new(py);
            for (what, value) in stats.rows() {
                dict.set_item(what, value)?;
            }
            for (kind, count) in stats.errors {
                dict.set_item(format!("error_{kind}"), count)?;
            }
            all.set_item(name, dict)?;
        }
        let dict = PyDict::new(py);
        for (what, value) in loads.rows() {
            dict.set_item(what, value)?;
        }
        all.set_item("loads", dict)?;
        Ok(all)
    }

    fn touch(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<()> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        py.detach(|| self.core().touch(keys));
        Ok(())
    }

    fn pin(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        Ok(py.detach(|| self.core().pin(keys)))
    }

    fn unpin(&self, py: Python<'_>, keys: &Bound<'_, PyAny>) -> PyResult<usize> {
        let keys = Input::new("keys", keys)?;
        let keys = input::keys("keys", keys.as_slice())?;
        Ok(py.detach(|| self.core().unpin(keys)))
    }

    #[pyo3(signature = (namespace = None))]
    fn clear(&self, py: Python<'_>, namespace: Option<&Namespace>) -> usize {
        let namespace = namespace.map(|namespace| &namespace.0);
        py.detach(|| self.core().clear(namespace))
    }

    #[pyo3(signature = (limit = 1024))]
    fn events(&self, py: Python<'_>, limit: i64) -> PyResult<(Vec<Event>, u64)> {
        let limit = count("limit", limit)?;
        let (events, lost) = py.detach(|| self.core().events(limit));
        Ok((events.into_iter().map(Event).collect(), lost))
    }

    #[getter]
    fn arena(&self) -> (usize, usize) {
        let (start, bytes) = self.core().arena();
        (start.expose_provenance(), bytes)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = py.detach(|| self.core().stats());
        let dict = PyDict::new(py);
        for (name, value) in stats.rows() {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.core().close());
    }
}

pub(crate) fn seconds(name: &'static str, value: f64) -> PyResult<Duration> {
    if value == f64::INFINITY {
        return Ok(Duration::MAX);
    }
    Duration::try_from_secs_f64(value)
        .map_err(|_| refuse(name, value, "seconds, a number that is not negative"))
}
