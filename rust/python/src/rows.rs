//! Function `place_rows`.

use blendstore_blend::rows::Rows;
use pyo3::prelude::*;

use crate::error::refused;
use crate::input::{InPlace, Input, apart, heads_and_dim, rotation, same_heads};

#[pyfunction]
#[pyo3(signature = (to_k, to_v, k, v, cos = None, sin = None, *, interleaved = false, threads = 1))]
#[allow(clippy::too_many_arguments)]
pub(crate) fn place_rows(
    py: Python<'_>,
    to_k: &Bound<'_, PyAny>,
    to_v: &Bound<'_, PyAny>,
    k: &Bound<'_, PyAny>,
    v: &Bound<'_, PyAny>,
    cos: Option<&Bound<'_, PyAny>>,
    sin: Option<&Bound<'_, PyAny>>,
    interleaved: bool,
    threads: usize,
) -> PyResult<()> {
    let (mut to_k, mut to_v) = (InPlace::new("to_k", to_k)?, InPlace::new("to_v", to_v)?);
    let (k, v) = (Input::new("k", k)?, Input::new("v", v)?);
    let (cos, sin) = (Input::optional("cos", cos)?, Input::optional("sin", sin)?);

    let [heads, dim] = heads_and_dim("k", &k)?;
    for (name, other) in [("v", &v), ("to_k", &to_k.0), ("to_v", &to_v.0)] {
        same_heads(name, other, [heads, dim], "k")?;
    }
    apart("to_v", &to_v.0, &[&to_k.0])?;
    for (name, other) in [
        ("k", Some(&k)),
        ("v", Some(&v)),
        ("cos", cos.as_ref()),
        ("sin", sin.as_ref()),
    ] {
        if let Some(other) = other {
            apart(name, other, &[&to_k.0, &to_v.0])?;
        }
    }
    let rotation = rotation(cos.as_ref(), sin.as_ref(), interleaved)?;
    let rows = Rows {
        heads,
        dim,
        k: k.as_slice(),
        v: v.as_slice(),
        rotation,
    };
    let (to_k, to_v) = (to_k.as_mut_slice(), to_v.as_mut_slice());
    py.detach(|| rows.place(to_k, to_v, threads))
        .map_err(refused)
}
