//! Function `place_rows`.

use blendstore_blend::rows::Rows;
use pyo3::prelude::*;

use crate::error::{refuse, refused};
use crate::input::{InPlace, Input, apart, heads_and_dim, rotation};

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
    let cos = cos.map(|cos| Input::new("cos", cos)).transpose()?;
    let sin = sin.map(|sin| Input::new("sin", sin)).transpose()?;

    let [heads, dim] = heads_and_dim("k", &k)?;
    for (name, other) in [("v", &v), ("to_k", &to_k.0), ("to_v", &to_v.0)] {
        if heads_and_dim(name, other)? != [heads, dim] {
            let accepted = format!("[n, {heads}, {dim}] float32, as k");
            return Err(refuse(name, format!("{:?}", other.shape()), accepted));
        }
    }
    apart("to_v", &to_v.0, &[&to_k.0])?;
    let angles = [("cos", &cos), ("sin", &sin)];
    let angles = angles
        .into_iter()
        .filter_map(|(name, of)| Some((name, of.as_ref()?)));
    for (name, other) in [("k", &k), ("v", &v)].into_iter().chain(angles) {
        apart(name, other, &[&to_k.0, &to_v.0])?;
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
