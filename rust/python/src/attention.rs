//! Function `attend`.

use blendstore_blend::attention::Attention;
use pyo3::prelude::*;

use crate::error::refused;
use crate::input::{InPlace, Input, apart, heads_and_dim, same_heads};

#[pyfunction]
#[pyo3(signature = (q, k, v, positions, out, *, scale, window = None, hidden = None, threads = 1))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn attend(
    py: Python<'_>,
    q: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    positions: &Bound<'_, PyAny>,
    out: &Bound<'_, PyAny>,
    scale: f32,
    window: Option<usize>,
    hidden: Option<&Bound<'_, PyAny>>,
    threads: usize,
) -> PyResult<()> {
    let (q, k, v) = (
        Input::new("q", q)?,
        Input::new("k", k)?,
        Input::new("v", v)?,
    );
    let positions = Input::new("positions", positions)?;
    let hidden = Input::optional("hidden", hidden)?;
    let mut out = InPlace::new("out", out)?;

    let [heads, dim] = heads_and_dim("q", &q)?;
    let [kv_heads, _] = heads_and_dim("k", &k)?;
    for (name, input, heads) in [
        ("k", &k, kv_heads),
        ("v", &v, kv_heads),
        ("out", &out.0, heads),
    ] {
        same_heads(name, input, [heads, dim], "q and k are")?;
    }
    for (name, input) in [("q", &q), ("k", &k), ("v", &v)] {
        apart(name, input, &[&out.0])?;
    }
    apart("positions", &positions, &[&out.0])?;
    if let Some(hidden) = &hidden {
        apart("hidden", hidden, &[&out.0])?;
    }
    let attention = Attention {
        heads,
        kv_heads,
        dim,
        scale,
        window,
        q: q.as_slice(),
        k: k.as_slice(),
        v: v.as_slice(),
        positions: positions.as_slice(),
        hidden: hidden.as_ref().map(Input::as_slice),
    };
    let out = out.as_mut_slice();
    py.detach(|| attention.attend(out, threads))
        .map_err(refused)
}
