//! Class `Trace`: what a policy would have saved on it.

use blendstore_core::eviction::{Cost, PolicyKind};
use blendstore_core::simulator::{self, Lower, Outcome};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::{raise, refuse};
use crate::input::{Input, count};

/// Requests and the chunks that they ask for (immutable).
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct Trace(simulator::Trace);

#[pymethods]
impl Trace {
    #[new]
    #[pyo3(signature = (*, times, starts, blocks, positions, parents, tokens))]
    fn new(
        times: &Bound<'_, PyAny>,
        starts: &Bound<'_, PyAny>,
        blocks: &Bound<'_, PyAny>,
        positions: &Bound<'_, PyAny>,
        parents: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let counts = |name, object| -> PyResult<Vec<usize>> {
            let values = Input::<i64>::new(name, object)?;
            values
                .as_slice()
                .iter()
                .map(|&value| count(name, value))
                .collect()
        };
        let words =
            |name, object| Input::<u32>::new(name, object).map(|input| input.as_slice().to_vec());
        let trace = simulator::Trace {
            times: counts("times", times)?
                .into_iter()
                .map(|time| time as u64)
                .collect(),
            starts: counts("starts", starts)?,
            blocks: words("blocks", blocks)?,
            positions: words("positions", positions)?,
            parents: words("parents", parents)?,
            tokens: words("tokens", tokens)?,
        };
        trace.check().map_err(raise)?;
        Ok(Self(trace))
    }

    #[pyo3(signature = (
        policy, capacity_tokens, *, attention_tokens = 30_000.0, lower_share = 0.0, lower_load = 0.0, lower_told = true,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keywords of the Python method")]
    fn simulate<'py>(
        &self,
        py: Python<'py>,
        policy: &str,
        capacity_tokens: i64,
        attention_tokens: f64,
        lower_share: f64,
        lower_load: f64,
        lower_told: bool,
    ) -> PyResult<Bound<'py, PyDict>> {
        let capacity = count("capacity_tokens", capacity_tokens)? as u64;
        if attention_tokens.is_nan() || attention_tokens <= 0.0 {
            return Err(refuse(
                "attention_tokens",
                attention_tokens,
                "a number above 0",
            ));
        }
        if !(0.0..=1.0).contains(&lower_share) {
            return Err(refuse("lower_share", lower_share, "a share from 0 to 1"));
        }
        if lower_load.is_nan() || lower_load < 0.0 {
            return Err(refuse("lower_load", lower_load, "a number of at least 0"));
        }
        let cost = Cost { attention_tokens };
        let lower = Lower {
            share: lower_share,
            load: lower_load,
            told: lower_told,
        };
        let outcome = if policy.eq_ignore_ascii_case("optimal") {
            py.detach(|| simulator::clairvoyant(&self.0, capacity, &cost))
        } else {
            let kind: PolicyKind = policy.parse().map_err(raise)?;
            py.detach(|| simulator::simulate_above(&self.0, kind, capacity, &cost, &lower))
        };
        rows(py, &outcome)
    }
}

fn rows<'py>(py: Python<'py>, outcome: &Outcome) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("accesses", outcome.accesses)?;
    dict.set_item("hits", outcome.hits)?;
    dict.set_item("loads", outcome.loads)?;
    dict.set_item("tokens", outcome.tokens)?;
    dict.set_item("hit_tokens", outcome.hit_tokens)?;
    dict.set_item("cost", outcome.cost)?;
    dict.set_item("saved", outcome.saved)?;
    dict.set_item("evicted", outcome.evicted)?;
    dict.set_item("rejected", outcome.rejected)?;
    Ok(dict)
}
