//! Class `Drift`.

use blendstore_blend::drift::{Column, Drift as Core, Layer, Settings, Span};
use pyo3::prelude::*;

use crate::error::{refuse, refused};
use crate::input::{InPlace, Input, apart, count, heads_and_dim, rotation, same_heads};

/// The drift correction of one prompt, on a CPU in float32 (immutable).
#[pyclass(frozen, module = "blendstore._core")]
pub(crate) struct Drift(Core);

#[pymethods]
impl Drift {
    #[new]
    #[pyo3(signature = (selected, columns, bias, bounds, spans, *, strength, temperature, still))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        selected: &Bound<'_, PyAny>,
        columns: &Bound<'_, PyAny>,
        bias: &Bound<'_, PyAny>,
        bounds: &Bound<'_, PyAny>,
        spans: &Bound<'_, PyAny>,
        strength: f32,
        temperature: f32,
        still: f32,
    ) -> PyResult<Self> {
        let selected = counts("selected", selected)?;
        let columns = counts("columns", columns)?;
        let bias = Input::<f32>::new("bias", bias)?;
        let bias = bias.as_slice();
        if bias.len() != columns.len() {
            let accepted = format!("{}, one for each of columns", columns.len());
            return Err(refuse("bias", format!("{} numbers", bias.len()), accepted));
        }
        let bounds = counts("bounds", bounds)?;
        let columns: Vec<Column> = columns
            .into_iter()
            .zip(bias)
            .map(|(place, &bias)| Column { place, bias })
            .collect();
        let documents = bounds.windows(2).map(|edges| {
            let found = columns.get(edges[0]..edges[1]);
            found.map(<[Column]>::to_vec).ok_or_else(|| {
                let value = format!("{}, {}", edges[0], edges[1]);
                refuse("bounds", value, format!("rising, up to {}", columns.len()))
            })
        });
        let spans = counts("spans", spans)?;
        let (rows, rest) = spans.as_chunks::<3>();
        if !rest.is_empty() {
            let value = format!("{} numbers", spans.len());
            return Err(refuse(
                "spans",
                value,
                "int64[n, 3]: (start, stop, document)",
            ));
        }
        let spans = rows.iter().map(|&[start, stop, document]| Span {
            tokens: start..stop,
            document,
        });
        let settings = Settings {
            strength,
            temperature,
            still,
        };
        let documents = documents.collect::<PyResult<_>>()?;
        Core::new(settings, selected, documents, spans.collect())
            .map(Self)
            .map_err(refused)
    }

    #[pyo3(signature = (k, v, fresh_k, fresh_v, cos = None, sin = None, *, interleaved = false, threads = 1))]
    #[allow(clippy::too_many_arguments)]
    fn carry(
        &self,
        py: Python<'_>,
        k: &Bound<'_, PyAny>,
        v: &Bound<'_, PyAny>,
        fresh_k: &Bound<'_, PyAny>,
        fresh_v: &Bound<'_, PyAny>,
        cos: Option<&Bound<'_, PyAny>>,
        sin: Option<&Bound<'_, PyAny>>,
        interleaved: bool,
        threads: usize,
    ) -> PyResult<()> {
        let (mut k, mut v) = (InPlace::new("k", k)?, InPlace::new("v", v)?);
        let fresh_k = Input::new("fresh_k", fresh_k)?;
        let fresh_v = Input::new("fresh_v", fresh_v)?;
        let (cos, sin) = (Input::optional("cos", cos)?, Input::optional("sin", sin)?);

        let [heads, dim] = heads_and_dim("k", &k.0)?;
        for (name, other) in [("v", &v.0), ("fresh_k", &fresh_k), ("fresh_v", &fresh_v)] {
            same_heads(name, other, [heads, dim], "k")?;
        }
        apart("v", &v.0, &[&k.0])?;
        for (name, other) in [
            ("fresh_k", Some(&fresh_k)),
            ("fresh_v", Some(&fresh_v)),
            ("cos", cos.as_ref()),
            ("sin", sin.as_ref()),
        ] {
            if let Some(other) = other {
                apart(name, other, &[&k.0, &v.0])?;
            }
        }
        let rotation = rotation(cos.as_ref(), sin.as_ref(), interleaved)?;
        let layer = Layer {
            heads,
            dim,
            k: k.as_mut_slice(),
            v: v.as_mut_slice(),
            fresh_k: fresh_k.as_slice(),
            fresh_v: fresh_v.as_slice(),
            rotation,
        };
        py.detach(|| self.0.carry(layer, threads)).map_err(refused)
    }
}

/// Items of an `int64` buffer, none of them negative.
fn counts(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    let input = Input::<i64>::new(name, object)?;
    let items = input.as_slice().iter();
    items.map(|&item| count(name, item)).collect()
}
